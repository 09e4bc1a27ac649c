"""Nobody who is slow, stopped, cut off in the middle or late stops the others or changes a byte."""

import re
import socket
import time
from dataclasses import dataclass

import psutil
import pytest

from support.cluster import Cluster, reference, wait_until
from support.proxy import Proxy

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SLOW = {"sample_seconds": 0.01, "samples": 96, "epochs": 1}


def test_what_a_worker_makes_that_is_woken_late_is_dropped(host):
    given = {**SLOW, "epochs": 2}
    logged_before, workers = host.log_of(0).read_text(), set(host.workers_of(0))
    trainer = host.paused(pause_at=5, **given)
    stopped = min(set(host.workers_of(0)) - workers, key=lambda own: own.pid)
    stopped.suspend()
    trainer.go_on()

    def logged() -> str:
        return host.log_of(0).read_text().removeprefix(logged_before)

    wait_until(lambda: "batch_overdue" in logged(), "its batch is made again")
    stopped.resume()
    assert trainer.finish() == reference(**given)
    assert "data_worker_died" not in logged()


def test_stopped_local_worker_is_not_waited_for():
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.paused(pause_at=5, num_workers=2, **SLOW)
        psutil.Process(trainer.process.pid).children()[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)
        assert "local_batch_overdue" in trainer.errors


@pytest.mark.soak
def test_a_hole_of_40_s_before_the_only_data_host_changes_nothing():
    given = {**SLOW, "samples": 64}
    feed = {"lease_seconds": 60.0}
    with Proxy() as proxy, Proxy() as batches, Cluster(agents=1, late=True, feed=feed) as cluster:
        cluster.start_agent(0, advertised_port=proxy.port, advertised_batch_port=batches.port)
        proxy.target, batches.target = cluster.agent_port(0), cluster.agent_port(0) + 1
        trainer = cluster.paused(pause_at=3, **given)
        for each in (proxy, batches):
            each.is_hole.set()
        trainer.go_on()
        time.sleep(40)  # the fault: longer than the heartbeats (18 s) and the patience of before
        for each in (proxy, batches):
            each.is_hole.clear()
        assert trainer.finish() == reference(**given)
        assert "agent_connection_lost" in trainer.errors
        assert "no_data_host_left" in trainer.errors


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
    assert "agent_connection_lost" in trainer.errors


def test_batches_that_are_changed_on_their_way_are_refused_and_come_again(behind):
    trainer = behind.cluster.paused(pause_at=3, **LARGE)
    behind.proxy.forge(every=300_000, times=3)
    trainer.go_on()
    assert trainer.finish() == reference(**LARGE)
    assert behind.proxy.num_forged == 3
    refused = re.findall(r"message_refused agent=algo-0 reason=(.*)", trainer.errors)
    # A byte of padding is no part of a batch.
    assert 1 <= len(refused) <= 3
    assert all("failed authentication" in reason for reason in refused)


def test_connection_that_is_lost_again_and_again_in_its_first_batch_is_an_error(behind):
    behind.proxy.num_cut = 0
    # The data host's first record, 1 KiB, gets through; no batch of 230 kB does.
    behind.proxy.cut_each(after=50_000)
    trainer = behind.cluster.train(**LARGE)
    assert trainer.end() == 5
    assert behind.proxy.num_cut == 5
    behind.proxy.cut_each(after=0)
    assert "delivers no batches" in trainer.errors


def test_host_whose_port_for_batches_nobody_reaches_is_an_error_in_words():
    with socket.socket() as held, Cluster(agents=1, late=True) as cluster:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        cluster.start_agent(0, advertised_batch_port=port)
        trainer = cluster.train(**SLOW)
        assert trainer.end() == 5
    assert "data host algo-0 delivers no batches" in trainer.errors
    assert "lost 5 times in a row" in trainer.errors
    assert f"port {port}" in trainer.errors
    assert "feed.port + 1" in trainer.errors


@pytest.fixture(scope="module")
def half_reached():
    with Proxy() as proxy, Cluster(agents=2, late=True) as cluster:
        cluster.start_agent(0, advertised_batch_port=proxy.port)
        cluster.start_agent(1)
        cluster.wait_for_agents()
        yield Behind(cluster, proxy)


def test_host_whose_port_for_batches_nobody_reaches_is_left_out_and_the_others_go_on(half_reached):
    trainer = half_reached.cluster.paused(pause_at=3, **SLOW)
    wait_until(lambda: "host_excluded agent=algo-0" in trainer.errors, "the first is left out")
    trainer.go_on()
    assert trainer.finish() == reference(**SLOW)


def test_host_whose_port_for_batches_opens_after_a_while_serves_from_the_next_epoch(half_reached):
    given = {**SLOW, "epochs": 2}
    cluster = half_reached.cluster
    trainer = cluster.paused(pause_at=8, pause_epochs=[0, 1], **given)
    wait_until(lambda: "host_excluded agent=algo-0" in trainer.errors, "the first is left out")

    def num_ready() -> int:
        return trainer.errors.count("agent_ready agent=algo-0")

    before = num_ready()
    half_reached.proxy.target = cluster.agent_port(0) + 1
    trainer.go_on()
    trainer.until("pause")
    wait_until(lambda: num_ready() > before, "the first is ready again")
    # Nobody else makes the rest, however quick the other one is.
    cluster.stop(1)
    trainer.go_on()
    assert trainer.finish() == reference(**given)
    cluster.cont(1)
    feed = cluster.coordinator.progress[0].feed
    batches = {work.host: work.batches for work in feed.hosts}
    assert batches["algo-0"] > 0


def test_one_batch_always_goes_however_small_the_budget():
    with Cluster(agents=2, workers=2, feed={"max_bytes": 1}) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(loaders=2, num_workers=1, samples=48)
        assert trainer.finish() == reference(loaders=2, num_workers=1, samples=48)
