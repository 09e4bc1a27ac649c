"""`stoker run --from STEP` takes the folder of an earlier run; what a run ends with."""

import os
from pathlib import Path

import pytest

from stoker.cli.run import STEPS, forget_later, next_step
from stoker.errors import PlatformError
from stoker.platforms.local import lock_run_folder
from stoker.settings import workload_from


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mnist-1"
    for name in ("hosts", "logs"):
        (folder / name).mkdir(parents=True)
    for name in ("profile.json", "decision.json", "training.json"):
        (folder / name).write_text("{}")
    return folder


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_step_will_write_is_removed_before_it(run_dir: Path) -> None:
    forget_later(run_dir, STEPS.index("train"))
    assert left_in(run_dir) == {"profile.json", "decision.json"}


def test_a_run_that_still_runs_keeps_its_folders(run_dir: Path) -> None:
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
def test_after_an_example_comes_a_script_of_one_s_own(script: str, code: int, command: str) -> None:
    workload = workload_from({"name": "x", "command": ["python", script]})
    assert next_step(workload, "w.yaml", code) == f"next:      {command}"
