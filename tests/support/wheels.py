"""Builds packages of this project, and runs Pythons that do not see it."""

import os
import subprocess
import sys
from pathlib import Path

from support.processes import ran

ROOT = Path(__file__).parents[2]


def python(*words: str, cwd: Path, at: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return ran([at, *words], cwd=cwd, env=environ, timeout=250)


def built(source: Path, target: Path, kind: str) -> Path:
    done = python("-m", "hatchling", "build", "-t", kind, "-d", str(target), cwd=source)
    assert done.returncode == 0, done.stderr
    (file,) = target.iterdir()
    return file
