"""Iterable datasets are fed, and every batch is compared with torch's own loader."""

import functools
import re

import pytest

from support.cluster import SHORT_LEASE, Cluster, Trainer, local_workers, reference, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "stream_script.py"


torchs = functools.partial(reference, script=SCRIPT, torch=True)


def test_error_of_the_iterator_reaches_the_trainer(host):
    found = host.train(workers=0, script=SCRIPT, kind="no iterator").finish()
    assert [(line["error"], line["trace"]) for line in found[:-1]] == [("OSError", True)] * 2


def test_local_stream_killed_changes_nothing(nobody):
    trainer = nobody.paused(script=SCRIPT, pause_at=5)
    local_workers(trainer)[0].kill()
    trainer.go_on()
    assert trainer.finish() == torchs()
    assert "worker_died" in trainer.errors


def test_a_data_host_that_drains_hands_its_shards_on():
    with Cluster(agents=2, feed=SHORT_LEASE) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.paused(workers=0, script=SCRIPT, pause_at=3)
        cluster.hosts[0].terminate()
        trainer.go_on()
        assert trainer.finish() == torchs()


def test_stream_that_kills_its_process_is_an_error(host):
    trainer = host.train(workers=0, script=SCRIPT, die_at=9)
    assert trainer.end() != 0
    # Sample 9 is in batch 1; batch 0 may go with the process, which had not sent all of it.
    assert re.search("three workers died of batch [01] of shard 1 in epoch 0", trainer.errors)
    assert "exit code 7" in trainer.errors


def test_a_stream_that_divides_itself_by_its_process_group_has_its_own_on_hosts(hosts, tmp_path):
    options = {"kind": "by group", "epochs": 1, "world": 2}

    def given(rank: int, name: str) -> dict:
        return options | {"rank": rank, "group": str(tmp_path / name)}

    def started(rank: int) -> Trainer:
        env = {"RANK": str(rank), "WORLD_SIZE": "2"}
        return run_script(given(rank, "alone"), env=env, script=SCRIPT)

    ranks = (0, 1)
    runs = [hosts.train(workers=0, script=SCRIPT, **given(rank, "fed")) for rank in ranks]
    fed = [run.finish() for run in runs]
    alone = [started(rank) for rank in ranks]
    assert fed == [run.finish() for run in alone]
    assert fed[0][0]["ids"] == [0, 4, 8, 12]
    assert fed[1][0]["ids"] == [1, 5, 9, 13]
