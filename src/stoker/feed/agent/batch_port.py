"""The agent's port for batches: plain TCP, opened by tickets.

A trainer requests a ticket over CURVE, connects here, and sends it as the first bytes; from then on
the data host only sends. Bytes from an unauthenticated connection are compared with the tickets
given out and never parsed; at most 32 of them are read, within 10 s.

The agent's loop accepts and compares. An authenticated connection gets a thread, which seals that
trainer's batches from the workers' shared memory as it sends them.
"""

import contextlib
import errno
import hmac
import queue
import secrets
import socket
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from stoker.errors import UsageError
from stoker.feed.wire.codec import Bytes1D
from stoker.feed.wire.crypto import HANDSHAKE_SECONDS, MAX_WAITING, RejectionLog
from stoker.feed.wire.protocol import TICKET_BYTES, Ticket
from stoker.feed.wire.sealing import Sealer, SessionEpoch, new_key
from stoker.feed.wire.stream import BatchWriter, BufferPool, tune
from stoker.logs import Log

# Trainers connect at once, and request another ticket if that failed.
_TICKET_SECONDS = 60.0
_MAX_ACCEPTED_A_TURN = 100
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# For threads that still send when the agent ends.
_JOIN_SECONDS = 2.0


@dataclass(slots=True)
class OutgoingBatch:
    """A batch to be sent; `done` is called once, from any thread, when its payload may go."""

    packed: bytes
    payload: Bytes1D | None
    of: SessionEpoch
    done: Callable[[], None]


