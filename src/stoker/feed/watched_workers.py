"""A loader's own workers without data hosts, watched: a sample that ends or blocks one is found.

PyTorch's workers end the training run with the first one that dies, and a sample that hangs holds
them for ever. So where `feed.on_error` or `feed.sample_timeout_seconds` is set, a loader's workers
are a pool of stoker's, as on a data host: as many, started as the script asks, and asked for as
many batches ahead. The thread that iterates looks after them, each time that it wants a batch.
"""

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.process import BaseProcess
from socket import socket
from typing import cast

import torch.multiprocessing
from torch.utils.data import DataLoader, _DatasetKind
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from stoker.errors import FeedLostError
from stoker.feed.bookkeeping import TrainerProcess
from stoker.feed.doubts import ErrorTrust
from stoker.feed.iterators import (
    CountedIterator,
    Epoch,
    LoaderView,
    next_index,
    raising,
    start_method_of,
    with_workers,
    worker_init_of,
)
from stoker.feed.loader_state import seeding_of
from stoker.feed.lost_samples import ALL_SAMPLES, SampleInWork
from stoker.feed.module_generators import know_modules
from stoker.feed.sample_index import words_of_sample, words_of_samples
from stoker.feed.seeding import Numbered, Seeding
from stoker.feed.tolerance import ToleratedBatch
from stoker.feed.trainer.buffers import BatchBuffers, error_in
from stoker.feed.why_unfed import advice_on
from stoker.feed.wire.codec import pack_value
from stoker.feed.wire.dataset import DatasetSpec
from stoker.feed.wire.process_settings import InheritedSettings
from stoker.feed.wire.protocol import Make
from stoker.feed.workers.crashes import LossRules
from stoker.feed.workers.jobs import Result, WorkerJob
from stoker.feed.workers.pool import Maker, WorkerPool, WorkerRole
from stoker.feed.workers.stacks import words_of
from stoker.feed.workers.worker import worker_main
from stoker.feed.workers.worker_handle import ChildProcess, OwnChild
from stoker.host.processes import start_to_last
from stoker.logs import EventName, Log
from stoker.pending_error import PendingError

# From one look at samples that may hang to the next.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedLoader:
    """A loader whose batches watched workers make.

    Attributes:
        view: The loader, with the number of workers that a plan gives it.
        where: Rank and host, for errors.
    """

    loader: "DataLoader[object]"
    view: "DataLoader[object] | LoaderView"
    seeding: Seeding
    base_seed: int
    rules: LossRules
    host: str
    where: str
    log: Log

    @property
    def num_workers(self) -> int:
        """How many make its batches."""
        return cast(int, self.view.num_workers)

    @property
    def num_ahead(self) -> int:
        """Batches that are asked for before the first is taken, as by torch."""
        return self.num_workers * cast(int, self.view.prefetch_factor or 2)

    def spec(self) -> DatasetSpec:
        """Returns what a worker needs of the loader."""
        loader = self.loader
        return DatasetSpec(
            dataset=loader.dataset,
            collate_fn=cast("Callable[[object], object]", loader.collate_fn),
            worker_init_fn=worker_init_of(loader),
            auto_collation=loader._auto_collation,
            num_workers=loader.num_workers,
            has_workers=loader.num_workers > 0,
            start_method=start_method_of(loader),
            settings=InheritedSettings.of_this_process(),
            on_error=self.rules.on_error,
        )

    def pool(self) -> WorkerPool:
        """Starts the workers."""
        spec = self.spec()
        know_modules(self.seeding)
        context = self.loader.multiprocessing_context or torch.multiprocessing.get_context()

        def start(role: WorkerRole, sock: socket) -> ChildProcess:
            child: BaseProcess = context.Process(
                target=worker_main,
                args=(sock, spec),
                kwargs={
                    "worker_id": role.number,
                    "num_workers": self.num_workers,
                    "base_seed": self.base_seed,
                    "seeding": self.seeding,
                    "host": self.host,
                },
                daemon=True,
                name=f"stoker-worker-{role.number}",
            )
            # A child ends with the thread that started it.
            start_to_last(child.start)
            return OwnChild(child)

        return WorkerPool(
            start,
            num_workers=self.num_workers,
            host=self.host,
            on_death=lambda how: self.log.event(EventName.LOCAL_WORKER_DIED, how=how),
            rules=self.rules,
        )


