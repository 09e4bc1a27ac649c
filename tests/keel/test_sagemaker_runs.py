"""`stoker train` on SageMaker: what it sends, follows, leaves, stops and records."""

import io
import json
import signal
import subprocess
import tarfile
from collections.abc import Mapping
from typing import Any

import pytest
from botocore.exceptions import ClientError

from stoker.records import Profile, ProfiledHost, StepTerms, write_json
from support.black_box import Verb, as_json, read, refused, stoker, verbs
from support.cloudwatch import put_lines
from support.processes import until
from support.sagemaker_rules import rule_problems
from support.sagemaker_service import sagemaker_service
from support.workloads import BUCKET, NO_CAPACITY, ON_SAGEMAKER, PATCH, changed, write

NAME = "mnist-1"
TRAIN = ("train", "workload.yaml", "--name", NAME, "--yes")
BOTH = ("--group", "dnn=1", "--group", "data=ml.c5.4xlarge:2")
EXIT_CODE = 7
CAPACITY = "CapacityError: Unable to provision requested ML compute capacity."

# What the service adds to a request.
OF_THE_SERVICE = {
    *("TrainingJobArn", "TrainingJobStatus", "SecondaryStatus", "ModelArtifacts"),
    *("CreationTime", "SecondaryStatusTransitions"),
}


@pytest.fixture
def service(aws_server):
    aws_server.make_bucket(BUCKET)
    with sagemaker_service() as found:
        yield found


@pytest.fixture
def env(aws_server, service):
    of_service = {"AWS_ENDPOINT_URL_SAGEMAKER": service.url, "STOKER_POLL_SECONDS": "0.5"}
    return aws_server.environ() | of_service


@pytest.fixture
def start(tmp_path, env):
    """Starts a training on one dnn host and two data hosts, as often as asked."""
    with verbs(tmp_path, env) as begun:

        def make(workload: Mapping[str, Any] = ON_SAGEMAKER, *groups: str) -> Verb:
            write(tmp_path, workload)
            return begun.start(*TRAIN, *(groups or BOTH))

        yield make


@pytest.fixture
def keys(aws_server):
    """Returns the objects that are in the bucket."""

    def listed() -> list[str]:
        answer = aws_server.client("s3").list_objects_v2(Bucket=BUCKET)
        return [each["Key"] for each in answer.get("Contents", ())]

    return listed


@pytest.fixture
def token(aws_server):
    """Returns the run's token, which its hosts read; empty where there is none."""

    def found(name: str = NAME) -> str:
        key = f"out/{name}/stoker_token/token"
        try:
            answer = aws_server.client("s3").get_object(Bucket=BUCKET, Key=key)
        except ClientError:
            return ""
        return answer["Body"].read().decode()

    return found


def is_there(train: Verb, service: Any, name: str = NAME) -> Any:
    until(lambda: name in service.jobs or train.process.poll() is not None, what="the job is made")
    assert name in service.jobs, train.said
    return service.jobs[name]


def follow(train: Verb, service: Any) -> None:
    is_there(train, service)
    train.until_it_says("it runs")


