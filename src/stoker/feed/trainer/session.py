"""One loader of this process at the feed, one epoch at a time; sessions keep the order of batches.

The thread that iterates and the I/O thread meet here, under one lock: the first supplies indices
and takes finished batches, the second asks for batches and delivers them. What a dataset raised in
a worker, `FeedSession.next` raises in the script, in place of its batch.
"""

import contextlib
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from stoker.errors import FeedError
from stoker.feed.interrupts import is_of_signal_handler
from stoker.feed.lost_samples import ALL_SAMPLES, SampleInWork
from stoker.feed.sample_index import words_of_sample, words_of_samples
from stoker.feed.seeding import Numbered, Seeding
from stoker.feed.timeline import Timeline
from stoker.feed.trainer.buffers import BatchOutcome
from stoker.feed.trainer.local_workers import LocalWorkers
from stoker.feed.trainer.pinned import PinnedMemory
from stoker.feed.trainer.receiver import BatchReceiver
from stoker.feed.trainer.scheduler import Peer, Scheduler
from stoker.feed.trainer.shared_batch import BatchSharing
from stoker.feed.wire.codec import pack_value, unpack_value
from stoker.feed.wire.dataset import PackedSpec
from stoker.feed.wire.protocol import Make
from stoker.logs import Log
from stoker.pending_error import PendingError, fresh

# The local workers of a session, among the peers of its schedule; hosts are named by strings.
LOCAL: Peer = ("local",)


class AskedBatch(msgspec.Struct):
    """What is sent to have one batch made; `shared_seed` is torch's, for data pipes."""

    index: bytes
    seed_words: tuple[int, ...]
    shared_seed: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadMaker:
    """What a peer makes of the batch that is waited for; times are monotonic seconds here.

    Attributes:
        heard_at: When that was so.
        begun_at: Since when a worker that was ready has it; None: none has it.
        workers: Those that have it.
        stacks: Of the worker that has it for longest (see workers.stacks), or of one that starts.
        sample: The one that this worker makes.
        is_silent: The host has not answered, and `begun_at` is when it was asked for the batch.
    """

    heard_at: float
    begun_at: float | None = None
    workers: tuple[int, ...] = ()
    stacks: str = ""
    sample: SampleInWork | None = None
    is_silent: bool = False

    def earliest(self, asked_at: float) -> float:
        """Returns a time before which no worker had the batch, after it was asked for."""
        return max(asked_at, self.heard_at if self.begun_at is None else self.begun_at)


@dataclass(slots=True, kw_only=True)
class Inquiry:
    """A question to a host that it has not answered: when it was asked first, and last."""

    first_at: float
    last_at: float = -math.inf


@dataclass(slots=True, weakref_slot=True)
class IndexSource:
    """The indices that an epoch's sampler still gives, and how it ended before its time.

    The iterator over the epoch has it, and its session does not: an error of the sampler knows all
    variables of the script, and a session lives as long as the process.

    Attributes:
        num_ahead: Indices that are drawn ahead of what is delivered in any case.
        is_in_step: Returns whether no more are, however many hosts need.
    """

    indices: Iterator[Numbered]
    failure: PendingError = field(default_factory=PendingError)
    num_ahead: int = 0
    is_in_step: Callable[[], bool] = bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRequest:
    """What a loader asks the feed for, for one epoch.

    Attributes:
        local: The workers of this process that may make its batches, too.
        source: What the sampler draws; empty for an iterable dataset, all of whose batches are
            `asked_each`, and whose shards `divide` sets.
        is_eager: The sampler is asked at once, not at the first `next`.
        pins_on, keeps_blocks, base_seed: See FeedSession.
    """

    epoch: int
    spec: PackedSpec
    seeding: Seeding
    local: LocalWorkers | None = None
    source: IndexSource
    asked_each: AskedBatch | None = None
    is_eager: bool
    pins_on: int | None = None
    keeps_blocks: bool = False
    base_seed: int | None = None
    divide: Callable[[Scheduler], None] | None = None


