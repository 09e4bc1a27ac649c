"""The dispatch decides which of the batches that sessions ask for are made next, and answers them.

At most `workers` batches are being made at a time, over all specs and ranks, in order of batch
number, as far as credits and memory allow.

Here is what the agent knows of sessions and requests: their order (`Queue`), how many may be asked
for (`CreditPool`), and what is answered (`Outbox`).
"""

import heapq
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stoker.feed import memory
from stoker.feed.agent.batch_port import OutgoingBatch
from stoker.feed.agent.dataset_process import PoolKey, Specs
from stoker.feed.wire import protocol
from stoker.feed.workers.pool import Result, job_of
from stoker.logs import EventName, Log
from stoker.records import FeedSettings

# 2 a worker are enough where batches cost the same; with costs that vary exponentially 5 bring
# what they can (tests/unit/test_scheduler_prefetch.py), and more only fill memory.
MAX_CREDITS_PER_WORKER = 8
# More credits for each unit of variation: standard deviation over mean of what batches cost.
CREDITS_PER_VARIATION = 3
# Workers that run dry want one more batch to be on its way; four cover any round trip.
_MAX_CREDITS_FOR_DRY_WORKERS = 4
# How many batches the variation is computed from, at least and at most.
_MIN_COSTS, _MAX_COSTS = 8, 64
# Credits are taken back when they were too many for so many seconds.
_SECONDS_BEFORE_FEWER = 5
# A session that asked for nothing for this long leaves its credits to the others.
ACTIVE_SECONDS = 5.0
# A trainer may ask for more than its credits while a change is on its way, but not for ever.
MAX_REQUESTS_PER_CREDIT = 8
# Batches of one shard that may be asked for: far more than any prefetch factor in use.
MAX_OPEN = 256


@dataclass(eq=False)
class AgentSession:
    """Serves one loader of one trainer process.

    Attributes:
        identity: Routing id of its connection.
        spec: Digest of the spec it uses now.
        base_seed: Seed of workers that start before they have a job; None: they start with one.
        is_ready: A Ready for that spec was sent to it.
        credits: The number that was sent to it last.
        requests: Those that are queued or being made, by epoch and number.
        unreachable_since: Monotonic seconds, where a message could not be delivered.
    """

    name: str
    identity: bytes
    rank: int
    spec: str
    seeding: str
    base_seed: int | None = None
    is_ready: bool = False
    credits: int = 0
    before_epoch_id: int = 0
    requests: dict[tuple[int, int], "Request"] = field(default_factory=dict)
    asked_at: float = -math.inf
    unreachable_since: float | None = None

    def is_active(self, now: float) -> bool:
        """Returns whether it uses its credits."""
        return bool(self.requests) or now - self.asked_at < ACTIVE_SECONDS

    @property
    def max_requests(self) -> int:
        """Returns how many requests a session may have at a time; more are refused."""
        return MAX_REQUESTS_PER_CREDIT * max(self.credits, MAX_CREDITS_PER_WORKER)


@dataclass(eq=False, slots=True)
class Request:
    """A session asks for one batch with each request.

    Attributes:
        spec: Digest of the spec that the session used when it asked; as `seeding`.
        make: What it asked for.
        is_cancelled: Nobody wants it any more.
        arrival: Its place among requests of the same number, from the queue; None: not queued yet.
        generation: Generation of its shard's process; 0: it is of no shard.
    """

    session: AgentSession
    spec: str
    seeding: str
    make: protocol.Make
    is_cancelled: bool = False
    arrival: int | None = None
    epoch_id: int = field(init=False)
    number: int = field(init=False)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.epoch_id, self.number = self.make.epoch_id, self.make.number
        self.generation = 0 if self.make.stream is None else self.make.stream.generation


