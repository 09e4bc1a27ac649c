"""The request that plan() makes, and what is refused before it is sent; whole ones are golden."""

import dataclasses
import io
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.environment import RunEnvironment, from_environment
from stoker.errors import UsageError
from stoker.figures.gpu_log import words_for_log
from stoker.figures.step_progress import ProgressLog
from stoker.host.gpus import Gpu, GpuSample, GpuState
from stoker.launch.topology import from_resourceconfig
from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.checks import check_body, notes, problems
from stoker.platforms.sagemaker.request import REQUEST_TAG
from stoker.platforms.sagemaker.training_job import PROGRESS_METRICS
from stoker.records import Channel, FeedSettings, Json, StrategySettings, TrackingSettings
from stoker.records.training import Budget
from support.sagemaker_job import (
    DATA,
    DIGEST,
    DNN,
    SPOT,
    group,
    job,
    plan_body,
    profile_job,
    settings,
)
from support.sagemaker_rules import check_request, rule_problems

MLFLOW = "arn:aws:sagemaker:eu-central-1:123456789012:mlflow-tracking-server/team"


def channels(spec: JobSpec) -> dict[str, Mapping[str, Json]]:
    return {str(c["ChannelName"]): c for c in plan_body(spec)["InputDataConfig"]}


def environment(spec: JobSpec) -> dict[str, str]:
    return plan_body(spec)["Environment"]


def digest(spec: JobSpec) -> str:
    return next(tag["Value"] for tag in plan_body(spec)["Tags"] if tag["Key"] == REQUEST_TAG)


def test_what_a_pipe_streams_can_be_left_unwrapped():
    channel = Channel(
        uri="s3://bucket/boxes.jsonl",
        data_type="AugmentedManifestFile",
        mode="Pipe",
        attribute_names=("source-ref",),
        record_wrapper="None",
    )
    assert channels(job(channels={"boxes": channel}))["boxes"]["RecordWrapperType"] == "None"


def test_the_launcher_reads_what_the_request_tells_it():
    feed = FeedSettings(credits=4, lease_seconds=20.0)
    dnn = msgspec.structs.replace(DNN, processes_per_host=4, workers_per_host=0)
    settings = RunEnvironment(
        feed=feed,
        strategy=StrategySettings(name="torchrun"),
        replace_dataloader=True,
        workload_sha256=DIGEST,
    )
    spec = job(dnn, DATA, settings=settings)
    told = from_environment({**environment(spec), "TRAINING_JOB_NAME": spec.name})
    assert told.run_id == "mnist-1"
    assert told.feed == feed
    assert told.workers == {"dnn": 0}
    assert (told.strategy.name, told.processes_per_host) == ("torchrun", 4)
    assert told.replace_dataloader
    assert told.workload_sha256 == DIGEST
    assert told.profile is None
    assert told.token_file == Path("/opt/ml/input/data/stoker_token/token")
    assert told.code_file == Path("/opt/ml/input/data/stoker_code/code.tar.gz")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("dnn", "data"), None),
        (("gpu", "Data-1"), None),
        (("gpu", "cpu"), {"gpu": "dnn", "cpu": "data"}),
        (("datacenter", "cpu"), {"datacenter": "dnn", "cpu": "data"}),
        # The hosts of a job with one group do not learn its name.
        (("data-lovers",), None),
    ],
)
def test_roles_are_told_where_names_do_not_tell_them(names, told, tmp_path):
    roles = ("dnn", "data")[: len(names)]
    spec = job(*(group(role, name=name) for role, name in zip(roles, names, strict=True)))
    variables = environment(spec)
    assert variables.get("STOKER_ROLES") == (json.dumps(told) if told else None)
    hosts = ["algo-2", "algo-1"][: len(names)]
    groups = [
        {"instance_group_name": name, "hosts": [host]}
        for name, host in zip(names, hosts, strict=True)
    ]
    resources = {"current_host": "algo-2", "hosts": hosts}
    if len(groups) > 1:
        resources["instance_groups"] = groups
    variables["SM_RESOURCE_CONFIG"] = json.dumps(resources)
    topology = from_resourceconfig(tmp_path, variables)
    assert (topology.dnn_hosts, topology.data_hosts) == (("algo-2",), tuple(hosts[1:]))


