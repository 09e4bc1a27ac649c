"""Accounts, regions and buckets that do not fit together are refused before anything is sent."""

from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.pipelines.sagemaker.compile import pipeline_request
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.places import AWS_IMAGE_ACCOUNTS
from stoker.platforms.sagemaker.request import plan_request
from stoker.records import Group
from stoker.workload_file import workload_from

MINE, OTHER = "111122223333", "444455556666"
WORKLOAD = {
    "name": "mnist",
    "platform": "sagemaker",
    "command": ["python", "train.py"],
    "image": f"{MINE}.dkr.ecr.eu-west-1.amazonaws.com/stoker:1",
    "cluster": {"dnn": {"instance_type": "ml.g5.xlarge", "count": 1}},
    "channels": {"train": {"uri": f"s3://data-{MINE}/mnist/"}},
    "sagemaker": {
        "role": f"arn:aws:iam::{MINE}:role/stoker-training",
        "pipeline_role": f"arn:aws:iam::{MINE}:role/stoker-pipeline",
        "schedule_role": f"arn:aws:iam::{MINE}:role/stoker-scheduler",
        "output_uri": "s3://acme/stoker",
        "region": "eu-west-1",
        "control": {
            "image": f"{MINE}.dkr.ecr.eu-west-1.amazonaws.com/stoker:control",
            "role": f"arn:aws:iam::{MINE}:role/stoker-step",
        },
    },
}


def plan(*overrides):
    workload = workload_from(WORKLOAD, overrides=overrides)
    groups = [Group.of_today(workload.cluster.dnn)]
    return plan_request(JobSpec.of(workload, groups=groups, run_dir="runs", name="mnist-1"))


def test_what_is_of_one_account_and_region_is_planned():
    assert plan().body["RoleArn"] == WORKLOAD["sagemaker"]["role"]


OF_ANOTHER_ACCOUNT = {
    "sagemaker.pipeline_role": f"arn:aws:iam::{OTHER}:role/a",
    "sagemaker.schedule_role": f"arn:aws:iam::{OTHER}:role/a",
    "sagemaker.control.role": f"arn:aws:iam::{OTHER}:role/a",
    "sagemaker.control.image": f"{OTHER}.dkr.ecr.eu-west-1.amazonaws.com/a:1",
    "sagemaker.model.image": f"{OTHER}.dkr.ecr.eu-west-1.amazonaws.com/a:1",
    "image": f"{OTHER}.dkr.ecr.eu-west-1.amazonaws.com/a:1",
    "channels.train.uri": f"s3://sagemaker-eu-west-1-{OTHER}/x",
    "sagemaker.output_uri": f"s3://{OTHER}-models/x",
    "sagemaker.checkpoint_uri": f"s3://a.{OTHER}.b/x",
    "sagemaker.dead_letter_queue": f"arn:aws:sqs:eu-west-1:{OTHER}:q",
    "sagemaker.request.OutputDataConfig.KmsKeyId": f"arn:aws:kms:eu-west-1:{OTHER}:key/k",
    "sagemaker.request.ResourceConfig.VolumeKmsKeyId": f"arn:aws:kms:eu-west-1:{OTHER}:key/k",
    "tracking.mlflow": f"arn:aws:sagemaker:eu-west-1:{OTHER}:mlflow-tracking-server/m",
}


@pytest.mark.parametrize("key", OF_ANOTHER_ACCOUNT)
def test_another_account_is_refused_with_the_key_unless_it_is_meant(key):
    change = f"{key}={OF_ANOTHER_ACCOUNT[key]}"
    with pytest.raises(UsageError, match=f"of account {OTHER}, and sagemaker.role of {MINE}") as e:
        plan(change)
    assert e.value.where == f"key {key}"
    meant = f"sagemaker.elsewhere=['{OTHER}']"
    if key.endswith("role"):
        # A role of another account cannot be passed.
        assert "elsewhere" not in e.value.fix
        with pytest.raises(UsageError):
            plan(change, meant)
    else:
        assert meant.replace("=", ": ") in e.value.fix
        plan(change, meant)


