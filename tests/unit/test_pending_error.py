"""Errors that are raised later than they came keep no variable of the calls they go through."""

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from stoker.environment import ProcessSettings
from stoker.errors import FeedError, FeedLostError, ServiceError, UsageError
from stoker.feed.bad_samples import BadSamples
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.timeline import Timeline
from stoker.feed.tolerance import TolerantCollate, TolerantDataset
from stoker.feed.wire.protocol import BadSample
from stoker.host.processes import start_to_last
from stoker.pending_error import PendingError, fresh
from stoker.records import FeedSettings
from stoker.repeat import within


class Variable:
    """A variable of a function that calls."""


@pytest.fixture(autouse=True)
def _no_cycle_is_looked_for() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def is_freed(call: Callable[[], object]) -> bool:
    """Returns whether a caller's variables are freed as it returns; the call may raise."""

    def caller() -> "weakref.ref[Variable]":
        variable = Variable()
        with contextlib.suppress(LookupError, RuntimeError, FeedError):
            call()
        return weakref.ref(variable)

    return caller()() is None


def raised(make: Callable[[], BaseException]) -> BaseException:
    """Returns an error with the traceback of a call, which has no variable that names it."""
    try:
        raise make()
    except BaseException as err:
        return err


def test_a_pending_error_is_given_up_as_it_is_raised():
    pending = PendingError(raised(lambda: LookupError("a sample")))
    with pytest.raises(LookupError, match="a sample"):
        raise pending.take()
    assert not pending.is_there
    kept = PendingError()

    def fail() -> None:
        kept.keep(raised(LookupError))
        raise kept.take()

    assert is_freed(fail)


def test_a_pending_error_is_moved_and_dropped():
    end = PendingError(StopIteration())
    assert end.is_end
    there = end.moved()
    assert not end.is_there
    assert there.is_end
    there.drop()
    assert not there.is_there
    assert not there.moved().is_there


def test_an_error_of_another_thread_keeps_nothing():
    def fail() -> None:
        raise LookupError("no such host")

    assert is_freed(lambda: within(60.0, fail))
    with pytest.raises(LookupError, match="no such host"):
        within(60.0, fail)
    assert within(60.0, lambda: None) is None


def test_a_child_that_a_thread_cannot_start_keeps_nothing():
    def fail() -> None:
        raise RuntimeError("no process is left")

    assert is_freed(lambda: within(60.0, lambda: start_to_last(fail)))
    with pytest.raises(RuntimeError, match="no process"):
        within(60.0, lambda: start_to_last(fail))


class Broken(torch.utils.data.Dataset):
    """Samples of which the first few calls raise."""

    def __init__(self, num_broken: int) -> None:
        self.num_broken = num_broken

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        self.num_broken -= 1
        if self.num_broken >= 0:
            raise LookupError(f"sample {index} is broken")
        return index


class Endless(Broken):
    """The same, without a length."""

    __len__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("num_broken", [1, 2, 100])
@pytest.mark.parametrize("kind", [Broken, Endless])
def test_bad_samples_in_a_row_keep_nothing(kind, num_broken):
    dataset = TolerantDataset(kind(num_broken), "replace")
    assert is_freed(lambda: dataset[3])


def test_a_batch_of_bad_samples_alone_keeps_nothing():
    dataset = TolerantDataset(Endless(100), "skip")
    marks = [dataset[0], dataset[1]]
    collate = TolerantCollate(lambda samples: samples, dataset, is_batched=True)
    assert is_freed(lambda: collate(marks))
    with pytest.raises(RuntimeError, match="sample 0"):
        collate(marks)


def test_too_many_bad_samples_keep_nothing():
    feed = FeedSettings(on_error="skip", max_errors=0)
    process = TrainerProcess(ProcessSettings(feed=feed), Timeline(None))
    counts = BadSamples()
    counts.count((BadSample(index="3", error="LookupError", text="broken"),), samples=4)

    def check() -> None:
        process.check_bad(counts, epoch=0, whole=4)

    with pytest.raises(FeedError, match="1 of 4 samples"):
        check()
    assert is_freed(check)


class Asked(Exception):
    """An error whose constructor has other arguments than it keeps."""

    def __init__(self, *, number: int) -> None:
        super().__init__("asked")
        self.number = number


ERRORS = [
    FeedLostError("no data worker is left", where="rank 0", fix="stoker doctor"),
    UsageError("wrong"),
    ServiceError("refused", code="Throttling", kind="away"),
    OSError(2, "No such file", "/data/0.jpg"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    KeyError("label"),
    ExceptionGroup("two", [ValueError("one"), KeyError("other")]),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_fresh_error_is_as_the_original(error):
    original = raised(lambda: error)
    original.add_note("sample 3")
    original.__cause__ = LookupError()
    copied = fresh(original)
    assert copied is not original
    assert (type(copied), str(copied)) == (type(original), str(original))
    assert vars(copied) == vars(original)
    assert copied.__cause__ is original.__cause__
    assert copied.__traceback__ is original.__traceback__


def test_an_error_that_cannot_be_copied_is_itself():
    original = Asked(number=3)
    assert fresh(original) is original
