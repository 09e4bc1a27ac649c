"""A host that is silent for longer than its lease is lost: the leader keeps the run's hosts here.

The default is `FeedSettings.lease_seconds` in `records/workload.py`. Pure: the clock is handed in,
nothing is sent.

A host is named by the topology, a launcher on it by its incarnation. A launcher that comes back has
another incarnation; the older one is superseded and refused from then on. A data host may come
late, leave, and come back. A dnn follower may not: with it the training is lost.
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
# A long lease is for hosts that hang, not for heartbeats: a hole in the network may then
# last nearly as long as the lease, and a process that died is noticed soon.
MAX_BEAT_SECONDS = 3.0
# A heartbeat that is late by half an interval: the coordinator looks whether the connection is
# there.
LATE_BEATS = 1.5
# A launcher whose connection has ended dials again within a second: one that does not is dead.
CUT_OFF_SECONDS = 5.0

What = Literal["joined", "rejoined", "left", "lost", "absent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Says what happened to a host.

    Attributes:
        kind: `agent` of a data host, `follower` of a dnn host.
        reason: Reason for people; empty where `what` says it all.
        exit_code: Exit code of the follower's training command, where it left.
    """

    what: What
    host: str
    kind: Literal["agent", "follower"]
    reason: str = ""
    exit_code: int | None = None

    @property
    def fails_the_run(self) -> bool:
        """Tells whether the training cannot go on."""
        if self.kind == "agent":
            return False
        is_gone = self.what in ("lost", "absent", "rejoined")
        return is_gone or (self.what == "left" and self.exit_code != 0)


@dataclass(slots=True)
class _Seat:
    """Is a host that belongs to the run: not yet there, there, lost or left."""

    kind: Literal["agent", "follower"]
    join: Join | None = None
    heard_at: float = 0.0
    cut_off_at: float | None = None
    is_live: bool = False
    has_left: bool = False
    is_absent: bool = False
    stage: HostStage = "begun"
    unfed_ranks: int = 0


