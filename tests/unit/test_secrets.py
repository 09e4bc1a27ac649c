"""Variables of a workload: which are refused, and how each platform's request names a secret."""

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.patch import patched
from stoker.platforms.sagemaker.request import plan_request
from stoker.records import SecretSource
from stoker.workload_file import workload_from
from support import kubernetes_jobs
from support.builders import workload
from support.sagemaker_job import DATA, DNN, IMAGE, ROLE

ARN = "arn:aws:secretsmanager:eu-west-1:123456789012:secret:team/wandb-AbCdEf"
SSM = "arn:aws:ssm:eu-west-1:123456789012:parameter/team/db"


def sagemaker_job(secrets, **patch) -> JobSpec:
    described = {
        "name": "mnist",
        "command": ["python", "train.py"],
        "image": IMAGE,
        "platform": "sagemaker",
        "environment": {"WANDB_PROJECT": "digits"},
        "secrets": secrets,
        "sagemaker": {"role": ROLE, "output_uri": "s3://bucket/out", "request": patch},
    }
    return JobSpec.of(workload_from(described), groups=[DNN, DATA], run_dir=Path("runs/mnist-1"))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"environment": {"STOKER_RUN_ID": "x"}}, "set by stoker"),
        ({"environment": {"NODE_RANK": "7"}}, "set by stoker"),
        ({"environment": {"RANK": "3"}}, "set by stoker"),
        ({"environment": {"HF_TOKEN": "abc"}}, "looks like a secret"),
        ({"environment": {"X": "AKIAABCDEFGHIJKLMNOP"}}, "looks like a secret"),
        ({"environment": {"X": "1"}, "secrets": {"X": ARN}}, "also among the secrets"),
        ({"environment": {"BAD-NAME": "1"}}, "BAD-NAME"),
        ({"secrets": {"X": "hunter2"}}, "secrets.X"),
        ({"secrets": {"X": "arn:aws:s3:::bucket/key"}}, "secrets.X"),
        ({"secrets": {"X": {"arn": "hunter2"}}}, "not the ARN"),
    ],
)
def test_a_variable_that_cannot_be_set_or_would_be_shown_is_refused_with_its_key(keys, words):
    with pytest.raises(UsageError) as caught:
        workload("mnist", **keys)
    assert words in str(caught.value)
    for value in ("abc", "hunter2", "20261126"):
        assert value not in str(caught.value)


def test_the_request_of_sagemaker_names_a_secret_and_has_plain_variables():
    told = {"WANDB_API_KEY": ARN, "DB": {"arn": SSM, "json_key": "url", "hosts": "all"}}
    request = plan_request(sagemaker_job(told))
    variables = request.body["Environment"]
    assert variables["WANDB_PROJECT"] == "digits"
    assert variables.keys() == {"STOKER_RUN", "WANDB_PROJECT"}
    assert request.settings.secrets == {
        "DB": SecretSource(arn=SSM, json_key="url", hosts="all"),
        "WANDB_API_KEY": SecretSource(arn=ARN),
    }


@pytest.mark.parametrize("api", ["jobset", "trainer"])
def test_pods_read_secrets_by_reference_and_data_pods_only_their_own(api):
    told = {
        "WANDB_API_KEY": {"secret": "team", "arn": ARN},
        "DB": {"secret": "db", "key": "url", "hosts": "all"},
    }
    spec = kubernetes_jobs.job(settings={"api": api}, secrets=told, environment={"A": "$(B)"})
    request = KubernetesPlatform().plan(spec)
    pods: list[Any] = [group.template for group in request.groups]
    dnn, data = (
        {each["name"]: each for each in pod["spec"]["containers"][0]["env"]} for pod in pods
    )
    of_db = {"secretKeyRef": {"name": "db", "key": "url"}}
    assert dnn["DB"]["valueFrom"] == data["DB"]["valueFrom"] == of_db
    of_wandb = {"secretKeyRef": {"name": "team", "key": "WANDB_API_KEY"}}
    assert dnn["WANDB_API_KEY"]["valueFrom"] == of_wandb
    assert "WANDB_API_KEY" not in data
    assert dnn["A"]["value"] == data["A"]["value"] == "$$(B)"


A, B, C = ({"name": name, "value": "1"} for name in "ABC")
OTHER_A = {"name": "A", "valueFrom": {}}
KEY_A, KEY_B = {"key": "a"}, {"key": "b"}


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        # Examples of RFC 7386, Appendix A.
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": "foo"}, {"b": {"c": None, "d": 1}}, {"a": "foo", "b": {"d": 1}}),
        # Items of lists by name.
        ({"env": [A, B]}, {"env": [OTHER_A, C]}, {"env": [OTHER_A, B, C]}),
        (
            {"containers": [{"name": "a", "image": "i", "tty": True}]},
            {"containers": [{"name": "a", "image": "j", "tty": None}]},
            {"containers": [{"name": "a", "image": "j"}]},
        ),
        (
            {"tolerations": [KEY_A]},
            {"tolerations": [KEY_B, KEY_A]},
            {"tolerations": [KEY_A, KEY_B]},
        ),
    ],
)
def test_a_patch_is_merged(base, patch, result):
    assert patched(base, patch, key="k", reserved={}) == result


@pytest.mark.parametrize(
    ("patch", "place"),
    [
        ({"Environment": {"A": "1", "HF_TOKEN": "hidden"}}, "Environment.HF_TOKEN"),
        ({"Environment": {"WANDB_API_KEY": "hidden"}}, "Environment.WANDB_API_KEY"),
        (
            {"containers": [{"name": "c", "env": [{"name": "HF_TOKEN", "value": "hidden"}]}]},
            "containers[c].env[HF_TOKEN]",
        ),
    ],
)
def test_a_secret_among_a_patch_s_variables_is_refused_and_not_shown(patch, place):
    with pytest.raises(UsageError, match="looks like a secret") as caught:
        patched({}, patch, key="k", reserved={})
    assert caught.value.where == f"key k.{place}"
    assert "secrets: {" in caught.value.fix
    assert "hidden" not in str(caught.value)


def test_a_variable_that_names_a_secret_of_the_cluster_may_be_patched():
    named = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    patched({}, {"containers": [{"name": "c", "env": [named]}]}, key="k", reserved={})
