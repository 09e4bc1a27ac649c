"""Each peer that speaks to a socket of the run proves that it has its token."""

import io
from dataclasses import replace

import pytest
import zmq

from stoker.feed.engine import crypto
from stoker.feed.engine.crypto import Keys, RejectionLog
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

    with Router(OURS, answer) as router:
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


def test_a_client_of_the_run_is_let_in_and_cut_with_a_message_above_the_bound(server, got, client):
    crypto.secure_client(client, OURS)
    events = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.connect(f"tcp://127.0.0.1:{server.port}")
    client.send(b"hello")
    assert client.poll(60_000)
    client.send(b"x" * (crypto.MAX_CONTROL_BYTES + 1))
    assert events.poll(60_000)
    client.disable_monitor()
    events.close()
    assert got == [b"hello"]


def test_strangers_have_a_line_in_a_minute():
    stream = io.StringIO()
    log = RejectionLog(Log(run="r", host="h", stream=stream), port=1)
    for second in range(1000, 1000 + 3600):
        log.add("10.0.0.9", "no token")
        log.tick(float(second))
    assert stream.getvalue().count("connections_rejected") == 60
