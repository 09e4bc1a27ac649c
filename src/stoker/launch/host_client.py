"""This host's part of a run, and the thread in which its launcher talks with the run's server.

The thread says every second all that is so about this host (`HostState`) and keeps the answer
(`RunState`). A leader that is silent for `feed.lease_seconds` is lost.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import zmq
from msgspec.structs import replace

from stoker.environment import ProcessSettings
from stoker.errors import ProtocolError, UsageError
from stoker.feed.engine.crypto import Keys, read_token, secure_client
from stoker.feed.engine.run_messages import (
    PROTOCOL_VERSION,
    HostEnd,
    HostState,
    MemoryPeak,
    RunState,
    Unpacker,
    pack,
)
from stoker.host import machine
from stoker.host.gpus import GpuState
from stoker.host.processes import with_port
from stoker.host.usage import MemoryUse, memory_use
from stoker.launch.process import Decided, DecisionKind, Inbox
from stoker.launch.topology import Topology
from stoker.logs import EventName, Log

# The answer has what is new of the run. Several fit into a lease, so that a busy machine does not
# end it.
BEAT_SECONDS = 1.0
# What listens at the leader's port refuses this host for so long: it has another token, or is
# another program.
REFUSED_SECONDS = 20.0
# For a leader that is to hear of a failure; one that comes later waits for its start deadline.
FAILURE_SECONDS = 30.0
_POLL_MS = 50
_REFUSED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_Socket = zmq.Socket[bytes]
_unpack = Unpacker(RunState)


class MemoryWatch:
    """Highest use of this host's memory, of looks once a second."""

    def __init__(self) -> None:
        # The control group may be older than this run.
        self._kills_before = machine.num_memory_kills() or 0
        self._highest: MemoryUse | None = None

    def look(self) -> MemoryPeak:
        """Returns what was highest so far, and the use now."""
        now = memory_use()
        # By share, as the nearest limit may be another one later.
        if self._highest is None or now.share > self._highest.share:
            self._highest = now
        return MemoryPeak(
            limit_bytes=self._highest.limit_bytes,
            peak_bytes=self._highest.used_bytes,
            used_bytes=now.used_bytes,
            kills=max(0, (machine.num_memory_kills() or 0) - self._kills_before),
        )


