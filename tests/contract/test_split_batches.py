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
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, default_collate

from stoker.feed.stretches import next_stretch
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, unpack_error
from stoker.feed.wire.protocol import BatchPart, Make, Share
from stoker.feed.workers import pool as pools
from stoker.feed.workers import splitting
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.feed.workers.pool import WorkerPool
from stoker.feed.workers.progress import ProgressMemory
from stoker.feed.workers.worker import worker_main
from stoker.feed.workers.worker_handle import WorkerHandle
from support import processes
from support.loss_pools import prepare_for_forks

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
def pool_of(dataset, collate, *, num_workers, seeding="stretch", splits="auto"):
    context = multiprocessing.get_context("fork")
    spec = DatasetSpec(dataset=dataset, collate_fn=collate, num_workers=num_workers)

    def start(role, sock):
        given = {"worker_id": role.number, "num_workers": 16, "base_seed": 0, "seeding": seeding}
        child = context.Process(target=worker_main, args=(sock, spec), kwargs=given)
        child.start()
        return child

    prepare_for_forks()
    pool = WorkerPool(start, num_workers=num_workers, splits=splits)
    with contextlib.closing(pool):
        while pool.num_ready < num_workers:
            for fileno in ready_of(pool):
                pool.handle(fileno)
        yield pool


def ready_of(pool):
    look = pool.next_look_seconds()
    seconds = SECONDS if look is None else look
    ready, _, _ = select.select(list(pool.sockets()), [], [], seconds)
    assert ready or look is not None, "the workers are silent"
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


# With each kind of random numbers, collate function and seeding among them.
OFTEN = (0, 2, 3, 4, 5, 7)


# With each collate function and share of lost parts among them, and with failures.
OFTEN_SHARED = (1, 2, 3, 6)


def seeds(often):
    """Returns seeds of which some run always, the others with `make soak`."""
    return [
        pytest.param(seed, marks=() if seed in often else pytest.mark.soak) for seed in range(12)
    ]


@pytest.fixture(autouse=True)
def _splits_short_batches(monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 0.0)
    monkeypatch.setattr(splitting, "_MIN_GAIN", 0.0)
    return


@pytest.mark.parametrize("seed", seeds(OFTEN))
def test_a_batch_of_parts_is_the_batch_that_one_worker_makes(seed):
    chosen = random.Random(seed)
    dataset: Dataset[object] = Slow(
        chosen.choice(["", "torch", "python", "numpy", "held"]), seconds=0.001
    )
    if chosen.random() < 0.3:
        dataset = Subset(dataset, range(2000))
    collate = chosen.choice([plain, drawing, padded])
    seeding = chosen.choice(["stretch", "stretch", "place", "sample"])
    # From 33 on, several samples draw in a row.
    sizes = [chosen.randint(1, chosen.choice([40, 100])) for _ in range(6)]
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


@pytest.fixture
def asked(monkeypatch):
    """The jobs that workers were sent, in that order."""
    sent: list[WorkerJob] = []
    send = WorkerJob.send

    def note(job, channel):
        sent.append(job)
        send(job, channel)

    monkeypatch.setattr(WorkerJob, "send", note)
    return sent


def test_several_workers_make_the_first_batch(asked):
    with pool_of(Equal(seconds=0.02), default_collate, num_workers=4) as pool:
        same(made(pool, [job(0, range(16))])[0][0][:, 0], torch.arange(16))
    parts = [(at, at + 1) for at in range(16)]
    assert [(one.first, one.last) for one in asked] == [*parts, (0, 0)]


def test_a_batch_that_turns_out_to_be_short_has_few_parts(monkeypatch):
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 1e9)
    with pool_of(Equal(), default_collate, num_workers=4) as pool:
        made(pool, [job(0, range(160))])
        asked = []
        monkeypatch.setattr(WorkerJob, "send", lambda self, channel: asked.append(self))
        pool.assign(job(1, range(160)))
        # Its cost is known: one worker makes it.
        assert [one.split for one in asked] == [None]


def test_where_parts_cost_more_than_they_give_no_batch_behind_the_first_has_any(asked, monkeypatch):
    # As of samples of 20 MB, which take long to write; but not longer than to make them.
    monkeypatch.setattr(splitting, "_MIN_GAIN", 1e9)
    monkeypatch.setattr(splitting, "_extra_seconds", lambda contents: 1e-6)
    jobs = [job(number, range(number, number + 16)) for number in range(4)]
    with pool_of(Equal(seconds=0.005), default_collate, num_workers=2) as pool:
        values = made(pool, jobs)
        assert not descriptors_of_parts()
    for number in range(4):
        same(values[number][0][:, 0], torch.arange(number, number + 16))
    # Two parts were given before anything was known. One worker made the rest.
    parts = [(one.whole.key[1], one.first, one.last) for one in asked if one.split]
    assert parts == [(0, 0, 2), (0, 2, 4), (0, 4, 16), (0, 0, 0)]
    assert [one.key[1] for one in asked if not one.split] == [1, 2, 3]


