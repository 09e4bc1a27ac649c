"""The coordinator and its members talk over real sockets on loopback."""

import functools
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from io import StringIO
from typing import TextIO

import pytest
import zmq

from stoker.errors import PlatformError
from stoker.feed.wire.crypto import Keys, secure_client
from stoker.feed.wire.protocol import (
    PROTOCOL_VERSION,
    Attend,
    FromCoordinator,
    GpuReport,
    Join,
    Progress,
    Refused,
    Roster,
    Unpacker,
    pack,
)
from stoker.host.gpus import Gpu, GpuSample, GpuState
from stoker.launch import coordinator as coordinator_module
from stoker.launch import leader_connection, roster
from stoker.launch.coordinator import Coordinator
from stoker.launch.leader_connection import Membership, MembershipVerdict
from stoker.launch.roster import Change, ExpectedHosts
from stoker.logs import Log
from stoker.records import FeedSettings
from stoker.records.gpu import loads_as_json
from support import processes
from support.builders import gpu_load
from support.tokens import new_token

KEYS = Keys.from_token(bytes.fromhex(new_token()))
DEADLINE = 150.0
until = functools.partial(processes.until, what="the condition comes true", seconds=DEADLINE)


class Run:
    def __init__(self):
        self.failures: list[Change] = []
        self.verdicts: dict[str, MembershipVerdict] = {}
        self.log: TextIO = StringIO()
        self._closing: list[Callable[[], None]] = []
        with zmq.Context() as context, context.socket(zmq.PAIR) as probe:
            self.port = probe.bind_to_random_port("tcp://127.0.0.1")

    def coordinator(self, *, agents=("d1",), followers=(), lease_seconds=1.0, straggler=0.5):
        expected = ExpectedHosts(
            run_id="run",
            agents=agents,
            followers=followers,
            lease_seconds=lease_seconds,
            start_deadline_seconds=60.0,
        )
        coordinator = Coordinator(
            keys=KEYS,
            expected=expected,
            log=Log(run="run", host="leader", stream=self.log),
            address="127.0.0.1",
            port=self.port,
            on_failure=self.failures.append,
            straggler_seconds=straggler,
        )
        coordinator.start()
        self._closing.append(coordinator.close)
        return coordinator

    def member(self, host, *, keys=KEYS, run_id="run", lease_seconds=1.0, deadline=1.0):
        membership = Membership(
            join=Join(
                protocol=PROTOCOL_VERSION,
                run_id=run_id,
                kind="agent" if host.startswith("d") else "follower",
                host=host,
                group="data",
                address="127.0.0.1",
                port=1234,
                workers=2,
                incarnation=secrets.token_hex(8),
            ),
            keys=keys,
            address="localhost",
            port=self.port,
            feed=FeedSettings(lease_seconds=lease_seconds, start_deadline_seconds=deadline),
            log=Log(run="run", host=host, stream=self.log),
            on_verdict=lambda verdict: self.verdicts.setdefault(host, verdict) and None,
        )
        membership.start()
        self._closing.insert(0, membership.close)
        return membership

    def joined(self, host, **how):
        member = self.member(host, **how)
        assert member.wait_until_welcome(DEADLINE)
        return member

    def verdict(self, host):
        until(lambda: host in self.verdicts)
        return self.verdicts[host]

    def close(self):
        for close in self._closing:
            close()


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(coordinator_module, "GOODBYE_SECONDS", 0.3)
    run = Run()
    try:
        yield run
    finally:
        run.close()
    assert not [t.name for t in threading.enumerate() if t.name in ("coordinator", "membership")]


class Rank:
    def __init__(self, port, keys=KEYS):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        secure_client(self.socket, keys)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self._unpack = Unpacker(FromCoordinator)

    def close(self):
        self.socket.close()
        self.context.term()

    def send(self, message):
        self.socket.send(pack(message))

    def receive(self, timeout=DEADLINE):
        return self._unpack(self.socket.recv()) if self.socket.poll(timeout * 1000) else None

    def roster(self):
        message = self.receive()
        assert isinstance(message, Roster)
        return message


def attend(run_id="run", protocol=PROTOCOL_VERSION):
    return Attend(protocol=protocol, run_id=run_id, rank=0, host="leader")


