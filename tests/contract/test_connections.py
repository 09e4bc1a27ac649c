"""The I/O thread may wait: no message is there that neither `has_input` nor poll tells of."""

import itertools
import select
import time

import pytest
import zmq

from stoker.feed.trainer.control_connection import Connection, ZmqContext
from stoker.feed.wire import protocol
from stoker.feed.wire.crypto import Keys
from support.router import Router

KEYS = Keys.from_token(b"k" * 32)
SECONDS = 150.0
ROUNDS = 300
HIDDEN = 30
ANSWER_BYTES = 70_000


@pytest.fixture
def port():
    count = itertools.count(1)
    with Router(KEYS, lambda _: [bytes(ANSWER_BYTES)] * (1 + next(count) % 3)) as router:
        yield router.port


@pytest.fixture
def connection(port):
    context: ZmqContext = zmq.Context()
    made = Connection(context, KEYS, now=time.monotonic(), max_message_bytes=1 << 20)
    made.dial(f"tcp://127.0.0.1:{port}")
    yield made
    made.close()
    context.term()


def ready_of(connection):
    poll = select.poll()
    for fileno in connection.filenos:
        poll.register(fileno, select.POLLIN)
    found = poll.poll(0 if connection.has_input() else SECONDS * 1000)
    assert found or connection.has_input(), "nothing came, and nothing told of it"
    return {fileno for fileno, _ in found}


def receive(connection, came, *, at_most=16):
    connection.receive(
        lambda frames: came.extend(map(len, frames)), at_most=at_most, ready=ready_of(connection)
    )


def come_up(connection):
    while not connection.is_up:
        if connection.has_events(ready_of(connection)):
            connection.watch(time.monotonic())


def num_answers(first, last):
    return sum(1 + number % 3 for number in range(first, last + 1))


@pytest.mark.parametrize("at_most", [1, 2, 16])
def test_a_wait_ends_with_each_message(connection, at_most):
    come_up(connection)
    came: list[int] = []
    for number in range(1, ROUNDS):
        connection.send(protocol.Leaving())
        while len(came) < num_answers(1, number):
            receive(connection, came, at_most=at_most)
    assert came == [ANSWER_BYTES] * num_answers(1, ROUNDS - 1)


def test_a_send_that_reads_the_wake_up_of_a_message_hides_it_from_no_wait(connection):
    come_up(connection)
    came: list[int] = []
    for number in range(1, 2 * HIDDEN, 2):
        connection.send(protocol.Leaving())
        poll = select.poll()
        poll.register(connection.filenos[0], select.POLLIN)
        assert poll.poll(SECONDS * 1000)
        # libzmq looks for wake-ups at a send only where it did not within the last millisecond.
        time.sleep(0.004)
        connection.send(protocol.Leaving())
        while len(came) < num_answers(1, number + 1):
            receive(connection, came)
    assert came == [ANSWER_BYTES] * num_answers(1, 2 * HIDDEN)


def test_a_connection_that_is_lost_has_nothing_to_read(connection):
    come_up(connection)
    assert not connection.has_input()
    connection.mark_lost(time.monotonic())
    assert connection.filenos == ()
    assert not connection.has_input()
    assert not connection.has_events({1, 2, 3})
