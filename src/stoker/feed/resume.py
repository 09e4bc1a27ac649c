"""The state of a loader: what `state_dict` gives and `load_state_dict` takes.

A state says how the pass under way began (random states, samplers' states, base seed) and how far
it came. The pass that goes on runs the sampler again and skips what was yielded; a digest of all
that the sampler gave proves that it gives the same again. No word of a state is about workers or
hosts, so any number and placement of them may take it.
"""

import copy
import hashlib
import re
from array import array
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import TypedDict, cast

import torch
from torch.utils.data import DataLoader, _DatasetKind

from stoker.errors import UsageError
from stoker.feed import snapshots
from stoker.feed.process import LoaderBooks, Process
from stoker.feed.seeding import index_bytes
from stoker.feed.snapshots import Parts, Snapshot, Stateful

VERSION = 1


class Begun(TypedDict):
    """Of a pass under way.

    Attributes:
        num_yielded: Batches that the script got.
        num_drawn: Batches that the sampler was asked for: those that are being made, too.
        digest: Of all that the sampler gave.
        at_iter: When the sampler's iterator was made.
        at_draw: When it was first asked; None: not yet.
        ahead: What was drawn and not yielded, where a sampler keeps a state of its own.
        dataset: The own state of an iterable dataset.
    """

    num_yielded: int
    num_drawn: int
    digest: str
    at_iter: Snapshot | None
    at_draw: Snapshot | None
    ahead: list[object]
    dataset: object


class LoaderState(TypedDict):
    """The state of a loader.

    Attributes:
        version: Of this form.
        loader: What the loader that takes the state has to have in common.
        epoch: Of the pass under way, or of the next.
        num_yielded: Batches of it that the script got.
        base_seed: Of the pass under way, or of the last; None: there was none.
        keeps_seed: All passes have one base seed, as with torch's persistent workers.
        begun: None between passes.
        now: At the time of the state.
    """

    version: int
    loader: dict[str, object]
    epoch: int
    num_yielded: int
    base_seed: int | None
    keeps_seed: bool
    begun: Begun | None
    now: Snapshot


@dataclass(slots=True, kw_only=True)
class Position:
    """How far a pass is.

    Attributes:
        first: Batches that were yielded before this process took the pass up.
        num_yielded: Batches that the script got in all; None: not known, they come out of order.
        num_handed: Batches whose indices were handed out, to be made.
        ahead: See Begun.
        resumed: What is still to be made good of a loaded state.
        is_inline: Batches are made in this process.
    """

    epoch: int
    base_seed: int | None = None
    first: int = 0
    num_yielded: int | None = 0
    num_handed: int = 0
    num_drawn: int = 0
    digest: str = ""
    at_iter: Snapshot | None = None
    at_draw: Snapshot | None = None
    ahead: deque[object] = field(default_factory=deque)
    resumed: LoaderState | None = None
    is_inline: bool = False
    is_over: bool = False