def test_where_the_rest_of_a_batch_costs_more_than_its_parts_it_is_begun_again(asked, monkeypatch):
    monkeypatch.setattr(splitting, "_MIN_GAIN", 1e9)
    # As long as samples of 20 MB are written and read.
    monkeypatch.setattr(splitting, "_extra_seconds", lambda contents: 10.0)
    jobs = [job(number, range(number, number + 16)) for number in range(4)]
    with pool_of(Equal(seconds=0.005), default_collate, num_workers=2) as pool:
        values = made(pool, jobs)
        assert not descriptors_of_parts()
        assert not pool._open
    for number in range(4):
        same(values[number][0][:, 0], torch.arange(number, number + 16))
    assert [(one.first, one.last) for one in asked if one.split] == [(0, 2), (2, 4)]
    assert [one.key[1] for one in asked if not one.split] == [0, 1, 2, 3]


def test_a_batch_whose_first_samples_are_quick_is_made_in_parts_as_the_others_were(
    asked, monkeypatch
):
    # Usual batches are worth their parts; this one takes less, as far as its first part shows.
    monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 100.0)
    monkeypatch.setattr(splitting, "_extra_seconds", lambda contents: 10.0)
    with pool_of(Equal(), default_collate, num_workers=2) as pool:
        pool._split_costs.add_batch(1000.0)
        values = made(pool, [job(0, range(8))])
        assert not descriptors_of_parts()
    same(values[0][0][:, 0], torch.arange(8))
    assert [(one.first, one.last) for one in asked] == [(n, n + 1) for n in range(8)] + [(0, 0)]


def test_where_parts_cost_more_the_next_epoch_has_none(asked, monkeypatch):
    monkeypatch.setattr(splitting, "_MIN_GAIN", 1e9)
    with pool_of(Equal(seconds=0.005), default_collate, num_workers=2) as pool:
        made(pool, [job(number, range(16)) for number in range(2)])
        asked.clear()
        made(pool, [job(number, range(16), epoch_id=1) for number in range(2)])
    assert [one.split for one in asked] == [None, None]


def test_a_batch_that_its_worker_has_not_begun_is_made_by_others():
    jobs = [job(number, range(8)) for number in range(6)]
    with pool_of(Equal(seconds=0.002), default_collate, num_workers=2) as pool:
        made(pool, jobs)
        first = next(iter(pool._workers.values()))
        os.kill(first.up.pid, signal.SIGSTOP)
        values = made(pool, [job(6, range(8, 16))])
        assert [one.key[1] for one in first.jobs] == [6]
        same(values[6][0][:, 0], torch.arange(8, 16))
        os.kill(first.up.pid, signal.SIGCONT)
        # What the stopped one answers is of no use, and disturbs nothing.
        same(made(pool, [job(7, range(4))])[7][0][:, 0], torch.arange(4))


def test_later_batches_of_an_epoch_are_made_by_one_worker_each():
    with pool_of(Equal(seconds=0.002), default_collate, num_workers=2) as pool:
        made(pool, [job(number, range(8)) for number in range(2)])
        assert not pool._try_split(job(2, range(8)))
        assert pool._try_split(job(0, range(8), epoch_id=1))


def test_behind_the_first_batches_each_worker_has_one_before_any_has_two(monkeypatch):
    loads: list[int] = []
    take = WorkerHandle.take_undecided
    # On a busy machine later batches count as heavy, and have parts as well.
    monkeypatch.setattr(
        WorkerHandle, "take_undecided", lambda worker, now: take(worker, now) and []
    )

    def look(turn):
        workers = list(pool._workers.values())
        if any(worker.has_parts for worker in workers):
            loads.extend(sum(job.split is None for job in worker.jobs) for worker in workers)

    with pool_of(Equal(seconds=0.01), default_collate, num_workers=4) as pool:
        made(pool, [job(number, range(12)) for number in range(12)], at_turn=look)
    assert max(loads) == 1


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
    size = chosen.choice([24, 70])
    jobs = [job(number, range(number * size, number * size + size)) for number in range(6)]
    dataset = Equal(chosen.choice(["torch", "python", "held"]), seconds=0.1 / size)
    with pool_of(dataset, default_collate, num_workers=1, splits=False) as alone:
        expected = made(alone, jobs)
    # A job that two workers die of is lost. All that a worker has count as killed: its answer to
    # the first one may be on its way, and it is at the second one. So does what it is given until
    # the pool sees its end.
    killed: set[object] = set()
    dead: list[WorkerHandle] = []
    kills = 0
    give = WorkerPool._give

    def note_given(pool, job, worker):
        if worker in dead:
            killed.add(job.key)
        give(pool, job, worker)

    monkeypatch.setattr(WorkerPool, "_give", note_given)

    def kill(turn):
        nonlocal kills
        # A job that is made again may be given to a worker whose end the pool has not seen.
        if turn % 9 != 5 or kills == 3 or not killed.isdisjoint(pool._open):
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


