"""One batch, several workers: the bytes, errors and ends of a batch that one worker makes."""

import contextlib
import multiprocessing
import os
import random
import re
import select
import signal
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, unpack_error
from stoker.feed.wire.protocol import Make
from stoker.feed.workers import pool as pools
from stoker.feed.workers import splitting
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.pool import WorkerEnd, WorkerPool
from stoker.feed.workers.worker import worker_main

SECONDS = 150


class Slow(Dataset[object]):
    """Samples of different sizes and costs, which draw as `draws` says; index 1000 on raises."""

    def __init__(self, draws="torch", seconds=0.0):
        self.draws = draws
        self.seconds = seconds
        self.rng = np.random.default_rng(3)

    def __len__(self):
        return 2000

    def drawn(self):
        match self.draws:
            case "torch":
                return torch.rand(3)
            case "python":
                return random.gauss(0, 1)
            case "numpy":
                return np.random.normal(size=3)
            case "held":
                return self.rng.random(2)
        return None

    def __getitem__(self, index):
        if self.seconds:
            time.sleep(random.Random(index).expovariate(1 / self.seconds))
        if index >= 1000:
            raise LookupError(f"no sample {index}")
        image = torch.full((3, 5 + index % 3, 7), index % 251, dtype=torch.uint8)
        # As of augmentations: views, other orders, flips.
        view = image.permute(1, 2, 0) if index % 2 else image[:, 1:].flip(1)
        return {"index": index, "image": view, "drawn": self.drawn(), "text": f"ä{index}"}


def plain(samples):
    return samples


def drawing(samples):
    return [*samples, torch.rand(2), random.random(), float(np.random.rand())]


def padded(samples):
    """Writes to its samples, as a collate function may."""
    images = []
    for sample in samples:
        image = sample["image"]
        image[:1] += 1
        images.append(image.flatten())
    return torch.nn.utils.rnn.pad_sequence(images, batch_first=True), [s["drawn"] for s in samples]


class Equal(Slow):
    def __getitem__(self, index):
        if index == 1500:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.seconds)
        return torch.full((4,), index), self.drawn() if self.draws else 0


class Sentinel(Equal):
    NONE = object()

    def __getitem__(self, index):
        return self.NONE


def count_nones(samples):
    return sum(sample is Sentinel.NONE for sample in samples)


class Many(Equal):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@contextmanager
def pool_of(dataset, collate, *, num_workers, seeding="place", splits="auto"):
    context = multiprocessing.get_context("fork")
    spec = DatasetSpec(dataset=dataset, collate_fn=collate, num_workers=num_workers)

    def start(role, sock):
        given = {"worker_id": role.number, "num_workers": 16, "base_seed": 0, "seeding": seeding}
        child = context.Process(target=worker_main, args=(sock, spec), kwargs=given)
        child.start()
        return child

    pool = WorkerPool(start, num_workers=num_workers, splits=splits)
    with contextlib.closing(pool):
        while pool.num_ready < num_workers:
            for fileno in ready_of(pool):
                pool.handle(fileno)
        yield pool


def ready_of(pool):
    ready, _, _ = select.select(list(pool.sockets()), [], [], SECONDS)
    assert ready, "the workers are silent"
    return ready


def job(number, indices, *, epoch_id=0, is_among_last=False):
    order = Make(
        session="s",
        epoch_id=epoch_id,
        batch_number=number,
        index=codec.pack_value(list(indices), allow_pickle=False),
        seed_words=(7, 0, epoch_id, number),
        is_among_last=is_among_last,
    )
    return WorkerJob((epoch_id, number), order)


def made(pool, jobs, *, until=0, at_turn=lambda turn: None):
    """Results of jobs by number, assigned as there is room; each as value or words of the error."""
    waiting = list(jobs)
    values: dict[int, object] = {}
    for turn in range(1 << 30):
        while waiting and pool.room > 0:
            pool.assign(waiting.pop(0))
        if len(values) == (until or len(jobs)):
            break
        at_turn(turn)
        for fileno in ready_of(pool):
            for result in pool.handle(fileno):
                assert result.job.split is None
                values[result.job.key[1]] = value_of(result)
        pool.flush()
    return values


class Raised(NamedTuple):
    text: str
    lines: list[str]


def value_of(result):
    if result.error is not None:
        text = str(unpack_error(result.error))
        return Raised(text, re.findall(r"no sample \d+|index \d+", text))
    payload = None if result.payload is None else np.array(result.payload)
    value = codec.decode(result.tree, payload, allow_pickle=True)
    result.discard()
    return value


