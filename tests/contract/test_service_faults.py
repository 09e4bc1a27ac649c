"""Two minutes of any fault of a service end no training, whoever follows it.

A proxy in front of moto and of the API server's double fails calls by rule. On AWS time passes only
while somebody sleeps; on Kubernetes the clock is set forward.
"""

import dataclasses
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from botocore.exceptions import NoCredentialsError

from stoker.catalog import load_catalog
from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec, Run
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Evaluation, Training, read_json, to_json, write_json
from stoker.records.outcome import outcome_of, training_exit_code
from stoker.repeat import READ_AGAIN_SECONDS
from stoker.train import train
from support import sagemaker_job, sample_records
from support.aws_answers import Answers, archive
from support.aws_answers import Clock as SleepClock
from support.command import stoker, succeeds
from support.faulty_service import ServiceFault, faulty_service
from support.job_listener import JobListener
from support.kubernetes_api import kube_config
from support.kubernetes_jobs import job as kubernetes_job
from support.local_job import until
from support.moto_server import REGION
from support.platform_jobs import use_kube_config

NAME = "mnist-1"
BUCKET = "stoker-test"
OUTPUT_URI = f"s3://{BUCKET}/out/{NAME}/output/output.tar.gz"
OUTPUTS = OUTPUT_URI.replace("s3:/", "GET ")
TOKEN_URI = f"s3://{BUCKET}/out/{NAME}/stoker_token/token"
BEGAN = datetime(2026, 11, 20, 8, tzinfo=UTC)
# The job trains for four minutes; a fault begins after one and lasts for two.
TRAINS_SECONDS, FAULT_BEGINS, FAULT_SECONDS = 240.0, 60.0, 120.0


def refusal(status: int, code: str, message: str = "no") -> ServiceFault:
    return ServiceFault(status=status, code=code, message=message)


UNAVAILABLE, DENIED = refusal(503, "ServiceUnavailable"), refusal(403, "AccessDenied")
NOT_AUTHORIZED = "User: x is not authorized to perform: sagemaker:DescribeTrainingJob"
THROTTLED = ("ThrottlingException", "ThrottledException", "RequestLimitExceeded")
AWS_FAULTS = {
    **{str(status): refusal(status, "InternalFailure") for status in (500, 502, 504)},
    "503": UNAVAILABLE,
    **{f"a proxy's {status}": ServiceFault(status=status) for status in (502, 407)},
    **{code: refusal(400, code) for code in THROTTLED},
    "a timeout": refusal(400, "RequestTimeout"),
    "a skewed clock": refusal(403, "InvalidSignatureException", "Signature expired"),
    "an expired login": refusal(400, "ExpiredTokenException"),
    "a missing right": refusal(400, "AccessDeniedException", NOT_AUTHORIZED),
    "not found": refusal(400, "ValidationException", "Requested resource not found."),
    "a reset": ServiceFault(),
    "a broken answer": ServiceFault(is_garbled=True),
}


@pytest.fixture
def clock():
    return SleepClock()


@pytest.fixture
def aws_proxy(aws_server, monkeypatch):
    aws_server.make_bucket(BUCKET)
    with faulty_service(aws_server.url) as service:
        monkeypatch.setenv("AWS_ENDPOINT_URL", service.url)
        yield service


@pytest.fixture
def aws(aws_proxy, clock, monkeypatch):
    # botocore's own pauses pass on the same clock.
    monkeypatch.setattr("botocore.endpoint.time", SimpleNamespace(sleep=clock.sleep))
    found = Aws(region=REGION, sleep=clock.sleep, clock=clock)

    def in_time(answer: dict[str, object]) -> None:
        has_ended = clock.now >= TRAINS_SECONDS
        answer["TrainingJobStatus"] = "Completed" if has_ended else "InProgress"
        answer["SecondaryStatus"] = "Completed" if has_ended else "Training"
        answer["SecondaryStatusTransitions"] = [
            {"Status": "Training", "StartTime": BEGAN, "StatusMessage": "it trains"},
            *([{"Status": "Completed", "StartTime": BEGAN + timedelta(1)}] if has_ended else []),
        ]

    Answers(found).change("sagemaker", "DescribeTrainingJob", in_time)
    # Services whose login is renewed get new clients: of those the real answers are seen.
    monkeypatch.setattr(found, "renew_login", lambda: None)
    return found


@pytest.fixture
def job(tmp_path):
    settings = sagemaker_job.settings(output_uri=f"s3://{BUCKET}/out", source=None)
    return sagemaker_job.job(run_dir=tmp_path / "run", sagemaker=settings)


def put_outputs(aws: Aws) -> None:
    files = {"stoker/training.json": to_json(sample_records.training()).encode()}
    aws.write_object(OUTPUT_URI, archive(**files))


