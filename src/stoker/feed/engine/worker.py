"""A worker: one process that makes batches for one loader of one rank.

The main thread takes an order, makes the batch, and hands it to the sending thread, which seals it
while the next one is made; a third reads orders. A connection that ends, ends the worker.
"""

import contextlib
import faulthandler
import mmap
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch.utils.data import _DatasetKind
from torch.utils.data._utils import collate
from torch.utils.data._utils import worker as torch_worker

from stoker.feed import seeding
from stoker.feed.engine.batch_socket import Connection
from stoker.feed.engine.codec import encode
from stoker.feed.engine.facts import WorkerFacts, enter_rank, unpack_facts
from stoker.feed.engine.loader_spec import LoaderSpec
from stoker.feed.engine.messages import (
    NO_SAMPLE,
    BadSample,
    Exhausted,
    Made,
    Make,
    Raised,
    Ready,
    pack,
    unpack_order,
)
from stoker.feed.engine.raised import pack_error
from stoker.feed.foreign_loaders import become_data_worker, hide_worker
from stoker.feed.seeding import Seeder
from stoker.feed.streams import ShardBatches, StreamFetcher
from stoker.feed.tolerance import TolerantFetcher, samples_words

# After that the worker writes its stack into the host's log, and again each time.
STACK_SECONDS = 60.0
# A packed message, and the memory of its leaves.
_Outgoing = tuple[bytes, Sequence[memoryview]]


def serve(
    connection: Connection,
    load: Callable[[], LoaderSpec],
    *,
    host: str,
    progress: "Progress",
) -> None:
    """Answers orders; ends the process with the connection, whatever it does then.

    Args:
        connection: To the trainer.
        load: Returns what batches are made of.
        host: Name of this host.
        progress: Of this worker.
    """
    received: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # `put` waits while an earlier answer is sent: one is sent while the next one is made.
    answers: queue.Queue[_Outgoing] = queue.Queue(maxsize=1)
    threading.Thread(target=_send_all, args=(connection, answers), daemon=True).start()
    # Its own thread: a sample may hang, and an order of 500 KB fits no socket's buffer.
    threading.Thread(target=_read_all, args=(connection, received), daemon=True).start()
    facts = unpack_facts(received.get())
    source: _Map | _Stream | None = None
    error = b""
    try:
        source = _begun(load(), facts, host=host, progress=progress)
    except Exception as err:
        # Each order has this answer.
        error = pack_error(err, where=f"the start of data worker {facts.worker} on host {host}")
    answers.put((pack(Ready()), ()))
    while True:
        order = unpack_order(received.get())
        progress.begin(order.epoch_id, order.number)
        # Written by a thread of C, also while native code has the GIL.
        faulthandler.dump_traceback_later(STACK_SECONDS, repeat=True)
        if source is None:
            answers.put((pack(Raised(order.number, order.epoch_id, error)), ()))
        else:
            answers.put(_answer(order, source))
        faulthandler.cancel_dump_traceback_later()


class Progress:
    """What a worker makes, in memory that it shares with its loader process.

    The id of the epoch, the number of the batch, and the place of the sample; -1: not known.
    """

    def __init__(self) -> None:
        self._values = np.frombuffer(mmap.mmap(-1, 3 * 8), dtype=np.int64)
        self._values[:] = -1

    def begin(self, epoch_id: int, number: int) -> None:
        self._values[:] = (epoch_id, number, NO_SAMPLE)

    def note(self, place: int) -> None:
        """Notes which sample is made next; NO_SAMPLE: none, or all by one call."""
        self._values[2] = place

    def read(self) -> tuple[int, int, int]:
        epoch_id, number, place = self._values.tolist()
        return epoch_id, number, place


def _send_all(connection: Connection, answers: "queue.Queue[_Outgoing]") -> None:
    """Seals and sends answers, in order."""
    # The reading thread ends the process with the connection.
    with contextlib.suppress(OSError):
        while True:
            packed, leaves = answers.get()
            connection.write(packed, leaves)
            # No batch lives longer than it must.
            del packed, leaves


def _read_all(connection: Connection, received: "queue.SimpleQueue[bytes]") -> None:
    try:
        while True:
            received.put(connection.head()[0])
    except OSError:
        # The trainer has closed it, or is gone.
        pass
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer(order: Make, source: "_Map | _Stream") -> _Outgoing:
    wall = time.monotonic()
    cpu = time.process_time()
    try:
        pickled, leaves = encode(source.make(order))
    except _ExhaustedError:
        return pack(Exhausted(order.number, order.epoch_id)), ()
    except Exception as err:
        error = pack_error(err, where=source.where)
        return pack(Raised(order.number, order.epoch_id, error)), ()
    made = Made(
        order.number,
        order.epoch_id,
        pickled,
        tuple(leaf.nbytes for leaf in leaves),
        cpu_seconds=time.process_time() - cpu,
        wall_seconds=time.monotonic() - wall,
        bad=source.bad,
        own=source.own_state(),
    )
    return pack(made), leaves


