"""Variables of a workload: which are refused, and how each platform's request names a secret."""

import dataclasses
import json
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.local import check_secrets
from stoker.platforms.sagemaker.request import plan_request
from stoker.records import SecretSource
from stoker.records.secrets import parts_to_hide
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
        ({"environment": {"RANK": "3"}}, "set by stoker"),
        ({"secrets": {"SM_MODEL_DIR": ARN}}, "set by stoker"),
        ({"environment": {"HF_TOKEN": "abc"}}, "looks like a secret"),
        ({"environment": {"OPENAI_API_KEY": "abc"}}, "looks like a secret"),
        ({"environment": {"AWS_SECRET_ACCESS_KEY": "abc"}}, "looks like a secret"),
        ({"environment": {"DB_PASSWORD": "abc"}}, "looks like a secret"),
        ({"environment": {"MLFLOW_TRACKING_TOKEN": "abc"}}, "looks like a secret"),
        ({"environment": {"X": "AKIAABCDEFGHIJKLMNOP"}}, "looks like a secret"),
        ({"environment": {"X": "ghp_" + "a" * 36}}, "looks like a secret"),
        ({"environment": {"X": "-----BEGIN RSA PRIVATE KEY-----\nabc"}}, "looks like a secret"),
        ({"environment": {"X": "1"}, "secrets": {"X": ARN}}, "also among the secrets"),
        ({"environment": {"BAD-NAME": "1"}}, "BAD-NAME"),
        ({"environment": {"N": 1}}, "text"),
        ({"secrets": {"X": "hunter2"}}, "secrets.X"),
        ({"secrets": {"X": "arn:aws:s3:::bucket/key"}}, "secrets.X"),
        ({"secrets": {"X": 20261126}}, "secrets.X"),
        ({"secrets": {"B-N": "hunter2"}}, "not a valid name of a variable"),
        ({"secrets": {"X": ["hunter2"]}}, "secrets.X"),
        ({"secrets": {"X": {"arn": "hunter2"}}}, "not the ARN"),
        ({"secrets": {"X": {}}}, "does not say where it is kept"),
        (
            {"secrets": {"X": {"json_key": "a", "secret": "team"}}},
            "json_key needs a secret with an arn",
        ),
        ({"secrets": {"X": {"key": "a", "arn": ARN}}}, "key needs a Secret of Kubernetes"),
        ({"secrets": {"X": {"arm": ARN}}}, "arn"),
    ],
)
def test_a_variable_that_cannot_be_set_or_would_be_shown_is_refused_with_its_key(keys, words):
    with pytest.raises(UsageError) as caught:
        workload("mnist", **keys)
    assert words in str(caught.value)
    for value in ("abc", "hunter2", "20261126"):
        assert value not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["EOS_TOKEN", "MAX_TOKENS", "TOKENIZERS_PARALLELISM", "NCCL_DEBUG", "KEY_COLUMN"]
)
def test_words_that_only_resemble_a_secret_are_plain_variables(name):
    assert workload("mnist", environment={name: "<eos>"}).environment == {name: "<eos>"}


def test_the_request_of_sagemaker_names_a_secret_and_has_plain_variables():
    told = {"WANDB_API_KEY": ARN, "DB": {"arn": SSM, "json_key": "url", "hosts": "all"}}
    body = plan_request(sagemaker_job(told)).body
    variables = body["Environment"]
    assert variables["WANDB_PROJECT"] == "digits"
    assert json.loads(variables["STOKER_FETCH_WANDB_API_KEY"]) == {"arn": ARN, "hosts": "dnn"}
    assert json.loads(variables["STOKER_FETCH_DB"]) == {
        "arn": SSM,
        "json_key": "url",
        "hosts": "all",
    }
    assert json.loads(variables["STOKER_SECRET_NAMES"]) == ["DB", "WANDB_API_KEY"]
    assert "WANDB_API_KEY" not in variables


@pytest.mark.parametrize(
    ("secrets", "patch", "words"),
    [
        ({"X": {"secret": "team"}}, {}, "needs an ARN"),
        ({"X": ARN}, {"Environment": {"X": "plain"}}, "sets the secret X"),
        ({"X": ARN}, {"EnableNetworkIsolation": True}, "EnableNetworkIsolation"),
    ],
)
def test_what_sagemakers_hosts_could_not_read_is_refused(secrets, patch, words):
    with pytest.raises(UsageError, match=words):
        plan_request(sagemaker_job(secrets, **patch))


