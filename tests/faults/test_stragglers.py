"""Who is slow, stopped, cut off in the middle or late does not stop the others, nor change a byte.

Every batch of every run is compared with the same script without any cluster.
"""

import functools
import json

import psutil
import pytest

from support.cluster import Cluster, Line, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(180)]

SLOW = {"sample_seconds": 0.01, "samples": 96, "epochs": 1}


@functools.cache
def _reference(given: str) -> tuple[str, ...]:
    return tuple(json.dumps(line) for line in run_script(json.loads(given)).finish())


def reference(**given: object) -> list[Line]:
    """What the script yields alone, with num_workers=0."""
    return [json.loads(line) for line in _reference(json.dumps(given, sort_keys=True))]


def test_stopped_worker_of_the_only_host_is_not_waited_for() -> None:
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(pause_at=5, **SLOW)
        trainer.until("pause")
        cluster.workers_of(0)[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)
        assert "batch_overdue" in cluster.log_of(0).read_text()


def test_stopped_local_worker_is_not_waited_for() -> None:
    with Cluster(agents=1, late=True) as cluster:
        trainer = cluster.train(pause_at=5, num_workers=2, **SLOW)
        trainer.until("pause")
        psutil.Process(trainer.process.pid).children()[0].suspend()
        trainer.go_on()
        assert trainer.finish() == reference(**SLOW)
        assert "local_batch_overdue" in trainer.errors


def test_what_a_worker_makes_that_is_woken_late_is_dropped() -> None:
    given = {**SLOW, "epochs": 3}
    with Cluster(agents=1, workers=2) as cluster:
        trainer = cluster.train(pause_at=5, **given)
        trainer.until("pause")
        stopped = cluster.workers_of(0)[0]
        stopped.suspend()
        trainer.go_on()
        wait_until(
            lambda: "batch_overdue" in cluster.log_of(0).read_text(), "its batch is made again"
        )
        stopped.resume()
        assert trainer.finish() == reference(**given)
        assert "data_worker_died" not in cluster.log_of(0).read_text()