class Heavy(Equal):
    """Notes who made which sample; a heavy one takes until all that it waits for are made."""

    def __init__(self, folder, waits, *, draws="torch", seconds=0.004):
        super().__init__(draws, seconds=seconds)
        self.folder = folder
        self.waits = waits

    def __getitem__(self, index):
        with open(self.folder / str(index), "a") as file:
            file.write(f"{os.getpid()}\n")
        deadline = time.monotonic() + SECONDS / 3
        while not all((self.folder / str(other)).exists() for other in self.waits.get(index, ())):
            assert time.monotonic() < deadline, f"nobody makes what sample {index} waits for"
            time.sleep(0.005)
        return super().__getitem__(index)

    def makers(self, index):
        file = self.folder / str(index)
        return file.read_text().split() if file.exists() else []


BEGIN = [job(number, range(number * 8, number * 8 + 8)) for number in range(4)]
# A sample's time in batches of so many; of 64 two samples draw in a row, of 100 four.
SECONDS_OF = {12: 0.004, 64: 0.001, 100: 0.001}


def begin_of(size):
    """Batches that show what one of that size costs."""
    return [job(number, range(500 + number, 500 + number + size)) for number in range(4)]


def in_one_worker(tmp_path, jobs, collate=default_collate):
    """The batches that one worker makes, and no sample waits for another one."""
    folder = tmp_path / "alone"
    folder.mkdir()
    with pool_of(Heavy(folder, {}), collate, num_workers=1, splits=False) as alone:
        return made(alone, jobs)


def parts_folder(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    return folder


def share_no_sooner(monkeypatch, dataset, index):
    """Has a batch count as heavy only once that sample is begun, however slow the machine is."""
    take = WorkerHandle.take_undecided

    def take_late(worker, now):
        if dataset.makers(index):
            return take(worker, now)
        worker.looked_at = now
        return []

    monkeypatch.setattr(WorkerHandle, "take_undecided", take_late)


@pytest.mark.parametrize(
    ("size", "place"), [(12, 0), (12, 1), (12, 5), (12, 10), (64, 0), (64, 5), (100, 41)]
)
def test_a_heavy_sample_does_not_hold_the_rest_of_its_batch(size, place, tmp_path, monkeypatch):
    heavy = job(9, range(100, 100 + size))
    expected = in_one_worker(tmp_path, [*begin_of(size), heavy])
    # But for those that draw behind it in a row.
    waits = {100 + place: range(100 + next_stretch(place + 1, size=size), 100 + size)}
    dataset = Heavy(parts_folder(tmp_path), waits, seconds=SECONDS_OF[size])
    # Else another one may have it in a part with the samples that it waits for.
    share_no_sooner(monkeypatch, dataset, 100 + place)
    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, begin_of(size))
        values = made(pool, [heavy])
        assert not descriptors_of_parts()
        assert not pool._splits
        assert not pool._open
    same(values[9], expected[9])
    assert len(dataset.makers(100 + place)) == 1
    (maker,) = dataset.makers(100 + place)
    assert maker not in dataset.makers(99 + size)


def first_maker(dataset, index):
    """Who makes that sample, as soon as it is begun."""
    deadline = time.monotonic() + SECONDS / 3
    while not dataset.makers(index):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return dataset.makers(index)[0]


def values_of_unshared(pool, dataset, heavy):
    """The batch's value, whose heavy sample ends once the pool has decided not to share it."""

    def end_if_decided(turn):
        assert not pool._splits
        if not any(worker.has_undecided for worker in pool._workers.values()):
            (dataset.folder / "decided").touch()

    return made(pool, [heavy], at_turn=end_if_decided)


def test_a_heavy_sample_that_is_the_last_one_is_waited_for(tmp_path, monkeypatch):
    heavy = job(9, range(100, 108))
    expected = in_one_worker(tmp_path, [*BEGIN, heavy])
    dataset = Heavy(parts_folder(tmp_path), {107: ["decided"]})
    share_no_sooner(monkeypatch, dataset, 107)
    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, BEGIN)
        same(values_of_unshared(pool, dataset, heavy)[9], expected[9])
    assert [len(dataset.makers(index)) for index in range(100, 108)] == [1] * 8


def test_a_heavy_batch_is_not_shared_where_that_costs_more(tmp_path, monkeypatch):
    heavy = job(9, range(100, 108))
    dataset = Heavy(parts_folder(tmp_path), {101: ["decided"]})
    with pool_of(dataset, default_collate, num_workers=3) as pool:
        made(pool, BEGIN)
        monkeypatch.setattr(splitting, "MIN_SPLIT_SECONDS", 1e9)
        same(values_of_unshared(pool, dataset, heavy)[9][0][:, 0], torch.arange(100, 108))


