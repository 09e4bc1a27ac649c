"""Checks the images themselves: what is in them, how they start, what they are built of."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest

from support.docker_engine import ROOT, Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600)]

# A base image as AWS's: PyTorch (here two lines that look like it) in the system's own Python.
WITH_TORCH = """
FROM base
WORKDIR /usr/local/lib/python3.11/dist-packages
RUN mkdir torch torch-VERSION.dist-info \\
 && printf '__version__ = "VERSION"\\nclass version:\\n    cuda = "12.4"\\n' > torch/__init__.py \\
 && printf 'Metadata-Version: 2.1\\nName: torch\\nVersion: VERSION\\n' > METADATA \\
 && mv METADATA torch-VERSION.dist-info
"""
ECHO = (
    "import os, pathlib, sys; pathlib.Path(os.environ['SM_MODEL_DIR'], 'words')"
    ".write_text(' '.join(sys.argv[1:]))"
)


def shell(engine: Engine, image: str, script: str) -> str:
    return engine.run("run", "--rm", "--network=none", "--entrypoint=sh", image, "-c", script)


def config(engine: Engine, image: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(engine.run("inspect", image))[0]["Config"]
    return found


@pytest.mark.parametrize("image", ["stoker-launcher", "stoker-control"])
def test_no_compiler_is_left_and_all_wheels_are_on_record(engine, image):
    compilers = "for p in gcc cc g++ c++ clang ld make; do command -v $p; done; true"
    assert shell(engine, image, compilers) == ""
    recorded = shell(engine, image, "cat /opt/stoker/wheels.sha256").splitlines()
    assert all(len(line.split()[0]) == 64 for line in recorded)
    names = " ".join(line.split()[1] for line in recorded)
    assert "boto3-" in names
    assert ("torch-" in names) == (image == "stoker-launcher")


def test_an_image_says_what_it_holds_and_of_which_base_it_was_built(engine):
    pulled = json.loads(engine.run("inspect", engine.base))[0]["RepoDigests"][0]
    labels = config(engine, "stoker-control")["Labels"]
    assert labels["org.opencontainers.image.base.name"] == engine.base
    assert f"base@{labels['org.opencontainers.image.base.digest']}" in pulled

    listed = json.loads(shell(engine, "stoker-control", "cat /opt/stoker/sbom.cdx.json"))
    found = {part["purl"].partition("@")[0]: part for part in listed["components"]}
    sums = shell(engine, "stoker-control", "cat /opt/stoker/wheels.sha256").splitlines()
    boto3 = next(line.split()[0] for line in sums if " boto3-" in line)
    assert found["pkg:pypi/boto3"]["hashes"] == [{"alg": "SHA-256", "content": boto3}]
    assert found["pkg:pypi/boto3"]["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert found["pkg:pypi/stoker"]["hashes"]
    # Of nothing that only the list's own writing needed.
    assert "pkg:pypi/cyclonedx-python-lib" not in found
    installed = shell(engine, "stoker-control", "dpkg-query -W -f '${Package} '").split()
    assert set(installed) <= {part["name"] for part in listed["components"]}


def test_the_build_leaves_a_statement_of_what_the_image_was_made_of(engine):
    context = ROOT / ".cache" / "image" / engine.run("version", "--format={{.Server.Arch}}")
    statement = json.loads((context / "stoker-control.intoto.json").read_text())
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    image = json.loads(engine.run("inspect", "stoker-control"))[0]
    assert statement["subject"][0]["digest"] == {"sha256": image["Id"].removeprefix("sha256:")}
    base, source, *files = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    labels = image["Config"]["Labels"]
    assert f"sha256:{base['digest']['sha256']}" == labels["org.opencontainers.image.base.digest"]
    built = source["digest"]["gitCommit"] + "-dirty" * source["annotations"]["dirty"]
    assert built == labels["org.opencontainers.image.revision"]
    lock = (ROOT / "requirements" / "image-control.txt").read_bytes()
    sums = {file["name"]: file["digest"]["sha256"] for file in files}
    assert sums["requirements/image-control.txt"] == hashlib.sha256(lock).hexdigest()


@pytest.mark.usefixtures("data_image")
def test_the_image_of_data_hosts_has_torch_without_cuda_and_says_of_which_wheel(engine):
    assert config(engine, "stoker-data")["Entrypoint"] == ["stoker", "launch"]
    script = "python -c 'import torch; print(torch.version.cuda)'; cat /opt/stoker/wheels.sha256"
    cuda, *sums = shell(engine, "stoker-data", script).splitlines()
    assert cuda == "None"
    listed = json.loads(shell(engine, "stoker-data", "cat /opt/stoker/sbom.cdx.json"))
    hashes = {part["name"]: part.get("hashes") for part in listed["components"]}
    torch = next(line.split()[0] for line in sums if " torch-" in line)
    assert hashes["torch"] == [{"alg": "SHA-256", "content": torch}]

    architecture = engine.run("version", "--format={{.Server.Arch}}")
    context = ROOT / ".cache" / "image" / f"{architecture}-cpu"
    statement = json.loads((context / "stoker-data.intoto.json").read_text())
    image = json.loads(engine.run("inspect", "stoker-data"))[0]
    assert f"sha256:{statement['subject'][0]['digest']['sha256']}" == image["Id"]
    asked = statement["predicate"]["buildDefinition"]["externalParameters"]
    assert (asked["target"], asked["platform"]) == ("data", f"linux/{architecture}")


@pytest.mark.parametrize("image", ["stoker-launcher", "stoker-control"])
def test_doctor_finds_nothing_that_fails_in_the_image(engine, image):
    found = shell(engine, image, "stoker doctor")
    print(found, engine.run("image", "inspect", "--format={{.Size}} bytes", image), sep="\n")
    assert "fail " not in found


def test_a_change_of_stokers_code_is_one_small_layer(engine):
    words = ("history", "--no-trunc", "--format={{.Size}}|{{.CreatedBy}}")
    layers = engine.run(*words, "stoker-launcher")
    stokers = next(line for line in layers.splitlines() if "stoker doctor" in line)
    size = stokers.split("|")[0]
    print(f"the layer of stoker's own code: {size}")
    assert size.endswith("MB")
    # The source and its compiled form, half as long again; data of examples and of the catalog; the
    # list of contents. Nothing else, however the code grows: 16.1 of 16.5 MB on 2026-11-28.
    source = sum(path.stat().st_size for path in (ROOT / "src").rglob("*.py"))
    data = sum(path.stat().st_size for path in tracked("examples", "catalog", "configs"))
    assert float(size.removesuffix("MB")) < (2.5 * source + data) / 1e6 + 1


def tracked(*folders: str) -> list[Path]:
    words = ("git", "-C", str(ROOT), "ls-files", "-z", *folders)
    names = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name]


def test_the_control_image_decides_without_torch(engine):
    words = ("decide", "--instance-type=ml.p4d.24xlarge", "--step-seconds=0.19", "--json")
    decision = json.loads(engine.run("run", "--rm", "--network=none", "stoker-control", *words))
    assert decision["plan"]["groups"]
    for verb in ("decide", "train", "evaluate", "report"):
        assert "Usage:" in engine.run("run", "--rm", "stoker-control", verb, "--help")
    script = "python3 -c 'import boto3, kubernetes; import torch' 2>&1; true"
    assert "No module named 'torch'" in shell(engine, "stoker-control", script)


def test_train_as_sagemaker_says_it_runs_the_images_command(engine, tmp_path):
    config = tmp_path / "input" / "config"
    config.mkdir(parents=True)
    (config / "hyperparameters.json").write_text('{"epochs": "2"}')
    engine.run(
        *("run", "--rm", "--network=none", f"--volume={tmp_path}:/opt/ml"),
        f"--env=STOKER_COMMAND={json.dumps(['python', '-c', ECHO, 'fixed'])}",
        *("stoker-launcher", "train"),
    )
    assert (tmp_path / "model" / "words").read_text() == "fixed --epochs 2"


def test_an_image_for_kubernetes_runs_as_the_user_that_was_asked_for(engine):
    engine.make_image("launcher", IMAGE="stoker-user", USER_ID="65532")
    assert config(engine, "stoker-user")["User"] == "65532"
    who = "import os; print('user', os.getuid(), open('/opt/ml/model/x', 'w').write('x'))"
    words = ("run", "--rm", "--network=none", "stoker-user", "--", "python", "-c", who)
    assert "user 65532 1" in engine.run(*words)


def test_a_base_with_torch_keeps_it_and_gets_stoker_beside_it(engine):
    # As AWS's image that has the library of the strategy smddp.
    base = WITH_TORCH.replace("VERSION", "2.4.1+cu121")
    engine.build(base, engine.folder / "job", "base-with-torch")
    words = {"BASE_IMAGE": "base-with-torch", "IMAGE": "stoker-beside"}
    refused = engine.attempt_image("launcher", **words)
    assert "base-with-torch has no digest" in refused.stderr
    engine.make_image("launcher", ALLOW_TAG="1", **words)
    script = "/usr/bin/python3 -c 'import stoker, torch; print(torch.__version__)'; ls /opt/stoker"
    found = shell(engine, "stoker-beside", script).split()
    assert found == ["2.4.1+cu121", "sbom.cdx.json", "wheels.sha256"]


def test_a_base_whose_torch_is_too_old_for_stoker_is_refused(engine):
    engine.build(WITH_TORCH.replace("VERSION", "2.3.0+cu121"), engine.folder / "job", "old-torch")
    refused = engine.attempt_image("launcher", BASE_IMAGE="old-torch", ALLOW_TAG="1")
    assert "error: BASE_IMAGE has torch 2.3.0+cu121: stoker needs torch>=" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 2


def test_wheels_that_are_not_the_lock_files_are_refused(engine, tmp_path):
    lock = tmp_path / "wheels.sha256"
    lock.write_text(f"{'0' * 64}  torch-0.0.1-py3-none-any.whl\n")
    with pytest.raises(AssertionError, match=r"these wheels are not those of .*torch-0\.0\.1"):
        engine.make_image("launcher", LOCK=str(lock))


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"DOCKER": "no-such-client"}, "error: no Docker client: no-such-client"),
        ({"DOCKER_HOST": "unix:///nowhere"}, "finds no engine at unix:///nowhere"),
        ({"LOCK": "no-such-file"}, "no such file: no-such-file"),
        ({"PLATFORMS": "linux/riscv64"}, "no platform linux/riscv64"),
        ({"TORCH_VERSION": "2.10.0"}, "TORCH_VERSION is for the target data, not for launcher"),
    ],
)
def test_what_the_build_lacks_is_said_in_two_lines(engine, environ, words):
    done = engine.attempt_image("launcher", **environ)
    assert done.returncode != 0
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
