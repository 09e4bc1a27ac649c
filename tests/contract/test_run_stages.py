"""The leader and hosts tell the stages of a run over real sockets."""

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


def join(host, *, life):
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


def member(host, port):
    found = Membership(
        join=join(host, life=secrets.token_hex(8)),
        keys=KEYS,
        address="127.0.0.1",
        port=port,
        feed=FEED,
        log=Log(run="run", host=host, stream=StringIO()),
        on_verdict=lambda verdict: None,
    )
    found.start()
    return found


def test_stages_are_told_at_once_and_to_those_that_come_later(coordinator):
    leader, port = coordinator
    data = member("d1", port)
    late = None
    try:
        assert data.wait_until_welcome(30)
        assert data.run_stage == "begun"
        leader.announce("led")
        until(lambda: data.run_stage == "led", what="the data host hears of the leader's")
        data.tell("ready")
        until(lambda: leader.unready == ("f1",), what="the leader hears of the data host's")
        leader.announce("ready")
        late = member("f1", port)
        until(lambda: late.run_stage == "ready", what="who comes late hears of it, too")
        data.leave(reason="out of licences")
        until(lambda: leader.gone_agents == {"d1": "out of licences"}, what="it has left")
    finally:
        data.close()
        if late:
            late.close()
