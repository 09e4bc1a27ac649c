"""The run's server, its hosts and its ranks talk over real sockets on loopback."""

import functools
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from io import StringIO
from pathlib import Path
from queue import SimpleQueue
from typing import TextIO

import pytest
import zmq

from stoker.environment import ProcessSettings
from stoker.errors import PlatformError
from stoker.feed.engine.crypto import Keys, secure_client
from stoker.feed.engine.run_messages import (
    HostEnd,
    Progress,
    RunState,
    Unpacker,
    pack,
)
from stoker.launch import host_client
from stoker.launch.host_client import HostClient, HostRun
from stoker.launch.run_server import RunServer
from stoker.logs import Log
from stoker.records import FeedSettings
from support import builders, processes
from support.tokens import new_token

KEYS = Keys.from_token(bytes.fromhex(new_token()))
DEADLINE = 150.0
until = functools.partial(processes.until, what="the condition comes true", seconds=DEADLINE)


class Run:
    def __init__(self):
        self.clients: dict[str, HostClient] = {}
        self.log: TextIO = StringIO()
        self._closing: list[Callable[[], None]] = []
        with zmq.Context() as context, context.socket(zmq.PAIR) as probe:
            self.port = probe.bind_to_random_port("tcp://127.0.0.1")

    def host(self, host, *others, keys=KEYS, **feed):
        names = ("leader", host, *others)
        groups = {
            role: (role, tuple(name for name in names if role_of(name) == role))
            for role in ("dnn", "data")
        }
        feed = {"lease_seconds": 60.0, "start_deadline_seconds": 60.0, **feed}
        return HostRun(
            settings=ProcessSettings(
                run_id="run",
                feed=FeedSettings(**feed),
                coordinator=f"127.0.0.1:{self.port}",
                advertise="127.0.0.1",
            ),
            topology=builders.topology(host, **groups),
            environ={},
            output=Path(),
            log=Log(run="run", host=host, stream=self.log),
            inbox=SimpleQueue(),
            keys=keys,
        )

    def server(self, *names, outcome_seconds=0.5, **feed):
        server = RunServer(
            self.host("leader", *(names or ("d1",)), **feed),
            outcome_seconds=outcome_seconds,
        )
        server.start()
        self._closing.append(server.close)
        return server

    def client(self, host, *, keys=KEYS, lease_seconds=60.0):
        how = {"lease_seconds": lease_seconds, "start_deadline_seconds": DEADLINE}
        client = HostClient(self.host(host, keys=keys, **how), port=1234, workers=2)
        client.start()
        self.clients[host] = client
        self._closing.insert(0, client.close)
        return client

    def joined(self, host, **how):
        client = self.client(host, **how)
        assert client.welcome.wait(DEADLINE)
        return client

    def verdict(self, host):
        until(lambda: self.clients[host].verdict is not None)
        return self.clients[host].verdict

    def close(self):
        for close in self._closing:
            close()


def role_of(host):
    return "data" if host.startswith("d") else "dnn"


@pytest.fixture
def run():
    run = Run()
    try:
        yield run
    finally:
        run.close()
    assert not [t.name for t in threading.enumerate() if t.name in ("run-server", "host-client")]


class Rank:
    def __init__(self, port):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        secure_client(self.socket, KEYS)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._unpack = Unpacker(RunState)

    def close(self):
        self.socket.close()
        self.context.term()

    def ask(self, **changes):
        done = {"steps": 3, "samples": 6, "wait_seconds": 1.0, "compute_seconds": 2.0}
        self.socket.send(pack(Progress(**{"rank": 0, **done, **changes})))
        return self.hear()

    def hear(self):
        assert self.socket.poll(DEADLINE * 1000)
        return self._unpack(self.socket.recv())


