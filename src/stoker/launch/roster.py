"""The roster of hosts: one that is silent for `feed.lease_seconds` (60 s) is lost.

`HostLeases.expire` finds it; the coordinator, which calls that, informs the ranks, which drop a
data host (`_take_roster` in feed/trainer/client.py). A run that cannot continue without the host is
ended by the coordinator's `on_failure` (`trainer_host.py`). Pure: the clock is a parameter, nothing
is sent.

The topology names hosts, an incarnation a launcher's process on one. A restarted launcher has a new
incarnation; the old one is superseded and refused. A data host may come late, leave, and return. A
dnn follower may not: with it the training is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.feed.wire.protocol import (
    PROTOCOL_VERSION,
    Heartbeat,
    HostStage,
    Join,
    Leave,
    Member,
    Refused,
    Roster,
    Welcome,
)

# Three heartbeats fit into a lease, so that a lost one and a busy machine do not end it.
BEATS_PER_LEASE = 4
# Also with long leases, so that a process that died is noticed soon.
MAX_BEAT_SECONDS = 3.0
# If a heartbeat is half an interval late, the coordinator checks the connection.
LATE_BEATS = 1.5
# A launcher whose connection ended reconnects within a second: one that does not is dead.
CUT_OFF_SECONDS = 5.0

# Addresses of launchers with another token that are kept: a run has few hosts, a network many.
MAX_STRANGERS = 16
_UNKNOWN_ADDRESS = "an unknown address"
_OTHER_TOKEN = "its token differs"

HostChange = Literal["joined", "rejoined", "left", "lost", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of a host's state: of a data host's agent, or a dnn host's follower."""

    what: HostChange
    host: str
    kind: Literal["agent", "follower"]
    reason: str = ""
    exit_code: int | None = None
    is_signalled: bool = False

    @property
    def is_loss(self) -> bool:
        """Whether the host is gone, and not its command: it died, restarted, or was drained."""
        return self.what in ("lost", "rejoined") or self.is_signalled

    @property
    def fails_the_run(self) -> bool:
        if self.kind == "agent":
            return False
        is_gone = self.what in ("lost", "absent", "rejoined")
        return is_gone or (self.what == "left" and self.exit_code != 0)


@dataclass(slots=True)
class _HostState:
    kind: Literal["agent", "follower"]
    join: Join | None = None
    heard_at: float = 0.0
    cut_off_at: float | None = None
    is_live: bool = False
    has_left: bool = False
    goodbye: str = ""
    is_absent: bool = False
    # Why its launcher may not join, as long as none has.
    refusal: str = ""
    stage: HostStage = "begun"
    unfed_ranks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedHosts:
    """The hosts of a run, except the leader, and how long it waits for them.

    Attributes:
        agents: Data hosts.
        followers: Further dnn hosts.
    """

    run_id: str
    agents: Sequence[str]
    followers: Sequence[str]
    lease_seconds: float
    start_deadline_seconds: float