class WatchedBatches:
    """The batches of an epoch, in order; used by the thread that iterates.

    Args:
        loader: Its workers start now.
        indices: Of the epoch; the first ones are asked for now.
    """

    def __init__(self, loader: WatchedLoader, indices: Iterator[Numbered]) -> None:
        self._loader = loader
        self._buffers = BatchBuffers()
        self._pool = loader.pool()
        self._pid = os.getpid()
        self._epoch_id = -1
        self._looked_at = 0.0
        self.begin(indices)

    @property
    def num_taken(self) -> int:
        """Batches of this epoch that came, also as an error."""
        return self._head

    @property
    def is_over(self) -> bool:
        """Whether nothing is under way: the workers may make another epoch."""
        return not self._asked

    def begin(self, indices: Iterator[Numbered]) -> None:
        """Begins an epoch with the same workers, once the one before is over."""
        self._epoch_id += 1
        self._indices = indices
        # From the next one that is taken on.
        self._asked: dict[int, Numbered] = {}
        self._waiting: deque[WorkerJob] = deque()
        self._results: dict[int, Result] = {}
        self._head = self._num_drawn = 0
        # How the sampler ended, or failed: its turn comes after the last batch.
        self._end = PendingError()
        for _ in range(self._loader.num_ahead):
            self._draw()
        self._assign()

    def take(self, timeout_seconds: float = 0.0) -> object:
        """Returns the next batch, or a ToleratedBatch; blocks until it is there.

        Args:
            timeout_seconds: The loader's `timeout`; 0: none.

        Raises:
            StopIteration: The epoch is over.
            RuntimeError: After the timeout, in torch's words.
            FeedLostError: With `on_error: raise` a batch takes longer than
                `feed.sample_timeout_seconds`, or ends its workers.
            Exception: What dataset, collate function or sampler raised.
        """
        if not self._asked and not self._end.is_there:
            # As torch, which asks a sampler again after an error.
            self._draw()
        if not self._asked:
            raise self._end.take()
        began = time.monotonic()
        self._turn(0.0)
        while self._head not in self._results:
            self._turn(_LOOK_SECONDS)
            waited = time.monotonic() - began
            if self._head in self._results:
                break
            if timeout_seconds and waited >= timeout_seconds:
                raise RuntimeError(f"DataLoader timed out after {timeout_seconds} seconds")
            self._check(waited)
        # First: a signal's handler may raise in the sampler, and the batch is still to be taken.
        self._draw()
        self._assign()
        head = self._head
        result = self._results[head]
        index = self._asked[head].index
        # Without a call: no handler can raise in between.
        self._head = head + 1
        del self._results[head], self._asked[head]
        if result.is_lost:
            raise self._lost_error(result, index)
        return self._value_of(result)

    def take_back(self) -> Iterator[Numbered]:
        """Ends the workers; returns what was asked for and not taken, and what follows."""
        self.close()
        return chain(self._asked.values(), raising(self._end.moved()), self._indices)

    def close(self) -> None:
        """Ends the workers, within 5 s; may be called twice, and in a forked child."""
        _close(self._pool, self._pid)

    def close_with(self, owner: object) -> None:
        """Ends the workers once an iterator is gone that has this."""
        # Not by a method: what `_end` keeps may know the owner, which would never be gone.
        weakref.finalize(owner, _close, self._pool, self._pid)

    def _shutdown_workers(self) -> None:
        self.close()

    def _draw(self) -> None:
        numbered = next_index(self._indices, self._end)
        if numbered is None:
            return
        number = self._num_drawn
        self._num_drawn += 1
        order = Make(
            session="local",
            epoch_id=self._epoch_id,
            batch_number=number,
            index=pack_value(numbered.index, allow_pickle=True),
            seed_words=numbered.seed_words,
        )
        self._asked[number] = numbered
        self._waiting.append(WorkerJob((self._epoch_id, number), order))

    def _assign(self) -> None:
        while self._waiting and self._pool.room > 0:
            self._pool.assign(self._waiting.popleft())

    def _turn(self, seconds: float) -> None:
        """Handles what workers have sent, after at most so many seconds."""
        # Not `select`: a script may have more than 1024 files open.
        poll = select.poll()
        for fileno, wants_write in self._pool.sockets().items():
            poll.register(fileno, select.POLLIN | select.POLLOUT * wants_write)
        for fileno, _ in poll.poll(int(seconds * 1000)):
            for result in self._pool.handle(fileno):
                self._take(result)
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            self._pool.kill_hanging()
        self._pool.flush()
        self._assign()

    def _take(self, result: Result) -> None:
        epoch_id, number = cast("tuple[int, int]", result.job.key)
        if epoch_id == self._epoch_id:
            self._results[number] = result
        else:
            result.discard()

    def _check(self, waited: float) -> None:
        """Raises FeedLostError if the batch that is waited for never comes."""
        if self._pool.is_dead and self._head not in self._results:
            raise FeedLostError(
                f"no worker of the loader is left: {self._pool.last_death}",
                where=self._loader.where,
                fix="see the log: its workers die as they start",
            )
        rules = self._loader.rules
        limit = None if rules.is_tolerant else rules.timeout_seconds
        if limit is None or waited < limit:
            return
        makers = self._pool.makers(lambda job: job.key == (self._epoch_id, self._head))
        if makers and makers[0].seconds >= limit:
            raise self._hanging_error(makers[0], limit)

    def _hanging_error(self, maker: Maker, limit: float) -> FeedLostError:
        index = self._asked[self._head].index
        shown = words_of_samples(index)
        parts = [f"worker {maker.number}"]
        if maker.sample is not None:
            parts.append(_sample_words(index, maker.sample))
        stack = words_of(maker.stacks)
        parts += [stack] if stack else []
        return FeedLostError(
            f"batch {self._head} (samples {shown}) is being made for {maker.seconds:.0f} s, on "
            f"{self._loader.host} ({': '.join(parts)}): more than feed.sample_timeout_seconds "
            f"({limit:g})",
            where=self._loader.where,
            fix="look at the sample that takes so long, or raise feed.sample_timeout_seconds; "
            "feed.on_error: skip leaves such a sample out",
        )

    def _lost_error(self, result: Result, index: object) -> FeedLostError:
        return FeedLostError(
            f"batch {self._head - 1} (samples {words_of_samples(index)}) could not be made, on "
            f"{self._loader.host}: {result.summary}",
            where=self._loader.where,
            fix=advice_on(result.summary),
        )

    def _value_of(self, result: Result) -> object:
        if result.error is not None:
            raise error_in(result.error)
        payload = result.payload
        result.payload = None
        if payload is not None:
            # Its last view gives the worker its memory back.
            weakref.finalize(payload, result.release).atexit = False
        outcome = self._buffers.decoded(result.tree or b"", payload, allow_pickle=True)
        if outcome.error is not None:
            raise outcome.error.take()
        bad = result.samples.bad
        return ToleratedBatch(outcome.value, bad, worker=result.worker) if bad else outcome.value


