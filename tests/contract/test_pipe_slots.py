"""Batches are built in shared memory: what a worker sends is what its collate function returned."""

import contextlib
import multiprocessing
import os
import re
import resource
import select
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

from stoker.errors import FeedLostError
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, unpack_error
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.pool import WorkerPool
from stoker.feed.workers.worker import worker_main
from support.loss_pools import prepare_for_forks

BATCH = 8


class Squares(Dataset[dict[str, object]]):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        side = 20 + index // 200
        return {"image": torch.full((3, side, side), index % 251, dtype=torch.uint8), "n": index}


class Hoarder:
    def __init__(self):
        self.calls = 0
        self.kept = torch.zeros(1)

    def __call__(self, samples):
        batch = default_collate(samples)
        self.calls += 1
        if self.calls == 3:
            self.kept = batch["image"]
        return {"now": batch["image"], "kept": self.kept}


def halved(samples):
    batch = default_collate(samples)
    return {"half": batch["image"][: BATCH // 2], "odd": batch["image"][1:], "n": batch["n"]}


def converted(samples):
    return default_collate(samples)["image"].float() / 2


def shared(samples):
    batch = default_collate(samples)["image"]
    return [batch, batch, batch.numpy()[0], batch[2].clone()]


@contextmanager
def pool_of(collate):
    context = multiprocessing.get_context("fork")
    spec = DatasetSpec(dataset=Squares(), collate_fn=collate)

    def start(role, sock):
        given = {"worker_id": role.number, "num_workers": 1, "base_seed": 0, "seeding": "batch"}
        child = context.Process(target=worker_main, args=(sock, spec), kwargs=given)
        child.start()
        return child

    prepare_for_forks()
    with contextlib.closing(WorkerPool(start, num_workers=1)) as pool:
        while not pool.is_ready:
            ready, _, _ = select.select(list(pool.sockets()), [], [], 30.0)
            assert ready
            pool.handle(ready[0])
        yield pool


def make(pool, first):
    index = codec.pack_value(list(range(first, first + BATCH)), allow_pickle=False)
    order = Make(session="s", epoch_id=0, batch_number=0, index=index, seed_words=(0, 0, 0, 0))
    pool.assign(WorkerJob((first,), order))
    while True:
        ready, _, _ = select.select(list(pool.sockets()), [], [], 30)
        assert ready, "the worker is silent"
        for fileno in ready:
            for result in pool.handle(fileno):
                return result


def samples_of(first):
    return [Squares()[index] for index in range(first, first + BATCH)]


def made_by(pool, firsts):
    for first in firsts:
        result = make(pool, first)
        yield first, result
        result.release()
        pool.flush()


def value_of(result):
    return codec.decode(result.tree, np.array(result.payload), allow_pickle=True)


@pytest.mark.parametrize("collate", [default_collate, halved, converted, shared])
def test_a_worker_sends_what_its_collate_function_returned(collate):
    with pool_of(collate) as pool:
        # Sizes change at 200, 400, ...: smaller, larger and equal batches than the one before.
        for first, result in made_by(pool, (0, 8, 16, 400, 408, 96, 200, 208, 992)):
            expected = collate(samples_of(first))
            torch.testing.assert_close(value_of(result), expected, rtol=0, atol=0)


def test_a_batch_that_the_dataset_keeps_is_never_written_over():
    with pool_of(Hoarder()) as pool:
        for first, result in made_by(pool, range(0, 80, BATCH)):
            value, images = value_of(result), default_collate(samples_of(first))["image"]
            torch.testing.assert_close(value["now"], images)
            if first > 3 * BATCH:
                third = default_collate(samples_of(2 * BATCH))["image"]
                torch.testing.assert_close(value["kept"], third)


def num_slots():
    return len(re.findall(r"/memfd:stoker-\d+-", Path("/proc/self/maps").read_text()))


def test_the_memory_of_a_closed_pool_is_free_with_its_last_batch():
    before = num_slots()
    with pool_of(default_collate) as pool:
        results = [make(pool, first) for first in (0, 8)]
        assert num_slots() > before
        results.pop(0).release()
        pool.close()
        # Sent by another thread, which lets go of it when nobody gives slots back any more.
        results.pop().release()
        # The pool is still held: by whatever made it, until garbage is collected.
        assert num_slots() == before


def held_then_given_back(pool):
    """Has four batches wait at once, and gives them back."""
    results = [make(pool, first) for first in (0, 8, 16, 24)]
    for result in results:
        result.payload = None
        result.release()
    pool.flush()
    make_and_free(pool, 32)


def make_and_free(pool, first):
    result = make(pool, first)
    result.payload = None
    result.release()
    pool.flush()


def num_slots_of(pool):
    """Returns how many slots there are once the worker says that no more are closed."""
    while True:
        ready, _, _ = select.select(list(pool.sockets()), [], [], 0.5)
        if not ready:
            return num_slots()
        for fileno in ready:
            pool.handle(fileno)


def test_a_worker_keeps_no_memory_for_later_batches_where_it_is_short():
    before = num_slots()
    with pool_of(default_collate) as pool:
        held_then_given_back(pool)
        assert num_slots_of(pool) - before == 3
        pool.spare_memory(0.25)
        assert num_slots_of(pool) == before
        make_and_free(pool, 40)
        assert num_slots_of(pool) == before
        pool.spare_memory(1.0)
        held_then_given_back(pool)
        assert num_slots_of(pool) - before == 3


def test_a_worker_that_starts_where_memory_is_short_keeps_none_for_later_batches():
    before = num_slots()
    with pool_of(default_collate) as pool:
        pool.spare_memory(0.25)
        (worker,) = pool._workers.values()
        worker.process.kill()
        wait_until_ready(pool)
        held_then_given_back(pool)
        assert num_slots_of(pool) == before


def wait_until_ready(pool):
    """Waits until a worker has taken the place of one that was killed."""
    while True:
        ready, _, _ = select.select(list(pool.sockets()), [], [], 30.0)
        assert ready
        for fileno in ready:
            pool.handle(fileno)
        if pool.is_ready:
            return


def _make_one_without_descriptors(told):
    with pool_of(default_collate) as pool:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, most))
        with contextlib.suppress(OSError):
            while True:
                os.open(os.devnull, os.O_RDONLY)
        told.send(make(pool, 0).error)


def test_a_batch_that_no_descriptor_is_left_for_is_an_error_that_names_the_limit():
    ours, theirs = multiprocessing.Pipe()
    # Its own process: the limit and what is open stay in it.
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=_make_one_without_descriptors, args=(theirs,))
    child.start()
    try:
        assert ours.poll(30), "the batch hangs"
        error = unpack_error(ours.recv())
    finally:
        child.kill()
        child.join()
    assert isinstance(error, FeedLostError)
    assert "too many open files, the limit of this process (ulimit -n) is 64" in error.what
    assert "raise the limit of open files" in error.fix