def test_hosts_hear_how_the_run_ended_those_before_their_leader_and_late_ones_too(run):
    early = run.client("d1")
    assert not early.welcome.wait(0.2)
    server = run.server("d1", "d2", "d3", "f1", outcome_seconds=DEADLINE)
    hosts = [early, run.client("d2"), run.client("f1")]
    assert all(host.welcome.wait(DEADLINE) for host in hosts)
    server.tell(outcome="failed", exit_code=7, reason="rank 1 broke")
    closing = threading.Thread(target=server.close)
    closing.start()
    hosts.append(run.client("d3"))
    verdicts = [run.verdict(host) for host in ("d1", "d2", "f1", "d3")]
    for host in hosts:
        host.tell(end=HostEnd())
        host.close()
    closing.join(DEADLINE)
    assert all((host.run.outcome, host.run.exit_code) == ("failed", 7) for host in hosts)
    for verdict in verdicts:
        assert verdict.kind == "decided"
        assert "rank 1 broke" in verdict.reason


def test_stages_are_heard_at_once_and_by_those_that_come_later(run):
    server = run.server("d1", "f1")
    data = run.joined("d1")
    assert data.run.stage == "begun"
    server.tell(stage="led")
    until(lambda: data.run.stage == "led")
    data.tell(stage="ready")
    until(lambda: server.hosts.unready == ("f1",))
    server.tell(stage="ready")
    late = run.client("f1")
    until(lambda: late.run.stage == "ready")
    server.tell(daemons={"f1": ["-mca", "x"]})
    until(lambda: late.run.daemons == {"f1": ("-mca", "x")})
    data.tell(end=HostEnd(reason="out of licences"))
    until(lambda: server.state.left == {"d1": "out of licences"})


def test_a_failure_carries_its_exit_code_and_words_and_a_silent_host_is_lost(run):
    server = run.server("f1", "f2", lease_seconds=2.0)
    run.joined("f1").tell(end=HostEnd(exit_code=7, reason="LookupError: no such thing"))
    until(lambda: bool(server.failures))
    failure = server.failures[0]
    assert (failure.end.exit_code, failure.end.reason) == (7, "LookupError: no such thing")
    run.joined("f2").close()
    until(lambda: len(server.failures) == 2)
    assert (server.failures[1].host, server.failures[1].status) == ("f2", "lost")
    assert server.hosts.names("joined", "awaited", role="dnn") == ()


def test_a_data_host_that_never_comes_ends_no_run(run):
    server = run.server("d1", start_deadline_seconds=0.2)
    until(lambda: bool(server.events))
    assert "did not come within 0.2 s" in server.events[0].what
    with closing(Rank(run.port)) as rank:
        assert rank.ask().awaited == ("d1",)
    assert server.failures == []


def test_a_leader_that_falls_silent_is_lost_after_a_lease(run):
    server = run.server("f1")
    run.joined("f1", lease_seconds=1.0)
    server.close()
    assert run.verdict("f1").kind == "lost"


def test_another_token_and_another_program_at_the_port_are_said_on_both_sides(run, monkeypatch):
    monkeypatch.setattr(host_client, "REFUSED_SECONDS", 0.5)
    server = run.server()
    other = Keys.from_token(bytes.fromhex(new_token()))
    run.client("d1", keys=other)
    verdict = run.verdict("d1")
    assert (verdict.kind, "another run's token" in verdict.reason) == ("refused", True)
    until(lambda: "no handshake with this run" in run.log.getvalue())
    server.close()
    with socket.create_server(("127.0.0.1", run.port)) as stranger:

        def hang_up():
            while True:
                try:
                    stranger.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(PlatformError, match="cannot listen"):
            run.server()
        run.client("d2")
        assert run.verdict("d2").kind == "refused"
        stranger.shutdown(socket.SHUT_RDWR)


def test_ranks_hear_which_data_hosts_are_there_and_rubbish_is_dropped(run):
    server = run.server("d1", "d2")
    with closing(Rank(run.port)) as rank:
        rank.socket.send(b"rubbish")
        assert rank.hear().refusal
        first = rank.ask(has_begun=False)
        assert (first.agents, first.expected, first.awaited) == ((), 2, ("d1", "d2"))
        assert server.progress == {}
        run.joined("d1")
        assert [member.host for member in rank.ask().agents] == ["d1"]
        assert server.progress[0].samples == 6
        assert rank.ask(protocol=0).refusal
        # Of a child of the trainer, with the same rank.
        with closing(Rank(run.port)) as child:
            child.ask(steps=1)
        assert server.progress[0].steps == 3
    assert "connections_rejected" in run.log.getvalue()
