"""A run's nodes, as the service tells them, become a tree of the pipeline's steps."""

import base64
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stoker.orchestrators.base import RunState, StepState
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection, login_page
from stoker.orchestrators.kubeflow.compile import CompiledSpec
from stoker.orchestrators.kubeflow.nodes import words_in
from stoker.orchestrators.kubeflow.runs import FoundRun, state_of, state_of_run
from stoker.records import Json
from stoker.records.base import mapping
from support.kfp_server import PHASES, pod_of
from support.kubeflow_orchestrator import WORKFLOW, node_id, tasks

RUN = "5b1f6c3e-0000-4000-8000-00000000abcd"
LOGS = Path(__file__).parents[1] / "data" / "kubeflow_logs"


def task(name: str, *after: str, **more: Json) -> Json:
    awaited: Json = {"dependentTasks": list(after)} if after else {}
    return {"componentRef": {"name": f"comp-{name}"}, **mapping(awaited), **more}


def pipeline() -> Json:
    """Makes a pipeline: an exit handler around profile, a condition with train in it and gate."""
    names = ("profile", "train", "gate", "finish", "copy")
    return {
        "pipelineInfo": {"name": "mnist"},
        "components": {
            **{f"comp-{name}": {"executorLabel": name} for name in names},
            "comp-if": {"dag": {"tasks": {"train": task("train")}}},
            "comp-each": {"dag": {"tasks": {"copy": task("copy")}}},
            "comp-exit-handler-1": {
                "dag": {
                    "tasks": {
                        "profile": task("profile"),
                        "if": task("if", "profile", triggerPolicy={"condition": "x"}),
                        "each": task("each", "profile", parameterIterator={"itemInput": "i"}),
                        "gate": task("gate", "if", "each"),
                    }
                }
            },
        },
        "root": {
            "dag": {
                "tasks": {
                    "exit-handler-1": task("exit-handler-1"),
                    "finish": task(
                        "finish",
                        "exit-handler-1",
                        triggerPolicy={"strategy": "ALL_UPSTREAM_TASKS_COMPLETED"},
                    ),
                }
            }
        },
    }


SPEC = CompiledSpec(pipeline=mapping(pipeline()), platforms={})


class PlayedKubeflow(Kubeflow):
    """Answers paths from a table, and refuses all others as a dashboard does."""

    def __init__(self, answers: Mapping[str, str]) -> None:
        super().__init__(KubeflowConnection(host="http://x", ui="http://x"))
        self.answers = answers
        self.asked: list[str] = []

    def get(self, path: str, *, max_bytes: int = 0) -> str:
        self.asked.append(path)
        if path not in self.answers:
            raise login_page(self.connection)
        return self.answers[path]


def nodes(**states: str) -> list[dict[str, Json]]:
    return tasks(SPEC, **states)


def state(
    found: Sequence[Mapping[str, Json]],
    run: str = "RUNNING",
    *,
    answers: Mapping[str, str] | None = None,
    **more: Json,
) -> RunState:
    """Returns the state of a run whose Workflow has these nodes."""
    workflow = {"status": {"nodes": {str(n["id"]): n for n in found}}}
    manifest = json.dumps({"pipeline_runtime": {"workflow_manifest": json.dumps(workflow)}})
    answers = {f"/apis/v1beta1/runs/{RUN}": manifest, **(answers or {})}
    return state_by(PlayedKubeflow(answers), run, **more)


def state_by(kubeflow: Kubeflow, run: str = "RUNNING", **more: Json) -> RunState:
    document: Mapping[str, Json] = {
        "run_id": RUN,
        "state": run,
        "created_at": "2026-11-20T10:00:00Z",
        "pipeline_spec": pipeline(),
        **more,
    }
    return state_of(kubeflow, FoundRun(id=RUN, document=document))


def log_path(pod: str) -> str:
    return f"/apis/v1alpha1/runs/{RUN}/nodes/{pod}/log"


def pod_in(found: Sequence[Mapping[str, Json]], end: str) -> str:
    return next(pod_of(node) for node in found if str(node["name"]).endswith(end))


def step(found: RunState, name: str) -> StepState:
    return next(step for step in found.steps if step.name == name)


def shown(found: RunState) -> list[tuple[str, str, int]]:
    return [(each.name, each.status, each.depth) for each in found.steps]


TREE = [
    ("exit-handler-1", "running", 0),
    ("profile", "succeeded", 1),
    ("each", "waiting", 1),
    ("copy", "waiting", 2),
    ("if", "running", 1),
    ("train", "running", 2),
    ("gate", "waiting", 1),
    ("finish", "waiting", 0),
]


