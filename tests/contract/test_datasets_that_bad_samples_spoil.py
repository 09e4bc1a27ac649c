"""Bad samples that leave their dataset broken: those that fail only because of them are good."""

import faulthandler
import multiprocessing
import os
import signal
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from stoker.environment import ProcessSettings
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.doubts import ErrorTrust, FailedSamples
from stoker.feed.lost_samples import LostSample
from stoker.feed.placement import placed_iterator
from stoker.feed.timeline import Timeline
from stoker.feed.workers import splitting
from stoker.records import FeedSettings
from support.bad_sample_rows import rows_of
from support.loss_pools import job, made, pool_of

SIZE = 36
BAD = (3, 4, 13, 25, 31, 32)

pytestmark = [
    pytest.mark.timeout(200),
    # A forked process may start threads; the machine may have two CPUs.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore:deprecated:UserWarning",
        "ignore:This DataLoader will create",
    ),
]


class Connection(Dataset[torch.Tensor]):
    """As one to a database: after an error all later questions fail until it is made again."""

    def __init__(self, *, is_left_broken: bool, bad: Sequence[int] = BAD) -> None:
        self.is_left_broken, self.bad = is_left_broken, bad
        self.is_broken = False
        self.log: Path | None = None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.note()
        if self.is_broken:
            raise RuntimeError("current transaction is aborted")
        if index in self.bad:
            self.is_broken = self.is_left_broken
            raise ValueError("invalid input syntax")
        return index + torch.rand(1)

    def note(self) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{os.getpid()}\n")

    def num_processes(self) -> int:
        assert self.log is not None
        return len(set(self.log.read_text().split()))


class ConnectionForMany(Connection):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def jobs() -> list[Any]:
    return [job(number, range(number * 6, number * 6 + 6)) for number in range(SIZE // 6)]


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize(
    ("kind", "workers", "splits"),
    [
        (Connection, 1, False),
        # Several workers are those of batches in parts, too.
        pytest.param(Connection, 3, False, marks=pytest.mark.soak),
        (Connection, 3, True),
        (ConnectionForMany, 2, False),
    ],
)
def test_only_samples_that_fail_by_themselves_are_bad(kind, workers, splits, on_error):
    with pool_of(kind(is_left_broken=False), num_workers=1, on_error=on_error) as pool:
        expected = made(pool, jobs())
    listed = [int(index) for _, bad in expected.values() for _, index, *_ in bad]
    assert sorted(listed) == [*BAD]
    dataset = kind(is_left_broken=True)
    with pool_of(dataset, num_workers=workers, on_error=on_error, splits=splits) as pool:
        assert made(pool, jobs()) == expected
        assert pool.num_alive == workers


class Locking(Connection):
    """Its bad samples keep a lock: a later one of their process would wait for ever, or crash."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_broken:
            faulthandler.disable()
            os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("workers", "splits", "orders"),
    [
        # The trial of the second batch's first sample keeps the lock as well.
        (1, False, [[5, 3], [4, 6]]),
        # Whoever has made the first sample as a part dies of the next part.
        (2, True, [[3, 5, 6, 7, 8, 9]]),
    ],
)
def test_samples_that_crash_only_behind_bad_ones_are_good(workers, splits, orders, monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 0.0)
    monkeypatch.setattr(splitting, "_MIN_GAIN", 0.0)
    each = [job(number, indices) for number, indices in enumerate(orders)]
    with pool_of(Connection(is_left_broken=False), num_workers=1) as pool:
        expected = made(pool, each)
    with pool_of(Locking(is_left_broken=True), num_workers=workers, splits=splits) as pool:
        assert made(pool, each) == expected


class LockingInOneCall(Locking):
    """The last sample of its call closes the worker's connection, and is bad by that."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 9:
            os.closerange(3, 1000)
        return sample

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in reversed(indices)][::-1]


class LockingAtOne(LockingInOneCall):
    """Of the samples behind a bad one the last one waits for its lock, and others fail."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_broken and index != 9:
            raise RuntimeError("current transaction is aborted")
        return super().__getitem__(index)


@pytest.mark.parametrize("kind", [LockingInOneCall, LockingAtOne])
def test_samples_that_crash_in_a_search_only_behind_bad_ones_are_good(kind):
    # All are made one by one, as it is not known which one of the call has closed the connection.
    with pool_of(kind(is_left_broken=True), num_workers=1) as pool:
        _, bad = made(pool, [job(0, [3, 8, 9])])[0]
    assert [one[:3] for one in bad] == [(0, "3", "ValueError"), (2, "9", "ProcessDiedError")]


def test_a_worker_that_is_replaced_on_purpose_never_counts_as_dead():
    bad = (0, 1, 3, 4)
    one = [job(0, range(6))]
    with pool_of(Connection(is_left_broken=False, bad=bad), num_workers=1) as pool:
        expected = made(pool, one)
    dataset = Connection(is_left_broken=True, bad=bad)
    # A host whose settings are older than the trainer's: all it knows is that its workers end.
    with pool_of(dataset, num_workers=1, hosts_on_error="raise") as pool:
        assert made(pool, one) == expected
        assert pool.num_alive == 1


def test_where_doubted_errors_come_again_no_more_processes_are_spent(tmp_path):
    dataset = Connection(is_left_broken=False, bad=range(1, SIZE, 2))
    dataset.log = tmp_path / "pids"
    with pool_of(dataset, num_workers=1) as pool:
        results = made(pool, jobs())
    assert sum(len(bad) for _, bad in results.values()) == SIZE // 2
    # Those of the first one, of the three that were doubted, and of the one that told it last.
    assert dataset.num_processes() <= 5


def test_no_error_is_believed_where_one_was_another_samples():
    trust = ErrorTrust()
    trust.confirm(2)
    assert not trust.is_full
    trust.confirm(1)
    assert trust.is_full
    trust.refute()
    trust.confirm(9)
    assert not trust.is_full


def test_the_first_error_of_a_process_is_believed_and_each_later_one_is_not():
    failed = FailedSamples()
    failed.begin_order()
    first, second = (LostSample(place, 0, "E", "t") for place in (1, 2))
    assert not failed.is_doubtful(first)
    failed.add(first)
    # A batch may be made twice.
    assert not failed.is_doubtful(first)
    assert failed.is_doubtful(second)
    failed.begin_order()
    assert failed.of_order == []
    assert failed.is_doubtful(first)


class Guarded(Dataset[torch.Tensor]):
    """A damaged sample keeps the lock that each later one waits for."""

    def __init__(self, *, keeps_lock: bool) -> None:
        self.keeps_lock = keeps_lock
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        self.lock.acquire()
        if index not in BAD or not self.keeps_lock:
            self.lock.release()
        if index in BAD:
            raise ValueError("damaged")
        return index + torch.rand(1)


class GuardedMany(Guarded):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("kind", "workers"),
    [(Guarded, 1), pytest.param(Guarded, 3, marks=pytest.mark.soak), (GuardedMany, 2)],
)
def test_samples_that_wait_for_what_a_bad_one_has_kept_are_good(kind, workers):
    with pool_of(kind(keeps_lock=False), num_workers=1) as pool:
        expected = made(pool, jobs())
    with pool_of(kind(keeps_lock=True), num_workers=workers, timeout=1.0) as pool:
        assert made(pool, jobs()) == expected


def crash() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


class Corrupting(Connection):
    """A bad sample leaves native code in a state that ends its process at the next sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.is_broken:
            crash()
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 3])
def test_samples_that_end_their_process_only_behind_a_bad_one_are_good(workers):
    with pool_of(Corrupting(is_left_broken=False), num_workers=1) as pool:
        expected = made(pool, jobs())
    with pool_of(Corrupting(is_left_broken=True), num_workers=workers) as pool:
        assert made(pool, jobs()) == expected


