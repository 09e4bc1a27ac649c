"""Workers of data hosts begin as the script asks for, and are forked of no process with threads."""

import pytest

from support.cluster import Cluster

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "threads_script.py"
STARTS = ["fork", "spawn", "forkserver"]
THREADS = ["python", "executor", "pool", "native", "openmp", "locked"]


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2, workers=2, feed={"start_deadline_seconds": 120.0}) as made:
        made.wait_for_agents()
        yield made


@pytest.fixture(scope="module")
def executing():
    """Starts hosts as `cluster`, whose spawned workers are interpreters by their command lines."""
    with Cluster(agents=2, feed={"start_deadline_seconds": 120.0}, executes=True) as made:
        made.wait_for_agents()
        yield made


def samples_of(trainer, *, epochs=1):
    lines = trainer.finish()
    samples = [sample for line in lines for sample in line["batch"]]
    assert [sample["index"] for sample in samples] == [*range(24)] * epochs
    return samples


def fed(cluster, tmp_path, **given):
    return cluster.train(script=SCRIPT, workers=0, folder=str(tmp_path), **given)


@pytest.mark.parametrize("kind", THREADS)
def test_a_dataset_that_starts_threads_is_unpickled_by_each_worker(cluster, tmp_path, kind):
    trainer = fed(cluster, tmp_path, threads=kind)
    samples = samples_of(trainer)
    assert all(sample["unpickles"] for sample in samples)
    # Its modules start none: they are imported once for all.
    assert not any(sample["imports"] for sample in samples)
    copied = [line for line in trainer.errors.splitlines() if " dataset_copied " in line]
    assert 1 <= len(copied) <= 2
    assert "each of the 2 workers of algo-" in copied[0]


@pytest.mark.parametrize("kind", THREADS)
def test_a_module_that_starts_threads_is_imported_by_each_worker(cluster, tmp_path, kind):
    trainer = fed(cluster, tmp_path, threads=kind, when="import")
    samples = samples_of(trainer)
    assert all(sample["unpickles"] and sample["imports"] for sample in samples)
    assert "once its modules are imported" in trainer.errors


@pytest.mark.parametrize("when", ["import", "unpickling"])
def test_threads_that_end_shortly_are_no_reason(cluster, tmp_path, when):
    samples = samples_of(fed(cluster, tmp_path, threads="joined", when=when))
    assert not any(sample["unpickles"] or sample["imports"] for sample in samples)


def test_a_dataset_without_threads_is_shared(cluster, tmp_path):
    trainer = fed(cluster, tmp_path, when="never")
    samples = samples_of(trainer)
    assert not any(sample["unpickles"] or sample["imports"] for sample in samples)
    assert "dataset_copied" not in trainer.errors


@pytest.mark.parametrize("how", ["start", "sets"])
@pytest.mark.parametrize("start", ["spawn", "forkserver"])
@pytest.mark.parametrize("is_stream", [False, True], ids=["map", "stream"])
def test_the_start_method_is_respected(executing, tmp_path, start, how, is_stream):
    given = {how: start, "is_stream": is_stream, "when": "never"}
    samples = samples_of(fed(executing, tmp_path, **given)) if not is_stream else None
    if is_stream:
        lines = fed(executing, tmp_path, **given).finish()
        samples = [sample for line in lines for sample in line["batch"]]
        assert sorted(sample["index"] for sample in samples) == [*range(24)]
    assert all(sample["unpickles"] and sample["imports"] for sample in samples)
    is_fresh = ["workers.spawned" in sample["command"] for sample in samples]
    assert set(is_fresh) == {start == "spawn"}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("when", ["import", "unpickling"])
def test_a_worker_that_is_killed_is_replaced_however_it_began(cluster, tmp_path, start, when):
    loader = {"persistent_workers": True}
    given = {"start": start, "when": when, "threads": "executor", "loader": loader}
    trainer = fed(cluster, tmp_path, pause_at=2, **given)
    trainer.until("pause")
    killed = cluster.kill_worker(0), cluster.kill_worker(1)
    trainer.go_on()
    samples = samples_of(trainer, epochs=2)
    assert not {sample["pid"] for sample in samples[-8:]} & set(killed)
    assert all(sample["unpickles"] for sample in samples)


@pytest.mark.parametrize("start", STARTS)
def test_a_dataset_that_cannot_be_unpickled_says_why_however_workers_begin(
    cluster, tmp_path, start
):
    trainer = fed(cluster, tmp_path, start=start, breaks=True)
    assert trainer.end() == 1 or "ShippingError" in trainer.errors
    assert "no such table" in trainer.errors


@pytest.mark.parametrize("start", STARTS)
def test_local_workers_say_too_why_a_dataset_cannot_be_unpickled(nobody, tmp_path, start):
    trainer = nobody.train(script=SCRIPT, folder=str(tmp_path), start=start, breaks=True)
    if start == "fork":
        # It is not unpickled.
        samples_of(trainer)
        return
    trainer.end()
    assert "no such table" in trainer.errors
