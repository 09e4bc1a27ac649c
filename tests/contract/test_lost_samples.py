"""Samples that end or block their worker are found one by one, and count as bad ones."""

import contextlib
import faulthandler
import os
import random
import select
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from stoker.feed.lost_samples import ALL_SAMPLES
from stoker.feed.workers import pool as pool_module
from stoker.feed.workers import splitting
from stoker.feed.workers.jobs import SplitBatch
from stoker.feed.workers.pipe import MakeAlone
from support.loss_pools import SECONDS, job, job_of, made, pool_of, wait_for_worker

SIZE = 1000
SEGFAULT, EXIT, KILLED, HANGING, RAISING, CLOSING = 3, 5, 6, 9, 12, 15


def strike(kind):
    # Its stack is of no use here.
    faulthandler.disable()
    match kind:
        case 3:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 5:
            os._exit(7)
        case 6:
            os.kill(os.getpid(), signal.SIGKILL)
        case 9:
            time.sleep(3600)
        case 12:
            raise ValueError("damaged")
        case 15:
            # As a program that becomes a daemon.
            os.closerange(3, 1000)


class Deadly(Dataset[object]):
    """Each sample whose index modulo 100 is one of the kinds above ends or blocks its worker."""

    def __init__(self, kinds, once=None):
        self.kinds = kinds
        # An index that kills once: later it is a good one.
        self.once = once

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        drawn = torch.rand(2)
        if index % 100 in self.kinds:
            strike(index % 100)
        if self.once is not None and index == self.once[0]:
            with contextlib.suppress(FileExistsError):
                Path(self.once[1]).touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)
        return float(index) + drawn


class DeadlyMany(Deadly):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Killer:
    """Kills a worker that has a job, now and then.

    Not one that makes a sample alone: two such kills are what condemns the sample.
    """

    def __init__(self, pool, times, seed=0):
        self.pool = pool
        self.left = times
        self.rng = random.Random(seed)

    def strike(self):
        ready = [one for one in self.pool._workers.values() if one.jobs and one.is_ready]
        busy = [one for one in ready if not isinstance(one.jobs[0].again, MakeAlone)]
        if not (busy and self.left) or self.rng.random() < 0.7:
            return
        self.left -= 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.rng.choice(busy).up.pid, signal.SIGKILL)


@pytest.mark.parametrize("seeding", ["stretch", "sample", "batch"])
@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_a_sample_that_ends_its_process_is_left_out(kind, seeding):
    dataset = kind((SEGFAULT, EXIT, KILLED, RAISING))
    with pool_of(dataset, seeding=seeding) as pool:
        values = made(pool, [job(0, range(8)), job(1, range(8, 16))])
    batch, bad = values[0]
    assert [int(row[0]) for row in batch] == [0, 1, 2, 4, 7]
    assert [one[:4] for one in bad] == [
        (3, "3", "ProcessDiedError", "ended with signal 11 (SIGSEGV)"),
        (5, "5", "ProcessDiedError", "ended with exit code 7"),
        (6, "6", "ProcessDiedError", "ended with signal 9 (SIGKILL), perhaps out of memory"),
    ]
    assert [int(row[0]) for row in values[1][0]] == [8, 9, 10, 11, 13, 14, 15]
    assert [one[:3] for one in values[1][1]] == [(4, "12", "ValueError")]


@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_a_sample_that_hangs_is_left_out(kind):
    with pool_of(kind((HANGING,)), timeout=1.0) as pool:
        values = made(pool, [job(0, range(8, 12)), job(1, range(4))])
    batch, bad = values[0]
    assert [int(row[0]) for row in batch] == [8, 10, 11]
    assert [one[:3] for one in bad] == [(1, "9", "SampleTimeoutError")]
    assert len(values[1][0]) == 4


