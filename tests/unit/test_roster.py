import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.wire.protocol import (
    PROTOCOL_VERSION,
    Heartbeat,
    Join,
    Leave,
    Refused,
    Roster,
    Unpacker,
    Welcome,
    pack,
)
from stoker.launch.roster import CUT_OFF_SECONDS, MAX_BEAT_SECONDS, ExpectedHosts, HostLeases
from support.property_tests import examples

LEASE = 12.0
START = 1800.0


def members(*, agents=("d1", "d2"), followers=(), lease_seconds=LEASE):
    expected = ExpectedHosts(
        run_id="run",
        agents=agents,
        followers=followers,
        lease_seconds=lease_seconds,
        start_deadline_seconds=START,
    )
    return HostLeases(expected, now=0.0)


def join(host="d1", *, life="a", address="10.0.0.1", **changes):
    kind = "agent" if host.startswith("d") else "follower"
    own = {"kind": kind, "host": host, "address": address, "incarnation": life}
    run = {"protocol": PROTOCOL_VERSION, "run_id": "run"}
    return Join(**{**own, **run, "group": "data", "port": 7600, "workers": 2, **changes})


@pytest.mark.parametrize(("lease", "most"), [(LEASE, LEASE / 3), (60.0, MAX_BEAT_SECONDS)])
def test_a_launcher_that_joins_is_told_to_send_frequent_heartbeats(lease, most):
    answer, change = members(lease_seconds=lease).join(join(), 0.0)
    assert answer.lease_seconds == lease
    assert 0 < answer.beat_seconds <= most
    assert change.what == "joined"


def test_a_launcher_whose_connection_ended_is_lost_long_before_its_lease():
    group = members(followers=("f1",))
    for host in ("d1", "d2", "f1"):
        group.join(join(host), 0.0)
    assert group.late(4.0) == ()
    assert group.late(4.6) == ("d1", "d2", "f1")
    for host in ("d1", "d2", "f1", "f1"):
        group.cut_off(host, 4.6)
    # These two are heard again.
    group.join(join("d1"), 5.0)
    group.beat(Heartbeat(host="d2", incarnation="a"), 5.0)
    assert group.expire(4.6 + CUT_OFF_SECONDS) == []
    (change,) = group.expire(4.7 + CUT_OFF_SECONDS)
    assert (change.host, change.what, change.fails_the_run) == ("f1", "lost", True)
    assert "connection ended" in change.reason


def test_the_time_in_which_the_coordinator_stood_still_counts_for_no_lease():
    group = members(followers=("f1",))
    for host in ("d1", "f1"):
        group.join(join(host), 0.0)
    group.stood_still(100.0)
    assert group.expire(100.0 + LEASE) == []
    lost = group.expire(100.1 + LEASE)
    assert [(change.host, change.what) for change in lost] == [("d1", "lost"), ("f1", "lost")]
    assert [change.fails_the_run for change in lost] == [False, True]
    assert "12 s" in lost[1].reason
    assert group.expire(1000.0) == []


def test_a_data_host_has_its_place_whoever_came_first_or_is_lost():
    group = members()
    group.join(join("d2"), 0.0)
    assert [(m.host, m.place) for m in group.roster(0.0).agents] == [("d2", 1)]
    group.join(join("d1"), LEASE)
    group.expire(LEASE + 1)
    roster = group.roster(LEASE + 1)
    assert [(m.host, m.place) for m in (*roster.agents, *roster.lost)] == [("d1", 0), ("d2", 1)]


def test_the_roster_says_why_a_data_host_said_goodbye_until_it_joins_again():
    group = members()
    group.join(join(), 0.0)
    group.leave(Leave(host="d1", incarnation="a", reason="failed: no memory\nwhere: host d1"))
    roster = group.roster(0.0)
    assert (roster.agents, roster.lost, roster.awaited) == ((), (), ("d2",))
    assert roster.left == {"d1": "failed: no memory"}
    group.join(join(life="b"), 1.0)
    assert group.roster(1.0).left == {}


