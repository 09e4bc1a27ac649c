"""What hosts say of themselves, and when they were heard, decides what is so about the run."""

import pytest

from stoker.feed.engine.run_messages import PROTOCOL_VERSION, HostEnd, HostState, Progress, RunState
from stoker.launch.run_server import HostTable
from stoker.records import FeedSettings

LEASE = 12.0
START = 1800.0


def table(**roles):
    hosts = roles or {"d1": "data", "d2": "data", "f1": "dnn"}
    feed = FeedSettings(lease_seconds=LEASE, start_deadline_seconds=START)
    return HostTable(hosts, run_id="run", feed=feed, now=0.0)


def state(host="d1", *, life="a", **changes):
    role = "data" if host.startswith("d") else "dnn"
    own = {"role": role, "host": host, "address": "10.0.0.1", "incarnation": life, "group": "g"}
    run = {"protocol": PROTOCOL_VERSION, "run_id": "run"}
    return HostState(**{**own, **run, "port": 7600, "workers": 2, **changes})


def told(changes):
    return [(change.host, change.what) for change in changes]


def agents(hosts):
    return [member.host for member in hosts.run_state(RunState()).agents]


def test_a_host_that_is_silent_for_a_lease_is_lost_and_may_come_back():
    hosts = table()
    assert hosts.hear(state(), 0.0).what == "joined"
    assert hosts.hear(state(), 3.0) is None
    assert hosts.expire(3.0 + LEASE) == []
    assert agents(hosts) == ["d1"]
    (lost,) = hosts.expire(3.1 + LEASE)
    assert (lost.what, lost.fails_the_run) == ("lost", False)
    assert hosts.expire(99.0) == []
    assert (agents(hosts), hosts.run_state(RunState()).lost) == ([], ("d1",))
    assert hosts.hear(state(), 99.0).what == "rejoined"
    assert (agents(hosts), hosts.run_state(RunState()).lost) == (["d1"], ())


def test_a_dnn_host_that_is_lost_ends_the_run():
    hosts = table()
    hosts.hear(state("f1"), 0.0)
    (lost,) = hosts.expire(LEASE + 1)
    assert (lost.fails_the_run, lost.is_loss) == (True, True)


@pytest.mark.parametrize(("host", "fails"), [("d1", False), ("f1", True)])
def test_a_host_that_never_comes_is_absent_once(host, fails):
    hosts = table(**{host: "data" if host == "d1" else "dnn"})
    assert hosts.expire(START) == []
    (absent,) = hosts.expire(START + 1)
    assert (absent.what, absent.fails_the_run, absent.is_loss) == ("absent", fails, False)
    assert hosts.expire(START + 2) == []
    assert hosts.trainers(live_only=False) == ()


@pytest.mark.parametrize(
    ("end", "fails", "is_loss"),
    [
        (HostEnd(exit_code=0), False, False),
        (HostEnd(exit_code=7, reason="LookupError"), True, False),
        (HostEnd(exit_code=143, is_signalled=True), True, True),
        (HostEnd(reason="its engine failed"), True, False),
    ],
)
def test_a_dnn_host_that_ends_fails_the_run_unless_its_training_ended_well(end, fails, is_loss):
    hosts = table()
    hosts.hear(state("f1"), 0.0)
    left = hosts.hear(state("f1", end=end), 1.0)
    assert (left.what, left.fails_the_run, left.is_loss) == ("left", fails, is_loss)
    # Said again, which is no news; and never lost.
    assert hosts.hear(state("f1", end=end), 2.0) is None
    assert hosts.expire(99.0) == []
    assert hosts.trainers(live_only=False) == ()


def test_a_data_host_comes_back_as_another_process():
    hosts = table()
    hosts.hear(state(), 0.0)
    assert hosts.hear(state(life="b", address="10.0.0.9"), 1.0).what == "rejoined"
    (member,) = hosts.run_state(RunState()).agents
    assert (member.address, member.incarnation) == ("10.0.0.9", "b")


def test_ranks_hear_who_is_there_who_left_and_who_is_awaited():
    hosts = table(d1="data", d2="data", d3="data")
    hosts.hear(state("d2"), 0.0)
    hosts.hear(state("d3"), 0.0)
    hosts.hear(state("d3", end=HostEnd(reason="failed: no licence\nwhere: d3")), 1.0)
    run = hosts.run_state(RunState())
    assert (run.expected, agents(hosts), run.awaited) == (3, ["d2"], ("d1",))
    assert run.left == {"d3": "failed: no licence"}


@pytest.mark.parametrize(
    "message",
    [
        state(run_id="other"),
        state(protocol=PROTOCOL_VERSION + 1),
        state("d9"),
        state("f1", role="data"),
        Progress(rank=0, steps=0, samples=0, wait_seconds=0, compute_seconds=0, run_id="other"),
    ],
)
def test_who_is_of_another_run_or_version_is_refused(message):
    assert table().refusal(message)
    assert table().refusal(state()) == ""


def test_who_is_ready_and_who_is_done():
    hosts = table(d1="data", f1="dnn")
    assert hosts.unready == ("d1", "f1")
    hosts.hear(state("d1", stage="ready"), 0.0)
    hosts.hear(state("f1"), 0.0)
    assert hosts.unready == ("f1",)
    assert hosts.trainers(live_only=True) == ("f1",)
    hosts.hear(state("f1", stage="done"), 0.0)
    assert (hosts.unready, hosts.trainers(live_only=False)) == ((), ())
