"""The agent of a data host: its two ports, and the sessions of the trainers.

It starts processes and hands connections over; no batch comes through it. One poll loop over zmq
(`crypto` has the handshakes), the port for batches, and what loader processes report (`hosting`).
"""

import contextlib
import os
import time

import zmq

from stoker.errors import ProtocolError, UsageError
from stoker.feed.engine import run_messages as messages
from stoker.feed.engine.batch_port import BatchPort
from stoker.feed.engine.crypto import ControlServer, Keys
from stoker.feed.engine.hosting import Attach, Hosting
from stoker.feed.engine.records import new_key
from stoker.host.machine import without_preempting
from stoker.logs import EventName, Log

# Sessions are probed this often, to notice that a trainer is gone.
TICK_SECONDS = 1.0
# After the end, for the last answers.
_LINGER_SECONDS = 2.0

_unpack = messages.Unpacker(messages.ToAgent)


class Agent:
    """Serves the trainers of one run; batches take connections at the port after its own.

    Made, it has bound its ports and started the first loader process (about 2 s until it is ready).
    """

    def __init__(
        self, keys: Keys, log: Log, *, host: str, bind: str, port: int | None, workers: int
    ) -> None:
        self._log = log
        self._host = host
        self._is_stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # The control connection of each session.
        self._sessions: dict[str, bytes] = {}
        self._tick_at = 0.0
        with contextlib.ExitStack() as closing:
            self._hosting = Hosting(host=host, log=log, tell=self._tell, invite=self._invite)
            closing.callback(self._hosting.close)
            try:
                self._server = ControlServer(keys, log, endpoint=f"tcp://{bind}:{port or '*'}")
                closing.callback(self._server.close, linger_seconds=_LINGER_SECONDS)
                next_port = port + 1 if port else 0
                rejections = self._server.rejections
                self._batches = BatchPort(bind=bind, port=next_port, rejections=rejections)
            except (zmq.ZMQError, OSError) as err:
                raise UsageError(
                    f"port {port} or the next one cannot be bound: {err.strerror}",
                    where=f"host {host}",
                    fix="set feed.port so that it and the next port are free on every host",
                ) from None
            closing.callback(self._batches.close)
            # Without a number the system has chosen both ports.
            self.port = self._server.port
            self.batch_port = self._batches.port
            self._closing = closing.pop_all()
        log.event(EventName.AGENT_LISTENING, port=self.port, workers=workers)

    def run(self) -> None:
        """Serves until `stop`; raises FeedLostError if all processes died."""
        try:
            with without_preempting():
                while not self._is_stopping:
                    self._turn()
        finally:
            # Ends processes, closes sockets.
            self._closing.close()
            self._log.event(EventName.AGENT_ENDED)

    def stop(self) -> None:
        """Ends `run` at once. Any thread or signal handler may call it, also twice."""
        self._is_stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def _turn(self) -> None:
        poller = zmq.Poller()
        filenos = (*self._hosting.filenos(), *self._batches.filenos())
        for source in (*self._server.sources, self._wake_fd, *filenos):
            poller.register(source, zmq.POLLIN)
        ready: dict[object, int] = dict(poller.poll(int(TICK_SECONDS * 1000)))
        now = time.monotonic()
        self._server.handle(ready, now)
        for identity, packed in self._server.receive():
            try:
                self._take(identity, _unpack(packed))
            # Only this message is refused: its peer has the token, so this is a bug, not an attack.
            except ProtocolError as err:
                self._server.rejections.add("a process of this run", str(err))
        self._batches.handle(ready, now)
        self._hosting.handle(ready)
        if now >= self._tick_at:
            self._tick_at = now + TICK_SECONDS
            self._server.tick(now)
            self._batches.tick(now)
            # zmq says whether the trainer is still connected; one that comes back opens it again.
            for name in list(self._sessions):
                if not self._tell(name, messages.Probe()):
                    self._close_session(name)

    # ---- trainers

    def _take(self, identity: bytes, message: messages.Message) -> None:
        match message:
            case messages.Open(host=host) if host != self._host:
                # This host now has the address of another one.
                self._server.send(identity, messages.pack(messages.WrongHost(host=self._host)))
            case messages.Open(session=name):
                if name not in self._sessions:
                    self._log.event(EventName.SESSION_OPENED, session=name)
                self._sessions[name] = identity
                self._hosting.obey(message)
            case messages.Close(session=name):
                self._close_session(name)
            case _:
                self._hosting.obey(message)

    def _close_session(self, name: str) -> None:
        if self._sessions.pop(name, None) is not None:
            self._hosting.obey(messages.Close(session=name))

    def _invite(self, session: str, worker: int, dataset: str, attach: Attach) -> None:
        """Sends a ticket for a connection, which `attach` gets with its key."""
        key = new_key()
        ticket = self._batches.ticket_for(
            lambda connection: attach(connection.fileno(), key), now=time.monotonic()
        )
        answer = messages.Ticket(
            session=session, worker=worker, dataset=dataset, ticket=ticket, key=key
        )
        self._tell(session, answer)

    def _tell(self, name: str, message: messages.Message) -> bool:
        """Sends a message to a session's trainer; returns whether it is connected."""
        identity = self._sessions.get(name)
        return identity is not None and self._server.send(identity, messages.pack(message))
