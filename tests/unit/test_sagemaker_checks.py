"""Jobs that users write and SageMaker would refuse are refused before anything is sent.

What stoker alone writes is held against the same rules here, whatever the job.
"""

import json
from pathlib import Path

import pytest
from botocore.validate import ParamValidator
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.platforms.sagemaker import checks
from stoker.platforms.sagemaker.checks import check_body, problems
from stoker.records import Channel, Json
from support.sagemaker_job import DATA, DNN, full_job, group, job, plan_body, settings
from support.sagemaker_rules import MODEL, SHAPE, check_request, rule_problems


def botocore_accepts(body: dict[str, Json]) -> bool:
    return not ParamValidator().validate(body, SHAPE).has_errors()


def refused(body: dict[str, Json], words: str) -> UsageError:
    assert botocore_accepts(body)
    with pytest.raises(UsageError, match=words) as caught:
        check_body(body)
    return caught.value


def broken(body: dict[str, Json], words: str) -> UsageError:
    assert botocore_accepts(body)
    with pytest.raises(UsageError, match=words) as caught:
        check_request(body)
    return caught.value


def named_groups(*names: str) -> list[Json]:
    return [
        {"InstanceGroupName": name, "InstanceType": "ml.c5.xlarge", "InstanceCount": 1}
        for name in names
    ]


def channel(name: str, **changes: Json) -> dict[str, Json]:
    source = {"S3DataType": "S3Prefix", "S3Uri": "s3://bucket/x"}
    for key in ("S3DataType", "S3Uri", "AttributeNames", "InstanceGroupNames"):
        if key in changes:
            source[key] = changes.pop(key)
    return {"ChannelName": name, "DataSource": {"S3DataSource": source}, **changes}


def hetero() -> dict[str, Json]:
    return plan_body(job())


def homogeneous() -> dict[str, Json]:
    return plan_body(job(DNN))


# What botocore, SageMaker's SDK and moto accept.


def test_seven_groups_are_refused():
    body = hetero()
    body["ResourceConfig"]["InstanceGroups"] = named_groups("dnn", *"abcdef")
    assert "at most 5 instance groups, found 7" in str(refused(body, "instance groups"))


def test_mixed_channels_are_refused():
    body = hetero()
    body["InputDataConfig"] = [channel("a", InstanceGroupNames=["data"]), channel("b")]
    error = broken(body, "one channel with groups means all channels with groups")
    assert error.where == "channel b"


@pytest.mark.parametrize(
    "more",
    [
        {"InstanceType": "ml.c5.xlarge"},
        {"InstanceCount": 1},
        {"InstancePreferences": [{"InstanceType": "ml.c5.xlarge"}]},
    ],
)
def test_groups_exclude_type_and_count(more):
    body = hetero()
    body["ResourceConfig"] |= more
    broken(body, f"instance groups and {next(iter(more))} exclude each other")


@pytest.mark.parametrize("form", [hetero, homogeneous])
def test_an_unknown_type_is_refused_with_the_nearest_one(form):
    text = json.dumps(form()).replace("ml.g5.2xlarge", "ml.g5.2xlrge")
    error = refused(json.loads(text), "SageMaker has no instance type ml.g5.2xlrge")
    assert error.fix == "did you mean ml.g5.2xlarge?"


def test_spot_with_groups_is_refused():
    body = hetero() | {"EnableManagedSpotTraining": True}
    body["StoppingCondition"] = {"MaxRuntimeInSeconds": 60, "MaxWaitTimeInSeconds": 90}
    refused(body, "managed spot with instance groups")