class FeedSession:
    """The feed's state of one loader; its attributes are under the feed's lock.

    Attributes:
        max_bytes: For all loaders of this process.
        epoch_id: Only grows, also where an epoch is iterated over again: late answers are refused.
        base_seed: The agents' workers start with it at once; None: when there is a batch.
        cancelled_epoch_id: Id of an epoch whose iterator is gone.
        pins_on: Index of the accelerator for which batches live in pinned memory.
        keeps_blocks: Batches stay blocks of memory, which `to_device` takes.
        is_waiting: It has had no peers for longer than a lost host is waited for.
        is_due: The thread that iterates waits, and has something to do.
        has_news: The I/O thread has to announce a new epoch, or a new spec, to the agents.
        waits_since: When the thread that iterates began to wait for `head`.
        called_at: When the call of `next` that waits began to wait.
        timeout_seconds: The loader's, for that call; 0: none.
        check_at: When `LateBatches` has to look again at the batch that is waited for.
        makers: What peers are known to make of that batch.
        inquiries: Questions about it to hosts that have not answered.
        unreturned: The batch that `next` has returned; who gives it to the script removes it here.
        sharing: The epoch's batches that several data hosts make, and what that costs.
    """

    def __init__(
        self,
        name: str,
        *,
        lock: threading.RLock,
        wake: Callable[[], None],
        schedule: Scheduler,
        rank: int = 0,
    ) -> None:
        self.name = name
        self.rank = rank
        self.max_bytes = schedule.max_bytes
        self.schedule = schedule
        self.epoch = self.epoch_id = self.cancelled_epoch_id = -1
        self.base_seed: int | None = None
        self.is_busy = self.is_waiting = self.is_due = self.has_news = self.had_peers = False
        self.has_timed_out = self.keeps_blocks = self._is_drawing = False
        self.spec: PackedSpec | None = None
        self.seeding: Seeding = "batch"
        self.local: LocalWorkers | None = None
        self.closing_locals: list[LocalWorkers] = []
        self.failure: BaseException | None = None
        self.pins_on: int | None = None
        self.alone_since = time.monotonic()
        self.waits_since: float | None = None
        self.called_at = self.timeout_seconds = 0.0
        self.check_at = math.inf
        self.makers: dict[Peer, HeadMaker] = {}
        self.inquiries: dict[Peer, Inquiry] = {}
        self.sharing = BatchSharing()
        self._asked: dict[int, AskedBatch] = {}
        self._asked_each: AskedBatch | None = None
        self.outcomes: dict[int, BatchOutcome] = {}
        self.unreturned: BatchOutcome | None = None
        self.num_hangs_told = self.num_starts_told = 0
        self._last_taken = self._num_before = self._num_waiting = 0
        self._lock = lock
        self._arrival = threading.Condition(lock)
        self._wake = wake
        self._source: Callable[[], IndexSource | None] = _no_source

    def is_idle(self) -> bool:
        return not self.is_busy or self.cancelled_epoch_id == self.epoch_id

    def is_opening(self) -> bool:
        """Returns whether no peer is ready yet; not where `next` would raise an error."""
        with self._lock:
            is_ready = any(state.credits for state in self.schedule.peers.values())
            return not is_ready and self.failure is None

    def reserve(self) -> None:
        if self.is_busy:
            self._end_epoch()
        self.epoch_id += 1
        self.alone_since = time.monotonic()
        self.is_busy = True

    def begin(self, request: EpochRequest) -> int:
        """Starts an epoch and returns its id; what is left of the one before is discarded."""
        with self._lock:
            is_other_spec = self.spec is None or self.spec.digest != request.spec.digest
            # A state may have been loaded of a run that seeded otherwise.
            if is_other_spec or self.seeding != request.seeding:
                # Every agent reopens the session, and is a peer again once it is ready.
                for peer in list(self.schedule.peers):
                    self.schedule.mark_lost(peer)
            # First: it forgets the last epoch, also of shards that `divide` then replaces.
            self.schedule.begin()
            self.schedule.num_ahead = request.source.num_ahead
            self.schedule.is_in_step = request.source.is_in_step()
            if request.divide is not None:
                request.divide(self.schedule)
            self._take_local(request.local)
            self.spec = request.spec
            self.seeding = request.seeding
            self.pins_on = request.pins_on
            self.base_seed = request.base_seed
            self.keeps_blocks = request.keeps_blocks
            self.epoch = request.epoch
            self.epoch_id += 1
            epoch_id = self.epoch_id
            self._forget()
            self._asked_each = request.asked_each
            self._source = weakref.ref(request.source)
            self._is_drawing = False
            self.alone_since = time.monotonic()
            self.is_busy = True
            self.has_news = True
            wanted = self.schedule.wanted(self.alone_since) if request.is_eager else 0
        if wanted:
            self._draw(epoch_id, 0, wanted)
        else:
            self._wake()
        return epoch_id

    def _take_local(self, local: LocalWorkers | None) -> None:
        if local is not self.local:
            if self.local is not None:
                # Closed by the I/O thread: it takes up to 5 s, and this is the script's thread.
                self.closing_locals.append(self.local)
            self.schedule.mark_lost(LOCAL)
            self.local = local
        if local is not None:
            self.schedule.grant(LOCAL, local.credits)
            self.had_peers = True

    def pin(self, device: int) -> None:
        """Has batches that arrive from now on in memory pinned for an accelerator."""
        with self._lock:
            self.pins_on = device

    def keep_blocks(self) -> None:
        """Has batches of this epoch that arrive from now on stay blocks of memory."""
        with self._lock:
            self.keeps_blocks = True

    def next(self, epoch_id: int, *, timeout_seconds: float) -> BatchOutcome:
        """Returns the next batch of that epoch, in the sampler's order; waits until it is there.

        It is the same batch again until `unreturned` is None.

        Raises:
            StopIteration: At the end of the epoch.
            RuntimeError: After the loader's `timeout` (0: none), in torch's words. It begins when a
                worker that is ready has the batch: see `LateBatches`.
            Exception: FeedError, or what the dataset, the collate function or the sampler raised.
        """
        self.timeout_seconds = max(0.0, timeout_seconds)
        self.called_at = 0.0
        outcome = self._next_outcome(epoch_id)
        if outcome is None:
            assert self.failure is not None
            # Its own for each call, and made without the lock: an error of the dataset is copied.
            raise fresh(self.failure)
        if outcome.error is None:
            return outcome
        # In place of its batch.
        self.unreturned = None
        raise outcome.error.take()

    def _next_outcome(self, epoch_id: int) -> BatchOutcome | None:
        """Returns what `next` returns or raises; None: the session has failed."""
        while True:
            with self._lock:
                if self.epoch_id != epoch_id:
                    raise StopIteration
                if self._is_drawing:
                    self._end_torn()
                outcome = self._await_head()
                if outcome is None and self.failure is not None:
                    return None
                # Also after a batch that was there: its place in the window is free.
                wanted, has_work = self._look(epoch_id)
                first = self.schedule.supplied
            if wanted:
                self._draw(epoch_id, first, wanted)
            elif has_work:
                self._wake()
            if outcome is not None:
                return outcome

    def take_back(self, epoch_id: int) -> list[AskedBatch]:
        """Ends an epoch for data hosts; returns what was asked for and not taken, in order."""
        with self._lock:
            if self.epoch_id != epoch_id or not self.is_busy:
                return []
            batches = [self._asked[batch_number] for batch_number in sorted(self._asked)]
            self._end_epoch()
        self._wake()
        return batches

    def cancel(self, epoch_id: int) -> None:
        with self._lock:
            if self.epoch_id == epoch_id and self.is_busy:
                self._end_epoch()
        self._wake()

    def _await_head(self) -> BatchOutcome | None:
        """Waits for the batch at the head of the line.

        Returns:
            The batch; None: the session has failed, or the sampler is to be asked for more first.
        """
        while True:
            unreturned = self.unreturned
            if unreturned is not None and self.schedule.num_taken > self._num_before:
                self.schedule.complete_take()
                self._asked.pop(self._last_taken, None)
                self.outcomes.pop(self._last_taken, None)
                return unreturned
            head = self.schedule.head
            # Both: a local batch may be pinned at this moment; a shard's may have overtaken others.
            if head in self.outcomes and self.schedule.is_there(head):
                return self._taken(head)
            if self.failure is not None:
                return None
            # It is idle and not over if a signal's handler raised while the epoch was ended.
            if self.schedule.is_over() or not self.is_busy:
                raise self._ended()
            if self.schedule.wanted(time.monotonic()):
                return None
            if self.has_timed_out:
                self.has_timed_out = False
                raise RuntimeError(f"DataLoader timed out after {self.timeout_seconds} seconds")
            self.called_at = self.called_at or time.monotonic()
            self.waits_since = self.waits_since or self.called_at
            self.schedule.mark_waiting()
            self._num_waiting += 1
            try:
                self._arrival.wait()
            finally:
                self._num_waiting -= 1

    def _taken(self, head: int) -> BatchOutcome:
        """Takes the batch at the head; complete after an interruption by `complete_take`."""
        outcome = self.outcomes[head]
        # Before it is taken: a signal's handler may raise at any call.
        self._last_taken = head
        self._num_before = self.schedule.num_taken
        self.unreturned = outcome
        self.schedule.take(time.monotonic())
        self._asked.pop(head, None)
        if self.waits_since is not None:
            self._end_wait()
        del self.outcomes[head]
        return outcome

    def _ended(self) -> BaseException:
        """Ends the epoch; returns the sampler's error, or StopIteration."""
        if self.is_busy:
            self._end_epoch()
            self._wake()
        source = self._source()
        if source is None or not source.failure.is_there:
            return StopIteration()
        return source.failure.take()

    def _end_wait(self) -> None:
        self.waits_since = None
        self.num_hangs_told = 0
        self.num_starts_told = 0
        self.has_timed_out = False
        self.makers.clear()
        self.inquiries.clear()

    def time_out(self) -> None:
        """Ends the wait for the batch with torch's error."""
        self.has_timed_out = True
        self._arrival.notify_all()

    def _end_epoch(self) -> None:
        self.is_busy = False
        self.has_news = True
        if self.schedule.workers_live == "epoch" and self.local is not None:
            self.closing_locals.append(self.local)
            self.local = None
            self.schedule.mark_lost(LOCAL)
        # An epoch without numbers: until the next one nothing is asked for.
        self.schedule.begin()
        self.schedule.mark_complete()
        self._forget()

    def _forget(self) -> None:
        self.unreturned = None
        self._asked.clear()
        self.outcomes.clear()
        self.sharing.begin_epoch()
        self._end_wait()

    def _look(self, epoch_id: int) -> tuple[int, bool]:
        """Returns how many indices to draw, and whether the I/O thread has something to do."""
        if not self.is_busy or self.epoch_id != epoch_id:
            return 0, self.has_news
        wanted, has_work = self.schedule.look(time.monotonic())
        return wanted, has_work or self.has_news or self.schedule.may_share()

    def _end_torn(self) -> None:
        """Ends the epoch with an error, after the batches that were asked for."""
        self._is_drawing = False
        what = "an exception of a signal's handler came while the sampler was asked"
        fix = (
            "let the handler set a flag that the loop reads; or iterate again, over a new loader "
            "that has loaded the state_dict() of this one"
        )
        source = self._source()
        if source is not None:
            source.failure.keep(FeedError(what, where=f"epoch {self.epoch}", fix=fix))
        self.schedule.mark_complete()

    def _draw(self, epoch_id: int, first: int, wanted: int) -> None:
        # True for ever if a signal's handler raises before the end: see `next`.
        self._is_drawing = True
        # Outside the lock: the sampler is the user's code.
        drawn: dict[int, AskedBatch] = {}
        source = self._source()
        is_last = source is None
        was_in_step = self.schedule.is_in_step
        while source is not None and len(drawn) < wanted and self.is_busy and not is_last:
            if source.is_in_step() and not was_in_step:
                # The index before has shown how the sampler draws.
                break
            try:
                numbered = next(source.indices)
                packed = pack_value(numbered.index, allow_pickle=True)
                drawn[first + len(drawn)] = AskedBatch(packed, numbered.seed_words)
            except StopIteration:
                is_last = True
            except Exception as err:
                if is_of_signal_handler(err):
                    raise
                # The sampler's: raised once all batches before it are taken, as by torch's loader.
                source.failure.keep(err)
                is_last = True
        with self._lock:
            # The sampler may take long: another thread may have ended the epoch by now.
            if self.epoch_id == epoch_id and self.is_busy:
                self._asked.update(drawn)
                self.schedule.supply(len(drawn))
                self.schedule.is_in_step = source is not None and source.is_in_step()
                if is_last:
                    self.schedule.mark_complete()
            self._is_drawing = False
            has_work = self.has_news or self.schedule.may_assign()
        if has_work:
            self._wake()

    def order_of(self, batch_number: int) -> Make:
        batch = self._asked_each or self._asked[batch_number]
        return Make(
            session=self.name,
            epoch_id=self.epoch_id,
            batch_number=batch_number,
            index=batch.index,
            seed_words=batch.seed_words,
            stream=self.schedule.stream_of(batch_number, shared_seed=batch.shared_seed),
            is_among_last=self.schedule.is_among_last(batch_number),
        )

    def batch_words(self, batch_number: int) -> str:
        if self.schedule.num_shards:
            position, shard = divmod(batch_number, self.schedule.num_shards)
            what = f"batch {position} of shard {shard}"
        elif batch_number in self._asked:
            index = unpack_value(self._asked[batch_number].index, allow_pickle=True)
            what = f"samples {words_of_samples(index)}"
        else:
            what = "samples unknown"
        return f"batch {batch_number} of epoch {self.epoch} ({what})"

    def sample_words(self, batch_number: int, sample: SampleInWork) -> str:
        """Returns which sample of a batch a worker makes, and for how long."""
        if sample.place == ALL_SAMPLES or batch_number not in self._asked:
            return f"one call that makes all of its samples, for {sample.seconds:.1f} s"
        index = unpack_value(self._asked[batch_number].index, allow_pickle=True)
        shown = words_of_sample(index, sample.place, is_lone=sample.is_lone)
        return f"sample {shown} for {sample.seconds:.1f} s"

    def deliver(self, batch_number: int, outcome: BatchOutcome, *, is_final: bool = False) -> None:
        """Has a batch, or its error, wait for its turn.

        Args:
            batch_number: In its epoch.
            outcome: The batch, or its error.
            is_final: An error ends the session at once: nothing comes after it.
        """
        if is_final and outcome.error is not None:
            self.mark_failed(outcome.error.take())
            return
        self.outcomes[batch_number] = outcome
        self.stir(batch_number == self.schedule.head)

    def stir(self, is_head: bool = False) -> None:
        """Makes `ring` wake the thread that iterates, if there is something for it to do."""
        if self._num_waiting and not self.is_due:
            self.is_due = is_head or self.schedule.wanted(time.monotonic()) > 0

    def ring(self) -> None:
        # The I/O thread's last act before it sleeps, or both would want the locks.
        self.is_due = False
        self._arrival.notify_all()

    def mark_failed(self, error: BaseException) -> None:
        """Ends every wait with this error; the first one counts."""
        if self.failure is None:
            self.failure = error
        self._arrival.notify_all()