def test_a_stranger_whose_address_nobody_knows_leaves_the_roster_readable():
    group = members()
    assert group.note_other_token("")
    roster = group.roster(0.0)
    assert Unpacker(Roster)(pack(roster)) == roster
    assert roster.refused == {"an unknown address": "its token differs"}


def test_a_lost_data_host_is_in_the_roster_as_lost_until_it_joins_again():
    group = members()
    assert not group.beat(Heartbeat(host="d1", incarnation="a"), 0.0)
    group.join(join(), 0.0)
    group.expire(LEASE + 1)
    roster = group.roster(LEASE + 1)
    assert ([member.host for member in roster.lost], roster.agents) == (["d1"], ())
    assert roster.expected == 2
    assert not group.beat(Heartbeat(host="d1", incarnation="a"), LEASE + 2)
    _, change = group.join(join(), LEASE + 3)
    assert change.what == "rejoined"
    roster = group.roster(LEASE + 3)
    assert (roster.lost, [member.host for member in roster.agents]) == ((), ["d1"])
    group.leave(Leave(host="d1", incarnation="a"))
    roster = group.roster(LEASE + 4)
    assert (roster.agents, roster.lost) == ((), ())
    assert (group.live, group.awaited) == ((), ("d2",))


@pytest.mark.parametrize(("kind", "host"), [("agents", "d1"), ("followers", "f1")])
def test_a_host_that_does_not_come_is_absent_once(kind, host):
    group = members(**{"agents": (), kind: (host,)})
    assert group.expire(START) == []
    (change,) = group.expire(START + 1)
    assert (change.what, change.fails_the_run) == ("absent", kind == "followers")
    assert group.expire(START + 2) == []
    if kind == "agents":
        # It may come later.
        assert group.join(join(host), START + 5)[1].what == "joined"


def test_a_data_host_comes_back_under_a_new_address_and_its_old_life_is_refused():
    group = members()
    group.join(join(life="a", address="10.0.0.1"), 0.0)
    _, change = group.join(join(life="b", address="10.0.0.9"), 1.0)
    assert change.what == "rejoined"
    assert not change.fails_the_run
    assert [m.address for m in group.roster(1.0).agents] == ["10.0.0.9"]
    assert not group.beat(Heartbeat(host="d1", incarnation="a"), 2.0)
    answer, _ = group.join(join(life="a"), 2.0)
    assert isinstance(answer, Refused)
    assert group.leave(Leave(host="d1", incarnation="a")) is None
    assert [m.incarnation for m in group.roster(2.0).agents] == ["b"]


def test_a_reconnect_of_a_member_is_no_news_and_a_follower_that_started_again_fails_the_run():
    group = members(followers=("f1",))
    for host in ("d1", "f1"):
        group.join(join(host), 0.0)
        assert group.join(join(host), 1.0)[1] is None
    assert group.join(join("f1", life="b"), 2.0)[1].fails_the_run


def test_a_follower_that_leaves_fails_the_run_unless_its_training_ended_well():
    for code, fails in ((0, False), (7, True), (None, True)):
        group = members(followers=("f1",))
        group.join(join("f1"), 0.0)
        change = group.leave(Leave(host="f1", incarnation="a", exit_code=code, reason="why"))
        assert change.fails_the_run is fails
        assert change.exit_code == code
        assert group.live_followers() == ()
        assert all(later.host != "f1" for later in group.expire(1000.0 + START))


def test_followers_are_awaited_until_they_are_done_lost_or_absent():
    group = members(followers=("f1", "f2", "f3"))
    group.join(join("f1"), 0.0)
    group.join(join("f2"), 0.0)
    assert group.awaited_followers() == ("f1", "f2", "f3")
    assert group.live_followers() == ("f1", "f2")
    group.leave(Leave(host="f1", incarnation="a", exit_code=0))
    group.expire(LEASE + 1)
    assert group.awaited_followers() == ("f3",)
    group.expire(START + 1)
    assert group.awaited_followers() == ()


