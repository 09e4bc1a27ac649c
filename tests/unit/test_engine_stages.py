"""The leader knows which hosts an engine's commands are ready on, and whose training is done."""

from stoker.feed.wire.protocol import PROTOCOL_VERSION, Heartbeat, Join, Leave
from stoker.launch.host_leases import HostLeases


def join(group, host, *, life="a"):
    told = Join(
        protocol=PROTOCOL_VERSION,
        run_id="run",
        kind="agent" if host == "d1" else "follower",
        host=host,
        group="any",
        address="127.0.0.1",
        port=0,
        incarnation=life,
    )
    group.join(told, 0.0)


def beat(group, host, stage, *, life="a"):
    group.beat(Heartbeat(host=host, incarnation=life, stage=stage), 1.0)


def test_a_host_is_unready_until_it_says_otherwise_and_when_it_is_gone_or_another():
    group = HostLeases(
        run_id="run",
        agents=("d1",),
        followers=("f1",),
        lease_seconds=12.0,
        start_deadline_seconds=100.0,
        now=0.0,
    )
    for host in ("d1", "f1"):
        join(group, host)
    assert group.unready == ("d1", "f1")
    assert (group.awaited_followers(), group.live_followers()) == (("f1",), ("f1",))
    beat(group, "d1", "ready")
    assert group.unready == ("f1",)
    # A dnn host whose training is done is there, and not waited for.
    beat(group, "f1", "done")
    assert group.unready == ()
    assert (group.awaited_followers(), group.live_followers()) == ((), ())
    assert "f1" in group.live
    group.leave(Leave(host="d1", incarnation="a"))
    assert group.unready == ("d1",)
    join(group, "d1", life="b")
    assert group.unready == ("d1",)
    beat(group, "d1", "ready", life="b")
    assert group.unready == ()
