"""The port for batches is bounded, deaf to strangers, and quick to hang up on them."""

import io
import select
import socket

import pytest

from stoker.feed.engine.batch_port import BatchPort
from stoker.feed.engine.crypto import HANDSHAKE_SECONDS, MAX_WAITING, RejectionLog
from stoker.feed.engine.run_messages import TICKET_BYTES
from stoker.logs import Log

DEADLINE_SECONDS = 150.0
NOW = 1000.0


@pytest.fixture
def log():
    return io.StringIO()


def made_port(log, port=0):
    told = Log(run="test", host="data-1", stream=log)
    return BatchPort(bind="127.0.0.1", port=port, rejections=RejectionLog(told, port=1))


@pytest.fixture
def port(log):
    made = made_port(log)
    yield made
    made.close()


def turn(port, times=1):
    for _ in range(times):
        ready, _, _ = select.select(port.filenos(), [], [], 0.2)
        port.handle(ready, NOW)


def connect(port):
    return socket.create_connection(("127.0.0.1", port.port), DEADLINE_SECONDS)


def is_cut(connection):
    connection.settimeout(0.2)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_whoever_has_no_ticket_is_cut_with_the_first_32_bytes(port):
    port.ticket_for(lambda _: None, now=NOW)
    with connect(port) as stranger:
        stranger.sendall(b"x" * (TICKET_BYTES - 1))
        turn(port, 2)
        assert not is_cut(stranger)
        stranger.sendall(b"x" * 1000)
        turn(port)
        assert is_cut(stranger)


def test_whoever_is_silent_is_cut_after_ten_seconds(port):
    assert HANDSHAKE_SECONDS == 10
    with connect(port) as stranger:
        turn(port)
        port.tick(NOW + HANDSHAKE_SECONDS)
        assert not is_cut(stranger)
        port.tick(NOW + HANDSHAKE_SECONDS + 0.1)
        assert is_cut(stranger)


def test_so_many_wait_at_a_time_and_the_newest_gets_through(port):
    strangers = [connect(port) for _ in range(20)]
    ticket = port.ticket_for(lambda connection: connection.sendall(b"hello"), now=NOW)
    while len(strangers) < MAX_WAITING + 30:
        turn(port)
        strangers.append(connect(port))
    turn(port)
    assert len(port._waiting) == MAX_WAITING
    assert is_cut(strangers[0])
    assert not is_cut(strangers[-1])
    with connect(port) as trainer:
        trainer.sendall(ticket)
        turn(port, 2)
        assert trainer.recv(16) == b"hello"
    for stranger in strangers:
        stranger.close()


def test_a_ticket_opens_one_connection_and_is_void_after_a_minute(port):
    attached = []
    tickets = [port.ticket_for(lambda _: attached.append(1), now=NOW) for _ in range(2)]
    for expected in (1, 1):
        with connect(port) as trainer:
            trainer.sendall(tickets[0])
            turn(port, 2)
        assert len(attached) == expected
    port.tick(NOW + 61)
    with connect(port) as trainer:
        trainer.sendall(tickets[1])
        turn(port, 2)
        assert is_cut(trainer)
    assert attached == [1]