def _no_source() -> IndexSource | None:
    """Returns nothing: no epoch has begun."""
    return None


class SharedState:
    """State that the I/O thread and the threads that iterate share."""

    def __init__(self, *, timeline: Timeline, log: Log, pinned: PinnedMemory | None = None) -> None:
        # Over the sessions and their contents; held for microseconds. A signal's handler that comes
        # meanwhile may iterate over another loader, as to evaluate before the last checkpoint.
        self.lock = threading.RLock()
        self.sessions: dict[str, FeedSession] = {}
        # Ends every session, later ones too.
        self.failure: BaseException | None = None
        self.is_closing = False
        self.timeline = timeline
        self.log = log
        self.pinned = pinned or PinnedMemory()
        # Of `feed.max_bytes`; see MemoryGuard.
        self.memory_share = 1.0
        self.receivers: weakref.WeakSet[BatchReceiver] = weakref.WeakSet()
        self._pid = os.getpid()
        self._is_asleep = self._is_called = False
        # A counter of the kernel: several calls before a poll are one.
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Appended to by finalizers and threads, emptied by the I/O thread: atomic operations only.
        self._closing: deque[FeedSession] = deque()
        self._posted: deque[Callable[[], None]] = deque()

    def mark_failed(self, error: BaseException) -> None:
        """Fails every session, also those to come; the first error counts."""
        with self.lock:
            self.failure = self.failure or error
            for session in self.sessions.values():
                session.mark_failed(error)

    def wake(self) -> None:
        """Ends the I/O thread's wait, or its next one; safe in a finalizer, and after the end."""
        # Set, then checked, as in `mark_asleep`: the later of the two sees the other. No lock: a
        # finalizer may run in a thread that holds it.
        self._is_called = True
        # Awake, it looks for work before it sleeps.
        if not self._is_asleep:
            return
        self._is_asleep = False
        with contextlib.suppress(OSError):
            # Not in a forked child, where the number may be another file's.
            if self.wake_fd >= 0 and os.getpid() == self._pid:
                os.eventfd_write(self.wake_fd, 1)

    def mark_asleep(self) -> bool:
        """Notes that the I/O thread is about to poll; returns False if it must not wait."""
        # In this order: a `wake` between the two finds it asleep, and writes.
        self._is_asleep = True
        return not self._is_called

    def mark_awake(self, *, is_rung: bool) -> None:
        """Notes that its poll is over.

        Args:
            is_rung: Whether `wake_fd` ended it, which is read so that it does not end the next one.
        """
        self._is_asleep = self._is_called = False
        if is_rung:
            os.eventfd_read(self.wake_fd)

    def post(self, action: Callable[[], None]) -> None:
        self._posted.append(action)
        self.wake()

    def run_posted(self) -> None:
        while self._posted:
            self._posted.popleft()()

    def close_session(self, session: FeedSession) -> None:
        """Closes the session of a loader that is gone, in the I/O thread; safe in a finalizer."""
        self._closing.append(session)
        self.wake()

    def take_closing(self) -> list[FeedSession]:
        """Removes and returns the sessions to close; for the I/O thread, under the lock."""
        # As many as there are now: a finalizer may add another one meanwhile.
        names = [self._closing.popleft().name for _ in range(len(self._closing))]
        return [self.sessions.pop(name) for name in dict.fromkeys(names) if name in self.sessions]

    def close(self) -> None:
        """Closes the descriptor, after the I/O thread's end; may be called twice."""
        # The number first, then the file: a finalizer may call `wake` in between.
        descriptor = self.wake_fd
        self.wake_fd = -1
        if descriptor >= 0:
            os.close(descriptor)
