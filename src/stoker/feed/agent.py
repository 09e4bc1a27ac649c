"""The agent of a data host: listens on its ports, has workers make batches, and sends them.

One poll loop: zmq, the port for batches, the workers' channels, the holders' channels and a wake-up
descriptor; and a thread for each trainer that batches are sent to. What is done for the trainers is
in `service`.
"""

import contextlib
import math
import os
import resource
import threading
import time
from collections.abc import Sequence
from typing import Literal

import zmq

from stoker.errors import FeedLostError, ProtocolError, UsageError
from stoker.feed import messages, security
from stoker.feed.arrival import Assembly
from stoker.feed.batch_port import BatchPort, OutgoingBatch
from stoker.feed.holders import Nursery
from stoker.feed.service import Service
from stoker.feed.specs import Specs
from stoker.feed.strangers import HandshakeGuard, StrangerLog
from stoker.host.cpu import interrupting_nobody
from stoker.logs import Log
from stoker.records import FeedSettings

# What is begun is finished within this, or dropped.
DRAIN_SECONDS = 10.0
TICK_SECONDS = 1.0
_MAX_MESSAGES_A_TURN = 100
_LINGER_MILLISECONDS = 2000

_unpack = messages.Unpacker(messages.ToAgent)


class Agent:
    """Serves batches to the trainers of one run.

    Args:
        workers: Batches made at a time.
        host: This host's name, in errors and logs.
        port: None: any free one, and another free one for batches. Else these are sent from
            `port` + 1.

    Attributes:
        port: The bound one, after `open`.
        batch_port: As `port`, for batches.
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
        """Batches sent so far."""
        return self._service.num_sent if hasattr(self, "_service") else 0

    @property
    def trainers_heard_at(self) -> float:
        """When a trainer showed a sign of life, as far as is known; monotonic seconds.

        It asked for something; or, while it asks for nothing (a long checkpoint), its connection
        took a message, and the other end of that answered a heartbeat a little before.
        """
        reached_at = self._service.reached_at if hasattr(self, "_service") else -math.inf
        answered_at = reached_at - security.HEARTBEAT_TIMEOUT_SECONDS - security.HEARTBEAT_SECONDS
        return max(self._heard_at, answered_at)

    def open(self) -> None:
        """Binds the ports and starts the nursery, which takes about 2 s to be ready.

        The calling thread must live as long as the agent: its end would end the nursery.

        Raises:
            UsageError: If a port is taken.
        """
        # First: no descriptor of zmq reaches the nursery, nor does the limit that is raised below.
        nursery = Nursery(host=self._host)
        _allow_all_files()
        try:
            self._specs = Specs(
                nursery,
                workers=self._workers,
                host=self._host,
                wake=self.wake,
                on_death=lambda how: self._log.event("data_worker_died", how=how),
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
            with interrupting_nobody():
                # libzmq starts them with the first socket.
                self._allow = security.AllowList(self._context, self._keys)
            self._router = self._context.socket(zmq.ROUTER)
            self._router.router_mandatory = True
            # Bounded by credits, not by dropping.
            self._router.sndhwm = 0
            security.secure_server(self._router, self._keys)
            self._router.router_handover = True
            wanted = self.port
            self.port = self._bind_router(wanted)
            self._guard = HandshakeGuard(
                self._router, StrangerLog(self._log, port=self.port), port=self.port
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
            nursery.close()
            self.close()
            raise
        self._poller = zmq.Poller()
        for source in (self._router, self._guard.monitor, self._allow.socket):
            self._poller.register(source, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._log.event("agent_listens", port=self.port, workers=self._workers)

    def run(self) -> None:
        """Serves until `stop`, or until a drain is done; then closes everything.

        Raises:
            FeedLostError: If the nursery died.
        """
        try:
            with interrupting_nobody():
                while self._state == "serving" or self._is_still_draining():
                    self._turn()
        finally:
            self.close()

    def stop(self) -> None:
        """Ends `run` at once. Any thread and any signal handler may call it, twice too."""
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

    def ticket_for(self, identity: bytes) -> messages.Ticket:
        """A ticket for a peer's connection for batches."""
        return self._batches.ticket_for(identity, time.monotonic())

    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch for a peer; False if it has no connection for batches, nor a ticket."""
        return self._batches.send(identity, batch)

    def wake(self) -> None:
        """Has the loop turn once more. Any thread and any signal handler may call it."""
        # Re-entrant: a signal handler may come in between.
        with self._wake_lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """Ends workers, nursery and sockets; may be called twice. 10 s at most."""
        if self._state == "closed":
            return
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
            # What zmq lets go of later must not write to another file of that number.
            wake_fd, self._wake_fd = self._wake_fd, -1
            os.close(wake_fd)
        self._log.event("agent_ends", batches=self.num_sent)

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
            os.eventfd_read(self._wake_fd)
        if self._allow.socket in ready:
            self._allow.handle()
        if self._guard.monitor in ready:
            self._guard.handle(time.monotonic())
        if self._router in ready:
            self._receive()
        self._batches.handle(ready, time.monotonic())
        self._service.work([key for key in ready if isinstance(key, int)])
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._guard.tick(now)
            self._batches.tick(now)
            self._check_nursery()
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
                if isinstance(message, messages.Piece):
                    whole = self._assembly.take(identity, frame, is_last=message.is_last)
                    if whole is None:
                        continue
                    message, frame = _unpack(whole), memoryview(b"")
                self._service.take(identity, message, frame)
            except ProtocolError as err:
                self._service.warn(identity, "peer_sends_rubbish", str(err))

    def _check_nursery(self) -> None:
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
