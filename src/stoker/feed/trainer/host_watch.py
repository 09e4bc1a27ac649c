"""Which data hosts of the run are there, and how long a loader waits for those that are not."""

from collections.abc import Iterator, Mapping

from stoker.environment import ProcessSettings
from stoker.errors import FeedLostError
from stoker.feed import why_unfed
from stoker.feed.trainer.links import AgentLink
from stoker.feed.trainer.session import FeedSession, SharedState
from stoker.feed.wire import protocol
from stoker.logs import EventName

# Beyond the lease: the coordinator's message and the reconnect take a moment.
LOST_GRACE_SECONDS = 3.0
# Instead of the lease, where the coordinator says that every data host has left or is lost.
ALL_GONE_SECONDS = 10.0


class HostWatch:
    """What the coordinator says of the run's data hosts, and what a loader does without them.

    Callers hold the lock, but for `take_roster`.

    Attributes:
        num_expected: Data hosts of the run; None: the coordinator has not sent it yet.
        lost: Hosts that are silent beyond their lease.
    """

    def __init__(
        self, shared: SharedState, settings: ProcessSettings, links: Mapping[str, AgentLink]
    ) -> None:
        self._shared = shared
        self._settings = settings
        self._feed = settings.feed
        self._links = links
        self.num_expected: int | None = None
        self.lost: set[str] = set()
        self._roster = protocol.Roster(agents=(), expected=0)
        # Of hosts that have left as well: the error says when each was heard last.
        self._heard_at: dict[str, float] = {}

    def take_roster(self, roster: protocol.Roster, now: float) -> None:
        self._roster = roster
        self.num_expected = roster.expected
        self.lost = {member.host for member in roster.lost}
        for member in (*roster.agents, *roster.lost):
            self._heard_at[member.host] = now - member.silent_seconds

    def check(self, session: FeedSession, now: float) -> None:
        """Fails a session that has had no peer for too long, or that no host can serve."""
        # Somebody can be asked: the time without a peer begins again.
        if any(state.credits for state in session.schedule.peers.values()):
            if session.is_waiting:
                waited = round(now - session.alone_since, 1)
                self._shared.log.event(EventName.TRAINING_CONTINUES, waited_seconds=waited)
            session.alone_since = now
            session.is_waiting = False
            return
        error = self._failure_of_all(session)
        if error is not None:
            session.mark_failed(error)
            return
        alone = now - session.alone_since
        patience = self._patience_seconds()
        may_come = self._may_come(session)
        limit = self._feed.start_deadline_seconds if may_come else patience
        if alone > limit:
            session.mark_failed(self._lost_error(session, now))
        elif alone > patience and not session.is_waiting:
            # Logged once, not at each tick.
            session.is_waiting = True
            self._shared.log.event(
                EventName.TRAINING_WAITING,
                epoch=session.epoch,
                batch=session.schedule.head,
                expected=self.num_expected,
            )

    @property
    def _are_gone(self) -> bool:
        """Whether the coordinator has said that no host is there, or is still to come."""
        is_known = self.num_expected is not None
        return is_known and not (self._roster.agents or self._roster.awaited)

    def _patience_seconds(self) -> float:
        """Returns how long a host that was there may be gone before its return is in doubt."""
        patience = self._feed.lease_seconds + LOST_GRACE_SECONDS
        return min(patience, ALL_GONE_SECONDS) if self._are_gone else patience

    def _may_come(self, session: FeedSession) -> bool:
        """Whether a peer of the session may still start, which takes longer than a reconnect."""
        if self._settings.comes_back:
            return True
        if session.local is not None and session.local.is_alive:
            return True
        opening = any(link.is_up and session.name in link.opened for link in self._links.values())
        is_starting = opening or not session.had_peers
        # A preempted host may have to wait for a new node, as at the start.
        return is_starting and (bool(self.lost) or not self._are_gone)

    def log_alone(self) -> None:
        """Logs what happens now that no data host is connected, if a loader is busy."""
        busy = [session for session in self._shared.sessions.values() if session.is_busy]
        if not busy:
            return
        if all(session.local is not None for session in busy):
            text = "local workers make all batches"
        elif self._settings.comes_back:
            text = "the training waits until one is back"
        else:
            longest = self._feed.lease_seconds + LOST_GRACE_SECONDS
            text = (
                "no local workers either: the training ends with exit code 5 within "
                f"{longest:.0f} s unless one is back"
            )
        self._shared.log.event(EventName.NO_DATA_HOST_LEFT, text=text)

    def _failure_of_all(self, session: FeedSession) -> BaseException | None:
        """Returns the first host's error, where no host of the run can make its batches."""
        # A lost host may come back, and may be able to make them.
        if self.num_expected is None or (self.lost and self._settings.comes_back):
            return None
        failures = [
            link.failed[session.name].error
            for link in self._links.values()
            if link.is_up and link.has_failed(session.name)
        ]
        is_all = len(failures) + len(self.lost) >= self.num_expected
        return failures[0] if failures and is_all else None

    def _lost_error(self, session: FeedSession, now: float) -> FeedLostError:
        expected = str(self.num_expected)
        seen = ", ".join(self._fates(session, now))
        if self.num_expected is None:
            expected = "?"
            seen = f"the coordinator at {self._settings.coordinator} did not answer"
        local = ""
        if session.local is not None:
            local = f"; local workers: {session.local.last_death or 'they still start'}"
        alone = f"{now - session.alone_since:.0f} s"
        what = f"no data worker came within {alone}"
        if session.had_peers:
            what = f"lost all data workers {alone} ago"
        why = why_unfed.hosts_lost(
            f"{what}: {expected} data hosts expected, {seen or 'none seen'}{local}",
            where=f"rank {self._settings.rank}, host {self._settings.host}, "
            f"epoch {session.epoch}, batch {session.schedule.head}",
        )
        return why.error(FeedLostError)

    def _fates(self, session: FeedSession, now: float) -> Iterator[str]:
        """Yields each host with what is known of it, for the error."""
        goodbyes = self._roster.left
        for host, link in self._links.items():
            if link.is_up and session.name in link.failed:
                yield f"{host} ({link.failed[session.name].reason})"
            elif link.is_up:
                yield f"{host} (connected, not ready)"
            elif host not in self.lost and host not in goodbyes:
                yield f"{host} (no connection for {now - link.down_since:.1f} s)"
        # Those without a link, too: the roster has dropped them.
        for host, heard_at in self._heard_at.items():
            if host in self.lost:
                yield f"{host} (lost, last heard {now - heard_at:.1f} s ago)"
            elif host not in self._links and host not in goodbyes:
                yield f"{host} (left, last heard {now - heard_at:.1f} s ago)"
        for host, why in goodbyes.items():
            yield f"{host} (left: {why})"
        yield from self._fates_of_awaited()

    def _fates_of_awaited(self) -> Iterator[str]:
        awaited = self._roster.awaited
        refused = self._roster.refused
        for host in awaited:
            if host not in refused:
                yield f"{host} (never came)"
        for name, why in refused.items():
            place = name if name in awaited else f"a host at {name}"
            yield f"{place} (refused: {why})"
