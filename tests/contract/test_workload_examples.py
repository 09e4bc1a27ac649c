"""A test runs each of configs/*.yaml for real, or it is said why not; each is a request."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
from stoker.records import write_json
from stoker.settings import read_workload
from support import sample_records
from support.command import stoker
from support.examples import document, project

ROOT = Path(__file__).parents[2]


class Covered(NamedTuple):
    """Says where a workload is run, and which words stand there.

    Attributes:
        by: A file of the repository.
        words: In it.
        runs: False: only its request is made, for it needs a service.
    """

    by: str
    words: str
    runs: bool = True


COVERED = {
    "mnist.yaml": Covered(".ci/run", "make run"),
    "mnist-ddp.yaml": Covered("tests/e2e/test_example_workloads.py", "mnist-ddp.yaml"),
    "mnist-kubeflow.yaml": Covered(
        "tests/contract/test_kubeflow_config.py", "mnist-kubeflow.yaml", runs=False
    ),
    "mnist-mpi.yaml": Covered("tests/engines/test_mpi.py", "mnist-mpi.yaml"),
    "mnist-ray.yaml": Covered("tests/engines/test_ray.py", "mnist-ray.yaml"),
    "mnist-sagemaker.yaml": Covered(
        "tests/support/policies.py", "mnist-sagemaker.yaml", runs=False
    ),
    "mnist-smddp.yaml": Covered(
        "tests/contract/test_workload_examples.py", "mnist-smddp.yaml", runs=False
    ),
    "mnist-tf.yaml": Covered("tests/engines/test_tensorflow.py", "mnist-tf.yaml"),
    "parameter-server.yaml": Covered("tests/engines/test_tensorflow.py", "parameter-server.yaml"),
    "rl-simulators.yaml": Covered("tests/engines/test_rl.py", "rl-simulators.yaml"),
    # The same script, there on two ranks and for one epoch.
    "spoken-digits.yaml": Covered("tests/e2e/test_frameworks.py", '"spoken_digits" / "train.py"'),
}
FILES = sorted(file.name for file in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", FILES)
def test_each_workload_is_run_by_a_test_or_needs_a_service(name):
    covered = COVERED[name]
    assert covered.words in (ROOT / covered.by).read_text()
    workload = read_workload(document(name))
    assert covered.runs == (workload.platform == "local")


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
        ([], "auto"),
        (["--replace-dataloader", "auto"], "auto"),
        (["--replace-dataloader", "true"], "1"),
        (["--replace-dataloader", "false"], None),
        (["--set", "feed.replace_dataloader=true", "--replace-dataloader", "false"], None),
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
    assert set(found_in(json.loads(shown.stdout), "STOKER_REPLACE_DATALOADER")) == (
        {expected} if expected else set()
    )


def found_in(value, variable):
    match value:
        case {"name": name, "value": found} if name == variable:
            yield found
        case Mapping():
            for key, below in value.items():
                yield from [below] if key == variable else found_in(below, variable)
        case list():
            for below in value:
                yield from found_in(below, variable)
