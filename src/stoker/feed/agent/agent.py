"""The agent of a data host listens on its ports and serves the sessions of its trainers.

It has one poll loop (`Agent`): zmq, the port for batches, the channels of workers and of dataset
hosts, and a wake-up descriptor. A thread for each trainer sends that trainer's batches. `Service`
does what the trainers ask for; `dispatch` has the batches of all sessions made.
"""

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Literal

import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError, UsageError
from stoker.feed.agent.batch_port import BatchPort, OutgoingBatch
from stoker.feed.agent.dataset_process import ForkServer, HostedSpec, Specs
from stoker.feed.agent.dispatch import AgentSession, Dispatch, Outbox, Transport
from stoker.feed.wire import crypto, protocol
from stoker.feed.wire.crypto import HandshakeGuard, RejectionLog
from stoker.feed.wire.dataset import pack_error
from stoker.feed.wire.protocol import Assembly, compare_versions, own_versions
from stoker.host.machine import without_preempting
from stoker.logs import EventName, Log
from stoker.records import FeedSettings

# A trainer whose connection is gone may come back within this.
UNREACHABLE_SECONDS = 15.0
# Silent sessions are spoken to this often: a trainer that is gone is noticed.
PROBE_SECONDS = 10.0
# A trainer that was asked for a spec and does not ship it: the others are asked, too.
SHIP_SECONDS = 120.0
_HOST_FIX = "see that host's log; give it more memory, or fewer workers"
# What is begun is finished within this, or dropped.
DRAIN_SECONDS = 10.0
TICK_SECONDS = 1.0
_MAX_MESSAGES_A_TURN = 100
_LINGER_MILLISECONDS = 2000


