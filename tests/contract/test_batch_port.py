"""The port for batches is bounded, deaf to strangers, and quick to hang up on them."""

import io
import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from stoker.errors import UsageError
from stoker.feed.agent import batch_port
from stoker.feed.agent.batch_port import BatchPort, OutgoingBatch
from stoker.feed.wire.crypto import HANDSHAKE_SECONDS, MAX_WAITING
from stoker.feed.wire.protocol import TICKET_BYTES
from stoker.logs import Log

DEADLINE_SECONDS = 150.0
NOW = 1000.0


@pytest.fixture
def log():
    return io.StringIO()


def made_port(log, port=None):
    told = Log(run="test", host="data-1", stream=log)
    about = {"bind": "127.0.0.1", "host": "data-1", "run_id": "test", "log": told}
    return BatchPort(**about, port=port, wake=lambda: None)


@pytest.fixture
def port(log):
    made = made_port(log)
    yield made
    made.close()


def turn(port, times=1):
    for _ in range(times):
        port.handle(port.filenos(), NOW)


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
    port.ticket_for(b"trainer", NOW)
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


def test_a_stranger_has_a_line_in_the_log_a_thousand_have_one_in_ten_seconds(port, log):
    for second in range(9):
        for _ in range(20):
            with connect(port) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: anybody.example\r\n\r\n")
                turn(port, 2)
        port.tick(NOW + second)
    lines = log.getvalue().splitlines()
    assert len(lines) == 1
    assert f"connections_rejected port={port.port} connections=20 last=127.0.0.1" in lines[0]
    assert "no ticket of this run" in lines[0]
    port.tick(NOW + 11)
    assert "connections=160" in log.getvalue().splitlines()[1]


def test_so_many_wait_at_a_time_and_the_newest_gets_through(port):
    strangers = [connect(port) for _ in range(20)]
    ticket = port.ticket_for(b"trainer", NOW)
    while len(strangers) < MAX_WAITING + 30:
        turn(port)
        strangers.append(connect(port))
    turn(port)
    assert len(port._waiting) == MAX_WAITING
    assert is_cut(strangers[0])
    assert not is_cut(strangers[-1])
    with connect(port) as trainer:
        trainer.sendall(ticket.ticket)
        turn(port, 2)
        assert len(trainer.recv(16)) == 16
    for stranger in strangers:
        stranger.close()


def test_what_is_queued_for_who_never_comes_is_let_go_of(port):
    done: list[int] = []
    port.ticket_for(b"trainer", NOW)
    batch = OutgoingBatch(b"packed", None, ("s", 0), lambda: done.append(1))
    assert port.send(b"trainer", batch)
    port.tick(NOW + 59)
    assert not done
    port.tick(NOW + 61)
    assert done == [1]
    assert not port.send(b"trainer", batch)
    assert not port.send(b"nobody", batch)


def test_what_is_queued_for_who_hangs_up_is_let_go_of(port):
    done: list[int] = []
    ticket = port.ticket_for(b"trainer", NOW)
    with connect(port) as trainer:
        trainer.sendall(ticket.ticket)
        turn(port, 2)
        assert trainer.recv(1)
    end = time.monotonic() + DEADLINE_SECONDS
    batch = OutgoingBatch(bytes(100_000), None, ("s", 0), lambda: done.append(1))
    num_sent = 0
    while port.send(b"trainer", batch) and time.monotonic() < end:
        num_sent += 1
        turn(port)
    while len(done) < num_sent and time.monotonic() < end:
        time.sleep(0.01)
    assert len(done) == num_sent


def test_no_more_open_files_cuts_the_oldest_stranger_and_spins_not(port, monkeypatch):
    accept, listener = Mock(side_effect=OSError(24, "Too many open files")), port._listener
    with connect(port) as stranger:
        turn(port)
        full = SimpleNamespace(accept=accept, fileno=listener.fileno, close=listener.close)
        monkeypatch.setattr(port, "_listener", full)
        turn(port)
        assert is_cut(stranger)
        assert listener.fileno() not in port.filenos()
        port.tick(NOW + 1)
        assert listener.fileno() in port.filenos()


def test_a_taken_port_is_an_error_that_names_it(port, log):
    with pytest.raises(UsageError, match=f"port {port.port} cannot be bound"):
        made_port(log, port.port)


def test_it_listens_on_both_families():
    with batch_port._listen("*", 0) as both:
        assert both.family == socket.AF_INET6
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, both.getsockname()[1]), DEADLINE_SECONDS).close()
