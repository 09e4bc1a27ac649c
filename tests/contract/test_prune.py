"""`stoker prune` against moto: what is named stays, what nothing names goes."""

import json
from datetime import UTC, datetime, timedelta

import botocore.client
import pytest

from stoker.errors import ServiceError
from stoker.pipelines.sagemaker import prune
from stoker.pipelines.sagemaker.prune import delete_folder, left_folders
from stoker.platforms.aws import Aws
from stoker.records import Workload
from support.command import stoker
from support.sagemaker_uploads import BUCKET, REGION, ROLE, SCHEDULE_ROLE, WORKLOAD, workload

OUT = f"s3://{BUCKET}/out"
LATER = datetime.now(UTC) + timedelta(days=40)
# Digests of inputs, and ids of runs.
OLD, NEW, SCHEDULED, GONE = (letter * 16 for letter in "abcd")
RUN, REGISTERED = "r1r1r1r1r1r1", "r2r2r2r2r2r2"


def definition(digest: str) -> str:
    step = {"Name": "Train", "Arguments": {"uri": f"{OUT}/stoker/inputs/{digest}/workload.json"}}
    return json.dumps({"Version": "2020-12-01", "Parameters": [], "Steps": [step]})


@pytest.fixture
def versions(monkeypatch):
    """The versions of pipelines, which moto does not keep: definitions by pipeline and number."""
    kept: dict[str, dict[int, str]] = {}
    call = botocore.client.BaseClient._make_api_call

    def with_versions(client, operation, asked):
        # As the service: newest first.
        name = asked.get("PipelineName")
        if operation == "ListPipelineVersions":
            numbers = sorted(kept.get(name, {}), reverse=True)
            return {"PipelineVersionSummaries": [{"PipelineVersionId": n} for n in numbers]}
        if operation == "DescribePipeline" and "PipelineVersionId" in asked:
            text = kept[name][asked["PipelineVersionId"]]
            return {"PipelineName": name, "PipelineDefinition": text}
        return call(client, operation, asked)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", with_versions)
    return kept


@pytest.fixture
def aws(aws_server, versions):
    """An account with a pipeline, another workload's, a schedule, inputs and runs."""
    aws_server.make_bucket(BUCKET)
    aws = Aws(region=REGION)
    for digest in (OLD, NEW, SCHEDULED, GONE):
        aws.write_object(f"{OUT}/stoker/inputs/{digest}/workload.json", b"{}")
        aws.write_object(f"{OUT}/stoker/inputs/{digest}/code.tar.gz", b"1" * 1000)
    for run in (RUN, REGISTERED):
        aws.write_object(f"{OUT}/pipelines/mnist/{run}/training.json", b"{}")
        aws.write_object(f"{OUT}/mnist-{run}/output/model.tar.gz", b"2" * 5000)
    make_pipeline(aws, "mnist", NEW)
    return aws


def make_pipeline(aws: Aws, name: str, digest: str) -> str:
    asked = {"PipelineName": name, "PipelineDefinition": definition(digest), "RoleArn": ROLE}
    token = {"ClientRequestToken": f"{name}{'0' * 32}"}
    return str(aws.call("sagemaker", "CreatePipeline", **asked, **token)["PipelineArn"])


def register(aws: Aws, address: str) -> None:
    group = {"ModelPackageGroupName": "mnist"}
    aws.call("sagemaker", "CreateModelPackageGroup", **group)
    container = {"Image": "image", "ModelDataUrl": address}
    asked = {"SupportedContentTypes": ["text/csv"], "SupportedResponseMIMETypes": ["text/csv"]}
    specification = {"Containers": [container], **asked}
    aws.call("sagemaker", "CreateModelPackage", **group, InferenceSpecification=specification)


def left(aws: Aws, of: Workload | None = None, *, days: float = 30) -> list[str]:
    folders = left_folders(of or workload(), aws=aws, older_than_days=days, now=LATER)
    return sorted(folder.uri.removeprefix(f"{OUT}/") for folder in folders)


ALL_RUNS = [f"{kind}{run}/" for kind in ("mnist-", "pipelines/mnist/") for run in (RUN, REGISTERED)]


def inputs(*digests: str) -> list[str]:
    return [f"stoker/inputs/{digest}/" for digest in digests]


def test_only_what_the_definition_names_is_kept(aws):
    assert left(aws) == sorted([*ALL_RUNS, *inputs(OLD, SCHEDULED, GONE)])


def test_an_older_version_another_pipeline_and_a_schedule_keep_inputs(aws, versions):
    versions["mnist"] = {1: definition(OLD), 2: definition(NEW)}
    make_pipeline(aws, "other", GONE)
    target = {"Arn": f"arn:aws:sagemaker:{REGION}:123456789012:pipeline/mnist"}
    parameter = {"Name": "Inputs", "Value": f"{OUT}/stoker/inputs/{SCHEDULED}"}
    parameters = {"PipelineParameterList": [parameter]}
    aws.call(
        "scheduler",
        "CreateSchedule",
        Name="nightly",
        ScheduleExpression="rate(1 day)",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target={**target, "RoleArn": SCHEDULE_ROLE, "SageMakerPipelineParameters": parameters},
    )
    assert left(aws) == sorted(ALL_RUNS)


@pytest.mark.parametrize(
    "address",
    [f"{OUT}/mnist-{REGISTERED}/output/model.tar.gz", f"{OUT}/pipelines/mnist/{REGISTERED}/a.json"],
)
def test_a_registered_model_keeps_all_of_its_run(aws, address):
    register(aws, address)
    of_runs = [uri for uri in left(aws) if "inputs" not in uri]
    assert of_runs == [f"mnist-{RUN}/", f"pipelines/mnist/{RUN}/"]


