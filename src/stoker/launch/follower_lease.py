"""The dnn leader of a job on Kubernetes looks whether anybody still follows the run.

Whoever follows it writes the time into a ConfigMap once a minute; the kubelet brings it into the
pod as files. They are compared with what they were, and nothing else: the clocks of two hosts may
differ. Files that were never seen mean nothing, for a job that was applied by hand has no follower.
"""

import time
from collections.abc import Callable
from pathlib import Path

from stoker.settings import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE

# It changes once a minute at most, and ends a run after minutes.
POLL_SECONDS = 5.0


class FollowerLease:
    """Reads the lease as its files tell it.

    Args:
        folder: Where the ConfigMap is mounted; None: the run has no lease.
        clock: Monotonic seconds.

    Attributes:
        failure: Why the run is abandoned, in words; empty while it is not.
    """

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._look_at = clock()
        self._renewed: str | None = None
        self._since = clock()
        self.failure = ""

    def tick(self) -> bool:
        """Looks, every POLL_SECONDS; returns True once, when the run turns out to be abandoned."""
        now = self._clock()
        if self._folder is None or self.failure or now < self._look_at:
            return False
        self._look_at = now + POLL_SECONDS
        try:
            renewed = (self._folder / LEASE_RENEWED_FILE).read_text(encoding="utf-8")
            minutes = float((self._folder / LEASE_MINUTES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Not there yet, taken away, or of another stoker.
            self._renewed = None
            return False
        if renewed != self._renewed or minutes <= 0:
            self._renewed, self._since = renewed, now
        elif now >= self._since + minutes * 60:
            self.failure = (
                f"abandoned: nobody has followed this run for {minutes:g} minutes "
                "(kubernetes.follower_lease_minutes)"
            )
            return True
        return False