class Order:
    """The index sampler of a loader as its iterators see it: what it gives is counted.

    Args:
        loader: Whose sampler it is.
        books: Of the loader.
        is_inline: Batches are made in this process.
    """

    def __init__(
        self, loader: "DataLoader[object]", books: LoaderBooks, *, is_inline: bool
    ) -> None:
        self._books = books
        self._is_inline = is_inline
        self._sampler = loader._index_sampler
        self._generator = loader.generator
        self._dataset = loader.dataset
        self._is_map_style = loader._dataset_kind == _DatasetKind.Map
        self._parts = snapshots.parts_of(loader)
        self._keeps_ahead = bool(self._parts.stateful())
        self._before_seed = torch.empty(0)
        self._draws_seed = False
        self.begin(again=False)

    def begin(self, *, again: bool) -> None:
        """A new pass, or the one of a state that was loaded.

        Args:
            again: By an iterator that had passes before, whose base seed torch keeps.
        """
        books = self._books
        state, books.loaded = books.loaded, None
        last = books.position
        if state is None and last is not None and last.resumed is not None:
            state = last.resumed  # Its iterator was dropped before it drew anything.
        self._draws_seed = False
        if state is not None:
            books.epochs, books.keeps_seed = state["epoch"], state["keeps_seed"]
            books.base_seed = state["base_seed"]
        self.position = books.position = Position(
            epoch=books.next_epoch(), is_inline=self._is_inline
        )
        if state is not None and state["begun"] is not None:
            self.position.resumed = state
            self.position.first = self.position.num_yielded = state["num_yielded"]
            self.position.num_handed = state["num_yielded"]
            self.position.base_seed = state["base_seed"]
        elif again:
            self._draws_seed = books.keeps_seed is False or books.base_seed is None
            self.position.base_seed = books.base_seed

    @property
    def base_seed(self) -> int:
        """Of the pass."""
        return self.position.base_seed or 0

    def drew_base_seed(self, seed: int) -> None:
        """torch drew a base seed: it is the pass's, unless a state says another."""
        books, position = self._books, self.position
        is_kept = bool(books.keeps_seed) and books.base_seed is not None
        if position.resumed is not None or is_kept:
            position.base_seed = books.base_seed
            self._set_seeding_state(self._before_seed)
        else:
            position.base_seed = books.base_seed = seed

    def __len__(self) -> int:
        return len(cast("Sized", self._sampler))

    def __iter__(self) -> Iterator[object]:
        """torch may ask twice for one pass, as at a first with workers: the last one counts."""
        position = self.position
        if position.resumed is not None:
            if not self._is_map_style:
                self._resume_stream(position, position.resumed)
            self._before_seed = self._seeding_state()
            return _Draws(self, position, iter(()))
        position.num_handed, position.num_drawn, position.digest = 0, 0, ""
        position.at_draw = None
        position.ahead.clear()
        if self._is_map_style:
            position.at_iter = snapshots.take(self._parts)
        iterator = iter(self._sampler)
        self._before_seed = self._seeding_state()
        if self._draws_seed:
            drawn = torch.empty((), dtype=torch.int64).random_(generator=self._generator)
            position.base_seed = self._books.base_seed = int(drawn.item())
        return _Draws(self, position, iterator)

    def before_first(self, position: Position) -> None:
        """The sampler is about to be asked for the first time."""
        if self._is_map_style:
            position.at_draw = snapshots.take(self._parts, with_own=False)

    def count(self, position: Position, index: object) -> None:
        """The sampler gave `index`."""
        position.num_drawn += 1
        if self._is_map_style:
            position.digest = _digest(position.digest, index)
            if self._keeps_ahead:
                position.ahead.append(index)

    def replay(self, position: Position) -> tuple[Iterator[object], deque[object]]:
        """Brings the sampler to where it was; the rest of it, and what was drawn and not yielded.

        The global random states are as before: `load_state_dict` has set them.

        Raises:
            UsageError: If the sampler does not give the same again.
        """
        state = position.resumed
        assert state is not None
        begun = state["begun"]
        assert begun is not None
        here = snapshots.take(self._parts, with_own=False)
        try:
            iterator, ahead = self._replay(begun, state["now"])
            # Where the sampler draws while it is asked, it is the script's draws that are next.
            snapshots.set_generators(self._parts, state["now"])
        finally:
            snapshots.set_globals(here)
        position.num_drawn, position.digest = begun["num_drawn"], begun["digest"]
        position.at_iter, position.at_draw = begun["at_iter"], begun["at_draw"]
        if self._keeps_ahead:
            position.ahead = deque(ahead)
        position.resumed = None
        return iterator, ahead

    def _replay(self, begun: Begun, now: Snapshot) -> tuple[Iterator[object], deque[object]]:
        num_drawn, at_iter = begun["num_drawn"], begun["at_iter"]
        assert at_iter is not None
        own = bool(at_iter["own"])
        # A sampler's own state may be stale at the start of a pass, and mended by its first draw:
        # then it is taken as the script made it.
        for with_own in (True, False) if own else (False,):
            if with_own:
                snapshots.set_own(self._parts, at_iter)
            snapshots.set_epochs(self._parts, at_iter)
            self._set_random(at_iter)
            iterator = iter(self._sampler)
            if begun["at_draw"] is not None:
                self._set_random(begun["at_draw"])
            digest, ahead = "", deque[object]()
            for number in range(num_drawn):
                for index in iterator:
                    digest = _digest(digest, index)
                    if number >= begun["num_yielded"]:
                        ahead.append(index)
                    break
            if digest == begun["digest"]:
                return iterator, ahead
        if now["own"] and not _equal(now["own"], at_iter["own"]):
            # torchdata's convention: the state holds how far the sampler is.
            snapshots.set_own(self._parts, now)
            self._set_random(now)
            return iter(self._sampler), deque(begun["ahead"])
        names = ", ".join(type(sampler).__qualname__ for sampler in self._parts.samplers.values())
        raise UsageError(
            f"the sampler ({names}) did not give the same {num_drawn} batches again that it gave "
            "before the state was taken",
            where=f"epoch {self.position.epoch}, {begun['num_yielded']} batches yielded",
            fix="build the dataset and the sampler as in the run that saved the state, with the "
            "same set_epoch; a sampler with randomness of its own needs state_dict and "
            "load_state_dict",
        )

    def _resume_stream(self, position: Position, state: LoaderState) -> None:
        begun = state["begun"]
        assert begun is not None
        if not position.is_inline or not isinstance(self._dataset, Stateful):
            raise _stream_error(self._dataset)
        self._dataset.load_state_dict(copy.deepcopy(begun["dataset"]))
        position.num_drawn = begun["num_drawn"]
        position.resumed = None

    def _set_random(self, snapshot: Snapshot) -> None:
        snapshots.set_globals(snapshot)
        snapshots.set_generators(self._parts, snapshot)

    def _seeding_state(self) -> torch.Tensor:
        return torch.get_rng_state() if self._generator is None else self._generator.get_state()

    def _set_seeding_state(self, state: torch.Tensor) -> None:
        if self._generator is None:
            torch.set_rng_state(state)
        else:
            self._generator.set_state(state)


