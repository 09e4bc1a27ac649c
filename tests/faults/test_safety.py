"""Strangers at the feed's ports are refused in bounded memory, while the others are served on."""

import base64
import contextlib
import dataclasses
import json
import re
import resource
import secrets
import socket
import struct
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import psutil
import pytest
import zmq

from stoker.feed.wire import protocol
from stoker.feed.wire.crypto import (
    HANDSHAKE_SECONDS,
    MAX_CONTROL_BYTES,
    MAX_WAITING,
    Keys,
    read_token,
    secure_client,
)
from support.cluster import Cluster, reference, wait_until
from support.proxy import Proxy

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

GIVEN = {"sample_seconds": 0.01, "samples": 96, "epochs": 1, "pause_at": [4, 8]}
# Of one training that is struck again and again: a pause before each blow and after the last.
STEP = 4
PAUSES = [*range(STEP, 160, STEP)]
MANY = {**GIVEN, "samples": 640, "pause_at": PAUSES}
# Of a listener's memory, for all attempts of a flood together: each may cost a few KiB of buffers
# while it lasts, and nothing that its sender chooses the size of.
FLOOD = 120
MAX_GROWTH_BYTES = 64 << 20
DEADLINE_MS = 150_000


class Struck:
    def __init__(self, cluster):
        self.cluster = cluster
        port = cluster.agent_port(0)
        self.ports = {"control": port, "batches": port + 1, "coordinator": cluster.port}
        self._trainer = cluster.train(**MANY)
        self._trainer.until("pause")
        self._expected = reference(**MANY)
        self.at_first = rss_bytes(cluster)

    def go_on(self):
        self._trainer.go_on()
        self._trainer.until("pause")
        found = [line for line in self._trainer.lines if "pause" not in line]
        assert found == self._expected[: len(found)]

    def finish(self):
        for _ in PAUSES[sum("pause" in line for line in self._trainer.lines) - 1 :]:
            self._trainer.go_on()
        assert self._trainer.finish() == self._expected


@pytest.fixture(scope="module")
def struck():
    with Cluster(agents=1) as cluster:
        made = Struck(cluster)
        yield made
        made.finish()


def greeting(*, version=b"\x03\x01", mechanism=b"CURVE"):
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


def raw(sends):
    def flood(port, keys):
        stack = contextlib.ExitStack()
        for number in range(FLOOD):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            with contextlib.suppress(ConnectionError):
                sock.sendall(sends(number))
        return stack

    return flood


CONTEXT = zmq.Context()


@contextlib.contextmanager
def dealer(port, keys):
    client = CONTEXT.socket(zmq.DEALER)
    secure_client(client, keys)
    client.connect(f"tcp://127.0.0.1:{port}")
    yield client
    client.close(linger=0)


