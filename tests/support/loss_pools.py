"""A pool of forked workers without a trainer, for tests of samples that end or block them."""

import contextlib
import dataclasses
import importlib
import multiprocessing
import select
import time
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from stoker.feed.module_generators import module_generators
from stoker.feed.wire import codec
from stoker.feed.wire.dataset import DatasetSpec, unpack_error
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.crashes import LossRules
from stoker.feed.workers.jobs import WorkerJob
from stoker.feed.workers.pool import WorkerPool
from stoker.feed.workers.worker import worker_main
from stoker.feed.workers.worker_handle import OwnChild

SECONDS = 150


def prepare_for_forks():
    """Does once, for all workers that are forked, what a host or trainer has done before it forks.

    In each worker it took 20 of 35 CPU-milliseconds: it copies the pages of all modules.
    """
    importlib.import_module("stoker.feed.wire.process_group")
    module_generators().version()


@contextmanager
def pool_of(
    dataset,
    *,
    num_workers=2,
    seeding="stretch",
    on_error="skip",
    timeout=None,
    auto_collation=True,
    splits=False,
    hosts_on_error=None,
):
    """Args: hosts_on_error: What the host is told, where that is another than the trainer's."""
    context = multiprocessing.get_context("fork")
    prepare_for_forks()
    spec = DatasetSpec(
        dataset=dataset,
        collate_fn=cast("Any", default_collate),
        num_workers=num_workers,
        on_error=on_error,
        auto_collation=auto_collation,
    )

    def start(role, sock):
        told = {"worker_id": role.number, "num_workers": 16, "base_seed": 0, "seeding": seeding}
        child = context.Process(target=worker_main, args=(sock, spec), kwargs=told)
        child.start()
        return OwnChild(child)

    rules = LossRules(on_error=hosts_on_error or on_error, timeout_seconds=timeout)
    pool = WorkerPool(start, num_workers=num_workers, rules=rules, splits=splits)
    with contextlib.closing(pool):
        yield pool


def job(number, indices):
    return job_of(number, list(indices))


def job_of(number, given):
    """The job for what a sampler gave."""
    index = codec.pack_value(given, allow_pickle=True)
    order = Make(
        session="s", epoch_id=0, batch_number=number, index=index, seed_words=(7, 0, 0, number)
    )
    return WorkerJob((0, number), order)


def wait_for_worker(pool):
    while not pool.is_ready:
        for fileno in select.select(list(pool.sockets()), [], [], SECONDS)[0]:
            pool.handle(fileno)


def job_again(result):
    result.discard()
    # The batch, whatever the last order of the search in it was.
    return dataclasses.replace(result.job, again=None)


def made(pool, jobs, *, at_turn=lambda: None, is_asked_again=False):
    """Results by number: batch and bad samples, or the text of the error."""
    waiting = list(jobs)
    results: dict[object, object] = {}
    deadline = time.monotonic() + SECONDS
    while len(results) < len(jobs):
        assert time.monotonic() < deadline, results
        while waiting and pool.room > 0:
            pool.assign(waiting.pop(0))
        ready, _, _ = select.select(list(pool.sockets()), [], [], 0.05)
        for fileno in ready:
            for result in pool.handle(fileno):
                if result.is_lost and is_asked_again:
                    # As a trainer does.
                    waiting.append(job_again(result))
                else:
                    results[result.job.key[1]] = value_of(result)
        pool.give_late_jobs_again()
        at_turn()
    return results


def value_of(result):
    if result.error is not None:
        return str(unpack_error(result.error)), result.is_lost
    payload = None if result.payload is None else np.array(result.payload)
    value = cast("torch.Tensor", codec.decode(result.tree, payload, allow_pickle=True)).tolist()
    bad = [
        (one.place, one.index, one.error, one.text, one.replaced_by) for one in result.samples.bad
    ]
    result.discard()
    return value, bad
