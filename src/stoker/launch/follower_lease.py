"""Whether a run on Kubernetes is still followed, checked by the dnn leader.

The follower writes the time into a ConfigMap once a minute; the kubelet mounts it into the pod as
files. Only changes count, as clocks of hosts may differ. Without files the run has no follower: it
was applied by hand.
"""

import time
from collections.abc import Callable
from pathlib import Path

from stoker.settings import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE

# It changes once a minute at most, and ends a run after minutes.
POLL_SECONDS = 5.0


class FollowerLease:
    """The lease, read from the ConfigMap's folder, and why the run is abandoned (`failure`)."""

    def __init__(self, folder: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._look_at = clock()
        self._renewed: str | None = None
        self._since = clock()
        self.failure = ""

    def tick(self) -> bool:
        """Checks every POLL_SECONDS; returns True once, when the run is found abandoned."""
        now = self._clock()
        if self._folder is None or self.failure or now < self._look_at:
            return False
        self._look_at = now + POLL_SECONDS
        try:
            renewed = (self._folder / LEASE_RENEWED_FILE).read_text(encoding="utf-8")
            minutes = float((self._folder / LEASE_MINUTES_FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Not there yet, or deleted.
            self._renewed = None
            return False
        if renewed != self._renewed or minutes <= 0:
            self._renewed, self._since = renewed, now
        elif now >= self._since + minutes * 60:
            self.failure = (
                f"abandoned: this run was not followed for {minutes:g} minutes "
                "(kubernetes.follower_lease_minutes)"
            )
            return True
        return False