OF_ANOTHER_REGION = {
    "image": f"{MINE}.dkr.ecr.us-east-1.amazonaws.com/a:1",
    "sagemaker.control.image": f"{MINE}.dkr.ecr-fips.us-east-1.amazonaws.com/a:1",
    "channels.train.uri": f"s3://sagemaker-us-east-1-{MINE}/x",
    "sagemaker.output_uri": "s3://acme-us-east-1/x",
    "sagemaker.dead_letter_queue": f"arn:aws:sqs:us-east-1:{MINE}:q",
    "sagemaker.request.OutputDataConfig.KmsKeyId": f"arn:aws:kms:us-east-1:{MINE}:key/k",
}


@pytest.mark.parametrize("key", OF_ANOTHER_REGION)
def test_another_region_is_refused_with_the_key_unless_it_is_meant(key):
    change = f"{key}={OF_ANOTHER_REGION[key]}"
    with pytest.raises(UsageError, match=r"in region us-east-1, and .* says eu-west-1") as e:
        plan(change)
    assert e.value.where == f"key {key}"
    plan(change, "sagemaker.elsewhere=[us-east-1]")


def test_without_a_region_the_images_must_be_of_one():
    with pytest.raises(UsageError, match="in region us-east-1, and image says eu-west-1"):
        plan(
            "sagemaker.region=null",
            f"sagemaker.control.image={MINE}.dkr.ecr.us-east-1.amazonaws.com/a:1",
        )
    plan("sagemaker.region=null")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("sagemaker.region=eu-wst-1", "SageMaker has no region eu-wst-1"),
        ("sagemaker.region=europe", "SageMaker has no region europe"),
        ("sagemaker.region=eu-west-9", "SageMaker has no region eu-west-9"),
        ("sagemaker.region=cn-north-1", "the role is in aws, and the region cn-north-1 in aws-cn"),
        ("sagemaker.output_uri=s3://Acme/x", "Acme is not a valid bucket name"),
        ("channels.train.uri=s3://my_data/x", "my_data is not a valid bucket name"),
        ("sagemaker.checkpoint_uri=s3://ab/x", "ab is not a valid bucket name"),
    ],
)
def test_names_that_no_service_has_are_refused(change, words):
    with pytest.raises(UsageError, match=words):
        plan(change)


@pytest.mark.parametrize(
    "change",
    [
        "image=763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch-training:2.8",
        "image=public.ecr.aws/a/b:1",
        "image=docker.io/a/b:1",
        "channels.train.uri=s3://open-data/x",
        "channels.train.uri=s3://a-1111222233334444/x",
        "tracking.mlflow=https://mlflow.example",
        "sagemaker.request.OutputDataConfig.KmsKeyId=alias/mine",
    ],
)
def test_what_names_no_account_or_one_of_aws_is_taken(change):
    plan(change)


def test_a_secret_of_another_account_is_refused_by_the_pipeline(tmp_path):
    of = f"arn:aws:secretsmanager:eu-west-1:{OTHER}:secret:a-123456"
    workload = workload_from({**WORKLOAD, "notify": {"secret_arn": of}})
    with pytest.raises(UsageError, match="of account") as e:
        pipeline_request(workload, folder=tmp_path)
    assert e.value.where == "key notify.secret_arn"


def test_the_accounts_of_aws_are_those_that_its_sdk_knows():
    image_uris = pytest.importorskip("sagemaker.core.image_uris")
    text = (
        Path(image_uris.__file__).with_name("image_uri_config").joinpath("pytorch.json").read_text()
    )
    assert all(account in text for account in AWS_IMAGE_ACCOUNTS)


@pytest.mark.parametrize("of", [f"arn:aws:ssm:eu-west-1:{OTHER}:parameter/hf"])
def test_a_secret_variable_of_another_account_is_refused(of):
    with pytest.raises(UsageError, match="of account") as e:
        plan(f"secrets.HF_TOKEN={of}")
    assert e.value.where == "key secrets.HF_TOKEN"
