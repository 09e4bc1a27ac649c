"""A failed step's own last lines where the usual place of its log does not give them."""

from types import SimpleNamespace
from typing import Any

import pytest
import urllib3
from botocore.stub import Stubber

from stoker.errors import ServiceError
from stoker.pipelines.base import RunStep
from stoker.pipelines.kubeflow.step_logs import StepLogs
from stoker.pipelines.sagemaker.run_steps import last_lines
from stoker.platforms.aws import Aws
from stoker.platforms.kubernetes import api as connection
from stoker.platforms.kubernetes.api import ClusterApi
from support.aws_answers import Clock
from support.kubernetes_api import NAMESPACE, TOKEN, kubernetes_api
from support.log_stubs import stubbed_logs

RUN = "5b1f6c3e"
FAILED = RunStep(name="train", status="FAILED")
SHOWN = {
    "run_id": RUN,
    "run_details": {
        "task_details": [{"display_name": "train", "child_tasks": [{"pod_name": "mnist-w1-1"}]}]
    },
}
CRASH = "error: the training failed (exit code 1): ValueError: no such file"
LAUNCHER = "I1126 10:00:00.123456       1 launcher_v2.go:191] publish success."

# What the API server answers for the artifact (2.17.0: ReadArtifact, and an object store's errors).
NO_ARCHIVE = {
    "missing": ServiceError("artifact not found", code="404", kind="missing"),
    "expired": ServiceError("The specified key does not exist.", code="500"),
    "bucket not readable": ServiceError("Access Denied.", code="500", kind="denied"),
    "server away": ServiceError("no answer", kind="away"),
}


@pytest.fixture
def api():
    with kubernetes_api() as made:
        yield made


@pytest.fixture
def explained(api, monkeypatch):
    login = {"type": "api_key", "in": "header", "key": "authorization", "value": f"Bearer {TOKEN}"}
    client = SimpleNamespace(
        configuration=SimpleNamespace(host=api.url, auth_settings=lambda: {"BearerToken": login}),
        rest_client=SimpleNamespace(pool_manager=urllib3.PoolManager(retries=False)),
        default_headers={},
    )
    monkeypatch.setattr(connection, "connect", lambda context, strict_tls: (client, NAMESPACE))

    def found(refused: ServiceError, failed: RunStep = FAILED) -> RunStep:
        def sent(send: object, **call: object) -> dict[str, Any]:
            raise refused

        logs = StepLogs(
            sent,
            client=lambda: pytest.fail("sent by the double"),
            cluster=lambda: ClusterApi(namespace=NAMESPACE, sleep=lambda seconds: None),
            namespace=lambda: NAMESPACE,
        )
        return logs.explained(failed, SHOWN)

    return found


def pod_of_step(api: Any, name: str, *lines: str) -> None:
    """Makes a step's pod as Kubeflow does, with the labels by which it is found."""
    api.make_workflow()
    api.make_step(name, run_id=RUN)
    api.change("pods", name, {"metadata": {"labels": {"pipeline/runid": RUN}}})
    api.change("pods", name, {"status": {"containerStatuses": [RUNNING]}})
    api.say(name, *lines)


RUNNING = {"name": "main", "state": {"running": {}}}
IMAGE = {"reason": "ImagePullBackOff", "message": "Back-off pulling image"}
UNSCHEDULABLE = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
}


def of(container: str, **state: object) -> dict[str, object]:
    return {"name": container, "state": state}


@pytest.mark.parametrize("refused", NO_ARCHIVE.values(), ids=NO_ARCHIVE)
def test_without_an_archived_log_the_pods_lines_say_why(refused, api, explained):
    pod_of_step(api, "train-1", LAUNCHER, "a line", CRASH)
    step = explained(refused)
    assert step.lines == ("a line", CRASH)
    assert step.reason == CRASH.removeprefix("error: ")


@pytest.mark.parametrize("refused", NO_ARCHIVE.values(), ids=NO_ARCHIVE)
def test_without_log_and_pod_no_reason_is_made_up(refused, explained):
    step = explained(refused)
    assert (step.lines, step.reason) == ((), "")
    assert "stoker/step=train" in step.log


PATHS = {
    "plain": "mnist-w1.root(0).train(0).executor(0)",
    "second attempt": "mnist-w1.root(0).train(0).executor(1)",
    "in a loop": "mnist-w1.root(0).for-loop-1(0:a)(0).train(0).executor(0)",
    "in a group": "mnist-w1.root(0).condition-1(0).train(0).executor(0)",
    "without retries": "mnist-w1.root.train.executor",
}


