"""A test runs each of configs/*.yaml for real, or it is said why not; each is a request."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.records import write_json
from stoker.settings import read_workload
from support import sample_records
from support.command import stoker
from support.examples import document, project

ROOT = Path(__file__).parents[2]


# What runs each workload, and which words stand there.
RUN = {
    "mnist.yaml": (".ci/run", "make run"),
    "mnist-ddp.yaml": ("tests/e2e/test_example_workloads.py", "mnist-ddp.yaml"),
    "mnist-mpi.yaml": ("tests/engines/test_mpi.py", "mnist-mpi.yaml"),
    "mnist-ray.yaml": ("tests/engines/test_ray.py", "mnist-ray.yaml"),
    "mnist-tf.yaml": ("tests/engines/test_tensorflow.py", "mnist-tf.yaml"),
    "parameter-server.yaml": ("tests/engines/test_tensorflow.py", "parameter-server.yaml"),
    "rl-simulators.yaml": ("tests/engines/test_rl.py", "rl-simulators.yaml"),
    # The same script, there on two ranks and for one epoch.
    "spoken-digits.yaml": ("tests/e2e/test_frameworks.py", '"spoken_digits" / "train.py"'),
}
FILES = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_each_workload_is_run_by_a_test_or_needs_a_service(name):
    if read_workload(document(name)).platform == "local":
        file, words = RUN[name]
        assert words in (ROOT / file).read_text()


@pytest.mark.parametrize("name", FILES)
def test_each_workload_is_a_request_that_its_platform_takes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(project(tmp_path))
    shown = CliRunner().invoke(app_for("train"), ["train", f"configs/{name}", "--dry-run"])
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize(
    "words",
    [
        "profile",
        "run",
        "train",
        "train --dry-run",
        "train --param Epochs=3",
        "evaluate --profile p --decision d --training t",
        "compile sagemaker --out p.json",
        "upload sagemaker",
        "start sagemaker",
        "schedule sagemaker --cron cron(0)",
        "decide profile.json --workload",
    ],
)
def test_each_verb_refuses_a_workload_with_placeholders(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json(tmp_path / "profile.json", sample_records.profile())
    done = stoker(*words.split(), str(ROOT / "configs" / "mnist-sagemaker.yaml"), cwd=tmp_path)
    assert done.returncode == 2
    assert "replace the placeholder: ACCOUNT in image" in done.stderr
    assert "configs/mnist-sagemaker.yaml:13, key image" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], ["auto"]),
        (["--replace-dataloader", "true"], ["1"]),
        (["--replace-dataloader", "false"], []),
        (["--set", "feed.replace_dataloader=true", "--replace-dataloader", "false"], []),
    ],
)
@pytest.mark.parametrize("name", ["mnist-kubeflow.yaml", "mnist-sagemaker.yaml"])
def test_the_option_says_which_loaders_the_job_replaces(
    name, flags, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(project(tmp_path))
    words = ["train", f"configs/{name}", "--dry-run", "--json", *flags]
    shown = CliRunner().invoke(app_for("train"), words)
    assert shown.exit_code == 0, shown.output
    found = re.findall(r'"STOKER_REPLACE_DATALOADER"(?:,\s*"value")?: "(\w+)"', shown.stdout)
    assert sorted(set(found)) == expected