class _Draws:
    """The iterator of an `Order`; like the sampler's own it may go on after an error."""

    def __init__(self, order: Order, position: Position, iterator: Iterator[object]) -> None:
        self._order = order
        self._position = position
        self._iterator = iterator
        self._ahead: deque[object] = deque()

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        position = self._position
        if position.resumed is not None:
            self._iterator, self._ahead = self._order.replay(position)
        if self._ahead:
            position.num_handed += 1
            return self._ahead.popleft()
        if position.at_draw is None:
            self._order.before_first(position)
        index = next(self._iterator)
        self._order.count(position, index)
        position.num_handed += 1
        return index


def yielded(position: Position, num_here: int | None) -> None:
    """The script got batches.

    Args:
        num_here: Since this process took the pass up; None: it is not known which.
    """
    position.num_yielded = None if num_here is None else position.first + num_here
    ahead = position.ahead
    while ahead and len(ahead) > position.num_drawn - (position.num_yielded or 0):
        ahead.popleft()


def state_of(loader: "DataLoader[object]", process: Process) -> LoaderState:
    """The state of `loader` now.

    Raises:
        UsageError: In the middle of a pass over an iterable dataset, or one out of order.
    """
    parts = snapshots.parts_of(loader)
    now = snapshots.take(parts)
    books = process.known_books(loader)
    if books is None:
        return _state(loader, process, parts, LoaderBooks(0), now)
    position = books.position
    loaded = books.loaded or (None if position is None else position.resumed)
    if loaded is not None:
        return _not_begun(loaded, now)
    state = _state(loader, process, parts, books, now)
    if position is not None and not position.is_over:
        state["epoch"] = position.epoch
        state["begun"] = begun = _begun(loader, position)
        state["num_yielded"] = begun["num_yielded"]
    return state


def load(loader: "DataLoader[object]", process: Process, state: object) -> None:
    """Has the next pass over `loader` go on from `state`.

    Raises:
        UsageError: If it is the state of something else: all that differs is named.
    """
    if not isinstance(state, dict) or state.get("version") != VERSION or "loader" not in state:
        raise UsageError(
            "this is no state of stoker's DataLoader, or one of another version",
            where=f"version {state.get('version')!r}, expected {VERSION}"
            if isinstance(state, dict)
            else f"a {type(state).__name__}",
            fix="hand load_state_dict what state_dict gave",
        )
    given = cast("LoaderState", state)
    parts = snapshots.parts_of(loader)
    here = _facts(loader, process, parts)
    differing = [
        f"{name.replace('_', ' ')}: {given['loader'].get(name)!r} in the state, {value!r} here"
        for name, value in here.items()
        if given["loader"].get(name) != value
    ]
    if differing:
        raise UsageError(
            f"the state is of another loader: {'; '.join(differing)}",
            where=f"rank {process.settings.rank}, epoch {given['epoch']} of the state",
            fix="build the loader as it was when its state was saved (workers and hosts may "
            "differ); each rank has its own state",
        )
    process.books(loader).loaded = copy.deepcopy(given)
    snapshots.set_globals(given["now"])
    snapshots.set_generators(parts, given["now"])
    if given["begun"] is None:
        snapshots.set_epochs(parts, given["now"])
        snapshots.set_own(parts, given["now"])


