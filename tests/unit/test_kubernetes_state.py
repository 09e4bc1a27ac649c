"""What is read out of a cluster's objects, and said of hosts that wait and of a run's end."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.environment import OwnPod, own_pod
from stoker.logs import Log
from stoker.platforms.kubernetes.api import ApiAction, refusal
from stoker.platforms.kubernetes.checks import checked_job
from stoker.platforms.kubernetes.events import Happenings
from stoker.platforms.kubernetes.job import conclude
from stoker.platforms.kubernetes.layout import COMPLETION_INDEX, REPLICATED_JOB_LABEL, lay_out
from stoker.platforms.kubernetes.pod_outputs import OutputParts
from stoker.platforms.kubernetes.pods import PodEnd, PodState, by_job, pod_state
from stoker.platforms.kubernetes.state import ObjectState, job_state
from stoker.platforms.kubernetes.troubles import (
    CAPACITY_SECONDS,
    CHANGE_SECONDS,
    CLAIM_SECONDS,
    DEAD_SECONDS,
    FIRST_REPEAT_SECONDS,
    IMAGE_SECONDS,
    QUOTA_SECONDS,
    REPEAT_SECONDS,
    UNFIT_SECONDS,
    Trouble,
    TroubleLog,
    exceeds,
    has_no_group,
    refused_pods,
    troubles_of,
)
from stoker.records import to_json
from support.kubernetes_jobs import CPU, GPU, job
from support.sample_records import training

RUN = "mnist-1"
LAYOUT = lay_out(checked_job(job(name=RUN)))
BEGIN = "2026-11-20T09:00:00Z"
CREATE = ApiAction(verb="create", group="jobset.x-k8s.io", resource="jobsets", namespace="team-a")


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


def pod(role: str = "dnn", index: int = 0, *, status: Any = None, **changes: object) -> PodState:
    metadata = {
        "name": f"{RUN}-{role}-0-{index}-abcde",
        "uid": f"{role}-{index}",
        "creationTimestamp": BEGIN,
        "labels": {REPLICATED_JOB_LABEL: role, COMPLETION_INDEX: str(index)},
    }
    document = {"metadata": metadata, "status": status or {}}
    return dataclasses.replace(pod_state(document, by_job(LAYOUT.groups), run=RUN), **changes)


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        ({}, "running"),
        ({"conditions": [condition("Suspended", reason="SuspendedJobs")]}, "suspended"),
        ({"conditions": [condition("Suspended", "False")]}, "running"),
        ({"conditions": [condition("StartupPolicyCompleted")]}, "running"),
        ({"conditions": [condition("Suspended"), condition("Completed")]}, "succeeded"),
        ({"conditions": [condition("Complete")]}, "succeeded"),
        ({"conditions": [condition("Failed")]}, "failed"),
        ({"conditions": [condition("Failed", "False")]}, "running"),
        ({"terminalState": "Completed"}, "succeeded"),
        ({"terminalState": "Failed"}, "failed"),
    ],
)
def test_the_phase_is_what_the_conditions_that_hold_say(status, phase):
    assert job_state({"metadata": {"uid": "u"}, "status": status}).phase == phase


def test_a_job_that_no_queue_has_admitted_yet_is_suspended():
    assert job_state({"spec": {"suspend": True}}).phase == "suspended"


def test_a_pod_of_something_else_is_none_of_ours():
    labels = {"jobset.sigs.k8s.io/replicatedjob-name": "other"}
    document = {"metadata": {"name": "x", "labels": labels}}
    assert pod_state(document, by_job(LAYOUT.groups), run=RUN) is None


def test_the_group_s_container_says_how_it_ended_and_not_a_sidecar():
    terminated = {"exitCode": 137, "reason": "OOMKilled", "message": "m", "finishedAt": "t"}
    containers = [
        {"name": "sidecar", "state": {"running": {"startedAt": "t"}}},
        {"name": "data", "state": {"terminated": terminated}},
    ]
    found = pod("data", status={"phase": "Failed", "containerStatuses": containers})
    assert (found.ended.exit_code, found.ended.reason) == (137, "OOMKilled")
    assert found.is_final


PREEMPTED = condition("DisruptionTarget", reason="PreemptionByScheduler")


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        ({"conditions": [PREEMPTED]}, "PreemptionByScheduler"),
        ({"conditions": [condition("DisruptionTarget", "False", reason="x")]}, ""),
        ({"reason": "DeadlineExceeded"}, ""),
    ],
)
def test_a_pod_that_is_taken_away_says_why(status, lost):
    assert pod(status=status).lost == lost


def test_only_the_scheduler_s_refusal_makes_a_pod_unschedulable():
    gated = condition("PodScheduled", "False", reason="SchedulingGated", message="held")
    refused = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")
    assert pod(status={"conditions": [gated]}).unschedulable == ""
    assert pod(status={"conditions": [refused]}).unschedulable == "0/3 nodes"


def event(kind: str, name: str, reason: str = "FailedCreate", **more: Any) -> dict[str, Any]:
    about = {"kind": kind, "name": name}
    return {"involvedObject": about, "reason": reason, "message": "m", "type": "Warning", **more}


def told(*events: dict[str, Any]) -> list[str]:
    happenings = Happenings(run=RUN, groups=LAYOUT.groups, since="2026-11-20T09:00:00Z")
    return [found.about for one in events for found in happenings.take(one)]


@pytest.mark.parametrize(
    ("kind", "name", "is_ours"),
    [
        ("JobSet", RUN, True),
        ("JobSet", "mnist-10", False),
        ("TrainJob", RUN, True),
        ("Service", RUN, False),
        ("Job", f"{RUN}-dnn-0", True),
        ("Job", f"{RUN}-dnn-1", False),
        ("Pod", f"{RUN}-data-0-1-abcde", True),
        ("Pod", f"{RUN}-data-01-1-abcde", False),
        ("Pod", "mnist-10-data-0-1-abcde", False),
        ("Workload", f"jobset-{RUN}-1a2b3", True),
        ("Workload", "jobset-mnist-10-1a2b3", False),
    ],
)
def test_events_are_the_run_s_by_the_exact_names_of_its_objects(kind, name, is_ours):
    assert bool(told(event(kind, name))) == is_ours


def test_events_of_an_earlier_job_of_the_name_are_old():
    assert told(event("JobSet", RUN, lastTimestamp="2026-11-20T08:59:59Z")) == []
    assert told(event("JobSet", RUN, lastTimestamp="2026-11-20T09:00:01Z")) != []
    assert told(event("JobSet", RUN, eventTime="2026-11-20T08:59:59.000000Z")) == []
    assert told(event("JobSet", RUN)) != []


def test_what_normal_events_tell_is_picked():
    assert told(event("Pod", f"{RUN}-dnn-0-0-x", "Pulled", type="Normal")) == []
    assert told(event("Pod", f"{RUN}-dnn-0-0-x", "TriggeredScaleUp", type="Normal")) != []


def test_a_mount_that_fails_is_told_when_that_lasts():
    pods = [f"{RUN}-data-0-{index}-x" for index in range(2)]
    first = event("Pod", pods[0], "FailedMount", firstTimestamp="2026-11-20T09:00:01Z")
    passed = {**first, "lastTimestamp": "2026-11-20T09:00:09Z"}
    lasts = {**first, "lastTimestamp": "2026-11-20T09:01:05Z"}
    # The kubelet says it in other words when it has given up once.
    given_up = event(
        "Pod", pods[0], "FailedMount", message="timed out", lastTimestamp="2026-11-20T09:02:04Z"
    )
    other = event("Pod", pods[1], "FailedMount", lastTimestamp="2026-11-20T09:02:04Z")
    assert told(first, passed, other) == []
    assert told(first, passed, lasts, lasts, given_up) == [f"Pod {pods[0]}"] * 2


@pytest.mark.parametrize(
    "reason", ["ReachedMaxRestarts", "FailedJobs", "FailJobSetFailurePolicyAction"]
)
def test_the_end_of_a_jobset_is_told_by_its_state_alone(reason):
    assert told(event("JobSet", RUN, reason)) == []
    assert told(event("Job", f"{RUN}-dnn-0", "BackoffLimitExceeded")) != []


def test_pods_that_are_refused_are_known_by_their_job():
    happenings = Happenings(run=RUN, groups=LAYOUT.groups, since="")
    message = 'Error creating: pods "x" is forbidden: exceeded quota'
    refused = event("Job", f"{RUN}-dnn-0", "FailedCreate", message=message)
    assert [found.job for found in happenings.take(refused)] == ["dnn"]
    other = event("Job", f"{RUN}-dnn-0", "FailedCreate", message="the server timed out")
    assert [found.job for found in happenings.take(other)] == [""]


def status(code: int, message: str, reason: str) -> str:
    return json.dumps({"kind": "Status", "code": code, "message": message, "reason": reason})


@pytest.mark.parametrize(
    ("code", "is_passing"),
    [
        *((code, False) for code in (400, 401, 403, 404, 409, 410, 422)),
        *((code, True) for code in (429, 500, 502, 503, 504)),
    ],
)
def test_only_what_may_pass_is_retried(code, is_passing):
    assert (refusal(code, "", CREATE).kind == "away") == is_passing


@pytest.mark.parametrize(
    ("code", "reason", "message", "kind", "fix"),
    [
        (401, "Unauthorized", "Unauthorized", "stale", "log in again"),
        (404, "NotFound", "404 page not found", "missing", "install JobSet"),
        (400, "BadRequest", 'strict decoding error: unknown field "x"', "refused", "update JobSet"),
        (409, "AlreadyExists", "x", "taken", ""),
        # The object has changed: no name that is taken.
        (409, "Conflict", "x", "refused", ""),
    ],
)
def test_a_refusal_says_what_helps(code, reason, message, kind, fix):
    error = refusal(code, status(code, message, reason), CREATE)
    assert error.kind == kind
    assert fix in error.fix


def test_an_answer_of_something_in_between_is_shown_in_part():
    error = refusal(502, "<html>" + "bad gateway " * 1000, CREATE)
    assert "bad gateway" in error.what
    assert len(error.what) < 500


def test_a_pod_is_known_by_its_own_names_or_those_of_a_pipeline():
    assert own_pod({}) is None
    assert own_pod({"POD_NAME": "p"}) is None
    of_pipeline = own_pod({"KFP_POD_NAME": "p", "KFP_POD_UID": "u"})
    assert of_pipeline == OwnPod(name="p", uid="u", namespace=None)
    both = {"POD_NAME": "q", "POD_UID": "v", "POD_NAMESPACE": "n", "KFP_POD_NAME": "p"}
    assert own_pod(both) == OwnPod(name="q", uid="v", namespace="n")
    of_run = own_pod({**both, "POD_RUN_ID": "5b1f6c3e"})
    assert of_run == OwnPod(name="q", uid="v", namespace="n", run_id="5b1f6c3e")


NODES = (
    "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 1 Insufficient cpu, 2 node(s) had "
    "untolerated taint {spot: true}. preemption: 0/5 nodes are available: 5 No preemption victims."
)

PRICES = {GPU: 1.212, CPU: 0.714}


def ended(seconds: int, code: int = 0, *, reason: str = "", message: str = "") -> PodEnd:
    at = f"2026-11-20T09:00:{seconds:02d}Z"
    return PodEnd(exit_code=code, reason=reason, message=message, at=at)


def troubles(*pods, seconds=0.0, unfit="", **settings):
    """Returns the troubles, for deleted pods `seconds` after their deletion was seen."""
    made = job(name=RUN, image="image:1", settings=settings, on_no_capacity={"wait_minutes": 60})
    layout = lay_out(checked_job(dataclasses.replace(made, next_best="another", prices=PRICES)))
    more = {"namespace": "team-a", "unfit": {pod.name: unfit for pod in pods if unfit}}
    return [*troubles_of(pods, layout, deleted_seconds={p.uid: seconds for p in pods}, **more)]


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ('persistentvolumeclaim "a" not found', ". not found"),
        ("pod has unbound immediate PersistentVolumeClaims", ""),
    ],
)
def test_a_claim_that_is_not_there_is_no_want_of_nodes(words, again):
    said = words + again
    (trouble,) = troubles(pod(unschedulable=f"0/3 nodes are available: {said}; preemption: x"))
    assert "wait for a claim of volumes" in trouble.what
    # What the scheduler says twice is said once.
    assert trouble.what.endswith(words)
    assert "make the claim" in trouble.fix
    assert (trouble.fatal_after, trouble.is_capacity) == (CLAIM_SECONDS, False)


def test_labels_that_no_node_has_are_named_at_once():
    words = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
    (trouble,) = troubles(pod("data", unschedulable=words))
    assert "node.kubernetes.io/instance-type=c7i.4xlarge" in trouble.fix
    assert trouble.fix_after == 0.0


def test_hosts_of_a_group_that_wait_are_one_trouble():
    (trouble,) = troubles(*(pod("data", index, unschedulable=NODES) for index in (0, 1)))
    words = "2 of 2 data hosts wait for a node of c7i.4xlarge, short of nvidia.com/gpu, cpu: "
    assert trouble.what.startswith(words)
    assert "preemption" not in trouble.what
    assert trouble.fatal_after is None


@pytest.mark.parametrize(
    ("role", "reason", "fatal_after"),
    [
        ("dnn", "ErrImagePull", IMAGE_SECONDS),
        ("dnn", "ImagePullBackOff", IMAGE_SECONDS),
        ("dnn", "InvalidImageName", 0.0),
        ("data", "InvalidImageName", None),
        ("dnn", "CreateContainerConfigError", 120.0),
        ("data", "CreateContainerConfigError", None),
    ],
)
def test_only_what_the_training_cannot_do_without_ends_it(role, reason, fatal_after):
    waiting = pod(role, waits_for=reason, waits_because="why")
    (trouble,) = troubles(waiting, data={"image": "data:1"})
    assert trouble.fatal_after == fatal_after
    assert "why" in trouble.what
    if "Image" in reason:
        assert f"wait for the image {'image:1' if role == 'dnn' else 'data:1'}" in trouble.what


@pytest.mark.parametrize("reason", ["ContainerCreating", "PodInitializing", "CrashLoopBackOff", ""])
def test_what_every_start_goes_through_is_no_trouble(reason):
    assert troubles(pod(waits_for=reason)) == []


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("exceeded quota: gpus", "kubectl describe quota"),
        ("failed quota: q: must specify limits.cpu for: dnn", "kubernetes.cpu_limit: true"),
        ('violates PodSecurity "restricted:latest"', "what the namespace does not allow"),
        ('looking up service account a/b: serviceaccount "b" not found', "serviceAccountName"),
        ("denied by policy", "who runs the cluster"),
    ],
)
def test_refused_pods_say_what_to_do(message, fix):
    assert fix in refused_pods(LAYOUT.dnn, message).fix
    assert refused_pods(LAYOUT.data[0], message).fatal_after is None


def told_at(log: TroubleLog, now: float, *troubles: Trouble) -> list[str]:
    return [words for _, words in log.news(troubles, now=now)]


def test_a_trouble_is_told_at_once_after_ten_minutes_and_then_hourly():
    log = TroubleLog()
    trouble = Trouble(key="k", group="dnn", what="it waits")
    times = [now for now in range(0, 3 * 3600, 60) if told_at(log, now, trouble)]
    assert times == [0, FIRST_REPEAT_SECONDS, *(600 + n * REPEAT_SECONDS for n in (1, 2))]
    assert told_at(log, 20_000.0) == []
    assert told_at(log, 20_001.0, trouble) == ["it waits"]


def test_troubles_that_alternate_end_the_wait_all_the_same():
    log = TroubleLog()
    one, other = (Trouble(key=k, group="dnn", what=k, fatal_after=600.0) for k in ("a", "b"))
    of_data = Trouble(key="c", group="data", what="c")
    times = []
    for now in range(0, 3600, 60):
        told_at(log, now, of_data, one if now // 120 % 2 else other)
        times += [now] if log.over() else []
    assert times[0] == 2 * 600
    told_at(log, 3600.0, of_data)
    told_at(log, 3660.0, of_data, one)
    assert log.over() is None


def test_that_other_hosts_wait_as_well_is_told_within_a_minute():
    log = TroubleLog()

    def told(hosts: int, now: float) -> list[str]:
        what = f"{hosts} of 16 data hosts wait"
        return told_at(log, now, Trouble(key="k", group="data", what=what, hosts=hosts))

    assert told(1, 0.0) == ["1 of 16 data hosts wait"]
    assert told(16, CHANGE_SECONDS - 1) == []
    assert told(16, CHANGE_SECONDS) == [f"16 of 16 data hosts wait (for {CHANGE_SECONDS:.0f} s)"]
    assert told(16, 3 * CHANGE_SECONDS) == []
    assert told(16, CHANGE_SECONDS + 600) != []


def test_a_pull_that_is_tried_again_and_again_is_told_seldom():
    log = TroubleLog()
    told: list[str] = []
    for turn, reason in enumerate(("ErrImagePull", "ImagePullBackOff") * 4):
        told += told_at(log, 70.0 * turn, *troubles(pod(waits_for=reason)))
    assert len(told) == 1
    assert "ErrImagePull" in told[0]


def test_the_next_best_plan_is_told_when_waiting_has_become_long():
    log = TroubleLog()
    waiting = troubles(pod(unschedulable=NODES))
    assert "another" not in told_at(log, 0.0, *waiting)[0]
    assert told_at(log, CAPACITY_SECONDS - 1, *waiting) == []
    assert "another" in told_at(log, CAPACITY_SECONDS, *waiting)[0]
    assert told_at(log, CAPACITY_SECONDS + 1, *waiting) == []


def test_dnn_hosts_wait_for_nodes_as_long_as_the_workload_says():
    (trouble,) = troubles(pod(index=0, unschedulable=NODES), pod(index=1, unschedulable=NODES))
    assert (trouble.fatal_after, trouble.is_capacity) == (3600.0, True)
    log = TroubleLog()
    told_at(log, 100.0, trouble)
    told_at(log, 3699.0, trouble)
    assert log.over() is None
    told_at(log, 3700.0, trouble)
    assert log.over() is trouble


FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
ELSEWHERE = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."
NO_GROUP = "pod didn't trigger scale-up: 3 node(s) didn't match Pod's node affinity/selector"


@pytest.mark.parametrize(
    ("said", "is_final"),
    [
        (NO_GROUP, True),
        (f"{NO_GROUP}, 2 Insufficient nvidia.com/gpu", True),
        ("pod didn't trigger scale-up (it wouldn't fit if a new node is added)", True),
        (
            "pod didn't trigger scale-up: 1 node(s) had taint {spot: true}, that the pod didn't "
            "tolerate, 1 node(s) had untolerated taint {gpu: true}",
            True,
        ),
        (f"{NO_GROUP}, 1 max node group size reached", False),
        ("pod didn't trigger scale-up: 1 in backoff after failed scale-up", False),
        ("pod didn't trigger scale-up: max total nodes in cluster reached", False),
        ("pod didn't trigger scale-up: ", False),
    ],
)
def test_the_autoscaler_refuses_for_ever_where_no_group_of_its_fits(said, is_final):
    assert has_no_group(said) == is_final


@pytest.mark.parametrize(
    ("said", "unfit", "fatal_after"),
    [
        (ELSEWHERE, NO_GROUP, UNFIT_SECONDS),
        # A node that is full may get free, whatever the autoscaler has.
        (FULL, NO_GROUP, 3600.0),
        (ELSEWHERE, "", 3600.0),
    ],
)
def test_only_hosts_that_fit_no_node_and_no_group_are_refused_early(said, unfit, fatal_after):
    (trouble,) = troubles(pod(unschedulable=said), unfit=unfit)
    assert trouble.fatal_after == fatal_after
    assert (trouble.is_capacity, trouble.may_pass) == (True, False)


def quota(requested: str, used: str, limited: str) -> str:
    words = f"exceeded quota: q, requested: {requested}, used: {used}, limited: {limited}"
    return f'Error creating: pods "x" is forbidden: {words}'


@pytest.mark.parametrize(
    ("message", "times", "is_for_ever"),
    [
        (quota("cpu=4", "cpu=0", "cpu=1"), 1, True),
        (quota("requests.nvidia.com/gpu=1", "g=0", "requests.nvidia.com/gpu=0"), 1, True),
        (quota("pods=1", "pods=1", "pods=1"), 4, True),
        (quota("cpu=500m,memory=8Gi", "cpu=0,memory=0", "cpu=4,memory=4Gi"), 1, True),
        (quota("cpu=4", "cpu=2", "cpu=4"), 1, False),
        (quota("cpu=x", "cpu=2", "cpu=4"), 1, False),
        ("exceeded quota: q", 1, False),
    ],
)
def test_a_request_above_the_whole_quota_never_passes(message, times, is_for_ever):
    assert exceeds(message, times=times) == is_for_ever
    if times == 1 and "=x" not in message:
        trouble = refused_pods(LAYOUT.dnn, message)
        assert trouble.may_pass != is_for_ever
        assert trouble.fatal_after == (0.0 if is_for_ever else QUOTA_SECONDS)
        assert refused_pods(LAYOUT.data[0], message).fatal_after is None


def test_a_data_host_that_crashes_again_and_again_is_told_with_what_it_costs():
    crashing = pod("data", node="n", restarts=3, waits_for="CrashLoopBackOff", is_started=True)
    (trouble,) = troubles(crashing, pod("data", 1, node="n", is_running=True))
    assert "1 of 2 data hosts crash at each start, up to 3 times" in trouble.what
    assert "$1.43 an hour" in trouble.what
    assert trouble.fatal_after is None
    assert troubles(dataclasses.replace(crashing, restarts=2)) == []


GRACE = 120.0
STUCK = pod(
    node="node-1",
    is_started=True,
    is_running=True,
    deleted_at="2026-11-20T09:10:00Z",
    grace_seconds=GRACE,
)
OVERDUE = GRACE + DEAD_SECONDS


def test_a_pod_has_a_minute_to_end_after_its_grace():
    assert troubles(STUCK, seconds=OVERDUE - 1) == []
    (trouble,) = troubles(STUCK, seconds=OVERDUE)
    assert trouble.is_dead_node


@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ({}, "the run waits 30 min more, and then fails"),
        ({"dead_node_minutes": 5}, "the run waits 5 min more, and then fails"),
        ({"dead_node": "fail"}, "the run fails"),
    ],
)
def test_a_node_that_is_not_ready_is_told_at_once_with_what_happens_and_when(settings, then):
    unready = dataclasses.replace(STUCK, is_node_unready=True)
    (trouble,) = troubles(unready, pod("data", node="n-2"), seconds=0.0, **settings)
    for words in (STUCK.name, "node-1 is not ready", "180 s after its deletion", then, "$0.714 an"):
        assert words in trouble.what
    assert "kubectl delete node node-1" in trouble.fix
    assert (trouble.told_after, trouble.fatal_after, trouble.is_dead_node) == (0.0, None, False)
    # Then the same trouble as of a node of which nothing was told.
    after = troubles(unready, pod("data", node="n-2"), seconds=OVERDUE, **settings)
    assert after == troubles(STUCK, pod("data", node="n-2"), seconds=OVERDUE, **settings)


@pytest.mark.parametrize(
    "others",
    [
        # Drained: its kubelet ends it.
        [dataclasses.replace(STUCK)],
        # Not deleted: the node may come back.
        [dataclasses.replace(STUCK, is_node_unready=True, deleted_at="")],
        [dataclasses.replace(STUCK, is_node_unready=True, is_final=True)],
        # Its place is taken, or it has none of its own.
        [dataclasses.replace(STUCK, is_node_unready=True), pod(uid="new")],
        [dataclasses.replace(STUCK, is_node_unready=True, group="data", role="data")],
    ],
    ids=["drained", "not deleted", "ended", "replaced", "data host"],
)
def test_other_pods_on_their_way_out_are_not_told_of_a_node(others):
    assert troubles(*others, seconds=1.0) == []


def test_the_node_controllers_mark_is_told_apart_from_a_kubelets():
    def is_unready(*conditions):
        labels = {"jobset.sigs.k8s.io/replicatedjob-name": LAYOUT.dnn.job}
        document = {"metadata": {"labels": labels}, "status": {"conditions": [*conditions]}}
        return pod_state(document, by_job(LAYOUT.groups), run=RUN).is_node_unready

    assert is_unready({"type": "Ready", "status": "False"})
    probe = {"type": "Ready", "status": "False", "reason": "ContainersNotReady"}
    for others in ([], [{"type": "Ready", "status": "True"}], [probe]):
        assert not is_unready(*others)


def test_a_pod_that_cannot_end_is_told_with_what_frees_it_and_what_waiting_costs():
    data = [pod("data", index, node=f"node-{index + 2}", is_running=True) for index in range(2)]
    (trouble,) = troubles(STUCK, *data, seconds=OVERDUE)
    for words in (STUCK.name, STUCK.node, STUCK.deleted_at, "2 other hosts are billed, $1.43 an"):
        assert words in trouble.what
    for command in (
        "kubectl taint nodes node-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute",
        "kubectl delete node node-1",
        f"kubectl delete pod {STUCK.name} -n team-a --force --grace-period=0",
    ):
        assert command in trouble.fix


@pytest.mark.parametrize(
    ("role", "settings", "seconds"),
    [
        ("dnn", {}, 1800.0),
        ("dnn", {"dead_node_minutes": 5}, 300.0),
        ("dnn", {"dead_node": "fail"}, 0.0),
        ("dnn", {"dead_node": "fail", "dead_node_minutes": 5}, 0.0),
        ("data", {"dead_node": "fail"}, None),
    ],
)
def test_only_a_dnn_host_that_cannot_end_ends_the_run_if_the_workload_says(role, settings, seconds):
    stuck = dataclasses.replace(STUCK, group=role, role=role)
    (trouble,) = troubles(stuck, seconds=OVERDUE, **settings)
    assert trouble.fatal_after == seconds


def test_a_dnn_host_whose_place_is_taken_does_not_end_the_run():
    (trouble,) = troubles(STUCK, pod(uid="new"), seconds=OVERDUE, dead_node="fail")
    assert trouble.fatal_after is None


@pytest.mark.parametrize("changes", [{"is_final": True}, {"node": ""}, {"deleted_at": ""}])
def test_a_pod_that_has_ended_or_never_had_a_node_holds_nothing(changes):
    assert troubles(dataclasses.replace(STUCK, **changes), seconds=OVERDUE + 540) == []


def end(phase, *pods, record=None, layout=LAYOUT, is_stopped=False, is_whole=False, run_dir=None):
    own = dataclasses.replace(layout.job, run_dir=run_dir or Path("nowhere"))
    layout = dataclasses.replace(layout, job=own)
    files = {"stoker/training.json": to_json(record).encode()} if record else {}
    return conclude(
        ObjectState(uid="u", phase=phase) if phase else None,
        is_stopped=is_stopped,
        layout=layout,
        pods=pods,
        output=OutputParts(files=files),
        events=[],
        log=Log(run=RUN, host="kubernetes"),
        is_whole=lambda uid: is_whole,
    )


@pytest.mark.parametrize(
    ("settings", "unfetched"),
    [
        ({}, f"the log of pod {RUN}-dnn-0-0-abcde"),
        (
            {"output": "pvc://outputs/runs/"},
            f"pvc://outputs/runs/{RUN}/output/0/data/stoker/training.json",
        ),
    ],
)
def test_a_succeeded_run_whose_leader_s_log_is_gone_is_unknown(tmp_path, settings, unfetched):
    layout = lay_out(checked_job(job(name=RUN, settings=settings)))
    found = end("succeeded", pod(ended=ended(5)), layout=layout)
    assert (found.status, found.unfetched) == ("succeeded", unfetched)
    assert end("failed", pod(ended=ended(5, 1)), layout=layout).unfetched is None
    # One that was read to its end had no record.
    assert end("succeeded", pod(ended=ended(5)), layout=layout, is_whole=True).unfetched is None
    known = end("succeeded", pod(ended=ended(5)), record=training(), run_dir=tmp_path)
    assert known.unfetched is None


METER = f"stoker {BEGIN} run={RUN} host={RUN}-dnn-0-0 feed rows='1.4,2.0,rank,0,,,{',9' * 300}'"


def test_a_pod_s_last_words_that_are_cut_begin_with_no_whole_line():
    # As the kubelet keeps them: 2 KiB of the log's end.
    message = f"{METER}\n{METER}\n{METER}\n{METER}\n"[-2048:]
    found = str(end("failed", pod(ended=ended(5, 3, message=message), is_final=True)).failure)
    assert found == f"dnn host {RUN}-dnn-0-0 ended with exit code 3"
    told = f"{METER}\nerror: user 1000 cannot write /stoker\ntry: chown it\n{METER}\n"[-2048:]
    found = str(end("failed", pod(ended=ended(5, 2, message=told), is_final=True)).failure)
    assert found.endswith("exit code 2: user 1000 cannot write /stoker; chown it")
    # The launcher's own words are whole, however long.
    whole = "rank 0 on a: ValueError: " + "\u00e9" * 1100
    last = pod(ended=ended(5, 1, message=f"error: {whole}"), is_final=True)
    assert f"exit code 1: {whole}" in str(end("failed", last).failure)


def test_the_record_s_words_come_before_the_pod_s(tmp_path):
    record = msgspec.structs.replace(training(), status="failed", exit_code=9, failure="its words")
    leader = pod(ended=ended(5, 3, message="boom"), is_final=True)
    found = end("failed", leader, record=record, run_dir=tmp_path)
    assert (found.exit_code, found.failure) == (9, "its words")


def test_a_run_is_billed_from_a_pod_s_place_on_a_node_to_its_end_replaced_pods_too():
    minute = dataclasses.replace(pod(), placed_at="2026-11-20T08:59:00Z", image_digest="sha256:1")
    seen = (
        dataclasses.replace(minute, ended=ended(50)),
        # Replaced in mid-run: it has no end of its container.
        dataclasses.replace(minute, group="data", uid="1", deleted_at="2026-11-20T09:00:10Z"),
        # Its replacement ends with the leader.
        dataclasses.replace(minute, group="data", uid="2", placed_at="2026-11-20T09:00:40Z"),
        # It never had a node.
        dataclasses.replace(minute, group="data", uid="3", placed_at=""),
    )
    assert end("succeeded", *seen).lineage.image_digest == "sha256:1"
    assert end("succeeded", *seen).host_seconds == {"dnn": 110.0, "data": 70.0 + 10.0}


@pytest.mark.parametrize(
    ("data_ends", "seconds"),
    [((7, 9), 4.0), ((3, 4), 0.0), ((7, None), None), ((None, None), None)],
)
def test_the_release_of_the_data_group_is_known_where_all_its_ends_are(data_ends, seconds):
    data = [
        pod("data", index, is_started=True, ended=ended(at) if at is not None else None)
        for index, at in enumerate(data_ends)
    ]
    never_started = pod("data", len(data))
    found = end("succeeded", pod(ended=ended(5)), *data, never_started)
    assert found.data_group_release_seconds == seconds


@pytest.mark.parametrize(("is_stopped", "status"), [(True, "stopped"), (False, "succeeded")])
def test_a_job_that_is_gone_ended_as_its_record_says_unless_stopped(tmp_path, is_stopped, status):
    found = end(None, record=training(), run_dir=tmp_path, is_stopped=is_stopped)
    assert found.status == status
    assert end(None).status == "stopped"