def _close(pool: WorkerPool, pid: int) -> None:
    if os.getpid() == pid:
        pool.close()


def _sample_words(index: object, sample: SampleInWork) -> str:
    if sample.place == ALL_SAMPLES:
        return f"one call that makes all of its samples, for {sample.seconds:.1f} s"
    shown = words_of_sample(index, sample.place, is_lone=sample.is_lone)
    return f"sample {shown} for {sample.seconds:.1f} s"


def is_watched(loader: "DataLoader[object]", process: TrainerProcess, *, num_workers: int) -> bool:
    """Returns whether workers that are watched make a loader's batches, in place of torch's.

    Args:
        num_workers: That make them: the script's, or a plan's.
    """
    is_asked = process.settings.feed.looks_for_deadly_samples
    is_map_style = loader._dataset_kind == _DatasetKind.Map
    # With torch's seeding random numbers follow from which worker makes which batch.
    return is_asked and is_map_style and num_workers > 0 and seeding_of(loader, process) != "torch"


def watched(
    loader: "DataLoader[object]",
    process: TrainerProcess,
    *,
    view: "DataLoader[object] | LoaderView",
    base_seed: int,
) -> WatchedLoader:
    """Returns a loader with all that its watched workers need.

    Args:
        view: The loader with the number of workers that make its batches.
        base_seed: Of the epoch.
    """
    settings = process.settings
    # It stays from epoch to epoch, as persistent workers would.
    trust = process.trust_in_loaders.setdefault(process.books(loader).number, ErrorTrust())
    return WatchedLoader(
        loader=loader,
        view=view,
        seeding=seeding_of(loader, process),
        base_seed=base_seed,
        rules=LossRules.of(settings.feed, trust=trust),
        host=settings.host,
        where=f"rank {settings.rank}, host {settings.host}",
        log=Log(run=settings.run_id, host=settings.host),
    )


