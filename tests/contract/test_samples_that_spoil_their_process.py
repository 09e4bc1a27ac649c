"""Samples that change their process for good: other samples of it are made as if they were not."""

import contextlib
import faulthandler
import functools
import inspect
import locale
import os
import resource
import signal
import socket
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stoker.feed.workers import splitting
from stoker.feed.workers.crashes import LossRules, LossSearch, WorkerDeath
from stoker.feed.workers.pipe import MakeAgain, MakeAlone
from stoker.feed.workers.progress import SamplePlace
from support.loss_pools import job, made, pool_of

MARKED, SIZE = 13, 30
OUT_OF_MEMORY = ("MemoryError", "SystemError")

pytestmark = [
    pytest.mark.timeout(200),
    # A forked process may start threads.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:deprecated:UserWarning"),
]


def lowered(name: str, soft: int, *, is_hard: bool = True) -> Callable[[], None]:
    number = getattr(resource, name)

    def lower() -> None:
        _, hard = resource.getrlimit(number)
        resource.setrlimit(number, (soft, soft if is_hard else hard))

    return lower


def sockets_here() -> list[int]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.append(int(name))
    return found


# Those of the process of tests, as other tests need them: they are in its forks, too.
others: set[int] = set()
kept: list[Any] = []


def own_sockets() -> list[int]:
    """Returns the descriptors of a worker's sockets."""
    return [descriptor for descriptor in sockets_here() if descriptor not in others]


def put_another_socket_in_place() -> None:
    ours = own_sockets()
    kept.extend(socket.socketpair())
    for descriptor in ours:
        os.dup2(kept[0].fileno(), descriptor)


def close_sockets() -> None:
    for descriptor in own_sockets():
        os.close(descriptor)


def write_to_sockets() -> None:
    for descriptor in own_sockets():
        os.write(descriptor, b"\xff" * 100)


# What leaves no worker that could make a batch, and what is said of it.
UNFIT = MappingProxyType(
    {
        "files": (lowered("RLIMIT_NOFILE", 3), "RLIMIT_NOFILE is 3"),
        "files, softly": (lowered("RLIMIT_NOFILE", 3, is_hard=False), "RLIMIT_NOFILE is 3"),
        "memory": (lowered("RLIMIT_AS", 1 << 20), "RLIMIT_AS is 1048576"),
        "data": (lowered("RLIMIT_DATA", 1 << 20), "RLIMIT_DATA is 1048576"),
        "size of files": (lowered("RLIMIT_FSIZE", 0), "RLIMIT_FSIZE is 0"),
        "stack": (lowered("RLIMIT_STACK", 1 << 14), "RLIMIT_STACK is 16384"),
        "CPU": (lowered("RLIMIT_CPU", 2), "RLIMIT_CPU is 2"),
        "another socket": (put_another_socket_in_place, "lost its connection"),
        "closed": (close_sockets, "lost its connection"),
        "written": (write_to_sockets, "malformed message"),
    }
)


def lower_recursion() -> None:
    # Enough for itself, and for nothing that is done with its error.
    depth = len(inspect.stack(0))
    sys.setrecursionlimit(depth + 20)


# What a sample leaves changed as it raises.
CHANGES: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "dtype": lambda: torch.set_default_dtype(torch.float64),
        "device": lambda: torch.set_default_device("meta"),
        "gradients": lambda: torch.set_grad_enabled(False),
        "numpy": lambda: np.seterr(all="raise"),
        "environment": os.environ.clear,
        "warnings": lambda: warnings.filterwarnings("error", message="depr"),
        "recursion": lower_recursion,
        "sockets": lambda: socket.setdefaulttimeout(0.001),
        "locale": lambda: locale.setlocale(locale.LC_NUMERIC, "C.UTF-8"),
        "stdout": lambda: sys.stdout.close(),
        "folder": lambda: os.chdir("/"),
    }
)
# Of what takes longer to read.
FAR_CHANGES: MappingProxyType[str, Callable[[], object]] = MappingProxyType(
    {
        "limits with room": lowered("RLIMIT_RSS", 1 << 40),
        "umask": lambda: os.umask(0o777),
        "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM}),
    }
)


def end_process(number: int) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), number)


def end_by_thread() -> None:
    threading.Timer(0.25, end_process, (signal.SIGSEGV,)).start()


def end_by_watchdog() -> None:
    faulthandler.dump_traceback_later(0.25, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115


def leave_timer() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.25)


def leave_time_limit() -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeoutError("too slow")

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.25)