class Queue:
    """Holds the requests that wait, of all sessions, in order of batch number."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum(not request.is_cancelled for _, _, request in self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._heap if not request.is_cancelled)

    def push(self, request: Request) -> None:
        """Adds a request; one that was popped before gets its old place."""
        if request.arrival is None:
            request.arrival = next(self._arrivals)
        heapq.heappush(self._heap, (request.number, request.arrival, request))

    def pop(self, *, specs: Collection[str]) -> Request | None:
        """Returns the first request whose spec is in `specs`, or None; skips dropped ones."""
        kept: list[tuple[int, int, Request]] = []
        found: Request | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            if entry[2].is_cancelled:
                continue
            if entry[2].spec in specs:
                found = entry[2]
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found


class CreditPool:
    """Shares out how many batches may be asked for: the workers' credits, fairly over the ranks.

    Attributes:
        per_worker: Follows how much the cost of batches varies, from what is set up to 8.
    """

    def __init__(self, *, workers: int, per_worker: int) -> None:
        self._workers = workers
        self._set = per_worker
        self._for_dry = per_worker
        self.per_worker = per_worker
        self._costs: deque[float] = deque(maxlen=_MAX_COSTS)
        self._measured = 0
        self._begun: set[int] = set()
        self._seconds_too_many = 0
        self._jobs = 0
        self._dry = 0

    def share(self, session: AgentSession, sessions: Iterable[AgentSession], now: float) -> int:
        """Returns the credits of `session`, at least 1.

        Ranks with a session that is used have equal parts, to one; so have the sessions of a rank.
        """
        # Also the one in question, active or not: when it is opened it has asked for nothing yet.
        # Sorted, so that each call deals out what does not divide evenly in the same way.
        active = {s.name: s for s in sessions if s.is_active(now)} | {session.name: session}
        ranks = sorted({other.rank for other in active.values()})
        names = sorted(name for name, other in active.items() if other.rank == session.rank)
        total = self._workers * self.per_worker
        of_rank = _part(total, len(ranks), ranks.index(session.rank))
        return max(1, _part(of_rank, len(names), names.index(session.name)))

    def count(self, *, is_dry: bool) -> None:
        """Notes that a job ended, and that there was (not) another one waiting."""
        self._jobs += 1
        self._dry += is_dry

    def measured(self, seconds: float, *, worker: int) -> bool:
        """Notes how long a batch took; the first of each worker, which opens files, is left out.

        Returns:
            Whether `per_worker` has risen, which is looked at every few batches.
        """
        if worker not in self._begun:
            self._begun.add(worker)
            return False
        self._costs.append(seconds)
        self._measured += 1
        if self._measured % _MIN_COSTS:
            return False
        return self._rises_to(self._wanted())

    def adapt(self) -> bool:
        """Adapts `per_worker`, once a second; True if it has changed.

        It rises at once, for until then workers run dry, and falls one by one.
        """
        # One in five: a worker that waits now and then costs nothing.
        ran_dry = self._jobs >= 5 and self._dry * 5 > self._jobs
        self._jobs = self._dry = 0
        # It never falls again: what the round trip needs does not change during a run.
        if ran_dry and self._for_dry < _MAX_CREDITS_FOR_DRY_WORKERS:
            self._for_dry += 1
        wanted = self._wanted()
        is_less = wanted < self.per_worker
        self._seconds_too_many = self._seconds_too_many + 1 if is_less else 0
        if self._rises_to(wanted):
            return True
        if self._seconds_too_many >= _SECONDS_BEFORE_FEWER:
            self.per_worker -= 1
            return True
        return False

    def _wanted(self) -> int:
        return max(self._for_dry, credits_for(self._costs, at_least=self._set))

    def _rises_to(self, wanted: int) -> bool:
        has_risen = wanted > self.per_worker
        self.per_worker = max(wanted, self.per_worker)
        return has_risen


def credits_for(costs: Collection[float], *, at_least: int) -> int:
    """Returns the credits of a worker whose batches cost so many seconds."""
    if len(costs) < _MIN_COSTS:
        return at_least
    # Without the largest: one batch that had to wait for a cold cache is no habit.
    usual = sorted(costs)[:-1]
    mean = sum(usual) / len(usual)
    if mean <= 0:
        return at_least
    variation = statistics.pstdev(usual) / mean
    more = round(CREDITS_PER_VARIATION * variation)
    return max(at_least, min(at_least + more, MAX_CREDITS_PER_WORKER))


def _part(total: int, parts: int, index: int) -> int:
    return total // parts + (index < total % parts)


class Transport(Protocol):
    """Takes answers to trainers; the frames' memory is the transport's until it lets go of it."""

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends to a peer, without blocking; False if it is not connected."""
        ...

    def ticket_for(self, identity: bytes) -> protocol.Ticket:
        """Returns a ticket for a peer's connection for batches."""
        ...

    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch for a peer; False if it has no connection for batches, nor a ticket."""
        ...

    def wake(self) -> None:
        """Wakes the agent's loop for one more turn; called from any thread."""
        ...


