"""One loader of this process at the feed, one epoch at a time, and the order of its batches.

The thread that iterates draws indices and takes batches; a thread for each host receives batches
(`receiver`); the control thread (`feed`) has workers started and sees who is late. Whoever changes
something orders the next batches right away: under the feed's lock it is decided which, and
without it they are sent.
"""

import contextlib
import itertools
import math
import os
import pickle
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import cloudpickle
import msgspec

from stoker.errors import FeedError, FeedLostError
from stoker.feed.engine.batch_socket import Connection
from stoker.feed.engine.loader_spec import PackedSpec
from stoker.feed.engine.messages import BadSample, Make, OwnState, pack
from stoker.feed.engine.raised import SCRIPT_NAMES
from stoker.feed.engine.run_messages import HostWork
from stoker.feed.engine.scheduler import BatchScheduler, WorkerPace
from stoker.feed.engine.shards import ShardScheduler
from stoker.feed.seeding import Numbered, Seeding
from stoker.feed.streams import StreamProgress
from stoker.feed.tolerance import samples_words
from stoker.pending_error import PendingError, fresh

# A ShardScheduler for an iterable dataset.
Scheduler = BatchScheduler["Worker"]


class OrderedBatch(msgspec.Struct):
    """What is sent to have one batch made."""

    index: bytes
    seed_words: tuple[int, ...]


class BatchOutcome(msgspec.Struct):
    """A batch, or the error to raise in its place.

    Attributes:
        bad: Its samples that were skipped or replaced.
        worker: That made it, or failed.
        place: Of the sample at which the last of three workers died; -1: none did, or not known.
        is_pinned: Its tensors are in pinned memory.
        ordered: What was sent to have it made; None: of an iterable dataset.
    """

    worker: "Worker"
    value: object = None
    error: PendingError | None = None
    bad: tuple[BadSample, ...] = ()
    place: int = -1
    is_pinned: bool = False
    ordered: OrderedBatch | None = None


@dataclass(slots=True, weakref_slot=True)
class IndexSource:
    """The indices that an epoch's sampler still gives, and how it ended before its time.

    The iterator over the epoch has it, and its session does not: an error of the sampler knows all
    variables of the script, and a session lives as long as the process.
    """

    indices: Iterator[Numbered]
    failure: PendingError = field(default_factory=PendingError)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRequest:
    """What a loader asks the feed for, for one epoch.

    Attributes:
        script: Settings and globals of the script; see facts.
        num_workers: The script's.
        local_workers: Workers on this host that help.
        each: All batches of an iterable dataset, whose sampler gives no indices.
        pins_on: Index of the accelerator for which batches live in pinned memory.
        base_seed: Of workers that are started in it.
        stream: How far the shards of an iterable dataset are; None: its workers persist and go on.
    """

    epoch: int
    spec: PackedSpec
    script: bytes
    seeding: Seeding
    num_workers: int = 1
    local_workers: int = 0
    each: OrderedBatch | None = None
    pins_on: int | None = None
    base_seed: int = 0
    stream: StreamProgress | None = None


@dataclass(eq=False)
class Worker(WorkerPace):
    """A worker of a session, as the trainer sees it.

    Attributes:
        work: What its host has made.
        number: On all hosts; of an iterable dataset the shard.
        id: For its host.
        facts: The first message to it.
        connection: None until the trainer is connected to it.
        is_lost: Its connection has ended, or never was.
        num_made: Batches that came from it.
    """

    session: "FeedSession"
    work: HostWork
    number: int
    id: int = field(default_factory=itertools.count(1).__next__)
    facts: bytes = b""
    connection: Connection | None = None
    is_lost: bool = False
    num_made: int = 0
    # Orders; appended to under the feed's lock, so in order.
    outbox: deque[bytes] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def host(self) -> str:
        return self.work.host

    def flush(self) -> None:
        """Sends its orders, without the feed's lock."""
        # Its receiver sees a lost connection, too.
        with self._lock, contextlib.suppress(OSError):
            while self.outbox and self.connection is not None:
                self.connection.write(self.outbox.popleft())

    def close(self) -> None:
        """Ends the connection, and so the worker; safe in any thread, and twice."""
        if self.connection is not None:
            self.connection.shut()