def same(value, other):
    assert type(value) is type(other)
    if isinstance(value, torch.Tensor | np.ndarray):
        torch.testing.assert_close(value, other, rtol=0, atol=0)
    elif isinstance(value, dict):
        assert value.keys() == other.keys()
        for key, part in value.items():
            same(part, other[key])
    elif isinstance(value, list | tuple):
        for part, other_part in zip(value, other, strict=True):
            same(part, other_part)
    else:
        assert value == other


def descriptors_of_parts():
    links = []
    for entry in os.listdir("/proc/self/fd"):
        # The one of the folder itself is gone by now.
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
    return [link for link in links if "stoker-part" in link]


@pytest.fixture(autouse=True)
def _splits_short_batches(monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(splitting, "_MIN_GAIN", 0.0)
    return


@pytest.mark.parametrize("seed", range(12))
def test_a_batch_of_parts_is_the_batch_that_one_worker_makes(seed):
    chosen = random.Random(seed)
    dataset: Dataset[object] = Slow(
        chosen.choice(["", "torch", "python", "numpy", "held"]), seconds=0.001
    )
    if chosen.random() < 0.3:
        dataset = Subset(dataset, range(2000))
    collate = chosen.choice([plain, drawing, padded])
    seeding = chosen.choice(["place", "place", "sample"])
    sizes = [chosen.randint(1, 40) for _ in range(6)]
    jobs = []
    for number, size in enumerate(sizes):
        indices = [chosen.randrange(1000) for _ in range(size)]
        if chosen.random() < 0.3:
            indices[chosen.randrange(size)] = chosen.randrange(1000, 1400)
        jobs.append(job(number, indices))
    with pool_of(dataset, collate, num_workers=1, seeding=seeding, splits=False) as alone:
        expected = made(alone, jobs)
    for num_workers in chosen.sample(range(2, 9), 2):
        with pool_of(dataset, collate, num_workers=num_workers, seeding=seeding) as pool:
            values = made(pool, jobs)
            assert not descriptors_of_parts()
        for number, value in expected.items():
            if isinstance(value, Raised):
                # The number of the worker alone may differ.
                assert values[number].lines == value.lines, seed
            else:
                same(values[number], value)


def test_several_workers_make_the_first_batch(monkeypatch):
    asked = []
    pack = WorkerJob.send

    def send(self, channel):
        asked.append((self.first, self.last))
        pack(self, channel)

    monkeypatch.setattr(WorkerJob, "send", send)
    with pool_of(Equal(seconds=0.02), default_collate, num_workers=4) as pool:
        same(made(pool, [job(0, range(16))])[0][0][:, 0], torch.arange(16))
        assert asked == [(at, at + 1) for at in range(16)] + [(0, 0)]


def test_a_batch_that_turns_out_to_be_short_has_few_parts(monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SECONDS", 1e9)
    with pool_of(Equal(), default_collate, num_workers=4) as pool:
        made(pool, [job(0, range(160))])
        asked = []
        monkeypatch.setattr(WorkerJob, "send", lambda self, channel: asked.append(self))
        pool.assign(job(1, range(160)))
        # Its cost is known: one worker makes it.
        assert [one.split for one in asked] == [None]


def test_later_batches_of_an_epoch_are_made_by_one_worker_each():
    with pool_of(Equal(seconds=0.002), default_collate, num_workers=2) as pool:
        made(pool, [job(number, range(8)) for number in range(2)])
        assert not pool._begins_split(job(2, range(8)))
        assert pool._begins_split(job(0, range(8), epoch_id=1))


def test_the_last_batches_of_an_epoch_are_shared_out_with_the_bytes_of_one_worker():
    begin = [job(number, range(8)) for number in range(5)]
    last = [job(number, range(number, number + 8), is_among_last=True) for number in (5, 6)]
    dataset = Equal("torch", seconds=0.005)
    with pool_of(dataset, default_collate, num_workers=1, splits=False) as alone:
        expected = made(alone, begin + last)
    with pool_of(dataset, default_collate, num_workers=3) as pool:
        values = made(pool, begin)
        for one in last:
            pool.assign(one)
        assert [split.job for split in pool._splits] == last
        values |= made(pool, [], until=2)
        assert not descriptors_of_parts()
    for number, value in expected.items():
        same(values[number], value)


@pytest.mark.parametrize(("dataset", "collate"), [(Sentinel(), count_nones), (Many(), len)])
def test_what_has_no_parts_is_made_by_one_worker(dataset, collate):
    with pool_of(dataset, collate, num_workers=3) as pool:
        values = made(pool, [job(number, range(12)) for number in range(5)])
        assert set(values.values()) == {12}
        assert not pool._can_split


def keys_of(worker):
    return [one.key for one in worker.jobs]


@pytest.mark.parametrize("indices", [range(8), np.arange(8), torch.arange(8)])
def test_an_index_that_is_no_list_is_not_split_and_ends_nothing(indices):
    order = job(0, []).order
    order = msgspec.structs.replace(order, index=codec.pack_value(indices, allow_pickle=True))
    with pool_of(Equal(seconds=0.002), default_collate, num_workers=2) as pool:
        values = made(pool, [WorkerJob((0, 0), order), job(1, range(8, 16))])
    same(values[0][0][:, 0], torch.arange(8))
    same(values[1][0][:, 0], torch.arange(8, 16))


@pytest.mark.parametrize("seed", range(3))
def test_a_worker_killed_in_a_part_changes_nothing(seed, monkeypatch):
    chosen = random.Random(seed)
    jobs = [job(number, range(number * 24, number * 24 + 24)) for number in range(6)]
    dataset = Equal("torch", seconds=0.004)
    with pool_of(dataset, default_collate, num_workers=1, splits=False) as alone:
        expected = made(alone, jobs)
    # A job that two workers die of is lost. All that a worker has count as killed: its answer to
    # the first one may be on its way, and it is at the second one. So does what it is given until
    # the pool sees its end.
    killed: set[object] = set()
    dead: list[WorkerEnd] = []
    kills = 0
    give = WorkerPool._give

    def note_given(pool, job, worker):
        if worker in dead:
            killed.add(job.key)
        give(pool, job, worker)

    monkeypatch.setattr(WorkerPool, "_give", note_given)

    def kill(turn):
        nonlocal kills
        if turn % 9 != 5 or kills == 3:
            return
        workers = [worker for worker in pool._workers.values() if worker.jobs and worker.up]
        workers = [worker for worker in workers if killed.isdisjoint(keys_of(worker))]
        if workers:
            worker = chosen.choice(workers)
            killed.update(keys_of(worker))
            dead.append(worker)
            kills += 1
            os.kill(worker.up.pid, signal.SIGKILL)

    with pool_of(dataset, default_collate, num_workers=4) as pool:
        values = made(pool, jobs, at_turn=kill)
        assert not descriptors_of_parts()
    assert kills
    for number, value in expected.items():
        same(values[number], value)


def test_a_sample_that_kills_its_workers_is_the_loss_of_its_batch():
    with pool_of(Equal(), len, num_workers=3) as pool:
        values = made(pool, [job(0, [*range(8), 1500, *range(8)]), job(1, range(8))])
        assert "a batch could not be made" in values[0].text
        assert values[1] == 8
        assert not descriptors_of_parts()


def test_a_pool_that_is_closed_in_the_middle_frees_the_parts():
    with pool_of(Equal(seconds=0.01), len, num_workers=2) as pool:
        pool.assign(job(0, range(32)))
        while not descriptors_of_parts():
            for fileno in ready_of(pool):
                pool.handle(fileno)
        lost = pool.cancel_jobs()
        assert [one.job.key for one in lost] == [(0, 0)]
        pool.close()
        assert not descriptors_of_parts()
    assert not list(Path("/dev/shm").glob("stoker-part*"))


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_batch_that_is_late_is_made_by_all_who_are_idle(goes_on, monkeypatch):
    monkeypatch.setattr(pools, "OVERDUE_SECONDS", 0.2)
    monkeypatch.setattr(pools, "_OVERDUE_FACTOR", 0.0)
    jobs = [job(number, range(number * 8, number * 8 + 8)) for number in range(5)]
    dataset = Equal("torch", seconds=0.005)
    with pool_of(dataset, default_collate, num_workers=1, splits=False) as alone:
        expected = made(alone, jobs)
    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, jobs[:4])
        made(pool, [job(number, range(8)) for number in range(10, 14)])
        pool.assign(jobs[4])
        (late,) = [worker for worker in pool._workers.values() if worker.jobs]
        assert late.jobs[0].split is None
        os.kill(late.up.pid, signal.SIGSTOP)
        given: list[WorkerJob] = []
        while not given:
            time.sleep(0.05)
            given = pool.give_late_jobs_again()
        assert [one.key for one in given] == [(0, 4)]
        assert len([worker for worker in pool._workers.values() if worker.jobs]) == 4
        if goes_on:
            os.kill(late.up.pid, signal.SIGCONT)
        values = made(pool, [], until=1)
        os.kill(late.up.pid, signal.SIGCONT)
        same(values[4], expected[4])
        same(made(pool, [job(9, range(8))])[9][0][:, 0], torch.arange(8))
        assert not pool._splits