def test_a_batch_behind_a_heavy_sample_is_made_by_others(tmp_path):
    jobs = [job(number, range(number * 8, number * 8 + 8)) for number in range(10, 20)]
    expected = in_one_worker(tmp_path, [*BEGIN, *jobs])
    # Of the first batch: until all others are made, also the one that waits in the same worker.
    dataset = Heavy(parts_folder(tmp_path), {82: [*range(83, 160)]})
    with pool_of(dataset, default_collate, num_workers=3) as pool:
        made(pool, BEGIN)
        values = made(pool, jobs)
        assert not descriptors_of_parts()
        assert not pool._open
    for number, value in values.items():
        same(value, expected[number])


# Of the large batch another worker makes up to five samples behind that one in the same part.
@pytest.mark.parametrize(("size", "waits_for"), [(12, range(107, 112)), (64, range(118, 164))])
@pytest.mark.parametrize("behind", [0, 1, 4])
def test_a_worker_that_is_beyond_where_it_should_stop_changes_nothing(
    behind, size, waits_for, tmp_path, monkeypatch
):
    heavy = job(9, range(100, 100 + size))
    expected = in_one_worker(tmp_path, [*begin_of(size), heavy], padded_pairs)
    dataset = Heavy(parts_folder(tmp_path), {106: waits_for}, seconds=SECONDS_OF[size])
    share_no_sooner(monkeypatch, dataset, 106)
    places = WorkerHandle.take_undecided

    def late(worker, now):
        return [(one, max(0, place - behind)) for one, place in places(worker, now)]

    monkeypatch.setattr(WorkerHandle, "take_undecided", late)
    with pool_of(dataset, padded_pairs, num_workers=4) as pool:
        made(pool, begin_of(size))
        values = made(pool, [heavy])
        assert not descriptors_of_parts()
    same(values[9], expected[9])
    # The worker had made those, and others did as well.
    assert len(dataset.makers(106)) == 1 + (behind > 0)


def padded_pairs(samples):
    return torch.stack([sample[0] for sample in samples]), [sample[1] for sample in samples]


@pytest.mark.parametrize("size", [12, 64])
@pytest.mark.parametrize("who", ["first", "other"])
def test_a_worker_killed_while_a_heavy_batch_is_shared_changes_nothing(who, size, tmp_path):
    heavy = job(9, range(100, 100 + size))
    expected = in_one_worker(tmp_path, [*BEGIN, heavy])
    # The heavy one ends when the test says so.
    dataset = Heavy(parts_folder(tmp_path), {103: ["killed"], 108: ["killed"]})
    kills: list[str] = []

    def kill(turn):
        if kills or not pool._splits:
            return
        parts = [one for worker in pool._workers.values() for one in worker.jobs if one.split]
        if not any(one.first <= 8 < one.last for one in parts):
            return
        pids = {"first": first_maker(dataset, 103), "other": first_maker(dataset, 108)}
        kills.append(pids[who])
        os.kill(int(pids[who]), signal.SIGKILL)
        (dataset.folder / "killed").touch()

    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, BEGIN)
        values = made(pool, [heavy], at_turn=kill)
        assert not descriptors_of_parts()
        assert not pool._splits
        assert not pool._open
        same(made(pool, [job(10, range(8))])[10][0][:, 0], torch.arange(8))
    assert kills
    same(values[9], expected[9])


def test_a_worker_that_hangs_in_a_shared_batch_is_replaced_by_others(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "OVERDUE_SECONDS", 0.3)
    monkeypatch.setattr(pools, "_OVERDUE_FACTOR", 0.0)
    heavy = job(9, range(100, 112))
    expected = in_one_worker(tmp_path, [*BEGIN, heavy])
    dataset = Heavy(parts_folder(tmp_path), {103: ["stopped"]})
    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, BEGIN)
        made(pool, [job(number, range(8)) for number in range(4, 8)])
        pool.assign(heavy)
        while not pool._splits:
            ready_of(pool)
            pool.flush()
        first = first_maker(dataset, 103)
        os.kill(int(first), signal.SIGSTOP)
        (dataset.folder / "stopped").touch()
        given: list[WorkerJob] = []
        deadline = time.monotonic() + SECONDS / 3
        while not given:
            assert time.monotonic() < deadline
            for fileno in select.select(list(pool.sockets()), [], [], 0.05)[0]:
                assert pool.handle(fileno) == []
            given = pool.give_late_jobs_again()
        assert [one.key for one in given] == [(0, 9)]
        values = made(pool, [], until=1)
        os.kill(int(first), signal.SIGCONT)
        same(values[9], expected[9])
        same(made(pool, [job(10, range(8))])[10][0][:, 0], torch.arange(8))
        assert not pool._splits
        assert not descriptors_of_parts()