class Archive(Dataset[torch.Tensor]):
    """Closes its file where it finds a member damaged, as code does that means to end there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: zipfile.ZipFile | None = None

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = zipfile.ZipFile(self.path)
        try:
            return torch.tensor(float(self.file.read(f"{index}.txt")))
        except zipfile.BadZipFile:
            self.file.close()
            raise


def damaged_archive(path: Path) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for index in range(SIZE):
            file.writestr(f"{index}.txt", f"{index:05}")
    data = path.read_bytes()
    for index in BAD:
        # Other bytes than its checksum is of.
        data = data.replace(f"{index:05}".encode(), b"00099", 1)
    path.write_bytes(data)
    return path


def test_an_archive_that_is_closed_at_a_damaged_member_gives_all_others(tmp_path):
    folder = tmp_path / "output"
    folder.mkdir()
    settings = ProcessSettings(
        feed=FeedSettings(on_error="skip", max_errors=len(BAD)), output=folder
    )
    loader = DataLoader(Archive(damaged_archive(tmp_path / "data.zip")), 6, num_workers=2)
    iterator: Any = placed_iterator(loader, TrainerProcess(settings, Timeline(None)))
    values = [int(value) for batch in iterator for value in batch]
    assert values == [index for index in range(SIZE) if index not in BAD]
    assert rows_of(folder, "index", "error") == [(str(index), "BadZipFile") for index in BAD]


def half(index: int) -> float:
    return index / 2


class WithPool(Dataset[float]):
    """Its samples start processes, which torch allows without workers."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        if index == 5:
            raise ValueError("5.jpg is truncated")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            return pool.apply(half, (index,))


def test_samples_of_a_loader_without_workers_may_start_processes(tmp_path):
    settings = ProcessSettings(feed=FeedSettings(on_error="skip", max_errors=9), output=tmp_path)
    loader = DataLoader(WithPool(), 4, num_workers=0)
    iterator: Any = placed_iterator(loader, TrainerProcess(settings, Timeline(None)))
    values = [float(value) for batch in iterator for value in batch]
    assert values == [index / 2 for index in range(16) if index != 5]
    assert rows_of(tmp_path, "index", "error") == [("5", "ValueError")]