def fails_for_two_minutes(proxy, clock, *, part: str, fault: ServiceFault) -> None:
    """Calls with `part` fail from the first one on that comes after FAULT_BEGINS."""
    began: list[float] = []

    def rule(call: str) -> ServiceFault | None:
        if part not in call or (clock.now < FAULT_BEGINS and "Describe" in part):
            return None
        began[:] = began or [clock.now]
        return fault if clock.now < began[0] + FAULT_SECONDS else None

    proxy.rule = rule


def trained_on_sagemaker(
    aws: Aws, job: JobSpec, observer: JobListener | None = None
) -> tuple[Training, list[str]]:
    put_outputs(aws)
    listener = observer or JobListener()
    platform, catalog = SageMakerPlatform(aws=aws), load_catalog("sagemaker")
    return train(job, platform=platform, catalog=catalog, observer=listener), listener.texts


AWS_TABLE = [
    *(("DescribeTrainingJob", name) for name in AWS_FAULTS),
    *(("DescribeLogStreams", name) for name in ("503", "a missing right", "500", "a reset")),
]


@pytest.mark.parametrize(("call", "fault"), AWS_TABLE)
def test_a_fault_of_aws_ends_no_training(aws, aws_proxy, clock, job, call, fault):
    fails_for_two_minutes(aws_proxy, clock, part=call, fault=AWS_FAULTS[fault])
    record, said = trained_on_sagemaker(aws, job)
    assert aws_proxy.num_failed(call) > 0
    assert (record.status, record.exit_code) == ("succeeded", 0)
    assert record.metrics
    assert not [call for call, _ in aws_proxy.calls if "StopTrainingJob" in call]
    # Once, however often it was seen.
    assert sum("and the job continues" in line for line in said) <= 1


START_CALLS = ("DescribeTrainingJob", f"PUT /{BUCKET}/out/{NAME}/stoker_token", "CreateTrainingJob")


@pytest.mark.parametrize("part", START_CALLS)
@pytest.mark.parametrize("fault", ["500", "503", "ThrottlingException", "a reset"])
def test_a_fault_of_aws_at_the_start_delays_a_training(aws, aws_proxy, clock, job, part, fault):
    found = AWS_FAULTS[fault]
    aws_proxy.rule = lambda call: (
        found if part.lower() in call.lower() and clock.now < FAULT_SECONDS else None
    )
    record, _ = trained_on_sagemaker(aws, job)
    assert aws_proxy.num_failed(part) > 8
    assert (record.status, record.job.name) == ("succeeded", NAME)


def test_a_job_whose_creation_got_no_answer_is_adopted(aws, aws_proxy, clock, job):
    tokens: list[bytes] = []

    def rule(call: str) -> ServiceFault | None:
        if "CreateTrainingJob" not in call or clock.now > FAULT_SECONDS:
            return None
        # Its job is made, the answer is lost; later ones do not even arrive.
        if not tokens:
            tokens.append(aws.read_object(TOKEN_URI))
            return ServiceFault(is_cut=True)
        return UNAVAILABLE

    aws_proxy.rule = rule
    record, _ = trained_on_sagemaker(aws, job)
    assert (record.status, record.job.name) == ("succeeded", NAME)
    assert not [call for call, _ in aws_proxy.calls if "StopTrainingJob" in call]


def test_a_start_that_gets_no_answer_for_long_leaves_what_may_exist(aws, aws_proxy, clock, job):
    aws_proxy.rule = lambda call: UNAVAILABLE if "CreateTrainingJob" in call else None
    with pytest.raises(PlatformError) as caught:
        trained_on_sagemaker(aws, job)
    assert clock.now >= READ_AGAIN_SECONDS
    assert f"the job {NAME} may exist: the same command with --name {NAME}" in caught.value.fix
    assert aws.has_object(TOKEN_URI)


OUTPUT_FAULTS = {**AWS_FAULTS, "a broken stream": ServiceFault(is_cut=True)}


@pytest.mark.parametrize(
    "fault", ["500", "503", "a reset", "a broken stream", "an expired login", "a proxy's 407"]
)
def test_outputs_are_read_until_they_are_whole(aws, aws_proxy, clock, job, fault):
    fails_for_two_minutes(aws_proxy, clock, part=OUTPUTS, fault=OUTPUT_FAULTS[fault])
    record, _ = trained_on_sagemaker(aws, job)
    assert aws_proxy.num_failed(OUTPUTS) > 1
    assert record.metrics
    assert record.unfetched is None