@pytest.mark.parametrize("api", ["jobset", "trainer"])
def test_pods_read_secrets_by_reference_and_data_pods_only_their_own(api):
    told = {
        "WANDB_API_KEY": {"secret": "team", "arn": ARN},
        "DB": {"secret": "db", "key": "url", "hosts": "all"},
    }
    spec = kubernetes_jobs.job(settings={"api": api}, secrets=told, environment={"A": "$(B)"})
    request = KubernetesPlatform().plan(spec)
    found = request.main["spec"] if request.runtime is None else request.runtime["spec"]
    jobset = found if request.runtime is None else found["template"]["spec"]
    by_job = {}
    for job in jobset["replicatedJobs"]:
        (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
        by_job[job["name"]] = {each["name"]: each for each in container["env"]}
    data = by_job.pop("data")
    (dnn,) = by_job.values()
    of_db = {"secretKeyRef": {"name": "db", "key": "url"}}
    assert dnn["DB"]["valueFrom"] == data["DB"]["valueFrom"] == of_db
    of_wandb = {"secretKeyRef": {"name": "team", "key": "WANDB_API_KEY"}}
    assert dnn["WANDB_API_KEY"]["valueFrom"] == of_wandb
    assert "WANDB_API_KEY" not in data
    assert dnn["A"]["value"] == data["A"]["value"] == "$$(B)"


def test_a_secret_without_a_secret_of_kubernetes_is_refused_there():
    with pytest.raises(UsageError, match="needs a Secret of the job's namespace"):
        KubernetesPlatform().plan(kubernetes_jobs.job(secrets={"X": ARN}))


@pytest.mark.parametrize("api", ["jobset", "trainer"])
def test_all_pods_get_the_pull_secrets_and_a_patch_adds_to_them(api):
    settings = {
        "api": api,
        "image_pull_secrets": ["registry"],
        "data": {"pod": {"spec": {"imagePullSecrets": [{"name": "mirror"}]}}},
    }
    request = KubernetesPlatform().plan(kubernetes_jobs.job(settings=settings))
    found = request.main["spec"] if request.runtime is None else request.runtime["spec"]
    jobset = found if request.runtime is None else found["template"]["spec"]
    names = {
        job["name"]: [
            each["name"] for each in job["template"]["spec"]["template"]["spec"]["imagePullSecrets"]
        ]
        for job in jobset["replicatedJobs"]
    }
    assert names.pop("data") == ["registry", "mirror"]
    assert [*names.values()] == [["registry"]]


@pytest.mark.parametrize("given", [{}, {"HF_TOKEN": ""}])
def test_on_this_machine_a_secret_that_the_caller_lacks_is_refused_before_anything_starts(given):
    job = sagemaker_job({"HF_TOKEN": ARN, "WANDB_API_KEY": ARN})
    with pytest.raises(UsageError, match="HF_TOKEN is not set") as caught:
        check_secrets(job, {"WANDB_API_KEY": "abc", **given})
    assert caught.value.fix == "export HF_TOKEN=..."
    check_secrets(job, {"HF_TOKEN": "a", "WANDB_API_KEY": "b"})


REGISTRY = {"TrainingRepositoryAccessMode": "Vpc"}
LAMBDA = "arn:aws:lambda:eu-west-1:123456789012:function:registry-login"
VPC = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}


@pytest.mark.parametrize(
    ("config", "vpc", "image", "words"),
    [
        (REGISTRY, None, "registry.example/mnist:1", "reached through a VPC"),
        (
            {
                "TrainingRepositoryAccessMode": "Platform",
                "TrainingRepositoryAuthConfig": {
                    "TrainingRepositoryCredentialsProviderArn": LAMBDA
                },
            },
            VPC,
            "registry.example/mnist:1",
            "for a private registry",
        ),
        (REGISTRY, VPC, IMAGE, "an image in ECR"),
        (REGISTRY, VPC, "registry.example/mnist:1", ""),
    ],
)
def test_a_private_registry_of_sagemaker_needs_a_vpc(config, vpc, image, words):
    patch = {"AlgorithmSpecification": {"TrainingImageConfig": config}}
    if vpc:
        patch["VpcConfig"] = vpc
    spec = dataclasses.replace(sagemaker_job({}, **patch), image=image)
    if words:
        with pytest.raises(UsageError, match=words):
            plan_request(spec)
    else:
        found = plan_request(spec).body["AlgorithmSpecification"]
        assert found["TrainingImageConfig"] == config


def test_each_line_of_a_value_is_hidden_and_short_words_are_not():
    value = "-----BEGIN KEY-----\nabcdefgh\n-----END KEY-----\n"
    lines = ["-----BEGIN KEY-----", "-----END KEY-----", "abcdefgh"]
    assert sorted(parts_to_hide([value])) == [*lines[:1], value.strip(), *lines[1:]]
    assert parts_to_hide(["1", "12", "short"]) == []
    assert SecretSource(arn=ARN).is_for("dnn")
    assert not SecretSource(arn=ARN).is_for("data")
