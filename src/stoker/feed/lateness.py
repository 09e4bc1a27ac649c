"""When a job of a data worker is late, judged by how long the last ones took."""

import math
from collections import deque

# A job that takes longer than max(this, 4 x p95), and all that waits behind it, is given to another
# worker too, whoever is first counts: a stopped or hung worker is not judged. Each time again after
# four times as long, for a batch that is slow everywhere must not keep all workers.
OVERDUE_SECONDS = 2.0
# Before any batch: files are opened, caches are cold.
FIRST_OVERDUE_SECONDS = 10.0
_OVERDUE_FACTOR = 4.0
_AGAIN_FACTOR = 4.0
_MEMORY = 32


class Lateness:
    """What the jobs of one pool took."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_MEMORY)

    def took(self, seconds: float) -> None:
        """A job ended."""
        self._seconds.append(seconds)

    def due_seconds(self, *, patience: int) -> float:
        """Seconds from which on a job is late that was given out so often for being late."""
        return self._due_seconds() * _AGAIN_FACTOR**patience

    def _due_seconds(self) -> float:
        if not self._seconds:
            return FIRST_OVERDUE_SECONDS
        ordered = sorted(self._seconds)
        p95 = ordered[math.ceil(0.95 * len(ordered)) - 1]
        return max(OVERDUE_SECONDS, _OVERDUE_FACTOR * p95)