class _ExhaustedError(Exception):
    """The shard of an iterable dataset has no more batches."""


# ---- beginning


def _begun(
    spec: LoaderSpec, facts: WorkerFacts, *, host: str, progress: Progress
) -> "_Map | _Stream":
    """Makes this process a worker of a rank; returns what makes its batches."""
    become_data_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Out of memory, a worker is the cheapest process to lose.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        # Of 1000: before processes of the same size that have the usual 0.
        file.write("500")
    # Nobody else reads a batch in /dev/shm, and a container may have no room in it.
    collate.default_collate_fn_map[torch.Tensor] = _stacked
    enter_rank(facts)
    if spec.is_iterable:
        return _Stream(spec, facts, host)
    return _Map(spec, facts, host, progress)


def _stacked(tensors: Sequence[torch.Tensor], **options: object) -> object:
    """Stacks tensors as default_collate does in the main process."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return collate.collate_tensor_fn(tensors, **options)  # type: ignore[arg-type]
    finally:
        torch_worker._worker_info = info


def _begin_as_torch(
    spec: LoaderSpec, facts: WorkerFacts, base_seed: int, *, is_first: bool = True
) -> None:
    """Does what torch's worker loop does first: seeds, sets get_worker_info(), calls the init."""
    seeding.seed_as_torch(base_seed, facts.worker)
    seeding.set_worker_info(facts.worker, facts.num_workers, base_seed, spec.dataset)
    if is_first and spec.worker_init_fn is not None:
        spec.worker_init_fn(facts.worker)
    if not spec.num_workers:
        # The script has no workers: get_worker_info() is None there.
        hide_worker()


class _Map:
    """Batches of a map-style dataset: seeded, sample by sample, collated."""

    def __init__(self, spec: LoaderSpec, facts: WorkerFacts, host: str, progress: Progress) -> None:
        self._spec = spec
        self._facts = facts
        self._name = f"data worker {facts.worker} on host {host}"
        self._progress = progress
        self._index: object = None
        # The words of the epoch that torch's seeding was last done for.
        self._seeded_for: tuple[int, ...] = ()
        self._seeder: Seeder | None = None
        _begin_as_torch(spec, facts, facts.base_seed)
        if facts.seeding != "torch":
            roots = {"dataset": spec.dataset, "collate_fn": spec.collate_fn}
            self._seeder = Seeder(roots, num_workers=spec.num_workers or None)
        self._fetcher = TolerantFetcher(
            spec.dataset,
            spec.collate_fn,
            spec.on_error,
            is_batched=spec.auto_collation,
            note=progress.note,
        )

    @property
    def where(self) -> str:
        place = self._progress.read()[2]
        if place == NO_SAMPLE:
            return self._name
        return f"index {samples_words(self._index, place)} of {self._name}"

    @property
    def bad(self) -> tuple[BadSample, ...]:
        return self._fetcher.bad

    def own_state(self) -> None:
        return None

    def make(self, order: Make) -> object:
        index = self._index = pickle.loads(order.index)
        words, fetch = order.seed_words, self._fetcher.fetch
        if self._seeder is not None:
            # Twice, if the batch has made a generator.
            return self._seeder.make(words, lambda: fetch(index))
        if words[:3] != self._seeded_for:
            # `torch` seeding: once an epoch, as torch's workers (docs/feed.md).
            self._seeded_for = words[:3]
            base_seed = words[0] if words else self._facts.base_seed
            _begin_as_torch(self._spec, self._facts, base_seed, is_first=False)
        return fetch(index)


class _Stream:
    """Batches of a shard in order; its first order in an epoch says how it begins."""

    bad: tuple[BadSample, ...] = ()

    def __init__(self, spec: LoaderSpec, facts: WorkerFacts, host: str) -> None:
        self._begin = partial(_begin_as_torch, spec, facts, facts.base_seed)
        self._has_begun = False
        self.where = f"shard {facts.worker} of {facts.num_workers} on host {host}"
        make_fetcher: Callable[[], StreamFetcher] = partial(
            _DatasetKind.create_fetcher,
            _DatasetKind.Iterable,
            spec.dataset,
            spec.auto_collation,
            spec.collate_fn,
            spec.drop_last,
        )
        self._batches = ShardBatches(
            make_fetcher, dataset=spec.dataset, outlives_epoch=spec.outlives_epochs
        )
        self.own_state = self._batches.take_own

    def make(self, order: Make) -> object:
        index: object = pickle.loads(order.index)
        begin = order.begin
        if begin is not None:
            # As torch: what it raises stands in place of a batch, and the shard is then exhausted.
            if not self._has_begun:
                # Before the iterator, as in torch's worker: both may draw random numbers.
                self._has_begun = True
                self._begin()
            self._batches.begin(index, num_made=begin.num_made, own=begin.own)
        try:
            return self._batches.make(index)
        except StopIteration:
            raise _ExhaustedError from None
