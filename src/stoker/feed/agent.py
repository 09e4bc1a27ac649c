"""The agent of a data host: listens on one port, has workers make batches, and sends them.

One thread, one poll loop: zmq, the workers' channels, the holders' channels and a wake-up
descriptor. At most `workers` batches are being made at a time, over all specs and ranks, in order
of batch number. A batch goes from the worker's shared memory to zmq without a copy; its slot is
free again when zmq has let go of it.
"""

import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Literal

import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError, UsageError
from stoker.feed import messages, security
from stoker.feed.holders import Nursery
from stoker.feed.pool import Job, Result
from stoker.feed.requests import Credits, Queue, Request, Session
from stoker.feed.shipping import digest, pack_error
from stoker.feed.specs import HeldSpec, Specs, compare_versions, own_versions
from stoker.logs import Log
from stoker.records import FeedSettings

# What is begun is finished within this, or dropped.
DRAIN_SECONDS = 10.0
# A trainer whose connection is gone may come back within this.
UNREACHABLE_SECONDS = 15.0
TICK_SECONDS = 1.0
# Silent sessions are spoken to this often: a trainer that is gone is noticed.
PROBE_SECONDS = 10.0
# A host that was told to ship a spec and does not: another one is asked.
SHIP_SECONDS = 120.0
_MAX_PLAIN_INPUT_BYTES = 1024
_MAX_MESSAGES_A_TURN = 100
_LINGER_MILLISECONDS = 2000

_unpack = messages.Unpacker(messages.ToAgent)