class FeedSession:
    """The feed's state of one loader; its attributes are under the feed's lock.

    Attributes:
        name: Known to agents.
        epoch_id: Only grows, also where an epoch is iterated over again: late answers are refused.
        cancelled_epoch_id: Id of an epoch whose iterator is gone.
        is_busy: It is reserved for an epoch, or has one.
        request: Of the epoch; None: there is none.
        alone_since: Since when no worker is ready.
        had_workers: One has been.
        waits_since: When the thread that iterates began to wait; None: it does not.
        is_hang_told: The log says for whom it waits.
    """

    def __init__(self, name: str, schedule: Scheduler, shared: "SharedState") -> None:
        self.name = name
        self.schedule = schedule
        self.epoch = self.epoch_id = 0
        self.cancelled_epoch_id = -1
        self.request: EpochRequest | None = None
        self.is_busy = self.had_workers = self.is_hang_told = False
        self.failure = shared.failure
        self.alone_since = 0.0
        self.waits_since: float | None = None
        self.workers: set[Worker] = set()
        self._shared = shared
        self._lock = shared.lock
        self._arrival = threading.Condition(shared.lock)
        self._made_of: object = None
        self._ordered: dict[int, OrderedBatch] = {}
        self._source: Callable[[], IndexSource | None] = lambda: None

    def reserve(self) -> bool:
        """Has nobody else use the session until its next epoch is over; False: it is in use."""
        if self.is_busy and self.cancelled_epoch_id != self.epoch_id:
            return False
        self.cancel(self.epoch_id)
        self.is_busy = True
        return True

    # ---- the thread that iterates

    def begin(self, request: EpochRequest, source: IndexSource) -> int:
        """Starts an epoch and returns its id."""
        schedule = self.schedule
        with self._lock:
            # Workers of another dataset, or of another state of the script, do not go on.
            made_of = (request.spec.digest, request.script, request.seeding)
            if self._made_of != made_of or request.stream is not None:
                self._made_of = made_of
                self.dismiss()
            schedule.begin()
            if isinstance(schedule, ShardScheduler) and request.stream is not None:
                schedule.divide(request.stream)
            self.request = request
            self.epoch = request.epoch
            self.epoch_id += 1
            epoch_id = self.epoch_id
            # An error that a script caught is not raised again, but for one of the whole feed.
            self.failure = self._shared.failure
            self._ordered.clear()
            self._source = weakref.ref(source)
            self.alone_since = time.monotonic()
            self.is_busy = True
            # As torch: without workers, a sampler draws its own seed at the first batch.
            wanted = self._num_wanted() if request.num_workers else 0
        self._shared.wake()
        self._supply(epoch_id, wanted)
        return epoch_id

    def next(self, epoch_id: int, *, timeout_seconds: float) -> BatchOutcome:
        """Returns the next batch of that epoch, in the sampler's order; waits until it is there.

        An error of the dataset or the collate function is in the outcome.

        Raises:
            StopIteration: At the end of the epoch.
            RuntimeError: After the loader's `timeout` (0: none), in torch's words.
            Exception: FeedError, or what the sampler raised.
        """
        outcome: BatchOutcome | None = None
        while outcome is None:
            with self._lock:
                if self.epoch_id != epoch_id:
                    raise StopIteration
                outcome = self._await_head(timeout_seconds)
                wanted = self._num_wanted()
            # Also after a batch that was there: its place in the window is free.
            self._supply(epoch_id, wanted)
        return outcome

    def cancel(self, epoch_id: int) -> list[OrderedBatch]:
        """Ends an epoch; returns what was drawn and not taken, in order."""
        with self._lock:
            if self.epoch_id != epoch_id or not self.is_busy:
                return []
            left = [self._ordered[number] for number in sorted(self._ordered)]
            # What is under way for it is refused.
            self.epoch_id += 1
            self.is_busy = False
            self.request = self.waits_since = None
            # Without numbers: until the next one nothing is ordered.
            self.schedule.is_complete = True
            self.schedule.arrivals.clear()
            self._ordered.clear()
        self._shared.wake()
        return left

    def _await_head(self, timeout_seconds: float) -> BatchOutcome | None:
        """Waits for the batch at the head; None: the sampler is to be asked first."""
        schedule = self.schedule
        began = time.monotonic()
        while schedule.head not in schedule.arrivals:
            if self.failure is not None:
                # Its own for each call.
                raise fresh(self.failure)
            if schedule.is_over or not self.is_busy:
                self.cancel(self.epoch_id)
                source = self._source()
                # How the sampler has failed.
                if source is not None and source.failure.is_there:
                    raise source.failure.take()
                raise StopIteration
            if self._num_wanted():
                return None
            self.waits_since = self.waits_since or began
            now = time.monotonic()
            # The time begins when a worker has the batch.
            begin = max(min(schedule.makers(schedule.head).values(), default=now), began)
            left = begin + (timeout_seconds or math.inf) - now
            if left <= 0:
                self.waits_since = None
                raise RuntimeError(f"DataLoader timed out after {timeout_seconds} seconds")
            self._arrival.wait(min(left, threading.TIMEOUT_MAX))
        self.waits_since = None
        self.is_hang_told = False
        ordered = self._ordered.pop(schedule.head, None)
        outcome = schedule.take(time.monotonic())
        assert isinstance(outcome, BatchOutcome)
        outcome.ordered = ordered
        self._shared.num_taken += 1
        self._shared.ready_at_takes += len(schedule.arrivals)
        return outcome

    def _num_wanted(self) -> int:
        """Returns how many indices are to be drawn: a number that no time changes."""
        schedule = self.schedule
        most = min(32 + 4 * schedule.head, schedule.head + 256)
        return 0 if schedule.is_complete else max(0, most - schedule.supplied)

    def _supply(self, epoch_id: int, wanted: int) -> None:
        """Draws that many indices, and orders what the window has room for."""
        # Outside the lock: the sampler is the user's code.
        drawn = self._draw(wanted)
        with self._lock:
            # The sampler may take long: another thread may have ended the epoch by now.
            if self.epoch_id == epoch_id:
                self._ordered.update(enumerate(drawn, start=self.schedule.supplied))
                self.schedule.supplied += len(drawn)
                self.schedule.is_complete |= len(drawn) < wanted
            workers = self._assign()
        for worker in workers:
            worker.flush()

    def _draw(self, wanted: int) -> list[OrderedBatch]:
        """Returns what the sampler gives next; fewer if it ends or fails."""
        drawn: list[OrderedBatch] = []
        source = self._source()
        if source is None:
            return drawn
        try:
            for numbered in itertools.islice(source.indices, wanted):
                # Packed now: a sampler may give the same list again and again.
                index = pack_index(numbered.index)
                drawn.append(OrderedBatch(index, numbered.seed_words))
        except Exception as err:
            # Raised once all batches before it are taken, as by torch's loader.
            source.failure.keep(err)
        return drawn

    # ---- any thread, without the lock

    def order(self) -> None:
        """Orders what the window has room for."""
        with self._lock:
            workers = self._assign()
        for worker in workers:
            worker.flush()

    def joined(self, worker: Worker) -> None:
        """Notes that a worker is ready."""
        with self._lock:
            if not worker.is_lost:
                self.schedule.join(worker)
                self.had_workers = True
        self.order()

    def comes(self, worker: Worker, epoch_id: int, number: int) -> None:
        """Notes that a batch has begun to arrive, and orders the next one meanwhile."""
        with self._lock:
            if self.epoch_id == epoch_id:
                self.schedule.comes(worker, number)
        self.order()

    def arrived(
        self,
        worker: Worker,
        epoch_id: int,
        number: int,
        outcome: BatchOutcome,
        *,
        nbytes: int,
        own: OwnState | None = None,
    ) -> bool | None:
        """Has a batch, or its error, wait for its turn.

        Returns:
            False: nobody wants it; None: it is of an epoch that is over.
        """
        now = time.monotonic()
        with self._lock:
            if self.epoch_id != epoch_id:
                return None
            is_wanted = self.schedule.arrived(
                worker, number, nbytes=nbytes, now=now, content=outcome, own=own
            )
            self._notify(number)
        self.order()
        return is_wanted

    def exhausted(self, worker: Worker, epoch_id: int, number: int) -> None:
        """Notes that a worker's shard has no batch of that number."""
        with self._lock:
            if self.epoch_id == epoch_id and isinstance(self.schedule, ShardScheduler):
                self.schedule.ended(worker, number)
                self._arrival.notify_all()
        self.order()

    def lose(self, lost: Iterable[Worker]) -> None:
        """Does without workers, whose connections end or have ended; may be called twice."""
        with self._lock:
            for worker in lost:
                self._drop(worker)
        self.order()

    def died(
        self, worker: Worker, how: str, *, epoch_id: int, number: int, place: int = -1
    ) -> None:
        """Notes that a worker's process died over a batch of an epoch, or (-1) over none."""
        with self._lock:
            self._drop(worker)
            schedule = self.schedule
            if self.epoch_id == epoch_id and schedule.note_death(number):
                # In place of the batch, so that the epoch continues after it.
                error = FeedLostError(
                    f"three workers died of {self.batch_words(number, place)}: {how}",
                    where=f"rank {self._shared.rank}, last on host {worker.host}",
                    fix="see the host's log, with the stack of native code; give it more memory, "
                    "fewer workers, or raise feed.batch_timeout_seconds",
                )
                outcome = BatchOutcome(worker, error=PendingError(error), place=place)
                self._notify(schedule.fail(number, outcome))
        self.order()

    # ---- any thread, under the lock

    def dismiss(self) -> None:
        """Lets all workers go."""
        for worker in list(self.workers):
            self._drop(worker)

    def mark_failed(self, error: BaseException) -> None:
        """Ends every wait with this error; the first one counts."""
        self.failure = self.failure or error
        self._arrival.notify_all()

    def batch_words(self, number: int, place: int = -1) -> str:
        """Returns which batch it is, and which of its samples, for people."""
        if isinstance(self.schedule, ShardScheduler):
            position, shard = divmod(number, self.schedule.num_shards)
            return f"batch {position} of shard {shard} in epoch {self.epoch}"
        words = f"batch {number} of epoch {self.epoch}"
        if number not in self._ordered:
            return words
        index: object = pickle.loads(self._ordered[number].index)
        if place >= 0:
            return f"sample {samples_words(index, place)} in {words}"
        return f"{words} (samples {samples_words(index)})"

    def _drop(self, worker: Worker) -> None:
        if worker in self.workers:
            self.workers.discard(worker)
            worker.is_lost = True
            self.schedule.lose(worker)
            worker.close()
            self._shared.wake()

    def _assign(self) -> Iterable[Worker]:
        """Decides what is ordered now; returns the workers that are to be flushed."""
        request = self.request
        if request is None:
            return ()
        ordered: dict[Worker, None] = {}
        for worker, number in self.schedule.assign(time.monotonic()):
            batch = request.each or self._ordered[number]
            begin = self.schedule.begin_of(number)
            make = Make(number, self.epoch_id, batch.index, batch.seed_words, begin)
            worker.outbox.append(pack(make))
            ordered[worker] = None
        return ordered

    def _notify(self, number: int) -> None:
        if self.waits_since is not None and number == self.schedule.head:
            self._arrival.notify_all()