def test_keep_alive_with_groups_is_refused():
    body = hetero()
    body["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 600
    refused(body, "instance groups have no warm pools")


# More of the same.


def test_groups_of_one_name_are_refused():
    body = hetero()
    body["InputDataConfig"] = [channel("a")]
    body["ResourceConfig"]["InstanceGroups"] = named_groups("dnn", "data", "data")
    broken(body, "2 instance groups are called data")


def test_a_group_without_hosts_is_refused():
    body = hetero()
    body["ResourceConfig"]["InstanceGroups"][1]["InstanceCount"] = 0
    assert broken(body, "without hosts").where == "group data"


def test_a_request_without_hosts_is_refused():
    body = homogeneous()
    body["ResourceConfig"] = {"VolumeSizeInGB": 10}
    broken(body, "names no hosts")


@pytest.mark.parametrize("form", [hetero, homogeneous])
def test_a_channel_of_an_unknown_group_is_refused(form):
    body = form() | {"InputDataConfig": [channel("a", InstanceGroupNames=["gpu"])]}
    broken(body, "there is no instance group gpu")


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        (
            [channel("a", S3DataType="AugmentedManifestFile", AttributeNames=["x"])],
            "needs mode Pipe, not File",
        ),
        (
            [
                channel(
                    "a",
                    S3DataType="AugmentedManifestFile",
                    AttributeNames=["x"],
                    InputMode="FastFile",
                )
            ],
            "needs mode Pipe, not FastFile",
        ),
        ([channel("a", S3DataType="AugmentedManifestFile", InputMode="Pipe")], "need each other"),
        ([channel("a", AttributeNames=["x"], InputMode="Pipe")], "need each other"),
        ([channel("a", RecordWrapperType="RecordIO")], "RecordIO is for mode Pipe only"),
    ],
)
def test_a_channel_that_the_service_refuses_is_refused(channels, words):
    refused(homogeneous() | {"InputDataConfig": channels}, words)


@pytest.mark.parametrize(
    ("channels", "words"),
    [
        ([channel("a"), channel("a")], "2 channels are called a"),
        ([channel("a", S3Uri="https://bucket/x")], "not an s3:// address"),
        ([channel("a", CompressionType="Gzip", InputMode="FastFile")], "Gzip is for mode Pipe"),
        ([{"ChannelName": "a", "DataSource": {}}], "one source"),
    ],
)
def test_a_channel_that_none_of_our_code_may_make_is_refused(channels, words):
    broken(homogeneous() | {"InputDataConfig": channels}, words)


def file_system(**changes: Json) -> dict[str, Json]:
    source = {
        "FileSystemId": "fs-0123456789",
        "FileSystemAccessMode": "ro",
        "FileSystemType": "FSxLustre",
        "DirectoryPath": "/data",
    }
    return {"ChannelName": "a", "DataSource": {"FileSystemDataSource": source}, **changes}


VPC = {"SecurityGroupIds": ["sg-1"], "Subnets": ["subnet-1"]}


def test_a_file_system_is_read_through_a_vpc_in_file_mode():
    body = homogeneous() | {"InputDataConfig": [file_system()]}
    broken(body, "through a VPC only")
    check_request(body | {"VpcConfig": VPC})
    piped = body | {"VpcConfig": VPC, "InputDataConfig": [file_system(InputMode="Pipe")]}
    broken(piped, "read in mode File")


def test_the_jobs_mode_counts_where_a_channel_has_none():
    body = homogeneous()
    body["InputDataConfig"] = [channel("a", RecordWrapperType="RecordIO")]
    body["AlgorithmSpecification"]["TrainingInputMode"] = "Pipe"
    check_body(body)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"Tags": [{"Key": "a", "Value": ""}] * 2}, "2 tags are called a"),
        (
            {"HyperParameters": {"sagemaker_distribution_instance_groups": '["a", "b"]'}},
            "one distribution",
        ),
    ],
)
def test_a_request_that_none_of_our_code_may_make_is_refused(changes, words):
    broken(homogeneous() | changes, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"AlgorithmName": "mine"}, "one image"),
        (
            {"TrainingImageConfig": {"TrainingRepositoryAccessMode": "Vpc"}},
            "private registry is reached through a VPC",
        ),
    ],
)
def test_a_container_that_none_of_our_code_may_make_is_refused(changes, words):
    body = homogeneous()
    body["AlgorithmSpecification"] |= changes
    broken(body, words)


def test_one_distribution_on_a_known_group_is_accepted():
    named = {"HyperParameters": {"sagemaker_distribution_instance_groups": '["dnn"]'}}
    check_request(hetero() | named)


def test_what_botocore_refuses_is_refused_with_all_of_its_words():
    body = hetero() | {"TrainingJobNme": "x", "Environment": {"A": 3}}
    del body["RoleArn"]
    with pytest.raises(UsageError) as caught:
        check_request(body)
    for word in ("RoleArn", "TrainingJobNme", "Environment.A"):
        assert word in caught.value.what


def test_all_problems_of_a_request_can_be_listed():
    body = hetero() | {"EnableManagedSpotTraining": True}
    body["ResourceConfig"]["KeepAlivePeriodInSeconds"] = 60
    found = [problem.what for problem in problems(body)]
    assert len(found) == 2
    assert all(problem.fix for problem in problems(body))


