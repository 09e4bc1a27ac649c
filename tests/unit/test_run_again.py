"""`stoker run --from STEP` takes the folder of an earlier run; what a run ends with."""

import os
from pathlib import Path

import pytest

from stoker.cli.run import STEPS, Chain, forget_later, next_step
from stoker.errors import DeclinedError, PlatformError
from stoker.platforms.local import lock_run_folder
from stoker.settings import workload_from
from support.command import stoker

WORKLOAD = "name: mnist\ncommand: [python, train.py]\ncluster: {dnn: {instance_type: local.c1}}\n"


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "runs" / "mnist-1"
    for name in ("hosts", "logs"):
        (folder / name).mkdir(parents=True)
    for name in ("profile.json", "decision.json", "training.json"):
        (folder / name).write_text("{}")
    return folder


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_that_still_runs_keeps_its_folders(run_dir):
    before = left_in(run_dir)
    lock = lock_run_folder(run_dir, run="mnist-1")
    try:
        with pytest.raises(PlatformError, match="run mnist-1 is still running on this machine"):
            forget_later(run_dir, STEPS.index("train"))
        assert left_in(run_dir) == before
    finally:
        os.close(lock)
    forget_later(run_dir, STEPS.index("train"))
    assert left_in(run_dir) == {"profile.json", "decision.json"}


@pytest.mark.parametrize(
    ("script", "code", "command"),
    [
        ("examples/mnist/train.py", 0, "stoker profile -- python YOUR_SCRIPT.py"),
        ("examples/mnist/train.py", 6, "stoker run w.yaml --from train     (trains again)"),
        ("train.py", 0, "stoker run w.yaml --from train     (trains again)"),
    ],
)
def test_after_an_example_comes_a_script_of_one_s_own(script, code, command):
    workload = workload_from({"name": "x", "command": ["python", script]})
    assert next_step(workload, "w.yaml", code) == f"next:      {command}"


def test_a_gate_against_a_champion_is_refused_before_the_first_step(tmp_path):
    gate = "gate: [{metric: accuracy, min_champion: -0.01}]\n"
    (tmp_path / "w.yaml").write_text(WORKLOAD + gate)
    (tmp_path / "train.py").write_text("")
    done = stoker("run", "w.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "gate accuracy compares with the champion" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("doing", "end", "code", "tracked"),
    [
        # Nothing has begun, so that nothing has failed.
        ("train", DeclinedError("cancelled"), 2, []),
        # The training is done: it would be under way for ever there.
        ("evaluate", KeyboardInterrupt(), 130, [True]),
        # It has written its own end.
        ("train", KeyboardInterrupt(), 130, []),
        ("train", PlatformError("refused"), 4, [False]),
    ],
)
def test_what_a_chain_that_ends_early_tells_mlflow(
    tmp_path, monkeypatch, doing, end, code, tracked
):
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "train.py").write_text("")
    found: list[bool] = []

    def steps(chain: Chain) -> None:
        chain.doing = doing
        raise end

    def track(chain: Chain, report: Path, *, is_stopped: bool = False) -> str:
        found.append(is_stopped)
        return ""

    monkeypatch.setattr("stoker.cli.run.steps", steps)
    monkeypatch.setattr("stoker.cli.run.track", track)
    assert stoker("run", "w.yaml", cwd=tmp_path).returncode == code
    assert found == tracked
