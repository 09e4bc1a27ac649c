"""A launcher's membership in its run: joining, heartbeats, and the outcome.

A leader may be silent for three reasons. Its host or the network is gone: only the lease shows it,
which is long. Its launcher has ended: its port refuses connections, which shows within seconds, as
no launcher restarts in the same run. Or it hangs (a live migration, SIGSTOP): then the run's
trainers continue, and a data host that serves one knows that the run is alive.
"""

import contextlib
import errno
import os
import queue
import random
import secrets
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import zmq

from stoker.environment import ProcessSettings
from stoker.errors import ProtocolError, UsageError
from stoker.feed.wire.crypto import Keys, read_event, read_token, secure_client
from stoker.feed.wire.protocol import (
    PROTOCOL_VERSION,
    FromCoordinator,
    GpuReport,
    Heartbeat,
    HostStage,
    Join,
    Leave,
    Message,
    Refused,
    RunStage,
    Start,
    State,
    Unpacker,
    Welcome,
    pack,
)
from stoker.launch.coordinator import MAX_MESSAGE_BYTES
from stoker.launch.host_memory import HostMemoryWatch
from stoker.launch.other_programs import OthersWatch
from stoker.launch.roster import LATE_BEATS, heartbeat_seconds
from stoker.launch.supervise import Decided, Inbox, SignalReceived
from stoker.launch.topology import Topology
from stoker.logs import EventName, Log
from stoker.records import FeedSettings
from stoker.repeat import Clock

# If a silent leader's port refuses connections for this long, its launcher has ended.
REFUSED_SECONDS = 5.0
# The same if the leader's side closed the connection (its container ended) and nothing answers.
ENDED_SECONDS = 12.0
# The leader's port answers, but no handshake succeeds for this long: it refuses this host's key.
KEY_REFUSED_SECONDS = 40.0
# A pause between failed handshakes, after which their time is counted from the next one.
_FAILURES_APART_SECONDS = 10.0
# Ended so soon after a message, the leader's side closed it: libzmq does after 15 s of silence.
_ALIVE_SECONDS = 9.0
# In a longer loop iteration this process hung, and messages are still to be read.
STANDSTILL_SECONDS = 2.0
# Interval of repeated joins, and timeout of a silent connection.
JOIN_SECONDS = 0.5
RECONNECT_SECONDS = 3.0
# For a leader that is to hear of a failure; one that comes later waits for its start deadline.
FAILURE_SECONDS = 30.0
_POLL_SECONDS = 1.0
# Short, as it blocks the thread that sends heartbeats.
_DIAL_SECONDS = 0.3
_POLL_MS = 50
_MAX_GPU_REPORTS = 4
# How a connection of ZeroMQ begins, on both sides; no proxy of another protocol sends it.
_GREETING = b"\xff" + bytes(8) + b"\x7f"
_MONITORED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Silence:
    """A leader's silence, and what it means. Times are monotonic seconds."""

    def __init__(self, *, lease_seconds: float, now: float) -> None:
        self._lease_seconds = lease_seconds
        self._turned_at = now
        self._refused_since: float | None = None
        self._ended_at: float | None = None
        self.heard_at: float | None = None

    def hear(self, now: float) -> None:
        self.heard_at = now
        self._refused_since = None
        self._ended_at = None

    def dial(self, now: float, *, is_refused: bool | None) -> None:
        """Records whether the leader's port refuses connections; None: there was no answer."""
        if is_refused is None:
            return
        if not is_refused:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now

    def end(self, now: float) -> None:
        """Ignores a disconnect while the leader is silent anyway."""
        if self.heard_at is not None and now - self.heard_at < _ALIVE_SECONDS:
            self._ended_at = now

    def turn(self, now: float) -> float:
        """Records a loop iteration; returns the seconds for which this process hung, else 0."""
        seconds = now - self._turned_at
        self._turned_at = now
        if seconds <= STANDSTILL_SECONDS or self.heard_at is None:
            return 0.0
        # As if that time had not passed: what the leader sent meanwhile is still to be read.
        self.heard_at += seconds
        if self._refused_since is not None:
            self._refused_since += seconds
        if self._ended_at is not None:
            self._ended_at += seconds
        return seconds

    def reason(self, now: float, *, trainers_heard_at: float) -> str:
        """Returns why the leader is lost, as the end of a sentence about it; empty: it is not."""
        if self.heard_at is None:
            return ""
        silent = now - max(self.heard_at, trainers_heard_at)
        if silent > self._lease_seconds:
            return f"was silent for more than {self._lease_seconds:g} s"
        refused = _seconds_since(self._refused_since, now)
        # Not refusals alone: trainers may have shown signs of life since.
        if min(silent, refused) > REFUSED_SECONDS:
            return "ended without a goodbye: its port refuses connections"
        if min(silent, _seconds_since(self._ended_at, now)) > ENDED_SECONDS:
            return "closed its connection and does not answer any more"
        return ""


