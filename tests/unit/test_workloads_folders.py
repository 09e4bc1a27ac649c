import os
import tempfile
from pathlib import Path

from stoker.cli.workloads import named_run_dir, new_run_dir


def test_runs_are_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert named_run_dir("mini-1") == Path("runs/mini-1")
    assert new_run_dir("mini").parent == Path("runs")


def test_a_step_that_may_not_write_there_keeps_its_runs_in_a_temporary_folder(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).resolve() != tmp_path)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    for made in (named_run_dir("mini-1"), new_run_dir("mini")):
        assert made.parent == tmp_path / "tmp" / "runs"
        assert made.is_dir()
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]