@pytest.mark.parametrize("garbage", [{}, {"ResourceConfig": 3}, {"InputDataConfig": [None]}])
def test_a_request_of_any_shape_gets_an_answer(garbage):
    with pytest.raises(UsageError):
        check_request(garbage)


# Limits come from the model.


def test_limits_are_those_of_the_installed_model():
    assert (
        checks.maximum("InstanceGroups")
        == SHAPE.members["ResourceConfig"].members["InstanceGroups"].metadata["max"]
    )
    assert set(checks.choices("TrainingInstanceType")) == set(
        MODEL.shape_for("TrainingInstanceType").enum
    )


# What only a job can tell.


SPOT = {"EnableManagedSpotTraining": True}
WAIT = {"StoppingCondition": {"MaxWaitTimeInSeconds": 90000}}
WARM = {"KeepAlivePeriodInSeconds": 60}


def patched(request, *groups):
    return job(*groups, sagemaker=settings(request=request))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (job(sagemaker=None), "no settings for SageMaker"),
        (job(image=None), "no image"),
        (job(command=()), "no command"),
        (job(sagemaker=settings(entrypoint=("stoker", "launch"))), "must end with --"),
        (job(DATA, DNN), "exactly one dnn group, as its first group"),
        (job(DNN, group("dnn", name="more")), "exactly one dnn group"),
        (job(DNN, *(group("data", name=f"data-{i}") for i in range(5))), "at most 5 instance"),
        (job(DNN, group("data", name="dnn")), "duplicate group name dnn"),
        (job(DNN, group("data", "local.c2")), "local mode"),
        (job(DNN, group("data", "ml.c7i.5xlarge")), "no instance type ml.c7i.5xlarge"),
        (job(name="mnist_1"), "invalid run name"),
        (job(channels={"train": Channel(uri="data/mnist")}), "and FSx for Lustre, not data/mnist"),
        (job(channels={"stoker_token": Channel(uri="s3://b/x")}), "stoker's own"),
        (job(channels={"stoker_code": Channel(uri="s3://b/x")}), "stoker's own"),
        (job(sagemaker=settings(source="https://host/code.tar.gz")), "not from https://host"),
        (job(sagemaker=settings(source="s3://bucket/code")), "not from s3://bucket/code"),
        (patched({"ResourceConfig": WARM}), "have no warm pools"),
        (patched({**SPOT, **WAIT}), "managed spot with instance"),
    ],
)
def test_a_job_that_sagemaker_cannot_run_is_refused(spec, words):
    with pytest.raises(UsageError, match=words):
        plan_body(spec)


@pytest.mark.parametrize(
    "kind", ["ml.p4d.24xlarge", "ml.r5d.large", "ml.trn1.2xlarge", "ml.g7e.2xlarge"]
)
def test_types_with_disks_of_their_own_need_no_volume(kind):
    body = plan_body(job(group("dnn", kind)))
    del body["ResourceConfig"]["VolumeSizeInGB"]
    check_body(body)


@pytest.mark.parametrize("kind", ["ml.c7i.large", "ml.m7i-flex.large", "ml.p3.2xlarge"])
def test_other_types_need_a_volume(kind):
    body = plan_body(job(group("dnn", kind)))
    del body["ResourceConfig"]["VolumeSizeInGB"]
    broken(body, "the volume's size is missing")


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
def test_every_planned_channel_names_groups_or_none_does(channels, num_groups):
    more = [group("data", name=f"data-{number}") for number in range(num_groups - 1)]
    body = plan_body(job(DNN, *more, channels=channels))
    sources = [item["DataSource"]["S3DataSource"] for item in body["InputDataConfig"]]
    assert len({"InstanceGroupNames" in source for source in sources}) == 1
    for name, source in zip(sorted(channels), sources, strict=False):
        expected = {DNN.name, *(g.name for g in more)}
        wanted = channels[name].groups
        if wanted and more:
            roles = set(wanted)
            expected = {g.name for g in (DNN, *more) if g.role in roles}
        found = source.get("InstanceGroupNames")
        assert set(found or expected) == expected


def test_the_golden_requests_break_no_rule():
    assert not list(rule_problems(plan_body(full_job())))
    assert not list(rule_problems(hetero()))
    folder = Path(__file__).parents[1] / "contract" / "sagemaker_requests"
    for path in folder.glob("*.json"):
        check_request(json.loads(path.read_text(encoding="utf-8"))["CreateTrainingJob"])
