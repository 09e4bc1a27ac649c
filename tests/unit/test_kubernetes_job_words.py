"""Checks what is said of hosts that wait, and of how a run ended."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from stoker.logs import Log
from stoker.platforms.kubernetes.job import conclude
from stoker.platforms.kubernetes.objects import COMPLETION_INDEX, REPLICATED_JOB_LABEL, lay_out
from stoker.platforms.kubernetes.pod_outputs import OutputParts
from stoker.platforms.kubernetes.pods import (
    PodEnd,
    PodState,
    by_job,
    pod_state,
)
from stoker.platforms.kubernetes.state import ObjectState
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
LAYOUT = lay_out(job(name=RUN))
BEGIN = "2026-11-20T09:00:00Z"
NODES = (
    "0/5 nodes are available: 2 Insufficient nvidia.com/gpu, 1 Insufficient cpu, 2 node(s) had "
    "untolerated taint {spot: true}. preemption: 0/5 nodes are available: 5 No preemption victims."
)

PRICES = {GPU: 1.212, CPU: 0.714}


def pod(role: str = "dnn", index: int = 0, **changes: object) -> PodState:
    metadata = {
        "name": f"{RUN}-{role}-0-{index}-abcde",
        "uid": f"{role}-{index}",
        "creationTimestamp": BEGIN,
        "labels": {REPLICATED_JOB_LABEL: role, COMPLETION_INDEX: str(index)},
    }
    made = pod_state({"metadata": metadata}, by_job(LAYOUT.groups), run=RUN)
    assert made is not None
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def ended(seconds: int, code: int = 0, *, reason: str = "", message: str = "") -> PodEnd:
    at = f"2026-11-20T09:00:{seconds:02d}Z"
    return PodEnd(exit_code=code, reason=reason, message=message, at=at)


def troubles(
    *pods: PodState, seconds: float = 0.0, unfit: str = "", **settings: Any
) -> list[Trouble]:
    """Returns the troubles, for deleted pods `seconds` after their deletion was seen."""
    made = job(name=RUN, image="image:1", settings=settings, on_no_capacity={"wait_minutes": 60})
    layout = lay_out(dataclasses.replace(made, next_best="another", prices=PRICES))
    found = troubles_of(
        pods,
        layout,
        namespace="team-a",
        deleted_seconds={pod.uid: seconds for pod in pods},
        unfit={pod.name: unfit for pod in pods if unfit},
    )
    return [*found]


# --- waiting


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('persistentvolumeclaim "a" not found. not found', 'persistentvolumeclaim "a" not found'),
        (
            "pod has unbound immediate PersistentVolumeClaims",
            "pod has unbound immediate PersistentVolumeClaims",
        ),
    ],
)
def test_a_claim_that_is_not_there_is_no_want_of_nodes(said, words):
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
    found = troubles(pod("data", 0, unschedulable=NODES), pod("data", 1, unschedulable=NODES))
    (trouble,) = found
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
        (
            'error looking up service account a/b: serviceaccount "b" not found',
            "serviceAccountName",
        ),
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
    assert (trouble.fatal_after, trouble.is_capacity, trouble.may_pass) == (
        fatal_after,
        True,
        False,
    )


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


# --- nodes that are cut off


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
def test_only_a_dnn_host_that_cannot_end_ends_the_run_when_the_workload_says(
    role, settings, seconds
):
    stuck = dataclasses.replace(STUCK, group=role, role=role)
    (trouble,) = troubles(stuck, seconds=OVERDUE, **settings)
    assert trouble.fatal_after == seconds


def test_a_dnn_host_whose_place_is_taken_does_not_end_the_run():
    (trouble,) = troubles(STUCK, pod(uid="new"), seconds=OVERDUE, dead_node="fail")
    assert trouble.fatal_after is None


@pytest.mark.parametrize("changes", [{"is_final": True}, {"node": ""}, {"deleted_at": ""}])
def test_a_pod_that_has_ended_or_never_had_a_node_holds_nothing(changes):
    assert troubles(dataclasses.replace(STUCK, **changes), seconds=OVERDUE + 540) == []


# --- the end


def end(
    phase,
    *pods,
    record=None,
    is_stopped=False,
    run_dir=Path("nowhere"),
    layout=LAYOUT,
    is_whole=False,
):
    layout = dataclasses.replace(layout, job=dataclasses.replace(layout.job, run_dir=run_dir))
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
    layout = lay_out(job(name=RUN, settings=settings))
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
def test_a_job_that_is_gone_ended_as_its_record_says_unless_it_was_stopped(
    tmp_path, is_stopped, status
):
    found = end(None, record=training(), run_dir=tmp_path, is_stopped=is_stopped)
    assert found.status == status
    assert end(None).status == "stopped"
