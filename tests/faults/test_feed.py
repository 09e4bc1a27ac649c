"""Checks the feed as a script meets it: real agents, real trainers, and what happens to them."""

import json

import psutil
import pytest

from support.cluster import Cluster, local_workers, reference, run_script, wait_until

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]


SLOW = {"sample_seconds": 0.01}


def env_of(cluster: Cluster, **feed: object) -> dict[str, str]:
    return {"RUN_FEED": json.dumps(cluster.settings | feed)}


def test_no_data_host_in_time_leaves_all_to_torchs_workers_and_is_named(nobody):
    trainer = nobody.train(env=env_of(nobody, start_deadline_seconds=1.0))
    assert trainer.finish() == reference()
    assert (
        "no data worker came within 1 s: 2 data hosts expected, "
        "algo-0 (never came), algo-1 (never came)" in trainer.errors
    )


def test_local_worker_killed_in_the_epoch_changes_nothing(nobody):
    trainer = nobody.paused(pause_at=5, num_workers=2, **SLOW)
    local_workers(trainer)[0].kill()
    trainer.go_on()
    assert trainer.finish() == reference(**SLOW)
    assert "worker_died" in trainer.errors


def test_dataset_that_cannot_travel_is_made_as_torch_makes_it(nobody):
    given = {"lock": True, "num_workers": 2, "loaders": 2}
    trainer = nobody.train(**given)
    assert trainer.finish() == reference(loaders=2, num_workers=2)
    said = [line for line in trainer.errors.splitlines() if "loader_made_here" in line]
    # Once a loader, not once an epoch.
    assert len(said) == 2
    assert "cannot send dataset.lock (_thread.lock)" in said[0]
    assert "without help of data hosts" in said[0]


def test_what_cannot_travel_of_an_unchanged_script_is_made_as_torch_makes_it(nobody):
    env = env_of(nobody) | {"RUN_REPLACE_DATALOADER": "true"}
    trainer = nobody.train(env=env, lock=True, num_workers=2, is_torchs=True)
    assert trainer.finish() == reference(num_workers=2)
    assert trainer.errors.count("loader_made_here") == 1


def num_failed_specs(host: Cluster) -> int:
    return host.log_of(0).read_text().count(" spec_failed ")


def test_dataset_that_no_host_can_read_is_made_here(host):
    given = {"num_workers": 2, "loader": {"persistent_workers": True}}
    before = num_failed_specs(host)
    # Else workers of its own may have made all before the host says that it cannot read them.
    trainer = host.paused(pause_at=1, unreadable=True, loaders=2, **given)
    wait_until(lambda: num_failed_specs(host) == before + 2, "the host has answered of both")
    trainer.go_on()
    assert trainer.finish() == reference(unreadable=True, loaders=2, **given)
    said = [line for line in trainer.errors.splitlines() if "loader_made_here" in line]
    # Once a loader, not once an epoch.
    assert len(said) == 2
    assert "no data host can make batches of this dataset" in said[0]
    assert "without help of data hosts" in said[0]


def test_trainer_killed_leaves_no_local_worker(host):
    trainer = host.paused(pause_at=3, num_workers=2)
    wait_until(lambda: len(local_workers(trainer)) == 2, "two local workers")
    workers = local_workers(trainer)
    trainer.process.kill()
    trainer.end()
    assert not psutil.wait_procs(workers, timeout=150)[1]


def test_wrong_token_gets_nothing(host):
    other = host.folder / "other"
    other.write_text("ab" * 32)
    env = env_of(host, start_deadline_seconds=2.0) | {"RUN_TOKEN": str(other)}
    trainer = host.train(env=env)
    # All batches are made in the trainer.
    assert trainer.finish() == reference()
    assert "did not answer" in trainer.errors


# `feed.num_workers` reads loaders of torch's class without workers as if they had some.
SAMPLES = [*range(12)]


def workers_of(lines):
    assert all(line["samples"] == SAMPLES for line in lines)
    return {line["kind"]: line["workers"] for line in lines}


LEFT = {"Numbers": [-1], "Holding": [-1], "Stream": [-1]}


@pytest.mark.parametrize("key", [{}, {"num_workers": 2}], ids=["unset", "2"])
def test_on_data_hosts_it_is_as_if_the_script_had_written_it(key):
    with Cluster(agents=1, feed=key) as cluster:
        cluster.wait_for_agents()
        lines = cluster.train(workers=0, script="unworked_script.py").finish()
    # An open file, or a stream, keeps its 0 workers.
    assert workers_of(lines) == (LEFT | {"Numbers": [2]} if key else LEFT)


@pytest.mark.parametrize("key", [{}, {"num_workers": 2}], ids=["unset", "2"])
def test_a_plan_gives_workers_to_the_same_loaders(key):
    env = {"RUN_FEED": json.dumps(key), "RUN_WORKERS": json.dumps({"dnn": 3})}
    lines = run_script({}, env=env, script="unworked_script.py").finish()
    assert workers_of(lines) == (LEFT | {"Numbers": [2]} if key else LEFT)
