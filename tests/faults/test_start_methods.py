"""Workers begin by fork, spawn or forkserver, with a data group and without: the same batches."""

import functools
import os

import pytest

from stoker.launch.strategies.start import SITE_DIR
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


# Replaced and by forkserver: so are those beside a data group.
ALONE = [
    pytest.param(
        replaced,
        start,
        id=f"{'torch' if replaced else 'stoker'}'s {start}",
        marks=pytest.mark.soak if replaced and start == "forkserver" else (),
    )
    for replaced in (False, True)
    for start in STARTS
]


@pytest.mark.parametrize(("replaced", "start"), ALONE)
def test_workers_of_one_machine_begin_by_any_start_method(replaced: bool, start: str) -> None:
    env = REPLACED if replaced else {}
    trainer = run_script({"start": start, "replaced": replaced}, script=SCRIPT, env=env)
    assert trainer.finish() == forked() * (2 if replaced else 1)
    assert "Error" not in trainer.errors


# Without local workers nothing is begun here, whatever the method.
BESIDE = [
    pytest.param(start, local, marks=pytest.mark.soak if start != "spawn" and not local else ())
    for start in STARTS
    for local in (0, 1)
]


@pytest.mark.parametrize(("start", "local"), BESIDE)
def test_workers_beside_a_data_group_begin_by_any_start_method(
    host: Cluster, start: str, local: int
) -> None:
    trainer = host.train(script=SCRIPT, start=start, replaced=True, workers=local, env=REPLACED)
    assert trainer.finish() == forked() * 2
    assert "Error" not in trainer.errors
