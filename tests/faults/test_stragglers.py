"""Nobody who is slow, stopped, cut off in the middle or late stops the others or changes a byte."""

import re
import socket
from dataclasses import dataclass

import psutil
import pytest

from support.cluster import Cluster, local_workers, reference, wait_until
from support.proxy import Proxy

pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.timeout(300)]


SLOW = {"sample_seconds": 0.01, "samples": 96, "epochs": 1}


def test_what_a_worker_makes_that_is_woken_late_is_dropped(host):
    given = {**SLOW, "epochs": 2}
    workers = set(host.workers_of(0))
    trainer = host.paused(pause_at=5, **given)
    stopped = min(set(host.workers_of(0)) - workers, key=lambda own: own.pid)
    stopped.suspend()
    trainer.go_on()
    wait_until(lambda: "batch_overdue" in trainer.errors, "its batch is made again")
    stopped.resume()
    assert trainer.finish() == reference(**given)
    assert "batches_lost" not in trainer.errors


def test_stopped_local_worker_is_not_waited_for():
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.paused(pause_at=5, num_workers=2, **SLOW)
        local_workers(trainer)[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)


# Batches of 230 kB, so that what happens to a connection happens inside of one.
LARGE = {**SLOW, "shape": [3, 140, 140], "samples": 64}


@dataclass
class Behind:
    cluster: Cluster
    proxy: Proxy


@pytest.fixture(scope="module")
def behind():
    with Proxy() as proxy, Cluster(agents=1, late=True) as cluster:
        cluster.start_agent(0, advertised_batch_port=proxy.port)
        proxy.target = cluster.agent_port(0) + 1
        yield Behind(cluster, proxy)


def test_connection_cut_in_the_middle_of_a_batch_changes_nothing(behind):
    trainer = behind.cluster.paused(pause_at=3, **LARGE)
    behind.proxy.num_cut = 0
    behind.proxy.arm(cut_after=500_000)
    trainer.go_on()
    assert trainer.finish() == reference(**LARGE)
    assert behind.proxy.num_cut == 1
    assert "batches_lost agent=algo-0" in trainer.errors


def test_batches_that_are_changed_on_their_way_are_refused_and_come_again(behind):
    trainer = behind.cluster.paused(pause_at=3, **LARGE)
    behind.proxy.forge(every=300_000, times=3)
    trainer.go_on()
    assert trainer.finish() == reference(**LARGE)
    assert behind.proxy.num_forged == 3
    refused = re.findall(r"batches_lost agent=algo-0 reason=(.*)", trainer.errors)
    # A byte of padding is no part of a batch.
    assert 1 <= len(refused) <= 3
    assert all("failed authentication" in reason for reason in refused)


def test_host_whose_port_for_batches_nobody_reaches_is_left_out_in_words():
    with socket.socket() as held, Cluster(agents=1, late=True) as cluster:
        held.bind(("127.0.0.1", 0))
        cluster.start_agent(0, advertised_batch_port=held.getsockname()[1])
        trainer = cluster.train(**SLOW)
        assert trainer.finish() == reference(**SLOW)
    assert "host_excluded agent=algo-0" in trainer.errors
    assert "host algo-0 delivers no batches" in trainer.errors


# What dies on a data host is started again there, and its batches are made by whoever is there.


STREAMS = "stream_script.py"


@pytest.fixture(scope="module")
def pair():
    # Nobody who is silent is given up while a test lasts.
    with Cluster(agents=2, workers=2, feed={"lease_seconds": 30.0}) as cluster:
        cluster.wait_for_agents()
        yield cluster


def workers_of(cluster, trainer, number):
    begin = psutil.Process(trainer.process.pid).create_time()
    return [worker for worker in cluster.workers_of(number) if worker.create_time() > begin]


def kill_dataset_process(cluster, trainer, number):
    wait_until(lambda: bool(workers_of(cluster, trainer, number)), "a data worker")
    workers_of(cluster, trainer, number)[0].parent().kill()


def test_a_dataset_process_that_dies_is_started_again(pair):
    trainer = pair.paused(pause_at=5, **SLOW)
    kill_dataset_process(pair, trainer, 0)
    ready = "agent_ready agent=algo-0"
    wait_until(lambda: trainer.errors.count(ready) == 2, "the host is ready again")
    trainer.go_on()
    assert trainer.finish() == reference(**SLOW)


def test_workers_that_die_one_after_the_other_change_nothing(pair):
    given = {"sample_seconds": 0.02, "epochs": 1}
    trainer = pair.paused(pause_at=1, **given)
    for _ in range(3):
        wait_until(lambda: bool(workers_of(pair, trainer, 0)), "a data worker")
        for worker in workers_of(pair, trainer, 0):
            worker.kill()
    trainer.go_on()
    assert trainer.finish() == reference(**given)


def test_streams_of_its_host_go_to_another(pair):
    trainer = pair.paused(workers=0, script=STREAMS, pause_at=5)
    number = next(number for number in range(2) if workers_of(pair, trainer, number))
    kill_dataset_process(pair, trainer, number)
    trainer.go_on()
    assert trainer.finish() == reference(script=STREAMS, torch=True)
