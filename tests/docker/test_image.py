"""Checks the images themselves: what is in them, and how they start."""

import json

import pytest

from support.docker_engine import Engine

# The first one makes the base and the images, too.
pytestmark = [pytest.mark.docker, pytest.mark.timeout(1800)]

# A base image as AWS's: PyTorch (here two lines that look like it) in the system's own Python.
WITH_TORCH = """
FROM base
WORKDIR /usr/local/lib/python3.11/dist-packages
RUN mkdir torch torch-VERSION.dist-info \\
 && printf '__version__ = "VERSION"\\nclass version:\\n    cuda = "12.4"\\n' > torch/__init__.py \\
 && printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: VERSION\\n' > METADATA \\
 && mv METADATA torch-VERSION.dist-info
"""


def shell(engine: Engine, image: str, script: str) -> str:
    return engine.run("run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", script)


def config(engine: Engine, image: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(engine.run("inspect", image))[0]["Config"]
    return found


@pytest.mark.usefixtures("data_image")
def test_the_image_of_data_hosts_has_torch_without_cuda(engine):
    assert config(engine, "stoker-data")["Entrypoint"] == ["stoker", "launch"]
    script = "python -c 'import torch; print(torch.version.cuda)'"
    assert shell(engine, "stoker-data", script) == "None"


@pytest.mark.parametrize("image", ["stoker-launcher", "stoker-control"])
def test_doctor_finds_nothing_that_fails_in_the_image(engine, image):
    found = shell(engine, image, "stoker doctor")
    print(found, engine.run("image", "inspect", "--format={{.Size}} bytes", image), sep="\n")
    assert "fail " not in found


def test_the_control_image_decides_without_torch(engine):
    words = ("decide", "--instance-type=ml.p4d.24xlarge", "--step-seconds=0.19", "--json")
    decision = json.loads(engine.run("run", "--rm", "--network=none", "stoker-control", *words))
    assert decision["plan"]["groups"]
    for verb in ("decide", "train", "evaluate", "report"):
        assert "Usage:" in engine.run("run", "--rm", "stoker-control", verb, "--help")
    script = "python3 -c 'import boto3, kubernetes; import torch' 2>&1; true"
    assert "No module named 'torch'" in shell(engine, "stoker-control", script)


def test_an_image_for_kubernetes_runs_as_the_user_that_was_asked_for(engine):
    engine.make_image("launcher", name="stoker-user", USER="65532")
    assert config(engine, "stoker-user")["User"] == "65532"
    who = "import os; print('user', os.getuid(), open('/opt/ml/model/x', 'w').write('x'))"
    words = ("run", "--rm", "--network=none", "stoker-user", "--", "python", "-c", who)
    assert "user 65532 1" in engine.run(*words)


def test_a_base_with_torch_keeps_it_and_gets_stoker_beside_it(engine):
    base = WITH_TORCH.replace("VERSION", "2.4.1+cu121")
    engine.build(base, engine.folder / "job", "base-with-torch")
    engine.make_image("launcher", name="stoker-beside", BASE_IMAGE="base-with-torch")
    script = "/usr/bin/python3 -c 'import stoker, torch; print(torch.__version__)'"
    assert shell(engine, "stoker-beside", script) == "2.4.1+cu121"
