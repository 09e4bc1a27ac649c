import errno
import io
import queue
from math import inf
from pathlib import Path

import pytest

from stoker.environment import from_environment
from stoker.feed.wire.crypto import Keys
from stoker.launch.engines.data_host import exit_code_of
from stoker.launch.leader_connection import (
    ENDED_SECONDS,
    REFUSED_SECONDS,
    HostRun,
    Membership,
    Silence,
)
from stoker.logs import Log

LEASE = 60.0


def heard(at=0.0):
    silence = Silence(lease_seconds=LEASE, now=at)
    silence.hear(at)
    return silence


def test_a_leader_without_a_heartbeat_is_lost_after_the_lease():
    assert heard().reason(LEASE, trainers_heard_at=-inf) == ""
    assert "silent for more than 60 s" in heard().reason(LEASE + 0.1, trainers_heard_at=-inf)


def test_a_data_host_that_serves_a_live_trainer_does_not_leave_a_silent_leader():
    silence = heard()
    assert silence.reason(500.0, trainers_heard_at=499.0) == ""
    # The trainer has ended, too: from its last word on the lease counts.
    assert silence.reason(499.0 + LEASE, trainers_heard_at=499.0) == ""
    assert silence.reason(500.0 + LEASE, trainers_heard_at=499.0) != ""


def test_a_leader_whose_port_refuses_connections_is_lost_within_seconds():
    silence = heard()
    for second in range(3, 11):
        silence.dial(float(second), is_refused=True)
    assert silence.reason(3.0 + REFUSED_SECONDS, trainers_heard_at=-inf) == ""
    late = 3.1 + REFUSED_SECONDS
    assert "ended without a goodbye" in silence.reason(late, trainers_heard_at=-inf)
    # Not while its trainer asks for batches.
    assert silence.reason(late, trainers_heard_at=late - 1.0) == ""


def test_a_port_that_answers_again_or_not_at_all_is_no_sign_of_death():
    silence = heard()
    silence.dial(3.0, is_refused=True)
    silence.dial(4.0, is_refused=False)
    silence.dial(9.0, is_refused=None)
    assert silence.reason(30.0, trainers_heard_at=-inf) == ""
    never_heard = Silence(lease_seconds=LEASE, now=0.0)
    never_heard.dial(0.0, is_refused=True)
    assert never_heard.reason(1000.0, trainers_heard_at=-inf) == ""


def test_the_time_in_which_this_host_stood_still_is_no_missing_heartbeat_of_the_leader():
    silence = heard()
    silence.dial(0.5, is_refused=True)
    assert silence.turn(1.0) == 0.0
    assert silence.turn(101.0) == 100.0
    assert silence.reason(101.0, trainers_heard_at=-inf) == ""
    silence.turn(101.5)
    assert silence.reason(100.1 + LEASE, trainers_heard_at=-inf) != ""


def test_a_leader_that_ended_its_connection_and_is_not_there_is_lost_before_the_lease():
    # Its container was killed: the kernel says goodbye, and then nobody has the address any more.
    silence = heard()
    silence.end(1.0)
    assert silence.reason(1.0 + ENDED_SECONDS, trainers_heard_at=-inf) == ""
    assert "closed its connection" in silence.reason(1.1 + ENDED_SECONDS, trainers_heard_at=-inf)
    assert silence.reason(1.1 + ENDED_SECONDS, trainers_heard_at=10.0) == ""


def test_a_connection_that_ends_in_silence_or_comes_back_tells_nothing():
    silence = heard()
    # libzmq gave it up: the network, or a leader that stands still.
    silence.end(15.0)
    assert silence.reason(50.0, trainers_heard_at=-inf) == ""
    silence = heard()
    silence.end(1.0)
    silence.hear(3.0)
    assert silence.reason(50.0, trainers_heard_at=-inf) == ""


def test_a_membership_without_open_files_fails_with_words_and_a_code(monkeypatch):
    def connect(_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Membership, "_connect", connect)
    found = []
    run = HostRun(
        settings=from_environment({}),
        topology=None,  # type: ignore[arg-type]
        environ={},
        output=Path(),
        log=Log(run="r", host="data-1", stream=io.StringIO()),
        inbox=queue.SimpleQueue(),
        keys=Keys.from_token(bytes(32)),
    )
    membership = Membership(
        join=None,  # type: ignore[arg-type]
        keys=run.keys,  # type: ignore[arg-type]
        address="127.0.0.1",
        port=1,
        feed=run.settings.feed,
        log=run.log,
        on_verdict=found.append,
    )
    membership.start()
    membership.close()
    assert "ulimit -n" in found[0].reason
    assert exit_code_of(run, found[0], is_asked=False) == 5


@pytest.mark.parametrize(
    ("advertised", "listens_on"),
    [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]"), ("[::1]", "[::1]"), ("fd00::7", "*")],
)
def test_a_host_that_others_reach_by_loopback_alone_listens_there(advertised, listens_on):
    run = HostRun(
        settings=from_environment({"STOKER_ADVERTISE": advertised}),
        topology=None,  # type: ignore[arg-type]
        environ={},
        output=Path(),
        log=Log(run="r", host="data-1", stream=io.StringIO()),
        inbox=queue.SimpleQueue(),
        keys=None,
    )
    assert run.listen_address == listens_on