def pod_of_other_component(api: Any, name: str, *lines: str, path: str) -> None:
    """Makes the pod of a component that is not stoker's: it has no label with its step's name."""
    pod_of_step(api, name, *lines)
    labels = {"stoker/step": None, "stoker/role": None}
    named = {"workflows.argoproj.io/node-name": path}
    api.change("pods", name, {"metadata": {"labels": labels, "annotations": named}})


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_step_that_is_not_stokers_is_found_by_the_path_on_its_pod(path, api, explained):
    driver = "mnist-w1.root(0).train-driver(0)"
    pod_of_other_component(api, "w1-impl-1", "a line", CRASH, path=path)
    pod_of_other_component(api, "w1-driver-2", "a driver's line", path=driver)
    pod_of_other_component(
        api, "w1-impl-3", "of another", path="mnist-w1.root(0).a-train(0).executor(0)"
    )
    step = explained(NO_ARCHIVE["missing"])
    assert step.lines == ("a line", CRASH)
    assert step.log == f"kubectl logs -n {NAMESPACE} w1-impl-1 -c main --tail=-1"


IN_TWO_GROUPS = {
    "beside a group": ("train", "root(0).train", "root(0).inner(0).train"),
    "in a group": ("inner/train", "root(0).inner(0).train", "root(0).train"),
    "in a branch": (
        "condition-1/train",
        "root(0).condition-1(0).train",
        "root(0).condition-11(0).train",
    ),
    "item of a loop": (
        "train[1]",
        "root(0).for-loop-1(0).iteration-iterations(1:1)(0).iteration-item(0).train",
        "root(0).for-loop-1(0).iteration-iterations(11:11)(0).iteration-item(0).train",
    ),
    "task with a longer name": ("train", "root(0).train", "root(0).train-2"),
}


@pytest.mark.parametrize("has_label", [True, False])
@pytest.mark.parametrize("steps", IN_TWO_GROUPS.values(), ids=IN_TWO_GROUPS)
def test_of_two_steps_of_one_name_each_has_its_own_pod(steps, has_label, api, explained):
    """The newer pod is the other one's."""
    name, path, of_other = steps
    for pod, of_pod, line in (("w1-impl-1", path, CRASH), ("w1-impl-2", of_other, "of another")):
        pod_of_step(api, pod, "a line", line)
        labels = {"stoker/step": "train" if has_label else None, "stoker/role": None}
        named = {"workflows.argoproj.io/node-name": f"mnist-w1(0).{of_pod}(0).executor(0)"}
        api.change("pods", pod, {"metadata": {"labels": labels, "annotations": named}})
    failed = RunStep(name=name, status="FAILED", path=path)
    step = explained(NO_ARCHIVE["missing"], failed)
    assert step.lines == ("a line", CRASH)
    assert step.log == f"kubectl logs -n {NAMESPACE} w1-impl-1 -c main --tail=-1"


def test_a_kubelets_error_in_place_of_a_log_is_no_line_of_the_step(api, explained):
    pod_of_step(api, "train-1", CRASH)
    api.delete_log("train-1")
    step = explained(NO_ARCHIVE["missing"])
    assert (step.lines, step.reason) == ((), "")


