"""The stack's roles suffice for the compiled pipeline: each step reaches what it names."""

import json
import re

import pytest

from stoker.pipelines.sagemaker.compile import compile_pipeline
from stoker.records import Json
from support import sagemaker_pipeline as sample
from support.policies import ROOT, example, is_allowed, role_name, s3_arn

POLICIES = {role_name("step"): "step", role_name("training"): "execution"}
READS = ("ProcessingInputs", "InputDataConfig")
WRITES = ("ProcessingOutputConfig", "OutputDataConfig", "CheckpointConfig")


@pytest.fixture
def steps():
    """Returns name and request of each step of the example's pipeline, as it would run."""
    document = json.loads(compile_pipeline(example(), folder=ROOT).definition)
    found = []
    for step in sample.steps(document):
        again = "s3://bucket/stoker/pipelines/mnist/earlier/profile"
        reuse = again if str(step["Name"]).endswith("Again") else None
        arguments = sample.resolved(step["Arguments"], document, reuse_profile=reuse)
        if step["Type"] != "Condition":
            found.append((str(step["Name"]), arguments))
    return found


def uris(value: Json) -> list[str]:
    return re.findall(r'"(s3://[^"]*)"', json.dumps(value))


def an_object(uri: str) -> str:
    """Gives an object below an address: the file itself of a file."""
    return uri if "." in uri.rpartition("/")[2] else uri.rstrip("/") + "/any"


def test_every_step_may_read_its_inputs_and_write_its_outputs(steps):
    checked = 0
    for name, request in steps:
        if "RoleArn" not in request:
            continue
        policy = POLICIES[str(request["RoleArn"]).rpartition("/")[2]]
        for action, keys in (("s3:GetObject", READS), ("s3:PutObject", WRITES)):
            for uri in uris([request.get(key) for key in keys]):
                arn = s3_arn(an_object(uri))
                told = f"{name}: {action} {uri}"
                assert is_allowed(policy, action, arn), told
                checked += 1
    assert checked > 15


@pytest.mark.parametrize(
    ("action", "path"),
    [
        ("s3:PutObject", "by-cost/0123456789abcdef/abcdef123456"),
        ("s3:GetObject", "by-cost/0123456789abcdef/abcdef123456"),
        ("s3:GetObject", "abcdef123456/profile.json"),
    ],
)
def test_the_step_that_finds_a_profile_may_read_it_and_note_a_new_one(action, path):
    settings = example().sagemaker
    assert settings is not None
    folder = f"{settings.output_uri.rstrip('/')}/stoker/profiles/mnist"
    assert is_allowed("step", action, s3_arn(f"{folder}/{path}"))
    # What was measured is the profile's job's to write, and no small step's.
    assert not is_allowed("step", "s3:PutObject", s3_arn(f"{folder}/abcdef123456/profile.json"))


def test_steps_run_under_roles_that_the_pipeline_may_hand_over(steps):
    roles = {str(request["RoleArn"]) for _, request in steps if "RoleArn" in request}
    assert {role.rpartition("/")[2] for role in roles} == set(POLICIES)
    service = {"iam:PassedToService": "sagemaker.amazonaws.com"}
    for role in roles:
        assert is_allowed("pipeline", "iam:PassRole", role, context=service)
