"""Choice of the worker that makes a batch: by orders in flight, pace, and lateness.

Numbers are handed out oldest first, each worker has at most two orders, and all numbers lie within
a window that starts at the next number to be delivered:

    window = ceil(reach of the slowest worker / interval of consumption) + all orders + 2,
             up to what `max_bytes` allows, at least 1
    reach  = p95 of its latency + twice what the long ones take more than the median

so that a slow worker delays nothing (measured: with a window of 3 batches a worker, one worker that
is three times slower costs 22% and more; with this one about 1%). A batch at the head of the line
that is later than max(2 s, 4 x p95) is asked of a second worker; the first answer counts.
"""

import math
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Generic, TypeVar

from stoker.feed.engine.messages import OwnState, ShardBegin
from stoker.feed.memory import UNKNOWN_BATCH_BYTES

# One that is made, and one that lies ready: more are slower where workers differ in pace. A batch
# that is on its way here counts no more: else a worker whose next one is quick waits meanwhile.
ORDERS_PER_WORKER = 2
# Latencies that are remembered: enough for a p95, few enough to follow a change.
_MEMORY = 32
# Factor on what long batches take more than the median. Where costs vary exponentially and workers
# are just fast enough, the trainer waits 3.5% of the time, and 5.4% without it.
_SPREADS = 2.0
_LATE_SECONDS = 2.0
# Of workers over one batch, on all hosts.
MAX_DEATHS = 3
# The first batch of all includes opening files and warm-up.
_FIRST_LATE_SECONDS = 10.0
_LATE_FACTOR = 4.0
# A hung worker must not let the window grow without end.
_MAX_WINDOW_PER_ORDER = 32


