"""What a script says itself: `stoker.timed`, for batches that no loader makes, and metrics.

Needs no torch: TensorFlow's environments have none.
"""

import contextlib
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import islice
from typing import Generic, TypeVar, cast

from stoker.environment import from_environment
from stoker.errors import UsageError, what_of
from stoker.feed.bookkeeping import TrainerProcess, this_process, with_rank
from stoker.feed.timeline import Steps
from stoker.logs import EventName, Log
from stoker.records import Json, write_text
from stoker.records.base import word_of

_T = TypeVar("_T")

Samples = Callable[[_T], int] | int

# Of a batch, that are looked at for an array.
_MAX_PARTS = 1000


def timed(
    batches: Iterable[_T], *, samples: Samples[_T] | None = None, name: str | None = None
) -> "TimedBatches[_T]":
    """Returns the same batches; in a run, records the wait for each and the compute time after it.

        for batch in stoker.timed(dataset.iter_torch_batches(batch_size=64)):
            ...

    For batches that no `stoker.DataLoader` makes: Ray Data, tf.data, WebDataset, a generator. The
    run's record and `stoker evaluate` then have the step, its wait and the
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
        caller = sys._getframe(1)
        name = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    return TimedBatches(batches, name=name, samples=samples)


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
        timeline, number = process.timeline, process.number_of_source(self._name)
        epoch = TimedEpoch(timeline, loader=number, epoch=timeline.sums(number).epochs)
        epoch.opened(opening_seconds)
        return _TimedIterator(source, epoch, self._samples)

    def __len__(self) -> int:
        return len(cast("Sized", self._batches))

    def __bool__(self) -> bool:
        return bool(self._batches)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            # copy and pickle ask for such names before `_batches` exists: endless recursion.
            raise AttributeError(name)
        value: object = getattr(self._batches, name)
        return value


class TimedEpoch(Steps):
    """Timeline of one epoch over batches that stoker does not make; a profile changes `ask`."""


class _TimedIterator(Iterator[_T]):
    """Iterator over one epoch; not a generator: some sources continue after an error."""

    def __init__(
        self, source: Iterator[_T], epoch: TimedEpoch, samples: Samples[_T] | None
    ) -> None:
        self._source = source
        self._epoch = epoch
        self._samples: Samples[_T] = samples or num_samples
        weakref.finalize(self, epoch.end_in_finalizer)

    def __next__(self) -> _T:
        self._epoch.ask()
        try:
            batch = next(self._source)
        except StopIteration:
            self._epoch.end()
            raise
        samples = self._samples
        self._epoch.got(samples if isinstance(samples, int) else samples(batch))
        return batch


def num_samples(batch: object) -> int:
    """Returns the first dimension of the first array or tensor in it; else its length, else 1."""
    waiting = [batch]
    # Those within containers come later.
    for part in islice(waiting, _MAX_PARTS):
        # Not of a scalar, nor of a ragged or symbolic tensor.
        with contextlib.suppress(AttributeError, TypeError, ValueError, IndexError):
            return int(part.shape[0])  # type: ignore[attr-defined]
        if isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            waiting += part
    if isinstance(batch, Mapping):
        batch = next(iter(batch.values()), ())
    return len(batch) if isinstance(batch, Sequence) and not isinstance(batch, str | bytes) else 1


def _is_timed_already(batches: object, process: TrainerProcess) -> bool:
    # Of `stoker.to_device`, its loader.
    kind = type(getattr(batches, "_batches", batches))
    method = getattr(kind, "_get_iterator", None)
    if method is None:
        return isinstance(batches, TimedBatches)
    is_stokers = method.__module__.startswith("stoker.feed.")
    # A profile measures torch's own loaders.
    return is_stokers or process.settings.profile is not None


# ---- metrics


def log_metrics(**values: float) -> None:
    """Adds metrics to the run's training record; the last value of a name counts.

    Only rank 0 writes; other ranks may call it too. Outside a run, writes one log line.

    It raises nothing, because a metric must not end a training run. A value that is NaN or
    infinite, or no number at all, is recorded as such with a warning in the log; its gate fails.
    """
    process = with_rank(from_environment())
    if process.rank != 0:
        return
    log = Log(run=process.run_id, host=process.host)
    numbers = {name: _number(name, value, log) for name, value in values.items()}
    if process.metrics is None:
        log.event(EventName.METRICS, **numbers)
        return
    # JSON has no NaN: its word stands for it.
    finite: dict[str, Json] = {
        name: value if math.isfinite(value) else word_of(value) for name, value in numbers.items()
    }
    earlier: dict[str, Json] = {}
    try:
        if process.metrics.exists():
            earlier = dict(json.loads(process.metrics.read_text(encoding="utf-8")))
        # Atomically: a training run that is killed here keeps its earlier metrics.
        write_text(process.metrics, json.dumps(earlier | finite, indent=2, sort_keys=True) + "\n")
    except (OSError, UsageError, ValueError, TypeError) as err:
        log.event(EventName.METRICS_FAILED, reason=what_of(err))


def _number(name: str, value: object, log: Log) -> float:
    """Returns the value as a number: NaN, with a warning, if it is none."""
    number = math.nan
    # Whatever a library's conversion raises: a tensor of two elements is a RuntimeError.
    with contextlib.suppress(Exception):
        # Of arrays and tensors of one element; float() of some is a warning, so maybe an error.
        item = getattr(value, "item", None)
        number = float(item() if callable(item) else value)  # type: ignore[arg-type]
    if not math.isfinite(number):
        log.event(EventName.METRIC_NOT_A_NUMBER, metric=name, value=repr(value)[:80])
    return number
