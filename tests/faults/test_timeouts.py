"""A loader's `timeout` begins when a worker that is ready has the batch, and is torch's then."""

import psutil
import pytest

from support.cluster import Cluster, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "slow_start_script.py"
WHOLE = [[first, first + 1] for first in range(0, 12, 2)]


def batches_of(trainer):
    lines = trainer.finish()
    assert [line for line in lines if "error" in line] == []
    return [line["batch"] for line in lines]


# Longer than the timeout of 3 s.
SLOW = {
    "a module that is imported": {"slow": "import", "seconds": 4.0},
    "a dataset that is unpickled": {"slow": "unpickling", "seconds": 5.0},
    "worker_init_fn": {"slow": "worker_init_fn", "seconds": 5.0},
    "worker_init_fn of a stream": {"slow": "stream"},
}
STARTS = {
    "": {},
    "spawn": {"multiprocessing_context": "spawn"},
    "persistent": {"persistent_workers": True},
}


@pytest.mark.parametrize("slow", SLOW.values(), ids=SLOW)
def test_what_a_worker_does_before_its_first_batch_is_no_batchs_time(host, tmp_path, slow):
    given = {"folder": str(tmp_path), **slow}
    assert batches_of(host.train(script=SCRIPT, workers=0, **given)) == WHOLE


@pytest.mark.parametrize("loader", STARTS.values(), ids=STARTS)
def test_nor_is_it_however_workers_start_or_live(hosts, loader):
    given = {"slow": "worker_init_fn", "loader": loader}
    epochs = 2 if "persistent_workers" in loader else 1
    found = batches_of(hosts.train(script=SCRIPT, workers=0, **given))
    assert found == WHOLE * epochs


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_nor_is_it_in_local_workers(nobody, start):
    loader = {"multiprocessing_context": start}
    trainer = nobody.train(script=SCRIPT, slow="worker_init_fn", num_workers=2, loader=loader)
    assert batches_of(trainer) == WHOLE


@pytest.mark.parametrize("workers", [0, 1], ids=["on a data host", "locally"])
def test_a_worker_that_dies_and_starts_again_is_no_batchs_time(request, workers):
    cluster = request.getfixturevalue("nobody" if workers else "host")
    given = {"slow": "worker_init_fn", "pause_at": 1, "samples": 60}
    trainer = cluster.train(script=SCRIPT, workers=workers, **given)
    trainer.until("pause")
    if workers:
        psutil.Process(trainer.process.pid).children()[-1].kill()
    else:
        cluster.kill_worker(0)
    trainer.go_on()
    assert batches_of(trainer) == [[first, first + 1] for first in range(0, 60, 2)]


def test_a_data_host_that_joins_late_is_no_batchs_time():
    with Cluster(agents=1, late=True, feed={"lease_seconds": 1.0}) as cluster:
        trainer = cluster.train(script=SCRIPT, workers=0, timeout=1)
        wait_until(lambda: "training_waiting" in trainer.errors, "it waits for longer")
        cluster.start_agent(0)
        assert batches_of(trainer) == WHOLE


@pytest.mark.parametrize("workers", [0, 1], ids=["on a data host", "locally"])
def test_a_batch_that_takes_longer_times_out_in_torchs_words(request, workers):
    cluster = request.getfixturevalue("nobody" if workers else "host")
    trainer = cluster.train(script=SCRIPT, workers=workers, slow_at=5, seconds=30.0)
    lines = trainer.finish()
    assert [line.get("batch") for line in lines] == [*WHOLE[:2], None]
    assert lines[-1]["error"] == "RuntimeError"
    assert lines[-1]["text"] == "DataLoader timed out after 3 seconds"
    # Again and again until the script's thread has a core to raise it in.
    events = [line for line in trainer.errors.splitlines() if " batch_hangs " in line]
    assert any("in __getitem__ (slow_start_script.py:" in event for event in events)
