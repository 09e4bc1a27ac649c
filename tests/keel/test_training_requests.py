"""CreateTrainingJob requests equal their files: `stoker train --dry-run` prints them."""

import json
from typing import Any

import pytest

from support.black_box import refused, stoker
from support.goldens import check_golden, shown
from support.sagemaker_rules import rule_problems
from support.workloads import ON_SAGEMAKER, PATCH, changed, write

KEY = "arn:aws:kms:eu-central-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
WORKLOAD = changed(
    ON_SAGEMAKER,
    command=["python", "train.py", "--epochs", "3"],
    channels={"train": {"uri": "s3://bucket/mnist"}},
    hyperparameters={"lr": 0.1, "fast": True, "name": "resnet"},
)
SPOT = {"EnableManagedSpotTraining": True, "StoppingCondition": {"MaxWaitTimeInSeconds": 7200}}
CHANNELS = {
    "train": {"uri": "s3://bucket/train/", "groups": ["data"]},
    "labels": {
        "uri": "s3://bucket/labels.manifest",
        "data_type": "ManifestFile",
        "distribution": "ShardedByS3Key",
        "mode": "FastFile",
        "groups": ["data"],
    },
    "boxes": {
        "uri": "s3://bucket/boxes.jsonl",
        "data_type": "AugmentedManifestFile",
        "mode": "Pipe",
        "attribute_names": ["source-ref", "boxes"],
        "groups": ["data"],
    },
    "validation": {"uri": "s3://bucket/validation", "groups": ["dnn"]},
    "vocabulary": {"uri": "s3://bucket/vocabulary"},
}
SERIOUS = {
    "AlgorithmSpecification": {"MetricDefinitions": [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]},
    "ResourceConfig": {"VolumeSizeInGB": 500, "VolumeKmsKeyId": KEY},
    "OutputDataConfig": {"KmsKeyId": KEY},
    "VpcConfig": {"SecurityGroupIds": ["sg-12ab"], "Subnets": ["subnet-1a", "subnet-1b"]},
    "Environment": {"TOKENIZERS_PARALLELISM": "false"},
    "EnableInterContainerTrafficEncryption": True,
    "EnableNetworkIsolation": True,
    "Tags": [{"Key": "team", "Value": "vision"}, {"Key": "cost-center", "Value": "42"}],
}


def settings(**more: Any) -> dict[str, Any]:
    """Returns keys of the section `sagemaker`, with the patch under its name."""
    patch = more.pop("patch", None)
    return {**more, **({PATCH["sagemaker"]: patch} if patch else {})}


CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "heterogeneous": (
        {"sagemaker": settings(source="code")},
        ("--group", "dnn=ml.g5.2xlarge:1", "--group", "data=ml.c7i.4xlarge:2"),
    ),
    "homogeneous": (
        {
            "sagemaker": settings(
                max_run_seconds=3600, checkpoint_uri="s3://bucket/checkpoints", patch=SPOT
            )
        },
        ("--group", "dnn=ml.g5.12xlarge:2"),
    ),
    "everything": (
        {
            "channels": CHANNELS,
            "environment": {"NCCL_DEBUG": "WARN"},
            "strategy": "torchrun",
            "sagemaker": settings(
                source="s3://bucket/code/mnist-7.tar.gz",
                max_run_seconds=172800,
                checkpoint_uri="s3://bucket/checkpoints",
                patch=SERIOUS,
            ),
        },
        ("--group", "dnn=ml.p3.8xlarge:2", "--group", "data=ml.c7i.4xlarge:3:14"),
    ),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Prints the request of each case once, without a network."""
    found: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            (folder / "code").mkdir()
            (folder / "code" / "train.py").write_text("print('hello')\n")
            sections, groups = CASES[name]
            write(folder, changed(WORKLOAD, **sections))
            words = ("train", "workload.yaml", "--dry-run", "--name", "mnist-1", *groups)
            found[name] = json.loads(stoker(*words, cwd=folder))["CreateTrainingJob"]
        return found[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_the_request_is_as_it_was(printed, name):
    text = json.dumps(shown(printed(name)), indent=1) + "\n"
    check_golden(f"training_requests/{name}.json", text)


@pytest.mark.parametrize("name", CASES)
def test_the_service_takes_the_request(printed, name):
    assert [str(problem) for problem in rule_problems(printed(name))] == []


@pytest.mark.parametrize(
    "sections",
    [
        {"channels": {"train": {"uri": "file:///data/mnist"}}},
        {"sagemaker": settings(max_run_seconds=29 * 86400)},
        {"sagemaker": settings(patch={"ResourceConfig": {"VolumeSizeInGB": "much"}})},
        {"sagemaker": settings(patch={"NoSuchField": 1})},
    ],
    ids=["channel", "time", "type", "field"],
)
def test_what_the_service_would_refuse_is_refused_before_it_is_sent(tmp_path, sections):
    write(tmp_path, changed(WORKLOAD, **sections))
    groups = ("--group", "dnn=ml.g5.2xlarge:1", "--group", "data=ml.c7i.4xlarge:2")
    refused("train", "workload.yaml", "--dry-run", *groups, cwd=tmp_path)


def test_a_type_that_is_not_there_is_refused_with_the_nearest(tmp_path):
    write(tmp_path, WORKLOAD)
    words = ("train", "workload.yaml", "--dry-run", "--group", "dnn=ml.g5.2xlrage:1")
    assert "ml.g5.2xlarge" in refused(*words, cwd=tmp_path)