class Service:
    """Serves batches to sessions.

    Args:
        workers: Batches made at a time.
        host: This host's name, in errors and logs.

    Attributes:
        reached_at: When a trainer that asks for nothing was last reached; monotonic seconds.
    """

    def __init__(
        self,
        specs: Specs,
        transport: Transport,
        *,
        workers: int,
        feed: FeedSettings,
        log: Log,
        host: str,
    ) -> None:
        self._specs = specs
        self._outbox = Outbox(transport)
        self._workers = workers
        self._feed = feed
        self._log = log
        self._host = host
        self._sessions: dict[str, AgentSession] = {}
        self._dispatch = Dispatch(
            specs, self._outbox, sessions=self._sessions, workers=workers, feed=feed, log=log
        )
        self._is_draining = False
        self._warned: set[tuple[bytes, str]] = set()
        self._versions = own_versions()
        self._probed_at = time.monotonic()
        self.reached_at = -math.inf

    @property
    def num_begun(self) -> int:
        """Counts batches that workers have, to make now or next."""
        return self._dispatch.num_begun

    @property
    def num_sent(self) -> int:
        """Counts the batches sent so far, over all sessions."""
        return self._outbox.num_sent

    @property
    def sent_bytes(self) -> int:
        """Returns the bytes of batches that the transport still holds."""
        return self._outbox.sent_bytes

    def work(self, ready: Iterable[int]) -> None:
        """Handles input on those descriptors of workers and dataset processes; assigns jobs."""
        for spec in self._specs.handle(ready):
            self._announce(spec)
        self._dispatch.work()

    def tick(self, now: float) -> None:
        """Probes idle sessions and ends unreachable ones; called once a second."""
        self._dispatch.tick()
        if now - self._probed_at >= PROBE_SECONDS:
            self._probed_at = now
            for session in self._sessions.values():
                if session.is_ready and not session.requests:
                    # Credits that have not changed: they tell the trainer nothing new, but zmq says
                    # whether it is still connected.
                    message = protocol.Credits(session=session.name, credits=session.credits)
                    self._outbox.send(session, message)
                    if session.unreachable_since is None:
                        self.reached_at = now
        for session in list(self._sessions.values()):
            since = session.unreachable_since
            if since is not None and now - since > UNREACHABLE_SECONDS:
                self._close_session(session.name, "unreachable")
        for hosted in self._specs.overdue(now - SHIP_SECONDS):
            self._need(hosted)

    def drain(self) -> None:
        """Begins nothing any more, and says so."""
        self._is_draining = True
        self._log.event(
            EventName.AGENT_DRAINING, begun=self.num_begun, queued=self._dispatch.num_queued
        )
        for session in self._sessions.values():
            self._outbox.send(session, protocol.Leaving())
        self._dispatch.cancel_queued("the agent drains")

    def warn(self, identity: bytes, event: EventName, reason: str) -> None:
        """Logs what is wrong with a peer, once; not with every message."""
        if (identity, event) not in self._warned and len(self._warned) < 1000:
            self._warned.add((identity, event))
            self._log.event(event, peer=identity.hex(), reason=reason[:200])

    def take(self, identity: bytes, message: protocol.Message, frame: memoryview) -> None:
        """Handles one message of a trainer.

        Raises:
            ProtocolError: If it makes no sense.
        """
        match message:
            case protocol.Attach():
                self._attach(identity, message)
            case protocol.Open():
                self._open_session(identity, message)
            case protocol.Ship():
                self._ship(identity, message, frame)
            case protocol.Make():
                self._make(identity, message)
            case protocol.Cancel(session=name, before_epoch_id=before_epoch_id):
                self._cancel(name, before_epoch_id)
            case protocol.Close(session=name):
                self._close_session(name, "closed")

    def _attach(self, identity: bytes, message: protocol.Attach) -> None:
        if message.host == self._host:
            self._outbox.give_ticket(identity)
        else:
            self._outbox.answer(identity, protocol.WrongHost(host=self._host))

    def _open_session(self, identity: bytes, message: protocol.Open) -> None:
        if message.host not in ("", self._host):
            # The trainer means another host, whose address this one has now. Opened here, the
            # session would send its answers to this connection, and the right one would get none.
            self._outbox.answer(identity, protocol.WrongHost(host=self._host))
            return
        if self._is_draining:
            self._outbox.answer(identity, protocol.Leaving())
            return
        session = self._sessions.get(message.session)
        if session is None:
            session = AgentSession(
                name=message.session,
                identity=identity,
                rank=message.rank,
                spec=message.spec,
                seeding=message.seeding,
            )
            self._log.event(EventName.SESSION_OPENED, session=session.name, rank=session.rank)
        left = session.spec
        if left != message.spec:
            self._specs.stop_shards(session.name)
        before, session.identity = session.identity, identity
        session.spec, session.seeding = message.spec, message.seeding
        session.base_seed = message.base_seed
        # The trainer says next which epochs are over.
        session.before_epoch_id = 0
        session.is_ready, session.unreachable_since = False, None
        problem, warning = compare_versions(message, self._versions)
        if not problem and message.spec_bytes > self._feed.max_dataset_bytes:
            problem = (
                f"the pickled dataset has {message.spec_bytes} bytes, more than "
                f"feed.max_dataset_bytes ({self._feed.max_dataset_bytes})"
            )
        if problem:
            self._fail(session, problem)
            return
        if warning:
            self.warn(identity, EventName.VERSIONS_DIFFER, warning)
        self._sessions[session.name] = session
        hosted = self._specs.find(message.spec)
        if hosted is None:
            now, nbytes = time.monotonic(), message.spec_bytes
            self._specs.expect(message.spec, nbytes=nbytes, shipper=identity, now=now)
            self._outbox.send(session, protocol.Need(spec=message.spec))
        elif hosted.state == "ready":
            self._announce(hosted)
        elif hosted.state == "expected" and before != identity and before == hosted.shipper:
            # The connection that it was to come over is lost.
            self._need(hosted)
        self._specs.number_workers(
            message.spec, first=message.first_worker, step=message.worker_step
        )
        if left != message.spec:
            self._is_left(left)
        self._close_unused_specs()

    def _ship(self, identity: bytes, message: protocol.Ship, piece: memoryview) -> None:
        hosted = self._specs.find(message.spec)
        if hosted is None or hosted.state != "expected":
            return
        try:
            is_complete = hosted.arrives(
                piece, offset=message.offset, shipper=identity, now=time.monotonic()
            )
        except OSError as err:
            hosted.fail(f"no memory for the dataset: {err.strerror}")
            self._announce(hosted)
            return
        if not is_complete:
            return
        self._log.event(EventName.SPEC_RECEIVED, spec=hosted.digest, bytes=hosted.nbytes)
        # In this order all three happen at once: the dataset process unpickles, workers wait to be
        # forked, and here the digest is taken (0.8 ms per MB). Who ships has the run's token: the
        # digest finds a mistake, it keeps nobody out.
        self._specs.load(hosted)
        for session in self._sessions.values():
            if session.spec == hosted.digest and session.base_seed is not None:
                self._specs.begin(hosted, seeding=session.seeding, base_seed=session.base_seed)
        try:
            self._specs.check(hosted)
        except ProtocolError:
            # At once, but once: a mistake that is made again costs a transfer per SHIP_SECONDS.
            if not hosted.was_wrong:
                self._need(hosted)
            raise

    def _announce(self, hosted: HostedSpec) -> None:
        """Tells the sessions of a spec whether it is ready here or has failed."""
        for session in [s for s in self._sessions.values() if s.spec == hosted.digest]:
            if hosted.state == "ready" and not session.is_ready:
                session.is_ready = True
                session.credits = self._dispatch.share(session)
                ready = protocol.Ready(
                    session=session.name,
                    spec=hosted.digest,
                    credits=session.credits,
                    workers=self._workers,
                    versions=self._versions,
                )
                self._outbox.send(session, ready)
            elif hosted.state == "failed":
                # Until it is opened again: on another connection, or for the next epoch.
                session.is_ready = False
                self._fail(session, hosted.reason, hosted.error, is_of_host=not hosted.error)
        if hosted.state == "failed":
            self._log.event(EventName.SPEC_FAILED, spec=hosted.digest, reason=hosted.reason)
            # Forgotten: whoever opens it again has it shipped and tried anew; memory may be free
            # then.
            self._specs.close_spec(hosted)
            self._dispatch.cancel_queued("the dataset failed on this host", spec=hosted.digest)

    def _fail(
        self, session: AgentSession, reason: str, error: bytes = b"", *, is_of_host: bool = False
    ) -> None:
        if not error:
            kind, fix = (FeedLostError, _HOST_FIX) if is_of_host else (FeedError, "")
            raised = kind(reason, where=f"host {self._host}", fix=fix)
            error = pack_error(raised, host=self._host, where="the agent")
        failed = protocol.Failed(
            session=session.name, spec=session.spec, reason=reason, is_of_host=is_of_host
        )
        self._outbox.send(session, failed, error)

    def _make(self, identity: bytes, message: protocol.Make) -> None:
        session = self._sessions.get(message.session)
        if session is None or self._is_draining or not session.is_ready:
            reason = "the agent knows no such session" if session is None else "the agent drains"
            if session is not None and not self._is_draining:
                reason = "the session is not ready"
            self._outbox.refuse(identity, message, reason)
            return
        session.identity, session.unreachable_since = identity, None
        self._dispatch.ask(identity, session, message)

    def _cancel(self, name: str, before_epoch_id: int) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.before_epoch_id = max(session.before_epoch_id, before_epoch_id)
        # A worker that has begun one of them finishes it: `Dispatch` throws the result away.
        for key, request in list(session.requests.items()):
            if request.epoch_id < session.before_epoch_id:
                request.is_cancelled = True
                del session.requests[key]
        self._specs.stop_shards(name, before_epoch_id=session.before_epoch_id)

    def _close_session(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for request in session.requests.values():
            request.is_cancelled = True
        session.requests.clear()
        self._specs.stop_shards(name)
        self._log.event(EventName.SESSION_ENDED, session=name, rank=session.rank, reason=reason)
        self._is_left(session.spec)
        self._close_unused_specs()
        self._dispatch.share_credits()

    def _is_left(self, spec: str) -> None:
        """Asks for a spec again that a session uses no more: its trainer may be the one asked."""
        hosted = self._specs.find(spec)
        if hosted is not None and hosted.state == "expected":
            self._need(hosted)

    def _need(self, hosted: HostedSpec) -> None:
        """Asks for a spec again, if it is wanted: who was asked first is gone, or silent."""
        wanting = [s for s in self._sessions.values() if s.spec == hosted.digest]
        if not wanting:
            self._specs.close_spec(hosted)
            return
        now = time.monotonic()
        self._specs.expect(hosted.digest, nbytes=hosted.nbytes, shipper=b"", now=now)
        for session in wanting:
            self._outbox.send(session, protocol.Need(spec=hosted.digest))

    def _close_unused_specs(self) -> None:
        used = {session.spec for session in self._sessions.values()}
        # A session that has changed its spec may still wait for batches of the one before.
        used.update(r.spec for s in self._sessions.values() for r in s.requests.values())
        self._specs.close_unused(used)


_unpack = protocol.Unpacker(protocol.ToAgent)


class Agent:
    """Serves batches to the trainers of one run.

    Args:
        workers: Batches made at a time.
        host: This host's name, in errors and logs.
        port: None: any free one, and another free one for batches. Else these are sent from
            `port` + 1.

    Attributes:
        port: The bound one, after `open`.
        batch_port: Port for batches, chosen as `port` is.
    """

    def __init__(
        self,
        *,
        keys: crypto.Keys,
        workers: int,
        feed: FeedSettings,
        log: Log,
        host: str,
        run_id: str,
        bind: str = "*",
        port: int | None,
    ) -> None:
        self._keys = keys
        self._feed = feed
        self._log = log
        self._host = host
        self._run_id = run_id
        self._bind = bind
        self.port = port or 0
        self.batch_port = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state: Literal["serving", "draining", "stopping", "closed"] = "serving"
        self._drain_until: float | None = None
        self._workers = workers
        self._registered: dict[int, int] = {}
        self._assembly = Assembly(max_bytes=feed.max_dataset_bytes)
        self._next_tick = 0.0
        self._heard_at = -math.inf
        self._wake_lock = threading.RLock()

    @property
    def num_sent(self) -> int:
        """Counts the batches sent so far."""
        return self._service.num_sent if hasattr(self, "_service") else 0

    @property
    def trainers_heard_at(self) -> float:
        """Returns when a trainer last gave a sign of life, as far as is known; monotonic seconds.

        It asked for something; or, while it asks for nothing (a long checkpoint), its connection
        took a message, and the other end of that answered a heartbeat a little before.
        """
        reached_at = self._service.reached_at if hasattr(self, "_service") else -math.inf
        answered_at = reached_at - crypto.HEARTBEAT_TIMEOUT_SECONDS - crypto.HEARTBEAT_SECONDS
        return max(self._heard_at, answered_at)

    def open(self) -> None:
        """Binds the ports and starts the fork server, which takes about 2 s to be ready.

        The calling thread must live as long as the agent: its end would end the fork server.

        Raises:
            UsageError: If a port is taken.
        """
        # First: no descriptor of zmq reaches it, nor does the limit that is raised below.
        fork_server = ForkServer(host=self._host)
        _allow_all_files()
        try:
            self._specs = Specs(
                fork_server,
                workers=self._workers,
                host=self._host,
                wake=self.wake,
                on_death=lambda how: self._log.event(EventName.DATA_WORKER_DIED, how=how),
            )
            self._service = Service(
                self._specs,
                self,
                workers=self._workers,
                feed=self._feed,
                log=self._log,
                host=self._host,
            )
            self._context = zmq.Context()
            with without_preempting():
                # libzmq starts them with the first socket.
                self._allow = crypto.AllowList(self._context, self._keys)
            self._router = self._context.socket(zmq.ROUTER)
            # Else zmq drops without a word what is for a peer that is gone; so `send` returns
            # False.
            self._router.router_mandatory = True
            # Bounded by credits, not by dropping.
            self._router.sndhwm = 0
            crypto.secure_server(self._router, self._keys)
            wanted = self.port
            self.port = self._bind_router(wanted)
            self._guard = HandshakeGuard(
                self._router,
                RejectionLog(self._log, port=self.port),
                port=self.port,
                allow_list=self._allow,
            )
            self._batches = BatchPort(
                bind=self._bind,
                port=wanted + 1 if wanted else None,
                host=self._host,
                run_id=self._run_id,
                log=self._log,
                wake=self.wake,
            )
            self.batch_port = self._batches.port
        except BaseException:
            fork_server.close()
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._router, self._guard.monitor, self._allow.socket):
            self._poller.register(source, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._log.event(EventName.AGENT_LISTENING, port=self.port, workers=self._workers)

    def run(self) -> None:
        """Serves until `stop`, or until a drain is done; then closes everything.

        Raises:
            FeedLostError: If the fork server died.
        """
        try:
            with without_preempting():
                while self._state == "serving" or self._is_still_draining():
                    self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` at once. Any thread and any signal handler may call it, also twice."""
        self._state = "stopping" if self._state != "closed" else "closed"
        self.wake()

    def drain(self) -> None:
        """Ends `run` when what is begun is sent, within 10 s; nothing new is begun. As `stop`."""
        if self._state == "serving":
            self._state = "draining"
        self.wake()

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends to a peer, without blocking; False if it is not connected."""
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def ticket_for(self, identity: bytes) -> protocol.Ticket:
        """Returns a ticket for a peer's connection for batches."""
        return self._batches.ticket_for(identity, time.monotonic())

    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch for a peer; False if it has no connection for batches, nor a ticket."""
        return self._batches.send(identity, batch)

    def wake(self) -> None:
        """Wakes the loop for one more turn. Any thread and any signal handler may call it."""
        # Re-entrant: a signal handler may come in between.
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends workers, fork server and sockets; may be called twice. 10 s at most."""
        if self._state == "closed":
            return
        # After a drain the last answers are still to be sent; else nobody waits for them.
        linger = _LINGER_MILLISECONDS if self._state == "draining" else 0
        self._state = "closed"
        if hasattr(self, "_specs"):
            self._specs.close()
        if hasattr(self, "_batches"):
            self._batches.close()
        if hasattr(self, "_guard"):
            self._guard.close()
        if self._context is not None:
            self._context.destroy(linger=linger)
        with self._wake_lock:
            # A thread that still sends calls `wake` with its last batch: by then the number may be
            # another file's.
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)
        self._log.event(EventName.AGENT_ENDED, batches=self.num_sent)

    def _bind_router(self, port: int) -> int:
        try:
            self._router.bind(f"tcp://{self._bind}:{port or '*'}")
        except zmq.ZMQError as err:
            raise UsageError(
                f"port {port} cannot be bound: {err.strerror}",
                where=f"host {self._host}, run {self._run_id}",
                fix="set feed.port to a free port of every host",
            ) from None
        endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    def _turn(self) -> None:
        """Waits for something to do, a second at most, and does it."""
        self._watch()
        ready = dict(self._poller.poll(round(TICK_SECONDS * 1000)))
        if self._wake_fd in ready:
            # Before anything is looked at: a call that comes from here on ends the next poll.
            os.eventfd_read(self._wake_fd)
        self._guard.handle(ready, time.monotonic())
        if self._router in ready:
            self._receive()
        self._batches.handle(ready, time.monotonic())
        self._service.work([key for key in ready if isinstance(key, int)])
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._guard.tick(now)
            self._batches.tick(now)
            self._check_fork_server()
            self._service.tick(now)

    def _watch(self) -> None:
        wanted = self._specs.sockets() | dict.fromkeys(self._batches.filenos(), False)
        for fileno in self._registered.keys() - wanted.keys():
            self._poller.unregister(fileno)
        for fileno, wants_write in wanted.items():
            flags = zmq.POLLIN | zmq.POLLOUT if wants_write else zmq.POLLIN
            if self._registered.get(fileno) != flags:
                self._poller.register(fileno, flags)
                self._registered[fileno] = flags
        self._registered = {fileno: self._registered[fileno] for fileno in wanted}

    def _receive(self) -> None:
        # So many, then workers and batches have their turn; what is left is there at the next poll.
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # Whoever gets through here has the run's token.
            self._heard_at = time.monotonic()
            identity = frames[0].bytes
            try:
                if len(frames) not in (2, 3):
                    raise ProtocolError(f"a message of {len(frames)} frames")
                self._guard.proved(frames[1])
                frame = frames[2].buffer if len(frames) == 3 else memoryview(b"")
                message = _unpack(frames[1].buffer)
                if isinstance(message, protocol.Piece):
                    whole = self._assembly.take(identity, frame, is_last=message.is_last)
                    if whole is None:
                        continue
                    message, frame = _unpack(whole), memoryview(b"")
                self._service.take(identity, message, frame)
            # One message is refused, and its peer may go on: it has the token, so this is a mistake
            # of ours (tests/faults/test_agent.py).
            except ProtocolError as err:
                self._service.warn(identity, EventName.MALFORMED_PEER, str(err))

    def _check_fork_server(self) -> None:
        if not self._specs.is_alive and self._state == "serving":
            raise FeedLostError(
                "the process that forks the data workers died, perhaps out of memory",
                where=f"host {self._host}",
                fix="use fewer workers a host, or hosts with more memory",
            )

    def _is_still_draining(self) -> bool:
        if self._state != "draining":
            return False
        now = time.monotonic()
        if self._drain_until is None:
            self._drain_until = now + DRAIN_SECONDS
            self._service.drain()
        is_busy = self._service.num_begun > 0 or self._service.sent_bytes > 0
        return is_busy and now < self._drain_until and self._specs.is_alive


def _allow_all_files() -> None:
    """Lets this process open what the host allows: each stranger's connection takes one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