def dealers(send, *, make_keys):
    def flood(port, keys):
        stack = contextlib.ExitStack()
        for number in range(FLOOD // 2):
            client = stack.enter_context(dealer(port, make_keys(keys)))
            with contextlib.suppress(zmq.Again):
                client.send_multipart(send(number), zmq.NOBLOCK)
        return stack

    return flood


def foreign(keys):
    return Keys.from_token(b"\x07" * 32)


def stranger(keys):
    return dataclasses.replace(foreign(keys), server_public=keys.server_public)


def hello(_):
    return [protocol.pack(protocol.Cancel(session="nobody", before_epoch_id=1))]


FLOODS = {
    "half-open": raw(lambda _: b""),
    "half a greeting": raw(lambda _: greeting()[:11]),
    "greeting and silence": raw(lambda _: greeting()),
    "garbage": raw(lambda number: secrets.token_bytes(2000)),
    "HTTP": raw(lambda _: b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    "wrong version": raw(lambda _: greeting(version=b"\x09\x09")),
    "no encryption": raw(lambda _: greeting(mechanism=b"NULL") + b"\x04\x05\x05READY"),
    "wrong token": dealers(hello, make_keys=foreign),
    "stranger who knows the public key": dealers(hello, make_keys=stranger),
}


def keys_of(cluster):
    return Keys.from_token(read_token(cluster.folder / "token"))


def rss_bytes(cluster):
    agent = psutil.Process(cluster.hosts[0].pid)
    return {"agent": agent.memory_info().rss, "here": psutil.Process().memory_info().rss}


def multipart(_):
    ready = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    return greeting(mechanism=b"NULL") + ready + (b"\x01\xff" + bytes(255)) * 1000


# What a stranger sends and sends, at most this much each.
HOSE_BYTES = 16 << 20
HOSES = 12
HOSED = {
    "multipart": multipart,
    "an endless first command": lambda _: greeting() + b"\x06" + struct.pack(">Q", 1 << 62),
    "a first command as long as may be": lambda _: (
        greeting() + b"\x06" + struct.pack(">Q", MAX_CONTROL_BYTES)
    ),
    "garbage": lambda _: secrets.token_bytes(2000),
}


def is_cut_off(address, first):
    zeros, sent = bytes(1 << 16), 0
    with socket.create_connection(address, 10) as stranger:
        stranger.settimeout(HANDSHAKE_SECONDS + 5)
        try:
            stranger.sendall(first)
            while sent < HOSE_BYTES:
                sent += stranger.send(zeros)
            # All of it has gone somewhere: is it cut at last?
            while stranger.recv(1 << 16):
                pass
        except TimeoutError:
            return False
        except ConnectionError:
            return True
    return True


def hose_all(struck, name, listener):
    address = ("127.0.0.1", struck.ports[listener])
    who = "here" if listener == "coordinator" else "agent"
    peak = [0]
    with ThreadPoolExecutor(HOSES) as pool:
        hoses = [pool.submit(is_cut_off, address, HOSED[name](0)) for _ in range(HOSES)]
        while not all(each.done() for each in hoses):
            peak.append(rss_bytes(struck.cluster)[who])
            wait(hoses, timeout=0.1)
    struck.go_on()
    return max(peak) - struck.at_first[who], [each.result() for each in hoses]


def told_of(struck, listener):
    log = struck.cluster.leader_log if listener == "coordinator" else struck.cluster.log_of(0)
    line = rf"connections_rejected port={struck.ports[listener]} connections=(\d+)"
    return [int(number) for number in re.findall(line, log.read_text())]


@pytest.mark.parametrize("listener", ["control", "batches", "coordinator"])
def test_strangers_that_send_and_send_grow_no_listener_and_are_cut(listener, struck):
    for name in HOSED:
        growth, were_cut = hose_all(struck, name, listener)
        assert growth < HOSES << 20, f"{name}: more than 1 MiB a stranger"
        assert all(were_cut), name
    wait_until(
        lambda: sum(told_of(struck, listener)) >= HOSES * len(HOSED), "all of them are told of"
    )
    # A line for many, not a line for each.
    assert len(told_of(struck, listener)) < 4


@pytest.mark.parametrize("name", FLOODS)
def test_flood_is_refused_in_bounded_memory_while_the_others_are_served(name, struck):
    cluster = struck.cluster
    logged_before = cluster.log_of(0).read_text()
    with contextlib.ExitStack() as floods:
        for port in struck.ports.values():
            floods.enter_context(FLOODS[name](port, keys_of(cluster)))
        struck.go_on()
        after = rss_bytes(cluster)
    struck.go_on()
    logged = cluster.log_of(0).read_text().removeprefix(logged_before)
    # All floods so far together.
    growth = {who: after[who] - struck.at_first[who] for who in after}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    # Nobody of them was parsed, nobody filled the log.
    assert "malformed_peer" not in logged
    assert len(logged.splitlines()) < 40


def test_hello_that_was_recorded_and_is_replayed_opens_nothing(struck):
    port = struck.ports["control"]
    with Proxy() as recorder:
        recorder.target = port
        with dealer(recorder.port, keys_of(struck.cluster)) as client:
            # Whoever is let in is answered: that session is not known.
            make = protocol.Make(
                session="nobody", epoch_id=0, batch_number=0, index=b"", seed_words=()
            )
            client.send(protocol.pack(make))
            assert client.poll(DEADLINE_MS)
            client.recv_multipart()
        wait_until(lambda: len(recorder.sent) > 300, "the whole hello is recorded")
        for _ in range(3):
            answer = b""
            with socket.create_connection(("127.0.0.1", port), 20) as replay:
                replay.sendall(bytes(recorder.sent))
                with contextlib.suppress(ConnectionError):
                    while chunk := replay.recv(4096):
                        answer += chunk
            # Greeting and WELCOME at most: no READY, no message.
            assert b"\x05READY" not in answer
            assert len(answer) < 64 + 170 + 100
    struck.go_on()


def test_rubbish_of_a_member_leaves_coordinator_and_agent_serving(struck):
    cluster = struck.cluster

    def num_lines():
        logs = cluster.log_of(0), cluster.leader_log
        return sum(len(log.read_text().splitlines()) for log in logs)

    before, lines_before = rss_bytes(cluster), num_lines()
    with contextlib.ExitStack() as clients:
        for port in (struck.ports["control"], cluster.port):
            client = clients.enter_context(dealer(port, keys_of(cluster)))
            for number in range(2000):
                client.send(secrets.token_bytes(number % 60))
            # Longer than the coordinator takes; the agent takes datasets.
            client.send(bytes(1 << 20))
        struck.go_on()
        after = rss_bytes(cluster)
        struck.go_on()
    assert max(after[who] - before[who] for who in before) < MAX_GROWTH_BYTES
    # A line a peer, not a line a message.
    assert num_lines() - lines_before < 60


def secrets_of(cluster):
    token = read_token(cluster.folder / "token")
    keys = Keys.from_token(token)
    found = [keys.server_secret, keys.client_secret, keys.server_public, keys.client_public]
    for value in (token, keys.mac_key):
        found += [value, value.hex().encode(), base64.b64encode(value).rstrip(b"=")]
    return found


def test_nothing_secret_is_in_logs_arguments_or_environments():
    with Cluster(agents=1) as cluster:
        trainer = cluster.paused(num_workers=1, **GIVEN)
        hidden = secrets_of(cluster)
        roots = [psutil.Process(pid) for pid in (cluster.hosts[0].pid, trainer.process.pid)]
        wait_until(
            # Fork server, dataset process, worker; the local worker.
            lambda: all(
                len(r.children(recursive=True)) >= n for r, n in zip(roots, (3, 1), strict=True)
            ),
            "every kind of process runs",
        )
        tree = [process for root in roots for process in (root, *root.children(recursive=True))]
        shown = [
            Path(f"/proc/{process.pid}/{name}").read_bytes()
            for process in tree
            for name in ("cmdline", "environ", "comm")
        ]
        trainer.go_on()
        trainer.until("pause")
        trainer.go_on()
        lines = trainer.finish()
        shown.append(trainer.errors.encode() + json.dumps(lines).encode())
        shown += [path.read_bytes() for path in cluster.folder.glob("*.log")]
    assert len(shown) > 18
    for text in shown:
        for secret in hidden:
            assert secret not in text


@contextlib.contextmanager
def flood(address, *, connections):
    opened: deque[socket.socket] = deque()
    stop = threading.Event()
    is_full = threading.Event()

    def keep():
        while not stop.wait(0.01):
            for _ in range(50):
                opened.append(socket.create_connection(address, 30))
            while len(opened) > connections:
                is_full.set()
                opened.popleft().close()

    thread = threading.Thread(target=keep)
    thread.start()
    try:
        assert is_full.wait(120), f"{len(opened)} of {connections} connections opened"
        yield
    finally:
        stop.set()
        thread.join()
        for connection in opened:
            connection.close()


@pytest.fixture(scope="module")
def crowded():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("too few file descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        with Cluster(agents=1, late=True) as cluster:
            # The limit of most systems: what the agent opens has numbers that `select` cannot take.
            cluster.start_agent(0, held_files=1010, max_files=1024)
            yield cluster
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("offset", [0, 1], ids=["control", "batches"])
def test_trainer_comes_in_and_a_worker_is_replaced_amid_a_thousand_half_open_connections(
    offset, crowded
):
    address = ("127.0.0.1", crowded.agent_port(0) + offset)
    agent = psutil.Process(crowded.hosts[0].pid)
    before = agent.num_fds()
    assert before > 1024
    with flood(address, connections=1000):
        assert agent.num_threads() < 12
        wait_until(lambda: agent.num_fds() < before + 2 * MAX_WAITING, "strangers are few")
        trainer = crowded.paused(**GIVEN)
        crowded.kill_worker(0)
        trainer.go_on()
        trainer.until("pause")
        trainer.go_on()
        assert trainer.finish() == reference(**GIVEN)
