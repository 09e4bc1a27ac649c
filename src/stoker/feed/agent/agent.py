"""The agent of a data host: its ports and the sessions of its trainers.

`Agent` runs one poll loop over zmq, the port for batches, the channels of workers and dataset
processes, and a wake-up descriptor. `Service` handles the trainers' messages.
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
from stoker.feed import why_unfed
from stoker.feed.agent.batch_port import BatchPort, OutgoingBatch
from stoker.feed.agent.dataset_process import ForkServer, HostedSpec, Specs
from stoker.feed.agent.dispatch import AgentSession, Dispatch, Outbox, Transport
from stoker.feed.memory_guard import MemoryShares
from stoker.feed.wire import crypto, protocol
from stoker.feed.wire.crypto import HandshakeGuard, RejectionLog
from stoker.feed.wire.dataset import pack_error
from stoker.feed.wire.protocol import Assembly, compare_versions, own_versions
from stoker.feed.workers.crashes import LossRules
from stoker.host.machine import without_preempting
from stoker.logs import EventName, Log
from stoker.records import FeedSettings
from stoker.units import size

# A trainer whose connection is lost may come back within this.
UNREACHABLE_SECONDS = 15.0
# Idle sessions are probed this often, to notice that a trainer is gone.
PROBE_SECONDS = 10.0
# After that the other trainers are asked for a spec, too.
SHIP_SECONDS = 120.0
# Batches that are not finished by then are discarded.
DRAIN_SECONDS = 10.0
TICK_SECONDS = 1.0
_MAX_MESSAGES_A_TURN = 100
_LINGER_MILLISECONDS = 2000


class Service:
    """The trainers' sessions; `reached_at` is when an idle trainer was last reached (monotonic)."""

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
        self.outbox = Outbox(transport)
        self._workers = workers
        self._feed = feed
        self._log = log
        self._host = host
        self._sessions: dict[str, AgentSession] = {}
        self.dispatch = Dispatch(
            specs, self.outbox, sessions=self._sessions, workers=workers, feed=feed, log=log
        )
        self._is_draining = False
        self._warned: set[tuple[bytes, str]] = set()
        self._versions = own_versions()
        self._probed_at = time.monotonic()
        self.reached_at = -math.inf

    def work(self, ready: Iterable[int]) -> None:
        """Handles what came from processes of this host, and sends what is due to trainers."""
        for spec in self._specs.handle(ready):
            self._announce(spec)
        self.dispatch.work()

    def tick(self, now: float) -> None:
        """Probes idle sessions and closes unreachable ones; called once a second."""
        self.dispatch.tick()
        if now - self._probed_at >= PROBE_SECONDS:
            self._probed_at = now
            self._probe(now)
        for session in list(self._sessions.values()):
            since = session.unreachable_since
            if since is not None and now - since > UNREACHABLE_SECONDS:
                self._close_session(session.name, "unreachable")
        for hosted in self._specs.overdue(now - SHIP_SECONDS):
            self._request(hosted)

    def _probe(self, now: float) -> None:
        for session in self._sessions.values():
            if not session.is_ready or session.requests:
                continue
            # Unchanged credits: zmq reports whether the trainer is still connected.
            message = protocol.Credits(session=session.name, credits=session.credits)
            self.outbox.send(session, message)
            if session.unreachable_since is None:
                self.reached_at = now

    def drain(self) -> None:
        """Takes no further orders: batches that are begun are sent, queued ones are refused."""
        self._is_draining = True
        self._log.event(
            EventName.AGENT_DRAINING, begun=self.dispatch.num_begun, queued=self.dispatch.num_queued
        )
        for session in self._sessions.values():
            self.outbox.send(session, protocol.Leaving())
        self.dispatch.cancel_queued("the agent drains")

    def warn(self, identity: bytes, event: EventName, reason: str) -> None:
        """Logs a problem with a peer, only once."""
        if (identity, event) not in self._warned and len(self._warned) < 1000:
            self._warned.add((identity, event))
            self._log.event(event, peer=identity.hex(), reason=reason[:200])

    def take(self, identity: bytes, message: protocol.Message, frame: memoryview) -> None:
        """Handles one message of a trainer; raises ProtocolError if it is invalid."""
        match message:
            case protocol.Attach(host=host) if host != self._host:
                self.outbox.answer(identity, protocol.WrongHost(host=self._host))
            case protocol.Attach():
                self.outbox.give_ticket(identity)
            case protocol.Open():
                self._open_session(identity, message)
            case protocol.Ship():
                self._ship(identity, message, frame)
            case protocol.Make():
                self._make(identity, message)
            case protocol.Share() | protocol.BatchPart():
                self._take_shares(message)
            case protocol.Inquire():
                self._tell_makers(identity, message)
            case protocol.Cancel(session=name, before_epoch_id=before_epoch_id):
                self._cancel(name, before_epoch_id)
            case protocol.Close(session=name):
                self._close_session(name, "closed")

    def _open_session(self, identity: bytes, message: protocol.Open) -> None:
        if message.host not in ("", self._host):
            # This host now has the address of another one.
            self.outbox.answer(identity, protocol.WrongHost(host=self._host))
            return
        if self._is_draining:
            self.outbox.answer(identity, protocol.Leaving())
            return
        session = self._session_of(identity, message)
        former_spec = session.spec
        former_identity = session.identity
        has_changed_spec = former_spec != message.spec
        if has_changed_spec:
            # Its workers are of the former dataset.
            self._specs.stop_shards(session.name)
        self._renew(session, identity, message)
        problem = self._why_refused(identity, message)
        if problem:
            self._fail(session, problem.what, fix=problem.fix)
            return
        self._sessions[session.name] = session
        self._bring(session, former_identity, message.spec_bytes)
        hosted = self._specs.find(message.spec)
        if hosted is not None:
            hosted.first_worker = message.first_worker
            hosted.worker_step = message.worker_step
        if has_changed_spec:
            # It may have been about to send the former one, which other sessions wait for.
            self._request_from_others(former_spec)
        self._close_unused_specs()

    def _session_of(self, identity: bytes, message: protocol.Open) -> AgentSession:
        """Returns the session that is opened: again, or for the first time."""
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
        return session

    def _renew(self, session: AgentSession, identity: bytes, message: protocol.Open) -> None:
        """Gives a session what its trainer says now, over the connection it has now."""
        session.identity = identity
        session.spec = message.spec
        session.seeding = message.seeding
        session.base_seed = message.base_seed
        # The trainer sends next which epochs are over.
        session.before_epoch_id = 0
        session.is_ready = False
        session.unreachable_since = None

    def _why_refused(self, identity: bytes, message: protocol.Open) -> why_unfed.WhyUnfed | None:
        """Returns why this host cannot serve a trainer's dataset, and warns of what may differ."""
        problem, warning = compare_versions(message, self._versions, host=self._host)
        most = self._feed.max_dataset_bytes
        if problem:
            return problem
        if message.spec_bytes > most:
            return why_unfed.too_large(message.spec_bytes, most=most, largest="")
        if warning:
            self.warn(identity, EventName.VERSIONS_DIFFER, warning)
        return None

    def _bring(self, session: AgentSession, before: bytes, nbytes: int) -> None:
        """Asks for the dataset of a session, or tells that it is ready.

        Args:
            session: The session that was opened.
            before: Identity of its connection until now.
            nbytes: Size of the dataset's pickle.
        """
        hosted = self._specs.find(session.spec)
        identity = session.identity
        if hosted is None:
            now = time.monotonic()
            self._specs.expect(session.spec, nbytes=nbytes, shipper=identity, now=now)
            self.outbox.send(session, protocol.Need(spec=session.spec))
        elif hosted.state == "ready":
            self._announce(hosted)
        elif hosted.state == "expected" and before != identity and hosted.shipper in (b"", before):
            # It was sent over a connection that is lost.
            self._request(hosted)

    def _ship(self, identity: bytes, message: protocol.Ship, piece: memoryview) -> None:
        hosted = self._specs.find(message.spec)
        if hosted is None or hosted.state != "expected":
            return
        if message.spec_bytes > self._feed.max_dataset_bytes:
            raise ProtocolError(f"a spec of {message.spec_bytes} bytes is shipped")
        try:
            is_complete = hosted.take_piece(
                piece,
                offset=message.offset,
                nbytes=message.spec_bytes or hosted.nbytes,
                shipper=identity,
                now=time.monotonic(),
            )
        except OSError as err:
            hosted.fail(f"no memory for the dataset: {err.strerror}")
            self._announce(hosted)
            return
        if not is_complete:
            if message.offset == 0:
                self._specs.preload(hosted)
            return
        self._log.event(EventName.SPEC_RECEIVED, spec=hosted.digest, bytes=hosted.nbytes)
        # It unpickles while the digest, against mistakes, is computed here (0.8 ms per MB).
        self._specs.load(hosted)
        for session in self._sessions.values():
            if session.spec == hosted.digest:
                self._begin(hosted, session)
        try:
            self._specs.check(hosted)
        except ProtocolError:
            # At once, but only once: a repeated mistake costs a transfer per SHIP_SECONDS.
            if not hosted.was_wrong:
                self._request(hosted)
            raise

    def _copied_words(self, hosted: HostedSpec) -> str:
        if not hosted.copied or self._workers == 1:
            return ""
        return (
            f"each of the {self._workers} workers of {self._host} has its own copy of the dataset "
            f"({size(hosted.nbytes)} pickled): {hosted.copied}"
        )

    def _begin(self, hosted: HostedSpec, session: AgentSession) -> None:
        """Starts the workers of a session that has told its seed, if they are not started yet."""
        if session.base_seed is not None:
            self._specs.begin(hosted, seeding=session.seeding, base_seed=session.base_seed)

    def _announce(self, hosted: HostedSpec) -> None:
        """Tells the trainers of a spec that this host can make its batches, or why it cannot."""
        for session in [s for s in self._sessions.values() if s.spec == hosted.digest]:
            if hosted.state == "ready" and not session.is_ready:
                if session.base_seed is not None and not hosted.is_ready_for(session.seeding):
                    # Announced again once a worker is ready: until then no batch is late.
                    self._begin(hosted, session)
                    continue
                session.is_ready = True
                session.credits = self.dispatch.share(session)
                ready = protocol.Ready(
                    session=session.name,
                    spec=hosted.digest,
                    credits=session.credits,
                    workers=self._workers,
                    versions=self._versions,
                    warning=hosted.warning,
                    copied=self._copied_words(hosted),
                )
                self.outbox.send(session, ready)
            elif hosted.state == "failed":
                # Until it is opened again, on another connection or for the next epoch.
                session.is_ready = False
                is_of_host = not hosted.error
                self._fail(
                    session, hosted.reason, hosted.error, is_of_host=is_of_host, fix=hosted.fix
                )
        if hosted.state == "failed":
            self._log.event(EventName.SPEC_FAILED, spec=hosted.digest, reason=hosted.reason)
            # The next session that opens it sends it again: there may be enough memory then.
            self._specs.close_spec(hosted)
            self.dispatch.cancel_queued("the dataset failed on this host", spec=hosted.digest)

    def _fail(
        self,
        session: AgentSession,
        reason: str,
        error: bytes = b"",
        *,
        is_of_host: bool = False,
        fix: str = "",
    ) -> None:
        """Tells a session's trainer that this host makes no batches for it.

        Args:
            session: The session.
            reason: Why, for the log.
            error: What the dataset raised, packed; empty: an error is made of the reason.
            is_of_host: Another host may be able to make them.
            fix: What to do.
        """
        if not error:
            where = f"host {self._host}"
            raised: FeedError = FeedError(reason, where=where, fix=fix)
            if is_of_host:
                why = why_unfed.host_failed(reason, host=self._host, fix=fix)
                raised = why.error(FeedLostError)
            error = pack_error(raised, host=self._host, where="the agent")
        failed = protocol.Failed(
            session=session.name, spec=session.spec, reason=reason, is_of_host=is_of_host
        )
        self.outbox.send(session, failed, error)

    def _make(self, identity: bytes, message: protocol.Make) -> None:
        session = self._sessions.get(message.session)
        if message.only is not None:
            # Never refused: the host that collates makes what does not come.
            if session is not None and session.is_ready and not self._is_draining:
                self.dispatch.lend(session, message)
        elif session is None:
            self.outbox.refuse(identity, message, "unknown session")
        elif self._is_draining:
            self.outbox.refuse(identity, message, "the agent drains")
        elif not session.is_ready:
            self.outbox.refuse(identity, message, "the session is not ready")
        else:
            session.identity = identity
            session.unreachable_since = None
            self.dispatch.ask(identity, session, message)

    def _take_shares(self, message: protocol.Share | protocol.BatchPart) -> None:
        """Takes what other hosts make of a batch, or have made."""
        session = self._sessions.get(message.session)
        if session is None:
            return
        if isinstance(message, protocol.Share):
            self.dispatch.share_out(session, message)
        else:
            self.dispatch.take_part(session, message)

    def _tell_makers(self, identity: bytes, message: protocol.Inquire) -> None:
        session = self._sessions.get(message.session)
        if session is not None:
            self.dispatch.tell_makers(identity, session, message)

    def _cancel(self, name: str, before_epoch_id: int) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.before_epoch_id = max(session.before_epoch_id, before_epoch_id)
        # A worker finishes a batch that it makes alone: `Dispatch` discards the result.
        for key, request in list(session.requests.items()):
            if request.epoch_id < session.before_epoch_id:
                request.is_cancelled = True
                del session.requests[key]
        self._specs.stop_shards(name, before_epoch_id=session.before_epoch_id)
        self._specs.drop_parts(name, before_epoch_id=session.before_epoch_id)

    def _close_session(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for request in session.requests.values():
            request.is_cancelled = True
        session.requests.clear()
        self._specs.stop_shards(name)
        self._specs.drop_parts(name, before_epoch_id=math.inf)
        self._log.event(EventName.SESSION_ENDED, session=name, rank=session.rank, reason=reason)
        self._request_from_others(session.spec)
        self._close_unused_specs()
        self.dispatch.share_credits()

    def _request_from_others(self, spec: str) -> None:
        """Asks for a spec again, if it was expected from a session that is gone."""
        hosted = self._specs.find(spec)
        if hosted is not None and hosted.state == "expected":
            self._request(hosted)

    def _request(self, hosted: HostedSpec) -> None:
        """Asks all trainers that use a spec to send it; the first one's pieces are taken."""
        wanting = [s for s in self._sessions.values() if s.spec == hosted.digest]
        if not wanting:
            self._specs.close_spec(hosted)
            return
        now = time.monotonic()
        self._specs.expect(hosted.digest, nbytes=hosted.nbytes, shipper=b"", now=now)
        for session in wanting:
            self.outbox.send(session, protocol.Need(spec=hosted.digest))

    def _close_unused_specs(self) -> None:
        used = set[str]()
        for session in self._sessions.values():
            used.add(session.spec)
            # One that has changed its spec may still wait for batches of the previous one.
            used.update(request.spec for request in session.requests.values())
        self._specs.close_unused(used)


_unpack = protocol.Unpacker(protocol.ToAgent)


class Agent:
    """Serves batches to the trainers of one run; batches are sent from the port after `port`."""

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
        # What was registered last, with whether it is to be written to.
        self._wanted: dict[int, bool] = {}
        self._assembly = Assembly(max_bytes=feed.max_dataset_bytes)
        self._next_tick = 0.0
        self._heard_at = -math.inf
        self._wake_lock = threading.RLock()

    @property
    def num_sent(self) -> int:
        return self._service.outbox.num_sent if hasattr(self, "_service") else 0

    @property
    def memory_shares(self) -> MemoryShares:
        if not hasattr(self, "_service"):
            return MemoryShares()
        return self._service.dispatch.memory_shares

    @property
    def trainers_heard_at(self) -> float:
        """Monotonic seconds of a trainer's last known sign of life."""
        # An idle trainer (a long checkpoint) is reached if it answered a heartbeat shortly before.
        reached_at = self._service.reached_at if hasattr(self, "_service") else -math.inf
        answered_at = reached_at - crypto.HEARTBEAT_TIMEOUT_SECONDS - crypto.HEARTBEAT_SECONDS
        return max(self._heard_at, answered_at)

    def open(self) -> None:
        """Binds the ports and starts the fork server (about 2 s), which ends with this thread."""
        # First: it must not inherit zmq's descriptors, nor the limit that is raised below.
        is_strict = self._feed.code_check == "error"
        fork_server = ForkServer(host=self._host, refuses_other_code=is_strict)
        # Each unauthenticated connection takes an open file.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        try:
            self._specs = Specs(
                fork_server,
                workers=self._workers,
                splits=self._feed.split_batches,
                rules=LossRules.of(self._feed),
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
                # The first socket starts libzmq's threads.
                self._allow = crypto.AllowList(self._context, self._keys)
            # 0: the system chooses both ports.
            wanted = self.port
            self._open_router(self._context)
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

    def _open_router(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        """Binds the socket of the trainers' requests, and sets `port`."""
        self._router = context.socket(zmq.ROUTER)
        # Else zmq silently drops messages for a peer that is gone; with it, `send` fails.
        self._router.router_mandatory = True
        # Unlimited here: credits bound the queue.
        self._router.sndhwm = 0
        # Before it is bound: nobody connects without the run's keys.
        crypto.secure_server(self._router, self._keys)
        self.port = self._bind_router(self.port)
        self._guard = HandshakeGuard(
            self._router,
            RejectionLog(self._log, port=self.port),
            port=self.port,
            allow_list=self._allow,
        )

    def run(self) -> None:
        """Serves until `stop` or a drain's end; raises FeedLostError if the fork server died."""
        try:
            with without_preempting():
                while self._state == "serving" or self._is_still_draining():
                    self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` at once. Any thread or signal handler may call it, also twice."""
        self._state = "stopping" if self._state != "closed" else "closed"
        self.wake()

    def drain(self) -> None:
        """Ends `run` once begun batches are sent, within 10 s; begins no new ones. See `stop`."""
        if self._state == "serving":
            self._state = "draining"
        self.wake()

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends to a peer, without blocking; returns False if it is not connected."""
        try:
            self._router.send_multipart([identity, *frames], zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def ticket_for(self, identity: bytes) -> protocol.Ticket:
        return self._batches.ticket_for(identity, time.monotonic())

    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool:
        return self._batches.send(identity, batch)

    def wake(self) -> None:
        """Wakes the loop for one more turn. Any thread or signal handler may call it."""
        # Re-entrant: a signal handler may come in between.
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Stops workers and fork server, closes sockets; may be called twice. 10 s at most."""
        if self._state == "closed":
            return
        # After a drain the last answers are still to be sent.
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
            # A thread that still sends may call `wake` after the number is reused.
            wake_fd = self._wake_fd
            self._wake_fd = -1
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
        return int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def _turn(self) -> None:
        self._watch()
        look = self._specs.next_look_seconds()
        seconds = TICK_SECONDS if look is None else min(look, TICK_SECONDS)
        # Rounded up, or it ends too early.
        ready = dict(self._poller.poll(math.ceil(seconds * 1000)))
        if self._wake_fd in ready:
            # First: a later call of `wake` ends the next poll.
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
            if not self._specs.is_alive and self._state == "serving":
                raise FeedLostError(
                    "the process that forks the data workers died, perhaps out of memory",
                    where=f"host {self._host}",
                    fix="use fewer workers per host, or hosts with more memory",
                )
            self._service.tick(now)

    def _watch(self) -> None:
        wanted = self._specs.sockets() | dict.fromkeys(self._batches.filenos(), False)
        if wanted == self._wanted:
            return
        self._wanted = wanted
        for fileno in self._registered.keys() - wanted.keys():
            self._poller.unregister(fileno)
        for fileno, wants_write in wanted.items():
            flags = zmq.POLLIN | zmq.POLLOUT if wants_write else zmq.POLLIN
            if self._registered.get(fileno) != flags:
                self._poller.register(fileno, flags)
                self._registered[fileno] = flags
        self._registered = {fileno: self._registered[fileno] for fileno in wanted}

    def _receive(self) -> None:
        # A limit, so that workers and batches have their turn.
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            # Every peer here is authenticated.
            self._heard_at = time.monotonic()
            identity = frames[0].bytes
            try:
                self._take(identity, frames[1:])
            # Only this message is refused: its peer has the token, so this is a bug, not an attack.
            except ProtocolError as err:
                self._service.warn(identity, EventName.MALFORMED_PEER, str(err))

    def _take(self, identity: bytes, frames: Sequence[zmq.Frame]) -> None:
        """Takes a message, or a piece of a long one.

        Args:
            identity: Of the peer.
            frames: The packed message, and what comes with some.

        Raises:
            ProtocolError: If it is malformed.
        """
        if len(frames) not in (1, 2):
            raise ProtocolError(f"message of {len(frames) + 1} frames")
        self._guard.note_proved(frames[0])
        frame = frames[1].buffer if len(frames) == 2 else memoryview(b"")
        message = _unpack(frames[0].buffer)
        if isinstance(message, protocol.Piece):
            whole = self._assembly.take(identity, frame, is_last=message.is_last)
            if whole is None:
                return
            message = _unpack(whole)
            frame = memoryview(b"")
        self._service.take(identity, message, frame)

    def _is_still_draining(self) -> bool:
        if self._state != "draining":
            return False
        now = time.monotonic()
        if self._drain_until is None:
            self._drain_until = now + DRAIN_SECONDS
            self._service.drain()
        is_busy = self._service.dispatch.num_begun > 0 or self._service.outbox.sent_bytes > 0
        return is_busy and now < self._drain_until and self._specs.is_alive