@dataclass(eq=False, kw_only=True)
class WorkerPace:
    """What a scheduler knows of a worker: its orders in flight, and how long it takes.

    Attributes:
        asked: When each number in flight was ordered, in this order; monotonic seconds.
        p95_seconds: Of its latency; 0: it has made nothing yet.
        reach_seconds: How long before its turn a batch is ordered.
        service_seconds: From one batch to the next, smoothed; 0: not known.
        begun_at: When it began what it makes now, as far as is known here.
        is_coming: Its oldest batch is made, and on its way here.
    """

    asked: dict[int, float] = field(default_factory=dict)
    p95_seconds: float = 0.0
    reach_seconds: float = 0.0
    service_seconds: float = 0.0
    begun_at: float = 0.0
    is_coming: bool = False
    _latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_MEMORY))

    @property
    def has_room(self) -> bool:
        return len(self.asked) - self.is_coming < ORDERS_PER_WORKER

    def preference(self) -> tuple[float, int]:
        """Returns when it would make one more batch; 0 as long as no pace is known."""
        return ((len(self.asked) + 1) * self.service_seconds, len(self.asked))

    def order(self, number: int, now: float) -> None:
        if not self.asked:
            self.begun_at = now
        self.asked[number] = now

    def answered(self, number: int, now: float) -> None:
        """Records how long the worker took for a batch."""
        asked_at = self.asked.pop(number)
        self.is_coming = False
        service = max(now - max(self.begun_at, asked_at), 0.0)
        self.begun_at = now
        self._latencies.append(max(now - asked_at, 0.0))
        ordered = sorted(self._latencies)
        # The value itself, not interpolated between two.
        p95 = self.p95_seconds = ordered[math.ceil(0.95 * len(ordered)) - 1]
        # Without the longest: one batch that waited for a cold cache is an exception.
        long = ordered[max(len(ordered) - 2, 0)]
        self.reach_seconds = p95 + _SPREADS * max(0.0, long - ordered[len(ordered) // 2])
        mean = self.service_seconds
        self.service_seconds = service if mean == 0.0 else 0.8 * mean + 0.2 * service


WorkerT = TypeVar("WorkerT", bound=WorkerPace)


class BatchScheduler(Generic[WorkerT]):
    """Scheduler of one session: its workers, and the numbers of the current epoch.

    Not thread-safe. Times are monotonic seconds, passed in.

    Attributes:
        head: The number that is delivered next.
        num_taken: Batches of this epoch that were delivered.
        supplied: Numbers whose indices the sampler gave in this epoch.
        is_complete: The sampler has no more.
        max_bytes: Of batches that may wait, made or under way; one batch always may.
        arrivals: Bytes and content of the batches that wait, by number.
    """

    def __init__(self, *, max_bytes: int, unknown_bytes: int = UNKNOWN_BATCH_BYTES) -> None:
        """Begins without workers; a batch is taken for `unknown_bytes` until one has come."""
        self.max_bytes = max_bytes
        # Ordered as a list is.
        self.workers: dict[WorkerT, None] = {}
        # Mean seconds between takes, less the longest (a checkpoint, a validation). The pace of the
        # epoch before counts until enough is taken.
        self._interval: float | None = None
        self._sizes: deque[int] = deque(maxlen=_MEMORY)
        self._batch_bytes = unknown_bytes
        self.begin()

    def begin(self) -> None:
        """Begins an epoch; what is in flight is forgotten."""
        for worker in self.workers:
            worker.asked.clear()
            worker.is_coming = False
        self.head = self.num_taken = self.supplied = 0
        self.is_complete = False
        self.arrivals: dict[int, tuple[int, object]] = {}
        self._takes: deque[float] = deque(maxlen=_MEMORY + 1)
        self._deaths: Counter[int] = Counter()
        self._next_new = 0
        self._again: set[int] = set()
        self._held_bytes = 0
        self._makers: dict[int, set[WorkerT]] = {}

    @property
    def is_over(self) -> bool:
        return self.is_complete and self.head >= self.supplied

    # ---- workers

    def join(self, worker: WorkerT) -> None:
        self.workers[worker] = None

    def lose(self, worker: WorkerT) -> None:
        """Removes a worker; what only it had is handed out again."""
        self.workers.pop(worker, None)
        for number in worker.asked:
            # Unless it came from another worker.
            makers = self._makers.get(number, set())
            makers.discard(worker)
            if not makers and self._makers.pop(number, None) is not None:
                self._again.add(number)
        worker.asked.clear()

    def makers(self, number: int) -> dict[WorkerT, float]:
        """Returns who has a batch, and since when it makes it, as far as is known here."""
        makers = self._makers.get(number, ())
        return {worker: max(worker.begun_at, worker.asked[number]) for worker in makers}

    def note_death(self, number: int) -> bool:
        """Counts a worker that died over a number; returns whether it is not to be tried again."""
        if not self._is_open(number):
            return False
        self._deaths[number] += 1
        return self._deaths[number] >= MAX_DEATHS

    # ---- batches

    def assign(self, now: float) -> list[tuple[WorkerT, int]]:
        """Returns the batches to order now, and of whom; they count as ordered."""
        orders: list[tuple[WorkerT, int]] = []
        free = [worker for worker in self.workers if worker.has_room]
        if not free:
            return orders
        limit = min(self.head + self.window(now), self.supplied)
        for number in chain(sorted(self._again), range(self._next_new, limit)):
            # It may have come from its first worker meanwhile.
            if not self._is_open(number):
                self._again.discard(number)
                continue
            able = [worker for worker in free if number not in worker.asked]
            if not able:
                continue
            worker = min(able, key=WorkerPace.preference)
            worker.order(number, now)
            self._makers.setdefault(number, set()).add(worker)
            self._again.discard(number)
            self._next_new = max(self._next_new, number + 1)
            orders.append((worker, number))
            if not worker.has_room:
                free.remove(worker)
                if not free:
                    break
        return orders

    def begin_of(self, number: int) -> ShardBegin | None:
        """Returns how a worker begins; None: it needs to know nothing."""
        return None

    def comes(self, worker: WorkerT, number: int) -> None:
        """Notes that a batch is made, and has begun to arrive: its worker may have one more."""
        worker.is_coming = number in worker.asked

    def arrived(
        self,
        worker: WorkerT,
        number: int,
        *,
        nbytes: int,
        now: float,
        content: object = None,
        own: OwnState | None = None,
    ) -> bool:
        """Records a batch, or its error (`nbytes` is 0); returns False if it is to be dropped.

        Args:
            own: A state that an iterable dataset gave of itself with it.
        """
        if number in worker.asked:
            worker.answered(number, now)
        # A second worker's order stays open until its answer has come, too.
        self._makers.pop(number, None)
        # Taken or here already, from another worker; or never ordered.
        if not self._is_open(number) or number >= self._next_new:
            return False
        self.arrivals[number] = (nbytes, content)
        self._held_bytes += nbytes
        if nbytes:
            self._sizes.append(nbytes)
            self._batch_bytes = max(self._sizes)
        return True

    def fail(self, number: int, content: object) -> int:
        """Records an error in the place of a batch; returns its number."""
        self._makers.pop(number, None)
        self.arrivals[number] = (0, content)
        return number

    def take(self, now: float) -> object:
        """Returns the batch at the head, which is the trainer's now."""
        nbytes, content = self.arrivals.pop(self.head)
        self._held_bytes -= nbytes
        self._deaths.pop(self.head, None)
        self.head += 1
        self.num_taken += 1
        takes = self._takes
        takes.append(now)
        if len(takes) >= 4:
            rest = takes[-1] - takes[0] - max(later - at for at, later in pairwise(takes))
            # n takes have n - 1 gaps, and n - 2 without the longest.
            self._interval = max(rest, 0.0) / (len(takes) - 2)
        return content

    # ---- the window, and lateness

    def window(self, now: float) -> int:
        """Returns how many numbers from the head on may be in flight or wait."""
        all_orders = ORDERS_PER_WORKER * len(self.workers)
        window = all_orders + 2
        interval = self._interval
        if interval is not None:
            slowest = max((self._reach(worker, now) for worker in self.workers), default=0.0)
            # An interval may be 0, where all is taken at once.
            reach = math.ceil(slowest / max(interval, 1e-9))
            window += min(reach, _MAX_WINDOW_PER_ORDER * all_orders)
        # Those under way will come: they are counted as if they were here.
        committed_bytes = self._held_bytes + len(self._makers) * self._batch_bytes
        free_bytes = max(self.max_bytes - committed_bytes, 0)
        if free_bytes < window * self._batch_bytes:
            # What is begun stays so, however much memory it takes.
            begun = self._next_new - self.head
            window = min(window, begun + free_bytes // self._batch_bytes)
        return max(window, 1)

    def repeat_late(self, now: float) -> int | None:
        """Has the next `assign` hand out the head once more if it is late; returns its number."""
        makers = self._makers.get(self.head, set())
        # Nobody has it, nobody else could make it, or it will be handed out once more.
        if not makers or self.head in self._again or len(makers) == len(self.workers):
            return None
        if now < max(self._due(worker, self.head) for worker in makers):
            return None
        self._again.add(self.head)
        return self.head

    def _due(self, pace: WorkerPace, number: int) -> float:
        slowest = max(each.p95_seconds for each in self.workers)
        p95 = pace.p95_seconds or slowest or _FIRST_LATE_SECONDS / _LATE_FACTOR
        return pace.asked[number] + max(_LATE_SECONDS, _LATE_FACTOR * p95)

    def _reach(self, pace: WorkerPace, now: float) -> float:
        """Returns the seconds that a worker usually takes, or is taking now if that is more."""
        for number, asked_at in pace.asked.items():
            # What others were asked for as well delays nothing.
            if len(self._makers.get(number, ())) == 1:
                return max(pace.reach_seconds, now - asked_at)
        return pace.reach_seconds

    # ---- numbers

    def _is_open(self, number: int) -> bool:
        return number >= self.head and number not in self.arrivals
