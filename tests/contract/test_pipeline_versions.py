"""Versions of an uploaded pipeline, and the way back: on moto with a double, and on Kubeflow's."""

import json

import pytest
import yaml

from stoker.platforms.aws import Aws
from support.command import Done, stoker, succeeds
from support.moto_server import REGION
from support.pipeline_versions import PipelineVersions
from support.sagemaker_uploads import BUCKET, WORKLOAD

CODE = ("--set", "sagemaker.source=code")


@pytest.fixture
def versions(aws_server, monkeypatch):
    aws_server.make_bucket(BUCKET)
    return PipelineVersions().install(monkeypatch)


@pytest.fixture
def project(tmp_path, monkeypatch, versions):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("print(1)\n")
    (tmp_path / "w.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(WORKLOAD))))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def upload(*words: str) -> Done:
    return succeeds("upload", "sagemaker", "w.yaml", *words)


def three_versions() -> None:
    for epochs in (1, 2, 3):
        upload("--set", f"hyperparameters={{epochs: {epochs}}}", *CODE)


def definitions(versions: PipelineVersions) -> list[str]:
    return [each.definition for each in versions.kept["mnist"]]


def refused(*words: str, told: str) -> str:
    done = stoker(*words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr
    assert "try:" in done.stderr
    return done.stderr


def test_going_back_makes_an_earlier_version_the_one_that_starts_take(versions, project):
    three_versions()
    back = upload("--back-to", "1", "--yes")
    assert "hyperparameters.epochs: 3 -> 1" in back.stderr
    assert "version: 4" in " ".join(back.stdout.split())
    texts = definitions(versions)
    assert (len(texts), texts[3]) == (4, texts[0])
    deployed = Aws(region=REGION).call("sagemaker", "DescribePipeline", PipelineName="mnist")
    assert deployed["PipelineDefinition"] == texts[0]
    # The workload of the file differs again, and a check says so.
    assert stoker("upload", "sagemaker", "w.yaml", "--check", *CODE).returncode == 10


def test_versions_are_listed_newest_first_with_what_was_gone_back_to(versions, project):
    three_versions()
    upload("--back-to", "2", "--alias", "good", "--yes")
    listed = json.loads(upload("--versions", "--json").stdout)
    assert [each["id"] for each in listed] == ["4", "3", "2", "1"]
    assert listed[0]["is_latest"]
    assert listed[0]["aliases"] == ["good"]
    assert listed[0]["about"] == "version 2 again"
    lines = upload("--versions").stdout.splitlines()
    assert lines[0].startswith("4 ")
    assert "good" in lines[0]


def test_an_alias_moves_to_the_version_that_an_upload_makes(versions, project):
    upload("--alias", "prod", *CODE)
    upload("--set", "hyperparameters={epochs: 2}", "--alias", "prod", *CODE)
    assert [each.aliases for each in versions.kept["mnist"]] == [[], ["prod"]]
    # An upload without a change may name the version that is there.
    upload("--set", "hyperparameters={epochs: 2}", "--alias", "night", *CODE)
    assert versions.kept["mnist"][1].aliases == ["prod", "night"]


def test_going_back_by_an_alias(versions, project):
    upload("--alias", "good", *CODE)
    upload("--set", "hyperparameters={epochs: 2}", *CODE)
    upload("--back-to", "good", "--yes")
    texts = definitions(versions)
    assert texts[2] == texts[0]


def test_going_back_to_the_newest_version_changes_nothing(versions, project):
    three_versions()
    done = upload("--back-to", "3", "--yes")
    assert done.stdout.startswith("unchanged: ")
    assert len(definitions(versions)) == 3


@pytest.mark.parametrize("named", ["2", "good"])
def test_a_run_of_an_earlier_version_leaves_what_others_start(versions, project, named):
    three_versions()
    upload("--back-to", "2", "--alias", "good", "--yes")
    upload("--set", "hyperparameters={epochs: 9}", *CODE)
    succeeds("start", "sagemaker", "w.yaml", "--version", named, "--yes")
    succeeds("start", "sagemaker", "w.yaml", "--yes")
    assert versions.started == [("mnist", 2 if named == "2" else 4), ("mnist", 5)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--back-to", "7"), "pipeline mnist has no version 7"),
        (("--back-to", "godo"), "did you mean good?"),
        (("--back-to", "1", "--check"), "--check cannot be used with --back-to"),
        (("--versions", "--check"), "--check cannot be used with --versions"),
        (("--versions", "--alias", "a"), "--alias cannot be used with --versions"),
        (("--alias", "12"), "not an alias: 12"),
        (("--alias", "a b"), "not an alias: a b"),
        (("--alias", "x" * 129), "not an alias"),
    ],
)
def test_what_cannot_be_gone_back_to_is_refused_before_anything_is_sent(
    versions, project, words, told
):
    upload("--alias", "good", *CODE)
    versions.calls.clear()
    refused("upload", "sagemaker", "w.yaml", *words, told=told)
    changes = {"UpdatePipeline", "UpdatePipelineVersion", "CreatePipeline"}
    assert changes.isdisjoint(versions.calls)


def test_an_unknown_version_of_a_run_is_refused_by_its_name(versions, project):
    upload(*CODE)
    refused("start", "sagemaker", "w.yaml", "--version", "3", "--yes", told="has no version 3")
    assert versions.started == []


def test_a_version_whose_inputs_are_gone_is_refused(versions, project):
    three_versions()
    aws = Aws(region=REGION)
    folder = definitions(versions)[0].partition("/stoker/inputs/")[2][:16]
    aws.delete_object(f"s3://{BUCKET}/out/stoker/inputs/{folder}/code.tar.gz")
    said = refused(
        "upload", "sagemaker", "w.yaml", "--back-to", "1", "--yes", told="code.tar.gz is gone"
    )
    assert "stoker upload sagemaker" in said
    assert len(definitions(versions)) == 3


@pytest.mark.parametrize("extra", ["", "weekly", "stoker-mnist--night"])
def test_a_schedule_that_sets_what_the_version_lacks_is_refused(versions, project, extra):
    upload(*CODE)
    upload("--set", "hyperparameters={epochs: 2, depth: 3}", *CODE)
    depth = ("--set", "hyperparameters={epochs: 2, depth: 3}", "--param", "depth=4")
    name = ("--name", extra) if extra else ()
    succeeds("schedule", "sagemaker", "w.yaml", "--cron", "rate(1 day)", *depth, *name)
    said = refused("upload", "sagemaker", "w.yaml", "--back-to", "1", "--yes", told="sets depth")
    assert "--fresh" in said
    assert len(definitions(versions)) == 2


def test_a_pipeline_that_is_not_uploaded_has_no_versions(versions, project):
    for words in (("--versions",), ("--back-to", "1")):
        refused("upload", "sagemaker", "w.yaml", *words, told="pipeline mnist is not uploaded")
