"""Order in which the requested batches of all sessions are made, and the answers to them.

At most `workers` batches are being made at a time, over all specs and ranks, in order of batch
number, within credits and memory.

Back-pressure: the host grants each trainer credits (`share_credits`), which are batches that may be
in flight, and a trainer asks for no more (`trainer/scheduler.py`). Without memory none is begun.
"""

import heapq
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

import msgspec

from stoker.feed import memory
from stoker.feed.agent.batch_port import OutgoingBatch
from stoker.feed.agent.dataset_process import PoolKey, Specs
from stoker.feed.memory_guard import MemoryGuard, MemoryShares
from stoker.feed.wire import protocol
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.workers.jobs import FinishedPart, Result, WorkerJob
from stoker.feed.workers.pool import Maker
from stoker.logs import EventName, Log
from stoker.records import FeedSettings

# 2 a worker suffice if batches cost the same; with exponentially distributed costs more than 5 gain
# nothing (tests/unit/test_scheduler_prefetch.py).
MAX_CREDITS_PER_WORKER = 8
# For each unit of variation: standard deviation over mean of batches' costs.
CREDITS_PER_VARIATION = 3
# Where workers run dry, more batches have to be in flight; four cover any round trip.
_MAX_CREDITS_FOR_DRY_WORKERS = 4
# Batches that the variation is computed from.
_MIN_COSTS = 8
_MAX_COSTS = 64
# Credits are reduced if they were too many for that long.
_SECONDS_BEFORE_FEWER = 5
# After that long without a request, a session's credits go to the others.
ACTIVE_SECONDS = 5.0
# A trainer may exceed its credits while a change is in transit.
MAX_REQUESTS_PER_CREDIT = 8
# Stacks of workers that start, in the log for one session: they are asked for again and again.
_MAX_STARTS_SHOWN = 4
# Open requests of one shard: far more than any prefetch factor in use.
MAX_OPEN = 256


@dataclass(eq=False)
class AgentSession:
    """One loader of one trainer process, with its open requests by epoch and number."""

    name: str
    identity: bytes
    rank: int
    spec: str
    seeding: str
    # Of workers that start before they have a job; None: they start with one.
    base_seed: int | None = None
    is_ready: bool = False
    credits: int = 0
    before_epoch_id: int = 0
    requests: dict[tuple[int, int], "BatchRequest"] = field(default_factory=dict)
    asked_at: float = -math.inf
    unreachable_since: float | None = None
    num_starts_shown: int = 0

    def is_active(self, now: float) -> bool:
        return bool(self.requests) or now - self.asked_at < ACTIVE_SECONDS


@dataclass(eq=False, slots=True)
class BatchRequest:
    """A request for one batch, with spec and seeding of its session at that time."""

    session: AgentSession
    spec: str
    seeding: str
    make: protocol.Make
    is_cancelled: bool = False
    arrival: int | None = None
    shown_workers: set[int] = field(default_factory=set)
    epoch_id: int = field(init=False)
    batch_number: int = field(init=False)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.epoch_id = self.make.epoch_id
        self.batch_number = self.make.batch_number
        self.generation = 0 if self.make.stream is None else self.make.stream.generation


