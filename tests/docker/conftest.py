"""Makes one engine and its images for all tests of this folder."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.docker_engine import CACHE, ROOT, Engine, missing

# As containers/launcher/README.md says: the user's own image on top of stoker's.
USERS_IMAGE = """
FROM ${STOKERS}
USER root
RUN --mount=type=bind,source=wheels,target=/wheels pip install -q --no-index -f /wheels pillow
COPY mnist /work/examples/mnist
COPY job.py /work/
WORKDIR /work
USER ${USER}
"""


@pytest.fixture(scope="session")
def engine():
    """Yields a running engine with the images base, stoker-launcher, stoker-control and job."""
    if lacking := missing():
        pytest.skip(f"no Docker engine of our own: {lacking}")
    started = time.monotonic()
    with Engine() as engine:
        engine.import_base()
        imported = time.monotonic()
        for target in ("launcher", "control"):
            engine.make_image(target)
        built = time.monotonic()
        engine.build(_on("stoker-launcher"), _users_context(engine.folder / "job"), "job")
        print(f"engine and base {imported - started:.1f} s, images {built - imported:.1f} s")
        yield engine
    assert engine.leftovers() == []


@pytest.fixture(scope="session")
def data_image(engine):
    """Builds the image of data hosts with the user's code: torch without CUDA below it."""
    started = time.monotonic()
    done = engine.attempt_image("data")
    if "with CUDA" in done.stderr:
        pytest.skip("pip finds no torch without CUDA here: PIP_EXTRA_INDEX_URL")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(engine.run("image", "inspect", "stoker-data"))[0]["Config"]["User"] == "1000"
    engine.build(_on("stoker-data", user="1000"), engine.folder / "job", "job-data")
    print(f"image of data hosts {time.monotonic() - started:.1f} s")
    return "job-data"


def _on(image: str, *, user: str = "root") -> str:
    return USERS_IMAGE.replace("${STOKERS}", image).replace("${USER}", user)


def _users_context(folder: Path) -> Path:
    wheels = CACHE / "wheels"
    if not list(wheels.glob("pillow-*.whl")):
        words = ["download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(wheels)]
        words += ["-c", str(ROOT / "constraints.txt"), "pillow"]
        subprocess.run([sys.executable, "-m", "pip", *words], check=True, timeout=120)
    shutil.copytree(wheels, folder / "wheels")
    shutil.copytree(ROOT / "examples" / "mnist", folder / "mnist")
    shutil.copy(ROOT / "tests" / "docker" / "job.py", folder)
    return folder
