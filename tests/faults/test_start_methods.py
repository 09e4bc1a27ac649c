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
    found = run_script({"start": "fork", "loaders": ["stoker"]}, script=SCRIPT).finish()
    assert [list(line) for line in found] == [["Drawing"], ["Stream"]]
    return found


# Replaced, by spawn and forkserver: so are those beside a data group.
ALONE = [
    pytest.param(
        replaced,
        start,
        id=f"{'torch' if replaced else 'stoker'}'s {start}",
        marks=pytest.mark.soak if replaced and start != "fork" else (),
    )
    for replaced in (False, True)
    for start in STARTS
]


@pytest.mark.parametrize(("replaced", "start"), ALONE)
def test_workers_of_one_machine_begin_by_any_start_method(replaced: bool, start: str) -> None:
    given = {"start": start, "loaders": ["torch" if replaced else "stoker"]}
    trainer = run_script(given, script=SCRIPT, env=REPLACED if replaced else {})
    assert trainer.finish() == forked()
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
    loaders = ["stoker", "torch"]
    trainer = host.train(script=SCRIPT, start=start, loaders=loaders, workers=local, env=REPLACED)
    assert trainer.finish() == forked() * 2
    assert "Error" not in trainer.errors
