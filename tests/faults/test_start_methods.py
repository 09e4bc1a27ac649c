"""Workers begin by fork, spawn or forkserver, with a data group and without: the same batches."""

import functools
import os

import pytest

from stoker.launch.strategy import SITE_DIR
from support.cluster import Cluster, Line, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

SCRIPT = "start_methods_script.py"
STARTS = ["fork", "spawn", "forkserver"]
REPLACED = {
    "PYTHONPATH": str(SITE_DIR),
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "STOKER_REPLACE_DATALOADER": "1",
}


@functools.cache
def forked() -> list[Line]:
    found = run_script({"start": "fork", "replaced": False}, script=SCRIPT).finish()
    assert [list(line) for line in found] == [["Drawing"], ["Stream"]]
    return found


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("replaced", [False, True], ids=["stoker's loader", "torch's, replaced"])
def test_workers_of_one_machine_begin_by_any_start_method(start: str, replaced: bool) -> None:
    env = REPLACED if replaced else {}
    trainer = run_script({"start": start, "replaced": replaced}, script=SCRIPT, env=env)
    assert trainer.finish() == forked() * (2 if replaced else 1)
    assert "Error" not in trainer.errors


@pytest.mark.parametrize("local", [0, 1])
@pytest.mark.parametrize("start", STARTS)
def test_workers_beside_a_data_group_begin_by_any_start_method(start: str, local: int) -> None:
    with Cluster(agents=1, workers=2) as cluster:
        cluster.wait_for_agents()
        trainer = cluster.train(
            script=SCRIPT, start=start, replaced=True, workers=local, env=REPLACED
        )
        assert trainer.finish() == forked() * 2
    assert "Error" not in trainer.errors
