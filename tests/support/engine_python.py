"""Finds the interpreter that has an engine's heavy package, and runs commands under it."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import stoker
from stoker.records import Training, read_json
from support.local_job import (
    assert_nothing_left,
    is_running,
    marked_processes,
    shared_memory,
)
from support.processes import ran

REPO = Path(__file__).parents[2]
SOURCES = Path(stoker.__file__).parents[1]
# A busy machine imports TensorFlow for half a minute, three times one after the other.
LIMIT_SECONDS = 300


def python_with(package: str, *, variable: str, venv: str) -> str:
    python = os.environ.get(variable) or str(REPO / venv / "bin" / "python")
    code = f"import importlib.util as u, sys; sys.exit(not u.find_spec({package!r}))"
    if not shutil.which(python) or ran([python, "-c", code]).returncode:
        pytest.skip(f"{python} has no {package}: make test-engines, or set {variable}")
    return python


class EngineRun:
    """Runs `stoker train` of a workload under another interpreter; nothing is left behind."""

    def __init__(self, python: str, tmp_path: Path) -> None:
        self._python = python
        self._tmp_path = tmp_path
        self.output = ""

    def train(self, workload: str | Path, *, exit_code: int = 0, **how: object) -> Training:
        self.run(workload, exit_code=exit_code, **how)
        return read_json(self._tmp_path / "training.json", Training)

    def run(self, workload, *, groups, settings=(), exit_code, stop_at=None) -> None:
        command = [self._python, "-P", "-m", "stoker.cli", "train", str(workload), "--yes"]
        command += ["--out", str(self._tmp_path / "training.json"), "--name", "run"]
        command += [f"--group={group}" for group in groups]
        command += [f"--set={setting}" for setting in settings]
        pids: set[int] = set()
        before = shared_memory()
        environ = {**os.environ, "PYTHONPATH": str(SOURCES)}
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
        how |= {"text": True, "errors": "replace", "cwd": self._tmp_path}
        with subprocess.Popen(command, env=environ, **how) as process:
            try:
                for line in process.stdout:
                    self.output += line
                    if "engine_ready" in line or "listens" in line:
                        pids |= marked_processes(self._tmp_path / "runs")
                    if stop_at and stop_at in line:
                        # Once: the end of the log is shown when the run has ended.
                        stop_at = None
                        process.terminate()
                code = process.wait(LIMIT_SECONDS)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        assert code == exit_code, self.output[-5000:]
        assert len(pids) > 2, "the run had processes"
        assert not any(map(is_running, pids))
        for run in (self._tmp_path / "runs").iterdir():
            assert_nothing_left(run, pids, before=before)