@pytest.mark.parametrize("fault", [UNAVAILABLE, DENIED], ids=["503", "403"])
def test_a_training_whose_outputs_cannot_be_read_is_unknown_and_not_failed(
    aws, aws_proxy, clock, job, fault
):
    aws_proxy.rule = lambda call: fault if OUTPUTS in call else None
    record, _ = trained_on_sagemaker(aws, job)
    assert clock.now >= READ_AGAIN_SECONDS or fault is DENIED
    assert record.unfetched == OUTPUT_URI
    assert (record.status, record.metrics, record.steps) == ("succeeded", {}, None)
    found = outcome_of(record)
    assert (found.state, found.exit_code, training_exit_code(record)) == ("unknown", 4, 4)
    aws_proxy.rule = lambda call: None
    # The same command again.
    again, _ = trained_on_sagemaker(aws, job)
    assert again.metrics
    assert outcome_of(again).is_good


def write_workload(folder: Path, job: JobSpec) -> None:
    about = {"image": job.image, "sagemaker": job.platform_settings.sagemaker}
    workload = msgspec.structs.replace(sample_records.workload(), platform="sagemaker", **about)
    write_json(folder / "w.yaml", workload)


def test_an_unknown_training_ends_with_4_and_in_a_step_leaves_it_to_the_next_one(
    aws, aws_proxy, job, tmp_path, monkeypatch
):
    monkeypatch.setattr("stoker.platforms.sagemaker.job.QUIET_SECONDS", 0.0)
    write_workload(tmp_path, job)
    put_outputs(aws)
    aws_proxy.rule = lambda call: DENIED if OUTPUTS in call else None
    words = ("train", "w.yaml", "--name", NAME, "--group", "dnn=ml.g5.xlarge:1", "--yes")
    done = stoker(*words, cwd=tmp_path)
    assert done.returncode == 4, done.stderr
    assert "its outputs could not be read" in done.stdout
    monkeypatch.setenv("STOKER_PIPELINE_EXECUTION", "arn:aws:sagemaker:eu:1:pipeline/m/execution/x")
    done = succeeds(*words, "--out", "t.json", cwd=tmp_path)
    assert read_json(tmp_path / "t.json", Training).is_unknown


def test_an_evaluation_reads_outputs_that_were_not_read_before(aws, aws_proxy, job, tmp_path):
    put_outputs(aws)
    whole = sample_records.training()
    nothing = {"metrics": {}, "measured": None, "steps": None, "hosts": ()}
    unknown = msgspec.structs.replace(whole, **nothing, unfetched=OUTPUT_URI)
    write_workload(tmp_path, job)
    write_json(tmp_path / "p.json", sample_records.profile())
    write_json(tmp_path / "d.json", sample_records.decision())
    write_json(tmp_path / "t.json", unknown)
    files = ("--profile", "p.json", "--decision", "d.json", "--training", "t.json")
    words = ("evaluate", "w.yaml", *files, "--out", "e.json", "--always")
    aws_proxy.rule = lambda call: DENIED if OUTPUTS in call else None
    done = stoker(*words, cwd=tmp_path)
    # No gate has failed, so that the step may be tried again.
    assert done.returncode == 4, done.stderr
    assert not (tmp_path / "e.json").exists()
    aws_proxy.rule = lambda call: None
    done = succeeds(*words, cwd=tmp_path)
    found = read_json(tmp_path / "e.json", Evaluation)
    assert found.metrics == whole.metrics
    assert found.performance


@pytest.mark.parametrize(
    "error",
    [NoCredentialsError(), RuntimeError("the refreshed credentials are still expired")],
    ids=["none", "expired"],
)
def test_missing_credentials_end_no_training(aws, clock, job, error):
    def missing(**_: object) -> None:
        if FAULT_BEGINS <= clock.now < FAULT_BEGINS + FAULT_SECONDS:
            raise error

    events = aws.client("sagemaker").meta.events
    events.register("before-call.sagemaker.DescribeTrainingJob", missing)
    record, said = trained_on_sagemaker(aws, job)
    assert record.status == "succeeded"
    assert sum("and the job continues" in line for line in said) == 1


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("bug")])
def test_an_error_of_the_terminal_or_a_bug_leaves_the_training(aws, aws_proxy, job, error):
    with pytest.raises(PlatformError, match="cannot follow the job any more") as caught:
        trained_on_sagemaker(aws, job, JobListener(Mock(side_effect=error)))
    assert f"the job {NAME} keeps running" in caught.value.fix
    assert not [call for call, _ in aws_proxy.calls if "StopTrainingJob" in call]


@pytest.mark.parametrize("may_stop", [True, False])
def test_ctrl_c_stops_the_training_only_if_the_person_says_so(aws, aws_proxy, job, may_stop):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        trained_on_sagemaker(aws, job, JobListener(interrupted, may_stop=may_stop))
    stops = [call for call, _ in aws_proxy.calls if "StopTrainingJob" in call]
    assert bool(stops) == may_stop
    assert ("keeps running" in str(caught.value)) != may_stop


# --- Kubernetes

