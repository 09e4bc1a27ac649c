"""What is known of one peer that makes batches: its credits, what it was asked for, its pace."""

import bisect
import math
from collections import deque

# Latencies that are remembered: enough for a p95, few enough to follow a change.
_MEMORY = 32
# Latency of the usual long batch, and so often what it is longer than the median: where all cost
# the same that is nothing; where costs vary exponentially and the workers are just fast enough, the
# trainer waits 3.5 % of the time, and 5.4 % without (tests/unit/test_schedule.py).
_SPREADS = 2.0


class PeerState:
    """The books of one peer.

    Args:
        is_remote: Each time that it is asked costs a message over the network.

    Attributes:
        credits: Batches that it may be asked for at a time.
        is_leaving: It gets nothing new.
        asked: Number to when it was asked for, and to how many it then had.
        p95_seconds: From asking to arrival, of the last batches; None: there was none.
        reach_seconds: So long before its turn a batch is asked for.
        service_seconds: From one batch to the next, smoothed; 0: not known.
    """

    __slots__ = (
        "_latencies",
        "_ordered",
        "asked",
        "credits",
        "is_leaving",
        "is_remote",
        "p95_seconds",
        "reach_seconds",
        "service_seconds",
    )

    def __init__(self, *, is_remote: bool) -> None:
        self.is_remote = is_remote
        self.credits = 0
        self.is_leaving = False
        self.asked: dict[int, tuple[float, int]] = {}
        self.p95_seconds: float | None = None
        self.reach_seconds = 0.0
        self.service_seconds = 0.0
        self._latencies: deque[float] = deque()
        self._ordered: list[float] = []

    def has_room(self, *, in_pairs: bool = False) -> bool:
        """Whether it may be asked for a batch.

        Args:
            in_pairs: A remote peer is asked for one only where it can be asked for two: together
                they cost little more than one. It never runs out of work for it.
        """
        num_asked = len(self.asked)
        room = self.credits - num_asked
        if self.is_leaving or room <= 0:
            return False
        return room > 1 or not (in_pairs and self.is_remote and num_asked)

    def finish_seconds(self) -> float:
        """When one more batch would be ready, from now: its place in the queue times the pace."""
        return (len(self.asked) + 1) * self.service_seconds

    def load(self) -> float:
        """The part of its credits that is in use."""
        return len(self.asked) / self.credits

    def answered(self, asked_at: float, queued: int, now: float) -> None:
        """A batch came.

        Args:
            asked_at: Monotonic seconds, as `now`.
            queued: How many it had when it was asked, this one among them.
        """
        latency = max(now - asked_at, 0.0)
        latencies, ordered = self._latencies, self._ordered
        if len(latencies) == _MEMORY:
            del ordered[bisect.bisect_left(ordered, latencies.popleft())]
        latencies.append(latency)
        bisect.insort(ordered, latency)
        count = len(ordered)
        p95 = self.p95_seconds = ordered[math.ceil(0.95 * count) - 1]
        # Without the longest: one batch that had to wait for a cold cache is no habit.
        long = ordered[-2] if count > 1 else latency
        self.reach_seconds = p95 + _SPREADS * max(0.0, long - ordered[count // 2])
        service = latency / queued
        known = self.service_seconds
        self.service_seconds = service if known == 0.0 else 0.8 * known + 0.2 * service
