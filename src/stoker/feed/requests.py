"""What the agent knows of its sessions and their requests: order and credits, without any I/O."""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

# Beyond 4 batches a worker, more credits only fill memory (measured: 2 are enough
# but for costs that vary wildly).
MAX_CREDITS_PER_WORKER = 4
# A session that asked for nothing for this long leaves its credits to the others.
ACTIVE_SECONDS = 5.0
# A trainer may ask for more than its credits while a change is on its way, but not for ever.
MAX_REQUESTS_PER_CREDIT = 8


@dataclass(eq=False)
class Session:
    """One loader of one trainer process.

    Attributes:
        identity: Routing id of its connection.
        spec: Digest of the spec it uses now.
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
    plain_identity: bytes
    is_ready: bool = False
    credits: int = 0
    before_epoch: int = 0
    requests: dict[tuple[int, int], "Request"] = field(default_factory=dict)
    asked_at: float = -math.inf
    unreachable_since: float | None = None

    def is_active(self, now: float) -> bool:
        """Whether it uses its credits."""
        return bool(self.requests) or now - self.asked_at < ACTIVE_SECONDS

    @property
    def max_requests(self) -> int:
        """More than these at a time are refused."""
        return MAX_REQUESTS_PER_CREDIT * max(self.credits, MAX_CREDITS_PER_WORKER)


@dataclass(eq=False, slots=True)
class Request:
    """A batch that a session asked for.

    Attributes:
        is_dropped: Nobody wants it any more.
    """

    session: Session
    spec: str
    seeding: str
    epoch: int
    number: int
    index: bytes
    seed: tuple[int, ...]
    is_dropped: bool = False


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

    def pop(self, *, specs: Iterable[tuple[str, str]]) -> Request | None:
        """The first one whose (spec, seeding) is in `specs`, or None; dropped ones vanish."""
        wanted = set(specs)
        kept: list[tuple[int, int, Request]] = []
        found: Request | None = None
        while self._heap and found is None:
            entry = heapq.heappop(self._heap)
            if entry[2].is_dropped:
                continue
            if (entry[2].spec, entry[2].seeding) in wanted:
                found = entry[2]
            else:
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return found


class Credits:
    """How many batches each session may ask for: the workers' credits, shared by the active ones.

    Attributes:
        per_worker: Grows to 4 where workers ran dry.
    """

    def __init__(self, *, workers: int, per_worker: int) -> None:
        self._workers = workers
        self.per_worker = per_worker
        self._jobs = 0
        self._dry = 0

    def share(self, session: Session, sessions: Iterable[Session], now: float) -> int:
        """The credits of `session`, at least 1."""
        others = sum(s is not session and s.is_active(now) for s in sessions)
        return max(1, math.ceil(self._workers * self.per_worker / (others + 1)))

    def count(self, *, is_dry: bool) -> None:
        """A job ended, and there was (not) another one waiting."""
        self._jobs += 1
        self._dry += is_dry

    def adapt(self) -> bool:
        """Once a second: True if `per_worker` has grown."""
        # One in five: a worker that waits now and then costs nothing.
        ran_dry = self._jobs >= 5 and self._dry * 5 > self._jobs
        self._jobs = self._dry = 0
        if ran_dry and self.per_worker < MAX_CREDITS_PER_WORKER:
            self.per_worker += 1
            return True
        return False
