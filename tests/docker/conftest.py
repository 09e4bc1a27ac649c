"""Makes one engine and its images for all tests of this folder."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.docker_engine import CACHE, ROOT, Engine, missing

PARTS = ("control", "torch")
# As containers/launcher/README.md says: the user's own image on top of stoker's.
USERS_IMAGE = """
FROM ${STOKERS}
USER root
RUN --mount=type=bind,from=wheels,target=/wheels pip install -q --no-index -f /wheels pillow
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
        engine.build("FROM scratch\nCOPY . /\n", _wheels(), "wheels")
        imported = time.monotonic()
        for target in ("launcher", "control"):
            engine.make_image(target)
        built = time.monotonic()
        engine.build(_on("stoker-launcher"), _users_context(engine.folder / "job"), "job")
        print(f"engine and base {imported - started:.1f} s, images {built - imported:.1f} s")
        yield engine
    assert engine.leftovers() == []


def _wheels() -> Path:
    """Downloads what the images install: containers have no index."""
    wheels = CACHE / "wheels"
    if not wheels.exists():
        made = wheels.with_suffix(".part")
        shutil.rmtree(made, ignore_errors=True)
        packages = [["-r", str(ROOT / "requirements" / f"image-{part}.txt")] for part in PARTS]
        packages.append(
            ["hatchling", "nvidia-ml-py", "pillow", "torch", "-c", str(ROOT / "constraints.txt")]
        )
        for each in packages:
            words = [sys.executable, "-m", "pip", "download", "-q", "-d", str(made), *each]
            subprocess.run(words, check=True, timeout=600)
        made.rename(wheels)
    return wheels


@pytest.fixture(scope="session")
def data_image(engine):
    """Builds the image of data hosts with the user's code: torch without CUDA below it."""
    started = time.monotonic()
    engine.make_image("data")
    assert json.loads(engine.run("image", "inspect", "stoker-data"))[0]["Config"]["User"] == "1000"
    engine.build(_on("stoker-data", user="1000"), engine.folder / "job", "job-data")
    print(f"image of data hosts {time.monotonic() - started:.1f} s")
    return "job-data"


def _on(image: str, *, user: str = "root") -> str:
    return USERS_IMAGE.replace("${STOKERS}", image).replace("${USER}", user)


def _users_context(folder: Path) -> Path:
    shutil.copytree(ROOT / "examples" / "mnist", folder / "mnist")
    shutil.copy(ROOT / "tests" / "docker" / "job.py", folder)
    return folder