class Members:
    """Keeps the hosts of a run, but for the leader, and declares those lost that fall silent.

    Args:
        run_id: Names the run; launchers of another run are refused.
        agents: Data hosts.
        followers: dnn hosts besides the leader.
        lease_seconds: A launcher that is silent for longer is lost.
        start_deadline_seconds: A host that has not come by then is absent.
        now: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        run_id: str,
        agents: Sequence[str],
        followers: Sequence[str],
        lease_seconds: float,
        start_deadline_seconds: float,
        now: float,
    ) -> None:
        self._run_id = run_id
        self._lease_seconds = lease_seconds
        self._beat_seconds = heartbeat_seconds(lease_seconds)
        self._start_by = now + start_deadline_seconds
        self._start_deadline_seconds = start_deadline_seconds
        self._seats = {host: _Seat("agent") for host in agents}
        self._seats |= {host: _Seat("follower") for host in followers}
        self._superseded: set[tuple[str, str]] = set()

    @property
    def live(self) -> tuple[str, ...]:
        """Returns hosts whose lease runs."""
        return tuple(host for host, seat in self._seats.items() if seat.is_live)

    @property
    def awaited(self) -> tuple[str, ...]:
        """Returns hosts that have never come."""
        return tuple(host for host, seat in self._seats.items() if seat.join is None)

    @property
    def unready(self) -> tuple[str, ...]:
        """Returns hosts whose commands of the engine do not take work, or that are not there."""
        return tuple(
            host for host, seat in self._seats.items() if not seat.is_live or seat.stage == "begun"
        )

    def awaited_followers(self) -> tuple[str, ...]:
        """Returns dnn hosts that are there or may still come: neither done nor lost."""
        return tuple(
            host
            for host, seat in self._seats.items()
            if _trains(seat) and (seat.is_live or (seat.join is None and not seat.is_absent))
        )

    def live_followers(self) -> tuple[str, ...]:
        """Returns dnn hosts whose lease runs."""
        return tuple(h for h, seat in self._seats.items() if seat.is_live and _trains(seat))

    def join(self, message: Join, now: float) -> tuple[Welcome | Refused, Change | None]:
        """Lets a launcher in, or refuses it; joining again renews the lease."""
        reason = self._refusal(message)
        if reason:
            return Refused(reason=reason), None
        seat = self._seats[message.host]
        change = self._change_of(seat, message)
        if seat.join and seat.join.incarnation != message.incarnation:
            # The older launcher may hang and wake up: it must not take the place back.
            self._superseded.add((message.host, seat.join.incarnation))
            # The new launcher has started none of the engine's commands yet.
            seat.stage = "begun"
        seat.join, seat.heard_at, seat.is_live, seat.has_left = message, now, True, False
        seat.cut_off_at = None
        welcome = Welcome(beat_seconds=self._beat_seconds, lease_seconds=self._lease_seconds)
        return welcome, change

    def beat(self, message: Heartbeat, now: float) -> bool:
        """Renews a lease on a heartbeat; False if the sender is not a member and must join."""
        seat = self._seats.get(message.host)
        # One that was given up has to join again, so that its return is told to the ranks.
        if seat is None or not _speaks_for(seat, message.incarnation) or not seat.is_live:
            return False
        seat.heard_at, seat.stage, seat.cut_off_at = now, message.stage, None
        seat.unfed_ranks = message.unfed_ranks
        return True

    @property
    def unfed_ranks(self) -> int:
        """Counts ranks of hosts that are here, where none asks for a batch of the feed."""
        return sum(seat.unfed_ranks for seat in self._seats.values() if seat.is_live)

    def late(self, now: float) -> tuple[str, ...]:
        """Returns hosts whose heartbeat is late: perhaps their connection has ended."""
        longest = LATE_BEATS * self._beat_seconds
        return tuple(h for h, s in self._seats.items() if s.is_live and now - s.heard_at > longest)

    def cut_off(self, host: str, now: float) -> None:
        """Notes that the connection of a launcher has ended; unless it comes back it is lost."""
        seat = self._seats[host]
        seat.cut_off_at = now if seat.cut_off_at is None else seat.cut_off_at

    def stood_still(self, seconds: float) -> None:
        """Moves all deadlines: for so long nobody could be heard, for the coordinator hung.

        Its process was stopped, or its machine was: what hosts sent meanwhile is still to be read.
        """
        self._start_by += seconds
        for seat in self._seats.values():
            seat.heard_at += seconds
            if seat.cut_off_at is not None:
                seat.cut_off_at += seconds

    def leave(self, message: Leave) -> Change | None:
        """Takes a launcher's goodbye; None if it was no member."""
        seat = self._seats.get(message.host)
        if seat is None or not _speaks_for(seat, message.incarnation) or seat.has_left:
            return None
        seat.is_live, seat.has_left = False, True
        return Change(
            what="left",
            host=message.host,
            kind=seat.kind,
            reason=message.reason,
            exit_code=message.exit_code,
        )

    def expire(self, now: float) -> list[Change]:
        """Returns the hosts whose lease or start deadline has passed since the last call."""
        changes = []
        for host, seat in self._seats.items():
            reason = self._loss(seat, now)
            if reason:
                seat.is_live, seat.cut_off_at = False, None
                changes.append(Change(what="lost", host=host, kind=seat.kind, reason=reason))
            elif seat.join is None and not seat.is_absent and now > self._start_by:
                seat.is_absent = True
                reason = f"did not come within {self._start_deadline_seconds:g} s"
                changes.append(Change(what="absent", host=host, kind=seat.kind, reason=reason))
        return changes

    def _loss(self, seat: _Seat, now: float) -> str:
        """Says why a live host is lost; empty: it is not."""
        if not seat.is_live:
            return ""
        silent = now - seat.heard_at
        if silent > self._lease_seconds:
            return f"silent for {silent:.0f} s (lease {self._lease_seconds:g} s)"
        if seat.cut_off_at is not None and now - seat.cut_off_at > CUT_OFF_SECONDS:
            return f"its launcher's connection ended, nothing was heard for {silent:.0f} s"
        return ""

    def roster(self, now: float) -> Roster:
        """Returns the agents that trainers may dial, those lost, and those that never came."""
        seats = [seat for seat in self._seats.values() if seat.kind == "agent"]
        agents = [(place, s, s.join) for place, s in enumerate(seats) if s.join]
        return Roster(
            agents=tuple(
                _member(join, now - s.heard_at, place) for place, s, join in agents if s.is_live
            ),
            lost=tuple(
                _member(join, now - s.heard_at, place)
                for place, s, join in agents
                # One that said goodbye is in neither list: ranks wait for those that are lost.
                if not s.is_live and not s.has_left
            ),
            expected=len(seats),
            awaited=tuple(
                host
                for host, seat in self._seats.items()
                if seat.kind == "agent" and seat.join is None
            ),
        )

    def _refusal(self, message: Join) -> str:
        seat = self._seats.get(message.host)
        if message.protocol != PROTOCOL_VERSION:
            return (
                f"the leader speaks version {PROTOCOL_VERSION} of the protocol, "
                f"{message.host} version {message.protocol}: use the same image on all hosts"
            )
        if message.run_id != self._run_id:
            return f"this is run {self._run_id}, not {message.run_id}"
        if seat is None or seat.kind != message.kind:
            return f"{message.host} is not a host ({message.kind}) of this run"
        if (message.host, message.incarnation) in self._superseded:
            return f"{message.host} has come back as another process"
        return ""

    def _change_of(self, seat: _Seat, message: Join) -> Change | None:
        if seat.join is None:
            return Change(what="joined", host=message.host, kind=seat.kind)
        # A join is repeated until its answer comes: this is no news.
        if seat.is_live and seat.join == message:
            return None
        is_same_follower = _follows(seat) and seat.join.incarnation == message.incarnation
        if is_same_follower and seat.is_live:
            return None
        reason = "its launcher started again" if _follows(seat) else ""
        return Change(what="rejoined", host=message.host, kind=seat.kind, reason=reason)


def heartbeat_seconds(lease_seconds: float) -> float:
    """Returns the seconds between two heartbeats of a launcher."""
    return min(MAX_BEAT_SECONDS, lease_seconds / BEATS_PER_LEASE)


def _follows(seat: _Seat) -> bool:
    return seat.kind == "follower"


def _trains(seat: _Seat) -> bool:
    """Returns whether it is a dnn host whose training has not come to its end."""
    return _follows(seat) and seat.stage != "done"


def _speaks_for(seat: _Seat, incarnation: str) -> bool:
    return seat.join is not None and seat.join.incarnation == incarnation


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
