"""Inputs of a pipeline's steps, the project's own pipelines, and values that a person types."""

import io
import json
import sys
import tarfile
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from stoker.cli.app import app_for
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
    assert set(inputs.files) == {"workload.json"}
    assert inputs.uri.startswith("s3://b/out/stoker/inputs/")
    assert len(inputs.uri.rpartition("/")[2]) == 16
    assert inputs.workload == workload(**settings)


def test_code_is_packed_and_the_workload_names_its_address(tmp_path):
    inputs = packed(tmp_path)
    address = f"{inputs.uri}/code.tar.gz"
    assert inputs.workload.sagemaker.source == address
    assert json.loads(inputs.files["workload.json"])["sagemaker"]["source"] == address
    with tarfile.open(fileobj=io.BytesIO(inputs.files["code.tar.gz"])) as archive:
        assert archive.getnames() == ["train.py"]


def test_the_address_names_the_content(tmp_path):
    first = packed(tmp_path / "a")
    assert packed(tmp_path / "b") == first
    assert packed(tmp_path / "b", "print(2)").uri != first.uri
    other = msgspec.structs.replace(workload(), hyperparameters={"lr": 0.1})
    assert pack_inputs(workload()).uri != pack_inputs(other).uri


def test_settings_for_sagemaker_are_needed():
    with pytest.raises(UsageError, match="no settings for SageMaker"):
        pack_inputs(Workload(name="x", command=("true",)))


PIPELINE = "from pipelines.steps import said\n\ndef build():\n    return said\n"


def project(folder: Path, *, say: str = "project", pipeline: str = PIPELINE) -> Path:
    """Makes a project whose pipeline builds what a module next to it says."""
    (folder / "pipelines").mkdir(parents=True, exist_ok=True)
    (folder / "pipelines" / "sagemaker.py").write_text(pipeline)
    (folder / "pipelines" / "steps.py").write_text(f"said = {say!r}\n")
    return folder


def built(folder: Path, *, carried: Path | None = None) -> object:
    roots = [carried] if carried else []
    with project_pipeline("sagemaker", folder=folder, carried=roots) as module:
        return module.build()


def test_two_folders_in_one_process_do_not_meet(tmp_path):
    before = list(sys.path)
    first, second = project(tmp_path / "a", say="first"), project(tmp_path / "b", say="second")
    found = [built(first, carried=second), built(second), built(first)]
    assert found == ["first", "second", "first"]
    assert sys.path == before
    assert not [n for n in sys.modules if n.partition(".")[0] == "pipelines"]


def test_modules_of_the_same_name_are_back_afterwards(tmp_path, monkeypatch):
    theirs = type(sys)("pipelines")
    monkeypatch.setitem(sys.modules, "pipelines", theirs)
    assert built(project(tmp_path)) == "project"
    assert sys.modules["pipelines"] is theirs


def test_what_a_folder_lacks_comes_from_the_installation(tmp_path):
    carried = project(tmp_path / "carried", say="carried")
    (tmp_path / "empty").mkdir()
    assert built(tmp_path / "empty", carried=carried) == "carried"


def test_without_any_pipeline_the_way_to_one_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"pipelines/sagemaker\.py not found") as caught:
        built(tmp_path)
    assert "stoker init" in caught.value.fix


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


def test_a_file_that_is_not_python_is_named_with_its_line(tmp_path):
    folder = project(tmp_path, pipeline="x = 1\ndef build(:\n")
    with pytest.raises(UsageError, match="not Python") as caught:
        built(folder)
    assert caught.value.where.endswith("pipelines/sagemaker.py:2")


@pytest.mark.parametrize("line", ["import kfp.no_such_module", "from kfp import no_such_name"])
def test_a_missing_or_older_sdk_is_a_matter_of_installing_it(tmp_path, line):
    folder = project(tmp_path, pipeline=f"{line}\n")
    with pytest.raises(UsageError, match="kfp is not installed") as caught:
        built(folder)
    assert caught.value.fix == install_command("kubeflow")


def test_other_missing_modules_are_not_explained_away(tmp_path):
    folder = project(tmp_path, pipeline="import no_such_module_at_all\n")
    with pytest.raises(ModuleNotFoundError):
        built(folder)


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

    monkeypatch.setattr("stoker.pipelines.kubeflow.client.KubeflowClient.call", reached)
    monkeypatch.setattr("stoker.platforms.aws.Aws.call", reached)
    monkeypatch.chdir(tmp_path)


def raised(verb: str, target: str, *more: str) -> BaseException | None:
    Path("w.yaml").write_text(WORDS[target])
    return CliRunner().invoke(app_for(verb), [verb, target, "w.yaml", *more]).exception


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
@pytest.mark.parametrize(
    ("verb", "more", "words"),
    [
        ("start", ("--param", "objective=speed"), "speed"),
        ("start", ("--param", "objectiv=cost"), "did you mean objective?"),
        ("schedule", ("--cron", "@daily", "--param", "objective=speed"), "speed"),
        # Five fields of Unix's cron: the services would read them otherwise, or not at all.
        ("schedule", ("--cron", "0 3 * * 1"), "0 3 * * 1"),
    ],
)
def test_a_wrong_value_is_refused_without_the_service(target, verb, more, words):
    err = raised(verb, target, *more)
    assert isinstance(err, UsageError)
    assert words in str(err)


@pytest.mark.parametrize("target", ["kubeflow", "sagemaker"])
def test_a_parameter_that_only_the_pipeline_may_have_is_asked_for(target, monkeypatch):
    err = raised("start", target, "--param", "colour_of_my_own_step=3")
    assert isinstance(err, ReachedError)
    # Near to a parameter of the workload, and declared in the project's own pipeline.
    monkeypatch.setattr("stoker.cli.compile.has_parameter", lambda *_: True)
    err = raised("start", target, "--param", "objectives=3")
    assert isinstance(err, ReachedError)
