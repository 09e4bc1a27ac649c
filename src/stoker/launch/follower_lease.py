"""Whether a run on Kubernetes is still followed, checked by the dnn leader.

The follower writes the time into a ConfigMap once a minute; the kubelet mounts it into the pod as
files. Only changes count, as clocks of hosts may differ. Without files the run has no follower: it
was applied by hand.

While the API server is away no follower can renew it, and no kubelet can bring a renewal: it ends
only after minutes in which the server has answered the leader, which asks without rights.
"""

import http.client
import queue
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

from stoker.environment import LEASE_MINUTES_FILE, LEASE_RENEWED_FILE, api_server
from stoker.repeat import Clock

# It changes once a minute at most, and ends a run after minutes.
POLL_SECONDS = 5.0
# Without a renewal the API server must have answered for so long, at each question.
SEEN_SECONDS = 600.0
ASK_SECONDS = 30.0
ASKING = "asks for the API server"
_ANSWER_SECONDS = 10.0


def server_answers() -> bool:
    """Whether the cluster's API server answers, with whatever status; blocks for seconds.

    True outside of a pod, where there is none to ask.
    """
    address = api_server()
    if address is None:
        return True
    # Nothing is sent or read that its certificate would have to protect.
    unverified = ssl._create_unverified_context()
    connection = http.client.HTTPSConnection(*address, timeout=_ANSWER_SECONDS, context=unverified)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status < http.client.INTERNAL_SERVER_ERROR
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


class FollowerLease:
    """The lease, read from the ConfigMap's folder, and why the run is abandoned (`failure`)."""

    def __init__(
        self,
        folder: Path | None,
        *,
        clock: Clock = time.monotonic,
        ask: Callable[[], bool] = server_answers,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._ask = ask
        self._ask_at = float("-inf")
        self._answers: queue.SimpleQueue[bool] = queue.SimpleQueue()
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
            self._renewed = None
            return False
        # 0 minutes: the user wants no limit.
        if renewed != self._renewed or minutes <= 0:
            self._renewed = renewed
            self._since = now
            return False
        # Its last part, in which the server must answer.
        seen = min(SEEN_SECONDS, 30 * minutes)
        last_part = minutes * 60 - seen
        if now >= self._since + last_part and self._is_away(now):
            # Its last part begins again with the server's return.
            self._since = now - last_part
        elif now >= self._since + minutes * 60:
            self.failure = (
                f"abandoned: this run was not followed for {minutes:g} minutes "
                "(kubernetes.follower_lease_minutes)"
            )
            return True
        return False

    def _is_away(self, now: float) -> bool:
        """Whether a question since the last look had no answer; asks the next one."""
        if now >= self._ask_at:
            self._ask_at = now + ASK_SECONDS
            # A thread, as a silent server must not block the leader.
            threading.Thread(
                target=lambda: self._answers.put(self._ask()), name=ASKING, daemon=True
            ).start()
        answers = []
        while not self._answers.empty():
            answers.append(self._answers.get())
        # One without an answer is enough: then no follower could renew.
        return not all(answers)
