"""`stoker.timed`: the timeline of `stoker.DataLoader` for batches that anything else makes.

Needs no torch: TensorFlow's environments have none.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Generic, TypeVar, cast

from stoker.feed.bookkeeping import TrainerProcess, this_process
from stoker.feed.foreign_loaders import imports_stokers
from stoker.feed.timeline import Steps

_T = TypeVar("_T")

Samples = Callable[[_T], int] | int

_MAX_DEPTH = 4


def timed(
    batches: Iterable[_T], *, samples: Samples[_T] | None = None, name: str | None = None
) -> "TimedBatches[_T]":
    """Returns the same batches; in a run, records the wait for each and the compute time after it.

        for batch in stoker.timed(dataset.iter_torch_batches(batch_size=64)):
            ...

    For batches that no `stoker.DataLoader` makes: Ray Data, tf.data, WebDataset, a generator. The
    run's record, its passive profile and `stoker evaluate` then have the step, its wait and the
    samples per second; the cost of making a single batch stays unknown. It costs about 5 us of CPU
    per step. Outside a run, and around loaders that stoker times already, the batches pass
    unchanged.

    `len` and attributes are the source's. Each `iter` is an epoch; it may be iterated over
    as often as the source may.

    Args:
        batches: Any iterable; its errors, and its iterators' errors, are passed on.
        samples: Samples in a batch: a number, or a function of the batch. Default: the first
            dimension of the first array in it, else its length.
        name: Batches with one name count as one loader, which may have a new source each epoch.
            Default: the file and line of this call.
    """
    if name is None:
        name = line_of_caller()
    kind = _SizedBatches if isinstance(batches, Sized) else TimedBatches
    return kind(batches, name=name, samples=samples)


def line_of_caller() -> str:
    caller = sys._getframe(2)
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"


class TimedBatches(Generic[_T]):
    """Timed batches, as `timed` returns them."""

    def __init__(
        self, batches: Iterable[_T], *, name: str, samples: Samples[_T] | None = None
    ) -> None:
        self._batches = batches
        self._name = name
        self._samples = samples

    def __iter__(self) -> Iterator[_T]:
        process = this_process()
        began = process.timeline.clock()
        source = iter(self._batches)
        opening_seconds = process.timeline.clock() - began
        if process.settings.output is None or _is_timed_already(self._batches, process):
            return source
        books = process.books_of_source(self._name)
        epoch = TimedEpoch(process, loader=books.number, epoch=books.next_epoch())
        epoch.opened(opening_seconds)
        return _TimedIterator(source, epoch, self._samples)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            # copy and pickle ask for such names before `_batches` exists: endless recursion.
            raise AttributeError(name)
        value: object = getattr(self._batches, name)
        return value


class _SizedBatches(TimedBatches[_T]):
    """Timed batches of a source that has a length, or may have one."""

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __bool__(self) -> bool:
        return bool(self._batches)


class TimedEpoch(Steps):
    """Timeline of one epoch over batches that stoker does not make."""

    def __init__(self, process: TrainerProcess, *, loader: int, epoch: int) -> None:
        super().__init__(process.timeline, loader=loader, epoch=epoch)
        self.usage = process.timeline.usage
        if self.usage is not None:
            self.usage.is_made_elsewhere(loader)


class _TimedIterator(Iterator[_T]):
    """Iterator over one epoch; not a generator: some sources continue after an error."""

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
        self._epoch.got(self._count(batch))
        if self._epoch.usage is not None:
            self._epoch.usage.count_batch(batch)
        return batch

    def _count(self, batch: _T) -> int:
        if self._samples is None:
            return num_samples(batch)
        return self._samples if isinstance(self._samples, int) else self._samples(batch)


def num_samples(batch: object) -> int:
    """Returns the first dimension of the first array or tensor in it; else its length, else 1."""
    rows = _rows(batch, depth=0)
    if rows is not None:
        return rows
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), ())
    return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 1


def _rows(batch: object, *, depth: int) -> int | None:
    shape = getattr(batch, "shape", None)
    if shape is not None:
        try:
            return int(shape[0])
        except (TypeError, ValueError, IndexError):
            # A scalar, or a ragged or symbolic tensor.
            return None
    if depth >= _MAX_DEPTH or isinstance(batch, str | bytes | bytearray):
        return None
    if not isinstance(batch, Mapping | Sequence):
        return None
    parts = batch.values() if isinstance(batch, Mapping) else batch
    rows = (_rows(part, depth=depth + 1) for part in parts)
    return next((count for count in rows if count is not None), None)


def _is_timed_already(batches: object, process: TrainerProcess) -> bool:
    # Of `stoker.to_device`, its loader.
    inner = getattr(batches, "_batches", batches) if _home(type(batches)) else batches
    method = getattr(type(inner), "_get_iterator", None)
    # A wrapped one is torch's in a script that imports stoker's class, see feed/replace.py.
    is_torchs_again = hasattr(method, "__wrapped__") and imports_stokers()
    if isinstance(batches, TimedBatches) or (_home(method) and not is_torchs_again):
        return True
    is_torchs = any(
        (base.__module__, base.__name__) == ("torch.utils.data.dataloader", "DataLoader")
        for base in type(inner).__mro__
    )
    return is_torchs and process.settings.profile is not None


def _home(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("stoker.feed.")
