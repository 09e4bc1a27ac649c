"""Jobs that users write and SageMaker would refuse are refused before anything is sent.

What stoker alone writes is held against the rules of support.sagemaker_rules.
"""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.platforms.sagemaker.checks import check_body, problems
from stoker.records import Channel, Json
from support.sagemaker_job import DATA, DNN, SPOT, group, job, plan_body, settings
from support.sagemaker_rules import check_request, rule_problems

Body = dict[str, Json]
WARM = {"KeepAlivePeriodInSeconds": 60}
VPC = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}


def channel(name: str, **changes: Json) -> Body:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/x"}
    for key in ("S3DataType", "S3Uri", "AttributeNames", "InstanceGroupNames"):
        if key in changes:
            source[key] = changes.pop(key)
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **changes}


def augmented(**changes: Json) -> Body:
    return channel("a", S3DataType="AugmentedManifestFile", **changes)


def file_system(**changes: Json) -> Body:
    source = {
        "FileSystemId": "fs-0123456789",
        "FileSystemAccessMode": "ro",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/data",
    }
    return {"ChannelName": "a", "DataSource": {"FileSystemDataSource": source}, **changes}


def hetero(**resources: Json) -> Body:
    body = plan_body(job())
    body["ResourceConfig"] |= resources
    return body


def homogeneous(kind: str = DNN.instance_type, **changes: Json) -> Body:
    return plan_body(job(group("dnn", kind))) | changes


def reading(*channels: Json) -> Body:
    return homogeneous(InputDataConfig=list(channels))


def in_container(**changes: Json) -> Body:
    body = homogeneous()
    body["AlgorithmSpecification"] |= changes
    return body


def without_volume(kind: str) -> Body:
    body = homogeneous(kind)
    del body["ResourceConfig"]["VolumeSizeInGB"]
    return body


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (augmented(AttributeNames=["x"]), "needs mode Pipe, not File"),
        (augmented(AttributeNames=["x"], InputMode="FastFile"), "needs mode Pipe, not FastFile"),
        (augmented(InputMode="Pipe"), "need each other"),
        (channel("a", AttributeNames=["x"], InputMode="Pipe"), "need each other"),
        (channel("a", RecordWrapperType="RecordIO"), "RecordIO is for mode Pipe only"),
    ],
)
def test_a_channel_that_the_service_refuses_is_refused(read, words):
    with pytest.raises(UsageError, match=words):
        check_body(reading(read))


def test_the_jobs_mode_counts_where_a_channel_has_none():
    body = in_container(TrainingInputMode="Pipe")
    body["InputDataConfig"] = [channel("a", RecordWrapperType="RecordIO")]
    check_body(body)


NAMED = {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1}
EMPTY = {**NAMED, "InstanceCount": 0}
PREFERENCES = [{"InstanceType": "ml.c5.xlarge"}]
DISTRIBUTION = "sagemaker_distribution_instance_groups"


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: hetero(InstanceType="ml.c5.xlarge"), "groups and InstanceType exclude"),
        (lambda: hetero(InstanceCount=1), "groups and InstanceCount exclude"),
        (lambda: hetero(InstancePreferences=PREFERENCES), "groups and InstancePreferences"),
        (lambda: hetero(InstanceGroups=[NAMED, NAMED]), "2 instance groups are called data"),
        (lambda: hetero(InstanceGroups=[NAMED, EMPTY]), "without hosts"),
        (lambda: homogeneous(ResourceConfig={"VolumeSizeInGB": 10}), "names no hosts"),
        (lambda: without_volume("ml.c7i.large"), "the volume's size is missing"),
        (
            lambda: hetero() | {"InputDataConfig": [channel("a", InstanceGroupNames=["data"])] * 2},
            "2 channels are called a",
        ),
        (
            lambda: (
                hetero()
                | {"InputDataConfig": [channel("a", InstanceGroupNames=["data"]), channel("b")]}
            ),
            "one channel with groups means all channels with groups",
        ),
        (lambda: reading(channel("a", InstanceGroupNames=["gpu"])), "no instance group gpu"),
        (lambda: reading(channel("a", S3Uri="https://bucket/x")), "not an s3:// address"),
        (
            lambda: reading(channel("a", CompressionType="Gzip", InputMode="FastFile")),
            "Gzip is for mode Pipe",
        ),
        (lambda: reading({"ChannelName": "a", "DataSource": {}}), "one source"),
        (lambda: reading(file_system()), "through a VPC only"),
        (lambda: reading(file_system(InputMode="Pipe")) | {"VpcConfig": VPC}, "read in mode File"),
        (lambda: homogeneous(Tags=[{"Key": "a", "Value": ""}] * 2), "2 tags are called a"),
        (lambda: homogeneous(HyperParameters={DISTRIBUTION: '["a", "b"]'}), "one distribution"),
        (lambda: in_container(AlgorithmName="mine"), "one image"),
        (
            lambda: in_container(TrainingImageConfig={"TrainingRepositoryAccessMode": "Vpc"}),
            "private registry is reached through a VPC",
        ),
        (lambda: {"InputDataConfig": [None]}, "not as the API's model says"),
    ],
)
def test_what_our_code_alone_could_get_wrong_breaks_a_rule(made: Callable[[], Body], words: str):
    assert any(words in problem.what for problem in rule_problems(made()))