def _words_of_outcome(state: State) -> str:
    words = f"the training {state.outcome}"
    if state.outcome == "released":
        words = "the training continues without data hosts"
    if why := state.reason.partition("\n")[0]:
        words += f": {why}"
    return words


def _seconds_since(began: float | None, now: float) -> float:
    if began is None:
        return 0.0
    return now - began


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipVerdict:
    """Why this launcher must end: by the leader, or its own membership failed (open files, say)."""

    kind: Literal["decided", "lost", "never", "refused", "failed"]
    reason: str
    state: State | None = None


@dataclass(eq=False, kw_only=True)
class Membership:
    """A launcher's lease at the coordinator, kept in a thread.

    Args:
        address: Name or address of the leader; a name is resolved at each reconnect.
        on_verdict: Called once, in the thread, when this launcher must end.
        on_ending: Called once, in the thread, when a rule ends the run and ranks may save.
        trainers_heard_at: Returns the last sign of life of a trainer: while this host serves one, a
            silent leader hangs and is not lost.
        memory: Looked at in the thread; each heartbeat has what was highest.

    Attributes:
        run_stage: State of the engine's commands, as last announced by the leader.
        stacks: How often the leader has asked for the stacks of this host's ranks.
        start_order: The leader's order for this follower; None until it has come.
        verdict: Why this launcher must end; None while it may run.
    """

    join: Join
    keys: Keys
    address: str
    port: int
    feed: FeedSettings
    log: Log
    on_verdict: Callable[[MembershipVerdict], None]
    on_ending: Callable[[], None] = lambda: None
    trainers_heard_at: Callable[[], float] = lambda: float("-inf")
    memory: HostMemoryWatch = field(default_factory=HostMemoryWatch)
    clock: Clock = time.monotonic

    def __post_init__(self) -> None:
        self._beat_seconds = heartbeat_seconds(self.feed.lease_seconds)
        self._started_at = self._looked_at = self.clock()
        self._silence = Silence(lease_seconds=self.feed.lease_seconds, now=self._started_at)
        self._failed_since = self._failed_at = self._started_at
        self._leaving: queue.SimpleQueue[Leave] = queue.SimpleQueue()
        self._gpus: queue.SimpleQueue[GpuReport] = queue.SimpleQueue()
        self._others = OthersWatch()
        self._is_closing = threading.Event()
        self._is_welcome = threading.Event()
        self.leader_ip: str | None = None
        self.run_stage: RunStage = "begun"
        self.stacks = 0
        self.start_order: Start | None = None
        self.verdict: MembershipVerdict | None = None
        self._stage: HostStage = "begun"
        self._said_stage: HostStage = "begun"
        self._unfed_ranks = 0
        self._said_unfed_ranks = 0
        self._has_left = False
        self._unpack = Unpacker(FromCoordinator)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def tell(self, stage: HostStage) -> None:
        """Reports the state of this host's engine commands to the leader; returns at once."""
        self._stage = stage

    def tell_unfed(self, ranks: int) -> None:
        """Reports how many ranks of this host never ask for batches; returns at once."""
        self._unfed_ranks = ranks

    def tell_gpus(self, report: GpuReport) -> None:
        """Sends the load of this host's GPUs to the leader; returns at once."""
        # While the leader does not answer, only the first of them wait.
        if self._gpus.qsize() < _MAX_GPU_REPORTS or report.loads:
            self._gpus.put(report)

    def start(self) -> None:
        self._thread.start()

    def wait_until_welcome(self, timeout_seconds: float) -> bool:
        """False after the timeout."""
        return self._is_welcome.wait(timeout_seconds)

    def leave(
        self, *, exit_code: int | None = None, reason: str = "", is_signalled: bool = False
    ) -> None:
        """Says goodbye; `close` waits until it is sent.

        Args:
            exit_code: Of the host's command; None: a data host, which has none.
            reason: Why; "failed: ..." if it failed. Trainers are told its first line.
            is_signalled: The command was ended as its machine was drained.
        """
        self._leaving.put(
            Leave(
                host=self.join.host,
                incarnation=self.join.incarnation,
                exit_code=exit_code,
                reason=reason[:4000],
                is_signalled=is_signalled,
            )
        )

    def close(self) -> None:
        """Ends the thread; may be called twice. Blocks for about a second at most."""
        self._is_closing.set()
        if self._thread.is_alive():
            self._thread.join(RECONNECT_SECONDS)

    def _run(self) -> None:
        try:
            while not self._is_closing.is_set():
                connection = self._connect()
                if connection is not None:
                    monitor = connection.get_monitor_socket(_MONITORED)
                    try:
                        self._speak(connection, monitor)
                    finally:
                        connection.disable_monitor()
                        monitor.close(linger=0)
                        # Milliseconds for the goodbye to leave.
                        connection.linger = 500
                        connection.close()
                else:
                    self._is_closing.wait(JOIN_SECONDS)
                    self._judge_silence()
        except Exception as err:  # at the edge of a thread, for which the launcher must not wait
            reason = f"membership failed: {err!r}"
            if getattr(err, "errno", None) == errno.EMFILE:
                reason = "membership failed: too many open files; raise their limit (ulimit -n)"
            self._decide(MembershipVerdict(kind="failed", reason=reason))
        finally:
            # Behind all sockets: it waits until they are closed.
            self._context.term()

    def _connect(self) -> "zmq.Socket[bytes] | None":
        addresses = self._resolve()
        if not addresses:
            return None
        # At random, so that the next attempt may try another address.
        self.leader_ip = random.choice(addresses)
        host = f"[{self.leader_ip}]" if ":" in self.leader_ip else self.leader_ip
        connection = self._context.socket(zmq.DEALER)
        secure_client(connection, self.keys, max_message_bytes=MAX_MESSAGE_BYTES)
        connection.connect(f"tcp://{host}:{self.port}")
        return connection

    def _resolve(self) -> Sequence[str]:
        answers: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()

        def look_up() -> None:
            try:
                addresses = socket.getaddrinfo(self.address, self.port, type=socket.SOCK_STREAM)
            except OSError:
                addresses = []
            answers.put([str(address[0]) for *_, address in addresses])

        # In a thread: without a network a resolver blocks for 20 s and more.
        threading.Thread(target=look_up, name="resolve", daemon=True).start()
        while not self._is_closing.is_set():
            try:
                return answers.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                self._judge_silence()
        return ()

    def _speak(self, connection: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        connected_at = self.clock()
        is_member = False
        next_at = connected_at
        while True:
            self._send_waiting(connection, is_member=is_member)
            if self._is_closing.is_set():
                return
            now = self.clock()
            if is_member and self._has_news():
                next_at = now
            if now >= next_at and self._may_beat():
                if is_member:
                    self._send(connection, self._beat())
                    next_at = now + self._beat_seconds
                else:
                    self._send(connection, self.join)
                    next_at = now + JOIN_SECONDS
            if connection.poll(_POLL_MS):
                for message in self._received(connection):
                    heard_at = self.clock()
                    self._silence.hear(heard_at)
                    is_member = self._hear(message, is_member)
                    if is_member:
                        # A Welcome may ask for heartbeats at shorter intervals.
                        next_at = min(next_at, heard_at + self._beat_seconds)
            self._look_at(monitor)
            self.memory.look()
            self._judge_silence()
            # libzmq retries the same address forever; a new connection resolves the name again.
            # The leader answers each heartbeat: two without an answer.
            patience = max(RECONNECT_SECONDS, 2 * self._beat_seconds)
            if self.clock() - max(connected_at, self._silence.heard_at or 0.0) > patience:
                return

    def _send_waiting(self, connection: "zmq.Socket[bytes]", *, is_member: bool) -> None:
        while is_member and not self._gpus.empty():
            self._send(connection, self._gpus.get())
        # Before `_is_closing` is checked: `close` follows `leave`, whose goodbye must be sent.
        if not self._leaving.empty():
            if is_member and self._may_beat():
                # What its memory came to since the last heartbeat: none follows.
                self._send(connection, self._beat())
            self._has_left = True
            self._send(connection, self._leaving.get())

    def _has_news(self) -> bool:
        """Whether the whole run may wait for what this host has not said yet."""
        last_news = (self._said_stage, self._said_unfed_ranks)
        return last_news != (self._stage, self._unfed_ranks)

    def _may_beat(self) -> bool:
        is_refused = self.verdict is not None and self.verdict.kind == "refused"
        return not self._has_left and not is_refused

    def _look_at(self, monitor: "zmq.Socket[bytes]") -> None:
        if not monitor.poll(0):
            return
        if read_event(monitor)[0] == zmq.EVENT_DISCONNECTED:
            # Closed by the leader's side or by libzmq: `end` decides by the time.
            self._silence.end(self.clock())
        else:
            self._judge_key()

    def _beat(self) -> Heartbeat:
        # Before it is sent: if another thread changes it now, that is news again.
        self._said_stage = self._stage
        self._said_unfed_ranks = self._unfed_ranks
        return Heartbeat(
            host=self.join.host,
            incarnation=self.join.incarnation,
            stage=self._said_stage,
            has_start=self.start_order is not None,
            unfed_ranks=self._said_unfed_ranks,
            others=self._others.look(),
            memory=self.memory.peak(),
        )

    def _received(self, connection: "zmq.Socket[bytes]") -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                frames = connection.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # All that have come are read.
                return messages
            try:
                messages.append(self._unpack(frames[0]))
            except ProtocolError as err:
                self.log.event(EventName.MESSAGE_REFUSED, reason=err.what)

    def _hear(self, message: Message, is_member: bool) -> bool:
        match message:
            case Welcome():
                self._beat_seconds = message.beat_seconds
                if not self._is_welcome.is_set():
                    self.log.event(EventName.RUN_JOINED, leader=self.address)
                self._is_welcome.set()
                return True
            case Refused():
                self._decide(MembershipVerdict(kind="refused", reason=message.reason))
            case State() if message.outcome is not None:
                reason = _words_of_outcome(message)
                self._decide(MembershipVerdict(kind="decided", reason=reason, state=message))
            case State() if message.unknown:
                # The leader lost this host, or is a new process: the next message is a Join.
                return False
            case State():
                # Once: the leader repeats its state with each answer.
                is_ending = message.stage == "ending" != self.run_stage
                self.run_stage = message.stage
                self.stacks = message.stacks
                if is_ending:
                    self.on_ending()
            case Start():
                # The first one counts; the next heartbeat confirms it.
                self.start_order = self.start_order or message
        return is_member

    def _judge_key(self) -> None:
        """Decides, after a failed handshake, whether the leader refuses this host's key.

        libzmq only says that the other side hung up, as a proxy does while the leader is not there.
        """
        now = self.clock()
        # Failures in a row count; after a pause the row begins again.
        if now - self._failed_at > _FAILURES_APART_SECONDS:
            self._failed_since = now
        self._failed_at = now
        is_long = now - self._failed_since > KEY_REFUSED_SECONDS
        has_heard = self._silence.heard_at is not None
        if has_heard or not is_long or now - self._looked_at < _POLL_SECONDS:
            return
        self._looked_at = now
        if self.leader_ip is not None and _greets(self.leader_ip, self.port):
            reason = (
                f"{self.address} refuses the key of this host: STOKER_TOKEN_FILE has another "
                "run's token"
            )
            self._decide(MembershipVerdict(kind="refused", reason=reason))

    def _judge_silence(self) -> None:
        now = self.clock()
        stood_still = self._silence.turn(now)
        if stood_still:
            self.log.event(EventName.CLOCK_JUMP, seconds=stood_still)
        heard_at = self._silence.heard_at
        if heard_at is None:
            # Longer than a lease: the leader's image may still be pulled.
            if now - self._started_at > self.feed.start_deadline_seconds:
                limit = self.feed.start_deadline_seconds
                reason = f"the leader {self.address} did not answer within {limit:g} s"
                self._decide(MembershipVerdict(kind="never", reason=reason))
            return
        # Only then is the port dialled, which costs the leader a connection.
        is_late = now - heard_at > LATE_BEATS * self._beat_seconds
        if is_late and now - self._looked_at >= _POLL_SECONDS and self.leader_ip is not None:
            self._looked_at = now
            self._silence.dial(now, is_refused=_refuses(self.leader_ip, self.port))
        if reason := self._silence.reason(now, trainers_heard_at=self.trainers_heard_at()):
            reason = f"the leader {self.address} {reason}"
            self._decide(MembershipVerdict(kind="lost", reason=reason))

    def _decide(self, verdict: MembershipVerdict) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.on_verdict(verdict)

    def _send(self, connection: "zmq.Socket[bytes]", message: Message) -> None:
        try:
            connection.send(pack(message), zmq.NOBLOCK)
        except zmq.ZMQError as err:
            self.log.event(
                EventName.MESSAGE_SEND_FAILED, kind=type(message).__name__, reason=str(err)
            )


def _refuses(address: str, port: int) -> bool | None:
    """Returns whether connections are refused; None if there is no answer within _DIAL_SECONDS."""
    try:
        socket.create_connection((address, port), timeout=_DIAL_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return None
    return False


def _greets(address: str, port: int) -> bool:
    with (
        contextlib.suppress(OSError),
        socket.create_connection((address, port), timeout=_DIAL_SECONDS) as connection,
    ):
        connection.sendall(_GREETING)
        return connection.recv(len(_GREETING)).startswith(_GREETING[:1])
    return False


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """This host's part of a run.

    Attributes:
        folder: Where the command runs, with modules that data hosts may need; None: here.
        keys: Keys of the run; None with one host, or without a token.
    """

    settings: ProcessSettings
    topology: Topology
    environ: Mapping[str, str]
    output: Path
    log: Log
    inbox: Inbox
    keys: Keys | None
    folder: Path | None = None

    @property
    def coordinator_address(self) -> tuple[str, int]:
        named = self.settings.coordinator
        if not named:
            return self.topology.leader, self.settings.feed.port
        host, colon, port = named.rpartition(":")
        if not colon or not port.isdigit():
            raise UsageError(
                f"expected host:port, found {named}", where="variable STOKER_COORDINATOR"
            )
        return host.strip("[]"), int(port)

    @property
    def listen_address(self) -> str:
        """Interface to listen on: all, or loopback if that is what others connect to."""
        advertised = self._advertised or ""
        if advertised == "::1":
            return "[::1]"
        if advertised.startswith("127."):
            return advertised
        return "*"

    @property
    def _advertised(self) -> str | None:
        # In brackets it is an address with a port's colon, and no name that a resolver knows.
        named = self.settings.advertise
        if named:
            return named.strip("[]")
        return None

    def tell_ranks_to_save(self) -> None:
        """Ends the training as SIGTERM to this host does; callable from any thread."""
        self.inbox.put(SignalReceived(signal.SIGTERM, is_of_rule=True))

    def join(self, *, port: int = 0, batch_port: int = 0, workers: int = 0) -> Join:
        return Join(
            protocol=PROTOCOL_VERSION,
            run_id=self.settings.run_id,
            kind="agent" if self.topology.role == "data" else "follower",
            host=self.topology.host,
            group=self.topology.group.name,
            address=self._advertised or self.topology.host,
            port=port,
            batch_port=batch_port,
            workers=workers,
            incarnation=secrets.token_hex(8),
        )

    def tell_failure(self, join: Join, reason: str) -> None:
        """Tells the leader that this host fails before it is a member, or cannot stay one.

        Blocks for FAILURE_SECONDS at most; never raises.
        """
        until = time.monotonic() + FAILURE_SECONDS
        with contextlib.suppress(zmq.ZMQError, OSError):
            membership = self.membership(join)
            membership.start()
            while not membership.wait_until_welcome(0.1) and membership.verdict is None:
                if time.monotonic() > until:
                    break
            membership.leave(reason=reason)
            membership.close()

    def membership(
        self,
        join: Join,
        *,
        trainers_heard_at: Callable[[], float] = lambda: float("-inf"),
        memory: HostMemoryWatch | None = None,
    ) -> Membership:
        """Returns this host's membership, whose verdict arrives as `Decided` in the inbox.

        Args:
            join: How it introduces itself.
            trainers_heard_at: See `Membership`.
            memory: What looks at this host's memory; None: its own.
        """
        assert self.keys is not None
        address, port = self.coordinator_address
        return Membership(
            join=join,
            keys=self.keys,
            address=address,
            port=port,
            feed=self.settings.feed,
            log=self.log,
            on_verdict=lambda verdict: self.inbox.put(Decided(verdict.reason)),
            on_ending=self.tell_ranks_to_save if self.topology.role == "dnn" else lambda: None,
            trainers_heard_at=trainers_heard_at,
            memory=memory or HostMemoryWatch(),
        )


def keys_of(settings: ProcessSettings, topology: Topology, log: Log) -> Keys | None:
    """Returns the run's keys if it has more than one host.

    Raises:
        UsageError: If there is a data group and no token.
    """
    if len(topology.hosts) == 1:
        return None
    if settings.token_file:
        keys = Keys.from_token(read_token(settings.token_file))
        if os.stat(settings.token_file).st_mode & stat.S_IWOTH:
            log.event(
                EventName.TOKEN_EXPOSED,
                file=str(settings.token_file),
                text="any user of this host can change the run's token: set its mode to 600",
            )
        return keys
    if topology.data_hosts:
        raise UsageError(
            "a run with a data group needs a token, which authenticates its hosts",
            where="variable STOKER_TOKEN_FILE",
            fix="give all hosts the same file of 64 hexadecimal digits",
        )
    log.event(
        EventName.TOKEN_MISSING, note="a lost host is noticed only by the collective's timeout"
    )
    return None