def test_an_error_behind_a_heavy_sample_waits_for_the_samples_before_it(tmp_path):
    indices = [100, 101, 102, 1600, 104, 105, 106, 107]

    class Raising(Heavy):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            if index == 1600:
                raise LookupError("no sample 1600")
            return sample

    dataset = Raising(parts_folder(tmp_path), {101: [1600]})
    with pool_of(dataset, default_collate, num_workers=4) as pool:
        made(pool, BEGIN)
        values = made(pool, [job(9, indices), job(10, range(8))])
        assert set(values[9].lines) == {"index 1600", "no sample 1600"}
        same(values[10][0][:, 0], torch.arange(8))
        assert not pool._splits
        assert not descriptors_of_parts()


def test_a_worker_that_is_late_for_its_first_sample_shares_its_batch_all_the_same(
    monkeypatch, tmp_path
):
    begin = ProgressMemory.begin_order

    def begin_late(progress):
        begin(progress)
        # Longer than from when on a batch counts as heavy, as where it looks for generators.
        time.sleep(0.3)

    monkeypatch.setattr(ProgressMemory, "begin_order", begin_late)
    dataset = Heavy(parts_folder(tmp_path), {100: range(102, 108)})
    with pool_of(dataset, default_collate, num_workers=2) as pool:
        made(pool, BEGIN)
        values = made(pool, [job(9, range(100, 108))])
        same(values[9][0][:, 0], torch.arange(100, 108))


def test_samples_that_cannot_go_to_others_are_made_by_one_worker_to_the_end(monkeypatch, tmp_path):
    class Slowing(Heavy):
        def __getitem__(self, index):
            super().__getitem__(index)
            if index == 101:
                # Not for so many seconds, which a machine that stands still would hide.
                others = range(102, 110)
                processes.until(lambda: any(map(self.makers, others)), "others make the rest")
            return Sentinel.NONE

    dataset = Slowing(parts_folder(tmp_path), {})
    share_heavy = WorkerPool._share_heavy

    def share_at_slow_one(pool):
        # Before it, the answer that it has no parts may come before others have its rest.
        if dataset.makers(101):
            share_heavy(pool)

    monkeypatch.setattr(WorkerPool, "_try_split", lambda pool, job: False)
    monkeypatch.setattr(WorkerPool, "_share_heavy", share_at_slow_one)
    with pool_of(dataset, count_nones, num_workers=3) as pool:
        made(pool, BEGIN)
        values = made(pool, [job(9, range(100, 110)), job(10, range(8))])
        assert values == {9: 10, 10: 8}
        assert not pool._can_split
        assert not pool._open


@pytest.mark.parametrize("seed", seeds((0, 1)))
def test_heavy_tailed_costs_change_no_byte(seed, tmp_path):
    chosen = random.Random(seed)

    class Pareto(Slow):
        def __getitem__(self, index):
            time.sleep(min(0.4, 0.001 * random.Random(index).paretovariate(0.9)))
            return super().__getitem__(index)

    dataset = Pareto(chosen.choice(["torch", "python", "numpy", "held"]))
    sizes = [chosen.choice([6, 12, 24]) for _ in range(24)]
    jobs = [job(number, chosen.sample(range(1000), size)) for number, size in enumerate(sizes)]
    with pool_of(dataset, padded, num_workers=1, splits=False) as alone:
        expected = made(alone, jobs)
    with pool_of(dataset, padded, num_workers=chosen.randint(2, 6)) as pool:
        values = made(pool, jobs)
        assert not descriptors_of_parts()
        assert not pool._open
        assert not pool._splits
    for number, value in expected.items():
        same(values[number], value)


@pytest.mark.parametrize(
    ("size", "second", "makes"), [(32, 104, [100, 104]), (40, 104, [100, 101, 104, 105])]
)
def test_parts_of_an_epoch_that_is_left_are_made_no_further(size, second, makes, tmp_path):
    left = job(0, range(100, 100 + size))
    # Two workers are at the first sample of their first parts: of four stretches, and of two.
    dataset = Heavy(parts_folder(tmp_path), {100: ["left"], second: ["left"]})
    with pool_of(dataset, default_collate, num_workers=2) as pool:
        pool.assign(left)
        first_maker(dataset, 100)
        first_maker(dataset, second)
        assert pool.drop_parts(lambda job: job.order.epoch_id < 0) == []
        (lost,) = pool.drop_parts(lambda job: job.order.epoch_id < 1)
        assert (lost.job, lost.is_lost) == (left, True)
        (dataset.folder / "left").touch()
        values = made(pool, [job(number, range(8), epoch_id=1) for number in range(4)])
        assert not descriptors_of_parts()
        assert not pool._open
    for value in values.values():
        same(value[0][:, 0], torch.arange(8))
    assert [index for index in range(100, 100 + size) if dataset.makers(index)] == makes


