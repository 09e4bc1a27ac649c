"""Checks what is said of hosts that wait, and of how a run ended."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stoker.logs import Log
from stoker.platforms.kubernetes.job import conclude
from stoker.platforms.kubernetes.objects import COMPLETION_INDEX, REPLICATED_JOB_LABEL, lay_out
from stoker.platforms.kubernetes.pod_outputs import OutputParts
from stoker.platforms.kubernetes.pods import (
    CAPACITY_SECONDS,
    CHANGE_SECONDS,
    CLAIM_SECONDS,
    IMAGE_SECONDS,
    PodEnd,
    PodState,
    Trouble,
    TroubleLog,
    by_job,
    pod_state,
    refused_pods,
    troubles_of,
)
from stoker.platforms.kubernetes.state import ObjectState
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


def troubles(*pods: PodState, utc: str = BEGIN, **settings: Any) -> list[Trouble]:
    made = job(name=RUN, image="image:1", settings=settings, on_no_capacity={"wait_minutes": 60})
    layout = lay_out(dataclasses.replace(made, next_best="another", prices=PRICES))
    return [*troubles_of(pods, layout, namespace="team-a", utc=utc)]


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


def test_a_trouble_is_said_once_then_seldom_and_anew_when_it_comes_back():
    log = TroubleLog(repeat_seconds=600.0)
    trouble = Trouble(key="k", group="dnn", what="it waits")
    assert [words for _, words in log.news([trouble], now=0.0)] == ["it waits"]
    assert list(log.news([trouble], now=599.0)) == []
    assert [words for _, words in log.news([trouble], now=600.0)] == ["it waits (for 600 s)"]
    assert list(log.news([], now=700.0)) == []
    assert [words for _, words in log.news([trouble], now=701.0)] == ["it waits"]


def test_that_other_hosts_wait_as_well_is_told_within_a_minute():
    log = TroubleLog(repeat_seconds=600.0)

    def told(hosts: int, now: float) -> list[str]:
        what = f"{hosts} of 16 data hosts wait"
        trouble = Trouble(key="k", group="data", what=what, hosts=hosts)
        return [words for _, words in log.news([trouble], now=now)]

    assert told(1, 0.0) == ["1 of 16 data hosts wait"]
    assert told(16, CHANGE_SECONDS - 1) == []
    assert told(16, CHANGE_SECONDS) == [f"16 of 16 data hosts wait (for {CHANGE_SECONDS:.0f} s)"]
    assert told(16, 3 * CHANGE_SECONDS) == []
    assert told(16, CHANGE_SECONDS + 600) != []


def test_a_pull_that_is_tried_again_and_again_is_told_seldom():
    log = TroubleLog(repeat_seconds=600.0)
    told: list[str] = []
    for turn, reason in enumerate(("ErrImagePull", "ImagePullBackOff") * 4):
        told += [words for _, words in log.news(troubles(pod(waits_for=reason)), now=70.0 * turn)]
    assert len(told) == 1
    assert "ErrImagePull" in told[0]


def test_the_next_best_plan_is_told_when_waiting_has_become_long():
    log = TroubleLog(repeat_seconds=10_000.0)
    waiting = troubles(pod(unschedulable=NODES))
    assert "another" not in next(log.news(waiting, now=0.0))[1]
    assert list(log.news(waiting, now=CAPACITY_SECONDS - 1)) == []
    assert "another" in next(log.news(waiting, now=CAPACITY_SECONDS))[1]
    assert list(log.news(waiting, now=CAPACITY_SECONDS + 1)) == []


def test_dnn_hosts_wait_for_nodes_as_long_as_the_workload_says():
    (trouble,) = troubles(
        pod(index=0, unschedulable=NODES, unschedulable_since="2026-11-20T09:30:00Z"),
        pod(index=1, unschedulable=NODES, unschedulable_since="2026-11-20T09:20:00Z"),
    )
    assert (trouble.fatal_after, trouble.is_capacity) == (3600.0, True)
    assert trouble.since == "2026-11-20T09:20:00Z"
    log = TroubleLog(repeat_seconds=600.0)
    # Seen first by an attempt that adopts the job: 40 minutes of the hour are over.
    (told,) = log.news([trouble], now=100.0, utc="2026-11-20T10:00:00+00:00")
    assert "(for 2400 s)" in told[1]
    assert log.over([trouble], now=100.0 + 1199) is None
    assert log.over([trouble], now=100.0 + 1200) is trouble


# --- nodes that are cut off


STUCK = pod(node="node-1", is_started=True, is_running=True, deleted_at="2026-11-20T09:10:00Z")


def seconds_past(seconds: int) -> str:
    return f"2026-11-20T09:{10 + seconds // 60:02d}:{seconds % 60:02d}.500Z"


def test_a_pod_has_a_minute_to_end_after_its_grace():
    assert troubles(STUCK, utc=seconds_past(59)) == []
    (trouble,) = troubles(STUCK, utc=seconds_past(60))
    assert trouble.is_dead_node


def test_a_pod_that_cannot_end_is_told_with_what_frees_it_and_what_waiting_costs():
    data = [pod("data", index, node=f"node-{index + 2}", is_running=True) for index in range(2)]
    (trouble,) = troubles(STUCK, *data, utc=seconds_past(60))
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
    (trouble,) = troubles(stuck, utc=seconds_past(60), **settings)
    assert (trouble.fatal_after, trouble.since) == (seconds, STUCK.deleted_at)


def test_a_dnn_host_whose_place_is_taken_does_not_end_the_run():
    (trouble,) = troubles(STUCK, pod(uid="new"), utc=seconds_past(60), dead_node="fail")
    assert trouble.fatal_after is None


@pytest.mark.parametrize("changes", [{"is_final": True}, {"node": ""}, {"deleted_at": ""}])
def test_a_pod_that_has_ended_or_never_had_a_node_holds_nothing(changes):
    assert troubles(dataclasses.replace(STUCK, **changes), utc=seconds_past(600)) == []


# --- the end


def end(phase, *pods, record=None, is_stopped=False, run_dir=Path("nowhere")):
    layout = dataclasses.replace(LAYOUT, job=dataclasses.replace(LAYOUT.job, run_dir=run_dir))
    files = {"stoker/training.json": to_json(record).encode()} if record else {}
    return conclude(
        ObjectState(uid="u", phase=phase) if phase else None,
        is_stopped=is_stopped,
        layout=layout,
        pods=pods,
        output=OutputParts(files=files),
        events=[],
        log=Log(run=RUN, host="kubernetes"),
    )


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
def test_a_job_that_is_gone_ended_as_its_record_says_unless_it_was_stopped(
    tmp_path, is_stopped, status
):
    found = end(None, record=training(), run_dir=tmp_path, is_stopped=is_stopped)
    assert found.status == status
    assert end(None).status == "stopped"
