"""Installs SageMaker's training toolkit in its own environment: its pins clash with stoker's."""

import fcntl
import os
import shutil
import sys
from pathlib import Path

import pytest

from support.processes import ran

# The package itself asks for no versions.
REQUIREMENTS = (
    "sagemaker-training==5.1.4",
    "boto3==1.44.5",
    "gevent==26.9.0",
    "numpy==2.4.6",
    "paramiko==5.1.0",
    "protobuf==7.36.2",
    "psutil==7.2.2",
    "retrying==1.4.2",
    "scipy==1.17.1",
    "setuptools==80.9.0",
    "werkzeug==3.1.9",
)
_PYTHON = f"py{sys.version_info.major}{sys.version_info.minor}"
_CACHE = Path(__file__).parents[2] / ".cache"
_INSTALL_SECONDS = 600


def toolkit() -> Path:
    """Makes the toolkit's program `train` once, in `.cache/`; skips where C cannot be built."""
    if not shutil.which("gcc"):
        pytest.skip("sagemaker-training is built with a C compiler, and there is none")
    folder = _CACHE / f"{REQUIREMENTS[0].replace('==', '-')}-{_PYTHON}"
    stamp = folder / "requirements.txt"
    wanted = "\n".join(REQUIREMENTS)
    _CACHE.mkdir(exist_ok=True)
    with (_CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            # Ours installs what is needed there; what a job imports of it is compiled when it does.
            _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"))
            _run(*pip, "install", "-q", "--no-compile", *REQUIREMENTS)
            stamp.write_text(wanted)
    return folder / "bin" / "train"


def _run(*command: str) -> None:
    # A separate run, without stoker's environment.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = ran(command, env=environ, timeout=_INSTALL_SECONDS)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
