"""A run's nodes, as the service tells them, become a tree of the pipeline's steps."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import pytest

from stoker.orchestrators.base import RunState, StepState
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection
from stoker.orchestrators.kubeflow.runs import FoundRun, state_of, state_of_run
from stoker.records import Json

RUN = "5b1f6c3e-0000-4000-8000-00000000abcd"


def pipeline() -> Json:
    """Makes a pipeline: profile, then a condition with train in it, then gate."""
    names = ("profile", "train", "gate")
    return {
        "pipelineInfo": {"name": "mnist"},
        "components": {
            **{f"comp-{name}": {"executorLabel": name} for name in names},
            "comp-if": {"dag": {"tasks": {"train": {"componentRef": {"name": "comp-train"}}}}},
        },
        "root": {
            "dag": {
                "tasks": {
                    "profile": {"componentRef": {"name": "comp-profile"}},
                    "if": {
                        "componentRef": {"name": "comp-if"},
                        "dependentTasks": ["profile"],
                        "triggerPolicy": {"condition": "x"},
                    },
                    "gate": {"componentRef": {"name": "comp-gate"}, "dependentTasks": ["if"]},
                }
            }
        },
    }


def node(name: str, state: str, *, id: str = "", reason: str = "", **more: Json) -> dict[str, Json]:
    return {
        "task_id": id or name,
        "display_name": name,
        "create_time": "2026-11-20T10:00:00Z",
        "start_time": "2026-11-20T10:01:00Z",
        "end_time": "2026-11-20T10:03:00Z",
        "state": state,
        **({"error": {"message": reason}} if reason else {}),
        **more,
    }


def children(*ids: str) -> dict[str, Json]:
    return {"child_tasks": [{"task_id": id} for id in ids]}


def state(nodes: Iterable[Mapping[str, Json]], run: str = "RUNNING", **more: Json) -> RunState:
    document: Mapping[str, Json] = {
        "run_id": RUN,
        "state": run,
        "created_at": "2026-11-20T10:00:00Z",
        "pipeline_spec": pipeline(),
        "run_details": {"task_details": list(nodes)},
        **more,
    }
    kubeflow = Kubeflow(KubeflowConnection(host="http://x", ui="http://x"))
    return state_of(kubeflow, FoundRun(id=RUN, document=document))


def step(found: RunState, name: str) -> StepState:
    return next(step for step in found.steps if step.name == name)


def test_steps_stand_in_the_pipeline_s_order_whatever_the_nodes_order_is() -> None:
    found = state([node("gate", "PENDING"), node("root", "RUNNING"), node("profile", "SUCCEEDED")])
    assert [(s.name, s.status, s.depth) for s in found.steps] == [
        ("profile", "succeeded", 0),
        ("if", "waiting", 0),
        ("train", "waiting", 1),
        ("gate", "waiting", 0),
    ]
    assert found.pipeline == "mnist"
    assert found.url == f"http://x/#/runs/details/{RUN}"
    assert step(found, "profile").began == datetime(2026, 11, 20, 10, 1, tzinfo=UTC)


def test_what_did_not_come_to_run_is_told_when_the_run_has_ended() -> None:
    found = state([node("profile", "FAILED")], "FAILED", finished_at="2026-11-20T10:05:00Z")
    assert step(found, "gate").status == "not run"
    assert found.ended == datetime(2026, 11, 20, 10, 5, tzinfo=UTC)


def test_a_condition_says_how_it_came_out() -> None:
    assert step(state([node("if", "SKIPPED")]), "if").outcome == "False"
    assert step(state([node("if", "RUNNING")]), "if").outcome == "True"
    assert step(state([node("if", "PENDING")]), "if").outcome == ""


def test_a_reason_comes_from_the_container_and_a_successor_s_is_not_taken() -> None:
    found = state(
        [
            node("profile", "FAILED", reason="child failed", **children("e1")),
            node(
                "executor",
                "FAILED",
                id="e1",
                reason="main: Error (exit code 1)",
                pod_name="pod-1",
                **children("gate-driver"),
            ),
            node("gate-driver", "FAILED", reason="something else"),
        ],
        "FAILED",
    )
    profile = step(found, "profile")
    assert (profile.reason, profile.cause) == ("main: Error (exit code 1)", "workload")
    assert profile.job == "pod-1"


def test_a_step_whose_driver_failed_has_failed() -> None:
    found = state([node("profile-driver", "FAILED", reason="no such claim")], "FAILED")
    profile = step(found, "profile")
    assert (profile.status, profile.reason, profile.cause) == (
        "failed",
        "no such claim",
        "platform",
    )


def test_attempts_are_counted() -> None:
    found = state(
        [
            node("profile", "RUNNING", **children("r")),
            node("executor", "RUNNING", id="r", **children("a0", "a1")),
            node("executor(0)", "FAILED", id="a0"),
            node("executor(1)", "RUNNING", id="a1"),
        ]
    )
    assert step(found, "profile").attempts == 2


def test_an_earlier_run_s_result_is_told() -> None:
    nodes = [node("profile", "SUCCEEDED", **children("e")), node("executor", "SKIPPED", id="e")]
    assert step(state(nodes), "profile").is_cached


def test_nodes_that_are_each_other_s_children_end() -> None:
    nodes = [
        node("profile", "RUNNING", **children("e")),
        node("executor", "RUNNING", id="e", **children("e", "profile")),
    ]
    assert step(state(nodes), "profile").status == "running"


@pytest.mark.parametrize(
    ("name", "reason", "code"),
    [
        ("profile", "main: Error (exit code 1)", 6),
        ("train", "exit status 6", 6),
        ("train", "main: Error (exit code 137): OOMKilled", 6),
        ("train", "exit code 4", 4),
        ("train", "exit code 3", 3),
        ("train", "ImagePullBackOff: no such image", 4),
        ("gate", "main: Error (exit code 1)", 3),
        ("gate", "", 3),
    ],
)
def test_the_exit_code_follows_the_step_and_the_code_that_is_seen(
    name: str, reason: str, code: int
) -> None:
    found = state([node("if", "FAILED"), node(name, "FAILED", reason=reason)], "FAILED")
    assert found.exit_code == code


def test_a_run_of_a_version_that_is_gone_shows_the_nodes_that_have_pods() -> None:
    found = state(
        [
            node("root", "RUNNING", **children("root-driver")),
            node("root-driver", "SUCCEEDED", pod_name="d"),
            node("profile", "SUCCEEDED", **children("e")),
            node("executor", "SUCCEEDED", id="e", pod_name="p"),
        ],
        pipeline_spec=None,
    )
    assert [s.name for s in found.steps] == ["profile"]


@pytest.mark.parametrize(
    ("told", "history", "status"),
    [
        ("PENDING", [], "waiting"),
        ("PAUSED", [], "waiting"),
        ("CANCELING", [], "stopping"),
        ("CANCELED", [], "stopped"),
        ("FAILED", ["RUNNING", "CANCELING"], "stopped"),
        ("FAILED", ["RUNNING"], "failed"),
        ("SOMETHING_NEW", [], "waiting"),
        (None, [], "waiting"),
    ],
)
def test_states_of_a_run(told: Json, history: list[str], status: str) -> None:
    document = {"state": told, "state_history": [{"state": name} for name in history]}
    assert state_of_run(document) == status


def test_a_run_s_reason_is_the_last_that_its_history_has() -> None:
    history: Json = [
        {"state": "RUNNING", "error": {"message": "old"}},
        {"state": "FAILED", "error": {"message": "pods are gone"}},
    ]
    assert state([], "FAILED", state_history=history).reason == "pods are gone"


def test_times_before_anything_began_are_none() -> None:
    early = node("profile", "PENDING", start_time="1970-01-01T00:00:00Z")
    assert step(state([early]), "profile").began is None
