"""The coordinator, a thread of the leader's launcher in runs with more than one host.

Launchers join and send heartbeats, ranks get the roster (`launch.roster`). In the end each launcher
gets the outcome, so that no host waits for a lease. A rank may be several processes: a child of the
trainer has the same RANK, may have its own loader, and needs the roster, too.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import zmq

from stoker.errors import PlatformError, ProtocolError
from stoker.feed.wire.crypto import (
    HEARTBEAT_TIMEOUT_SECONDS,
    AllowList,
    HandshakeGuard,
    Keys,
    RejectionLog,
    secure_server,
)
from stoker.feed.wire.protocol import (
    MAX_START_ARGUMENTS,
    PROTOCOL_VERSION,
    Attend,
    GpuReport,
    Heartbeat,
    Join,
    Leave,
    Message,
    Progress,
    Refused,
    RunStage,
    Start,
    State,
    ToCoordinator,
    Unpacker,
    pack,
)
from stoker.host.gpus import GpuState
from stoker.launch.host_memory import MemoryLog
from stoker.launch.other_programs import OthersLog
from stoker.launch.roster import Change, ExpectedHosts, HostLeases
from stoker.logs import EventName, Log, now_utc
from stoker.records import Event
from stoker.records.gpu import GpuLoads, loads_in
from stoker.records.training import EndState
from stoker.repeat import Clock

# Processes of one rank, more than any training run has; above it the longest silent one is dropped.
MAX_PROCESSES = 64
# Ranks report once a second: a process that is silent for longer has ended or restarted.
RANK_TIMEOUT_SECONDS = 5.0
# Followers report their GPUs every few seconds: an older report says nothing of now.
GPU_TIMEOUT_SECONDS = 30.0
# Messages to the coordinator are small; a larger one closes the connection.
MAX_MESSAGE_BYTES = 64 << 10
BIND_SECONDS = 10.0
# After the outcome: for goodbyes, and for hosts that start late and else wait for a deadline.
GOODBYE_SECONDS = 10.0
STRAGGLER_SECONDS = 15.0
_POLL_MS = 100
# A loop iteration takes a fraction of a second; in a longer one the process was suspended.
_STANDSTILL_SECONDS = 2.0
_POLL_SECONDS = 1.0
_MAX_WARNED = 1000


class Attendance:
    """Connections of each rank, and its last report."""

    def __init__(self) -> None:
        # Connections of each rank; the one heard last comes last.
        self._senders: dict[int, dict[bytes, None]] = {}
        self._reports: dict[int, tuple[bytes, float, Progress]] = {}

    @property
    def progress(self) -> dict[int, Progress]:
        # Copied atomically: other threads read while the coordinator's thread adds ranks.
        return {rank: message for rank, (_, _, message) in self._reports.copy().items()}

    def senders(self) -> tuple[bytes, ...]:
        return tuple(chain.from_iterable(self._senders.values()))

    def attend(self, rank: int, sender: bytes) -> None:
        senders = self._senders.setdefault(rank, {})
        # Moved to the end, so that the first one has been silent for longest.
        senders.pop(sender, None)
        senders[sender] = None
        if len(senders) > MAX_PROCESSES:
            del senders[next(iter(senders))]

    def forget(self, sender: bytes) -> None:
        for senders in self._senders.values():
            senders.pop(sender, None)

    def report(self, sender: bytes, message: Progress, *, now: float) -> None:
        """Keeps a report, unless another process of the same rank is ahead of its sender."""
        senders = self._senders.get(message.rank, {})
        if sender in senders:
            del senders[sender]
            senders[sender] = None
        kept = self._reports.get(message.rank)
        if kept is not None:
            teller, told_at, last = kept
            # A forked child has the same rank: the process with more steps is the trainer.
            is_ahead = teller != sender and last.steps > message.steps
            if is_ahead and now - told_at <= RANK_TIMEOUT_SECONDS:
                return
        self._reports[message.rank] = (sender, now, message)


class ReportedGpus:
    """Samples of the other dnn hosts' GPUs, and in the end their loads, by host."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[float, tuple[GpuState, ...]]] = {}
        self._loads: dict[str, GpuLoads] = {}

    @property
    def loads(self) -> GpuLoads:
        # Copied atomically, here and below: other threads read while the coordinator's adds hosts.
        return tuple(chain.from_iterable(self._loads.copy().values()))

    def states(self, *, now: float) -> dict[str, tuple[GpuState, ...]]:
        """Returns each host's latest samples, if they are not older than GPU_TIMEOUT_SECONDS."""
        # A host that is gone has no load: its last sample is not shown for ever.
        since = now - GPU_TIMEOUT_SECONDS
        reports = self._states.copy().items()
        return {host: states for host, (told_at, states) in reports if told_at > since}

    def add(self, message: GpuReport, *, now: float) -> None:
        """Keeps a host's report; raises msgspec.DecodeError if its loads cannot be read."""
        self._states[message.host] = (now, message.states)
        if message.loads:
            self._loads[message.host] = loads_in(message.loads)


