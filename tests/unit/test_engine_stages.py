"""Hosts tell the leader how far an engine's commands are, and the leader tells all hosts."""

from stoker.feed.wire.crypto import Keys
from stoker.feed.wire.protocol import PROTOCOL_VERSION, Heartbeat, Join, Leave
from stoker.launch.host_leases import HostLeases
from stoker.records import FeedSettings
from support.tokens import new_token

KEYS = Keys.from_token(bytes.fromhex(new_token()))
# Beats are far apart: what is told must not wait for one.
FEED = FeedSettings(lease_seconds=400.0, start_deadline_seconds=400.0)


def join(host, *, life="a"):
    return Join(
        protocol=PROTOCOL_VERSION,
        run_id="run",
        kind="agent" if host.startswith("d") else "follower",
        host=host,
        group="any",
        address="127.0.0.1",
        port=0,
        incarnation=life,
    )


def beat(host, stage, *, life="a"):
    return Heartbeat(host=host, incarnation=life, stage=stage)


def members():
    group = HostLeases(
        run_id="run",
        agents=("d1",),
        followers=("f1",),
        lease_seconds=12.0,
        start_deadline_seconds=100.0,
        now=0.0,
    )
    for host in ("d1", "f1"):
        group.join(join(host), 0.0)
    return group


def test_a_host_is_unready_until_it_says_otherwise():
    group = members()
    assert group.unready == ("d1", "f1")
    group.beat(beat("d1", "ready"), 1.0)
    assert group.unready == ("f1",)
    group.beat(beat("f1", "done"), 1.0)
    assert group.unready == ()


def test_a_host_that_is_gone_or_came_back_as_another_is_unready():
    group = members()
    for host in ("d1", "f1"):
        group.beat(beat(host, "ready"), 1.0)
    group.leave(Leave(host="d1", incarnation="a"))
    assert group.unready == ("d1",)
    group.join(join("d1", life="b"), 2.0)
    assert group.unready == ("d1",)
    group.beat(beat("d1", "ready", life="b"), 3.0)
    assert group.unready == ()


def test_a_dnn_host_whose_training_is_done_is_not_waited_for():
    group = members()
    assert (group.awaited_followers(), group.live_followers()) == (("f1",), ("f1",))
    group.beat(beat("f1", "done"), 1.0)
    assert (group.awaited_followers(), group.live_followers()) == ((), ())
    assert "f1" in group.live
