"""Shards of an iterable dataset: the batches of one, and how far the epoch is in each.

A shard is what one of torch's workers would make. The script's number of workers says how many
there are, and a state keeps them, whatever number of workers and hosts goes on with it.

A process that begins in mid-epoch loads the last state that the dataset gave of itself, if it gives
any (torchdata's convention), and makes again what followed it, without handing it out; else all
that was made before. That is exact if the dataset is deterministic.
"""

import contextlib
import io
import sys
from collections.abc import Callable, Iterable
from typing import Protocol, cast

import msgspec
import numpy as np
import torch

from stoker.feed.engine.messages import MAX_OWN_BYTES, OwnState
from stoker.feed.seeding import PreservedRandomStates

# A state of up to that size is taken after each batch; a larger one after one batch in `_SELDOM`.
_SMALL_STATE_BYTES = 4 << 10
_SELDOM = 16


# ---- the batches of a shard


class StreamFetcher(Protocol):
    """Torch's fetcher of an iterable dataset, which makes a batch."""

    def fetch(self, index: object) -> object: ...


class ShardBatches:
    """Batches of a shard, epoch by epoch; one that failed counts.

    Args:
        make_fetcher: Returns torch's fetcher of a new epoch.
        dataset: What it iterates over.
        outlives_epoch: Later epochs iterate over the dataset, too. It is not asked for a state
            then: Hugging Face's begin each later epoch where one was loaded.

    Attributes:
        position: Batches of this epoch that were made, or skipped by a state.
        is_exhausted: The epoch is over.
    """

    def __init__(
        self,
        make_fetcher: Callable[[], StreamFetcher],
        *,
        dataset: object,
        outlives_epoch: bool = False,
    ) -> None:
        self._outlives_epoch = outlives_epoch
        self._make_fetcher = make_fetcher
        self._dataset = dataset
        self._fetcher: StreamFetcher | None = None
        self.position = 0
        self.is_exhausted = False
        self._num_until_state = 0

    def begin(self, index: object, *, num_made: int = 0, own: OwnState | None = None) -> None:
        """Begins an epoch, and makes again what was made of it elsewhere.

        Args:
            index: For the fetcher: of how many samples a batch is.
            num_made: Batches that were made of it.
            own: A state of the dataset from among these.
        """
        self.position, self.is_exhausted = 0, False
        self._num_until_state = 0
        # Until it has begun: what is raised here stands in the place of a batch.
        self._fetcher = None
        state = _unpacked(own.state) if own is not None and own.state else {}
        if self._outlives_epoch and "dataset" in state:
            state = {}
        if "dataset" in state:
            self._dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
        fetcher = self._make_fetcher()
        if "iterator" in state:
            fetcher.dataset_iter.load_state_dict(state["iterator"])  # type: ignore[attr-defined]
        if state and own is not None:
            self.position = own.num_made
        self._fetcher = fetcher
        while self.position < num_made and not self.is_exhausted:
            # An error was raised in the script before; StopIteration ends the loop.
            with contextlib.suppress(Exception):
                self.make(index)

    def make(self, index: object) -> object:
        """Returns the next batch, or raises its exception; StopIteration if there is none."""
        if self._fetcher is None or self.is_exhausted:
            raise StopIteration
        self.position += 1
        try:
            return self._fetcher.fetch(index)
        except StopIteration:
            self.position -= 1
            self.is_exhausted = True
            raise

    def take_own(self) -> OwnState | None:
        """Returns the dataset's state behind the last batch, where it has one and one is due."""
        self._num_until_state -= 1
        if self._num_until_state >= 0:
            return None
        packed = b""
        # The user's code, which may draw random numbers, and return what cannot be packed.
        with contextlib.suppress(Exception), PreservedRandomStates():
            states = self._own_states()
            if not states:
                self._num_until_state = sys.maxsize
                return None
            file = io.BytesIO()
            torch.save(plain(states), file)
            packed = file.getvalue()
        if len(packed) > _SMALL_STATE_BYTES:
            self._num_until_state = _SELDOM
        if not packed or len(packed) > MAX_OWN_BYTES:
            return None
        return OwnState(num_made=self.position, state=packed)

    def _own_states(self) -> dict[str, object]:
        iterator = getattr(self._fetcher, "dataset_iter", None)
        # Where it is both, its __iter__ begins again: the state is loaded after it.
        parts = {"dataset": self._dataset} if self._dataset is not iterator else {}
        parts["iterator"] = iterator
        states: dict[str, object] = {}
        for name, part in parts.items():
            is_asked = not (self._outlives_epoch and part is self._dataset)
            if is_asked and hasattr(part, "state_dict") and hasattr(part, "load_state_dict"):
                states[name] = part.state_dict()
        return states