@pytest.mark.parametrize(
    ("patch", "path", "words"),
    [
        # What stoker sets.
        ({"TrainingJobName": "mine"}, "TrainingJobName", "set by stoker"),
        ({"ResourceConfig": {"InstanceGroups": []}}, "ResourceConfig.Inst", "set by stoker"),
        ({"ResourceConfig": None}, "ResourceConfig", "set by stoker"),
        ({"Environment": {"STOKER_FEED": "{}"}}, "Environment.STOKER_FEED", "set by stoker"),
        (
            {"InputDataConfig": [{"ChannelName": "stoker_token", "ContentType": "x"}]},
            *("InputDataConfig[stoker_token]", "set by stoker"),
        ),
        ({"Tags": [{"Key": "stoker:x", "Value": "y"}]}, "Tags[stoker:x]", "set by stoker"),
        ({"CheckpointConfig": {"S3Uri": "s3://b/c"}}, "CheckpointConfig", "set by stoker"),
        # What the service does not know, or in another form.
        ({"VpcConfg": {"Subnets": ["subnet-1"]}}, "", "VpcConfg"),
        ({"RetryStrategy": {"MaximumRetryAttempts": "two"}}, "", "MaximumRetryAttempts"),
        ({"ResourceConfig": 3}, "ResourceConfig", "must be a mapping, found one value"),
        ({"Tags": [{"Value": "y"}]}, "Tags", "an item has no Key"),
        ({"InputDataConfig": [{"ChannelName": "trian"}]}, "Input", "unknown channel trian"),
    ],
)
def test_a_patch_that_cannot_be_is_refused(patch, path, words):
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        plan_body(job(sagemaker=settings(request=patch)))
    assert caught.value.where.startswith(f"key sagemaker.request{'.' if path else ''}{path}")


def test_a_patch_changes_stokers_defaults():
    channel = {"ChannelName": "train", "ContentType": "image/jpeg"}
    spec = job(sagemaker=settings(request={"RetryStrategy": None, "InputDataConfig": [channel]}))
    assert "RetryStrategy" not in plan_body(spec)
    assert channels(spec)["train"] == {**channels(job())["train"], **channel}


def test_checkpoints_belong_to_a_run_and_its_further_attempts():
    def folder(name: str, *, run: str | None = None, **changes: object) -> str:
        kept_at = settings(checkpoint_uri="s3://bucket/kept/", **changes)
        return plan_body(job(name=name, run=run, sagemaker=kept_at))["CheckpointConfig"]["S3Uri"]

    assert folder("mnist-1") == "s3://bucket/kept/mnist-1"
    assert folder("mnist-2") == "s3://bucket/kept/mnist-2"
    assert folder("mnist-1-2", run="mnist-1") == "s3://bucket/kept/mnist-1"
    warm = "s3://bucket/kept/mnist-1"
    assert folder("mnist-2", resume_from=warm) == warm


