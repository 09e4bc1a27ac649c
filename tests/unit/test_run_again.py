"""`stoker run --from STEP` takes the folder of an earlier run, which must have ended."""

import os
from pathlib import Path

import pytest

from stoker.cli.run import STEPS, forget_later
from stoker.errors import PlatformError
from stoker.platforms.local import lock_run_folder


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