class Agent:
    """Serves batches to the trainers of one run.

    Args:
        workers: Batches made at a time.
        host: This host's name, in errors and logs.
        port: None: any free one.
        plain: Also open a port for batches that are not encrypted: `port` + 1.

    Attributes:
        port: The bound one, after `open`.
        plain_port: 0 without one.
    """

    def __init__(
        self,
        *,
        keys: security.Keys,
        workers: int,
        feed: FeedSettings,
        log: Log,
        host: str,
        run_id: str,
        bind: str = "*",
        port: int | None,
        plain: bool,
    ) -> None:
        self._keys = keys
        self._feed = feed
        self._log = log
        self._host = host
        self._run_id = run_id
        self._bind = bind
        self._has_plain = plain
        self.port = port or 0
        self.plain_port = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._state: Literal["serving", "draining", "stopping", "closed"] = "serving"
        self._drain_until: float | None = None
        self._sessions: dict[str, Session] = {}
        self._queue = Queue()
        self._credits = Credits(workers=workers, per_worker=feed.credits)
        self._workers = workers
        self._num_begun = 0
        self._sent_bytes = 0
        self._let_go: deque[int] = deque()
        self._warned: set[tuple[bytes, str]] = set()
        self._registered: dict[int, int] = {}
        self._versions = own_versions()
        self._next_tick = 0.0
        self._probed_at = time.monotonic()

    def open(self) -> None:
        """Binds the ports and starts the nursery, which takes about 2 s to be ready.

        The calling thread must live as long as the agent: its end would end the nursery.

        Raises:
            UsageError: If a port is taken.
        """
        # First: no descriptor of zmq reaches the nursery.
        nursery = Nursery(host=self._host)
        try:
            self._specs = Specs(nursery, workers=self._workers, host=self._host, wake=self._wake)
            # Two I/O threads: one encrypts about 1.7 GB/s.
            self._context = zmq.Context(io_threads=2)
            self._allow = security.AllowList(self._context, self._keys)
            self._router = self._router_socket()
            limit = self._feed.max_dataset_bytes + (16 << 20)
            security.secure_server(self._router, self._keys, max_message_bytes=limit)
            self._router.router_handover = True
            self._plain = self._router_socket()
            security.plain_socket(self._plain, max_message_bytes=_MAX_PLAIN_INPUT_BYTES)
            self.port = self._bind_socket(self._router, self.port)
            if self._has_plain:
                plain_port = self.port + 1 if self.port < 65535 else 0
                self.plain_port = self._bind_socket(self._plain, plain_port)
        except BaseException:
            nursery.close()
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._router, self._plain, self._allow.socket):
            self._poller.register(source, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._log.event("agent_listens", port=self.port, workers=self._workers)

    def run(self) -> None:
        """Serves until `stop`, or until a drain is done; then closes everything.

        Raises:
            FeedLostError: If the nursery died.
        """
        try:
            while self._state == "serving" or self._is_still_draining():
                self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` at once. Any thread and any signal handler may call it, twice too."""
        self._state = "stopping" if self._state != "closed" else "closed"
        self._wake()

    def drain(self) -> None:
        """Ends `run` when what is begun is sent, within 10 s; nothing new is begun. As `stop`."""
        if self._state == "serving":
            self._state = "draining"
        self._wake()

    def close(self) -> None:
        """Ends workers, nursery and sockets; may be called twice. 10 s at most."""
        if self._state == "closed":
            return
        linger = _LINGER_MILLISECONDS if self._state == "draining" else 0
        self._state = "closed"
        if hasattr(self, "_specs"):
            self._specs.close()
        if self._context is not None:
            self._context.destroy(linger=linger)
        os.close(self._wake_fd)
        self._log.event("agent_ends", sessions=len(self._sessions))

    def _router_socket(self) -> "zmq.Socket[bytes]":
        assert self._context is not None
        router = self._context.socket(zmq.ROUTER)
        router.router_mandatory = True
        # Bounded by credits and max_bytes, not by dropping.
        router.sndhwm = 0
        return router

    def _bind_socket(self, socket: "zmq.Socket[bytes]", port: int) -> int:
        try:
            socket.bind(f"tcp://{self._bind}:{port or '*'}")
        except zmq.ZMQError as err:
            raise UsageError(
                f"port {port} cannot be bound: {err.strerror}",
                where=f"host {self._host}",
                fix="set feed.port to a free port of every host",
            ) from None
        endpoint = socket.get_string(zmq.LAST_ENDPOINT)
        return int(endpoint.rpartition(":")[2])

    def _wake(self) -> None:
        try:
            os.eventfd_write(self._wake_fd, 1)
        except OSError:
            # Closed, or full of wake-ups already.
            return

    def _turn(self) -> None:
        """Waits for something to do, a second at most, and does it."""
        self._watch()
        ready = dict(self._poller.poll(round(TICK_SECONDS * 1000)))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._allow.socket in ready:
            self._allow.handle()
        if self._plain in ready:
            self._discard_plain()
        if self._router in ready:
            self._receive()
        for spec in self._specs.handle([key for key in ready if isinstance(key, int)]):
            self._announce(spec)
        while self._let_go:
            self._sent_bytes -= self._let_go.popleft()
        results = list(self._specs.results())
        self._num_begun -= len(results)
        # Before the batches are sent: their workers are idle.
        self._dispatch()
        for result in results:
            self._deliver(result)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick(now)

    def _watch(self) -> None:
        wanted = self._specs.sockets()
        for fileno in self._registered.keys() - wanted.keys():
            self._poller.unregister(fileno)
        for fileno, wants_write in wanted.items():
            flags = zmq.POLLIN | zmq.POLLOUT if wants_write else zmq.POLLIN
            if self._registered.get(fileno) != flags:
                self._poller.register(fileno, flags)
                self._registered[fileno] = flags
        self._registered = {fileno: self._registered[fileno] for fileno in wanted}

    def _discard_plain(self) -> None:
        """Nobody has anything to say on the plain port."""
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                self._plain.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return

    def _receive(self) -> None:
        for _ in range(_MAX_MESSAGES_A_TURN):
            try:
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes
            try:
                if len(frames) not in (2, 3):
                    raise ProtocolError(f"a message of {len(frames)} frames")
                frame = frames[2].buffer if len(frames) == 3 else memoryview(b"")
                self._take(identity, _unpack(frames[1].buffer), frame)
            except ProtocolError as err:
                self._warn(identity, "peer_sends_rubbish", str(err))

    def _take(self, identity: bytes, message: messages.Message, frame: memoryview) -> None:
        match message:
            case messages.Open():
                self._open_session(identity, message)
            case messages.Ship(spec=spec):
                self._ship(spec, frame)
            case messages.Make():
                self._make(identity, message, frame)
            case messages.Forget(session=name, before_epoch=before_epoch):
                self._forget(name, before_epoch)
            case messages.Close(session=name):
                self._end_session(name, "closed")

    def _open_session(self, identity: bytes, message: messages.Open) -> None:
        session = self._sessions.get(message.session)
        if session is None:
            session = Session(
                name=message.session,
                identity=identity,
                rank=message.rank,
                spec=message.spec,
                seeding=message.seeding,
                plain_identity=message.plain_identity,
            )
            self._log.event("session_opens", session=session.name, rank=session.rank)
        session.identity, session.spec, session.seeding = identity, message.spec, message.seeding
        session.plain_identity = message.plain_identity
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
            self._warn(identity, "versions_differ", warning)
        self._sessions[session.name] = session
        held = self._specs.find(message.spec)
        if held is None:
            self._specs.expect(message.spec, now=time.monotonic())
            self._send(session, messages.Need(spec=message.spec))
        elif held.state == "ready":
            self._announce(held)
        self._retire()

    def _ship(self, spec: str, frame: memoryview) -> None:
        held = self._specs.find(spec)
        if held is None or held.state != "expected":
            return
        if len(frame) > self._feed.max_dataset_bytes or digest(frame) != spec:
            raise ProtocolError("a shipped spec that is not the one named")
        self._log.event("spec_arrives", spec=spec, bytes=len(frame))
        try:
            self._specs.hold(held, frame)
        except OSError as err:
            held.state, held.reason = "failed", f"no memory for the dataset: {err.strerror}"
            self._announce(held)

    def _announce(self, held: HeldSpec) -> None:
        """Tells the sessions of a spec what became of it."""
        for session in [s for s in self._sessions.values() if s.spec == held.digest]:
            if held.state == "ready" and not session.is_ready:
                session.is_ready = True
                session.credits = self._share(session)
                ready = messages.Ready(
                    session=session.name,
                    spec=held.digest,
                    credits=session.credits,
                    workers=self._workers,
                    versions=self._versions,
                )
                self._send(session, ready)
            elif held.state == "failed":
                self._fail(session, held.reason, held.error)
        if held.state == "failed":
            self._log.event("spec_fails", spec=held.digest, reason=held.reason)
            self._specs.forget(held)
            self._drop(
                [r for r in self._queue if r.spec == held.digest], "the dataset failed on this host"
            )

    def _fail(self, session: Session, reason: str, error: bytes = b"") -> None:
        packed = error or pack_error(
            FeedError(reason, where=f"host {self._host}"), host=self._host, where="the agent"
        )
        failed = messages.Failed(session=session.name, spec=session.spec, reason=reason)
        self._send(session, failed, packed)

    def _make(self, identity: bytes, message: messages.Make, frame: memoryview) -> None:
        session = self._sessions.get(message.session)
        if session is None or self._state != "serving" or not session.is_ready:
            reason = "the agent knows no such session" if session is None else "the agent drains"
            if session is not None and self._state == "serving":
                reason = "the session is not ready"
            self._refuse(identity, message, reason)
            return
        session.identity, session.unreachable_since = identity, None
        key = (message.epoch, message.number)
        if message.epoch < session.before_epoch or key in session.requests:
            return
        if len(session.requests) >= session.max_requests:
            self._refuse(identity, message, "asked for far more than the credits")
            return
        request = Request(
            session,
            session.spec,
            session.seeding,
            message.epoch,
            message.number,
            bytes(frame),
            message.seed,
        )
        was_active = session.is_active(time.monotonic())
        session.requests[key] = request
        session.asked_at = time.monotonic()
        self._queue.push(request)
        if not was_active:
            self._share_credits()

    def _refuse(self, identity: bytes, message: messages.Make, reason: str) -> None:
        dropped = messages.Dropped(
            session=message.session, epoch=message.epoch, number=message.number, reason=reason
        )
        self._send_frames(identity, [messages.pack(dropped)])

    def _forget(self, name: str, before_epoch: int) -> None:
        session = self._sessions.get(name)
        if session is None:
            return
        session.before_epoch = max(session.before_epoch, before_epoch)
        for key, request in list(session.requests.items()):
            if request.epoch < session.before_epoch:
                request.is_dropped = True
                del session.requests[key]

    def _end_session(self, name: str, reason: str) -> None:
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for request in session.requests.values():
            request.is_dropped = True
        session.requests.clear()
        self._log.event("session_ends", session=name, rank=session.rank, reason=reason)
        held = self._specs.find(session.spec)
        if held is not None and held.state == "expected":
            self._need(held)
        self._retire()
        self._share_credits()

    def _need(self, held: HeldSpec) -> None:
        """Asks for a spec again: who was asked first is gone, or silent."""
        self._specs.expect(held.digest, now=time.monotonic())
        for session in [s for s in self._sessions.values() if s.spec == held.digest]:
            self._send(session, messages.Need(spec=held.digest))

    def _retire(self) -> None:
        used = {session.spec for session in self._sessions.values()}
        used.update(r.spec for s in self._sessions.values() for r in s.requests.values())
        self._specs.retire(used)

    def _dispatch(self) -> None:
        """Gives the first requests to idle workers, as far as memory allows."""
        self._specs.flush()
        while self._num_begun < self._workers:
            if self._sent_bytes > self._feed.max_bytes and self._sent_bytes > 0:
                return
            idle = self._specs.idle()
            request = self._queue.pop(specs=idle)
            if request is None:
                return
            request.is_begun = True
            self._num_begun += 1
            self._specs.assign(
                (request.spec, request.seeding), Job((request,), request.index, request.seed)
            )

    def _deliver(self, result: Result) -> None:
        (request,) = result.job.key
        assert isinstance(request, Request)
        self._credits.count(is_dry=not len(self._queue))
        session = request.session
        session.requests.pop((request.epoch, request.number), None)
        if request.is_dropped:
            result.release()
            return
        name, epoch, number = session.name, request.epoch, request.number
        if result.is_lost:
            self._log.event("batch_lost", number=number, reason=result.summary)
            dropped = messages.Dropped(
                session=name, epoch=epoch, number=number, reason=result.summary
            )
            self._send(session, dropped)
        elif result.tree is None:
            raised = messages.Raised(
                session=name, epoch=epoch, number=number, summary=result.summary
            )
            self._send(session, raised, result.error or b"")
        else:
            made = messages.Made(
                session=name,
                epoch=epoch,
                number=number,
                tree=result.tree,
                cpu_seconds=result.cpu_seconds,
                wall_seconds=result.wall_seconds,
                worker=result.worker,
            )
            self._send_batch(session, made, result)

    def _send_batch(self, session: Session, made: messages.Made, result: Result) -> None:
        packed = messages.pack(made)
        payload, result.payload = result.payload, None
        frames: list[bytes | memoryview] = [packed]
        if payload is not None:
            self._sent_bytes += payload.nbytes
            # Runs where zmq lets go of the memory, in a thread of its own.
            done = weakref.finalize(payload, self._free, result, payload.nbytes)
            done.atexit = False
            frames.append(payload.data)
        is_plain = session.plain_identity and self.plain_port and not result.has_pickle
        if is_plain:
            mac = security.sign(self._keys.mac_key, packed)
            # Where the plain connection is not there (yet), the encrypted one is.
            if self._send_on(self._plain, session.plain_identity, [mac, *frames]):
                return
        self._mark(session, is_sent=self._send_frames(session.identity, frames))

    def _free(self, result: Result, nbytes: int) -> None:
        self._let_go.append(nbytes)
        result.release()

    def _send(self, session: Session, message: messages.Message, frame: bytes = b"") -> None:
        frames = [messages.pack(message), frame] if frame else [messages.pack(message)]
        self._mark(session, is_sent=self._send_frames(session.identity, frames))

    def _send_frames(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        return self._send_on(self._router, identity, frames)

    def _send_on(
        self, socket: "zmq.Socket[bytes]", identity: bytes, frames: Sequence[bytes | memoryview]
    ) -> bool:
        try:
            socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            return False
        return True

    def _mark(self, session: Session, *, is_sent: bool) -> None:
        if is_sent:
            session.unreachable_since = None
        elif session.unreachable_since is None:
            session.unreachable_since = time.monotonic()

    def _drop(self, requests: Sequence[Request], reason: str) -> None:
        for request in requests:
            session = request.session
            request.is_dropped = True
            session.requests.pop((request.epoch, request.number), None)
            dropped = messages.Dropped(
                session=session.name, epoch=request.epoch, number=request.number, reason=reason
            )
            self._send(session, dropped)

    def _share(self, session: Session) -> int:
        return self._credits.share(session, self._sessions.values(), time.monotonic())

    def _share_credits(self) -> None:
        for session in self._sessions.values():
            share = self._share(session)
            if session.is_ready and share != session.credits:
                session.credits = share
                self._send(session, messages.Credits(session=session.name, credits=share))

    def _tick(self, now: float) -> None:
        if not self._specs.is_alive and self._state == "serving":
            raise FeedLostError(
                "the process that forks the data workers died, perhaps out of memory",
                where=f"host {self._host}",
                fix="use fewer workers a host, or hosts with more memory",
            )
        self._credits.adapt()
        self._share_credits()
        if now - self._probed_at >= PROBE_SECONDS:
            self._probed_at = now
            for session in self._sessions.values():
                if session.is_ready and not session.requests:
                    message = messages.Credits(session=session.name, credits=session.credits)
                    self._send(session, message)
        for session in list(self._sessions.values()):
            since = session.unreachable_since
            if since is not None and now - since > UNREACHABLE_SECONDS:
                self._end_session(session.name, "unreachable")
        for held in self._specs.overdue(now - SHIP_SECONDS):
            self._need(held)

    def _is_still_draining(self) -> bool:
        if self._state != "draining":
            return False
        now = time.monotonic()
        if self._drain_until is None:
            self._drain_until = now + DRAIN_SECONDS
            self._log.event("agent_drains", begun=self._num_begun, queued=len(self._queue))
            for session in self._sessions.values():
                self._send(session, messages.Leaving())
            self._drop(list(self._queue), "the agent drains")
        return self._num_begun > 0 and now < self._drain_until and self._specs.is_alive

    def _warn(self, identity: bytes, event: str, reason: str) -> None:
        """Once a peer: what is wrong is not repeated with every message."""
        if (identity, event) not in self._warned and len(self._warned) < 1000:
            self._warned.add((identity, event))
            self._log.event(event, peer=identity.hex(), reason=reason[:200])