class BatchPort:
    """The listening port and its connections; used by the agent's thread, which `wake` wakes."""

    def __init__(
        self,
        *,
        bind: str,
        port: int | None,
        host: str,
        run_id: str,
        log: Log,
        wake: Callable[[], None],
    ) -> None:
        try:
            self._listener = _listen(bind, port or 0)
        except OSError as err:
            raise UsageError(
                f"port {port} cannot be bound: {err.strerror}",
                where=f"host {host}, run {run_id}",
                fix="set feed.port so that it and the next port are free on every host",
            ) from None
        self.port = int(self._listener.getsockname()[1])
        self._log = log
        self._rejections = RejectionLog(log, port=self.port)
        self._wake = wake
        self._pool = BufferPool()
        # The oldest first.
        self._waiting: dict[int, _UnauthenticatedConnection] = {}
        self._lines: dict[bytes, _SendLine] = {}
        # Closed lines, whose threads may still run.
        self._ending: list[_SendLine] = []
        self._is_full = False

    def filenos(self) -> list[int]:
        attached = [line.connection for line in self._lines.values() if line.connection]
        listener = [] if self._is_full else [self._listener]
        return [*self._waiting, *(connection.fileno() for connection in (*listener, *attached))]

    def ticket_for(self, identity: bytes, now: float) -> Ticket:
        """Returns a ticket for a trainer; voids an earlier one."""
        self._close_line(identity)
        ticket = Ticket(ticket=secrets.token_bytes(TICKET_BYTES), key=new_key())
        self._lines[identity] = _SendLine(ticket, made_at=now, wake=self._wake)
        return ticket

    def send(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch; returns False if the trainer has neither connection nor ticket."""
        line = self._lines.get(identity)
        return line is not None and line.put(batch)

    def handle(self, ready: Container[int], now: float) -> None:
        for identity, line in list(self._lines.items()):
            connection = line.connection
            # A trainer must not send: readable means closed by it, or a violation.
            if line.is_closed or (connection is not None and connection.fileno() in ready):
                self._close_line(identity)
        self._ending = [line for line in self._ending if not line.has_ended()]
        for fileno in [fileno for fileno in self._waiting if fileno in ready]:
            self._read(fileno)
        if self._listener.fileno() in ready:
            self._accept(now)

    def tick(self, now: float) -> None:
        """Closes unauthenticated connections and unused tickets after their time; once a second."""
        self._is_full = False
        for fileno, peer in list(self._waiting.items()):
            if now - peer.since > HANDSHAKE_SECONDS:
                self._reject(fileno, "no ticket in time")
        for identity, line in list(self._lines.items()):
            if line.connection is None and now - line.made_at > _TICKET_SECONDS:
                self._close_line(identity)
        self._rejections.tick(now)

    def close(self) -> None:
        """Closes all connections, within 2 s; the kernel still delivers what it has taken."""
        self._listener.close()
        for peer in self._waiting.values():
            peer.connection.close()
        self._waiting.clear()
        for identity in list(self._lines):
            self._close_line(identity)
        lines = self._ending
        self._ending = []
        for line in lines:
            line.has_ended(within_seconds=_JOIN_SECONDS)

    def _accept(self, now: float) -> None:
        for _ in range(_MAX_ACCEPTED_A_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as err:
                if err.errno in _NO_FILES and self._waiting:
                    self._reject(next(iter(self._waiting)), "no more open files")
                elif err.errno in _NO_FILES:
                    # Not polled until the next tick: it would be ready again at once.
                    self._is_full = True
                    return
                continue
            connection.setblocking(False)
            self._waiting[connection.fileno()] = _UnauthenticatedConnection(
                connection, str(address[0]), now
            )
            if len(self._waiting) > MAX_WAITING:
                # Trainers send their ticket at once, so the oldest is not one.
                self._reject(next(iter(self._waiting)), f"more than {MAX_WAITING} at a time")

    def _read(self, fileno: int) -> None:
        peer = self._waiting[fileno]
        try:
            data = peer.connection.recv(TICKET_BYTES - len(peer.sent))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.sent += data
        if not data:
            self._reject(fileno, "closed without a ticket")
        elif len(peer.sent) == TICKET_BYTES:
            line = self._line_of(bytes(peer.sent))
            if line is None:
                self._reject(fileno, "no ticket of this run")
            else:
                del self._waiting[fileno]
                line.attach(peer.connection, self._pool)

    def _line_of(self, ticket: bytes) -> "_SendLine | None":
        # All tickets, each in constant time: the duration reveals nothing.
        lines = [x for x in self._lines.values() if hmac.compare_digest(x.ticket.ticket, ticket)]
        return next((line for line in lines if line.connection is None), None)

    def _reject(self, fileno: int, reason: str) -> None:
        peer = self._waiting.pop(fileno)
        peer.connection.close()
        self._rejections.add(peer.address, reason)

    def _close_line(self, identity: bytes) -> None:
        line = self._lines.pop(identity, None)
        if line is not None:
            line.close()
            self._ending.append(line)


@dataclass(slots=True)
class _UnauthenticatedConnection:
    """A connection whose ticket has not come yet."""

    connection: socket.socket
    address: str
    since: float
    sent: bytearray = field(default_factory=bytearray)


class _SendLine:
    """One trainer's queue of batches, and the thread that sends them once it has connected."""

    def __init__(self, ticket: Ticket, *, made_at: float, wake: Callable[[], None]) -> None:
        self.ticket = ticket
        self.made_at = made_at
        self.connection: socket.socket | None = None
        self.is_closed = False
        self._wake = wake
        self._batches: queue.SimpleQueue[OutgoingBatch | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def put(self, batch: OutgoingBatch) -> bool:
        with self._lock:
            # At its end the thread discards the queue: a later batch would keep its memory.
            if not self.is_closed:
                self._batches.put(batch)
            return not self.is_closed

    def attach(self, connection: socket.socket, pool: BufferPool) -> None:
        tune(connection)
        self.connection = connection
        writer = BatchWriter(connection, Sealer(self.ticket.key), pool)
        # Started by the agent's loop, it has the same scheduling policy.
        self._thread = threading.Thread(
            target=self._send, args=(writer,), name="batch-sender", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
        self._batches.put(None)
        if self.connection is None:
            self._discard_queued()
        else:
            # Also ends a blocking call, where the trainer does not read.
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

    def has_ended(self, *, within_seconds: float = 0.0) -> bool:
        """Returns whether the thread of a closed line has ended; if so, closes the connection."""
        if self._thread is None:
            return True
        self._thread.join(within_seconds)
        if self._thread.is_alive():
            return False
        # Not by the thread: the number could be reused while the loop still polls it.
        if self.connection is not None:
            self.connection.close()
        return True

    def _send(self, writer: BatchWriter) -> None:
        try:
            # Confirms the ticket, and proves that this is the agent: only it has the key.
            writer.write(b"", None, of=("", 0))
            while (batch := self._batches.get()) is not None:
                try:
                    payload = None if batch.payload is None else batch.payload.data
                    writer.write(batch.packed, payload, of=batch.of)
                finally:
                    # No view of the slot may remain when it is reused.
                    payload = batch.payload = None
                    batch.done()
                    del batch
        except OSError:
            # The trainer has closed it, or its host is gone; it connects again.
            pass
        finally:
            with self._lock:
                self.is_closed = True
            self._discard_queued()
            self._wake()

    def _discard_queued(self) -> None:
        while not self._batches.empty():
            batch = self._batches.get_nowait()
            if batch is not None:
                batch.payload = None
                batch.done()


def _listen(bind: str, port: int) -> socket.socket:
    is_dual = bind == "*" and socket.has_dualstack_ipv6()
    listener = socket.create_server(
        ("" if bind == "*" else bind.strip("[]"), port),
        family=socket.AF_INET6 if is_dual or ":" in bind else socket.AF_INET,
        dualstack_ipv6=is_dual,
        backlog=MAX_WAITING,
    )
    listener.setblocking(False)
    return listener
