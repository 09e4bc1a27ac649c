"""The agent's port for batches: plain TCP, opened by tickets.

A trainer gets a ticket over CURVE for each connection that it needs, connects here, and sends it as
the first bytes. Bytes of an unauthenticated connection are compared with the tickets given out and
never parsed; at most 32 of them are read, within 10 s. The socket is then passed to the
process that it leads to.
"""

import hmac
import secrets
import socket
from collections.abc import Callable, Container
from dataclasses import dataclass, field

from stoker.errors import UsageError
from stoker.feed.engine.crypto import HANDSHAKE_SECONDS, MAX_WAITING, RejectionLog
from stoker.feed.engine.run_messages import TICKET_BYTES
from stoker.logs import Log

# Trainers connect at once, and order another worker if that failed.
_TICKET_SECONDS = 60.0
_MAX_ACCEPTED_A_TURN = 100

# Takes the connection of the trainer that had the ticket.
Attach = Callable[[socket.socket], None]


@dataclass(slots=True)
class _Stranger:
    """A connection whose ticket has not come yet."""

    connection: socket.socket
    address: str
    since: float
    sent: bytearray = field(default_factory=bytearray)


class BatchPort:
    """The listening port and the tickets; used by the agent's thread."""

    def __init__(self, *, bind: str, port: int, where: str, log: Log) -> None:
        is_dual = bind == "*" and socket.has_dualstack_ipv6()
        try:
            self._listener = socket.create_server(
                ("" if bind == "*" else bind.strip("[]"), port),
                family=socket.AF_INET6 if is_dual or ":" in bind else socket.AF_INET,
                dualstack_ipv6=is_dual,
                backlog=MAX_WAITING,
            )
        except OSError as err:
            raise UsageError(
                f"port {port} cannot be bound: {err.strerror}",
                where=where,
                fix="set feed.port so that it and the next port are free on every host",
            ) from None
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._rejections = RejectionLog(log, port=self.port)
        # The oldest first.
        self._waiting: dict[int, _Stranger] = {}
        self._tickets: dict[bytes, tuple[float, Attach]] = {}
        self._is_full = False

    def filenos(self) -> list[int]:
        listener = [] if self._is_full else [self._listener.fileno()]
        return [*self._waiting, *listener]

    def ticket_for(self, attach: Attach, *, now: float) -> bytes:
        """Returns a ticket, for one connection."""
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._tickets[ticket] = (now, attach)
        return ticket

    def handle(self, ready: Container[object], now: float) -> None:
        for fileno in [fileno for fileno in self._waiting if fileno in ready]:
            self._read(fileno)
        if self._listener.fileno() in ready:
            self._accept(now)

    def tick(self, now: float) -> None:
        """Closes unauthenticated connections and voids tickets after their time; once a second."""
        self._is_full = False
        for fileno, stranger in list(self._waiting.items()):
            if now - stranger.since > HANDSHAKE_SECONDS:
                self._reject(fileno, "no ticket in time")
        tickets = self._tickets.items()
        self._tickets = {key: each for key, each in tickets if now - each[0] <= _TICKET_SECONDS}
        self._rejections.tick(now)

    def close(self) -> None:
        self._listener.close()
        for stranger in self._waiting.values():
            stranger.connection.close()
        self._waiting.clear()

    def _accept(self, now: float) -> None:
        for _ in range(_MAX_ACCEPTED_A_TURN):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No more open files, say. Not polled until the next tick: it would be ready again
                # at once.
                self._is_full = True
                return
            connection.setblocking(False)
            self._waiting[connection.fileno()] = _Stranger(connection, str(address[0]), now)
            if len(self._waiting) > MAX_WAITING:
                # Trainers send their ticket at once, so the oldest is not one.
                self._reject(next(iter(self._waiting)), f"more than {MAX_WAITING} at a time")

    def _read(self, fileno: int) -> None:
        stranger = self._waiting[fileno]
        try:
            data = stranger.connection.recv(TICKET_BYTES - len(stranger.sent))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        stranger.sent += data
        if not data:
            self._reject(fileno, "closed without a ticket")
        elif len(stranger.sent) == TICKET_BYTES:
            # All tickets, each in constant time: the duration reveals nothing.
            sent = bytes(stranger.sent)
            equal = [ticket for ticket in self._tickets if hmac.compare_digest(ticket, sent)]
            if not equal:
                self._reject(fileno, "no ticket of this run")
                return
            _, attach = self._tickets.pop(equal[0])
            with self._waiting.pop(fileno).connection as connection:
                attach(connection)

    def _reject(self, fileno: int, reason: str) -> None:
        stranger = self._waiting.pop(fileno)
        stranger.connection.close()
        self._rejections.add(stranger.address, reason)