def test_members_are_told_how_the_run_ended_those_before_their_leader_and_late_ones_too(run):
    early = run.member("d1", deadline=DEADLINE)
    assert not early.wait_until_welcome(0.2)
    agents = ("d1", "d2", "d3")
    coordinator = run.coordinator(agents=agents, followers=("f1",), straggler=DEADLINE)
    hosts = [early, run.member("d2"), run.member("f1")]
    assert all(host.wait_until_welcome(DEADLINE) for host in hosts)
    coordinator.end("failed", exit_code=7, reason="rank 1 broke")
    closing = threading.Thread(target=coordinator.close)
    closing.start()
    run.member("d3")
    until(lambda: len(run.verdicts) == 4)
    closing.join(DEADLINE)
    for verdict in run.verdicts.values():
        assert verdict.kind == "decided"
        assert (verdict.state.outcome, verdict.state.exit_code) == ("failed", 7)
        assert "rank 1 broke" in verdict.reason


def test_data_hosts_are_given_back_while_the_training_goes_on(run):
    coordinator = run.coordinator(agents=("d1", "d2"), followers=("f1",))
    hosts = [run.member(host) for host in ("d1", "f1")]
    assert all(host.wait_until_welcome(DEADLINE) for host in hosts)
    coordinator.release_agents("nobody asks them")
    first = run.verdict("d1")
    run.member("d2")
    for verdict in (first, run.verdict("d2")):
        assert verdict.kind == "decided"
        assert verdict.reason == "the training continues without data hosts: nobody asks them"
    assert "f1" not in run.verdicts
    coordinator.end("succeeded", exit_code=0, reason="")
    assert run.verdict("f1").reason == "the training succeeded"


def test_stages_are_told_at_once_and_to_those_that_come_later(run):
    # Heartbeats are far apart: what is told must not wait for one.
    leader = run.coordinator(followers=("f1",), lease_seconds=400.0)
    data = run.joined("d1", lease_seconds=400.0)
    assert data.run_stage == "begun"
    leader.announce("led")
    until(lambda: data.run_stage == "led")
    data.tell("ready")
    until(lambda: leader.unready == ("f1",))
    leader.announce("ready")
    late = run.member("f1", lease_seconds=400.0)
    until(lambda: late.run_stage == "ready")
    assert leader.followers(live_only=True) == ("f1",)
    late.tell("done")
    until(lambda: leader.unready == ())
    # Its training has ended: it is not waited for.
    assert leader.followers(live_only=False) == leader.followers(live_only=True) == ()
    data.leave(reason="out of licences")
    until(lambda: leader.gone_agents == {"d1": "out of licences"})
    assert leader.unready == ("d1",)
    again = run.joined("d1", lease_seconds=400.0)
    # Another process, which has not started its commands.
    assert leader.unready == ("d1",)
    again.tell("ready")
    until(lambda: leader.unready == ())


def test_a_log_that_nobody_reads_holds_up_nobody(run, full_pipe):
    read, run.log = full_pipe
    coordinator = run.coordinator(agents=("d1", "d2"), lease_seconds=20.0)
    run.joined("d1", lease_seconds=20.0)
    run.joined("d2", lease_seconds=20.0)
    coordinator.end("succeeded", exit_code=0, reason="")
    assert run.verdict("d1").kind == "decided"
    # Whoever reads again sees all of it.
    lines: list[bytes] = []
    while len(lines) < 3:
        lines += [line for line in [read.readline()] if b"host=leader" in line]
    assert b"coordinator_listening" in lines[0]
    assert [b"host_joined" in line for line in lines[1:]] == [True, True]


def test_a_log_that_nobody_reads_does_not_hold_up_the_end_of_a_process(full_pipe):
    _, stream = full_pipe
    script = """
import sys
from stoker import logs
logs.LAST_SECONDS = 0.1
logs.Log(run="r", host="h").event("run_joined")
sys.exit(7)
"""
    ended = subprocess.run([sys.executable, "-c", script], stderr=stream, timeout=100, check=False)
    assert ended.returncode == 7


def test_close_waits_for_goodbyes_and_measures_the_release(run):
    coordinator = run.coordinator()
    member = run.joined("d1")
    coordinator.end("succeeded", exit_code=0, reason="")
    run.verdict("d1")
    assert coordinator.release_seconds is None
    member.leave(exit_code=0)
    member.close()
    coordinator.close()
    assert coordinator.release_seconds is not None
    assert [e.what for e in coordinator.events] == ["agent joined", "agent left with exit code 0"]