def test_the_pipeline_s_own_tasks_are_shown_and_no_node_of_argo_s() -> None:
    found = state(nodes(profile="SUCCEEDED", train="RUNNING"))
    assert shown(found) == TREE
    assert found.pipeline == "mnist"
    assert found.url == f"http://x/#/runs/details/{RUN}"
    assert step(found, "profile").began == datetime(2026, 11, 20, 10, 1, tzinfo=UTC)


def test_display_names_alone_tell_the_states_where_the_workflow_is_not_shown() -> None:
    """A Kubeflow without the older API has only them."""
    details: Json = [
        {"display_name": node["displayName"], "state": PHASES[str(node["phase"])]}
        for node in nodes(profile="SUCCEEDED", train="RUNNING")
    ]
    found = state_by(PlayedKubeflow({}), run_details={"task_details": details})
    assert shown(found) == TREE


def test_the_exit_task_is_found_inside_the_hook_of_its_group() -> None:
    assert step(state(nodes(profile="FAILED", finish="RUNNING")), "finish").status == "running"


def test_what_did_not_come_to_run_is_not_run_once_the_run_has_ended() -> None:
    """Neither what has no node, nor what was omitted, nor what still waited."""
    told = nodes(profile="FAILED", train="OMITTED", gate="PENDING Unschedulable")
    found = state(told, "FAILED", finished_at="2026-11-20T10:05:00Z")
    assert {name for name, status, _ in shown(found) if status == "not run"} >= {
        "each",
        "train",
        "gate",
        "finish",
    }
    assert "waiting" not in {each.status for each in found.steps}
    assert found.ended == datetime(2026, 11, 20, 10, 5, tzinfo=UTC)


def test_what_still_ran_as_the_run_ended_was_stopped() -> None:
    assert step(state(nodes(profile="RUNNING"), "FAILED"), "profile").status == "stopped"


def test_a_condition_says_how_it_came_out() -> None:
    assert step(state(nodes(**{"if": "SKIPPED"})), "if").outcome == "False"
    assert step(state(nodes(train="RUNNING")), "if").outcome == "True"
    assert step(state(nodes(profile="RUNNING")), "if").outcome == ""
    # Omitted because profile failed: it was never judged.
    assert step(state(nodes(profile="FAILED", **{"if": "OMITTED"})), "if").outcome == ""


def test_a_loop_s_task_has_the_state_of_all_its_iterations() -> None:
    place = f"{WORKFLOW}(0).root(0).exit-handler-1(0).each(0).iteration-iterations"
    told = nodes(profile="SUCCEEDED", copy="SUCCEEDED")
    copies = [node for node in told if ".copy" in str(node["name"])]
    others = [node for node in told if ".copy" not in str(node["name"])]
    for number, phase in enumerate(("Succeeded", "Running")):
        for node in copies:
            inner = str(node["name"]).partition("each(0)")[2]
            name = f"{place}({number}:{number})(0).iteration-item(0){inner}"
            others.append({**node, "name": name, "id": node_id(name), "phase": phase})
    found = state(others)
    assert step(found, "copy").status == "running"
    assert ("copy", "running", 2) in shown(found)


def test_a_failed_step_has_its_reason_and_its_own_lines_from_its_pod() -> None:
    told = nodes(profile="SUCCEEDED", gate="FAILED main: Error (exit code 1)")
    pod = pod_in(told, ".gate(0).executor(0)")
    log = (LOGS / "gate.log").read_text()
    gate = step(state(told, "FAILED", answers={log_path(pod): log}), "gate")
    assert (gate.status, gate.cause, gate.job) == ("failed", "gate", pod)
    assert gate.reason == "accuracy is 0.61, asked for at least 0.9"
    assert gate.lines == ("error: accuracy is 0.61, asked for at least 0.9", "where: the gate")


def test_a_failed_driver_s_own_error_is_the_reason() -> None:
    """K2's cause stood there: the step's own pod was never made."""
    told = nodes(profile="DRIVER Error (exit code 1)")
    pod = pod_in(told, ".profile-driver(0)")
    log = (LOGS / "driver.log").read_text()
    found = state(told, "FAILED", answers={log_path(pod): log})
    profile = step(found, "profile")
    assert (profile.status, profile.cause) == ("failed", "platform")
    assert profile.reason == (
        'failed to resolve container args: parameter "input_data" not found in executor input'
    )
    assert profile.lines == ()
    assert found.exit_code == 4


