"""A launcher is a member of a run: it joins, sends heartbeats, and learns how the run ended.

Three things can be behind a leader's silence. Its host is gone, or the network: the lease tells,
which is long. Its launcher has ended: nobody listens at its port, which tells within seconds, for
no launcher starts again in the same run. Or it hangs (a live migration, SIGSTOP): then the
trainers of the run go on, and a data host that serves one has a sign of life.
"""

import queue
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq

from stoker.errors import ProtocolError, UsageError
from stoker.feed.wire.crypto import Keys, read_event, read_token, secure_client
from stoker.feed.wire.protocol import (
    PROTOCOL_VERSION,
    FromCoordinator,
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
from stoker.launch.host_leases import LATE_BEATS, heartbeat_seconds
from stoker.launch.supervise import Inbox
from stoker.launch.topology import Topology
from stoker.logs import EventName, Log
from stoker.records import FeedSettings
from stoker.settings import ProcessSettings

# Where connections to a silent leader are refused for so long, its launcher has ended.
REFUSED_SECONDS = 5.0
# Where a connection was ended by the leader's side (its container is gone, and said so on the
# way), and nobody answers for so long.
ENDED_SECONDS = 12.0
# A connection that ends so soon after a message was ended by the other side: libzmq itself gives up
# a silent one after 15 s.
_ALIVE_SECONDS = 9.0
# A turn of the loop takes a fraction of a second: after a longer one this process had hung,
# and what the leader sent meanwhile is still to be read.
STANDSTILL_SECONDS = 2.0
# A join is repeated, and a silent connection made anew, after this long.
JOIN_SECONDS = 0.5
RECONNECT_SECONDS = 3.0
# How often the port of a silent leader is tried.
_POLL_SECONDS = 1.0
# The thread that sends the heartbeats waits for the attempt, so that it is short.
_DIAL_SECONDS = 0.3
_POLL_MS = 50


class Silence:
    """Tells how long a leader has been silent, and what that means.

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
        """Notes a turn of the loop; it must be called at each.

        Returns:
            For how many seconds this process hung, which counts for nothing; else 0.
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
        """Says why the leader is lost, as the end of a sentence about it; empty: it is not.

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
        # Silence, too, and not only refusals: it also counts from the trainers' last sign of life.
        if min(silent, refused) > REFUSED_SECONDS:
            return "has no launcher any more: it ended without a word"
        ended = 0.0 if self._ended_at is None else now - self._ended_at
        if min(silent, ended) > ENDED_SECONDS:
            return "has ended its connection, and nobody answers there any more"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipVerdict:
    """The verdict says why this launcher has to end.

    Attributes:
        kind: decided: the leader said how the run ended; lost: it was silent for longer than the
            lease, or its launcher has ended; never: it did not answer before the start deadline;
            refused: it does not want this host.
        state: What the leader said, where it decided.
    """

    kind: Literal["decided", "lost", "never", "refused"]
    reason: str
    state: State | None = None


class Membership:
    """Keeps a launcher's lease at the coordinator, in a thread of its own.

    Args:
        join: What this host says of itself; see `new_incarnation`.
        keys: Keys of the run.
        address: Name or address of the leader; a name is resolved anew at each reconnect.
        port: Port of its coordinator.
        feed: Lease and start deadline.
        log: Log of this host.
        on_verdict: Called once, in the thread, when this launcher has to end.
        trainers_heard_at: Returns when this host last had a sign of life of a trainer, monotonic
            seconds: while it serves one, a silent leader hangs and is not lost.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        join: Join,
        keys: Keys,
        address: str,
        port: int,
        feed: FeedSettings,
        log: Log,
        on_verdict: Callable[[MembershipVerdict], None],
        trainers_heard_at: Callable[[], float] = lambda: float("-inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._join = join
        self._keys = keys
        self._address = address
        self._port = port
        self._feed = feed
        self._log = log
        self._on_verdict = on_verdict
        self._trainers_heard_at = trainers_heard_at
        self._clock = clock
        self._beat_seconds = heartbeat_seconds(feed.lease_seconds)
        self._started_at = self._looked_at = clock()
        self._silence = Silence(lease_seconds=feed.lease_seconds, now=self._started_at)
        self._leaving: queue.SimpleQueue[Leave] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._is_welcome = threading.Event()
        self._start: Start | None = None
        self._verdict: MembershipVerdict | None = None
        self._stage: HostStage = "begun"
        self._said_stage: HostStage = "begun"
        self._run_stage: RunStage = "begun"
        self._unfed_ranks = 0
        self._said_unfed_ranks = 0
        self._has_left = False
        self._leader_ip: str | None = None
        self._unpack = Unpacker(FromCoordinator)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    @property
    def leader_ip(self) -> str | None:
        """Returns the leader's address as last resolved."""
        return self._leader_ip

    @property
    def run_stage(self) -> RunStage:
        """Returns how far the engine's commands are, as the leader last said."""
        return self._run_stage

    def tell(self, stage: HostStage) -> None:
        """Tells the leader how far this host is with the engine's commands; returns at once."""
        self._stage = stage

    def tell_unfed(self, ranks: int) -> None:
        """Tells the leader that none of so many ranks here asks for batches; returns at once."""
        self._unfed_ranks = ranks

    @property
    def start_order(self) -> Start | None:
        """Returns what the leader told this follower to start; None until it has said so."""
        return self._start

    def start(self) -> None:
        """Begins to join."""
        self._thread.start()

    def wait_until_welcome(self, timeout_seconds: float) -> bool:
        """Waits until the coordinator lets this launcher in; False after `timeout_seconds`."""
        return self._is_welcome.wait(timeout_seconds)

    def leave(self, *, exit_code: int | None = None, reason: str = "") -> None:
        """Says goodbye; `close` sees to it that it gets out."""
        goodbye = Leave(
            host=self._join.host,
            incarnation=self._join.incarnation,
            exit_code=exit_code,
            reason=reason[:4000],
        )
        self._leaving.put(goodbye)

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
                    monitor = connection.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                    try:
                        self._speak(connection, monitor)
                    finally:
                        connection.disable_monitor()
                        monitor.close(linger=0)
                        connection.linger = 500
                        connection.close()
                else:
                    self._is_closing.wait(JOIN_SECONDS)
                    self._judge_silence()
        except Exception as err:  # the edge of a thread: the launcher must not wait for it
            self._decide(MembershipVerdict(kind="lost", reason=f"membership failed: {err!r}"))
        finally:
            self._context.term()

    def _connect(self) -> "zmq.Socket[bytes] | None":
        found = self._resolve()
        if not found:
            return None
        # Any of them may be the one that works, so that the next attempt takes another.
        self._leader_ip = random.choice(found)
        host = f"[{self._leader_ip}]" if ":" in self._leader_ip else self._leader_ip
        connection = self._context.socket(zmq.DEALER)
        secure_client(connection, self._keys, max_message_bytes=MAX_MESSAGE_BYTES)
        connection.connect(f"tcp://{host}:{self._port}")
        return connection

    def _resolve(self) -> Sequence[str]:
        """Returns the leader's addresses; none while its name is not known."""
        answers: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()

        def look_up() -> None:
            try:
                found = socket.getaddrinfo(self._address, self._port, type=socket.SOCK_STREAM)
            except OSError:
                found = []
            answers.put([str(address[0]) for *_, address in found])

        # In a thread: without a network a resolver blocks for 20 s and more, and neither a verdict
        # nor the end may wait for that.
        threading.Thread(target=look_up, name="resolve", daemon=True).start()
        while not self._is_closing.is_set():
            try:
                return answers.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                self._judge_silence()
        return ()

    def _speak(self, connection: "zmq.Socket[bytes]", monitor: "zmq.Socket[bytes]") -> None:
        """Speaks over one connection until it falls silent, the run ends, or `close`."""
        connected_at = self._clock()
        is_member = False
        next_at = connected_at
        while True:
            # Before the look at `_is_closing`: `leave` and `close` follow each other, and the
            # goodbye has to get out.
            if not self._leaving.empty():
                self._has_left = True
                self._send(connection, self._leaving.get())
            if self._is_closing.is_set():
                return
            now = self._clock()
            # The whole run waits for the last host to say it: not at the next heartbeat.
            if is_member and self._has_news:
                next_at = now
            if now >= next_at and not self._has_left and not self._is_refused():
                self._send(connection, self._beat() if is_member else self._join)
                next_at = now + (self._beat_seconds if is_member else JOIN_SECONDS)
            if connection.poll(_POLL_MS):
                for message in self._received(connection):
                    heard_at = self._clock()
                    self._silence.hear(heard_at)
                    is_member = self._hear(message, is_member)
                    if is_member:
                        next_at = min(next_at, heard_at + self._beat_seconds)
            if monitor.poll(0):
                read_event(monitor)
                # By the leader's side, or given up by libzmq: `end` tells them apart by the time.
                self._silence.end(self._clock())
            self._judge_silence()
            # libzmq would dial the same address for ever; a new connection resolves the name again.
            patience = max(RECONNECT_SECONDS, 2 * self._beat_seconds)
            if self._clock() - max(connected_at, self._silence.heard_at or 0.0) > patience:
                return

    @property
    def _has_news(self) -> bool:
        said = (self._said_stage, self._said_unfed_ranks)
        return said != (self._stage, self._unfed_ranks)

    def _beat(self) -> Heartbeat:
        self._said_stage, self._said_unfed_ranks = self._stage, self._unfed_ranks
        return Heartbeat(
            host=self._join.host,
            incarnation=self._join.incarnation,
            stage=self._said_stage,
            has_start=self._start is not None,
            unfed_ranks=self._said_unfed_ranks,
        )

    def _is_refused(self) -> bool:
        return self._verdict is not None and self._verdict.kind == "refused"

    def _received(self, connection: "zmq.Socket[bytes]") -> list[Message]:
        messages: list[Message] = []
        while True:
            try:
                frames = connection.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._unpack(frames[0]))
            except ProtocolError as err:
                self._log.event(EventName.MESSAGE_REFUSED, reason=err.what)

    def _hear(self, message: Message, is_member: bool) -> bool:
        match message:
            case Welcome():
                self._beat_seconds = message.beat_seconds
                if not self._is_welcome.is_set():
                    self._log.event(EventName.RUN_JOINED, leader=self._address)
                self._is_welcome.set()
                return True
            case Refused():
                self._decide(MembershipVerdict(kind="refused", reason=message.reason))
            case State() if message.outcome is not None:
                why = message.reason.partition("\n")[0]
                what = f"training {message.outcome}"
                if message.outcome == "released":
                    what = "training goes on without data hosts"
                reason = f"the {what}" + (f": {why}" if why else "")
                self._decide(MembershipVerdict(kind="decided", reason=reason, state=message))
            case State() if message.unknown:
                # The leader has given this host up, or is a new one: the next message is a Join.
                return False
            case State():
                self._run_stage = message.stage
            case Start():
                # The first one counts; the next heartbeat says that it is here.
                self._start = self._start or message
            case _:
                pass
        return is_member

    def _judge_silence(self) -> None:
        now = self._clock()
        stood_still = self._silence.turn(now)
        if stood_still:
            self._log.event(EventName.CLOCK_JUMP, seconds=stood_still)
        heard_at = self._silence.heard_at
        if heard_at is None:
            if now - self._started_at > self._feed.start_deadline_seconds:
                limit = self._feed.start_deadline_seconds
                reason = f"the leader {self._address} did not answer within {limit:g} s"
                self._decide(MembershipVerdict(kind="never", reason=reason))
            return
        is_late = now - heard_at > LATE_BEATS * self._beat_seconds
        if is_late and now - self._looked_at >= _POLL_SECONDS and self._leader_ip is not None:
            self._looked_at = now
            self._silence.dial(now, is_refused=_refuses(self._leader_ip, self._port))
        reason = self._silence.reason(now, trainers_heard_at=self._trainers_heard_at())
        if reason:
            self._decide(
                MembershipVerdict(kind="lost", reason=f"the leader {self._address} {reason}")
            )

    def _decide(self, verdict: MembershipVerdict) -> None:
        if self._verdict is None:
            self._verdict = verdict
            self._on_verdict(verdict)

    def _send(self, connection: "zmq.Socket[bytes]", message: Message) -> None:
        try:
            connection.send(pack(message), zmq.NOBLOCK)
        except zmq.ZMQError as err:
            self._log.event(
                EventName.MESSAGE_SEND_FAILED, kind=type(message).__name__, reason=str(err)
            )


def _refuses(address: str, port: int) -> bool | None:
    """Returns whether connections are refused there; None if nobody answers.

    Blocks for _DIAL_SECONDS at most.
    """
    try:
        socket.create_connection((address, port), timeout=_DIAL_SECONDS).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return None
    return False


def new_incarnation() -> str:
    """Returns a name for this life of a launcher."""
    return secrets.token_hex(8)


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """Describes this host's part of a run.

    Attributes:
        output: Folder for timelines, failures and the record; only dnn hosts have it.
        folder: Where the command runs, with modules that data hosts may need, too; None: here.
        inbox: Where signals and decisions come in.
        keys: Keys of the run; None where it has one host, or no token.
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
        """Returns where the coordinator listens: name and port."""
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
        """Returns the interface to listen on: all, or loopback where others are told that."""
        advertised = self.settings.advertise or ""
        return advertised if advertised.startswith("127.") else "*"

    def join(self, *, port: int = 0, batch_port: int = 0, workers: int = 0) -> Join:
        """Returns the message with which this host joins the coordinator."""
        return Join(
            protocol=PROTOCOL_VERSION,
            run_id=self.settings.run_id,
            kind="agent" if self.topology.role == "data" else "follower",
            host=self.topology.host,
            group=self.topology.group.name,
            address=self.settings.advertise or self.topology.host,
            port=port,
            batch_port=batch_port,
            workers=workers,
            incarnation=new_incarnation(),
        )


def keys_of(settings: ProcessSettings, topology: Topology, log: Log) -> Keys | None:
    """Returns the run's keys, where more than one host takes part.

    Raises:
        UsageError: If there is a data group and no token.
    """
    if len(topology.hosts) == 1:
        return None
    if settings.token_file:
        return Keys.from_token(read_token(settings.token_file))
    if topology.data_hosts:
        raise UsageError(
            "a run with a data group needs a token, so that nobody else is let in",
            where="variable STOKER_TOKEN_FILE",
            fix="give all hosts the same file of 64 hexadecimal digits",
        )
    log.event(
        EventName.TOKEN_MISSING, note="a lost host is only noticed by the collective's time-out"
    )
    return None
