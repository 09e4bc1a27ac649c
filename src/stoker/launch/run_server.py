"""The run's server, a thread of the leader's launcher in runs with more than one host.

Each host says every second all that is so about it (`HostState`), each rank how far it is
(`Progress`); the answer to both is all that is so about the run (`RunState`), in the end its
outcome. `HostTable` decides what the states mean: a host that is silent for `feed.lease_seconds` is
lost. Pure: the clock is a parameter, nothing is sent.
"""

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import zmq
from msgspec.structs import replace

from stoker.errors import PlatformError, ProtocolError
from stoker.failure_reasons import says_peer_is_gone
from stoker.feed.engine.crypto import (
    HEARTBEAT_TIMEOUT_SECONDS,
    AllowList,
    HandshakeGuard,
    RejectionLog,
    secure_server,
)
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
from stoker.logs import EventName, now_utc
from stoker.records import Event, FeedSettings, Role

# After the outcome: for hosts that have not fetched it, or that start late.
OUTCOME_SECONDS = 15.0
_POLL_MS = 100

What = Literal["joined", "rejoined", "left", "lost", "absent"]
_Socket = zmq.Socket[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostChange:
    """A change of a host's state; `end` says how it ended, or why it was lost or came again."""

    what: What
    host: str
    role: Role
    end: HostEnd = field(default_factory=HostEnd)

    @property
    def is_loss(self) -> bool:
        """Whether the host is gone, and not its command: it died, restarted, or was drained."""
        return self.what in ("lost", "rejoined") or self.end.is_signalled

    @property
    def is_consequence(self) -> bool:
        """Whether its failure only says that another host is gone."""
        return not self.is_loss and says_peer_is_gone(self.end.reason)

    @property
    def fails_the_run(self) -> bool:
        """Whether the training cannot go on, as it can without a data host."""
        return self.role == "dnn" and self.what != "joined" and self.end.exit_code != 0

    @property
    def words(self) -> str:
        who = f"{self.role} host {self.host}"
        if self.what != "left":
            return f"{who} {'was lost: ' * self.is_loss}{self.end.reason}"
        if self.is_loss:
            return f"{who} was asked to end, as by a drain (exit code {self.end.exit_code})"
        return self.end.reason or f"{who} ended with exit code {self.end.exit_code}"


def failed(host: str, *, exit_code: int | None, reason: str) -> HostChange:
    """Returns the failure of a dnn host's training, or of its engine (no exit code)."""
    end = HostEnd(exit_code=exit_code, reason=reason)
    return HostChange(what="left", host=host, role="dnn", end=end)


class HostTable:
    """The hosts of a run, except the leader: what each said last, and when.

    Args:
        roles: Role of each host. Data hosts may come late, leave and return; with a dnn host the
            training ends.
        now: Monotonic seconds, here and below.

    Attributes:
        states: What each host said last; those that were never heard are missing.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        *,
        run_id: str,
        feed: FeedSettings,
        now: float,
    ) -> None:
        self.states: Mapping[str, HostState] = {}
        self._roles = roles
        self._run_id = run_id
        self._feed = feed
        # Of hosts that were never heard: since when they are awaited.
        self._heard_at = dict.fromkeys(roles, now)
        # Lost or absent.
        self._gone: set[str] = set()

    @property
    def live(self) -> tuple[str, ...]:
        states = self.states.items()
        return tuple(n for n, state in states if state.end is None and n not in self._gone)

    @property
    def awaited(self) -> tuple[str, ...]:
        return tuple(name for name in self._roles if name not in self.states)

    @property
    def unready(self) -> tuple[str, ...]:
        """Hosts whose engine's commands do not accept work yet."""
        ready = [name for name in self.live if self.states[name].stage != "begun"]
        return tuple(name for name in self._roles if name not in ready)

    def trainers(self, *, live_only: bool) -> tuple[str, ...]:
        """Returns dnn hosts neither done nor lost; without `live_only` also those still to come."""
        names = [name for name in self.live if self.states[name].stage != "done"]
        if not live_only:
            names += [name for name in self.awaited if name not in self._gone]
        return tuple(name for name in names if self._roles[name] == "dnn")

    def refusal(self, message: HostState | Progress) -> str:
        """Returns why the sender of a message may not take part; empty: it may."""
        if message.protocol != PROTOCOL_VERSION or message.run_id != self._run_id:
            return (
                f"this is run {self._run_id} in version {PROTOCOL_VERSION} of the protocol, not "
                f"{message.run_id} in version {message.protocol}: use one image on all hosts"
            )
        if isinstance(message, HostState) and self._roles.get(message.host) != message.role:
            return f"{message.host} is no {message.role} host of this run"
        return ""

    def hear(self, state: HostState, now: float) -> HostChange | None:
        """Takes a host's state that is not refused; returns what has changed."""
        host = state.host
        before = self.states.get(host)
        was_live = host in self.live
        # Another mapping: other threads read it.
        self.states = {**self.states, host: state}
        self._heard_at[host] = now
        self._gone.discard(host)
        if state.end is not None:
            # Said again until the run ends.
            is_news = before is None or before.end is None
            return self._change("left", host, state.end) if is_news else None
        if before is None:
            return self._change("joined", host)
        if before.incarnation != state.incarnation or not was_live:
            reason = "it came again, as another process or after a silence"
            return self._change("rejoined", host, HostEnd(reason=reason))
        return None

    def expire(self, now: float) -> list[HostChange]:
        """Returns the hosts whose lease or start deadline has passed since the last call."""
        changes = []
        for host in (*self.live, *self.awaited):
            silent = now - self._heard_at[host]
            what: What = "lost"
            reason = f"silent for {silent:.0f} s (feed.lease_seconds)"
            limit = self._feed.lease_seconds
            if host not in self.states:
                what = "absent"
                limit = self._feed.start_deadline_seconds
                reason = f"did not come within {limit:g} s"
            if silent > limit and host not in self._gone:
                self._gone.add(host)
                changes.append(self._change(what, host, HostEnd(reason=reason)))
        return changes

    def _change(self, what: What, host: str, end: HostEnd | None = None) -> HostChange:
        return HostChange(what=what, host=host, role=self._roles[host], end=end or HostEnd())

    def run_state(self, said: RunState) -> RunState:
        """Returns what is so of the run: what its leader says, and its data hosts."""
        data = [name for name, role in self._roles.items() if role == "data"]
        states = [self.states[name] for name in data if name in self.states]
        return replace(
            said,
            expected=len(data),
            agents=tuple(
                Member(**{name: getattr(state, name) for name in Member.__struct_fields__})
                for state in states
                if state.host in self.live
            ),
            lost=tuple(state.host for state in states if state.host in self._gone),
            awaited=tuple(name for name in data if name not in self.states),
            # An error's first line: its place and its advice are in the host's log.
            left={state.host: state.end.reason.partition("\n")[0] for state in states if state.end},
        )


class RunServer:
    """Server for launchers and ranks of one run; in a run of one host it is never started.

    Args:
        on_failure: Called in the server's thread when a host changes so that the run fails.
        outcome_seconds: How long hosts may take to fetch the outcome.

    Attributes:
        hosts: Other threads may read it.
        events: Changes of hosts, for the record.
        progress: The last report of each rank.
        state: What was said last of the run.
    """

    def __init__(
        self,
        run: HostRun,
        *,
        on_failure: Callable[[HostChange], None],
        outcome_seconds: float = OUTCOME_SECONDS,
    ) -> None:
        roles = {host: group.role for group in run.topology.groups for host in group.hosts}
        del roles[run.topology.host]
        settings = run.settings
        now = time.monotonic()
        self.hosts = HostTable(roles, run_id=settings.run_id, feed=settings.feed, now=now)
        self.events: list[Event] = []
        self.progress: Mapping[int, Progress] = {}
        self.state = RunState()
        self._keys = run.keys
        self._log = run.log
        self._port = settings.port or run.leader_address[1]
        self._endpoint = f"tcp://{run.listen_address}:{self._port}"
        self._on_failure = on_failure
        self._outcome_seconds = outcome_seconds
        self._warned: set[bytes] = set()
        # Set by other threads; the server's thread looks at them in each turn.
        self._said = RunState()
        self._close_by = math.inf
        self._daemons: dict[str, tuple[str, ...]] = {}
        self._unpack = Unpacker(ToLeader)
        self._thread: threading.Thread | None = None

    @property
    def gone(self) -> dict[str, str]:
        """Why data hosts have ended or were lost, by host."""
        return {**dict.fromkeys(self.state.lost, "it was lost"), **self.state.left}

    def start(self) -> None:
        """Serves in a thread; raises PlatformError if the port is in use."""
        if self._keys is None:
            return
        context: zmq.Context[_Socket] = zmq.Context()
        allow_list = AllowList(context, self._keys)
        socket = context.socket(zmq.ROUTER)
        # Connections end with their processes.
        secure_server(socket, self._keys, silence_seconds=2 * HEARTBEAT_TIMEOUT_SECONDS)
        # Sending to a connection that has ended is then an error, and not dropped in silence.
        socket.router_mandatory = True
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as err:
            allow_list.close()
            context.destroy(linger=0)
            raise PlatformError(
                f"the run's server cannot listen: {err}",
                where=self._endpoint,
                fix="stop the program that uses the port, or set feed.port",
            ) from None
        self._thread = threading.Thread(
            target=self._serve, args=(context, socket, allow_list), name="run-server", daemon=True
        )
        self._thread.start()

    def tell(self, **changes: object) -> None:
        """Changes what is said of the run, which every host hears in a second; returns at once."""
        self._said = replace(self._said, **changes)

    def start_daemon(self, host: str, arguments: Sequence[str]) -> None:
        """Makes a dnn host start mpirun's daemon, once it has joined; returns at once."""
        self._daemons[host] = tuple(arguments)

    def close(self) -> None:
        """Ends the thread, once all hosts have heard an outcome, or `outcome_seconds` passed."""
        self._close_by = time.monotonic() + self._outcome_seconds
        if self._thread is not None:
            # Longer than it takes: for a thread that hangs.
            self._thread.join(self._outcome_seconds + 10.0)

    def note(self, what: str, *, host: str) -> None:
        """Keeps an event for the record."""
        self.events.append(Event(when=now_utc(), what=what, host=host))

    def _serve(
        self, context: "zmq.Context[_Socket]", socket: _Socket, allow_list: AllowList
    ) -> None:
        rejections = RejectionLog(self._log, port=self._port)
        guard = HandshakeGuard(socket, rejections, port=self._port, allow_list=allow_list)
        poller = zmq.Poller()
        for source in (socket, allow_list.socket, guard.monitor):
            poller.register(source, zmq.POLLIN)
        try:
            while not self._is_done():
                ready = dict(poller.poll(_POLL_MS))
                guard.handle(ready, time.monotonic())
                self._turn(socket, guard)
                guard.tick(time.monotonic())
        except Exception as err:  # at the edge of a thread, for which the run must not wait
            self._on_failure(failed("leader", exit_code=None, reason=f"the run's server: {err!r}"))
        finally:
            guard.close()
            # For the last states to be sent.
            socket.linger = 500
            socket.close()
            allow_list.close()
            context.term()

    def _is_done(self) -> bool:
        is_told = self._said.outcome is None or not (self.hosts.live or self.hosts.awaited)
        return time.monotonic() > self._close_by or (self._close_by < math.inf and is_told)

    def _turn(self, socket: _Socket, guard: HandshakeGuard) -> None:
        # Whom to answer, with the host that it is, or an empty text.
        asking: dict[bytes, str] = {}
        # Before leases are looked at: what came while this process stood still counts. Bounded, so
        # that they are looked at under any load.
        for _ in range(100):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            guard.note_proved(frames[-1])
            sender = frames[0].bytes
            try:
                message = self._unpack(frames[-1].bytes)
            except ProtocolError as err:
                self._warn(sender, err.what)
                continue
            assert isinstance(message, HostState | Progress)
            if refusal := self.hosts.refusal(message):
                self._warn(sender, refusal)
                self._send(socket, sender, RunState(refusal=refusal))
                continue
            asking[sender] = ""
            if isinstance(message, HostState):
                asking[sender] = message.host
                self._note(self.hosts.hear(message, time.monotonic()))
            elif message.has_begun:
                last = self.progress.get(message.rank)
                # A forked child has the same rank: the process with more steps is the trainer.
                if last is None or message.steps >= last.steps:
                    # Another mapping: other threads read it.
                    self.progress = {**self.progress, message.rank: message}
        for change in self.hosts.expire(time.monotonic()):
            self._note(change)
        self.state = self.hosts.run_state(self._said)
        for sender, host in asking.items():
            self._send(socket, sender, replace(self.state, daemon=self._daemons.get(host, ())))

    def _warn(self, sender: bytes, reason: str) -> None:
        # Once for each connection.
        if sender not in self._warned:
            self._warned.add(sender)
            self._log.event(EventName.MESSAGE_REFUSED, peer=sender.hex(), reason=reason)

    def _note(self, change: HostChange | None) -> None:
        if change is None:
            return
        # One line each: the record shows them in a table.
        reason = change.end.reason.strip().partition("\n")[0][:400]
        code = change.end.exit_code
        what = f"{change.role} host {change.what}"
        if code is not None:
            what += f" with exit code {code}"
        self.note(f"{what}: {reason}" if reason else what, host=change.host)
        name = EventName(f"host_{change.what}")
        self._log.event(name, about=change.host, role=change.role, exit_code=code, reason=reason)
        if change.fails_the_run and self._said.outcome is None:
            self._on_failure(change)

    def _send(self, socket: _Socket, receiver: bytes, message: RunState) -> None:
        try:
            socket.send_multipart([receiver, pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError as err:
            # A connection that has ended is not an error: leases decide who is lost.
            if err.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