def test_branches_and_attempts_of_a_run_are_of_the_run(aws):
    for name in (f"pipelines/mnist/{RUN}-low/a", f"mnist-{RUN}-low/a", f"mnist-{RUN}-2/a"):
        aws.write_object(f"{OUT}/{name}", b"1")
    of_run = [uri for uri in left(aws) if RUN in uri]
    assert len(of_run) == 5
    register(aws, f"{OUT}/mnist-{RUN}-low/model.tar.gz")
    assert [uri for uri in left(aws) if RUN in uri] == []


def test_an_active_run_is_kept(aws):
    arn = aws.call("sagemaker", "StartPipelineExecution", PipelineName="mnist")
    run_id = str(arn["PipelineExecutionArn"]).rpartition("/")[2]
    aws.write_object(f"{OUT}/pipelines/mnist/{run_id}/a", b"1")
    status = aws.call(
        "sagemaker", "DescribePipelineExecution", PipelineExecutionArn=arn["PipelineExecutionArn"]
    )
    is_active = status["PipelineExecutionStatus"] in ("Executing", "InProgress", "Starting")
    assert (f"pipelines/mnist/{run_id}/" in left(aws)) != is_active


@pytest.mark.parametrize(("days", "cache_days", "num"), [(39, 0, 7), (41, 0, 0), (1, 41, 0)])
def test_what_is_young_or_may_be_used_again_is_kept(aws, days, cache_days, num):
    of = workload(f"sagemaker.cache_days={cache_days}")
    assert len(left(aws, of, days=days)) == num


def test_other_workloads_and_other_folders_are_never_touched(aws):
    others = ["pipelines/mnist2/x/a", "mnist-stage-x/a", "mnist-handmade/a", "stoker/jobs/a/b"]
    for name in others:
        aws.write_object(f"{OUT}/{name}", b"1")
    assert not set(left(aws)) & {f"{name.rpartition('/')[0]}/" for name in others}


def test_more_than_a_page_of_objects_is_counted_and_deleted(aws, monkeypatch):
    # As many as the service takes in one request; here fewer, for objects take 7 ms each.
    assert prune._MAX_KEYS == 1000
    monkeypatch.setattr(prune, "_MAX_KEYS", 3)
    pages, deleted = [], []

    def in_pages_of_two(params, **_):
        pages.append(params)
        return {**params, "MaxKeys": 2}

    events = aws.client("s3").meta.events
    events.register("provide-client-params.s3.ListObjectsV2", in_pages_of_two)
    events.register(
        "provide-client-params.s3.DeleteObjects",
        lambda params, **_: deleted.append(len(params["Delete"]["Objects"])),
    )
    for number in range(5):
        aws.write_object(f"{OUT}/stoker/inputs/{GONE}/{number}", b"1")
    folders = left_folders(workload(), aws=aws, older_than_days=1, now=LATER)
    (folder,) = [each for each in folders if GONE in each.uri]
    assert (folder.num_objects, folder.num_bytes) == (7, 1007)
    assert sum("ContinuationToken" in params for params in pages) >= 3
    delete_folder(aws, folder)
    assert deleted == [3, 3, 1]
    assert f"stoker/inputs/{GONE}/" not in left(aws)
    assert aws.has_object(f"{OUT}/stoker/inputs/{OLD}/workload.json")


@pytest.mark.parametrize("operation", ["ListPipelines", "ListSchedules", "ListPipelineVersions"])
def test_without_a_right_to_see_what_is_named_nothing_is_left(aws, monkeypatch, operation):
    call = botocore.client.BaseClient._make_api_call

    def denied(client, name, asked):
        if name == operation:
            error = {"Code": "AccessDeniedException", "Message": f"not authorized: {name}"}
            raise botocore.exceptions.ClientError({"Error": error}, name)
        return call(client, name, asked)

    monkeypatch.setattr(botocore.client.BaseClient, "_make_api_call", denied)
    with pytest.raises(ServiceError, match="is missing"):
        left(aws)


def test_the_command_lists_and_deletes_only_when_it_is_told(aws, tmp_path):
    file = tmp_path / "workload.json"
    file.write_text(json.dumps(WORKLOAD))
    words = ["prune", "sagemaker", str(file), "--older-than-days", "0"]
    listed = stoker(*words)
    assert listed.returncode == 0, listed.stderr
    assert f"inputs  {datetime.now(UTC):%Y-%m-%d}" in listed.stdout
    assert "7 folders, " in listed.stdout
    assert "would be deleted" in listed.stdout
    assert "--delete" in listed.stderr
    assert aws.has_object(f"{OUT}/stoker/inputs/{GONE}/code.tar.gz")
    document = json.loads(stoker(*words, "--json").stdout)
    assert (document["deleted"], len(document["folders"])) == (False, 7)
    assert "7 folders" in stoker(*words, "--delete").stdout
    assert not aws.has_object(f"{OUT}/stoker/inputs/{GONE}/code.tar.gz")
    assert aws.has_object(f"{OUT}/stoker/inputs/{NEW}/code.tar.gz")
    assert "nothing is left" in stoker(*words).stdout


def test_kubeflow_is_refused_with_a_word(tmp_path):
    done = stoker("prune", "kubeflow", "a.yaml")
    assert done.returncode == 2
    assert "uploads to Kubeflow leave nothing behind" in done.stderr
