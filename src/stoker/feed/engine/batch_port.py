"""The agent's port for batches: plain TCP, opened by tickets.

A trainer gets a ticket over CURVE for each connection that it needs, connects here, and sends it as
the first bytes. Bytes of an unauthenticated connection are compared with the tickets given out and
never parsed; at most 32 of them are read, within 10 s. The socket is then passed to the
process that it leads to.
"""

import contextlib
import hmac
import secrets
import socket
from collections.abc import Callable, Container

from stoker.feed.engine.crypto import HANDSHAKE_SECONDS, MAX_WAITING, RejectionLog
from stoker.feed.engine.run_messages import TICKET_BYTES

# Trainers connect at once, and order another worker if that failed.
_TICKET_SECONDS = 60.0
_MAX_ACCEPTED_A_TURN = 100

# Takes the connection of the trainer that had the ticket.
Attach = Callable[[socket.socket], None]


class BatchPort:
    """The listening port and the tickets; used by the agent's thread."""

    def __init__(self, *, bind: str, port: int, rejections: RejectionLog) -> None:
        """Listens; raises OSError if it cannot."""
        is_dual = bind == "*" and socket.has_dualstack_ipv6()
        self._listener = socket.create_server(
            ("" if bind == "*" else bind.strip("[]"), port),
            family=socket.AF_INET6 if is_dual or ":" in bind else socket.AF_INET,
            dualstack_ipv6=is_dual,
            backlog=MAX_WAITING,
        )
        self._listener.setblocking(False)
        self.port = int(self._listener.getsockname()[1])
        self._rejections = rejections
        # Connection, address and time, by descriptor; the oldest first.
        self._waiting: dict[int, tuple[socket.socket, str, float]] = {}
        self._tickets: dict[bytes, tuple[float, Attach]] = {}

    def filenos(self) -> list[int]:
        return [*self._waiting, self._listener.fileno()]

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
        for fileno, (_, _, since) in list(self._waiting.items()):
            if now - since > HANDSHAKE_SECONDS:
                self._reject(fileno, "no ticket in time")
        tickets = self._tickets.items()
        self._tickets = {key: each for key, each in tickets if now - each[0] <= _TICKET_SECONDS}

    def close(self) -> None:
        self._listener.close()
        for connection, _, _ in self._waiting.values():
            connection.close()

    def _accept(self, now: float) -> None:
        for _ in range(_MAX_ACCEPTED_A_TURN):
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            connection.setblocking(False)
            # It is ready to be read once all of a ticket is there.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TICKET_BYTES)
            self._waiting[connection.fileno()] = (connection, str(address[0]), now)
            if len(self._waiting) > MAX_WAITING:
                # Trainers send their ticket at once, so the oldest is not one.
                self._reject(next(iter(self._waiting)), f"more than {MAX_WAITING} at a time")

    def _read(self, fileno: int) -> None:
        sent = b""
        with contextlib.suppress(OSError):
            sent = self._waiting[fileno][0].recv(TICKET_BYTES)
        # All tickets, each in constant time: the duration reveals nothing.
        equal = [ticket for ticket in self._tickets if hmac.compare_digest(ticket, sent)]
        if not equal:
            self._reject(fileno, "no ticket of this run")
            return
        _, attach = self._tickets.pop(equal[0])
        with self._waiting.pop(fileno)[0] as connection:
            attach(connection)

    def _reject(self, fileno: int, reason: str) -> None:
        connection, address, _ = self._waiting.pop(fileno)
        connection.close()
        self._rejections.add(address, reason)