FORBIDDEN = 'pods is forbidden: User "system:serviceaccount:team-a:runner" cannot watch resource'
ETCD = ("InternalError", "etcd timed out")
KUBERNETES_FAULTS = {
    **{str(status): refusal(status, *ETCD) for status in (429, 500, 502, 503, 504)},
    **{f"a proxy's {status}": ServiceFault(status=status) for status in (400, 403, 407)},
    "an expired login": refusal(401, "Unauthorized"),
    "a missing right": refusal(403, "Forbidden", FORBIDDEN),
    "no API": refusal(404, "NotFound", "page not found"),
    "a reset": ServiceFault(),
    "a broken answer": ServiceFault(is_garbled=True),
}


@pytest.fixture
def proxy(api, tmp_path, monkeypatch):
    with faulty_service(api.url) as found:
        use_kube_config(monkeypatch, kube_config(tmp_path, found.url))
        yield found


def submitted(run_dir: Path, **of_cluster: Any) -> Run:
    platform = KubernetesPlatform(cluster=ClusterApi(**of_cluster))
    job = dataclasses.replace(kubernetes_job(name=NAME), run_dir=run_dir)
    return platform.submit(platform.plan(job))


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        *(("/", name) for name in KUBERNETES_FAULTS),
        *product(("/pods", "/jobsets", "/log?"), ("503", "a missing right", "no API")),
        *(("/events", name) for name in ("503", "a missing right")),
    ],
)
def test_a_fault_of_the_cluster_ends_no_training(
    tmp_path, monkeypatch, follow, api, proxy, part, fault
):
    clock = SimpleNamespace(ahead=0.0)
    for name in ("MAX_DELAY_SECONDS", "LOG_MAX_DELAY_SECONDS"):
        monkeypatch.setattr(f"stoker.platforms.kubernetes.streams.{name}", 0.2)
    of_cluster = {"sleep": lambda s: time.sleep(min(s, 0.05))}
    of_cluster["clock"] = lambda: time.monotonic() + clock.ahead
    followed = follow(submitted(tmp_path / "run", **of_cluster))
    until(lambda: "the job exists" in followed.status, what="it is followed")
    api.run_pods(NAME)
    leader = api.pods(NAME, "dnn")[0]
    until(lambda: "runs on node" in followed.status, what="its hosts are seen")
    proxy.rule = lambda call: KUBERNETES_FAULTS[fault] if part in call else None
    api.drop_streams()
    until(lambda: proxy.num_failed(part) > 3, what="calls fail")
    clock.ahead += FAULT_SECONDS
    seen = proxy.num_failed(part)
    until(lambda: proxy.num_failed(part) > seen, what="they fail after two minutes")
    assert followed.error is None
    proxy.rule = lambda call: None
    api.say(leader, "said later")
    host = f"{NAME}-dnn-0-0"
    until(lambda: "said later" in followed.texts(host), what="its log is read", seconds=10)
    for pod in (leader, *api.pods(NAME, "data")):
        api.end_pod(pod)
    api.end_job(NAME)
    assert followed.ended().status == "succeeded"
    assert api.count("DELETE") == 0
    told = [line for line in followed.texts("status") if "and the job continues" in line]
    assert len(told) == len(set(told))


def first_calls_fail(proxy, fault: str, *, times: int, method: str, part: str) -> Iterator[int]:
    """Returns the failures that are left."""
    left = iter(range(times))

    def rule(call: str) -> ServiceFault | None:
        is_meant = call.startswith(method) and part in call
        return KUBERNETES_FAULTS[fault] if is_meant and next(left, None) is not None else None

    proxy.rule = rule
    return left


@pytest.mark.parametrize("fault", ["503", "429", "a reset", "a broken answer", "a proxy's 407"])
@pytest.mark.parametrize("part", ["accessreviews", "/jobsets", "/secrets", "/configmaps"])
def test_a_fault_at_start_is_waited_for_and_makes_nothing_twice(tmp_path, api, proxy, part, fault):
    # More than any client repeats by itself.
    left = first_calls_fail(proxy, fault, times=12, method="POST", part=part)
    run = submitted(tmp_path / "run", sleep=lambda seconds: time.sleep(min(seconds, 0.01)))
    assert not list(left)
    assert api.names("jobsets") == [NAME]
    run.stop()


@pytest.mark.parametrize("fault", ["503", "an expired login", "a reset"])
def test_a_stop_is_repeated_until_it_is_confirmed(tmp_path, api, proxy, fault):
    clock = SleepClock()
    run = submitted(tmp_path / "run", sleep=clock.sleep, clock=clock)
    left = first_calls_fail(proxy, fault, times=8, method="DELETE", part="")
    run.stop()
    assert not list(left)
    assert api.names("jobsets") == []
    assert run.remaining() is None
