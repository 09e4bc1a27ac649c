"""The run's server, a thread of the leader's launcher in runs with more than one host.

Each host says every second all that is so about it (`HostState`), each rank how far it is
(`Progress`); the answer to both is all that is so about the run (`RunState`), in the end its
outcome. `HostTable` decides what the states mean: a host that is silent for `feed.lease_seconds` is
lost. Pure: the clock is a parameter, nothing is sent.
"""

import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import zmq
from msgspec.structs import asdict, replace

from stoker.errors import PlatformError, ProtocolError
from stoker.failure_reasons import says_peer_is_gone
from stoker.feed.engine.crypto import ControlServer
from stoker.feed.engine.run_messages import (
    PROTOCOL_VERSION,
    HostEnd,
    HostState,
    Member,
    Progress,
    RunState,
    ToLeader,
    Unpacker,
    pack,
)
from stoker.launch.host_client import HostRun
from stoker.launch.process import Decided
from stoker.logs import EventName, now_utc
from stoker.records import Event, FeedSettings, Role

# After the outcome: for hosts that have not fetched it, or that start late.
OUTCOME_SECONDS = 15.0
_POLL_MS = 100
_ONE_IMAGE = "use one image on all hosts"

# `done`: its training has ended, and it waits for the run's end.
HostStatus = Literal["awaited", "joined", "done", "left", "lost", "absent"]
_EVENTS: dict[HostStatus, EventName] = {
    "joined": EventName.HOST_JOINED,
    "left": EventName.HOST_LEFT,
    "lost": EventName.HOST_LOST,
    "absent": EventName.HOST_LOST,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChange:
    """A host's new status; `end` says how it ended, or why it is lost or absent."""

    status: HostStatus
    host: str
    role: Role
    end: HostEnd = field(default_factory=HostEnd)

    @property
    def is_loss(self) -> bool:
        """Whether the host is gone, and not its command: it died, or was drained."""
        return self.status == "lost" or self.end.is_signalled

    @property
    def is_consequence(self) -> bool:
        """Whether its failure only says that another host is gone."""
        return not self.is_loss and says_peer_is_gone(self.end.reason)

    @property
    def fails_the_run(self) -> bool:
        """Whether the training cannot go on, as it can without a data host."""
        is_ended = self.status not in ("joined", "done") and self.end.exit_code != 0
        return is_ended and self.role == "dnn"

    @property
    def words(self) -> str:
        who = f"{self.role} host {self.host}"
        if self.status != "left":
            return f"{who} {'was lost: ' * self.is_loss}{self.end.reason}"
        if self.is_loss:
            return f"{who} was asked to end, as by a drain (exit code {self.end.exit_code})"
        return self.end.reason or f"{who} ended with exit code {self.end.exit_code}"


def failed(host: str, reason: str, *, exit_code: int | None = None) -> HostChange:
    """Returns the failure of a dnn host's training, or of its engine (no exit code)."""
    end = HostEnd(exit_code=exit_code, reason=reason)
    return HostChange(status="left", host=host, role="dnn", end=end)


class HostTable:
    """The hosts of a run, except the leader: what each said last, and when.

    Args:
        roles: Role of each host. Data hosts may come late, leave and return; with a dnn host the
            training ends.
        now: Monotonic seconds, here and below.

    Attributes:
        states: What each host said last; those that were never heard are missing.
    """

    def __init__(self, roles: Mapping[str, Role], *, feed: FeedSettings, now: float) -> None:
        self.states: Mapping[str, HostState] = {}
        self._roles = roles
        self._feed = feed
        self._heard_at = dict.fromkeys(roles, now)
        self._statuses: dict[str, HostStatus] = dict.fromkeys(roles, "awaited")

    def names(self, *statuses: HostStatus, role: Role | None = None) -> tuple[str, ...]:
        """Returns hosts in order, of one role or both."""
        found = [name for name, status in self._statuses.items() if status in statuses]
        return tuple(name for name in found if role in (None, self._roles[name]))

    @property
    def unready(self) -> tuple[str, ...]:
        """Hosts whose engine's commands do not accept work yet."""
        heard = self.names("joined", "done")
        ready = [name for name in heard if self.states[name].stage != "begun"]
        return tuple(name for name in self._roles if name not in ready)

    def refusal(self, message: HostState | Progress) -> str:
        """Returns why the sender of a message may not take part; empty: it may."""
        if message.protocol != PROTOCOL_VERSION:
            return f"this is version {PROTOCOL_VERSION} of the protocol: {_ONE_IMAGE}"
        if isinstance(message, Progress):
            return ""
        before = self.states.get(message.host, message)
        if before.incarnation != message.incarnation and self._roles[message.host] == "dnn":
            return "a dnn host that starts again cannot join its run"
        return ""

    def hear(self, state: HostState, now: float) -> None:
        """Takes a host's state that is not refused."""
        host = state.host
        if self.states.get(host, state).incarnation != state.incarnation:
            self._statuses[host] = "awaited"
        # Another mapping: other threads read it.
        self.states = {**self.states, host: state}
        self._heard_at[host] = now

    def look(self, now: float) -> list[HostChange]:
        """Returns the changes since the last call."""
        changes = []
        for host, role in self._roles.items():
            status, end = self._status(host, now)
            if status != self._statuses[host]:
                self._statuses[host] = status
                changes.append(HostChange(status=status, host=host, role=role, end=end))
        return changes

    def _status(self, host: str, now: float) -> tuple[HostStatus, HostEnd]:
        silent = now - self._heard_at[host]
        state = self.states.get(host)
        if state is None:
            limit = self._feed.start_deadline_seconds
            status: HostStatus = "absent" if silent > limit else "awaited"
            return status, HostEnd(reason=f"did not come within {limit:g} s")
        if state.end:
            return "left", state.end
        if silent > self._feed.lease_seconds:
            reason = f"silent for {silent:.0f} s (feed.lease_seconds)"
            return "lost", HostEnd(reason=reason)
        return "done" if state.stage == "done" else "joined", HostEnd()

    def run_state(self, said: RunState) -> RunState:
        """Returns what is so of the run: what its leader says, and its data hosts."""
        agents = []
        for host in self.names("joined", role="data"):
            state = asdict(self.states[host])
            agents.append(Member(**{name: state[name] for name in Member.__struct_fields__}))
        ends = {host: self.states[host].end for host in self.names("left", role="data")}
        return replace(
            said,
            expected=list(self._roles.values()).count("data"),
            agents=tuple(agents),
            lost=self.names("lost", role="data"),
            awaited=self.names("awaited", "absent", role="data"),
            # An error's first line: its place and its advice are in the host's log.
            left={host: end.reason.partition("\n")[0] for host, end in ends.items() if end},
        )


class RunServer:
    """Server for launchers and ranks of one run; in a run of one host it is never started.

    Args:
        outcome_seconds: How long hosts may take to fetch the outcome.

    Attributes:
        hosts: Other threads may read it.
        events: Changes of hosts, for the record.
        failures: Those that fail the run, which end its command here.
        progress: The last report of each rank.
        state: What was said last of the run.
    """

    def __init__(self, run: HostRun, *, outcome_seconds: float = OUTCOME_SECONDS) -> None:
        roles = {host: group.role for group in run.topology.groups for host in group.hosts}
        del roles[run.topology.host]
        self.hosts = HostTable(roles, feed=run.settings.feed, now=time.monotonic())
        self.events: list[Event] = []
        self.failures: list[HostChange] = []
        self.progress: Mapping[int, Progress] = {}
        self.state = RunState()
        self._run = run
        self._port = run.settings.port or run.leader_address[1]
        self._outcome_seconds = outcome_seconds
        # Set by other threads; the server's thread looks at them in each turn.
        self._said = RunState()
        self._close_by = math.inf
        self._unpack = Unpacker(ToLeader)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Serves in a thread; raises PlatformError if the port is in use."""
        keys = self._run.keys
        if keys is None:
            return
        endpoint = f"tcp://{self._run.listen_address}:{self._port}"
        try:
            server = ControlServer(keys, self._run.log, endpoint=endpoint)
        except zmq.ZMQError as err:
            raise PlatformError(
                f"the run's server cannot listen: {err}",
                where=endpoint,
                fix="stop the program that uses the port, or set feed.port",
            ) from None
        self._thread = threading.Thread(
            target=self._serve, args=(server,), name="run-server", daemon=True
        )
        self._thread.start()

    def tell(self, **changes: object) -> None:
        """Changes what is said of the run, which every host hears in a second; returns at once."""
        self._said = replace(self._said, **changes)

    def close(self) -> None:
        """Ends the thread, once all hosts have heard an outcome, or `outcome_seconds` passed."""
        self._close_by = time.monotonic() + self._outcome_seconds
        if self._thread is not None:
            # Longer than it takes: for a thread that hangs.
            self._thread.join(self._outcome_seconds + 10.0)

    def note(self, what: str, *, host: str) -> None:
        """Keeps an event for the record."""
        self.events.append(Event(when=now_utc(), what=what, host=host))

    def _serve(self, server: ControlServer) -> None:
        poller = zmq.Poller()
        for source in server.sources:
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_done():
                server.handle(dict(poller.poll(_POLL_MS)), time.monotonic())
                self._turn(server)
                server.tick(time.monotonic())
        except Exception as err:  # at the edge of a thread, for which the run must not wait
            self._fail(failed(self._run.topology.host, f"the run's server: {err!r}"))
        finally:
            # For the last states to be sent.
            server.close(linger_seconds=0.5)

    def _is_done(self) -> bool:
        untold = self.hosts.names("joined", "done", "awaited", "absent")
        is_told = self._said.outcome is None or not untold
        return time.monotonic() > self._close_by or (self._close_by < math.inf and is_told)

    def _turn(self, server: ControlServer) -> None:
        # Why whom to answer may not take part; empty: it may.
        asking: dict[bytes, str] = {}
        # Before leases are looked at: what came while this process stood still counts.
        for sender, packed in server.receive():
            asking[sender] = refusal = self._hear(packed)
            if refusal:
                # A line in a minute, however many there are.
                server.rejections.add("a process of this run", refusal)
        for change in self.hosts.look(time.monotonic()):
            self._note(change)
        self.state = self.hosts.run_state(self._said)
        for sender, refusal in asking.items():
            # Dropped without its connection: leases decide who is lost.
            server.send(sender, pack(RunState(refusal=refusal) if refusal else self.state))

    def _hear(self, packed: bytes) -> str:
        """Takes a message; returns why its sender may not take part."""
        try:
            message = self._unpack(packed)
            assert isinstance(message, HostState | Progress)
            refusal = self.hosts.refusal(message)
        except ProtocolError as err:
            refusal = f"{err.what}: {_ONE_IMAGE}"
        if refusal:
            return refusal
        if isinstance(message, HostState):
            self.hosts.hear(message, time.monotonic())
        elif isinstance(message, Progress) and message.has_begun:
            last = self.progress.get(message.rank)
            # A forked child has the same rank: the process with more steps is the trainer.
            if last is None or message.steps >= last.steps:
                # Another mapping: other threads read it.
                self.progress = {**self.progress, message.rank: message}
        return ""

    def _note(self, change: HostChange) -> None:
        if change.status == "done":
            return
        # One line each: the record shows them in a table.
        reason = change.end.reason.strip().partition("\n")[0][:400]
        what = f"{change.role} host {change.status}"
        self.note(f"{what}: {reason}" if reason else what, host=change.host)
        name = _EVENTS[change.status]
        code = change.end.exit_code
        self._run.log.event(
            name, about=change.host, role=change.role, exit_code=code, reason=reason
        )
        if change.fails_the_run and self._said.outcome is None:
            self._fail(change)

    def _fail(self, change: HostChange) -> None:
        self.failures.append(change)
        self._run.inbox.put(Decided(change.words.partition("\n")[0]))
