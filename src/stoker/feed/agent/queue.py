"""The queue holds what the agent knows of sessions and requests: order and credits, no I/O."""

import heapq
import itertools
import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from stoker.feed.wire.protocol import Make

# 2 a worker are enough where batches cost the same; with costs that vary exponentially 5 bring
# what they can (tests/unit/test_scheduler_prefetch.py), and more only fill memory.
MAX_CREDITS_PER_WORKER = 8
# More credits for each unit of variation: standard deviation over mean of what batches cost.
CREDITS_PER_VARIATION = 3
# Workers that run dry want one more batch to be on its way; four cover any round trip.
_MAX_CREDITS_FOR_DRY_WORKERS = 4
# What varies is judged by so many batches, at least and at most.
_MIN_COSTS, _MAX_COSTS = 8, 64
# Credits are taken back when they were too many for so many seconds.
_SECONDS_BEFORE_FEWER = 5
# A session that asked for nothing for this long leaves its credits to the others.
ACTIVE_SECONDS = 5.0
# A trainer may ask for more than its credits while a change is on its way, but not for ever.
MAX_REQUESTS_PER_CREDIT = 8


@dataclass(eq=False)
class AgentSession:
    """One loader of one trainer process.

    Attributes:
        identity: Routing id of its connection.
        spec: Digest of the spec it uses now.
        base_seed: Of workers that start before they have a job; None: they start with one.
        is_ready: It was told Ready for that spec.
        credits: What it was told last.
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
        """Tells whether it uses its credits."""
        return bool(self.requests) or now - self.asked_at < ACTIVE_SECONDS

    @property
    def max_requests(self) -> int:
        """Is the limit of requests at a time: more than these are refused."""
        return MAX_REQUESTS_PER_CREDIT * max(self.credits, MAX_CREDITS_PER_WORKER)


@dataclass(eq=False, slots=True)
class Request:
    """A batch that a session asked for.

    Attributes:
        spec: Digest of the spec that the session used when it asked; as `seeding`.
        make: What it asked for.
        is_dropped: Nobody wants it any more.
        generation: Of its shard's process; 0: it is of no shard.
    """

    session: AgentSession
    spec: str
    seeding: str
    make: Make
    is_dropped: bool = False
    epoch_id: int = field(init=False)
    number: int = field(init=False)
    generation: int = field(init=False)

    def __post_init__(self) -> None:
        self.epoch_id, self.number = self.make.epoch_id, self.make.number
        self.generation = 0 if self.make.stream is None else self.make.stream.generation


class Queue:
    """Requests that wait, of all sessions, in order of batch number."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum(not request.is_dropped for _, _, request in self._heap)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, _, request in self._heap if not request.is_dropped)

    def push(self, request: Request) -> None:
        """Adds a request."""
        heapq.heappush(self._heap, (request.number, next(self._arrivals), request))

    def pop(self, *, specs: Collection[str]) -> Request | None:
        """Returns the first whose spec is in `specs`, or None; skips dropped ones."""
        kept: list[tuple[int, int, Request]] = []
        found: Request | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            if entry[2].is_dropped:
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
        """Notes how long a batch took; the first of each worker, which opens files, tells nothing.

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