class Queue:
    """Waiting requests of all sessions, in order of batch number."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, BatchRequest]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum(not request.is_cancelled for _, _, request in self._heap)

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for _, _, request in self._heap if not request.is_cancelled)

    def push(self, request: BatchRequest) -> None:
        # One that was popped before gets its former place.
        if request.arrival is None:
            request.arrival = next(self._arrivals)
        heapq.heappush(self._heap, (request.batch_number, request.arrival, request))

    def pop(self, *, specs: Collection[str]) -> BatchRequest | None:
        """Returns the first request whose spec is in `specs`, or None; discards cancelled ones."""
        kept: list[BatchRequest] = []
        next_request: BatchRequest | None = None
        while self._heap and next_request is None:
            request = heapq.heappop(self._heap)[2]
            if request.spec in specs and not request.is_cancelled:
                next_request = request
            elif not request.is_cancelled:
                kept.append(request)
        for request in kept:
            self.push(request)
        return next_request


class CreditPool:
    """Credits of the workers, shared fairly; more per worker if batches' costs vary."""

    def __init__(self, *, workers: int, per_worker: int) -> None:
        self._workers = workers
        # Credits of a worker: as set, as many as keep it busy over a round trip, and now.
        self._set = per_worker
        self._for_dry = per_worker
        self.per_worker = per_worker
        # Fewer batches may wait where memory is short.
        self.memory_share = 1.0
        self._costs: deque[float] = deque(maxlen=_MAX_COSTS)
        self._measured = 0
        # Workers that have made a batch.
        self._begun: set[int] = set()
        self._seconds_too_many = 0
        # Since the last second: jobs, and those before which the worker had nothing to do.
        self._jobs = 0
        self._dry = 0

    def share(self, session: AgentSession, sessions: Iterable[AgentSession], now: float) -> int:
        """Returns the credits of `session`, at least 1: equal parts of ranks, and within them."""
        # `session` counts in any case: a new one has no requests yet. Sorted: see `_part`.
        active = {s.name: s for s in sessions if s.is_active(now)} | {session.name: session}
        ranks = sorted({other.rank for other in active.values()})
        names = sorted(name for name, other in active.items() if other.rank == session.rank)
        total = self._workers * max(1, int(self.per_worker * self.memory_share))
        of_rank = _part(total, len(ranks), ranks.index(session.rank))
        return max(1, _part(of_rank, len(names), names.index(session.name)))

    def count(self, *, is_dry: bool) -> None:
        self._jobs += 1
        # A worker had nothing to do: the next request comes a round trip later.
        self._dry += is_dry

    def add_cost(self, seconds: float, *, worker: int) -> bool:
        """Records the cost of a batch; returns whether `per_worker` has risen."""
        # A worker's first batch opens files.
        if worker not in self._begun:
            self._begun.add(worker)
            return False
        self._costs.append(seconds)
        self._measured += 1
        # Not at each batch: the mean has to settle.
        if self._measured % _MIN_COSTS:
            return False
        return self._raise_to(self._wanted())

    def adapt(self) -> bool:
        """Adapts `per_worker`, once a second: rises at once, falls one by one; True if changed."""
        # One in five: a worker that waits now and then costs nothing.
        ran_dry = self._jobs >= 5 and self._dry * 5 > self._jobs
        self._jobs = 0
        self._dry = 0
        # It never falls: the round trip does not change during a run.
        if ran_dry and self._for_dry < _MAX_CREDITS_FOR_DRY_WORKERS:
            self._for_dry += 1
        wanted = self._wanted()
        is_less = wanted < self.per_worker
        if is_less:
            self._seconds_too_many += 1
        else:
            self._seconds_too_many = 0
        if self._raise_to(wanted):
            return True
        if self._seconds_too_many >= _SECONDS_BEFORE_FEWER:
            self.per_worker -= 1
            return True
        return False

    def _wanted(self) -> int:
        """Returns the credits of a worker by what was measured, and by how often it ran dry."""
        return max(self._for_dry, credits_for(self._costs, at_least=self._set))

    def _raise_to(self, wanted: int) -> bool:
        has_risen = wanted > self.per_worker
        self.per_worker = max(wanted, self.per_worker)
        return has_risen


def credits_for(costs: Collection[float], *, at_least: int) -> int:
    """Returns the credits of a worker whose batches cost that many seconds."""
    # Without the largest: one batch may have waited for a cold cache.
    usual = sorted(costs)[:-1]
    if len(costs) < _MIN_COSTS or sum(usual) <= 0:
        return at_least
    variation = statistics.pstdev(usual) / statistics.fmean(usual)
    more = round(CREDITS_PER_VARIATION * variation)
    return max(at_least, min(at_least + more, MAX_CREDITS_PER_WORKER))


def _part(total: int, parts: int, index: int) -> int:
    # The first ones get one more, so that the parts add up to the total.
    return total // parts + (index < total % parts)


class Transport(Protocol):
    """Connection to the trainers; it has the frames' memory until it has sent them."""

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool: ...
    def ticket_for(self, identity: bytes) -> protocol.Ticket: ...
    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool: ...
    def wake(self) -> None: ...