def plain(value: object) -> object:
    """Returns `value` without NumPy's types, which a safe `torch.load` refuses."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return {"array": torch.from_numpy(value.astype(np.int64)), "dtype": str(value.dtype)}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    return _each(value, plain)


def with_arrays(value: object) -> object:
    """Returns what `plain` was given."""
    if isinstance(value, dict) and set(value) == {"array", "dtype"}:
        return value["array"].numpy().astype(value["dtype"])
    return _each(value, with_arrays)


def _each(value: object, change: Callable[[object], object]) -> object:
    """Returns a container with its items changed."""
    if isinstance(value, dict):
        return {key: change(item) for key, item in value.items()}
    if type(value) is list or type(value) is tuple:
        return type(value)(map(change, cast("Iterable[object]", value)))
    return value


def _unpacked(packed: bytes) -> dict[str, object]:
    """Raises if they have any but plain types: a checkpoint is read without pickles."""
    states = torch.load(io.BytesIO(packed), weights_only=True)
    return cast("dict[str, object]", with_arrays(states))


# ---- how far the epoch is


def own_before(states: list[OwnState], num_made: int) -> OwnState | None:
    """Returns the last state from before, or after, `num_made` batches."""
    earlier = [state for state in states if state.num_made <= num_made]
    return earlier[-1] if earlier else None


class ShardProgress(msgspec.Struct, kw_only=True):
    """What the script got of one shard of an iterable dataset.

    Attributes:
        num_made: Batches up to the last one that the script got; one that failed counts.
        owns: The last states of a dataset that has one, in ascending order; some may be ahead of
            the script.
    """

    num_made: int = 0
    owns: list[OwnState] = []


class StreamProgress(msgspec.Struct, kw_only=True):
    """Progress of an epoch of an iterable dataset, as the script sees it.

    Attributes:
        num_workers: What `get_worker_info()` says in the dataset; 0: it is None.
        next_number: Shard s has the numbers s, s + S, s + 2S, ... for its batches.
        before_last: `next_number` before the last batch, and the number of that one's shard.
    """

    num_workers: int
    shards: list[ShardProgress]
    next_number: int = 0
    before_last: tuple[int, int] = (0, 0)

    def deliver(self, shard_number: int, own: OwnState | None = None) -> None:
        shard = self.shards[shard_number]
        self.before_last = (self.next_number, shard_number)
        self.next_number = shard.num_made * len(self.shards) + shard_number + 1
        shard.num_made += 1
        if own is not None:
            # The last batch may be held back from the script, on its way to the device.
            shard.owns = [*shard.owns[-1:], own]

    def is_exhausted(self, shard_number: int) -> bool:
        """Returns whether the order of batches has passed over the shard: it has no more."""
        next_of_shard = self.shards[shard_number].num_made * len(self.shards) + shard_number
        return next_of_shard < self.next_number

    def state(self, *, num_held: int) -> dict[str, object]:
        """Returns the state, of plain types; `num_held` is 1 if the last batch is held back."""
        seen = progress_from(msgspec.to_builtins(self))
        if num_held:
            seen.next_number, last = self.before_last
            seen.shards[last].num_made -= 1
        for shard in seen.shards:
            own = own_before(shard.owns, shard.num_made)
            shard.owns = [own] if own else []
        state: dict[str, object] = msgspec.to_builtins(seen)
        return state


def progress_from(state: object) -> StreamProgress:
    """Returns the progress that a state has, before the script gets a batch here."""
    return msgspec.convert(state, StreamProgress)
