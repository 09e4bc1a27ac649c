"""Checks what is read out of a cluster's objects: jobs, pods, events, errors."""

import json
from typing import Any

import pytest

from stoker.platforms.kubernetes.api import ApiAction, refusal
from stoker.platforms.kubernetes.happenings import Happenings
from stoker.platforms.kubernetes.objects import lay_out
from stoker.platforms.kubernetes.pods import PodState, by_job, pod_state
from stoker.platforms.kubernetes.state import job_state
from stoker.settings import OwnPod, own_pod
from support.kubernetes_jobs import job

RUN = "mnist-1"
LAYOUT = lay_out(job(name=RUN))
CREATE = ApiAction(verb="create", group="jobset.x-k8s.io", resource="jobsets", namespace="team-a")


def condition(kind: str, status: str = "True", **more: str) -> dict[str, str]:
    return {"type": kind, "status": status, **more}


def pod(**status: Any) -> PodState:
    labels = {
        "jobset.sigs.k8s.io/replicatedjob-name": "data",
        "batch.kubernetes.io/job-completion-index": "1",
    }
    metadata = {"name": f"{RUN}-data-0-1-abcde", "uid": "u", "labels": labels}
    found = pod_state({"metadata": metadata, "status": status}, by_job(LAYOUT.groups), run=RUN)
    assert found is not None
    return found


# --- jobs


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


# --- pods


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
    found = pod(phase="Failed", containerStatuses=containers)
    assert found.ended is not None
    assert (found.ended.exit_code, found.ended.reason) == (137, "OOMKilled")
    assert found.is_final


@pytest.mark.parametrize(
    ("status", "lost"),
    [
        ({"reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (
            {"conditions": [condition("DisruptionTarget", reason="PreemptionByScheduler")]},
            "PreemptionByScheduler",
        ),
        ({"conditions": [condition("DisruptionTarget", "False", reason="x")]}, ""),
        ({"reason": "DeadlineExceeded"}, ""),
    ],
)
def test_a_pod_that_is_taken_away_says_why(status, lost):
    assert pod(**status).lost == lost


def test_only_the_scheduler_s_refusal_makes_a_pod_unschedulable():
    gated = condition("PodScheduled", "False", reason="SchedulingGated", message="held")
    refused = condition("PodScheduled", "False", reason="Unschedulable", message="0/3 nodes")
    assert pod(conditions=[gated]).unschedulable == ""
    assert pod(conditions=[refused]).unschedulable == "0/3 nodes"


# --- events


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


# --- errors


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


# --- owners


def test_a_pod_is_known_by_its_own_names_or_those_of_a_pipeline():
    assert own_pod({}) is None
    assert own_pod({"POD_NAME": "p"}) is None
    assert own_pod({"KFP_POD_NAME": "p", "KFP_POD_UID": "u"}) == OwnPod(
        name="p", uid="u", namespace=None
    )
    both = {"POD_NAME": "q", "POD_UID": "v", "POD_NAMESPACE": "n", "KFP_POD_NAME": "p"}
    assert own_pod(both) == OwnPod(name="q", uid="v", namespace="n")
    of_run = own_pod({**both, "POD_RUN_ID": "5b1f6c3e"})
    assert of_run == OwnPod(name="q", uid="v", namespace="n", run_id="5b1f6c3e")
