"""docs/operations.md, Going back: what its commands do is tried on moto and in a folder."""

import json
import re
import shlex
from pathlib import Path

import pytest

from stoker.pipelines.sagemaker.client import SageMakerClient
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import champion_quality
from stoker.records import Evaluation, write_json
from stoker.run.champions import promote
from support.moto_server import REGION
from support.pages import code_lines
from support.sagemaker_uploads import BUCKET, hand_made, workload

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def commands(start: str) -> list[list[str]]:
    part = PAGE.read_text(encoding="utf-8").partition("## Going back")[2].partition("\n## ")[0]
    return [shlex.split(line) for line in code_lines(part) if line.startswith(start)]


def options(words: list[str]) -> dict[str, str]:
    """Returns the options of a command of aws as parameters of its operation."""
    pairs = zip(words[3::2], words[4::2], strict=True)
    return {
        re.sub("-(.)", lambda found: found[1].upper(), f"-{name.removeprefix('--')}"): value
        for name, value in pairs
    }


@pytest.fixture
def server(aws_server):
    aws_server.make_bucket(BUCKET)
    return aws_server


def register(aws: Aws, *, accuracy: float) -> str:
    uri = f"s3://{BUCKET}/out/pipelines/mnist/{accuracy}/model_quality.json"
    told = {"multiclass_classification_metrics": {"accuracy": {"value": accuracy}}}
    aws.write_object(uri, json.dumps(told).encode())
    quality = {"Statistics": {"ContentType": "application/json", "S3Uri": uri}}
    package = {"ModelPackageGroupName": "mnist", "ModelMetrics": {"ModelQuality": quality}}
    approved = {**package, "ModelApprovalStatus": "Approved"}
    made = aws.call("sagemaker", "CreateModelPackage", **approved)
    return str(made["ModelPackageArn"])


def test_the_model_before_is_in_use_again_once_the_last_one_is_rejected(server):
    aws = Aws(region=REGION)
    aws.call("sagemaker", "CreateModelPackageGroup", ModelPackageGroupName="mnist")
    good, bad = (register(aws, accuracy=value) for value in (0.9, 0.95))
    assert champion_quality(aws, "mnist") == {"accuracy": 0.95}
    (listed,) = commands("aws sagemaker list-model-packages")
    asked = {**options(listed), "ModelPackageGroupName": "mnist"}
    found = aws.call("sagemaker", "ListModelPackages", **asked)["ModelPackageSummaryList"]
    assert [each["ModelPackageArn"] for each in found] == [bad, good]
    (rejected,) = commands("aws sagemaker update-model-package")
    aws.call("sagemaker", "UpdateModelPackage", **{**options(rejected), "ModelPackageArn": bad})
    assert champion_quality(aws, "mnist") == {"accuracy": 0.9}


def test_the_pipeline_before_is_there_again_once_its_commit_is_uploaded(server):
    assert commands("stoker upload sagemaker")
    definitions = []
    for changes in ((), ("sagemaker.control.instance_type=ml.m5.large",), ()):
        of = workload(*changes)
        client, made = SageMakerClient(of.sagemaker), hand_made(of)
        there, wanted = client.compared(made)
        client.upload(made, is_changed=there != wanted)
        described = Aws(region=REGION).call("sagemaker", "DescribePipeline", PipelineName="mnist")
        definitions.append(described["PipelineDefinition"])
    assert definitions[0] == definitions[2] == hand_made(workload()).definition


# That the model before is then in use again: unit/test_champions.py.
def test_the_file_that_is_to_be_deleted_is_a_champion_s(tmp_path):
    (tmp_path / "champions").mkdir()
    write_json(tmp_path / "evaluation.json", Evaluation(passed=True))
    promote(tmp_path / "evaluation.json", named=str(tmp_path / "champions"))
    (deleted,) = commands("rm CHAMPIONS")
    assert (tmp_path / "champions" / Path(deleted[1]).name.replace("NUMBER", "000001")).exists()