def test_file_systems_are_channels_of_all_groups_in_a_vpc():
    network = {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1"]}
    vpc = settings(request={"VpcConfig": network})
    disks = {
        "train": Channel(uri="fsx://fs-0123456789abcdef0/mount/mnist"),
        "words": Channel(uri="efs://fs-01234567/words"),
    }
    found = channels(job(channels=disks, sagemaker=vpc))
    assert found["train"]["DataSource"] == {
        "FileSystemDataSource": {
            "FileSystemId": "fs-0123456789abcdef0",
            "FileSystemAccessMode": "ro",
            "FileSystemType": "FSxLustre",
            "DirectoryPath": "/mount/mnist",
        }
    }
    with pytest.raises(UsageError, match="through a VPC"):
        plan_body(job(channels=disks))
    piped = {"a": Channel(uri="efs://fs-01234567/a", mode="Pipe")}
    with pytest.raises(UsageError, match="is a file system"):
        plan_body(job(channels=piped, sagemaker=vpc))
    some = {**disks, "labels": Channel(uri="s3://bucket/labels", groups=("data",))}
    with pytest.raises(UsageError, match="all groups mount"):
        plan_body(job(channels=some, sagemaker=vpc))


def metrics_in(lines: str) -> list[float]:
    found = [re.search(metric["Regex"], lines) for metric in PROGRESS_METRICS]
    return [float(match.group(1)) for match in found if match]


@pytest.mark.parametrize("seconds", [(0.1923, 0.0), (12.5, 3e-06), (1.23456789e-05, 1234567.0)])
def test_the_metric_definitions_read_numbers_of_any_size_in_progress_lines_alone(seconds):
    stream = io.StringIO()
    log = Log(run="mnist 1", host="algo-1", stream=stream)
    log.event("steady", steps=3, step_seconds=7.0, wait_seconds=7.0)
    assert metrics_in(stream.getvalue()) == []
    log.event("progress", steps=1200, step_seconds=seconds[0], wait_seconds=seconds[1])
    assert metrics_in(stream.getvalue()) == pytest.approx(seconds, rel=1e-5)


def test_the_metric_definitions_read_how_busy_the_gpus_are():
    stream = io.StringIO()
    log = Log(run="mnist 1", host="algo-1", stream=stream)
    state = GpuState(gpu=Gpu(index=0, uuid="GPU-1"), sample=GpuSample(utilization=0.28))
    log.event("gpu_load", **words_for_log({"algo-1": (state,)}))
    assert metrics_in(stream.getvalue()) == [0.28]
    silent = GpuState(gpu=Gpu(index=0, uuid="MIG-1"), sample=GpuSample(memory_bytes=2e9))
    log.event("gpu_load", **words_for_log({"algo-1": (silent,)}))
    assert metrics_in(stream.getvalue().splitlines()[-1]) == []


def test_the_metric_definitions_read_what_the_progress_log_writes(tmp_path):
    timeline = tmp_path / "timeline-rank0.csv"
    head = "loader,epoch,batch,start_seconds,wait_seconds,compute_seconds,samples,steps,weight"
    rows = [head, *["0,0,0,0.0,0.125,0.125,8,1,1"] * 3]
    timeline.write_text("\n".join(rows) + "\n", encoding="utf-8")
    stream = io.StringIO()
    log = Log(run="r", host="h", stream=stream)
    progress = ProgressLog(tmp_path, log, spent_usd=lambda: 1.5)
    progress.tick()
    progress.close()
    assert metrics_in(stream.getvalue()) == [0.25, 0.125, 0.25, 1.5]


def test_the_requests_digest_changes_with_the_job_alone():
    first = digest(job())
    tagged = settings(request={"Tags": [{"Key": "a", "Value": "b"}]})
    # An attempt that reaches MLflow has these variables, one that does not has none.
    mlflow = {"MLFLOW_TRACKING_URI": "https://mlflow", "MLFLOW_RUN_ID": "0a1b"}
    limited = dataclasses.replace(job().settings, budget=Budget(max_usd=9.0))
    for same in (
        job(sagemaker=tagged),
        job(run_dir=Path("elsewhere/mnist-1")),
        job(environment=mlflow),
        # Prices may change between attempts, and the user may raise the limit.
        dataclasses.replace(job(), settings=limited),
    ):
        assert digest(same) == first
    for other in (job(command=("python", "train.py")), job(DNN, group("data", count=3))):
        assert digest(other) != first


def test_figures_go_to_the_services_own_mlflow_and_tensorboard():
    told = TrackingSettings(mlflow=MLFLOW, experiment="mnist", tensorboard=True)
    found = plan_body(job(tracking=told))
    assert found["MlflowConfig"] == {
        "MlflowResourceArn": MLFLOW,
        "MlflowExperimentName": "mnist",
        "MlflowRunName": "mnist-1",
    }
    place = "/opt/ml/output/tensorboard"
    assert found["TensorBoardOutputConfig"] == {
        "S3OutputPath": "s3://bucket/out/mnist-1/tensorboard",
        "LocalPath": place,
    }
    assert found["Environment"]["STOKER_TENSORBOARD"] == place
    assert found["Environment"]["MLFLOW_TRACKING_URI"] == MLFLOW
    # A profile is no training to compare with others.
    profiled = plan_body(dataclasses.replace(profile_job(), tracking=told))
    assert not {"MlflowConfig", "TensorBoardOutputConfig"} & set(profiled)


def test_spot_without_checkpoints_is_told():
    body = plan_body(job(DNN, sagemaker=settings(request=SPOT, max_run_seconds=3600)))
    said = "without sagemaker.checkpoint_uri an interrupted job starts from scratch"
    assert notes(body) == [said]


Body = dict[str, Json]
WARM = {"KeepAlivePeriodInSeconds": 60}
ON_PLAN = {"TrainingPlanArn": "arn:aws:sagemaker:eu-west-1:123456789012:training-plan/p"}
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


def hetero_reading(*channels: Json) -> Body:
    return hetero() | {"InputDataConfig": [*channels]}


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
OF_DATA = channel("a", InstanceGroupNames=["data"])
ZIPPED = channel("a", CompressionType="Gzip", InputMode="FastFile")
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
        (lambda: hetero_reading(OF_DATA, OF_DATA), "2 channels are called a"),
        (
            lambda: hetero_reading(OF_DATA, channel("b")),
            "one channel with groups means all channels with groups",
        ),
        (lambda: reading(channel("a", InstanceGroupNames=["gpu"])), "no instance group gpu"),
        (lambda: reading(channel("a", S3Uri="https://bucket/x")), "not an s3:// address"),
        (lambda: reading(ZIPPED), "Gzip is for mode Pipe"),
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