class Spoiling(Dataset[torch.Tensor]):
    """Its marked samples do something; the others show all that samples share."""

    def __init__(
        self,
        strike: Callable[[], object] | None = None,
        *,
        marked: tuple[int, ...] = (MARKED,),
        is_raising: bool = True,
        seconds: float = 0.0,
    ) -> None:
        self.strike, self.marked, self.is_raising = strike, marked, is_raising
        self.seconds = seconds
        self.folder = os.getcwd()
        others.clear()
        others.update(sockets_here())

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in self.marked:
            if self.strike is not None:
                self.strike()
            if self.is_raising:
                raise ValueError("damaged")
        time.sleep(self.seconds)
        return torch.tensor([index + 0.5, *self.shared()]) + torch.rand(1, requires_grad=True)

    def shared(self) -> list[float]:
        with warnings.catch_warnings(record=True):
            warnings.warn("deprecated", UserWarning, stacklevel=1)
        with contextlib.suppress(FloatingPointError):
            return [
                float(np.float32(1e-30) * np.float32(1e-30)),
                len(os.environ.get("PATH", "")),
                locale.localeconv()["decimal_point"] == ".",
                socket.getdefaulttimeout() or 0.0,
                sys.stdout.closed,
                os.getcwd() == self.folder,
                _depth(150),
            ]
        return [1.0] * 7


class SpoilingFar(Spoiling):
    """Its samples show more of what they share."""

    def shared(self) -> list[float]:
        mask = os.umask(0)
        os.umask(mask)
        limit, _ = resource.getrlimit(resource.RLIMIT_RSS)
        num_blocked = len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return [mask, float(limit > 1 << 40 or limit < 0), num_blocked]


class SpoilingMany(Spoiling):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def _depth(number: int) -> float:
    return _depth(number - 1) if number else 0.0