def test_memory_of_parts_is_known_until_they_are_collated():
    with pool_of(Slow(seconds=0.002), plain, num_workers=2) as pool:
        assert pool.part_bytes == 0
        pool.assign(job(0, range(32)))
        most = 0
        results: list[Result] = []
        while not results:
            most = max(most, pool.part_bytes)
            for fileno in ready_of(pool):
                results += pool.handle(fileno)
        (whole,) = results
        # All parts but perhaps the last one, with what is between tensors.
        assert most >= whole.payload.nbytes / 2
        assert pool.part_bytes == 0
        whole.discard()


TIMES: Any = {"cpu_seconds": 0.0, "wall_seconds": 0.0, "send_seconds": 0.0}


def shared_orders(number, indices, *, part_samples, first_elsewhere):
    """The orders for a batch of which another host makes the samples from a place on."""
    indices = list(indices)
    order = msgspec.structs.replace(job(number, indices).order, part_samples=part_samples)
    places = first_elsewhere, len(indices)
    here = msgspec.structs.replace(order, elsewhere=(places,))
    there = msgspec.structs.replace(order, only=places)
    return WorkerJob((0, number), here), WorkerJob((0, number), there)


def passed_on(result):
    """A lent part as it comes to the other host."""
    content = result.part.content
    memory = result.part.read()
    part = BatchPart(
        session="s",
        epoch_id=0,
        batch_number=result.job.order.batch_number,
        first=result.job.first,
        num_samples=content.num_samples,
        tree=content.tree,
        cpu_seconds=content.cpu_seconds,
        wall_seconds=content.wall_seconds,
        send_seconds=content.send_seconds,
        bad=content.bad,
        payload=b"" if memory is None else memory.tobytes(),
    )
    result.discard()
    return part


def made_by_two(here, there, orders, *, comes=lambda part: True):
    """The batch's value, and how many parts came from `there` of those that may come."""
    mine, theirs = orders
    here.assign(mine)
    there.lend(theirs)
    came = 0
    while True:
        files = [*here.sockets(), *there.sockets()]
        ready, _, _ = select.select(files, [], [], SECONDS)
        assert ready, "the workers are silent"
        results: list[Result] = []
        for fileno in ready:
            results += here.handle(fileno)
            for lent in there.handle(fileno):
                part = passed_on(lent)
                if comes(part):
                    came += 1
                    results += here.add_part(lambda job: job.key == mine.key, part)
        here.flush()
        there.flush()
        if results:
            (whole,) = results
            assert whole.job is mine
            return value_of(whole), came


def drawn_batch(chosen, *, seconds, has_failures):
    """A dataset, a collate function and the indices of a batch, by chance; two of them may fail.

    Of the larger ones, three samples draw in a row.
    """
    size = chosen.choice([24, 96])
    dataset = Slow(
        chosen.choice(["", "torch", "python", "numpy", "held"]), seconds=seconds * 24 / size
    )
    collate = chosen.choice([plain, drawing, padded])
    indices = [chosen.randrange(1000) for _ in range(size)]
    if has_failures:
        for place in chosen.sample(range(24), 2):
            indices[place] = chosen.randrange(1000, 1400)
    return dataset, collate, indices


@pytest.mark.parametrize("seed", seeds(OFTEN_SHARED))
def test_a_batch_of_two_hosts_is_the_batch_that_one_worker_makes(seed):
    chosen = random.Random(seed)
    dataset, collate, indices = drawn_batch(chosen, seconds=0.003, has_failures=seed % 4 == 3)
    lost = chosen.choice([0.0, 0.3, 1.0])
    orders = shared_orders(0, indices, part_samples=3, first_elsewhere=chosen.choice([3, 12, 21]))
    with pool_of(dataset, collate, num_workers=1, splits=False) as alone:
        expected = made(alone, [job(0, indices)])[0]
    workers = chosen.choice([1, 2]), chosen.choice([1, 2, 3])
    with (
        pool_of(dataset, collate, num_workers=workers[0]) as here,
        pool_of(dataset, collate, num_workers=workers[1]) as there,
    ):
        value, _ = made_by_two(here, there, orders, comes=lambda part: chosen.random() >= lost)
        if isinstance(expected, Raised):
            assert value.lines == expected.lines
        else:
            same(value, expected)
        assert not here._open
        assert not here._splits
        there.drop_parts(lambda job: True)
        assert not there._splits
        assert not there._open
        assert not descriptors_of_parts()
        # Both go on.
        for pool in (here, there):
            assert not isinstance(made(pool, [job(1, [1, 2, 3])])[1], Raised)


