"""Strangers at a port: those that have not proved yet that they are of this run.

At most so many may wait at a time, each for a few seconds. Who connects when the places are taken
takes that of the one who has waited longest: a member of the run proves itself within
milliseconds, so a flood of strangers keeps it out for no longer than that.
"""

import contextlib
import os
import socket
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from stoker.feed.security import HANDSHAKE_SECONDS
from stoker.logs import Log

# Places of a port. Each takes a frame of MAX_CONTROL_BYTES and libzmq's buffers at most: 64 MiB in
# all hold 200 of them.
MAX_WAITING = 128
_LOG_SECONDS = 10.0
_ACCEPTED, _ENDED = int(zmq.EVENT_ACCEPTED), int(zmq.EVENT_DISCONNECTED)


class StrangerLog:
    """Tells of those who were cut: one line for all, at once and then every 10 s at most."""

    def __init__(self, log: Log, *, port: int) -> None:
        self._log = log
        self._port = port
        self._count = 0
        self._last = ("", "")
        self._silent_until = 0.0

    def cut(self, address: str, reason: str) -> None:
        """Notes a connection that was cut, and why."""
        self._count += 1
        self._last = (address, reason)

    def tick(self, now: float) -> None:
        """Writes the line, if there is something to tell and it is time."""
        if self._count and now >= self._silent_until:
            address, reason = self._last
            self._log.event(
                "strangers_cut",
                port=self._port,
                connections=self._count,
                last=address,
                reason=reason,
            )
            self._count, self._silent_until = 0, now + _LOG_SECONDS


class HandshakeGuard:
    """Bounds the connections to a CURVE server that are in the middle of their handshake.

    libzmq bounds a handshake's time and frames, but not how many there are at a time. Its monitor
    tells of connections by their descriptors, and so does each message that comes.

    Args:
        server: A ROUTER that is bound to `port`; call `close` before it is closed.
    """

    def __init__(self, server: "zmq.Socket[bytes]", log: StrangerLog, *, port: int) -> None:
        self._server = server
        self._log = log
        self._port = port
        # By descriptor; the oldest first.
        self._waiting: dict[int, _Accepted] = {}
        self.monitor: zmq.Socket[bytes] = server.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
        )

    def handle(self, now: float) -> None:
        """Reads what the monitor tells, without blocking, and cuts who is too many."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                break
            descriptor = int(event["value"])
            if event["event"] == _ACCEPTED:
                self._waiting[descriptor] = _Accepted(now, self._address_of(descriptor))
            elif descriptor in self._waiting:
                address = self._waiting.pop(descriptor).address
                self._log.cut(address, "no handshake of this run")
        while len(self._waiting) > MAX_WAITING:
            oldest = next(iter(self._waiting))
            address = self._waiting.pop(oldest).address
            if self._address_of(oldest, is_to_end=True):
                self._log.cut(address, f"more than {MAX_WAITING} handshakes at a time")

    def proved(self, frame: zmq.Frame) -> None:
        """A message has come: who sent it is of this run."""
        if self._waiting:
            self._waiting.pop(int(frame.get("__fd")), None)

    def tick(self, now: float) -> None:
        """What is due once a second: libzmq itself has cut whoever is older than that."""
        for descriptor, accepted in list(self._waiting.items()):
            if now - accepted.since > HANDSHAKE_SECONDS + 2:
                del self._waiting[descriptor]
        self._log.tick(now)

    def close(self) -> None:
        """Stops watching; may be called twice."""
        with contextlib.suppress(zmq.ZMQError):
            self._server.disable_monitor()
        self.monitor.close(linger=0)

    def _address_of(self, descriptor: int, *, is_to_end: bool = False) -> str:
        """Who is connected there; empty: the descriptor is no connection to this port any more.

        Args:
            is_to_end: Shuts it down; libzmq, whose it is, sees its end and closes it.
        """
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.getsockname()[1] != self._port:
                    return ""
                address = str(connection.getpeername()[0])
                if is_to_end:
                    connection.shutdown(socket.SHUT_RDWR)
                return address
        except (OSError, IndexError):
            return ""


@dataclass(frozen=True, slots=True)
class _Accepted:
    since: float
    address: str
