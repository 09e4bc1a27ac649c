"""A login in another account than the workload's is told before anything is sent."""

import boto3
import botocore.client
import pytest

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.places import check_caller
from stoker.records import SageMakerSettings
from support.command import stoker
from support.examples import project
from support.moto_server import ACCOUNT, REGION

OTHER = "210987654321"
VERBS = (
    "upload sagemaker {W} --yes",
    "upload sagemaker {W} --check",
    "start sagemaker {W} --yes",
    "schedule sagemaker {W} --cron rate(1day)",
    "train {W} --group dnn=ml.g5.xlarge:1 --yes",
    "profile {W} --yes --out profile.json",
)


@pytest.fixture
def calls(monkeypatch):
    """Records the operations that all clients ask for."""
    made: list[str] = []
    call = botocore.client.BaseClient._make_api_call

    def noted(client, operation, asked):
        made.append(operation)
        return call(client, operation, asked)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", noted)
    return made


@pytest.fixture
def folder(aws_server, tmp_path):
    """A project whose names are all another account's."""
    made = project(tmp_path)
    file = made / "configs" / "mnist-sagemaker.yaml"
    text = file.read_text().replace(ACCOUNT, OTHER)
    file.write_text(text.replace("\nsagemaker:\n", f"\nsagemaker:\n  region: {REGION}\n"))
    return made


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: " ".join(verb.split()[:3:2]))
def test_a_login_in_another_account_is_refused_before_anything_is_sent(folder, calls, verb):
    words = [word.replace("(1day", "(1 day") for word in verb.split()]
    file = "configs/mnist-sagemaker.yaml"
    done = stoker(*(word.format(W=file) for word in words), cwd=folder)
    assert done.returncode == 2, done
    assert f"you are logged in to account {ACCOUNT}" in done.stderr
    assert f"roles are in account {OTHER}" in done.stderr
    assert "AWS_PROFILE" in done.stderr
    assert calls == ["GetCallerIdentity"]


@pytest.mark.parametrize("verb", VERBS[2:3], ids=lambda verb: " ".join(verb.split()[:3:2]))
def test_without_keys_the_error_is_the_call_s_own(folder, monkeypatch, verb):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    # It keeps the keys that it has found.
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)
    done = stoker(*verb.format(W="configs/mnist-sagemaker.yaml").split(), cwd=folder)
    assert "no AWS credentials were found" in done.stderr, done


def settings(role: str) -> SageMakerSettings:
    return SageMakerSettings(role=role, output_uri="s3://bucket/stoker")


@pytest.mark.parametrize(
    ("caller", "words"),
    [
        (f"arn:aws:iam::{ACCOUNT}:user/ada", None),
        (f"arn:aws:iam::{ACCOUNT}:root", None),
        (f"arn:aws:sts::{ACCOUNT}:assumed-role/ci/session", None),
        (f"arn:aws:sts::{ACCOUNT}:federated-user/ada", None),
        (None, None),
        (f"arn:aws:iam::{OTHER}:user/ada", f"logged in to account {OTHER}"),
        (f"arn:aws:sts::{OTHER}:assumed-role/ci/session", f"roles are in account {ACCOUNT}"),
        (f"arn:aws-us-gov:iam::{ACCOUNT}:user/ada", "(aws-us-gov)"),
        (f"arn:aws-cn:sts::{OTHER}:assumed-role/ci/s", "(aws-cn)"),
    ],
)
def test_account_and_partition_of_the_login_are_those_of_the_role(caller, words):
    own = settings(f"arn:aws:iam::{ACCOUNT}:role/stoker-mnist-{REGION}-training")
    if words is None:
        check_caller(caller, own)
        return
    with pytest.raises(UsageError) as caught:
        check_caller(caller, own)
    assert words in caught.value.what


def test_who_calls_is_not_known_where_aws_does_not_answer(aws_server, monkeypatch):
    assert str(Aws(region=REGION).caller()).startswith(f"arn:aws:sts::{ACCOUNT}:")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert Aws(region=REGION).caller() is None
    assert Aws(region=REGION, clients={"s3": object()}).caller() is None
