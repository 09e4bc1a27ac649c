"""Strangers at the feed's ports are refused in bounded memory, while the others are served on."""

import base64
import contextlib
import dataclasses
import json
import secrets
import socket
from pathlib import Path

import psutil
import pytest
import zmq

from stoker.feed.engine import run_messages
from stoker.feed.engine.crypto import (
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


CONTEXT = zmq.Context()


@contextlib.contextmanager
def dealer(port, keys):
    client = CONTEXT.socket(zmq.DEALER)
    secure_client(client, keys)
    client.connect(f"tcp://127.0.0.1:{port}")
    yield client
    client.close(linger=0)


def stranger(keys):
    foreign = Keys.from_token(b"\x07" * 32)
    return dataclasses.replace(foreign, server_public=keys.server_public)


def hello():
    return [run_messages.pack(run_messages.Close(session="nobody"))]


def keys_of(cluster):
    return Keys.from_token(read_token(cluster.folder / "token"))


def rss_bytes(cluster):
    agent = psutil.Process(cluster.hosts[0].pid)
    return {"agent": agent.memory_info().rss, "here": psutil.Process().memory_info().rss}


# Strangers of other kinds: keel/test_strangers_at_the_ports.py.
def test_who_knows_the_public_key_alone_is_parsed_by_nobody(struck):
    cluster = struck.cluster
    logged_before = cluster.log_of(0).read_text()
    with contextlib.ExitStack() as floods:
        for port in struck.ports.values():
            for _ in range(FLOOD // 2):
                client = floods.enter_context(dealer(port, stranger(keys_of(cluster))))
                with contextlib.suppress(zmq.Again):
                    client.send_multipart(hello(), zmq.NOBLOCK)
        struck.go_on()
        after = rss_bytes(cluster)
    struck.go_on()
    logged = cluster.log_of(0).read_text().removeprefix(logged_before)
    # All floods so far together.
    growth = {who: after[who] - struck.at_first[who] for who in after}
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    # Nobody of them was parsed, nobody filled the log.
    assert "malformed message" not in logged
    assert len(logged.splitlines()) < 40


def test_hello_that_was_recorded_and_is_replayed_opens_nothing(struck):
    port = struck.ports["control"]
    with Proxy() as recorder:
        recorder.target = port
        with dealer(recorder.port, keys_of(struck.cluster)) as client:
            # Whoever is let in is answered: that host is another one.
            opening = run_messages.Open(
                session="nobody",
                host="another",
                dataset="none",
                dataset_bytes=1,
            )
            client.send(run_messages.pack(opening))
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
            # First process, dataset process, worker; the same here.
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