class WatchedIterator(CountedIterator, _BaseDataLoaderIter):  # type: ignore[misc]
    """Iterator over an epoch (with persistent workers: one after the other)."""

    def __init__(
        self, loader: "DataLoader[object]", process: TrainerProcess, *, num_workers: int
    ) -> None:
        """Begins an epoch: the workers start, and the first batches are asked for."""
        self._loader = loader
        self._process = process
        is_planned = num_workers != loader.num_workers
        self._view = with_workers(loader, num_workers) if is_planned else loader
        self._epoch = Epoch(process, loader, seeding=seeding_of(loader, process))
        super().__init__(cast("DataLoader[object]", self._view))
        self._ask_sampler_again()
        self._batches = WatchedBatches(
            watched(loader, process, view=self._view, base_seed=int(self._base_seed)),
            self._numbered(),
        )
        self._batches.close_with(self)
        # Called first: the last one made is.
        weakref.finalize(self, self._epoch.end_in_finalizer)

    def _numbered(self) -> Iterator[Numbered]:
        return map(partial(self._epoch.numbered, int(self._base_seed)), self._sampler_iter)

    def _reset(self, loader: "DataLoader[object]", first_iter: bool = False) -> None:
        self._epoch.steps.end()
        began = self._epoch.now()
        self._epoch.begin(loader)
        super()._reset(loader, first_iter)
        if self._batches.is_over:
            self._batches.begin(self._numbered())
        else:
            # They make batches that nobody wants.
            self._batches.close()
            seed = int(self._base_seed)
            loader_now = watched(self._loader, self._process, view=self._view, base_seed=seed)
            self._batches = WatchedBatches(loader_now, self._numbered())
            self._batches.close_with(self)
        self.opened(self._epoch.now() - began)

    def _next_data(self) -> object:  # type: ignore[override]
        try:
            batch = self._batches.take(self._timeout)
        except StopIteration:
            if not self._loader.persistent_workers:
                self._batches.close()
            raise
        # Objects of the script may pin themselves.
        return pin_memory(batch) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _shutdown_workers(self) -> None:
        """Ends the epoch, for scripts that do so as with torch's."""
        self._batches.close()
        self._epoch.order.position.cancel()

    def _num_taken(self) -> int:
        return self._batches.num_taken