@pytest.mark.parametrize("seeding", ["stretch", "sample", "batch"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_batches_are_the_same_with_any_workers_and_kills(on_error, seeding):
    dataset = Deadly((SEGFAULT, EXIT, RAISING))
    order = random.Random(5).sample(range(SIZE), 96)
    order[:4] = [103, 105, 203, 212]
    jobs = [job(number, order[number * 4 : number * 4 + 4]) for number in range(24)]
    with pool_of(dataset, on_error=on_error, seeding=seeding, num_workers=1) as pool:
        alone = made(pool, jobs)
    with pool_of(dataset, on_error=on_error, seeding=seeding, num_workers=3) as pool:
        killer = Killer(pool, 6)
        assert made(pool, jobs, at_turn=killer.strike, is_asked_again=True) == alone
    assert len(alone[0][0]) == (1 if on_error == "skip" else 4)
    assert len(alone[0][1]) == 4


@pytest.fixture
def parts_made(monkeypatch):
    """How many parts of batches, which are split however short they are, workers were asked for."""
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 0.0)
    monkeypatch.setattr(splitting, "_MIN_GAIN", 0.0)
    parts: list[tuple[int, int]] = []
    next_job = SplitBatch.next_job

    def noted(split, *, helps):
        job = next_job(split, helps=helps)
        if job is not None:
            parts.append((job.first, job.last))
        return job

    monkeypatch.setattr(SplitBatch, "next_job", noted)
    return parts


@pytest.mark.parametrize("seeding", ["stretch", "place", "sample"])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_batches_in_parts_have_the_bad_samples_of_whole_ones(on_error, seeding, parts_made):
    dataset = Deadly((SEGFAULT, RAISING))
    chosen = random.Random(7)
    orders = [chosen.sample(range(SIZE), 12) for _ in range(5)]
    orders[0][2:5] = [112, 212, 312]
    orders[1] = [12 + 100 * place for place in range(10)]
    orders[2][7:9] = [103, 412]
    jobs = [job(number, indices) for number, indices in enumerate(orders)]
    with pool_of(dataset, on_error=on_error, seeding=seeding, num_workers=1) as pool:
        alone = made(pool, jobs)
    assert not parts_made
    settings = {"on_error": on_error, "seeding": seeding, "num_workers": 3, "splits": True}
    with pool_of(dataset, **settings) as pool:
        assert made(pool, jobs) == alone
        assert pool._can_split
        assert not pool._splits
    assert len(parts_made) > 10


class AllDrawing(Deadly):
    """Draws from several generators; where `raises`, bad samples raise in place of what they do."""

    def __init__(self, kinds, *, raises=False):
        super().__init__(kinds)
        self.raises = raises
        self.rng = random.Random(4)

    def __getitem__(self, index):
        drawn = [random.random(), float(np.random.normal()), self.rng.gauss(0, 1)]
        drawn.append(float(torch.rand(())))
        if index % 100 in self.kinds:
            strike(RAISING if self.raises else index % 100)
        return torch.tensor([float(index), *drawn, random.random()], dtype=torch.float64)


def without_words(values):
    """Batches and which samples were bad, without how."""
    return {
        number: (batch, [(*one[:2], one[4]) for one in bad])
        for number, (batch, bad) in values.items()
    }


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bad_samples_in_the_middle_of_a_stretch_leave_the_same_batches(
    on_error, splits, parts_made
):
    # Three samples draw in a row: bad ones are its first, second or third one, or two of them.
    good = [index for index in range(SIZE) if index % 100 > CLOSING]
    orders = [random.Random(3).sample(good, 70) for _ in range(3)]
    orders[0][0] = 100 + SEGFAULT
    orders[0][31:33] = [200 + EXIT, 300 + RAISING]
    orders[1][29] = 400 + HANGING
    orders[1][61:65] = [500 + RAISING, 600 + SEGFAULT, 700 + KILLED, 800 + EXIT]
    orders[2][69] = 900 + SEGFAULT
    jobs = [job(number, order) for number, order in enumerate(orders)]
    kinds = (SEGFAULT, EXIT, KILLED, HANGING, RAISING)
    raising = AllDrawing(kinds, raises=True)
    with pool_of(raising, on_error=on_error, num_workers=1) as pool:
        expected = made(pool, jobs)
    settings = {"on_error": on_error, "timeout": 1.5, "num_workers": 3, "splits": splits}
    with pool_of(AllDrawing(kinds), **settings) as pool:
        killer = Killer(pool, 4)
        values = made(pool, jobs, at_turn=killer.strike, is_asked_again=True)
    assert without_words(values) == without_words(expected)


class Fateful(Dataset[object]):
    """Samples that are bad by what they draw."""

    def __init__(self, *, raises):
        self.raises = raises

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        drawn = random.random()
        if drawn < 0.1:
            strike(RAISING if self.raises else EXIT)
        return torch.tensor([float(index), drawn], dtype=torch.float64)


@pytest.mark.parametrize(
    ("on_error", "splits"), [("skip", False), ("skip", True), ("replace", True)]
)
def test_a_sample_that_ends_its_process_by_what_it_draws_is_found(on_error, splits, parts_made):
    jobs = [job(number, range(64 * number, 64 * number + 64)) for number in range(2)]
    with pool_of(Fateful(raises=True), num_workers=1, on_error=on_error) as pool:
        expected = made(pool, jobs)
    settings = {"on_error": on_error, "num_workers": 2, "splits": splits}
    with pool_of(Fateful(raises=False), **settings) as pool:
        values = made(pool, jobs)
    assert without_words(values) == without_words(expected)
    assert all(len(bad) > 2 for _, bad in expected.values())


def test_a_death_that_does_not_come_again_condemns_no_sample(tmp_path):
    with pool_of(Deadly((), once=(2, str(tmp_path / "once")))) as pool:
        batch, bad = made(pool, [job(0, range(4))])[0]
    assert (len(batch), bad) == (4, [])


class PanicError(BaseException):
    """As Rust's libraries raise: no Exception."""


class Panicking(Deadly):
    """Its sample 2 panics, after a process that happens to be killed at it."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        if index == 2:
            raise PanicError("index out of bounds")
        return sample


def test_a_panic_stays_one_where_a_worker_is_killed_at_that_sample(tmp_path):
    with pool_of(Panicking((), once=(2, str(tmp_path / "once")))) as pool:
        batch, bad = made(pool, [job(0, range(4))])[0]
    assert (len(batch), [one[:3] for one in bad]) == (3, [(2, "2", "PanicError")])


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_workers_that_died_before_they_began_a_batch_are_no_try_of_it(kind, on_error):
    with pool_of(kind(()), on_error=on_error) as pool:
        while pool.num_ready < pool.num_alive:
            for fileno in select.select(list(pool.sockets()), [], [], SECONDS)[0]:
                pool.handle(fileno)
        # Ended from outside while they wait, which the pool has not seen when it assigns.
        for worker in pool._workers.values():
            worker.process.kill()
            worker.process.join(SECONDS)
        # The one gets the batch, and when that one is found dead, the other.
        values, bad = made(pool, [job(0, range(4))])[0]
    assert [int(row[0]) for row in values] == [0, 1, 2, 3]
    assert bad == []


@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_with_raise_the_error_names_the_sample(kind):
    with pool_of(kind((SEGFAULT,)), on_error="raise", num_workers=3) as pool:
        text, is_lost = made(pool, [job(0, (101, 102, 103, 104))])[0]
    assert is_lost
    assert "sample 103 ends its process" in text
    assert "SIGSEGV" in text


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_a_sample_that_closes_its_workers_connection_is_left_out(kind, splits, parts_made):
    with pool_of(kind((CLOSING, RAISING)), splits=splits) as pool:
        batch, bad = made(pool, [job(0, range(11, 18))])[0]
    assert [int(row[0]) for row in batch] == [11, 13, 14, 16, 17]
    assert [one[:3] for one in bad] == [(1, "12", "ValueError"), (4, "15", "ProcessDiedError")]
    assert "lost its connection" in bad[1][3]


class GoingOn(Deadly):
    """Its process goes on for long once its connection is closed."""

    def __init__(self, *, is_same_sample):
        super().__init__((CLOSING,))
        self.is_same_sample = is_same_sample
        self.is_closed = False

    def __getitem__(self, index):
        if self.is_closed:
            time.sleep(3600)
        sample = super().__getitem__(index)
        self.is_closed = index == CLOSING
        if self.is_closed and self.is_same_sample:
            time.sleep(3600)
        return sample


@pytest.mark.parametrize("is_same_sample", [False, True])
@pytest.mark.parametrize(
    ("on_error", "splits"), [("skip", False), ("skip", True), ("replace", True)]
)
def test_a_sample_that_closes_the_connection_of_a_process_that_goes_on_is_left_out(
    on_error, splits, is_same_sample, parts_made, monkeypatch
):
    monkeypatch.setattr(pool_module, "REAP_SECONDS", 0.05)
    dataset = GoingOn(is_same_sample=is_same_sample)
    with pool_of(dataset, on_error=on_error, splits=splits) as pool:
        batch, bad = made(pool, [job(0, [14, CLOSING, 16, 17])])[0]
    assert [int(row[0]) for row in batch if row[0] < 18] == [14, 16, 17]
    assert [one[:3] for one in bad] == [(1, "15", "ProcessDiedError")]
    assert "lost its connection" in bad[0][3]


@pytest.mark.parametrize("given", [(14, 15, 16), [torch.tensor(14), np.int64(15)]])
@pytest.mark.parametrize("kind", [Deadly, DeadlyMany])
def test_with_raise_the_error_names_the_sample_that_closes_the_connection(kind, given):
    with pool_of(kind((CLOSING,)), on_error="raise", num_workers=1) as pool:
        text, is_lost = made(pool, [job_of(0, given)])[0]
        # Else its host would be given up, and the error be about that.
        assert not pool.is_dead
    assert is_lost
    assert "sample 15 ends its process" in text
    assert "have the dataset close only what it has opened" in text


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ((101, 103), "sample 103"),
        (np.array([101, 103]), "sample 103"),
        (torch.tensor([101, 103]), "sample 103"),
        ([torch.tensor(101), np.int64(103)], "sample 103"),
        # Which only workers open: the trainer's error has the whole range.
        (range(101, 104), "the sample at place 2"),
    ],
)
def test_the_sample_is_named_whatever_the_sampler_gives(given, name):
    with pool_of(Deadly((SEGFAULT,)), on_error="raise", num_workers=3) as pool:
        text, _ = made(pool, [job_of(0, given)])[0]
    assert f"{name} ends its process" in text


def test_a_sample_without_a_batch_is_named_whole():
    class Pairs(Deadly):
        def __getitem__(self, index):
            return super().__getitem__(index[1])

    with pool_of(Pairs((SEGFAULT,)), on_error="raise", num_workers=3, auto_collation=False) as pool:
        text, _ = made(pool, [job_of(0, (7, 103))])[0]
    assert "sample (7, 103) ends its process" in text


@pytest.mark.parametrize(("kind", "place"), [(Deadly, 1), (DeadlyMany, ALL_SAMPLES)])
def test_with_raise_a_pool_knows_the_sample_that_hangs(kind, place):
    with pool_of(kind((HANGING,)), on_error="raise", timeout=0.1) as pool:
        wait_for_worker(pool)
        pool.assign(job(0, range(8, 12)))
        deadline = time.monotonic() + SECONDS
        sample = None
        while sample is None or sample.seconds < 0.2:
            assert time.monotonic() < deadline
            for fileno in select.select(list(pool.sockets()), [], [], 0.05)[0]:
                assert pool.handle(fileno) == []
            pool.give_late_jobs_again()
            makers = pool.makers(lambda each: True)
            sample = makers[0].sample if makers else None
    assert sample.place == place


class Unread:
    def read(self):
        raise AssertionError("the progress of a worker is read")


@pytest.mark.parametrize(
    ("on_error", "timeout", "is_read"),
    [("raise", None, False), ("raise", 5.0, False), ("skip", None, False), ("skip", 5.0, True)],
)
def test_progress_is_looked_at_only_where_a_sample_may_be_killed(on_error, timeout, is_read):
    with pool_of(Deadly((HANGING,)), on_error=on_error, timeout=timeout) as pool:
        wait_for_worker(pool)
        pool.assign(job(0, [HANGING]))
        for worker in pool._workers.values():
            worker.progress = Unread()
        with pytest.raises(AssertionError) if is_read else contextlib.nullcontext():
            pool.give_late_jobs_again()


def test_a_worker_that_has_ended_already_does_not_hang():
    with pool_of(Deadly((KILLED,)), num_workers=1, timeout=0.1) as pool:
        wait_for_worker(pool)
        (worker,) = pool._workers.values()
        pool.assign(job(0, [KILLED, 1]))
        worker.process.join(SECONDS)
        # The pool has not heard of its end when it looks for samples that take too long.
        deadline = time.monotonic() + SECONDS
        while worker.at is None or not pool._rules.is_hanging(worker.at, time.monotonic()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pool.kill_hanging()
        assert worker.hung_at is None


def test_many_bad_samples_do_not_use_up_the_workers():
    indices = [100 * number + SEGFAULT for number in range(8)]
    with pool_of(Deadly((SEGFAULT,)), num_workers=1) as pool:
        values = made(pool, [job(0, [*indices, 1]), job(1, range(2))])
    assert [int(row[0]) for row in values[0][0]] == [1]
    assert len(values[0][1]) == 8
    assert len(values[1][0]) == 2


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(2, 140))]
)
def test_any_deadly_samples_leave_the_same_batches_on_any_workers(seed, splits, parts_made):
    """Raising, killing and hanging samples anywhere, made by one worker and by several, killed."""
    rng = random.Random(seed)
    on_error = rng.choice(["skip", "replace"])
    seeding = rng.choice(["stretch", "place", "sample", "batch"])
    kinds = rng.sample([SEGFAULT, EXIT, KILLED, HANGING, RAISING], rng.randint(1, 3))
    dataset = rng.choice([Deadly, DeadlyMany])(tuple(kinds))
    size = rng.randint(1, 6)
    jobs = []
    for number in range(8):
        indices = [rng.randrange(SIZE) for _ in range(size)]
        if number % 3 == 0:
            indices[rng.randrange(size)] = 100 * rng.randrange(10) + rng.choice(kinds)
        jobs.append(job(number, indices))
    settings = {"on_error": on_error, "seeding": seeding, "timeout": 1.5}
    with pool_of(dataset, num_workers=1, **settings) as pool:
        alone = made(pool, jobs, is_asked_again=True)
    rng.shuffle(jobs)
    with pool_of(dataset, num_workers=rng.randint(2, 4), splits=splits, **settings) as pool:
        killer = Killer(pool, rng.randint(0, 4), seed)
        assert made(pool, jobs, at_turn=killer.strike, is_asked_again=True) == alone
    assert all(isinstance(batch, list) for batch, _ in alone.values())