def later_orders(number, indices, *, part_samples, first_elsewhere):
    """The order for a whole batch, and what hosts are told and asked for once it is begun."""
    whole = job(number, indices)
    _, theirs = shared_orders(
        number, indices, part_samples=part_samples, first_elsewhere=first_elsewhere
    )
    shares = Share(
        session="s",
        epoch_id=0,
        batch_number=number,
        part_samples=part_samples,
        elsewhere=(theirs.order.only,),
    )
    return whole, shares, theirs


@pytest.mark.parametrize("seed", seeds(OFTEN_SHARED))
def test_a_batch_that_others_help_with_once_it_is_begun_is_the_same(seed):
    chosen = random.Random(seed)
    dataset, collate, indices = drawn_batch(chosen, seconds=0.004, has_failures=seed % 4 == 3)
    lost = chosen.choice([0.0, 0.3, 1.0])
    first_elsewhere = chosen.choice([3, 12, 21])
    whole, shares, theirs = later_orders(
        1, indices, part_samples=3, first_elsewhere=first_elsewhere
    )
    before = job(0, chosen.sample(range(1000), 12))
    with pool_of(dataset, collate, num_workers=1, splits=False) as alone:
        expected = made(alone, [before, whole])
    workers = chosen.choice([1, 2, 4]), chosen.choice([1, 2, 3])
    with (
        pool_of(dataset, collate, num_workers=workers[0], splits=True) as here,
        pool_of(dataset, collate, num_workers=workers[1], splits=True) as there,
    ):
        here._num_assigned["s"] = 0, chosen.choice([0, 100])
        here.assign(before)
        waiting = [whole]
        told_at, turn = chosen.choice([0, 1, 3, 8]), 0
        results: list[Result] = []
        while len(results) < 2:
            if waiting and here.room > 0:
                here.assign(waiting.pop())
                turn = 0
            if not waiting and turn == told_at:
                here.share_out(lambda job: job.key == whole.key, shares)
                there.lend(theirs)
            turn += 1
            files = [*here.sockets(), *there.sockets()]
            for fileno in select.select(files, [], [], 0.05)[0]:
                results += here.handle(fileno)
                for lent in there.handle(fileno):
                    part = passed_on(lent)
                    if chosen.random() >= lost:
                        results += here.add_part(lambda job: job.key == whole.key, part)
            here.flush()
            there.flush()
        values = {result.job.key[1]: value_of(result) for result in results}
        for number, value in expected.items():
            if isinstance(value, Raised):
                assert values[number].lines == value.lines, seed
            else:
                same(values[number], value)
        assert not here._open
        assert not here._splits
        there.drop_parts(lambda job: True)
        assert not there._splits
        assert not descriptors_of_parts()
        for pool in (here, there):
            assert not isinstance(made(pool, [job(2, [1, 2, 3])])[2], Raised)


@pytest.mark.parametrize("place", [0, 1], ids=["begun", "behind another one"])
def test_a_worker_stops_where_others_make_the_rest(place, tmp_path):
    whole, shares, theirs = later_orders(1, range(100, 112), part_samples=3, first_elsewhere=6)
    # The batch's first sample is held; or a sample of the batch before it.
    dataset = Heavy(parts_folder(tmp_path), {(100, 8)[place]: ["shared"]})
    other = Heavy(dataset.folder, {})
    with (
        pool_of(dataset, default_collate, num_workers=1, splits=True) as here,
        pool_of(other, default_collate, num_workers=1, splits=True) as there,
    ):
        here._num_assigned["s"] = 0, 100
        jobs = [whole] if place == 0 else [job(0, range(8, 12)), whole]
        for one in jobs:
            here.assign(one)
        first_maker(dataset, (100, 8)[place])
        here.share_out(lambda job: job.key == whole.key, shares)
        there.lend(theirs)
        parts: list[BatchPart] = []
        while len(parts) < 2:
            for fileno in ready_of(there):
                parts += [passed_on(lent) for lent in there.handle(fileno)]
        for part in parts:
            assert not here.add_part(lambda job: job.key == whole.key, part)
        (dataset.folder / "shared").touch()
        values = made(here, [], until=len(jobs))
        same(values[1][0][:, 0], torch.arange(100, 112))
    assert [len(dataset.makers(index)) for index in range(100, 112)] == [1] * 12


def test_a_host_makes_the_samples_of_another_one_that_do_not_come(tmp_path):
    orders = shared_orders(0, range(100, 112), part_samples=3, first_elsewhere=6)
    dataset = Heavy(parts_folder(tmp_path), {})
    with pool_of(dataset, default_collate, num_workers=2) as here:
        value = made(here, [orders[0]])[0]
    same(value[0][:, 0], torch.arange(100, 112))
    assert [len(dataset.makers(index)) for index in range(100, 112)] == [1] * 12