class GoneAgents:
    """Data hosts that have left or were lost: why, and when."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        # Of each host's last goodbye or loss, also if it has come back since.
        self._ended_at: dict[str, float] = {}

    def note(self, change: Change, *, now: float) -> None:
        if change.what in ("left", "lost"):
            self._ended_at[change.host] = now
            self.reasons[change.host] = change.reason or change.what
        else:
            # It is back.
            self.reasons.pop(change.host, None)

    def seconds_after(self, moment: float) -> float | None:
        """Returns how long after a moment the last one ended; None if none has ended."""
        if not self._ended_at:
            return None
        return max(0.0, max(self._ended_at.values()) - moment)


class CoordinatorOutbox:
    """What other threads want the coordinator to send.

    They only fill queues and set values here: ZeroMQ's sockets belong to the coordinator's thread,
    which looks at this in each iteration.

    Attributes:
        starts: Hosts whose daemon is to be started.
        ends: The outcome; only the first one counts.
        releases: Reasons why data hosts may leave while the training continues.
        stage: Stage of the engine's commands.
        stacks: How often the stacks of all ranks were asked for.
    """

    def __init__(self) -> None:
        self.starts: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.ends: queue.SimpleQueue[State] = queue.SimpleQueue()
        self.releases: queue.SimpleQueue[State] = queue.SimpleQueue()
        self.stage: RunStage = "begun"
        self.stacks = 0

    def state(self) -> State:
        """Returns the state that all launchers know, or are to be told."""
        return State(stage=self.stage, stacks=self.stacks)


class Coordinator:
    """Server for launchers and ranks of one run.

    Args:
        on_failure: Called in the coordinator's thread if a follower failed, was lost or did not
            come.
        straggler_seconds: How long after the end absent hosts are waited for.
    """

    def __init__(
        self,
        *,
        keys: Keys,
        expected: ExpectedHosts,
        log: Log,
        address: str,
        port: int,
        on_failure: Callable[[Change], None],
        straggler_seconds: float = STRAGGLER_SECONDS,
        clock: Clock = time.monotonic,
    ) -> None:
        self._keys = keys
        self._straggler_seconds = straggler_seconds
        self._run_id = expected.run_id
        self._log = log
        self._port = port
        self._endpoint = f"tcp://{address}:{port}"
        self._on_failure = on_failure
        self._clock = clock
        self._lease_seconds = expected.lease_seconds
        self._turned_at = self._looked_at = clock()
        self._members = HostLeases(expected, now=clock())
        self.expected_agents = frozenset(expected.agents)
        self._launchers: dict[str, bytes] = {}
        self._ranks = Attendance()
        self._gpus = ReportedGpus()
        # What other programs use of the hosts.
        self.others = OthersLog()
        self.memory = MemoryLog()
        self._warned: set[bytes] = set()
        self._events: list[Event] = []
        self._followers = frozenset(expected.followers)
        self._starts: dict[str, Start] = {}
        self._outbox = CoordinatorOutbox()
        self._announced = self._outbox.state()
        self._end: State | None = None
        self._ended_at = 0.0
        self._released: State | None = None
        self._gone_agents = GoneAgents()
        self._is_closing = threading.Event()
        self._unpack = Unpacker(ToCoordinator)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread: threading.Thread | None = None

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._events)

    @property
    def progress(self) -> dict[int, Progress]:
        return self._ranks.progress

    @property
    def gpu_states(self) -> dict[str, tuple[GpuState, ...]]:
        """The latest samples of the other dnn hosts' GPUs, by host."""
        return self._gpus.states(now=self._clock())

    @property
    def gpu_loads(self) -> GpuLoads:
        """Loads of the GPUs of the dnn hosts whose commands have ended, without the leader's."""
        return self._gpus.loads

    @property
    def live_agents(self) -> frozenset[str]:
        return self.expected_agents & set(self._members.live)

    @property
    def unready(self) -> tuple[str, ...]:
        return self._members.unready

    @property
    def gone_agents(self) -> dict[str, str]:
        return dict(self._gone_agents.reasons)

    @property
    def unfed_ranks(self) -> int:
        return self._members.unfed_ranks

    @property
    def release_seconds(self) -> float | None:
        """Seconds from the outcome to the last data host's goodbye; None until all have said it."""
        if self._end is None or self.live_agents:
            return None
        return self._gone_agents.seconds_after(self._ended_at)

    def start(self) -> None:
        """Serves in a thread; raises PlatformError if the port is in use for BIND_SECONDS."""
        allow_list = AllowList(self._context, self._keys)
        socket = self._context.socket(zmq.ROUTER)
        try:
            secure_server(
                socket,
                self._keys,
                max_message_bytes=MAX_MESSAGE_BYTES,
                # Connections end with their processes or leases.
                silence_seconds=max(self._lease_seconds, HEARTBEAT_TIMEOUT_SECONDS),
            )
            # Sending to a connection that has ended is then an error, so that ranks are forgotten.
            socket.router_mandatory = True
            self._bind(socket)
        except BaseException:
            allow_list.close()
            socket.close()
            self._context.term()
            raise
        self._log.event(EventName.COORDINATOR_LISTENING, endpoint=self._endpoint)
        rejections = RejectionLog(self._log, port=self._port)
        guard = HandshakeGuard(socket, rejections, port=self._port, allow_list=allow_list)
        self._thread = threading.Thread(
            target=self._serve, args=(socket, allow_list, guard), name="coordinator", daemon=True
        )
        self._thread.start()

    def end(self, outcome: EndState, *, exit_code: int | None, reason: str) -> None:
        """Announces the outcome to every launcher; returns at once, only the first call counts."""
        # At most 16 kB in UTF-8: a message above MAX_MESSAGE_BYTES would close the connection.
        self._outbox.ends.put(State(outcome=outcome, exit_code=exit_code, reason=reason[:4000]))

    def release_agents(self, reason: str) -> None:
        """Ends all data hosts while the training continues; returns at once."""
        self._outbox.releases.put(State(outcome="released", reason=reason[:4000]))

    def announce(self, stage: RunStage) -> None:
        """Announces the state of the engine's commands to every launcher; returns at once."""
        self._outbox.stage = stage

    def ask_for_stacks(self) -> None:
        """Asks the other dnn hosts for the stacks of their ranks; returns at once."""
        self._outbox.stacks += 1

    def start_daemon(self, host: str, arguments: Sequence[str]) -> str:
        """Makes a follower start mpirun's daemon, once it has joined; returns why it cannot.

        Returns at once; callable from any thread. Once per host: a daemon's end ends the run.
        """
        if host not in self._followers:
            return f"{host} is not a dnn host of this run, or it is the leader"
        if host in self._starts:
            return f"{host} has a daemon already"
        if len(arguments) > MAX_START_ARGUMENTS:
            return f"the daemon has {len(arguments)} arguments, at most {MAX_START_ARGUMENTS}"
        self._starts[host] = Start(arguments=tuple(arguments))
        self._outbox.starts.put(host)
        return ""

    def followers(self, *, live_only: bool) -> tuple[str, ...]:
        """Returns dnn hosts neither done nor lost; without `live_only` also those still to come."""
        members = self._members
        if live_only:
            return members.live_followers()
        return members.awaited_followers()

    def close(self) -> None:
        """Ends the thread; after `end`, when all have said goodbye or their time is over."""
        if self._thread is None:
            return
        self._is_closing.set()
        # Longer than `_is_done` takes: for a thread that hangs.
        self._thread.join(self._straggler_seconds + GOODBYE_SECONDS)
        self._thread = None

    def _bind(self, socket: "zmq.Socket[bytes]") -> None:
        deadline = self._clock() + BIND_SECONDS
        while True:
            try:
                socket.bind(self._endpoint)
                return
            except zmq.ZMQError as err:
                if self._clock() > deadline or err.errno != zmq.EADDRINUSE:
                    raise PlatformError(
                        f"the coordinator cannot listen: {err}",
                        where=self._endpoint,
                        fix="stop the program that uses the port, or set STOKER_PORT or feed.port",
                    ) from None
            time.sleep(0.1)

    def _serve(
        self, socket: "zmq.Socket[bytes]", allow_list: AllowList, guard: HandshakeGuard
    ) -> None:
        poller = zmq.Poller()
        for source in (socket, allow_list.socket, guard.monitor):
            poller.register(source, zmq.POLLIN)
        self._turned_at = self._clock()
        try:
            while not self._is_done():
                ready = dict(poller.poll(_POLL_MS))
                guard.handle(ready, self._clock())
                # Addresses that came with the token of another run.
                while guard.others:
                    address = guard.others.pop()
                    # New: trainers hear why a host that they wait for does not come.
                    if self._members.note_other_token(address):
                        self._note_refusals(socket)
                if socket in ready:
                    self._receive(socket, guard)
                guard.tick(self._clock())
                # Before `_judge`: a host that is lost after the run's end does not fail it.
                self._announce(socket)
                while not self._outbox.starts.empty():
                    self._send_start(socket, self._outbox.starts.get())
                self._judge(socket)
        except Exception as err:  # at the edge of a thread, for which the run must not wait
            self._log.event(EventName.COORDINATOR_FAILED, error=repr(err))
            self._on_failure(
                Change(what="lost", host="", kind="follower", reason=f"the coordinator: {err!r}")
            )
        finally:
            guard.close()
            # Linger, so that the last State is sent.
            socket.linger = 500
            socket.close()
            allow_list.close()
            self._context.term()

    def _judge(self, socket: "zmq.Socket[bytes]") -> None:
        now = self._clock()
        turn_seconds = now - self._turned_at
        self._turned_at = now
        if turn_seconds > _STANDSTILL_SECONDS:
            self._log.event(EventName.CLOCK_JUMP, seconds=turn_seconds)
            self._members.stood_still(turn_seconds)
        if now - self._looked_at >= _POLL_SECONDS:
            self._looked_at = now
            state = self._end or self._outbox.state()
            for host in self._members.late(now):
                # Not news: sending shows whether the connection exists.
                if not self._send(socket, self._launchers[host], state):
                    self._members.cut_off(host, now)
        self._note(socket, self._members.expire(now))

    def _is_done(self) -> bool:
        if not self._is_closing.is_set():
            return False
        if self._end is None:
            # An end that was put a moment ago is still sent.
            return self._outbox.ends.empty()
        # From the outcome on, not from `close`: hosts may have said goodbye meanwhile.
        elapsed = self._clock() - self._ended_at
        awaits_goodbye = bool(self._members.live) and elapsed < GOODBYE_SECONDS
        awaits_start = bool(self._members.awaited) and elapsed < self._straggler_seconds
        return not awaits_goodbye and not awaits_start

    def _receive(self, socket: "zmq.Socket[bytes]", guard: HandshakeGuard) -> None:
        # Bounded, so that leases are checked under any load.
        for _ in range(100):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            guard.note_proved(frames[-1])
            sender = frames[0].bytes
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"{len(frames) - 1} frames, expected 1")
                message = self._unpack(frames[1].buffer)
            except ProtocolError as err:
                self._warn(sender, err.what)
                continue
            self._handle(socket, sender, message)

    def _handle(self, socket: "zmq.Socket[bytes]", sender: bytes, message: Message) -> None:
        now = self._clock()
        match message:
            case Join():
                self._take_join(socket, sender, message, now=now)
            case Heartbeat():
                self._take_heartbeat(socket, sender, message, now=now)
            case Leave():
                if change := self._members.leave(message):
                    self._note(socket, [change])
            case Attend():
                self._take_attend(socket, sender, message, now=now)
            case Progress():
                # Their sums only grow, so that a lost report is made up for by the next one.
                self._ranks.report(sender, message, now=now)
            case GpuReport() if message.host in self._followers:
                try:
                    self._gpus.add(message, now=now)
                except msgspec.DecodeError as err:
                    self._warn(sender, f"GPU loads: {err}")
            case _:
                self._warn(sender, type(message).__name__)

    def _take_join(
        self, socket: "zmq.Socket[bytes]", sender: bytes, message: Join, *, now: float
    ) -> None:
        host = message.host
        answer, change = self._members.join(message, now)
        self._send(socket, sender, answer)
        if isinstance(answer, Refused):
            self._log.event(EventName.JOIN_REFUSED, joining=host, reason=answer.reason)
            self._note_refusals(socket)
        else:
            # A host may join again, from another connection: the latest one is answered.
            self._launchers[host] = sender
            # It may have lost the order with its earlier connection.
            self._send_start(socket, host)
            decided = self._decided_for(host)
            if decided or self._outbox.stage != "begun":
                self._send(socket, sender, decided or self._outbox.state())
        if change:
            self._note(socket, [change])

    def _take_heartbeat(
        self, socket: "zmq.Socket[bytes]", sender: bytes, message: Heartbeat, *, now: float
    ) -> None:
        host = message.host
        if not self._members.beat(message, now):
            # Its lease has expired, so others know it as lost: it must join again.
            self._send(socket, sender, State(unknown=True))
            return
        if message.others is not None:
            self.others.add(host, message.others)
        self.memory.add(host, message.memory)
        # A launcher that reconnected has a new routing id.
        self._launchers[host] = sender
        self._send(socket, sender, self._decided_for(host) or self._outbox.state())
        # Repeated until the follower has it: a connection may lose it.
        if not message.has_start:
            self._send_start(socket, host)

    def _take_attend(
        self, socket: "zmq.Socket[bytes]", sender: bytes, message: Attend, *, now: float
    ) -> None:
        reason = ""
        if message.run_id != self._run_id:
            reason = f"this is run {self._run_id}"
        elif message.protocol != PROTOCOL_VERSION:
            reason = f"the launcher speaks version {PROTOCOL_VERSION} of the protocol"
        if reason:
            self._send(socket, sender, Refused(reason=reason))
            return
        self._ranks.attend(message.rank, sender)
        self._send(socket, sender, self._members.roster(now))

    def _warn(self, sender: bytes, reason: str) -> None:
        # Once for each connection, and bounded: a peer that floods must not fill the log.
        if sender not in self._warned and len(self._warned) < _MAX_WARNED:
            self._warned.add(sender)
            self._log.event(EventName.MESSAGE_REFUSED, peer=sender.hex(), reason=reason)

    def _note(self, socket: "zmq.Socket[bytes]", changes: Sequence[Change]) -> None:
        for change in changes:
            reason = change.reason.strip().partition("\n")[0]
            what = f"{change.kind} {change.what}"
            if change.exit_code is not None:
                what += f" with exit code {change.exit_code}"
            if reason:
                # One line each: the record shows them in a table.
                what += f": {reason}"
            self._events.append(Event(when=now_utc(), what=what[:500], host=change.host))
            self._log.event(
                EventName(f"host_{change.what}"),
                about=change.host,
                kind=change.kind,
                exit_code=change.exit_code,
                reason=reason[:500],
            )
            if change.kind == "agent":
                self._gone_agents.note(change, now=self._clock())
            if change.fails_the_run and self._end is None:
                self._on_failure(change)
        # Absent hosts stay as they were in rosters: awaited.
        if any(change.kind == "agent" and change.what != "absent" for change in changes):
            self._send_roster(socket)

    def _add_event(self, what: str) -> None:
        self._events.append(Event(when=now_utc(), what=what[:500]))

    def _note_refusals(self, socket: "zmq.Socket[bytes]") -> None:
        """Records hosts that may not join, once each, and tells the ranks."""
        refused = self._members.new_refusals()
        for name, reason in refused.items():
            self._add_event(f"{name} was refused: {reason}")
        if refused:
            self._send_roster(socket)

    def _send_roster(self, socket: "zmq.Socket[bytes]") -> None:
        roster = self._members.roster(self._clock())
        for sender in self._ranks.senders():
            if not self._send(socket, sender, roster):
                self._ranks.forget(sender)

    def _announce(self, socket: "zmq.Socket[bytes]") -> None:
        """Sends launchers what other threads have decided since the last iteration."""
        if self._end is not None:
            return
        outbox = self._outbox
        if not outbox.ends.empty():
            self._end = outbox.ends.get()
            self._ended_at = self._clock()
            for sender in self._launchers.values():
                self._send(socket, sender, self._end)
            return
        state = outbox.state()
        if state != self._announced:
            self._announced = state
            for sender in self._launchers.values():
                self._send(socket, sender, state)
        if self._released is None and not outbox.releases.empty():
            self._released = outbox.releases.get()
            self._add_event(f"data hosts released: {self._released.reason}")
            self._log.event(EventName.DATA_HOSTS_RELEASED, reason=self._released.reason)
            # Hosts that have not come yet get it when they join, see `_decided_for`.
            for host in self.expected_agents & self._launchers.keys():
                self._send(socket, self._launchers[host], self._released)

    def _decided_for(self, host: str) -> State | None:
        if self._end is None and host in self.expected_agents:
            return self._released
        return self._end

    def _send_start(self, socket: "zmq.Socket[bytes]", host: str) -> None:
        start = self._starts.get(host)
        launcher = self._launchers.get(host)
        if start is not None and launcher is not None:
            self._send(socket, launcher, start)

    def _send(self, socket: "zmq.Socket[bytes]", receiver: bytes, message: Message) -> bool:
        """False if the receiver's connection has ended."""
        try:
            socket.send_multipart([receiver, pack(message)], zmq.NOBLOCK)
        except zmq.ZMQError as err:
            if err.errno == zmq.EHOSTUNREACH:
                # Not an error: the launcher's lease decides whether it is lost.
                return False
            self._log.event(
                EventName.MESSAGE_SEND_FAILED, kind=type(message).__name__, reason=str(err)
            )
        return True
