"""Inputs of a pipeline's steps, the project's own pipelines, and values that a person types."""

import io
import json
import re
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.parser import app
from stoker.errors import UsageError, install_command
from stoker.pipelines.base import Inputs, pack_inputs, project_pipeline
from stoker.records import SageMakerSettings, Workload

ROLE = "arn:aws:iam::123456789012:role/stoker"


def workload(**settings: object) -> Workload:
    return Workload(
        name="mnist",
        command=("python", "train.py"),
        sagemaker=SageMakerSettings(role=ROLE, output_uri="s3://b/out/", **settings),  # type: ignore[arg-type]
    )


def packed(folder: Path, text: str = "print(1)") -> Inputs:
    (folder / "code").mkdir(parents=True, exist_ok=True)
    (folder / "code" / "train.py").write_text(text)
    return pack_inputs(workload(source="code"), folder=folder)


@pytest.mark.parametrize("settings", [{}, {"source": "s3://b/mine.tar.gz"}])
def test_a_workload_without_code_or_with_code_in_s3_is_one_file(settings):
    inputs = pack_inputs(workload(**settings))
    assert set(inputs.uploads) == {inputs.workload_uri}
    assert re.fullmatch("s3://b/out/stoker/inputs/[0-9a-f]{16}/workload.json", inputs.workload_uri)
    assert inputs.workload == workload(**settings)


def test_code_is_packed_and_the_workload_names_its_address(tmp_path):
    inputs = packed(tmp_path)
    (address,) = set(inputs.uploads) - {inputs.workload_uri}
    assert inputs.workload.sagemaker.source == address
    told = json.loads(inputs.uploads[inputs.workload_uri])
    assert told["sagemaker"]["source"] == address
    with tarfile.open(fileobj=io.BytesIO(inputs.uploads[address])) as archive:
        assert archive.getnames() == ["train.py"]


PIPELINE = "from pipelines.steps import said\n\ndef build():\n    return said\n"


def project(folder: Path, *, say: str = "project", pipeline: str = PIPELINE) -> Path:
    """Makes a project whose pipeline builds what a module next to it says."""
    (folder / "pipelines").mkdir(parents=True, exist_ok=True)
    (folder / "pipelines" / "sagemaker.py").write_text(pipeline)
    (folder / "pipelines" / "steps.py").write_text(f"said = {say!r}\n")
    return folder


def built(folder: Path, *, carried: Path | None = None) -> object:
    roots = [carried] if carried else []
    return project_pipeline("sagemaker", folder=folder, carried=roots).build()


@pytest.mark.parametrize(
    ("line", "missing"),
    [
        ("import pipelines.missing", r"pipelines\.missing"),
        ("from stoker.errors import no_such_name", "no_such_name"),
    ],
)
def test_what_the_pipeline_cannot_import_of_the_project_or_stoker_is_named(tmp_path, line, missing):
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match=f"cannot be imported: .*{missing}") as caught:
        built(folder)
    assert str(folder) in caught.value.where
    assert "docs/sagemaker.md" in caught.value.fix


@pytest.mark.parametrize("line", ["import kfp.no_such_module", "from kfp import no_such_name"])
def test_a_missing_or_older_sdk_is_a_matter_of_installing_it(tmp_path, line):
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match=r"cannot be imported: .*kfp") as caught:
        built(folder)
    assert install_command("sagemaker") in caught.value.fix


WORDS = {
    "kubeflow": "name: mnist\ncommand: [python]\nplatform: kubernetes\nimage: r/i:1\n"
    "cluster: {dnn: {instance_type: g5.xlarge}}\n",
    "sagemaker": "name: mnist\ncommand: [python]\nplatform: sagemaker\nimage: r/i:1\n"
    "cluster: {dnn: {instance_type: ml.g5.xlarge}}\n"
    "sagemaker: {role: 'arn:aws:iam::111122223333:role/a', output_uri: s3://b/runs}\n",
}


class ReachedError(Exception):
    """The service was asked."""


@pytest.fixture(autouse=True)
def _out_of_reach(monkeypatch, tmp_path):
    def reached(*_: object, **__: object) -> None:
        raise ReachedError

    monkeypatch.setattr("stoker.pipelines.kubeflow.KubeflowClient._kfp", property(reached))
    monkeypatch.setattr("stoker.platforms.aws.Aws.call", reached)
    monkeypatch.chdir(tmp_path)


def raised(verb: str, target: str, *more: str) -> BaseException | None:
    Path("w.yaml").write_text(WORDS[target])
    return CliRunner().invoke(app, [verb, target, "w.yaml", *more]).exception


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
@pytest.mark.parametrize(
    ("verb", "more", "words"),
    [
        ("start", ("--param", "max_usd_per_hour=cheap"), "max_usd_per_hour"),
        ("schedule", ("--cron", "@daily", "--param", "max_data_hosts=many"), "max_data_hosts"),
    ],
)
def test_a_wrong_value_is_refused_without_the_service(target, verb, more, words):
    err = raised(verb, target, *more)
    assert isinstance(err, UsageError)
    assert words in str(err)
