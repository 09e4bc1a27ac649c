"""When a launcher gives up its leader. Pure: the clock is handed in, nothing is dialled.

Three things can be behind a leader's silence. Its host is gone, or the network: the lease tells,
which is long. Its launcher has ended: nobody listens at its port, which tells within seconds, for
no launcher starts again in the same run. Or it stands still (a live migration, SIGSTOP): then the
trainers of the run go on, and a data host that serves one has a sign of life.
"""

# Where connections to a silent leader are refused for so long, its launcher has ended.
REFUSED_SECONDS = 5.0
# Where a connection was ended by the leader's side (its container is gone, and said so on the
# way), and nobody answers for so long.
ENDED_SECONDS = 12.0
# A connection that ends so soon after a message was ended by the other side: libzmq itself gives up
# a silent one after 15 s.
_ALIVE_SECONDS = 9.0
# A turn of the loop takes a fraction of a second: after a longer one this process had stood still,
# and what the leader sent meanwhile is still to be read.
STANDSTILL_SECONDS = 2.0


class Silence:
    """How long a leader has been silent, and what that means.

    Args:
        lease_seconds: A leader that is silent for longer is lost.
        now: Monotonic seconds.
    """

    def __init__(self, *, lease_seconds: float, now: float) -> None:
        self._lease_seconds = lease_seconds
        self._turned_at = now
        self._refused_since: float | None = None
        self._ended_at: float | None = None
        self.heard_at: float | None = None

    def hear(self, now: float) -> None:
        """Notes a message of the leader."""
        self.heard_at, self._refused_since, self._ended_at = now, None, None

    def dial(self, now: float, *, is_refused: bool | None) -> None:
        """Notes how the leader's port answers.

        Args:
            now: Monotonic seconds.
            is_refused: Whether connections are refused; None: nobody answers, which tells nothing.
        """
        if is_refused is None:
            return
        since = now if self._refused_since is None else self._refused_since
        self._refused_since = since if is_refused else None

    def end(self, now: float) -> None:
        """Notes that the connection ended; in the middle of silence that tells nothing."""
        if self.heard_at is not None and now - self.heard_at < _ALIVE_SECONDS:
            self._ended_at = now

    def turn(self, now: float) -> float:
        """Call it at each turn of the loop.

        Returns:
            For how many seconds this process stood still, which counts for nothing; else 0.
        """
        seconds, self._turned_at = now - self._turned_at, now
        if seconds <= STANDSTILL_SECONDS or self.heard_at is None:
            return 0.0
        self.heard_at += seconds
        if self._refused_since is not None:
            self._refused_since += seconds
        if self._ended_at is not None:
            self._ended_at += seconds
        return seconds

    def reason(self, now: float, *, trainers_heard_at: float) -> str:
        """Why the leader is lost, as the end of a sentence about it; empty: it is not.

        Args:
            now: Monotonic seconds.
            trainers_heard_at: Last sign of life of a trainer that this host serves.
        """
        if self.heard_at is None:
            return ""
        silent = now - max(self.heard_at, trainers_heard_at)
        if silent > self._lease_seconds:
            return f"was silent for more than {self._lease_seconds:g} s"
        refused = 0.0 if self._refused_since is None else now - self._refused_since
        if min(silent, refused) > REFUSED_SECONDS:
            return "has no launcher any more: it ended without a word"
        ended = 0.0 if self._ended_at is None else now - self._ended_at
        if min(silent, ended) > ENDED_SECONDS:
            return "has ended its connection, and nobody answers there any more"
        return ""