def test_a_training_is_sent_followed_and_recorded(start, service, aws_server, token, tmp_path):
    train = start(changed(ON_SAGEMAKER, hyperparameters={"epochs": 3}))
    follow(train, service)
    request = service.jobs[NAME]
    groups = request["ResourceConfig"]["InstanceGroups"]
    hosts = {each["InstanceGroupName"]: each["InstanceCount"] for each in groups}
    assert hosts == {"dnn": 1, "data": 2}
    assert request["HyperParameters"] == {"epochs": "3"}
    put_lines(aws_server, "algo-1", "a line of the script", job=NAME)
    put_outputs(aws_server, {"losses.txt": "0.5 0.25\n", "stoker/notes.csv": "a,b\n1,2\n"})
    own = token()
    assert len(own) >= 32
    service.end(NAME, "Completed")
    train.ends_with(0)
    record = read(tmp_path / "runs" / NAME / "training.json")
    assert (record["status"], record["job"]["name"]) == ("succeeded", NAME)
    files = {path.name: path for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    assert files.keys() >= {"report.html", "notes.csv"}
    (log,) = (path for name, path in files.items() if name.endswith("algo-1.log"))
    assert "a line of the script" in log.read_text()
    # The run's token is deleted, and was neither shown, sent nor kept.
    assert token() == ""
    texts = [
        train.said,
        json.dumps(request),
        *(p.read_text(errors="replace") for p in files.values()),
    ]
    assert not [text for text in texts if own in text]


def put_outputs(aws_server: Any, files: Mapping[str, str]) -> None:
    """Leaves the archive that the service makes of the leader's outputs."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for name, text in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(text)
            archive.addfile(about, io.BytesIO(text.encode()))
    key = f"out/{NAME}/output/output.tar.gz"
    aws_server.client("s3").put_object(Bucket=BUCKET, Key=key, Body=content.getvalue())


def test_what_is_sent_has_the_patch_and_a_secrets_address_and_is_what_the_service_takes(
    start, service, aws_server
):
    patch = {
        "Tags": [{"Key": "team", "Value": "vision"}],
        "ResourceConfig": {"VolumeSizeInGB": 321},
        "EnableInterContainerTrafficEncryption": True,
    }
    arn = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:keys-AbCdEf"
    train = start(
        changed(
            ON_SAGEMAKER,
            sagemaker={PATCH["sagemaker"]: patch},
            secrets={"API_KEY": {"arn": arn}},
            channels={"train": {"uri": f"s3://{BUCKET}/mnist"}},
        )
    )
    request = is_there(train, service)
    sent = {key: value for key, value in request.items() if key not in OF_THE_SERVICE}
    assert [str(problem) for problem in rule_problems(sent)] == []
    assert {"Key": "team", "Value": "vision"} in sent["Tags"]
    assert sent["ResourceConfig"]["VolumeSizeInGB"] == 321
    assert sent["EnableInterContainerTrafficEncryption"] is True
    key = f"out/{NAME}/stoker_token/run.json"
    run = aws_server.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    assert json.loads(run)["secrets"]["API_KEY"]["arn"] == arn
    assert "API_KEY" not in sent["Environment"]


def test_a_failed_job_ends_with_6_and_the_record_has_its_exit_code(start, service, tmp_path):
    train = start()
    follow(train, service)
    reason = f"AlgorithmError: ValueError: no such layer, exit code: {EXIT_CODE}"
    service.end(NAME, "Failed", reason=reason)
    train.ends_with(6)
    record = read(tmp_path / "runs" / NAME / "training.json")
    assert (record["status"], record["exit_code"]) == ("failed", EXIT_CODE)
    assert "no such layer" in train.said


def test_ctrl_c_stops_the_job(start, service, token):
    train = start()
    follow(train, service)
    train.send(signal.SIGINT)
    train.ends_with(130)
    assert service.jobs[NAME]["TrainingJobStatus"] == "Stopped"
    assert token() == ""


@pytest.mark.parametrize("is_held", [False, True], ids=["following", "creating"])
def test_sigterm_leaves_the_job_and_its_token(start, service, token, is_held):
    service.is_creation_held = is_held
    train = start()
    if is_held:
        is_there(train, service)
    else:
        follow(train, service)
    train.send(signal.SIGTERM)
    train.ends_with(143)
    assert service.calls.count("StopTrainingJob") == 0
    assert token()
    assert NAME in train.said.splitlines()[-1]


def test_an_attempt_after_kill_9_goes_on_with_the_same_job_and_token(
    start, service, token, tmp_path
):
    first = start()
    follow(first, service)
    own = token()
    first.kill()
    looks = service.calls.count("DescribeTrainingJob")
    second = start()
    until(lambda: service.calls.count("DescribeTrainingJob") > looks + 1, what="it is followed")
    assert token() == own
    service.end(NAME, "Completed")
    second.ends_with(0)
    assert service.calls.count("CreateTrainingJob") == 1
    assert service.calls.count("StopTrainingJob") == 0
    assert read(tmp_path / "runs" / NAME / "training.json")["status"] == "succeeded"


def test_beside_a_job_that_failed_another_name_is_taken(start, service, tmp_path):
    first = start()
    follow(first, service)
    service.end(NAME, "Failed", reason="AlgorithmError: , exit code: 1")
    first.ends_with(6)
    second = start()
    is_there(second, service, f"{NAME}-2")
    service.end(f"{NAME}-2", "Completed")
    second.ends_with(0)
    assert read(tmp_path / "runs" / NAME / "training.json")["job"]["name"] == f"{NAME}-2"


def test_where_capacity_lacks_the_next_plan_of_the_decision_is_taken(start, service, env, tmp_path):
    terms = StepTerms(
        step_seconds=0.2,
        accelerator_step_seconds=0.08,
        loader_cpu_seconds=6.1,
        trainer_cpu_seconds=0.3,
        num_workers=32,
        batch_bytes=20e6,
        global_batch_size=256,
    )
    host = ProfiledHost(instance_type="ml.g5.8xlarge", count=1)
    write_json(tmp_path / "profile.json", Profile(host=host, step=terms))
    workload = changed(
        ON_SAGEMAKER,
        cluster={"dnn": {"instance_type": "ml.g5.8xlarge"}},
        training={"steps": 100},
        constraints={
            "allowed_instance_types": ["ml.g5.8xlarge", "ml.c7i.8xlarge", "ml.c5.9xlarge"]
        },
    )
    workload[NO_CAPACITY] = {"wait_minutes": 0, "then": "next_plan"}
    write(tmp_path, workload)
    words = ("decide", "profile.json", "--workload", "workload.yaml")
    decision = as_json(*words, cwd=tmp_path, env=env)
    train = start(workload, "--decision", "decision.json")
    first = is_there(train, service)
    service.end(NAME, "Failed", reason=CAPACITY)
    until(lambda: len(service.jobs) == 2 or train.process.poll() is not None, what="a second job")
    assert len(service.jobs) == 2, train.said
    (other,) = (name for name in service.jobs if name != NAME)
    service.end(other, "Completed")
    train.ends_with(0)
    assert service.jobs[other]["ResourceConfig"] != first["ResourceConfig"]
    asked = {each["InstanceType"] for each in first["ResourceConfig"]["InstanceGroups"]}
    assert asked == {each["instance_type"] for each in decision["plan"]["groups"]}


def test_without_capacity_and_another_plan_it_ends_with_4(start, service):
    train = start({**ON_SAGEMAKER, NO_CAPACITY: {"wait_minutes": 0, "then": "fail"}})
    is_there(train, service)
    service.end(NAME, "Failed", reason=CAPACITY)
    train.ends_with(4)


def test_without_the_right_to_make_a_job_nothing_is_left(start, service, token):
    service.denied.add("CreateTrainingJob")
    train = start()
    train.ends_with(4)
    assert "CreateTrainingJob" in train.said
    assert service.jobs == {}
    assert token() == ""


def test_the_code_is_packed_without_what_does_not_belong_to_it(
    start, service, aws_server, keys, tmp_path
):
    for name in ("code/train.py", "code/lib/net.py", "code/__pycache__/a.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("print(1)\n")
    subprocess.run(["git", "init", "-q", "code"], cwd=tmp_path, check=True)
    train = start(changed(ON_SAGEMAKER, sagemaker={"source": "code"}))
    is_there(train, service)
    (key,) = (each for each in keys() if each.endswith("code.tar.gz"))
    content = aws_server.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read()
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        files = {each.name for each in archive if each.isfile()}
    assert files == {"train.py", "lib/net.py"}


def test_a_dry_run_sends_nothing(service, env, keys, tmp_path):
    write(tmp_path, ON_SAGEMAKER)
    stoker("train", "workload.yaml", "--dry-run", *BOTH, cwd=tmp_path, env=env)
    assert (service.calls, keys()) == ([], [])


def test_a_secret_without_a_place_that_hosts_can_read_is_refused(service, env, tmp_path):
    write(tmp_path, changed(ON_SAGEMAKER, secrets={"API_KEY": {"secret": "keys", "key": "api"}}))
    refused(*TRAIN, *BOTH, cwd=tmp_path, env=env)
    assert service.calls == []