def pack_index(index: object) -> bytes:
    """Returns what a sampler gave, for a process without the script's classes."""
    with contextlib.suppress(Exception):
        packed = pickle.dumps(index, protocol=5)
        if not any(name.encode() in packed for name in SCRIPT_NAMES):
            return packed
    by_value: bytes = cloudpickle.dumps(index)
    return by_value


class SharedState:
    """State that the control thread, the receivers and the threads that iterate share.

    Attributes:
        num_taken: Batches that scripts took.
        ready_at_takes: Batches that were ready after the one taken, summed.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        # Held for microseconds. A signal's handler that comes meanwhile may iterate over another
        # loader, as to evaluate before the last checkpoint.
        self.lock = threading.RLock()
        self.sessions: set[FeedSession] = set()
        # Ends every session, later ones too.
        self.failure: BaseException | None = None
        self.num_taken = self.ready_at_takes = 0
        self.pid = os.getpid()
        # A counter of the kernel: several calls before a poll are one.
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Appended to by finalizers and threads: atomic operations only.
        self.posted: deque[Callable[[], object]] = deque()

    def mark_crashed(self, err: BaseException) -> None:
        """Fails every session, because a thread of the feed has raised."""
        failure = FeedError(
            f"the feed's thread failed: {type(err).__name__}: {err}",
            fix="this is a bug in stoker; please report it with the traceback above",
        )
        failure.__cause__ = err
        self.mark_failed(failure)

    def mark_failed(self, error: BaseException) -> None:
        """Fails every session, also those to come; the first error counts."""
        with self.lock:
            self.failure = self.failure or error
            for session in self.sessions:
                session.mark_failed(error)

    def wake(self) -> None:
        """Has the feed's thread take a turn; safe in a finalizer, and after the end."""
        # Not in a forked child, where the number may be another file's.
        if os.getpid() == self.pid:
            os.eventfd_write(self.wake_fd, 1)

    def post(self, action: Callable[[], object]) -> None:
        """Has the feed's thread do something; safe in any thread, and in a finalizer."""
        self.posted.append(action)
        self.wake()
