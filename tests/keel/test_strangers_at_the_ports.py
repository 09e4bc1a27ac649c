"""Strangers at the ports of a run cost bounded memory, and change no byte of a training."""

import contextlib
import secrets
import socket

import psutil
import pytest

from support.keel import Alone, Run, below
from support.trainings import expected, paused

pytestmark = [pytest.mark.fault, pytest.mark.timeout(600)]

# A pause before each blow, and after the last.
STEP = 8
PAUSES = [*range(STEP, 120, STEP)]
MANY = {"sample_seconds": 0.01, "samples": 500, "epochs": 1}
FLOOD = 120
MAX_GROWTH_BYTES = 64 << 20
HOSE_BYTES = 16 << 20
# As messaging libraries greet.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
FLOODS = {
    "half-open": b"",
    "greeting and silence": GREETING,
    "garbage": secrets.token_bytes(2000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    "a length without end": b"\x7f" + b"\xff" * 15,
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    with Alone(tmp_path_factory.mktemp("alone") / "run") as made:
        yield made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keel") / "run"
    settings = {"feed.accept_pickles": "false"}
    with Run(folder, "dnn=local.c1:1", "data=local.c1:1:1", settings=settings) as made:
        yield made


@pytest.fixture(scope="module")
def struck(run, alone):
    """A training that is struck again and again; at last it is what it is without that."""
    job = paused(run, pause_at=PAUSES, **MANY)
    yield job
    for _ in PAUSES[job.num_pauses - 1 :]:
        job.go_on()
    assert job.finish() == expected(alone, **MANY)


def rss_bytes(run: Run) -> int:
    total = 0
    for process in below(run.process):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total


def goes_on(job, alone) -> None:
    job.go_on()
    job.pause()
    assert job.lines == expected(alone, **MANY)[: len(job.lines)]


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_is_refused_in_bounded_memory_while_a_training_goes_on(name, run, struck, alone):
    ports = {port for host in run.hosts() for port in run.ports(host)}
    assert len(ports) >= 2
    before = rss_bytes(run)
    with contextlib.ExitStack() as stack:
        for port in ports:
            for _ in range(FLOOD):
                stranger = socket.create_connection(("127.0.0.1", port), 10)
                stack.enter_context(stranger)
                with contextlib.suppress(OSError):
                    stranger.sendall(FLOODS[name])
        goes_on(struck, alone)
        assert rss_bytes(run) - before < MAX_GROWTH_BYTES
    goes_on(struck, alone)


def test_a_stranger_that_sends_and_sends_is_cut_off_or_not_read(run, struck, alone):
    zeros = bytes(1 << 16)
    for port in {port for host in run.hosts() for port in run.ports(host)}:
        before, sent = rss_bytes(run), 0
        with socket.create_connection(("127.0.0.1", port), 10) as stranger:
            stranger.settimeout(5)
            with contextlib.suppress(OSError):
                stranger.sendall(GREETING)
                while sent < HOSE_BYTES:
                    sent += stranger.send(zeros)
            assert rss_bytes(run) - before < HOSE_BYTES
    goes_on(struck, alone)