def _state(
    loader: "DataLoader[object]", process: Process, parts: Parts, books: LoaderBooks, now: Snapshot
) -> LoaderState:
    keeps_seed = books.keeps_seed
    if keeps_seed is None:
        keeps_seed = loader.persistent_workers and loader.num_workers > 0
    return LoaderState(
        version=VERSION,
        loader=_facts(loader, process, parts),
        epoch=books.epochs,
        num_yielded=0,
        base_seed=books.base_seed,
        keeps_seed=keeps_seed,
        begun=None,
        now=now,
    )


def _not_begun(loaded: LoaderState, now: Snapshot) -> LoaderState:
    """The state that was loaded, where no batch of it was drawn yet."""
    state = copy.deepcopy(loaded)
    if state["begun"] is None:
        state["now"] = now
    else:
        here = state["now"]
        here["torch"], here["python"], here["numpy"] = now["torch"], now["python"], now["numpy"]
    return state


def _begun(loader: "DataLoader[object]", position: Position) -> Begun:
    if position.num_yielded is None:
        raise UsageError(
            "in the middle of a pass, a loader with in_order=False has no state: it is not known "
            "which batches are still to come",
            fix="use in_order=True, or save the state between passes",
        )
    dataset: object = None
    if loader._dataset_kind != _DatasetKind.Map:
        if not position.is_inline or not isinstance(loader.dataset, Stateful):
            raise _stream_error(loader.dataset)
        dataset = copy.deepcopy(loader.dataset.state_dict())
    return Begun(
        num_yielded=position.num_yielded,
        num_drawn=position.num_drawn,
        digest=position.digest,
        at_iter=position.at_iter,
        at_draw=position.at_draw,
        ahead=[snapshots.plain(index) for index in position.ahead],
        dataset=dataset,
    )


def _stream_error(dataset: object) -> UsageError:
    return UsageError(
        f"how far an iterable dataset ({type(dataset).__qualname__}) is cannot be kept in the "
        "middle of a pass: it is known to its workers only",
        fix="save the state between passes; or give the dataset state_dict and load_state_dict "
        "and use num_workers=0 without a data group",
    )


def _facts(loader: "DataLoader[object]", process: Process, parts: Parts) -> dict[str, object]:
    """What a state and the loader that takes it must have in common."""
    try:
        length = len(cast("Sized", loader.dataset))
    except TypeError:
        length = None
    batch_sampler = parts.samplers.get("batch_sampler")
    return {
        "dataset_length": length,
        "samplers": {name: _name_of(sampler) for name, sampler in parts.samplers.items()},
        "generators": sorted(parts.generators),
        "batch_size": loader.batch_size or getattr(batch_sampler, "batch_size", None),
        "drop_last": loader.drop_last or bool(getattr(batch_sampler, "drop_last", False)),
        "world_size": process.settings.world_size,
        "rank": process.settings.rank,
    }


def _name_of(sampler: object) -> str:
    return f"{type(sampler).__module__}.{type(sampler).__qualname__}"


def _digest(before: str, index: object) -> str:
    """Of all that a sampler gave, the last one included; 2 us for 32 whole numbers."""
    try:
        given = array("q", index if isinstance(index, list | tuple) else [index]).tobytes()
    except (TypeError, ValueError, OverflowError):
        # The address of an object is another in another process.
        given = re.sub(rb" at 0x[0-9a-f]+", b"", index_bytes(index))
    return hashlib.blake2b(before.encode() + given, digest_size=16).hexdigest()


def _equal(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)