@dataclass(frozen=True, kw_only=True)
class HostRun:
    """This host's part of a run.

    Attributes:
        keys: Keys of the run; None: this is the only host.
        folder: Where the command runs, with modules that data hosts may need; None: here.
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
    def leader_address(self) -> tuple[str, int]:
        named = self.settings.coordinator
        if not named:
            return self.topology.leader, self.settings.feed.port
        host, _, port = named.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def listen_address(self) -> str:
        """Interface to listen on: all, or loopback if that is what others connect to."""
        own = (self.settings.advertise or "").strip("[]")
        if own == "::1":
            return "[::1]"
        return own if own.startswith("127.") else "*"


class HostClient:
    """The thread that talks with the run's server; what it decides is put into the run's inbox.

    Args:
        port: Of this host's agent, like `batch_port`; 0: it has none.
        gpus: Returns the means of this host's GPUs since the last call.

    Attributes:
        run: What was heard last of the run.
        welcome: Set by the leader's first answer, unless it refuses this host.
        verdict: Why this launcher must end; None while it may run.
    """

    def __init__(
        self,
        host: HostRun,
        *,
        port: int = 0,
        batch_port: int = 0,
        workers: int = 0,
        gpus: Callable[[], tuple[GpuState, ...]] = tuple,
    ) -> None:
        self.run = RunState()
        self.welcome = threading.Event()
        self.verdict: Decided | None = None
        self._state = HostState(
            protocol=PROTOCOL_VERSION,
            host=host.topology.host,
            address=(host.settings.advertise or host.topology.host).strip("[]"),
            port=port,
            batch_port=batch_port,
            workers=workers,
            incarnation=secrets.token_hex(8),
        )
        self._host = host
        self._leader = with_port(*host.leader_address)
        self._gpus = gpus
        self._gpu_means: tuple[GpuState, ...] = ()
        self._memory = MemoryWatch()
        self._started_at = time.monotonic()
        self._due_at = 0.0
        self._heard_at: float | None = None
        self._refused_at: float | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._talk, name="host-client", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def tell(self, **changes: object) -> None:
        """Changes fields of this host's state, which the leader hears at once; returns at once."""
        self._state = replace(self._state, **changes)
        self._due_at = 0.0

    def close(self) -> None:
        """Ends the thread behind its last state; may be called twice. Blocks for 3 s at most."""
        self._is_closing = True
        if self._thread.is_alive():
            self._thread.join(3.0)

    def _talk(self) -> None:
        keys = self._host.keys
        assert keys is not None
        try:
            with zmq.Context() as context, context.socket(zmq.DEALER) as connection:
                secure_client(connection, keys)
                # States are said again: none waits for a connection. libzmq dials again by itself,
                # and resolves the leader's name each time.
                connection.immediate = True
                connection.connect_timeout = 3000
                connection.reconnect_ivl = 500
                monitor = connection.get_monitor_socket(_REFUSED)
                connection.connect(f"tcp://{self._leader}")
                while not self._is_closing:
                    self._turn(connection, monitor)
                self._say(connection)
                connection.disable_monitor()
                monitor.close(linger=0)
                # For the last state to leave.
                connection.linger = 500
        except Exception as err:  # at the edge of a thread, for which the launcher must not wait
            self._decide("lost", f"the leader cannot be asked: {err!r}")

    def _turn(self, connection: _Socket, monitor: _Socket) -> None:
        if time.monotonic() >= self._due_at:
            self._say(connection)
        # Before it is judged: what came while this process stood still counts.
        while connection.poll(_POLL_MS):
            self._hear(connection.recv())
        while monitor.poll(0):
            monitor.recv_multipart()
            # A handshake failed: of those in a row the first one counts.
            self._refused_at = self._refused_at or time.monotonic()
        if self.verdict is None:
            self._judge(time.monotonic())

    def _say(self, connection: _Socket) -> None:
        lease = self._host.settings.feed.lease_seconds
        self._due_at = time.monotonic() + min(BEAT_SECONDS, lease / 4)
        self._gpu_means = self._gpus() or self._gpu_means
        state = replace(self._state, memory=self._memory.look(), gpus=self._gpu_means)
        # Without a connection it is said when it is due again.
        with contextlib.suppress(zmq.Again):
            connection.send(pack(state), zmq.NOBLOCK)

    def _hear(self, packed: bytes) -> None:
        try:
            run = _unpack(packed)
        except ProtocolError as err:
            run = RunState(refusal=err.what)
        assert isinstance(run, RunState)
        self._heard_at = time.monotonic()
        self._refused_at = None
        self.run = run
        if not run.refusal and not self.welcome.is_set():
            self._host.log.event(EventName.RUN_JOINED, leader=self._leader)
            self.welcome.set()

    def _judge(self, now: float) -> None:
        """Decides whether this launcher must end."""
        run = self.run
        leader = f"the leader {self._leader}"
        limit = self._host.settings.feed.start_deadline_seconds
        lease = self._host.settings.feed.lease_seconds
        if run.refusal:
            self._decide("refused", f"the leader refuses it: {run.refusal}")
        elif run.outcome is not None:
            why = run.reason.partition("\n")[0]
            self._decide("decided", f"the training {run.outcome}" + (f": {why}" if why else ""))
        elif self._heard_at is not None:
            if now - self._heard_at > lease:
                self._decide("lost", f"{leader} was silent for more than {lease:g} s")
        # Longer than a lease: the leader's image may still be pulled.
        elif now - self._started_at > limit:
            self._decide("refused", f"{leader} did not answer within {limit:g} s")
        elif self._refused_at is not None and now - self._refused_at > REFUSED_SECONDS:
            self._decide(
                "refused",
                f"what listens at {self._leader} refuses this host: the leader has another "
                "run's token, or another program has its port (feed.port)",
            )

    def _decide(self, kind: DecisionKind, reason: str) -> None:
        self.verdict = self.verdict or Decided(reason, kind=kind)
        self._host.inbox.put(self.verdict)


def tell_failure(run: HostRun, reason: str) -> None:
    """Tells the leader that this host fails before it has joined.

    Blocks for FAILURE_SECONDS at most; never raises.
    """
    client = HostClient(run)
    client.tell(end=HostEnd(reason=reason))
    client.start()
    client.welcome.wait(FAILURE_SECONDS)
    client.close()


def keys_of(settings: ProcessSettings, topology: Topology) -> Keys | None:
    """Returns the run's keys; None: it has one host.

    Raises:
        UsageError: If it has several, and no token.
    """
    if len(topology.dnn_hosts + topology.data_hosts) == 1:
        return None
    if settings.token_file:
        return Keys.from_token(read_token(settings.token_file))
    raise UsageError(
        "a run of several hosts needs a token, which authenticates them",
        where="the folder of STOKER_RUN",
        fix="start it by `stoker train`, or give all hosts the same run.json, with a file `token` "
        "of 64 hexadecimal digits beside it",
    )
