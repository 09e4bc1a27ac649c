"""Children of a trainer make batches in the feed's pool."""

import multiprocessing
import os
import select
import signal
import threading
import time
import weakref

import numpy as np
import pytest
from torch.utils.data import IterableDataset

from stoker.feed.module_generators import module_generators
from stoker.feed.trainer.local_workers import ChildStarter, LocalWorkers
from stoker.feed.wire.codec import pack_value
from stoker.feed.wire.dataset import DatasetSpec, pack_spec
from stoker.feed.wire.protocol import Make, Stream
from stoker.feed.workers.worker_handle import OwnChild

MAX_SECONDS = 150.0


def one(samples):
    return samples[0]


def workers_of(dataset, deaths, **facts):
    spec = DatasetSpec(dataset=dataset, collate_fn=one, **facts)
    packed = pack_spec(spec, max_bytes=1 << 20)
    how = {"num_workers": 2, "context": None, "base_seed": 0, "seeding": "batch", "host": "here"}
    children = ChildStarter(spec, packed, **how)
    return LocalWorkers(
        children, credits_each=2, splits=True, wake=lambda: None, on_death=deaths.append
    )


def order(number, *, stream=None):
    packed = pack_value([number], allow_pickle=True)
    return Make(
        session="s",
        epoch_id=0,
        batch_number=number,
        index=packed,
        seed_words=(0, 0, 0, number),
        stream=stream,
    )


def made_by(local, count, *, credits=0):
    made, seen, until = [], set[int](), time.monotonic() + MAX_SECONDS
    while (len(made) < count or local.credits < credits) and time.monotonic() < until:
        ready, _, _ = select.select(list(local.sockets()), [], [], 1.0)
        made += [result.job.key for each in ready for result in local.handle(each)]
        local.give_late_jobs_again()
        local.flush()
        seen.add(local.credits)
    return made, seen


class Whose:
    def __getitem__(self, index):
        return os.getpid()


def test_workers_outlive_the_thread_that_started_them():
    deaths: list[str] = []
    found: list[LocalWorkers] = []
    thread = threading.Thread(target=lambda: found.append(workers_of(Whose(), deaths)))
    thread.start()
    thread.join(MAX_SECONDS)
    (local,) = found
    try:
        assert made_by(local, 0, credits=4)[1] >= {4}
        # Twice two: a worker that died after its first batch is seen.
        for first in (0, 2):
            for number in (first, first + 1):
                assert local.ask(order(number)) == []
            made, credits = made_by(local, 2)
            assert (len(made), credits) == (2, {4})
        assert not deaths
    finally:
        local.close()


def test_a_dataset_goes_with_the_script_s_loader_while_its_workers_go_on():
    dataset, deaths = Whose(), list[str]()
    local, gone = workers_of(dataset, deaths), weakref.ref(dataset)
    try:
        del dataset
        assert gone() is None
        assert local.ask(order(0)) == []
        assert made_by(local, 1)[0] == [(0, 0, 0)]
    finally:
        local.close()


def test_modules_are_looked_at_once_before_workers_are_forked():
    module_generators.cache_clear()
    workers_of(Whose(), []).close()
    # Of a fork this process would have heard nothing.
    assert vars(module_generators())["_num_modules"] > 0


def test_a_child_that_ends_where_the_script_ignores_sigchld_is_not_waited_for():
    # Its exit code is never known then.
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = multiprocessing.get_context("fork").Process(target=os.getpid)
        process.start()
        child = OwnChild(process)
        child.join()
        assert child.exitcode is None
    finally:
        signal.signal(signal.SIGCHLD, before)
        # It would be one of this process's for ever, also to later tests.
        vars(multiprocessing.process)["_children"].discard(process)


# What a thread of the script has, now and then, and a worker needs as it starts.
_LOCK = threading.Lock()


class Locking:
    def __getitem__(self, index):
        return index


class LockingStream(IterableDataset):
    def __iter__(self):
        with _LOCK:
            return iter([[number] for number in range(8)])


def use_lock(worker_id):
    with _LOCK:
        pass


@pytest.mark.parametrize("kind", ["map-style", "stream"])
def test_a_child_that_was_forked_while_a_thread_had_a_lock_that_it_needs_is_replaced(kind):
    deaths: list[str] = []
    stream = None
    with _LOCK:
        if kind == "map-style":
            local = workers_of(Locking(), deaths, worker_init_fn=use_lock)
        else:
            local = workers_of(LockingStream(), deaths, is_iterable=True, auto_collation=False)
            stream = Stream(shard=1, num_shards=2, generation=3)
        # Of a shard the child starts with the first request.
        assert local.ask(order(1, stream=stream)) == []
    try:
        made, _ = made_by(local, 1)
        assert made == [(0, 1, 3 if stream else 0)]
        for how in deaths:
            assert "for a lock that a thread of its parent had when it was forked" in how
            assert "test_local_workers.py" in how
        # One at least: of two map-style workers the other one may follow.
        assert deaths
    finally:
        local.close()


def test_children_are_forked_between_two_draws_of_the_script():
    is_over = threading.Event()

    def draw():
        # Without Python's lock, but for moments.
        while not is_over.is_set():
            np.random.rand(1_000_000)

    deaths: list[str] = []
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        local = workers_of(Whose(), deaths)
        try:
            assert made_by(local, 0, credits=4)[1] >= {4}
        finally:
            local.close()
    finally:
        is_over.set()
        thread.join()
    # As they start they seed the generator that it draws from.
    assert deaths == []