@pytest.mark.parametrize("kind", ["ml.p4d.24xlarge", "ml.r5d.large", "ml.trn1.2xlarge"])
def test_what_the_service_takes_breaks_none(kind):
    check_request(without_volume(kind))
    check_request(reading(file_system()) | {"VpcConfig": VPC})
    check_request(hetero() | {"HyperParameters": {DISTRIBUTION: '["dnn"]'}})


def test_what_botocore_refuses_is_refused_with_all_of_its_words():
    body = hetero() | {"TrainingJobNme": "x", "Environment": {"A": 3}}
    del body["RoleArn"]
    with pytest.raises(UsageError) as caught:
        check_body(body)
    for word in ("RoleArn", "TrainingJobNme", "Environment.A"):
        assert word in caught.value.what


def test_all_problems_of_a_request_can_be_listed():
    found = list(problems(hetero(**WARM) | {"EnableManagedSpotTraining": True}))
    assert len(found) == 2
    assert all(problem.fix for problem in found)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(sagemaker=None), "no settings for SageMaker"),
        (job(image=None), "no image"),
        (job(sagemaker=settings(entrypoint=("stoker", "launch"))), "must end with --"),
        (job(DNN, *(group("data", name=f"data-{i}") for i in range(6))), "at most 5 .* found 7"),
        (job(DNN, group("data", "local.c2")), "local mode"),
        (job(group("dnn", "ml.g5.2xlrge"), DATA), "did you mean ml.g5.2xlarge"),
        (job(group("dnn", "g5.2xlrge")), "no instance type ml.g5.2xlrge"),
        (job(name="mnist_1"), "invalid run name"),
        (job(channels={"train": Channel(uri="data/mnist")}), "and FSx for Lustre, not data/mnist"),
        (job(channels={"stoker_token": Channel(uri="s3://b/x")}), "is reserved"),
        (job(channels={"stoker_code": Channel(uri="s3://b/x")}), "is reserved"),
        (job(sagemaker=settings(source="https://host/code.tar.gz")), "not from https://host"),
        (job(sagemaker=settings(source="s3://bucket/code")), "not from s3://bucket/code"),
        (job(sagemaker=settings(request={"ResourceConfig": WARM})), "have no warm pools"),
        (job(sagemaker=settings(request=SPOT, max_run_seconds=60)), "managed spot with instance"),
    ],
)
def test_a_job_that_sagemaker_cannot_run_is_refused(spec, words):
    with pytest.raises(UsageError) as caught:
        plan_body(spec)
    assert re.search(words, str(caught.value))


simple_channels = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.builds(
        Channel,
        uri=st.just("s3://bucket/x"),
        groups=st.none() | st.sets(st.sampled_from(["dnn", "data"]), min_size=1).map(tuple),
    ),
    max_size=5,
)


@given(channels=simple_channels, num_groups=st.integers(1, 5))
def test_a_job_with_any_channels_and_groups_breaks_no_rule(channels, num_groups):
    more = [group("data", name=f"data-{number}") for number in range(num_groups - 1)]
    check_request(plan_body(job(DNN, *more, channels=channels)))
