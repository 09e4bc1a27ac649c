"""The package as users install it: wheel and sdist, in an empty environment."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import stoker
from support.processes import ran

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check")

pytestmark = pytest.mark.e2e


def python(*words: str, cwd: Path, at: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    return ran([at, *words], cwd=cwd, env=environ, timeout=250)


def built(source: Path, target: Path, kind: str) -> Path:
    done = python("-m", "hatchling", "build", "-t", kind, "-d", str(target), cwd=source)
    assert done.returncode == 0, done.stderr
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


def test_wheel_and_sdist_have_the_same_package_and_what_a_project_needs(tmp_path, wheel):
    sdist = built(ROOT, tmp_path / "sdist", "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    again = built(source, tmp_path / "again", "wheel")

    def names(file: Path) -> set[str]:
        return set(zipfile.ZipFile(file).namelist())

    assert names(again) == names(wheel)
    needed = {"stoker/py.typed", "stoker/project/configs/mnist.yaml"}
    # What `engine: ray` and `engine: tf.data.service` run.
    needed |= {f"stoker/project/examples/engines/{name}.py" for name in ("ray_node", "tf_server")}
    assert needed <= names(wheel)
    assert not [name for name in names(wheel) if "__pycache__" in name or "/runs/" in name]


def test_the_wheel_works_in_an_empty_environment(tmp_path, wheel):
    # Pip is not part of it: this Python's installs there.
    assert python("-m", "venv", "--without-pip", "venv", cwd=tmp_path).returncode == 0
    at = str(tmp_path / "venv" / "bin" / "python")
    pip = (*PIP, "--python", at)
    constraints = str(ROOT / "constraints.txt")
    # What is not imported here is not compiled.
    install = ("install", "-q", "--no-compile", "-c", constraints, str(wheel))
    done = python(*pip, *install, cwd=tmp_path)
    if "NewConnectionError" in done.stderr or "ConnectTimeoutError" in done.stderr:
        pytest.skip("no package index answers here")
    assert done.returncode == 0, done.stderr
    assert python(*pip, "check", cwd=tmp_path).returncode == 0
    told = python("-m", "stoker.cli", "--version", cwd=tmp_path, at=at)
    assert (told.returncode, told.stdout.split()[-1]) == (0, stoker.__version__), told.stderr
    # Without torch: the command line is all there, and says what is missing.
    helped = python("-m", "stoker.cli", "--help", cwd=tmp_path, at=at)
    assert helped.returncode == 0, helped.stderr
