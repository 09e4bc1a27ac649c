"""What hosts say of themselves, and when they were heard, decides what is so about the run."""

import pytest

from stoker.feed.engine.run_messages import PROTOCOL_VERSION, HostEnd, HostState, RunState
from stoker.launch.run_server import HostTable
from stoker.records import FeedSettings

LEASE = 12.0
START = 1800.0


def table(**roles):
    hosts = roles or {"d1": "data", "d2": "data", "f1": "dnn"}
    feed = FeedSettings(lease_seconds=LEASE, start_deadline_seconds=START)
    return HostTable(hosts, feed=feed, now=0.0)


def heard(hosts, state, now):
    hosts.hear(state, now)
    changes = hosts.look(now)
    assert len(changes) <= 1
    return changes[0] if changes else None


def state(host="d1", *, life="a", **changes):
    own = {"host": host, "address": "10.0.0.1", "incarnation": life, "port": 7600, "workers": 2}
    return HostState(**{"protocol": PROTOCOL_VERSION, **own, **changes})


def agents(hosts):
    return [member.host for member in hosts.run_state(RunState()).agents]


def test_a_host_that_is_silent_for_a_lease_is_lost_and_may_come_back():
    hosts = table()
    assert heard(hosts, state(), 0.0).status == "joined"
    assert heard(hosts, state(), 3.0) is None
    assert hosts.look(3.0 + LEASE) == []
    assert agents(hosts) == ["d1"]
    (lost,) = hosts.look(3.1 + LEASE)
    assert (lost.status, lost.fails_the_run) == ("lost", False)
    assert hosts.look(99.0) == []
    assert (agents(hosts), hosts.run_state(RunState()).lost) == ([], ("d1",))
    assert heard(hosts, state(), 99.0).status == "joined"
    assert (agents(hosts), hosts.run_state(RunState()).lost) == (["d1"], ())


def test_a_dnn_host_that_is_lost_ends_the_run():
    hosts = table()
    heard(hosts, state("f1"), 0.0)
    (lost,) = hosts.look(LEASE + 1)
    assert (lost.fails_the_run, lost.is_loss) == (True, True)


@pytest.mark.parametrize(("host", "fails"), [("d1", False), ("f1", True)])
def test_a_host_that_never_comes_is_absent_once(host, fails):
    hosts = table(**{host: "data" if host == "d1" else "dnn"})
    assert hosts.look(START) == []
    (absent,) = hosts.look(START + 1)
    assert (absent.status, absent.fails_the_run, absent.is_loss) == ("absent", fails, False)
    assert hosts.look(START + 2) == []
    assert hosts.names("joined", "awaited", role="dnn") == ()


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
    heard(hosts, state("f1"), 0.0)
    left = heard(hosts, state("f1", end=end), 1.0)
    assert (left.status, left.fails_the_run, left.is_loss) == ("left", fails, is_loss)
    # Said again, which is no news; and never lost.
    assert heard(hosts, state("f1", end=end), 2.0) is None
    assert hosts.look(99.0) == []
    assert hosts.names("joined", "awaited", role="dnn") == ()


def test_a_data_host_comes_back_as_another_process():
    hosts = table()
    heard(hosts, state(), 0.0)
    assert heard(hosts, state(life="b", address="10.0.0.9"), 1.0).status == "joined"
    (member,) = hosts.run_state(RunState()).agents
    assert (member.address, member.incarnation) == ("10.0.0.9", "b")


def test_ranks_hear_who_is_there_who_left_and_who_is_awaited():
    hosts = table(d1="data", d2="data", d3="data")
    heard(hosts, state("d2"), 0.0)
    heard(hosts, state("d3"), 0.0)
    heard(hosts, state("d3", end=HostEnd(reason="failed: no licence\nwhere: d3")), 1.0)
    run = hosts.run_state(RunState())
    assert (run.expected, agents(hosts), run.awaited) == (3, ["d2"], ("d1",))
    assert run.left == {"d3": "failed: no licence"}


def test_who_is_of_another_version_or_a_dnn_host_that_starts_again_is_refused():
    hosts = table()
    assert hosts.refusal(state(protocol=PROTOCOL_VERSION + 1))
    heard(hosts, state("f1"), 0.0)
    assert hosts.refusal(state("f1", life="b"))
    assert hosts.refusal(state("f1")) == hosts.refusal(state("d1", life="b")) == ""


def test_who_is_ready_and_who_is_done():
    hosts = table(d1="data", f1="dnn")
    assert hosts.unready == ("d1", "f1")
    heard(hosts, state("d1", stage="ready"), 0.0)
    heard(hosts, state("f1"), 0.0)
    assert hosts.unready == ("f1",)
    assert hosts.names("joined", role="dnn") == ("f1",)
    heard(hosts, state("f1", stage="done"), 0.0)
    assert (hosts.unready, hosts.names("joined", "awaited", role="dnn")) == ((), ())
