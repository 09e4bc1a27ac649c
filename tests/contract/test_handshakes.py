"""Each peer that speaks to a socket of the run proves that it has its token."""

import io
import os
import select
import socket
import time
from dataclasses import replace

import pytest
import zmq

from stoker.feed.wire import crypto
from stoker.feed.wire.crypto import AllowList, Keys, RejectionLog
from stoker.logs import Log
from support.router import Router

OURS = Keys.from_token(b"\x01" * 32)
FOREIGN = Keys.from_token(b"\x02" * 32)


@pytest.fixture
def got() -> list[bytes]:
    return []


@pytest.fixture
def server(got):
    def answer(message):
        got.append(message)
        return [message]

    with Router(OURS, answer, max_message_bytes=10_000) as router:
        yield router


@pytest.fixture
def client(server):
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context.socket(zmq.DEALER)
    context.destroy(linger=0)


# It knows the public key of the run, not its secrets.
MIXED = replace(FOREIGN, server_public=OURS.server_public)


@pytest.mark.parametrize("keys", [FOREIGN, MIXED, None], ids=["foreign", "stranger", "plain"])
def test_nobody_else_is_parsed(server, got, client, keys):
    if keys is None:
        client.linger = 0
    else:
        crypto.secure_client(client, keys)
    events = client.get_monitor_socket(zmq.EVENT_ALL)
    client.connect(f"tcp://127.0.0.1:{server.port}")
    client.send(b"hello")
    ends = ("FAILED_AUTH", "FAILED_PROTOCOL", "FAILED_NO_DETAIL", "SUCCEEDED")
    last = {zmq.EVENT_DISCONNECTED, *(zmq.Event[f"HANDSHAKE_{end}"] for end in ends)}
    seen = set()
    while not seen & last:
        assert events.poll(60_000)
        frames = events.recv_multipart()
        seen.add(zmq.Event(int.from_bytes(frames[0][:2], "little")))
    client.disable_monitor()
    events.close()
    assert zmq.EVENT_HANDSHAKE_SUCCEEDED not in seen
    assert got == []
    assert server.allow.refused == (1 if keys is not None and keys != FOREIGN else 0)


def test_a_client_of_the_run_is_let_in_and_cut_with_a_message_above_the_bound(server, got, client):
    crypto.secure_client(client, OURS)
    events = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(f"tcp://127.0.0.1:{server.port}")
    client.send(b"hello")
    assert client.poll(60_000)
    assert server.allow.refused == 0
    client.send(b"x" * 20_000)
    assert events.poll(60_000)
    client.disable_monitor()
    events.close()
    assert got == [b"hello"]


class Cuts(RejectionLog):
    def __init__(self):
        self.reasons: list[str] = []

    def add(self, address, reason):
        self.reasons.append(reason)


def test_who_sends_in_the_turn_in_which_he_is_let_in_waits_for_no_handshake(monkeypatch):
    keys = Keys.from_token(bytes(range(32)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    allow_list, cuts = AllowList(context, keys), Cuts()
    server, member = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    crypto.secure_server(server, keys)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    guard = crypto.HandshakeGuard(server, cuts, port=port, allow_list=allow_list)
    try:
        crypto.secure_client(member, keys)
        member.connect(f"tcp://127.0.0.1:{port}")
        member.send(b"hello")
        assert allow_list.socket.poll(10_000)
        # As where both came after the poll, next to another one's handshake that it saw.
        guard.handle({allow_list.socket}, 0.0)
        assert server.poll(10_000)
        guard.note_proved(server.recv_multipart(copy=False)[1])
        monkeypatch.setattr(crypto, "MAX_WAITING", 0)
        guard.handle({guard.monitor}, 0.0)
        assert cuts.reasons == []
    finally:
        guard.close()
        allow_list.close()
        context.destroy(linger=0)


def test_a_number_that_is_a_pipes_by_now_is_left_alone():
    keys = Keys.from_token(bytes(range(32)))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    allow_list, cuts = AllowList(context, keys), Cuts()
    server = context.socket(zmq.ROUTER)
    crypto.secure_server(server, keys)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    guard = crypto.HandshakeGuard(server, cuts, port=port, allow_list=allow_list)
    reading, writing = os.pipe()
    try:
        with socket.socket() as stranger:
            stranger.connect(("127.0.0.1", port))
            assert guard.monitor.poll(10_000)
            event, number = crypto.read_event(guard.monitor)
            assert event == zmq.EVENT_ACCEPTED
        # The event comes before libzmq closes the number, and it aborts where another one did that.
        _wait_until_closed(number)
        # The next who opens something gets it.
        os.dup2(writing, number)
        os.close(writing)
        assert guard._address_of(number) == ""
        assert guard._address_of(number, is_to_end=True) == ""
        os.close(number)
        # Nobody else has the pipe's end: who reads hears that it is closed.
        assert select.select([reading], [], [], 0) == ([reading], [], [])
        assert os.read(reading, 1) == b""
    finally:
        os.close(reading)
        guard.close()
        allow_list.close()
        context.destroy(linger=0)


def _wait_until_closed(number: int) -> None:
    for _ in range(10_000):
        try:
            os.fstat(number)
        except OSError:
            return
        time.sleep(0.001)
    raise AssertionError(f"libzmq keeps {number} open")


def test_strangers_that_go_on_have_a_line_ever_less_often():
    stream = io.StringIO()
    log = RejectionLog(Log(run="r", host="h", stream=stream), port=1)
    for second in range(1000, 1000 + 3600):
        log.add("10.0.0.9", "no handshake of this run")
        log.tick(float(second))
    assert stream.getvalue().count("connections_rejected") == 9
    # After a rest it begins with ten seconds again.
    for second in range(20_000, 20_012):
        log.add("10.0.0.9", "no handshake of this run")
        log.tick(float(second))
    assert stream.getvalue().count("connections_rejected") == 11