def test_strangers_are_refused_with_the_reason():
    group = members(followers=("f1",))
    for message, words in (
        (join("d9"), "d9 is not a host (agent)"),
        (join("f1", kind="agent"), "f1 is not a host (agent)"),
        (join(run_id="other"), "not other"),
        (join(protocol=PROTOCOL_VERSION + 1), "same image"),
    ):
        answer, change = group.join(message, 0.0)
        assert isinstance(answer, Refused)
        assert words in answer.reason
        assert change is None
    assert group.live == ()


ACTIONS = st.tuples(
    st.sampled_from(["join", "beat", "leave", "expire"]),
    st.sampled_from(["d1", "d2", "f1"]),
    st.sampled_from(["a", "b", "c"]),
    st.floats(min_value=0, max_value=20),
)


@settings(max_examples=examples(200))
@given(st.lists(ACTIONS, max_size=40))
def test_whatever_comes_a_live_host_has_spoken_within_its_lease(actions):
    group = members(followers=("f1",))
    now = 0.0
    spoke: dict[str, float] = {}
    for action, host, life, pause in actions:
        now += pause
        for change in group.expire(now):
            assert now - spoke.get(change.host, 0.0) > LEASE
        if action == "join":
            answer, _ = group.join(join(host, life=life), now)
            if isinstance(answer, Welcome):
                spoke[host] = now
        elif action == "beat" and group.beat(Heartbeat(host=host, incarnation=life), now):
            spoke[host] = now
        elif action == "leave":
            group.leave(Leave(host=host, incarnation=life))
        for live in group.live:
            assert now - spoke[live] <= LEASE
        roster = group.roster(now)
        agents = {m.host for m in roster.agents}
        lost = {m.host for m in roster.lost}
        assert agents == {h for h in group.live if h.startswith("d")}
        assert not agents & lost


REFUSED = {
    "another version of the protocol": (join(protocol=PROTOCOL_VERSION - 1), "the same image"),
    "an unreleased version": (join(protocol=PROTOCOL_VERSION + 1), "the same image"),
    "another run": (join(run_id="yesterday"), "not yesterday"),
    "another part": (join(kind="follower"), "d1 is not a host (follower)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_ranks_are_told_why_a_host_was_refused_until_it_is_let_in(case):
    message, words = REFUSED[case]
    group = members()
    group.join(message, 0.0)
    assert words in group.roster(0.0).refused["d1"]
    (change,) = [change for change in group.expire(START + 1) if change.host == "d1"]
    assert words in change.reason
    group.join(join(), START + 2)
    assert group.roster(START + 2).refused == {}


def test_a_member_stays_one_whatever_a_stranger_says_under_its_name():
    group = members()
    group.join(join(), 0.0)
    group.join(join(run_id="other", life="b"), 0.0)
    assert group.live == ("d1",)
    assert group.roster(0.0).refused == {}


def test_a_host_with_another_token_is_known_by_its_address_or_by_who_is_still_awaited():
    group = members(followers=("f1",))
    assert group.note_other_token("10.0.0.7")
    assert not group.note_other_token("10.0.0.7")
    assert group.roster(0.0).refused == {"10.0.0.7": "its token differs"}
    group.join(join("d1"), 0.0)
    group.join(join("f1"), 0.0)
    assert group.roster(0.0).refused == {"d2": "its token differs"}
    absent = [change for change in group.expire(START + 1) if change.what == "absent"]
    assert [(change.host, change.reason) for change in absent] == [
        ("d2", "was refused: its token differs")
    ]
    group.join(join("d2"), START + 2)
    assert group.roster(START + 2).refused == {}


def test_strangers_without_end_take_no_memory():
    group = members()
    told = [group.note_other_token(f"10.0.{number // 256}.{number % 256}") for number in range(999)]
    assert sum(told) == len(group.roster(0.0).refused) < 100
