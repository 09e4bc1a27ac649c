"""Whether another host can be reached at the feed's port, and is of the same run."""

import socket
import time
from pathlib import Path

import zmq

from stoker.doctor.check import Check, within
from stoker.errors import UsageError
from stoker.feed.connection import Connection, ZmqContext
from stoker.feed.security import Keys, read_token

RESOLVE_SECONDS = 5.0
CONNECT_SECONDS = 5.0
HANDSHAKE_SECONDS = 5.0
_POLL_MS = 50


def peer_check(peer: str, *, port: int, token_file: Path | None) -> Check:
    """Looks up `peer`, connects, and where a token is at hand, shakes hands as the feed does.

    The handshake proves to both sides that they hold the same token; no message is sent, so that a
    run under way does not notice. Blocks for 15 s at most.

    Args:
        peer: Name or address of a data host or of the dnn leader, with `:PORT` where it differs.
        port: The feed's.
        token_file: Of the run, where there is one.
    """
    host, port = _split(peer, port)
    place = f"{host}:{port}"
    try:
        found = within(
            RESOLVE_SECONDS, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
    except (OSError, TimeoutError) as err:
        return _failed(f"{host} is not known by name: {_words(err)}", "check the name and the DNS")
    address = str(found[0][4][0])
    started = time.monotonic()
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except TimeoutError:
        return _failed(
            f"{place} ({address}) does not answer",
            f"let TCP port {port} through between the hosts (security group, network policy)",
        )
    except OSError as err:
        return _failed(
            f"{place} ({address}): {_words(err)}",
            "only data hosts and the dnn leader listen, and only while a run is under way",
        )
    milliseconds = 1000 * (time.monotonic() - started)
    text = f"{place} ({address}) answers after {milliseconds:.1f} ms"
    if token_file is None:
        return Check(name="peer", state="ok", text=f"{text}; no token at hand to ask who it is")
    if not shakes_hands(address, port, token_file):
        return _failed(
            f"{text}, but is not of this run",
            "hand both hosts the same token, and the same image",
        )
    return Check(name="peer", state="ok", text=f"{text}, and is of this run")


def shakes_hands(address: str, port: int, token_file: Path | None) -> bool:
    """Whether who listens there holds the same token; False, too, where there is none here."""
    if token_file is None:
        return False
    try:
        keys = Keys.from_token(read_token(token_file))
    except UsageError:
        return False
    context: ZmqContext = zmq.Context()
    deadline = time.monotonic() + HANDSHAKE_SECONDS
    connection = Connection(context, keys, now=time.monotonic(), max_message_bytes=1 << 16)
    try:
        connection.dial(
            f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"
        )
        poller = zmq.Poller()
        for monitored in connection.filenos[1:]:
            poller.register(monitored, zmq.POLLIN)
        while connection.is_open and not connection.is_up and time.monotonic() < deadline:
            poller.poll(_POLL_MS)
            connection.watch(time.monotonic())
        return connection.is_up
    finally:
        connection.close()
        context.term()


def _split(peer: str, port: int) -> tuple[str, int]:
    host, colon, number = peer.rpartition(":")
    if colon and number.isdigit() and (":" not in host or host.startswith("[")):
        return host.strip("[]"), int(number)
    return peer.strip("[]"), port


def _failed(text: str, fix: str) -> Check:
    return Check(name="peer", state="fail", text=text, fix=fix)


def _words(err: BaseException) -> str:
    return (err.strerror if isinstance(err, OSError) else None) or str(err)