class HostLeases:
    """Leases of the run's hosts, except the leader."""

    def __init__(self, expected: ExpectedHosts, *, now: float) -> None:
        self._run_id = expected.run_id
        self._lease_seconds = expected.lease_seconds
        self._beat_seconds = heartbeat_seconds(expected.lease_seconds)
        self._start_by = now + expected.start_deadline_seconds
        self._start_deadline_seconds = expected.start_deadline_seconds
        self._hosts = {host: _HostState("agent") for host in expected.agents}
        self._hosts |= {host: _HostState("follower") for host in expected.followers}
        self._superseded: set[tuple[str, str]] = set()
        # Launchers that prove another token, by address: they cannot say who they are.
        self._strangers: list[str] = []
        self._told_refusals: dict[str, str] = {}

    @property
    def live(self) -> tuple[str, ...]:
        return tuple(host for host, state in self._hosts.items() if state.is_live)

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(host for host, state in self._hosts.items() if state.join is None)

    @property
    def unready(self) -> tuple[str, ...]:
        return tuple(
            host
            for host, state in self._hosts.items()
            if not state.is_live or state.stage == "begun"
        )

    def awaited_followers(self) -> tuple[str, ...]:
        """Returns dnn hosts that are live or may still come: neither done nor lost."""
        return tuple(
            host
            for host, state in self._hosts.items()
            if _trains(state) and (state.is_live or (state.join is None and not state.is_absent))
        )

    def live_followers(self) -> tuple[str, ...]:
        return tuple(h for h, state in self._hosts.items() if state.is_live and _trains(state))

    def join(self, message: Join, now: float) -> tuple[Welcome | Refused, Change | None]:
        reason = self._refusal(message)
        if reason:
            refused = self._hosts.get(message.host)
            if refused is not None:
                refused.refusal = reason
            return Refused(reason=reason), None
        state = self._hosts[message.host]
        change = self._change_of(state, message)
        if state.join and state.join.incarnation != message.incarnation:
            # The old launcher may hang and wake up: it must not take the place back.
            self._superseded.add((message.host, state.join.incarnation))
            # The new launcher has not started the engine's commands.
            state.stage = "begun"
        state.join = message
        state.heard_at = now
        # Also one that was lost before: its lease begins again.
        state.is_live = True
        state.has_left = False
        state.cut_off_at = None
        welcome = Welcome(beat_seconds=self._beat_seconds, lease_seconds=self._lease_seconds)
        return welcome, change

    def note_other_token(self, address: str) -> bool:
        """Keeps the address of a launcher that has another token; False: it is not news.

        Args:
            address: Empty: its connection had ended before anybody looked.
        """
        # A name in rosters, where an empty one is malformed: ranks would refuse all of them.
        address = address or _UNKNOWN_ADDRESS
        is_news = address not in self._strangers and len(self._strangers) < MAX_STRANGERS
        if is_news:
            self._strangers.append(address)
        return is_news

    def refusals(self) -> dict[str, str]:
        """Returns why hosts that are awaited may not join, by host, or else by address."""
        absent = {host: state for host, state in self._hosts.items() if state.join is None}
        refused = {host: state.refusal for host, state in absent.items() if state.refusal}
        unexplained = [host for host in absent if host not in refused]
        # Only one host is missing: the stranger is that host.
        if self._strangers and len(unexplained) == 1:
            refused[unexplained[0]] = _OTHER_TOKEN
        elif unexplained:
            refused |= dict.fromkeys(self._strangers, _OTHER_TOKEN)
        return refused

    def new_refusals(self) -> dict[str, str]:
        """Returns the refusals that it has not returned before."""
        refused = self.refusals()
        fresh = dict(refused.items() - self._told_refusals.items())
        self._told_refusals |= fresh
        return fresh

    def beat(self, message: Heartbeat, now: float) -> bool:
        """Renews a lease; False if the sender is not a member and must join."""
        state = self._hosts.get(message.host)
        # A lost one must join again, so that ranks learn of its return.
        if state is None or not _speaks_for(state, message.incarnation) or not state.is_live:
            return False
        state.heard_at = now
        state.stage = message.stage
        state.cut_off_at = None
        state.unfed_ranks = message.unfed_ranks
        return True

    @property
    def unfed_ranks(self) -> int:
        return sum(state.unfed_ranks for state in self._hosts.values() if state.is_live)

    def late(self, now: float) -> tuple[str, ...]:
        longest = LATE_BEATS * self._beat_seconds
        return tuple(h for h, s in self._hosts.items() if s.is_live and now - s.heard_at > longest)

    def cut_off(self, host: str, now: float) -> None:
        """Records that a launcher's connection ended; unless it reconnects it is lost."""
        state = self._hosts[host]
        # The first time counts: it is asked after at each late heartbeat.
        state.cut_off_at = now if state.cut_off_at is None else state.cut_off_at

    def stood_still(self, seconds: float) -> None:
        """Extends all deadlines by the time for which the coordinator was suspended."""
        self._start_by += seconds
        for state in self._hosts.values():
            state.heard_at += seconds
            if state.cut_off_at is not None:
                state.cut_off_at += seconds

    def leave(self, message: Leave) -> Change | None:
        """Records a launcher's goodbye; None if it was not a member."""
        state = self._hosts.get(message.host)
        if state is None or not _speaks_for(state, message.incarnation) or state.has_left:
            return None
        state.is_live = False
        state.has_left = True
        # An error's first line: its place and its advice are in the host's log.
        state.goodbye = message.reason.partition("\n")[0]
        return Change(
            what="left",
            host=message.host,
            kind=state.kind,
            reason=message.reason,
            exit_code=message.exit_code,
            is_signalled=message.is_signalled,
        )

    def expire(self, now: float) -> list[Change]:
        """Returns the hosts whose lease or start deadline has passed since the last call."""
        changes = []
        refused = self.refusals()
        for host, state in self._hosts.items():
            reason = self._loss(state, now)
            if reason:
                state.is_live = False
                state.cut_off_at = None
                changes.append(Change(what="lost", host=host, kind=state.kind, reason=reason))
            elif state.join is None and not state.is_absent and now > self._start_by:
                state.is_absent = True
                reason = f"did not come within {self._start_deadline_seconds:g} s"
                if host in refused:
                    reason = f"was refused: {refused[host]}"
                changes.append(Change(what="absent", host=host, kind=state.kind, reason=reason))
        return changes

    def _loss(self, state: _HostState, now: float) -> str:
        if not state.is_live:
            return ""
        silent = now - state.heard_at
        if silent > self._lease_seconds:
            return f"silent for {silent:.0f} s (lease {self._lease_seconds:g} s)"
        if state.cut_off_at is not None and now - state.cut_off_at > CUT_OFF_SECONDS:
            return f"its launcher's connection ended, silent for {silent:.0f} s"
        return ""

    def roster(self, now: float) -> Roster:
        hosts = [(host, state) for host, state in self._hosts.items() if state.kind == "agent"]
        agents = [(place, s, s.join) for place, (_, s) in enumerate(hosts) if s.join]
        return Roster(
            agents=tuple(
                _member(join, now - s.heard_at, place) for place, s, join in agents if s.is_live
            ),
            lost=tuple(
                _member(join, now - s.heard_at, place)
                for place, s, join in agents
                # Hosts that said goodbye are in neither list: ranks wait for lost ones.
                if not s.is_live and not s.has_left
            ),
            expected=len(hosts),
            awaited=tuple(host for host, state in hosts if state.join is None),
            refused=self.refusals(),
            left={host: s.goodbye for host, s in hosts if s.has_left and s.goodbye},
        )

    def _refusal(self, message: Join) -> str:
        state = self._hosts.get(message.host)
        if message.protocol != PROTOCOL_VERSION:
            return (
                f"the leader speaks version {PROTOCOL_VERSION} of the protocol, "
                f"{message.host} version {message.protocol}: use the same image on all hosts"
            )
        if message.run_id != self._run_id:
            return f"this is run {self._run_id}, not {message.run_id}"
        if state is None or state.kind != message.kind:
            return f"{message.host} is not a host ({message.kind}) of this run"
        if (message.host, message.incarnation) in self._superseded:
            return f"{message.host} has restarted as another process"
        return ""

    def _change_of(self, state: _HostState, message: Join) -> Change | None:
        if state.join is None:
            return Change(what="joined", host=message.host, kind=state.kind)
        # A join is repeated until its answer comes.
        if state.is_live and state.join == message:
            return None
        follows = state.kind == "follower"
        if state.is_live and follows and state.join.incarnation == message.incarnation:
            return None
        reason = "its launcher restarted" if follows else ""
        return Change(what="rejoined", host=message.host, kind=state.kind, reason=reason)


def heartbeat_seconds(lease_seconds: float) -> float:
    # Several in each lease: one that is lost does not end it.
    return min(MAX_BEAT_SECONDS, lease_seconds / BEATS_PER_LEASE)


def _trains(state: _HostState) -> bool:
    return state.kind == "follower" and state.stage != "done"


def _speaks_for(state: _HostState, incarnation: str) -> bool:
    return state.join is not None and state.join.incarnation == incarnation


def _member(join: Join, silent_seconds: float, place: int) -> Member:
    return Member(
        host=join.host,
        place=place,
        group=join.group,
        address=join.address,
        port=join.port,
        batch_port=join.batch_port,
        workers=join.workers,
        incarnation=join.incarnation,
        silent_seconds=max(0.0, silent_seconds),
    )