def jobs() -> list[Any]:
    return [job(number, range(number * 6, number * 6 + 6)) for number in range(SIZE // 6)]


def batches_of(results: dict[Any, Any]) -> dict[Any, Any]:
    return {number: batch for number, (batch, _) in results.items()}


def bad_of(results: dict[Any, Any]) -> list[Any]:
    return [one[:4] for _, (_, bad) in sorted(results.items()) for one in bad]


@pytest.fixture(scope="module")
def skipped() -> Any:
    """The batches where the marked sample raises and does nothing else, by kind of dataset."""
    results = {}
    for kind in (Spoiling, SpoilingMany):
        with pool_of(kind(), num_workers=1) as pool:
            results[kind] = batches_of(made(pool, jobs()))
    return results


# With three workers they are soak: that others change nothing of it is what test_lost_samples is
# about, with any workers and kills.
@pytest.mark.parametrize(
    ("kind", "workers", "is_raising"),
    [
        (Spoiling, 1, False),
        (Spoiling, 1, True),
        (SpoilingMany, 2, False),
        # Of many, one that raises: test_what_a_bad_sample_leaves_changed_no_other_sample_sees.
        pytest.param(SpoilingMany, 2, True, marks=pytest.mark.soak),
        pytest.param(Spoiling, 3, False, marks=pytest.mark.soak),
        pytest.param(Spoiling, 3, True, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("what", UNFIT)
def test_a_sample_that_leaves_its_worker_unfit_is_left_out(
    what, kind, workers, is_raising, skipped
):
    strike, words = UNFIT[what]
    dataset = kind(strike, is_raising=is_raising)
    with pool_of(dataset, num_workers=workers, timeout=20.0) as pool:
        results = made(pool, jobs())
        assert pool.num_alive == workers
    assert batches_of(results) == skipped[kind]
    ((place, index, error, text),) = bad_of(results)
    assert (place, index) == (1, str(MARKED))
    # Its own error, where that could still be said; without memory any call may raise.
    if is_raising and "RLIMIT" in words:
        assert error in ("ValueError", *OUT_OF_MEMORY)
    elif not (what in ("memory", "data") and error in OUT_OF_MEMORY):
        assert error == "ProcessDiedError"
        assert words in text


@pytest.mark.parametrize("what", ["files", "memory", "another socket"])
def test_several_of_one_batch_are_left_out(what):
    strike, _ = UNFIT[what]
    marked = (13, 15, 16)
    with pool_of(Spoiling(marked=marked), num_workers=1) as pool:
        expected = made(pool, jobs())
    with pool_of(Spoiling(strike, marked=marked, is_raising=False), num_workers=1) as pool:
        results = made(pool, jobs())
    assert batches_of(results) == batches_of(expected)
    assert [index for _, index, _, _ in bad_of(results)] == ["13", "15", "16"]


def test_a_worker_that_is_unfit_at_the_end_of_a_part_ends_without_a_traceback(monkeypatch, capfd):
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 0.0)
    monkeypatch.setattr(splitting, "_MIN_GAIN", 0.0)
    strike, words = UNFIT["files"]
    one = [job(0, range(12, 18))]
    with pool_of(Spoiling(), num_workers=2) as pool:
        ((expected, _),) = made(pool, one).values()
    with pool_of(Spoiling(strike, is_raising=False), num_workers=2, splits=True) as pool:
        ((batch, ((_, index, _, text, _),)),) = made(pool, one).values()
    assert (batch, index) == (expected, str(MARKED))
    assert words in text
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("what", UNFIT)
@pytest.mark.parametrize("kind", [Spoiling, SpoilingMany])
def test_with_raise_the_error_names_the_sample_and_what_it_has_lowered(what, kind):
    strike, words = UNFIT[what]
    with pool_of(kind(strike, is_raising=False), on_error="raise", num_workers=2) as pool:
        text, is_lost = made(pool, jobs())[MARKED // 6]
    assert is_lost
    assert f"sample {MARKED} ends its process" in text
    assert words in text


def test_a_limit_that_leaves_a_worker_room_is_the_datasets_own_affair():
    limits = [lowered("RLIMIT_NOFILE", 200), lowered("RLIMIT_CORE", 0)]
    with pool_of(Spoiling(is_raising=False), num_workers=1) as pool:
        expected = made(pool, jobs())
    dataset = Spoiling(lambda: [lower() for lower in limits], is_raising=False)
    with pool_of(dataset, num_workers=1) as pool:
        (worker,) = pool._workers.values()
        assert made(pool, jobs()) == expected
        assert [*pool._workers.values()] == [worker]


@pytest.mark.parametrize("what", FAR_CHANGES)
def test_what_a_bad_sample_changes_of_its_process_no_other_sample_sees(what):
    marked = (3, 13, 16)
    with pool_of(SpoilingFar(marked=marked), num_workers=1) as pool:
        expected = made(pool, jobs())
    with pool_of(SpoilingFar(FAR_CHANGES[what], marked=marked), num_workers=3) as pool:
        assert made(pool, jobs()) == expected


@pytest.fixture(scope="module")
def unchanged():
    """Returns a function that makes batches of bad samples which change nothing, once for all."""

    @functools.cache
    def made_of(kind, marked, on_error):
        with pool_of(kind(marked=marked), num_workers=1, on_error=on_error) as pool:
            return made(pool, jobs())

    return made_of


@pytest.mark.parametrize(
    ("kind", "workers", "on_error"),
    [
        (Spoiling, 1, "skip"),
        (Spoiling, 1, "replace"),
        (SpoilingMany, 1, "skip"),
        # What is in its place is drawn as for a single one: test_datasets_that_bad_samples_spoil.
        pytest.param(SpoilingMany, 1, "replace", marks=pytest.mark.soak),
        pytest.param(Spoiling, 3, "skip", marks=pytest.mark.soak),
        pytest.param(Spoiling, 3, "replace", marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("what", CHANGES)
def test_what_a_bad_sample_leaves_changed_no_other_sample_sees(
    what, kind, workers, on_error, unchanged
):
    marked = (3, 13, 16)
    expected = unchanged(kind, marked, on_error)
    dataset = kind(CHANGES[what], marked=marked)
    with pool_of(dataset, num_workers=workers, on_error=on_error) as pool:
        # With the errors that it has raised itself.
        assert made(pool, jobs()) == expected
        assert pool.num_alive == workers


def test_what_good_samples_change_is_the_scripts_way_to_begin():
    class Beginning(Spoiling):
        def __getitem__(self, index: int) -> torch.Tensor:
            os.environ["DECODER"] = "fast"
            np.seterr(under="raise")
            return super().__getitem__(index)

    with pool_of(Beginning(marked=(14,)), num_workers=1) as pool:
        (worker,) = pool._workers.values()
        results = made(pool, jobs())
        assert [*pool._workers.values()] == [worker]
    assert [one[2] for one in bad_of(results)] == ["ValueError"]


@pytest.mark.parametrize("leave", [leave_timer, leave_time_limit])
@pytest.mark.parametrize("is_raising", [False, True])
def test_a_timer_that_a_sample_leaves_running_strikes_no_other_one(leave, is_raising):
    with pool_of(Spoiling(is_raising=is_raising), num_workers=1) as pool:
        expected = made(pool, jobs())
    dataset = Spoiling(leave, is_raising=is_raising, seconds=0.08)
    with pool_of(dataset, num_workers=1) as pool:
        assert made(pool, jobs()) == expected


@pytest.mark.parametrize("kind", [Spoiling, SpoilingMany])
@pytest.mark.parametrize(
    ("end", "words"), [(end_by_thread, "SIGSEGV"), (end_by_watchdog, "exit code 1")]
)
def test_a_sample_whose_process_ends_only_at_later_ones_is_found(kind, end, words, skipped):
    dataset = kind(end, is_raising=False, seconds=0.1)
    with pool_of(dataset, num_workers=2) as pool:
        results = made(pool, jobs())
        assert pool.num_alive == 2
    assert batches_of(results) == skipped[kind]
    ((_, index, error, text),) = bad_of(results)
    assert (index, error) == (str(MARKED), "ProcessDiedError")
    assert words in text


@pytest.mark.parametrize("kind", [Spoiling, SpoilingMany])
@pytest.mark.parametrize("end", [end_by_thread, leave_timer])
def test_with_raise_the_error_names_a_sample_whose_process_ends_later(kind, end):
    dataset = kind(end, is_raising=False, seconds=0.1)
    with pool_of(dataset, on_error="raise", num_workers=2) as pool:
        text, is_lost = made(pool, jobs())[MARKED // 6]
    assert is_lost
    assert f"sample {MARKED} ends its process" in text


def test_where_no_sample_of_a_batch_is_to_blame_its_error_says_so():
    search = LossSearch(job(0, range(4)), LossRules())
    death = WorkerDeath(at=None, words="ended with exit code 4", status=4, seconds=0.5)
    order = search.died(job(0, range(4)), death)
    assert order is not None
    order = search.died(order, death)
    halves = []
    while order is not None:
        assert isinstance(order.again, MakeAlone)
        halves.append((order.again.first, order.again.last, order.again.wait_seconds))
        order = search.survived(order)
    assert halves == [(0, 2, 0.5), (0, 3, 0.5), (0, 4, 0.5)]
    expected = "no sample ends its process alone, its batch does: ended with exit code 4"
    assert search.verdict == expected


def test_of_what_writes_nonsense_the_sample_is_found_though_it_is_read_behind_later_ones():
    search = LossSearch(job(0, range(4)), LossRules(on_error="skip"))

    def death(place):
        at = SamplePlace(place, attempt=0, begun_at=0.0)
        return WorkerDeath(at=at, words="sent a malformed message", is_nonsense=True)

    order = search.died(job(0, range(4)), death(2))
    halves = []
    while order is not None and not (isinstance(order.again, MakeAgain) and order.again.lost):
        tried = order.again.last if isinstance(order.again, MakeAlone) else 4
        halves.append(tried)
        # Sample 1 writes it, and its process is at the last one of the order as it is read.
        order = search.died(order, death(tried - 1)) if tried > 1 else search.survived(order)
    assert halves == [4, 2, 1, 2]
    assert order is not None
    assert isinstance(order.again, MakeAgain)
    assert [sample.place for sample in order.again.lost] == [1]


@pytest.mark.parametrize("kind", [Spoiling, SpoilingMany])
def test_nonsense_of_samples_in_a_row_gives_no_worker_up_however_late_it_is_read(kind):
    marked = (12, 13, 19)
    with pool_of(kind(marked=marked), num_workers=1) as pool:
        expected = made(pool, jobs())
    dataset = kind(write_to_sockets, marked=marked, is_raising=False)
    with pool_of(dataset, num_workers=1) as pool:
        results = made(pool, jobs(), at_turn=lambda: time.sleep(0.2))
    assert batches_of(results) == batches_of(expected)
    assert [index for _, index, _, _ in bad_of(results)] == ["12", "13", "19"]


def test_a_batch_whose_workers_others_kill_is_not_searched():
    search = LossSearch(job(0, range(4)), LossRules(on_error="skip"))
    killed = WorkerDeath(at=None, words="ended with signal 9", status=-signal.SIGKILL)
    order = search.died(job(0, range(4)), killed)
    assert order is not None
    assert search.died(order, killed) is None


def fork_both() -> None:
    os.fork()


def fork_a_child_that_comes_back_later() -> None:
    if os.fork() == 0:
        time.sleep(0.3)


@pytest.mark.parametrize("kind", [Spoiling, SpoilingMany])
@pytest.mark.parametrize("fork", [fork_both, fork_a_child_that_comes_back_later])
def test_a_child_that_comes_back_from_a_sample_writes_to_no_batch(kind, fork):
    with pool_of(kind(marked=()), num_workers=1) as pool:
        expected = made(pool, jobs())
    dataset = kind(fork, is_raising=False, seconds=0.03)
    with pool_of(dataset, num_workers=1) as pool:
        assert made(pool, jobs()) == expected
