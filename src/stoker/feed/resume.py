"""How a sampler is brought to where it was in another process.

It is run again from where the pass began, and what was yielded is skipped; a digest of all that it
gave proves that it gives the same again.
"""

import hashlib
import re
from array import array
from collections import deque
from collections.abc import Iterable, Iterator

import torch

from stoker.errors import UsageError
from stoker.feed import snapshots
from stoker.feed.rewind import Rewind
from stoker.feed.seeding import Occurrences, index_bytes
from stoker.feed.snapshots import Parts, Snapshot
from stoker.feed.state import Begun


def replay_sampler(
    sampler: Iterable[object],
    parts: Parts,
    begun: Begun,
    *,
    now: Snapshot,
    occurrences: Occurrences | None,
    epoch: int,
    rewind: Rewind | None = None,
) -> tuple[Iterator[object], deque[object]]:
    """Draws from `sampler` what `begun` says was drawn of it; sets random states to do so.

    Args:
        parts: The generators and samplers of the loader.
        now: When the state was taken.
        occurrences: Counts what was yielded, for `sample` seeding.
        epoch: Of the pass, in errors.
        rewind: Is told of every draw.

    Returns:
        The rest of the sampler, and what was drawn and not yielded.

    Raises:
        UsageError: If it does not give the same again.
    """
    num_drawn, at_iter = begun["num_drawn"], begun["at_iter"]
    assert at_iter is not None
    own = bool(at_iter["own"])
    # A sampler's own state may be stale at the start of a pass, and mended by its first draw:
    # then it is taken as the script made it.
    for with_own in (True, False) if own else (False,):
        if with_own:
            snapshots.set_own(parts, at_iter)
        snapshots.set_epochs(parts, at_iter)
        _set_random(parts, at_iter)
        iterator = iter(sampler)
        if begun["at_draw"] is not None:
            _set_random(parts, begun["at_draw"])
        digest, ahead = "", deque[object]()
        if rewind is not None:
            rewind.forget()
            rewind.before(0)
        if occurrences is not None:
            occurrences.clear()
        for number in range(num_drawn):
            for index in iterator:
                digest = digest_with(index, before=digest)
                if number >= begun["num_yielded"]:
                    ahead.append(index)
                elif occurrences is not None:
                    occurrences.of(index)
                break
            if rewind is not None:
                rewind.after(number + 1, num_taken=begun["num_yielded"])
        if begun["is_drawn_out"]:
            digest = "".join([digest, *("more" for _ in iterator)])
            if rewind is not None:
                rewind.after(num_drawn + 1, num_taken=begun["num_yielded"])
        if digest == begun["digest"]:
            return iterator, ahead
    if now["own"] and not _equal(now["own"], at_iter["own"]):
        # torchdata's convention: the state holds how far the sampler is.
        if rewind is not None:
            rewind.forget()
        snapshots.set_own(parts, now)
        _set_random(parts, now)
        iterator = iter(()) if begun["is_drawn_out"] else iter(sampler)
        return iterator, deque(begun["ahead"])
    names = ", ".join(type(each).__name__ for each in parts.samplers.values())
    raise UsageError(
        f"the sampler ({names}) did not give the same {num_drawn} batches again that it gave "
        "before the state was taken",
        where=f"epoch {epoch}, {begun['num_yielded']} batches yielded",
        fix="build the dataset and the sampler as in the run that saved the state, with the "
        "same set_epoch; a sampler with randomness of its own needs state_dict and "
        "load_state_dict",
    )


def digest_with(index: object, *, before: str) -> str:
    """Of all that a sampler gave, `index` being the last; 2 us for 32 whole numbers."""
    try:
        given = array("q", index if isinstance(index, list | tuple) else [index]).tobytes()
    except (TypeError, ValueError, OverflowError):
        # The address of an object is another in another process.
        given = re.sub(rb" at 0x[0-9a-f]+", b"", index_bytes(index))
    return hashlib.blake2b(before.encode() + given, digest_size=16).hexdigest()


def _set_random(parts: Parts, snapshot: Snapshot) -> None:
    snapshots.set_globals(snapshot)
    snapshots.set_generators(parts, snapshot)


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
