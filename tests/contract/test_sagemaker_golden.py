"""Whole CreateTrainingJob requests equal their files, and keep the service's rules.

Write them again with: python tests/contract/test_sagemaker_golden.py
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Json
from support import sagemaker_job
from support.sagemaker_rules import rule_problems

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
def test_the_service_takes_the_request(name):
    body = described(name)["CreateTrainingJob"]
    assert [str(problem) for problem in rule_problems(body)] == []


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for golden in JOBS:
        text = json.dumps(described(golden), indent=2) + "\n"
        (FOLDER / f"{golden}.json").write_text(text, encoding="utf-8")