class Outbox:
    """Sends answers, refusals and batches; used by the agent's thread.

    Attributes:
        sent_bytes: Bytes of batches that the transport still holds, as of the last `settle`.
        batch_bytes: Bytes of the last batch; None: there was none.
        num_sent: Batches sent so far, over all sessions.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent_bytes = 0
        self.batch_bytes: int | None = None
        self.num_sent = 0
        # Appended to in threads of the transport's.
        self._sent: deque[int] = deque()

    def settle(self) -> None:
        """Counts what the transport has let go of."""
        while self._sent:
            self.sent_bytes -= self._sent.popleft()

    def send(self, session: AgentSession, message: protocol.Message, frame: bytes = b"") -> None:
        """Sends to a session; notes it where that cannot be reached."""
        frames = [protocol.pack(message), frame] if frame else [protocol.pack(message)]
        self._mark(session, is_sent=self._transport.send(session.identity, frames))

    def answer(self, identity: bytes, message: protocol.Message) -> None:
        """Sends to a peer that has no session."""
        self._transport.send(identity, [protocol.pack(message)])

    def give_ticket(self, identity: bytes) -> None:
        """Lets a peer open its connection for batches."""
        self.answer(identity, self._transport.ticket_for(identity))

    def refuse(self, identity: bytes, message: protocol.Make, reason: str) -> None:
        """Says that a batch cannot be made here now."""
        dropped = protocol.Declined(
            session=message.session,
            epoch_id=message.epoch_id,
            number=message.number,
            reason=reason,
            generation=message.stream.generation if message.stream else 0,
        )
        self.answer(identity, dropped)

    def decline(self, request: Request, reason: str, *, is_lost: bool = False) -> None:
        """Says that a batch that was asked for is not made here."""
        dropped = protocol.Declined(
            session=request.session.name,
            epoch_id=request.epoch_id,
            number=request.number,
            reason=reason,
            is_lost=is_lost,
            generation=request.generation,
        )
        self.send(request.session, dropped)

    def result(self, request: Request, result: Result) -> None:
        """Sends the answer to a request."""
        session = request.session
        name, epoch_id, number = session.name, request.epoch_id, request.number
        if result.is_lost:
            self.decline(request, result.summary, is_lost=True)
        elif result.is_end:
            ended = protocol.Ended(
                session=name,
                epoch_id=epoch_id,
                number=number,
                generation=request.generation,
                state=result.state,
            )
            self.send(session, ended)
        elif result.tree is None:
            raised = protocol.Raised(
                session=name,
                epoch_id=epoch_id,
                number=number,
                summary=result.summary,
                generation=request.generation,
                digest=result.digest,
                state=result.state,
                is_final=result.is_final,
            )
            self.send(session, raised, result.error or b"")
        else:
            made = protocol.Made(
                session=name,
                epoch_id=epoch_id,
                number=number,
                tree=result.tree,
                cpu_seconds=result.cpu_seconds,
                wall_seconds=result.wall_seconds,
                worker=result.worker,
                generation=request.generation,
                digest=result.digest,
                state=result.state,
            )
            self._send_batch(request, made, result)

    def _send_batch(self, request: Request, made: protocol.Made, result: Result) -> None:
        self.num_sent += 1
        # The only view from now on is that of the batch: whoever sends it drops it before `done`,
        # for then the worker writes the next batch to that memory.
        payload, result.payload = result.payload, None
        nbytes = 0 if payload is None else payload.nbytes
        if payload is not None:
            self.batch_bytes = nbytes
        self.sent_bytes += nbytes

        def done() -> None:
            result.release()
            self._sent.append(nbytes)
            self._transport.wake()

        batch = OutgoingBatch(protocol.pack(made), payload, (made.session, made.epoch_id), done)
        del payload
        if self._transport.send_batch(request.session.identity, batch):
            self._mark(request.session, is_sent=True)
            return
        batch.payload = None
        done()
        self.decline(request, "there is no connection for batches")

    def _mark(self, session: AgentSession, *, is_sent: bool) -> None:
        if is_sent:
            session.unreachable_since = None
        elif session.unreachable_since is None:
            session.unreachable_since = time.monotonic()


class Dispatch:
    """Dispatches requests to workers in their order, and results to the outbox.

    Args:
        sessions: The open ones, by name, as they come and go.
        workers: Batches made at a time.

    Attributes:
        num_begun: Batches that workers have, to make now or next.
    """

    def __init__(
        self,
        specs: Specs,
        outbox: Outbox,
        *,
        sessions: Mapping[str, AgentSession],
        workers: int,
        feed: FeedSettings,
        log: Log,
    ) -> None:
        self._specs = specs
        self._outbox = outbox
        self._sessions = sessions
        self._workers = workers
        self._log = log
        self._queue = Queue()
        self._credits = CreditPool(workers=workers, per_worker=feed.credits)
        self._max_bytes = memory.max_bytes(feed)
        self.num_begun = 0

    @property
    def num_queued(self) -> int:
        """Counts requests that no worker has begun."""
        return len(self._queue)

    def work(self) -> None:
        """Sends what was made, and keeps the workers busy."""
        self._outbox.settle()
        results = list(self._specs.results())
        # Shards are not counted: their workers are their own, and take no place of others.
        self.num_begun -= sum(result.job.order.stream is None for result in results)
        # Before the batches are sent: the workers that made them may be idle, and to send takes
        # longer.
        self._give()
        is_dry = self._specs.num_busy() < self._workers
        for result in results:
            self._deliver(result, is_dry=is_dry)

    def tick(self) -> None:
        """Assigns late jobs to other workers, too, and adapts the credits; called once a second."""
        for job in self._specs.give_late_jobs_again():
            (late,) = job.key
            assert isinstance(late, Request)
            self._log.event(EventName.BATCH_OVERDUE, epoch_id=late.epoch_id, batch=late.number)
        self._credits.adapt()
        self.share_credits()

    def share(self, session: AgentSession) -> int:
        """Returns how many batches a session may ask for now."""
        return self._credits.share(session, self._sessions.values(), time.monotonic())

    def share_credits(self) -> None:
        """Tells the sessions whose share has changed."""
        for session in self._sessions.values():
            share = self.share(session)
            if session.is_ready and share != session.credits:
                session.credits = share
                self._outbox.send(session, protocol.Credits(session=session.name, credits=share))

    def ask(self, identity: bytes, session: AgentSession, message: protocol.Make) -> None:
        """Queues a batch that a session asks for; one of a shard is its worker's at once."""
        stream = message.stream
        generation = 0 if stream is None else stream.generation
        known = session.requests.get((message.epoch_id, message.number))
        if known is not None and known.generation == generation:
            return  # Asked for twice: the answer to the first is that to both.
        refusal = self._refusal(session, message, known)
        if refusal:
            self._outbox.refuse(identity, message, refusal)
            return
        if known is not None:
            known.is_cancelled = True
        now = time.monotonic()
        was_active = session.is_active(now)
        session.asked_at = now
        request = session.requests[message.epoch_id, message.number] = Request(
            session, session.spec, session.seeding, message
        )
        if stream is None:
            self._queue.push(request)
        else:
            job = job_of(message, (request,))
            self._specs.assign(session.spec, ("session", session.name), job)
        if not was_active:
            self.share_credits()

    def _refusal(self, session: AgentSession, message: protocol.Make, known: Request | None) -> str:
        """Says why a batch is not made here; empty: it is."""
        limit = session.max_requests
        stream = message.stream
        if stream is not None:
            held = self._specs.find(session.spec)
            if held is None or held.state != "ready":
                return "the dataset failed on this host"
            if known is not None and known.generation > stream.generation:
                return "its shard was begun again"
            # Not by credits: the trainer asks each shard for its prefetch factor, on whichever host
            # it is.
            limit = max(limit, MAX_OPEN * stream.num_shards)
        if message.epoch_id < session.before_epoch_id:
            return "it is of an epoch that was said to be over"
        return "asked for far more than the credits" if len(session.requests) >= limit else ""

    def cancel_queued(self, reason: str, *, spec: str | None = None) -> None:
        """Hands back what is queued, of one spec or of all."""
        for request in [r for r in self._queue if spec is None or r.spec == spec]:
            request.is_cancelled = True
            request.session.requests.pop((request.epoch_id, request.number), None)
            self._outbox.decline(request, reason)

    def _give(self) -> None:
        """Assigns the first requests to workers, as far as memory allows.

        So many workers of the host are busy at a time, of whatever spec; a busy one gets one job
        ahead. Nobody overtakes: where the first request has to wait, so do all.
        """
        self._specs.flush()
        while self._has_memory():
            request = self._queue.pop(specs=self._specs.ready())
            if request is None:
                return
            key: PoolKey = ("seeding", request.seeding)
            may_begin = self._specs.num_busy() < self._workers
            if not self._specs.can_take(request.spec, key, may_begin=may_begin):
                self._queue.push(request)
                return
            self.num_begun += 1
            self._specs.assign(request.spec, key, job_of(request.make, (request,)))

    def _has_memory(self) -> bool:
        """Returns whether there is memory for one more batch; always if none is held."""
        sent_bytes = self._outbox.sent_bytes
        batch_bytes = self._outbox.batch_bytes or memory.UNKNOWN_BATCH_BYTES
        waiting = sent_bytes + (self.num_begun + 1) * batch_bytes
        # One batch always goes, however large: else nothing would ever free memory
        # (tests/faults/test_stragglers.py).
        return waiting <= self._max_bytes or not (self.num_begun or sent_bytes)

    def _deliver(self, result: Result, *, is_dry: bool) -> None:
        (request,) = result.job.key
        assert isinstance(request, Request)
        if not request.generation:
            # A shard's worker makes one batch after the other: credits do not steer it.
            self._credits.count(is_dry=is_dry)
            if result.tree is not None and self._credits.measured(
                result.wall_seconds, worker=result.worker
            ):
                self.share_credits()
        session = request.session
        # A later start of the shard may have its own request under that number by now.
        if session.requests.get((request.epoch_id, request.number)) is request:
            del session.requests[request.epoch_id, request.number]
        if request.is_cancelled:
            result.release()
            return
        if result.is_lost:
            self._log.event(EventName.BATCH_LOST, number=request.number, reason=result.summary)
        self._outbox.result(request, result)
