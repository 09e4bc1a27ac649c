"""Two minutes of any fault of a service end no training, whoever follows it.

A proxy in front of moto and of the API server's double fails calls by rule. On AWS time passes only
while somebody sleeps; on Kubernetes the clock is set forward.
"""

import dataclasses
import time
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stoker.catalog import load_catalog
from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec, LogLine, Run
from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.records import Training, to_json
from stoker.records.outcome import outcome_of
from stoker.repeat import READ_AGAIN_SECONDS
from stoker.run.train import train
from support import sagemaker_job, sample_records
from support.aws_answers import Answers, archive
from support.aws_answers import Clock as SleepClock
from support.faulty_service import ServiceFault, faulty_service
from support.kubernetes_api import kube_config
from support.kubernetes_jobs import job as kubernetes_job
from support.local_job import until
from support.moto_server import REGION
from support.platform_jobs import use_kube_config

pytestmark = pytest.mark.e2e

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
AWS_FAULTS = {
    "503": UNAVAILABLE,
    "a proxy's 407": ServiceFault(status=407),
    "throttled": refusal(400, "ThrottlingException"),
    "an expired login": refusal(400, "ExpiredTokenException"),
    "a missing right": refusal(400, "AccessDeniedException", NOT_AUTHORIZED),
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


def trained_on_sagemaker(aws: Aws, job: JobSpec) -> tuple[Training, list[str]]:
    put_outputs(aws)
    told: list[LogLine] = []
    platform, catalog = SageMakerPlatform(aws=aws), load_catalog("sagemaker")
    record = train(job, platform=platform, catalog=catalog, on_line=told.append)
    return record, [line.text for line in told]


AWS_TABLE = [
    *(("DescribeTrainingJob", name) for name in AWS_FAULTS),
    *(("FilterLogEvents", name) for name in ("503", "a missing right")),
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


@pytest.mark.parametrize("fault", [UNAVAILABLE, DENIED], ids=["503", "403"])
def test_a_training_whose_outputs_cannot_be_read_is_read_again_by_the_same_command(
    aws, aws_proxy, clock, job, fault
):
    aws_proxy.rule = lambda call: fault if OUTPUTS in call else None
    with pytest.raises(PlatformError, match="its outputs could not be read") as caught:
        trained_on_sagemaker(aws, job)
    assert clock.now >= READ_AGAIN_SECONDS or fault is DENIED
    assert (caught.value.where, caught.value.exit_code) == (OUTPUT_URI, 4)
    aws_proxy.rule = lambda call: None
    # The same command again.
    again, _ = trained_on_sagemaker(aws, job)
    assert again.metrics
    assert outcome_of(again).is_good


# --- Kubernetes

FORBIDDEN = 'pods is forbidden: User "system:serviceaccount:team-a:runner" cannot list resource'
ETCD = ("InternalError", "etcd timed out")
KUBERNETES_FAULTS = {
    "503": refusal(503, *ETCD),
    "a proxy's 407": ServiceFault(status=407),
    "an expired login": refusal(401, "Unauthorized"),
    "a missing right": refusal(403, "Forbidden", FORBIDDEN),
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
        *product(("/pods", "/log?"), ("503", "a missing right")),
    ],
)
def test_a_fault_of_the_cluster_ends_no_training(
    tmp_path, monkeypatch, follow, api, proxy, part, fault
):
    clock = SimpleNamespace(ahead=0.0)
    monkeypatch.setattr("stoker.platforms.kubernetes.pod_log.DELAY_SECONDS", 0.2)
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
