"""The examples that newcomers recognise have the same losses with data hosts as without."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from support.command import process
from support.local_job import assert_nothing_left

EXAMPLES = Path(__file__).parents[2] / "examples"
# What must be there, and a short training.
SHOWS = {
    "images": ("PIL", ["--pictures", "32", "--batch-size", "4", "--side", "64", "--epochs", "2"]),
    "vision_language": ("PIL", ["--documents", "24", "--batch-size", "4", "--epochs", "2"]),
}

pytestmark = [pytest.mark.library, pytest.mark.timeout(400)]


def losses(script, words, folder, *groups) -> list[str]:
    """Trains by `stoker train`; returns the losses that the script recorded."""
    command = [sys.executable, str(EXAMPLES / script / "train.py"), *words]
    command += ["--workers", "1", "--device", "cpu", "--record", str(folder / "record.json")]
    workload = {
        "name": "show",
        "command": command,
        "cluster": {"dnn": {"instance_type": "local.c1", "count": 1}},
    }
    (folder / "show.yaml").write_text(json.dumps(workload))
    done = process("train", "show.yaml", "--yes", *groups, cwd=folder, timeout=180)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((folder / "record.json").read_text())["losses"]


@pytest.mark.parametrize("script", SHOWS)
def test_losses_with_two_data_hosts_are_those_without(script, tmp_path):
    module, words = SHOWS[script]
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"examples/{script} needs {module}")
    dnn = "--group=dnn=local.c1:1"
    alone = losses(script, words, tmp_path, dnn)
    fed = losses(script, words, tmp_path, dnn, "--group=data=local.c1:2")
    assert len(alone) >= 12
    assert fed == alone
    runs = list((tmp_path / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert_nothing_left(run, set())