def test_what_another_host_has_sent_is_not_made_here(tmp_path):
    orders = shared_orders(0, range(100, 112), part_samples=3, first_elsewhere=6)
    # The own samples end once those of the other host are there.
    dataset = Heavy(parts_folder(tmp_path), {100: ["came"], 103: ["came"]})
    parts: list[BatchPart] = []
    with (
        pool_of(Heavy(dataset.folder, {}), default_collate, num_workers=2) as there,
        pool_of(dataset, default_collate, num_workers=2) as here,
    ):
        there.lend(orders[1])
        while len(parts) < 2:
            for fileno in ready_of(there):
                parts += [passed_on(lent) for lent in there.handle(fileno)]
        here.assign(orders[0])
        for part in parts:
            assert not here.add_part(lambda job: True, part)
        (dataset.folder / "came").touch()
        value = made(here, [], until=1)[0]
    same(value[0][:, 0], torch.arange(100, 112))
    assert [len(dataset.makers(index)) for index in range(100, 112)] == [1] * 12


@pytest.mark.parametrize(
    "wrong", [{"first": 0}, {"first": 7}, {"first": 9, "num_samples": 2}, {"first": 12}]
)
def test_parts_that_nobody_expects_are_dropped(wrong, tmp_path):
    orders = shared_orders(0, range(100, 112), part_samples=3, first_elsewhere=6)
    dataset = Heavy(parts_folder(tmp_path), {100: ["came"]})
    part = BatchPart(
        session="s",
        epoch_id=0,
        batch_number=0,
        tree=b"",
        payload=b"x",
        **TIMES,
        **{"num_samples": 3} | wrong,
    )
    with pool_of(dataset, default_collate, num_workers=2) as here:
        here.assign(orders[0])
        assert not here.add_part(lambda job: True, part)
        (dataset.folder / "came").touch()
        same(made(here, [], until=1)[0][0][:, 0], torch.arange(100, 112))
        assert not descriptors_of_parts()


def test_samples_of_another_host_count_as_memory():
    orders = shared_orders(0, range(12), part_samples=3, first_elsewhere=6)
    part = BatchPart(
        session="s",
        epoch_id=0,
        batch_number=0,
        first=6,
        num_samples=3,
        tree=b"",
        payload=bytes(5000),
        **TIMES,
    )
    with pool_of(Equal(seconds=0.2), default_collate, num_workers=1) as here:
        here.assign(orders[0])
        here.add_part(lambda job: True, part)
        assert here.part_bytes == 5000


def test_a_part_with_other_samples_than_it_says_is_an_error():
    orders = shared_orders(0, range(12), part_samples=6, first_elsewhere=6)
    tree = codec.encode([1, 2], allow_pickle=False).tree
    part = BatchPart(
        session="s", epoch_id=0, batch_number=0, first=6, num_samples=6, tree=tree, **TIMES
    )
    with pool_of(Equal(seconds=0.01), default_collate, num_workers=1) as here:
        here.assign(orders[0])
        here.add_part(lambda job: True, part)
        assert "a part of 6 samples has 2" in made(here, [], until=1)[0].text


def test_a_worker_that_dies_of_a_lent_part_leaves_nothing():
    orders = shared_orders(0, [*range(8), 1500, *range(3)], part_samples=3, first_elsewhere=6)
    with pool_of(Equal(seconds=0.01), default_collate, num_workers=2) as there:
        there.lend(orders[1])
        while there._splits:
            for fileno in ready_of(there):
                for lent in there.handle(fileno):
                    lent.discard()
            there.flush()
        assert not there._open
        assert not descriptors_of_parts()
        same(made(there, [job(1, range(8))])[1][0][:, 0], torch.arange(8))


class Cropped(Slow):
    """Samples as crops, every other frame, and flips make them: views, whose memory has gaps."""

    def __getitem__(self, index):
        image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(index))
        match index % 4:
            case 0:
                return image[:, 5:45, 7:47]
            case 1:
                return image[:, ::2]
            case 2:
                return image.numpy()[:, ::-1, 3:60]
        return image[..., 9].numpy()


def summed(samples):
    """Sums of floats: their last bits follow from the way that torch takes through memory."""
    sums = []
    for sample in samples:
        if torch.is_tensor(sample):
            sums.append(float(sample.sum()))
        elif sample.ndim == 3:
            sums.append(float(torch.from_numpy(sample[:, ::-1]).sum()))
        else:
            sums.append(float(torch.from_numpy(sample).sum()))
    return sums


def test_samples_with_gaps_in_their_memory_are_summed_as_by_the_worker_that_made_them():
    jobs = [job(number, range(number * 40, number * 40 + 40)) for number in range(3)]
    with pool_of(Cropped(), summed, num_workers=1, splits=False) as alone:
        expected = made(alone, jobs)
    with pool_of(Cropped(), summed, num_workers=3) as pool:
        assert made(pool, jobs) == expected
        assert pool._can_split
