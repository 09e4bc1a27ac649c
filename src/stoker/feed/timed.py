"""`stoker.timed` writes the timeline of `stoker.DataLoader` for batches that anything else makes.

It needs no torch: TensorFlow's environments have none.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Generic, TypeVar, cast

from stoker.feed.bookkeeping import TrainerProcess, this_process
from stoker.feed.own_loaders import imports_stokers
from stoker.feed.timeline import Steps

_T = TypeVar("_T")

Samples = Callable[[_T], int] | int

_MAX_DEPTH = 4


def timed(
    batches: Iterable[_T], *, samples: Samples[_T] | None = None, name: str | None = None
) -> "TimedBatches[_T]":
    """Returns the same batches; in a run, records how long each was waited for and computed with.

        for batch in stoker.timed(dataset.iter_torch_batches(batch_size=64)):
            ...

    For batches that are none of a `stoker.DataLoader`: Ray Data, tf.data, WebDataset, a generator.
    The run's record, its passive profile and `stoker evaluate` then know the step, its wait and the
    samples per second; what a single batch costs to make stays unknown. It costs about 5 us of CPU
    per step. Outside of a run, and around loaders that stoker times already, only the batches are
    passed on.

    `len` and attributes are those of the source. It may be iterated over as often as the source
    may: each `iter` is an epoch.

    Args:
        batches: Any iterable; its errors, and those of its iterators, are passed on.
        samples: Samples in a batch: a number, or a function of the batch. Absent: the first
            dimension of the first array in it, else its length.
        name: Batches of one name are those of one loader, which a new source may give each epoch.
            Absent: its name is the line of the script that this is called on.
    """
    if name is None:
        name = line_of_caller()
    kind = _SizedBatches if isinstance(batches, Sized) else TimedBatches
    return kind(batches, name=name, samples=samples)


def line_of_caller() -> str:
    """Returns file and line that called the function which asks."""
    caller = sys._getframe(2)
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


class TimedBatches(Generic[_T]):
    """Holds batches that are timed, as `timed` gives them."""

    def __init__(
        self, batches: Iterable[_T], *, name: str, samples: Samples[_T] | None = None
    ) -> None:
        self._batches = batches
        self._name = name
        self._samples = samples

    def __iter__(self) -> Iterator[_T]:
        process = this_process()
        source = iter(self._batches)
        if process.settings.output is None or _is_timed_already(self._batches, process):
            return source
        books = process.books_of_source(self._name)
        epoch = TimedEpoch(process, loader=books.number, epoch=books.next_epoch())
        return _TimedIterator(source, epoch, self._samples)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            # copy and pickle ask for such names before there is a `_batches`: it would ask itself.
            raise AttributeError(name)
        value: object = getattr(self._batches, name)
        return value


class _SizedBatches(TimedBatches[_T]):
    """Holds the batches of a source that has a length, or may have one."""

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __bool__(self) -> bool:
        return bool(self._batches)


class TimedEpoch:
    """Times one epoch over batches that stoker does not make."""

    def __init__(self, process: TrainerProcess, *, loader: int, epoch: int) -> None:
        self._usage = process.timeline.usage
        self._steps: Steps = process.timeline.epoch(loader=loader, epoch=epoch)
        if self._usage is not None:
            self._usage.is_made_elsewhere(loader)

    def ask(self) -> None:
        """Notes that a batch is asked for: the step before is complete."""
        self._steps.ask()

    def got(self, batch: object, *, samples: int) -> None:
        """Notes that the batch is there."""
        self._steps.got(samples)
        if self._usage is not None:
            self._usage.saw(batch)

    def took(self, *, seconds: float, wait: float, samples: int) -> None:
        """Notes a step that ends now, where its batch was asked for out of our sight."""
        self._steps.took(seconds=seconds, wait=wait, samples=samples)

    def end(self) -> None:
        """Notes that the epoch is over; may be called twice."""
        self._steps.end()

    def end_in_finalizer(self) -> None:
        """Notes that nothing refers to the epoch any more; safe in a finalizer."""
        self._steps.end_in_finalizer()


class _TimedIterator(Iterator[_T]):
    """Iterates over one epoch; no generator, because some sources go on after a batch's error."""

    def __init__(
        self, source: Iterator[_T], epoch: TimedEpoch, samples: Samples[_T] | None
    ) -> None:
        self._source = source
        self._epoch = epoch
        self._samples = samples
        weakref.finalize(self, epoch.end_in_finalizer)

    def __next__(self) -> _T:
        self._epoch.ask()
        try:
            batch = next(self._source)
        except StopIteration:
            self._epoch.end()
            raise
        self._epoch.got(batch, samples=self._count(batch))
        return batch

    def _count(self, batch: _T) -> int:
        if self._samples is None:
            return num_samples(batch)
        return self._samples if isinstance(self._samples, int) else self._samples(batch)


def num_samples(batch: object) -> int:
    """Returns the first dimension of the first array or tensor in it; else its length, else 1."""
    found = _rows(batch, depth=0)
    if found is not None:
        return found
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), ())
    return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 1


def _rows(batch: object, *, depth: int) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        try:
            return int(shape[0])
        except (TypeError, ValueError, IndexError):
            # A scalar, or a ragged or symbolic tensor that does not know.
            return None
    if depth >= _MAX_DEPTH or isinstance(batch, str | bytes | bytearray):
        return None
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, Sequence):
        parts = batch
    for part in parts:
        rows = _rows(part, depth=depth + 1)
        if rows is not None:
            return rows
    return None


def _is_timed_already(batches: object, process: TrainerProcess) -> bool:
    """Returns whether its iterators write the timeline themselves: stoker's and a profile's do."""
    # Of `stoker.to_device`, its loader.
    inner = getattr(batches, "_batches", batches) if _home(type(batches)) else batches
    if isinstance(batches, TimedBatches) or _is_through_stoker(type(inner)):
        return True
    is_torchs = any(
        (each.__module__, each.__name__) == ("torch.utils.data.dataloader", "DataLoader")
        for each in type(inner).__mro__
    )
    return is_torchs and process.settings.profile is not None


def _is_through_stoker(kind: type) -> bool:
    """Returns whether loaders of this class iterate through stoker."""
    method = getattr(kind, "_get_iterator", None)
    # One that is wrapped is torch's own in a script that imports stoker's class: feed/replace.py.
    return _home(method) and not (hasattr(method, "__wrapped__") and imports_stokers())


def _home(thing: object) -> bool:
    """Returns whether stoker's feed defines `thing`."""
    return str(getattr(thing, "__module__", "")).startswith("stoker.feed.")
