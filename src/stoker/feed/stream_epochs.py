"""Epochs of Hugging Face's streams, which a script sets by `set_epoch`.

Such a stream keeps its epoch in shared memory, where torch's persistent workers see it. What makes
the batches in their place is told the epochs of all streams in a dataset when an epoch begins, and
gives each stream one of its own: a process that makes batches of an earlier epoch again must not
change what others see.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from stoker.feed.reachable import reachable

_MODULE = "datasets.iterable_dataset"
_CLASS = "IterableDataset"
_ATTRIBUTE = "_epoch"
# Objects that one walk visits, once an epoch; streams are near to the dataset.
_MAX_OBJECTS = 1000


def is_stream(value: object) -> bool:
    """Returns whether an object is a stream of Hugging Face's datasets."""
    # Asked of each object that a first batch waits for.
    if _MODULE not in sys.modules:
        return False
    bases = type(value).__mro__
    return any(base.__module__ == _MODULE and base.__qualname__ == _CLASS for base in bases)


def with_plain_epoch(stream: object) -> dict[str, object]:
    """Returns a stream's attributes, with its epoch as a number that no process shares."""
    attributes = dict(vars(stream))
    # Earlier versions have a number there, or none.
    if _ATTRIBUTE in attributes:
        attributes[_ATTRIBUTE] = int(attributes[_ATTRIBUTE])
    return attributes


def streams_in(parts: Mapping[str, object]) -> tuple[object, ...]:
    """Returns the streams that share their epoch, in a loader's parts; near ones first."""
    if _MODULE not in sys.modules:
        return ()
    within_reach = reachable(parts, max_objects=_MAX_OBJECTS, is_leaf=is_stream)
    return tuple(one.value for one in within_reach if _shares_its_epoch(one.value))


def _shares_its_epoch(value: object) -> bool:
    if not is_stream(value):
        return False
    is_shared = getattr(vars(value).get(_ATTRIBUTE), "is_shared", None)
    return is_shared is not None and bool(is_shared())


def set_epochs(dataset: object, epochs: Sequence[int]) -> None:
    """Sets the epochs of a dataset's streams, as its script would."""
    streams = streams_in({"dataset": dataset})
    # A dataset of another kind than the state's: what it makes is compared.
    if len(streams) != len(epochs):
        return
    for stream, epoch in zip(streams, epochs, strict=True):
        cast("_TellsEpoch", stream).set_epoch(epoch)


class _TellsEpoch(Protocol):
    def set_epoch(self, epoch: int) -> None: ...


class StreamEpochs:
    """Epochs of streams, as the trainer sets them, and as this process has them."""

    def __init__(self, streams: Sequence[object]) -> None:
        """Args: streams: They share their epochs with the trainer, or are it."""
        self._streams = streams
        self._shared = [vars(stream)[_ATTRIBUTE] for stream in streams]

    def read(self) -> tuple[int, ...]:
        """Returns the epochs that the trainer has set."""
        return tuple(map(int, self._shared))

    def set(self, epochs: Sequence[int]) -> None:
        """Has the streams begin those epochs in this process, whatever the trainer sets."""
        # Of another dataset than the state's: what it makes is compared.
        if len(epochs) != len(self._streams):
            return
        for stream, shared, epoch in zip(self._streams, self._shared, epochs, strict=True):
            vars(stream)[_ATTRIBUTE] = shared.new_tensor(epoch)