def test_a_pod_that_never_started_leaves_the_word_to_the_attempt_before_it(api, explained):
    pod_of_step(api, "train-1", CRASH)
    pod_of_step(api, "train-2")
    waiting = {"name": "main", "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    api.change("pods", "train-2", {"status": {"containerStatuses": [waiting]}})
    assert explained(NO_ARCHIVE["missing"]).lines == (CRASH,)


ENDED = {
    "out of memory": (
        {"containerStatuses": [of("main", terminated={"reason": "OOMKilled", "exitCode": 137})]},
        "container main: OOMKilled (exit code 137)",
    ),
    "evicted": (
        {"phase": "Failed", "reason": "Evicted", "message": "node was low on memory"},
        "Evicted: node was low on memory",
    ),
    "deadline": (
        {"reason": "DeadlineExceeded", "message": "active longer than the deadline"},
        "DeadlineExceeded: active longer than the deadline",
    ),
    "no image": (
        {"containerStatuses": [of("main", waiting=IMAGE)]},
        "container main: ImagePullBackOff: Back-off pulling image",
    ),
    "a failed init container": (
        {"initContainerStatuses": [of("init", terminated={"reason": "Error", "exitCode": 2})]},
        "init container init ended with exit code 2",
    ),
    "no secret": (
        {"containerStatuses": [of("main", waiting={"reason": "CreateContainerConfigError"})]},
        "container main: CreateContainerConfigError",
    ),
    "no node": (
        {"conditions": [UNSCHEDULABLE]},
        "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    ),
    "no such program": (
        {"containerStatuses": [of("main", terminated={"reason": "StartError", "exitCode": 128})]},
        "container main: StartError (exit code 128)",
    ),
}


@pytest.mark.parametrize(("status", "words"), ENDED.values(), ids=ENDED)
def test_a_pod_that_was_ended_says_so_where_its_log_has_no_error(status, words, api, explained):
    pod_of_step(api, "train-1", "step 100 of 900")
    api.change("pods", "train-1", {"status": {"containerStatuses": [], **status}})
    assert explained(NO_ARCHIVE["missing"]).reason == words


def test_an_error_of_the_step_comes_before_the_end_of_its_pod(api, explained):
    pod_of_step(api, "train-1", CRASH)
    evicted = {"reason": "Evicted", "message": "later"}
    api.change("pods", "train-1", {"status": evicted})
    assert explained(NO_ARCHIVE["missing"]).reason == CRASH.removeprefix("error: ")


def test_another_runs_pod_is_not_asked(api, explained):
    pod_of_step(api, "train-1", CRASH)
    api.change("pods", "train-1", {"metadata": {"labels": {"pipeline/runid": "another"}}})
    assert explained(NO_ARCHIVE["missing"]).lines == ()


def test_lines_before_a_cut_connection_are_kept(api, explained):
    pod_of_step(api, "train-1", CRASH, "more")
    api.break_log("train-1", after=1, how="cut")
    assert explained(NO_ARCHIVE["missing"]).lines == (CRASH,)


GROUP = "/aws/sagemaker/ProcessingJobs"
JOB = "pipelines-a1-Train-x"
ARN = f"arn:aws:sagemaker:eu-west-1:1:processing-job/{JOB}"
STEP = {"StepName": "Train", "Metadata": {"ProcessingJob": {"Arn": ARN}}}
STREAM = f"{JOB}/algo-1-1"


@pytest.fixture
def stub():
    with stubbed_logs() as made:
        yield made


def lines_of(stub: Stubber) -> tuple[str, ...]:
    clock = Clock()
    return last_lines(Aws(clients={"logs": stub.client}, sleep=clock.sleep, clock=clock), STEP)


def lists(stub: Stubber, *names: str) -> None:
    asked = {"logGroupName": GROUP, "logStreamNamePrefix": f"{JOB}/"}
    listed = {"logStreams": [{"logStreamName": name} for name in names]}
    stub.add_response("describe_log_streams", listed, asked)


def gives(stub: Stubber, *messages: str, token: str, sent: str = "") -> None:
    """Answers GetLogEvents, whose pages may be empty before the last one (API reference)."""
    asked = {"logGroupName": GROUP, "logStreamName": STREAM, "limit": 20, "startFromHead": False}
    events = [{"message": message, "timestamp": 1} for message in messages]
    answer = {"events": events, "nextBackwardToken": token}
    stub.add_response("get_log_events", answer, asked | ({"nextToken": sent} if sent else {}))


def test_the_last_lines_of_a_steps_job(stub):
    lists(stub, STREAM)
    gives(stub, "a line\n", CRASH, token="b/1")
    assert lines_of(stub) == ("a line", CRASH)


def test_a_log_stream_that_is_not_yet_there_is_no_error(stub):
    lists(stub)
    assert lines_of(stub) == ()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("ResourceNotFoundException", 400),
        ("ThrottlingException", 400),
        ("AccessDeniedException", 400),
        ("ServiceUnavailableException", 503),
        ("ExpiredTokenException", 400),
    ],
)
@pytest.mark.parametrize("operation", ["describe_log_streams", "get_log_events"])
def test_lines_that_may_not_be_read_are_left_out(operation, code, status, stub):
    if operation == "get_log_events":
        lists(stub, STREAM)
    stub.add_client_error(operation, code, "refused", http_status_code=status)
    assert lines_of(stub) == ()


def test_an_empty_page_is_not_the_end_of_a_stream(stub):
    lists(stub, STREAM)
    gives(stub, token="b/1")
    gives(stub, CRASH, token="b/2", sent="b/1")
    assert lines_of(stub) == (CRASH,)


def test_a_stream_without_events_ends_where_its_token_repeats(stub):
    lists(stub, STREAM)
    gives(stub, token="b/1")
    gives(stub, token="b/1", sent="b/1")
    assert lines_of(stub) == ()
