"""Whole CreateTrainingJob requests equal their files, and botocore's own model takes them.

Write them anew with: python tests/contract/test_sagemaker_golden.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from botocore.validate import ParamValidator

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Json
from support import sagemaker_job
from support.sagemaker_rules import SHAPE, rule_problems

FOLDER = Path(__file__).parent / "sagemaker_requests"
JOBS: dict[str, Callable[[], JobSpec]] = {
    "heterogeneous": sagemaker_job.job,
    "homogeneous": sagemaker_job.homogeneous_job,
    "profile": sagemaker_job.profile_job,
    "everything": sagemaker_job.full_job,
}


def described(name: str) -> dict[str, Json]:
    platform = SageMakerPlatform()
    return platform.describe(platform.plan(JOBS[name]()))


@pytest.mark.parametrize("name", JOBS)
def test_the_request_is_as_it_was(name):
    golden = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    assert json.loads(json.dumps(described(name))) == golden


@pytest.mark.parametrize("name", JOBS)
def test_botocore_would_send_the_request_as_it_is(name):
    report = ParamValidator().validate(described(name)["CreateTrainingJob"], SHAPE)
    assert report.generate_report() == ""


@pytest.mark.parametrize("name", JOBS)
def test_groups_channels_and_output_are_described_as_they_were_asked_for(name, aws_server):
    asked = described(name)["CreateTrainingJob"]
    assert isinstance(asked, dict)
    aws = Aws()
    aws.call("sagemaker", "CreateTrainingJob", **asked)
    found = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName="mnist-1")
    assert found["ResourceConfig"] == asked["ResourceConfig"]
    assert found["InputDataConfig"] == asked["InputDataConfig"]
    assert found["OutputDataConfig"] == asked["OutputDataConfig"]


def test_a_stand_in_of_the_service_is_no_judge_of_a_request(aws_server):
    wrong = sagemaker_job.plan_body(sagemaker_job.job())
    one = {"InstanceGroupName": "data", "InstanceType": "ml.x9.big", "InstanceCount": 0}
    wrong["ResourceConfig"] = {"InstanceGroups": [one] * 7, "InstanceType": "ml.c5.xlarge"}
    assert len(list(rule_problems(wrong))) > 7
    assert Aws().call("sagemaker", "CreateTrainingJob", **wrong)["TrainingJobArn"]


def test_there_is_no_golden_file_without_its_test():
    assert {path.stem for path in FOLDER.glob("*.json")} == set(JOBS)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for golden in JOBS:
        text = json.dumps(described(golden), indent=2) + "\n"
        (FOLDER / f"{golden}.json").write_text(text, encoding="utf-8")
