"""The leader and hosts tell the stages of a run over real sockets."""

import contextlib
import secrets
from io import StringIO

import pytest
import zmq

from stoker.feed.wire.crypto import Keys
from stoker.feed.wire.protocol import PROTOCOL_VERSION, Join
from stoker.launch.coordinator import Coordinator
from stoker.launch.leader_connection import Membership
from stoker.logs import Log
from stoker.records import FeedSettings
from support.local_job import until
from support.tokens import new_token

KEYS = Keys.from_token(bytes.fromhex(new_token()))
# Beats are far apart: what is told must not wait for one.
FEED = FeedSettings(lease_seconds=400.0, start_deadline_seconds=400.0)


@pytest.fixture
def coordinator():
    with zmq.Context() as context, context.socket(zmq.PAIR) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    found = Coordinator(
        keys=KEYS,
        run_id="run",
        agents=("d1",),
        followers=("f1",),
        feed=FEED,
        log=Log(run="run", host="leader", stream=StringIO()),
        address="127.0.0.1",
        port=port,
        on_failure=lambda change: None,
    )
    found.start()
    try:
        yield found, port
    finally:
        found.close()


@contextlib.contextmanager
def member(host, port):
    join = Join(
        protocol=PROTOCOL_VERSION,
        run_id="run",
        kind="agent" if host == "d1" else "follower",
        host=host,
        group="any",
        address="127.0.0.1",
        port=0,
        incarnation=secrets.token_hex(8),
    )
    found = Membership(
        join=join,
        keys=KEYS,
        address="127.0.0.1",
        port=port,
        feed=FEED,
        log=Log(run="run", host=host, stream=StringIO()),
        on_verdict=lambda verdict: None,
    )
    found.start()
    try:
        yield found
    finally:
        found.close()


def test_stages_are_told_at_once_and_to_those_that_come_later(coordinator):
    leader, port = coordinator
    with member("d1", port) as data:
        assert data.wait_until_welcome(30)
        assert data.run_stage == "begun"
        leader.announce("led")
        until(lambda: data.run_stage == "led", what="the data host hears of the leader's")
        data.tell("ready")
        until(lambda: leader.unready == ("f1",), what="the leader hears of the data host's")
        leader.announce("ready")
        with member("f1", port) as late:
            until(lambda: late.run_stage == "ready", what="who comes late hears of it, too")
            assert leader.followers(live_only=True) == ("f1",)
            late.tell("done")
            until(lambda: leader.unready == (), what="the leader hears of the follower's")
            # Its training has ended: it is not waited for.
            assert leader.followers(live_only=False) == leader.followers(live_only=True) == ()
            data.leave(reason="out of licences")
            until(lambda: leader.gone_agents == {"d1": "out of licences"}, what="it has left")
            assert leader.unready == ("d1",)
            with member("d1", port) as again:
                assert again.wait_until_welcome(30)
                # Another process, which has not started its commands.
                assert leader.unready == ("d1",)
                again.tell("ready")
                until(lambda: leader.unready == (), what="it is back")