def test_the_log_that_argo_kept_is_read_where_the_log_api_has_none() -> None:
    """Its answer has status 200 also for a pod that is gone."""
    told = nodes(train="FAILED main: Error (exit code 1)")
    pod = pod_in(told, ".train(0).executor(0)")
    id = next(str(n["id"]) for n in told if str(n["name"]).endswith(".train(0).executor(0)"))
    kept = base64.b64encode(b"loss 2.3\nIndexError: 7\n").decode()
    answers = {
        log_path(pod): '{"error_message": "no such pod", "error_details": "x"}',
        f"/apis/v2beta1/runs/{RUN}/nodes/{id}/artifacts/main-logs:read": json.dumps({"data": kept}),
    }
    assert step(state(told, "FAILED", answers=answers), "train").lines == (
        "loss 2.3",
        "IndexError: 7",
    )


def test_without_any_log_the_engine_s_reason_is_left() -> None:
    told = nodes(train="FAILED OOMKilled (exit code 137)")
    train = step(state(told, "FAILED"), "train")
    assert (train.reason, train.lines) == ("OOMKilled (exit code 137)", ())


def test_a_log_is_read_until_it_is_there_and_then_no_more() -> None:
    told = nodes(train="FAILED main: Error (exit code 1)")
    kubeflow = PlayedKubeflow({})
    workflow = {"status": {"nodes": {str(n["id"]): n for n in told}}}
    kubeflow.answers = {
        f"/apis/v1beta1/runs/{RUN}": json.dumps(
            {"pipeline_runtime": {"workflow_manifest": json.dumps(workflow)}}
        ),
    }
    assert step(state_by(kubeflow), "train").lines == ()
    kubeflow.answers[log_path(pod_in(told, ".train(0).executor(0)"))] = "broken\n"
    kubeflow.asked.clear()
    for _ in range(2):
        assert step(state_by(kubeflow), "train").lines == ("broken",)
    assert sum("/log" in path for path in kubeflow.asked) == 1


def test_at_most_ten_own_lines_are_shown() -> None:
    words = words_in("\n".join(f"line {number}" for number in range(30)))
    assert words.own == tuple(f"line {number}" for number in range(20, 30))


def test_the_launcher_s_json_of_many_lines_is_not_the_step_s() -> None:
    log = (
        "done\n"
        'I1123 18:34:54.123456       1 launcher_v2.go:1230] ExecutorOutput: {\n  "a": {\n'
        "  }\n}\nbye\n"
        'time=2026-11-23T18:34:55.001Z level=INFO msg="sub-process exited"\n'
        'time="2026-11-23T18:34:55.001Z" level=info msg="sub-process exited" argo=true\n'
        "Error: exit status 6\n"
    )
    assert words_in(log).own == ("done", "bye")


def test_attempts_are_counted() -> None:
    found = state(tasks(SPEC, {"profile": 3}, profile="RUNNING"))
    assert step(found, "profile").attempts == 3


def test_a_pod_that_waits_says_why() -> None:
    found = state(nodes(profile="PENDING Unschedulable: 0/3 nodes are available"))
    profile = step(found, "profile")
    assert (profile.status, profile.reason) == (
        "running",
        "Unschedulable: 0/3 nodes are available",
    )


def test_an_earlier_run_s_result_is_told() -> None:
    told = nodes(profile="SUCCEEDED")
    for node in told:
        if ".profile(0).executor" in str(node["name"]):
            node["phase"] = "Skipped"
    assert step(state(told), "profile").is_cached


@pytest.mark.parametrize(
    ("name", "reason", "code"),
    [
        ("profile", "main: Error (exit code 1)", 6),
        ("train", "exit status 6", 6),
        ("train", "OOMKilled (exit code 137)", 6),
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
    assert state(nodes(**{name: f"FAILED {reason}"}), "FAILED").exit_code == code


def test_the_launcher_s_code_counts_before_the_engine_s() -> None:
    """The engine sees the launcher's own code, which is always 1."""
    told = nodes(train="FAILED main: Error (exit code 1)")
    log = "F1123 18:34:54.123456       1 main.go:130] failed to execute component: exit status 4\n"
    answers = {log_path(pod_in(told, ".train(0).executor(0)")): log}
    assert state(told, "FAILED", answers=answers).exit_code == 4


def test_a_run_of_a_version_that_is_gone_has_no_steps() -> None:
    """Only the pipeline's spec tells its tasks from Argo's nodes."""
    assert state(nodes(profile="SUCCEEDED"), pipeline_spec=None).steps == ()


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
    early = [{**node, "startedAt": None} for node in nodes(profile="PENDING")]
    assert step(state(early), "profile").began is None