def test_a_leader_whose_launcher_has_ended_is_lost_long_before_a_long_lease(run, monkeypatch):
    monkeypatch.setattr(roster, "MAX_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(leader_connection, "REFUSED_SECONDS", 0.5)
    coordinator = run.coordinator(lease_seconds=600.0)
    run.joined("d1", lease_seconds=600.0)
    coordinator.close()
    assert run.verdict("d1").kind == "lost"
    assert "ended without a goodbye" in run.verdicts["d1"].reason


def test_a_launcher_whose_connection_ended_is_lost_long_before_a_long_lease(run, monkeypatch):
    monkeypatch.setattr(roster, "MAX_BEAT_SECONDS", 0.1)
    monkeypatch.setattr(roster, "CUT_OFF_SECONDS", 0.5)
    run.coordinator(followers=("f1",), lease_seconds=600.0)
    run.joined("f1", lease_seconds=600.0).close()
    until(lambda: bool(run.failures))
    assert run.failures[0].host == "f1"
    assert "connection ended" in run.failures[0].reason


def test_a_host_of_another_run_is_refused(run):
    run.coordinator()
    run.member("d1", run_id="another")
    assert run.verdict("d1").kind == "refused"
    assert "not another" in run.verdicts["d1"].reason


def test_a_host_with_another_token_gets_no_answer_until_the_start_deadline(run):
    run.coordinator()
    member = run.member("d1", keys=Keys.from_token(bytes.fromhex(new_token())))
    assert run.verdict("d1").kind == "never"
    assert not member.wait_until_welcome(0)


OTHER_TOKEN = {"keys": Keys.from_token(bytes.fromhex(new_token()))}


@pytest.mark.parametrize(
    ("other", "reason"),
    [(OTHER_TOKEN, "its token differs"), ({"run_id": "yesterday"}, "this is run run, not yest")],
)
def test_ranks_and_the_record_are_told_that_a_host_was_refused(run, other, reason):
    coordinator = run.coordinator(agents=("d1",))
    with closing(Rank(run.port)) as rank:
        rank.send(attend())
        assert rank.roster().refused == {}
        run.member("d1", **other)
        assert reason in rank.roster().refused["d1"]
    (event,) = [event.what for event in coordinator.events if "refused" in event.what]
    assert reason in event


def test_who_speaks_no_protocol_of_ours_is_no_host_with_another_token(run):
    coordinator = run.coordinator(agents=("d1",))
    with closing(Rank(run.port)) as rank:
        rank.send(attend())
        rank.roster()
        with socket.create_connection(("127.0.0.1", run.port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n")
        member = run.joined("d1")
        assert rank.roster().refused == {}
        member.close()
    assert not [event for event in coordinator.events if "refused" in event.what]


def test_a_followers_failure_carries_its_exit_code_and_words(run):
    coordinator = run.coordinator(agents=(), followers=("f1",))
    run.joined("f1").leave(exit_code=7, reason="LookupError: no such thing")
    until(lambda: bool(run.failures))
    failure = run.failures[0]
    assert (failure.exit_code, failure.reason) == (7, "LookupError: no such thing")
    assert coordinator.followers(live_only=False) == ()


def test_ranks_get_the_roster_again_whenever_it_changes(run):
    run.coordinator(agents=("d1", "d2"))
    with closing(Rank(run.port)) as rank:
        rank.send(attend())
        first = rank.roster()
        assert (first.agents, first.expected) == ((), 2)
        member = run.member("d1")
        assert [m.host for m in rank.roster().agents] == ["d1"]
        member.close()
        gone = rank.roster()
        assert (gone.agents, [m.host for m in gone.lost]) == ((), ["d1"])
        run.member("d1")
        back = rank.roster()
        assert ([m.host for m in back.agents], back.lost) == (["d1"], ())


def test_a_process_that_has_ended_is_forgotten_at_the_next_change(run):
    run.coordinator(agents=("d1", "d2"))
    with closing(Rank(run.port)) as stays:
        stays.send(attend())
        stays.roster()
        with closing(Rank(run.port)) as goes:
            goes.send(attend())
            goes.roster()
        for host in ("d1", "d2"):
            run.member(host)
            assert host in [m.host for m in stays.roster().agents]
    assert "message_send_failed" not in run.log.getvalue()


def test_a_rank_of_another_run_or_version_is_refused(run):
    run.coordinator()
    with closing(Rank(run.port)) as rank:
        for message in (attend(run_id="other"), attend(protocol=PROTOCOL_VERSION + 1)):
            rank.send(message)
            assert isinstance(rank.receive(), Refused)


def gpu_report(host, **more):
    sample = GpuSample(utilization=0.28)
    state = GpuState(gpu=Gpu(index=0, uuid=f"GPU-of-{host}"), sample=sample)
    return GpuReport(host=host, states=(state,), **more)


def test_the_leader_knows_the_gpus_of_its_followers_while_they_report(run, monkeypatch):
    coordinator = run.coordinator(agents=(), followers=("f1",))
    member = run.member("f1")
    assert member.wait_until_welcome(DEADLINE)
    assert coordinator.gpu_states == {}
    member.tell_gpus(gpu_report("f1"))
    until(lambda: bool(coordinator.gpu_states))
    (state,) = coordinator.gpu_states["f1"]
    assert (state.gpu.uuid, state.sample.utilization) == ("GPU-of-f1", 0.28)
    assert coordinator.gpu_loads == ()
    monkeypatch.setattr(coordinator_module, "GPU_TIMEOUT_SECONDS", 0.0)
    assert coordinator.gpu_states == {}, "an old sample says nothing of now"


def test_the_loads_of_a_follower_come_before_its_goodbye(run):
    coordinator = run.coordinator(agents=(), followers=("f1",))
    member = run.member("f1")
    assert member.wait_until_welcome(DEADLINE)
    for _ in range(20):
        member.tell_gpus(gpu_report("f1"))
    text = loads_as_json((gpu_load(host="f1"),), max_bytes=4096)
    member.tell_gpus(GpuReport(host="f1", loads=text))
    member.leave(exit_code=0)
    member.close()
    until(lambda: not coordinator.followers(live_only=False))
    assert [load.host for load in coordinator.gpu_loads] == ["f1"]


def test_loads_that_are_no_records_are_not_taken(run):
    coordinator = run.coordinator(agents=(), followers=("f1",))
    member = run.member("f1")
    assert member.wait_until_welcome(DEADLINE)
    member.tell_gpus(GpuReport(host="f1", loads=b'[{"host": "f1"}]'))
    until(lambda: "GPU loads" in run.log.getvalue())
    assert coordinator.gpu_loads == ()
    assert not run.failures


def test_the_gpus_of_a_host_that_does_not_train_are_not_taken(run):
    coordinator = run.coordinator(agents=("d1",), followers=("f1",))
    data, follower = run.member("d1"), run.member("f1")
    assert data.wait_until_welcome(DEADLINE)
    assert follower.wait_until_welcome(DEADLINE)
    data.tell_gpus(gpu_report("d1"))
    follower.tell_gpus(gpu_report("f1"))
    until(lambda: bool(coordinator.gpu_states))
    assert coordinator.gpu_states.keys() == {"f1"}


def test_rubbish_is_dropped_and_others_are_served(run):
    coordinator = run.coordinator()
    with closing(Rank(run.port)) as rank:
        rank.socket.send(b"rubbish")
        rank.socket.send_multipart([b"a", b"b", b"c"])
        rank.send(Progress(rank=0, steps=3, samples=6, wait_seconds=1.0, compute_seconds=2.0))
        rank.send(attend())
        rank.roster()
    assert coordinator.progress[0].samples == 6
    # Once a peer, not once a message.
    assert run.log.getvalue().count("message_refused") == 1


def test_a_port_that_is_taken_is_a_platform_error(run, monkeypatch):
    monkeypatch.setattr(coordinator_module, "BIND_SECONDS", 0.2)
    run.coordinator()
    with pytest.raises(PlatformError, match="cannot listen"):
        run.coordinator()


def test_a_resolver_that_does_not_answer_holds_up_no_verdict(run, monkeypatch):
    answers = threading.Event()
    waits = lambda *_, **__: answers.wait(DEADLINE) and []  # noqa: E731
    monkeypatch.setattr(leader_connection.socket, "getaddrinfo", waits)
    member = run.member("d1")
    try:
        assert run.verdict("d1").kind == "never"
        assert not answers.is_set()
        member.close()
        assert not [t.name for t in threading.enumerate() if t.name == "membership"]
    finally:
        answers.set()
