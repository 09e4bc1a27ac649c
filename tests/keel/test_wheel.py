"""The package as users install it: wheel and sdist, in an empty environment."""

import pytest

import stoker
from support.wheels import ROOT, built, python

PIP = ("-m", "pip", "--disable-pip-version-check")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("wheel"), "wheel")


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