class Outbox:
    """Answers to requests; `sent_bytes` are those that the transport still has."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.sent_bytes = 0
        self.batch_bytes: int | None = None
        self.num_sent = 0
        # Sizes; appended to by the transport's threads.
        self._sent: deque[int] = deque()

    def settle(self) -> None:
        while self._sent:
            self.sent_bytes -= self._sent.popleft()

    def send(self, session: AgentSession, message: protocol.Message, frame: bytes = b"") -> None:
        frames = [protocol.pack(message), frame] if frame else [protocol.pack(message)]
        self._mark(session, is_sent=self._transport.send(session.identity, frames))

    def answer(self, identity: bytes, message: protocol.Message) -> None:
        self._transport.send(identity, [protocol.pack(message)])

    def give_ticket(self, identity: bytes) -> None:
        self.answer(identity, self._transport.ticket_for(identity))

    def refuse(self, identity: bytes, message: protocol.Make, reason: str) -> None:
        self.answer(identity, protocol.Declined(**_about(message), reason=reason))

    def decline(self, request: BatchRequest, reason: str, *, is_lost: bool = False) -> None:
        declined = protocol.Declined(**_about(request.make), reason=reason, is_lost=is_lost)
        self.send(request.session, declined)

    def result(self, request: BatchRequest, result: Result) -> None:
        session = request.session
        about = _about(request.make)
        if result.is_lost:
            self.decline(request, result.summary, is_lost=True)
        elif result.is_end:
            self.send(session, protocol.Ended(**about, state=result.state))
        elif result.tree is None:
            raised = protocol.Raised(
                **about,
                summary=result.summary,
                digest=result.digest,
                state=result.state,
                is_final=result.is_final,
            )
            self.send(session, raised, result.error or b"")
        else:
            batch = protocol.Made(
                **about,
                tree=result.tree,
                cpu_seconds=result.cpu_seconds,
                wall_seconds=result.wall_seconds,
                worker=result.worker,
                digest=result.digest,
                state=result.state,
                own_state=result.own_state,
                samples=result.samples,
            )
            self._send_batch(request, batch, result)

    def part(self, request: BatchRequest, result: Result, part: FinishedPart) -> None:
        """Sends samples of a batch that another host collates."""
        content = part.content
        message = protocol.BatchPart(
            session=request.session.name,
            epoch_id=request.epoch_id,
            batch_number=request.batch_number,
            first=result.job.first,
            num_samples=content.num_samples,
            tree=content.tree,
            cpu_seconds=content.cpu_seconds,
            wall_seconds=content.wall_seconds,
            send_seconds=content.send_seconds,
            bad=content.bad,
        )
        batch = self._outgoing(message, part.read(), release=part.close)
        self._sends(request, batch)

    def _send_batch(self, request: BatchRequest, made: protocol.Made, result: Result) -> None:
        self.num_sent += 1
        # The batch has the only view: after its release the worker writes to that memory again.
        payload = result.payload
        result.payload = None
        if payload is not None:
            self.batch_bytes = payload.nbytes
        batch = self._outgoing(made, payload, release=result.release)
        del payload
        if not self._sends(request, batch):
            self.decline(request, "no connection for batches")

    def _outgoing(
        self,
        message: protocol.Made | protocol.BatchPart,
        payload: Bytes1D | None,
        *,
        release: Callable[[], None],
    ) -> OutgoingBatch:
        nbytes = 0 if payload is None else payload.nbytes
        self.sent_bytes += nbytes

        def done() -> None:
            release()
            self._sent.append(nbytes)
            self._transport.wake()

        of = message.session, message.epoch_id
        return OutgoingBatch(protocol.pack(message), payload, of, done)

    def _sends(self, request: BatchRequest, batch: OutgoingBatch) -> bool:
        """Sends a batch, or frees its memory and returns False if there is no connection."""
        if self._transport.send_batch(request.session.identity, batch):
            self._mark(request.session, is_sent=True)
            return True
        batch.payload = None
        batch.done()
        return False

    def _mark(self, session: AgentSession, *, is_sent: bool) -> None:
        if is_sent:
            session.unreachable_since = None
        elif session.unreachable_since is None:
            session.unreachable_since = time.monotonic()


class _About(TypedDict):
    """What all answers to a request repeat of it."""

    session: str
    epoch_id: int
    batch_number: int
    generation: int


def _about(make: protocol.Make) -> _About:
    return {
        "session": make.session,
        "epoch_id": make.epoch_id,
        "batch_number": make.batch_number,
        "generation": make.stream.generation if make.stream else 0,
    }


class Dispatch:
    """Assigns requests to workers in their order, and sends results."""

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
        self._guard = MemoryGuard(max_bytes=self._max_bytes)
        self.num_begun = 0

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def memory_shares(self) -> MemoryShares:
        return self._guard.shares

    def _guard_memory(self) -> None:
        now = time.monotonic()
        if not self._guard.is_due(now):
            return
        words = self._guard.tick(
            now,
            waiting_bytes=self._waiting_bytes(self.num_begun),
            coming_bytes=self.num_begun * (self._outbox.batch_bytes or 0),
        )
        if words:
            self._log.event(EventName.MEMORY_SHORT, text=words)
        if self._credits.memory_share != self._guard.share:
            self._credits.memory_share = self._guard.share
            self._specs.spare_memory(self._guard.share)
            self.share_credits()

    def work(self) -> None:
        self._guard_memory()
        self._outbox.settle()
        results = list(self._specs.results())
        self.num_begun -= sum(_is_counted(result.job) for result in results)
        # Before sending, which takes longer: the workers may be idle.
        self._give()
        is_dry = self._specs.num_busy() < self._workers
        for result in results:
            self._deliver(result, is_dry=is_dry)

    def tick(self) -> None:
        """Assigns late jobs to other workers, too, and adapts the credits; called once a second."""
        for job in self._specs.give_late_jobs_again():
            (late,) = job.key
            assert isinstance(late, BatchRequest)
            self._log.event(
                EventName.BATCH_OVERDUE, epoch_id=late.epoch_id, batch=late.batch_number
            )
        self._credits.adapt()
        self.share_credits()

    def share(self, session: AgentSession) -> int:
        return self._credits.share(session, self._sessions.values(), time.monotonic())

    def share_credits(self) -> None:
        for session in self._sessions.values():
            share = self.share(session)
            if session.is_ready and share != session.credits:
                session.credits = share
                self._outbox.send(session, protocol.Credits(session=session.name, credits=share))

    def ask(self, identity: bytes, session: AgentSession, message: protocol.Make) -> None:
        stream = message.stream
        generation = 0 if stream is None else stream.generation
        earlier = session.requests.get((message.epoch_id, message.batch_number))
        if earlier is not None and earlier.generation == generation:
            return  # A repeated request: one answer is enough.
        refusal = self._refusal(session, message, earlier)
        if refusal:
            self._outbox.refuse(identity, message, refusal)
            return
        if earlier is not None:
            earlier.is_cancelled = True
        now = time.monotonic()
        was_active = session.is_active(now)
        session.asked_at = now
        request = session.requests[message.epoch_id, message.batch_number] = BatchRequest(
            session, session.spec, session.seeding, message
        )
        if stream is None:
            hosted = self._specs.find(session.spec)
            if hosted is not None and hosted.state == "ready":
                base_seed = next(iter(message.seed_words), 0)
                self._specs.begin(hosted, seeding=session.seeding, base_seed=base_seed)
            self._queue.push(request)
        else:
            job = WorkerJob((request,), message)
            self._specs.assign(session.spec, ("session", session.name), job)
        if not was_active:
            self.share_credits()

    def lend(self, session: AgentSession, message: protocol.Make) -> None:
        """Has idle workers make samples that another host collates, if there is memory for them.

        An epoch's last ones only if nothing else waits to be made here, for another rank.
        """
        if message.epoch_id < session.before_epoch_id or not self._has_memory():
            return
        if message.is_among_last and self.num_queued:
            return
        session.asked_at = time.monotonic()
        request = BatchRequest(session, session.spec, session.seeding, message)
        key: PoolKey = ("seeding", request.seeding)
        self._specs.lend(request.spec, key, WorkerJob((request,), message))

    def share_out(self, session: AgentSession, shares: protocol.Share) -> None:
        """Leaves samples to other hosts of a batch that waits here, or is being made."""
        request = session.requests.get((shares.epoch_id, shares.batch_number))
        if request is None or request.make.elsewhere:
            return
        # For a worker that takes it later.
        request.make = msgspec.structs.replace(
            request.make, part_samples=shares.part_samples, elsewhere=shares.elsewhere
        )
        self._specs.share_out(lambda job: job.key == (request,), shares)

    def take_part(self, session: AgentSession, part: protocol.BatchPart) -> None:
        """Adds samples that another host made to their batch, if there is memory for them."""
        request = session.requests.get((part.epoch_id, part.batch_number))
        most = self._max_bytes * self._guard.share
        waiting = self._waiting_bytes(self.num_begun) + len(part.payload)
        if request is not None and waiting <= most:
            self._specs.add_part(lambda job: job.key == (request,), part)

    def tell_makers(
        self, identity: bytes, session: AgentSession, message: protocol.Inquire
    ) -> None:
        """Answers who makes a batch; the stacks of its worker go to this host's log, once."""
        request = session.requests.get((message.epoch_id, message.batch_number))
        makers: list[Maker] = []
        if request is not None:
            makers = self._specs.makers(request.spec, lambda job: job.key == (request,))
        stacks = makers[0].stacks if makers else self._specs.starting_stacks(session.spec)
        making = protocol.Makers(
            session=session.name,
            epoch_id=message.epoch_id,
            batch_number=message.batch_number,
            seconds=makers[0].seconds if makers else None,
            workers=tuple(maker.number for maker in makers),
            stacks=stacks,
            sample=makers[0].sample if makers else None,
        )
        self._outbox.answer(identity, making)
        worker = makers[0].number if makers else None
        if request is not None and worker is not None:
            if worker in request.shown_workers:
                return
            request.shown_workers.add(worker)
        elif session.num_starts_shown == _MAX_STARTS_SHOWN:
            return
        else:
            session.num_starts_shown += bool(stacks)
        if stacks:
            self._log.event(EventName.STACKS_WRITTEN, worker=worker, batch=message.batch_number)
            self._log.write(f"{stacks}\n")

    def _refusal(
        self, session: AgentSession, message: protocol.Make, known: BatchRequest | None
    ) -> str:
        limit = MAX_REQUESTS_PER_CREDIT * max(session.credits, MAX_CREDITS_PER_WORKER)
        stream = message.stream
        if stream is not None:
            held = self._specs.find(session.spec)
            if held is None or held.state != "ready":
                return "the dataset failed on this host"
            if known is not None and known.generation > stream.generation:
                return "its shard was started again"
            # Instead of credits: the trainer requests each shard's prefetch factor.
            limit = max(limit, MAX_OPEN * stream.num_shards)
        if message.epoch_id < session.before_epoch_id:
            return "its epoch is over"
        return "far more requests than credits" if len(session.requests) >= limit else ""

    def cancel_queued(self, reason: str, *, spec: str | None = None) -> None:
        for request in [r for r in self._queue if spec is None or r.spec == spec]:
            request.is_cancelled = True
            request.session.requests.pop((request.epoch_id, request.batch_number), None)
            self._outbox.decline(request, reason)

    def _give(self) -> None:
        """Assigns the first requests to workers, within memory; a busy one gets one job ahead.

        No request overtakes another: if the first one has to wait, so do all.
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
            self._specs.assign(request.spec, key, WorkerJob((request,), request.make))

    def _has_memory(self) -> bool:
        # One batch is always allowed, of any size: else no memory would ever be returned.
        most = self._max_bytes * self._guard.share
        is_first = not (self.num_begun or self._outbox.sent_bytes)
        return self._waiting_bytes(self.num_begun + 1) <= most or is_first

    def _waiting_bytes(self, num_begun: int) -> int:
        """Returns what waits to be taken, and what so many batches under way will add to it."""
        batch_bytes = self._outbox.batch_bytes or memory.UNKNOWN_BATCH_BYTES
        return self._outbox.sent_bytes + num_begun * batch_bytes + self._specs.part_bytes

    def _deliver(self, result: Result, *, is_dry: bool) -> None:
        (request,) = result.job.whole.key
        assert isinstance(request, BatchRequest)
        if request.make.only is not None:
            if result.part is not None:
                self._outbox.part(request, result, result.part)
            return
        if not request.generation:
            # Credits do not apply to shards, whose worker makes one batch after the other.
            self._credits.count(is_dry=is_dry)
            if result.tree is not None and self._credits.add_cost(
                result.wall_seconds, worker=result.worker
            ):
                self.share_credits()
        session = request.session
        # A later start of the shard may have another request with that number.
        if session.requests.get((request.epoch_id, request.batch_number)) is request:
            del session.requests[request.epoch_id, request.batch_number]
        if request.is_cancelled:
            result.release()
            return
        if result.is_lost:
            self._log.event(
                EventName.BATCH_LOST, number=request.batch_number, reason=result.summary
            )
        self._outbox.result(request, result)


def _is_counted(job: WorkerJob) -> bool:
    """Whether it counts as a batch under way: no shard's, and none of another host's samples."""
    return job.order.stream is None and job.order.only is None
