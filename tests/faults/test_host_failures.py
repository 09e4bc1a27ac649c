"""A data host whose processes die for good is left out, and the others make its batches."""

import contextlib
from pathlib import Path

import psutil
import pytest

from stoker.feed.trainer.links import Failure
from support.cluster import Cluster, reference, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SLOW = {"sample_seconds": 0.01}
STREAMS = "stream_script.py"
REASON = "the dataset process died"


# Nobody who is silent is given up while a test lasts.
LONG = {"lease_seconds": 30.0}


@pytest.fixture(scope="module")
def pair():
    with Cluster(agents=2, workers=2, feed=LONG) as cluster:
        cluster.wait_for_agents()
        yield cluster


def workers_of(cluster, trainer, number):
    begin = psutil.Process(trainer.process.pid).create_time()
    return [worker for worker in cluster.workers_of(number) if worker.create_time() > begin]


def kill_dataset_process(cluster, trainer, number):
    wait_until(lambda: f"agent_ready agent=algo-{number}" in trainer.errors, "the host is ready")
    wait_until(lambda: bool(workers_of(cluster, trainer, number)), "a data worker")
    dataset_process = workers_of(cluster, trainer, number)[0].parent()
    dataset_process.kill()


def makes_nothing(trainer, host):
    return trainer.errors.count(f"host_excluded agent={host}")


def test_others_go_on_and_it_is_retried_with_the_next_epoch(pair):
    given = SLOW | {"epochs": 3}
    trainer = pair.paused(pause_at=5, pause_epochs=[0, 1], **given)
    kill_dataset_process(pair, trainer, 0)
    wait_until(lambda: makes_nothing(trainer, "algo-0") == 1, "the host is left out")
    assert REASON in trainer.errors
    trainer.go_on()
    trainer.until("pause")
    # The other one may have made all batches before it is ready again.
    ready = "agent_ready agent=algo-0"
    wait_until(lambda: trainer.errors.count(ready) == 2, "the host is ready again")
    trainer.go_on()
    assert trainer.finish() == reference(**given)
    assert makes_nothing(trainer, "algo-0") == 1
    assert makes_nothing(trainer, "algo-1") == 0
    assert trainer.errors.count(ready) == 2
    assert trainer.errors.count("agent_ready agent=algo-1") == 1


def test_workers_that_die_one_after_the_other_cost_that_host_only(pair):
    given = {"sample_seconds": 0.1, "epochs": 1}
    trainer = pair.paused(pause_at=1, **given)
    wait_until(lambda: "agent_ready agent=algo-0" in trainer.errors, "the host makes batches")
    trainer.go_on()

    def is_left_out():
        for worker in workers_of(pair, trainer, 0):
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        return makes_nothing(trainer, "algo-0") == 1

    wait_until(is_left_out, "the host is left out")
    assert trainer.finish() == reference(**given)
    assert "its data workers die: data worker" in trainer.errors


def test_streams_of_its_host_go_to_another(pair):
    trainer = pair.paused(workers=0, script=STREAMS, pause_at=5)
    number = next(number for number in range(2) if workers_of(pair, trainer, number))
    kill_dataset_process(pair, trainer, number)
    trainer.go_on()
    assert trainer.finish() == reference(script=STREAMS, torch=True)
    assert makes_nothing(trainer, f"algo-{number}") == 1


def test_where_none_is_left_the_training_ends_with_the_reason(pair):
    # Far more batches than are asked for ahead.
    trainer = pair.paused(pause_at=5, samples=400, **SLOW)
    for number in (0, 1):
        kill_dataset_process(pair, trainer, number)
    trainer.go_on()
    # At once: nobody is waited for.
    assert trainer.end() == 5
    assert REASON in trainer.errors.rpartition("Traceback")[2]


def test_it_keeps_nothing_of_that_dataset():
    with Cluster(agents=2, feed={"lease_seconds": 5.0}) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.paused(pause_at=5, epochs=1, **SLOW)
        agent = Path(f"/proc/{cluster.hosts[0].pid}")

        def slots():
            return (agent / "maps").read_text().count("/memfd:stoker-")

        wait_until(lambda: slots() > 0, "it has made batches")
        kill_dataset_process(cluster, trainer, 0)
        wait_until(lambda: makes_nothing(trainer, "algo-0") == 1, "the host is left out")
        wait_until(lambda: not workers_of(cluster, trainer, 0), "its workers have ended")
        wait_until(lambda: slots() == 0, "their memory is free")
        trainer.go_on()
        assert trainer.finish() == reference(epochs=1, **SLOW)


def test_it_is_retried_in_the_next_epoch_and_twice():
    def may_try(times, epoch_id):
        failure = Failure(epoch_id=4, times=times, reason="", error=ValueError())
        return failure.may_try_again(epoch_id)

    assert [may_try(1, epoch_id) for epoch_id in (3, 4, 5, 9)] == [False, False, True, True]
    assert [may_try(times, 5) for times in (1, 2, 3)] == [True, True, False]
