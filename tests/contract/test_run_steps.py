"""What `status` and `--wait` say of a run's steps: order, seconds, cache, reasons, exit codes.

The nodes are those that the strict double of Kubeflow 2.17 makes; its API shows no error of a node.
"""

import json
from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import yaml

pytest.importorskip("kfp")

from kfp import dsl

from stoker import kubeflow
from stoker.errors import ServiceError
from stoker.kubeflow import PipelineRun, follower
from stoker.pipelines.kubeflow.run_steps import own_lines, reason_in
from stoker.pipelines.sagemaker.run_steps import exit_code_of, run_step, skipped_words, step_names
from stoker.platforms.aws import Aws
from support.command import stoker
from support.kfp_server import KfpServer
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
from support.kubeflow_uploads import (
    client_at,
    compiled,
    upload,
    workload,
    write_project,
)

LAUNCHER = "I1126 10:00:00.123456       1 launcher_v2.go:191] publish success.\n"
ARGO = 'time="2026-11-26T10:00:00.000Z" level=info msg="sub-process exited" argo=true\n'
GATE = "gate failed: accuracy is 0.61, asked for at least 0.9"
CRASH = "the training failed (exit code 1): ValueError: no such file"
TASKS = ["period", "profile", "decide", "train", "evaluate", "gate", "finish"]


@pytest.fixture
def server():
    with KfpServer() as made:
        yield made
    assert made.problems == []


@pytest.fixture
def project(tmp_path, server, monkeypatch):
    write_project(tmp_path, host=server.url)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))


def played(
    server: KfpServer,
    store: Store,
    *,
    ends: Mapping[str, int | str] | None = None,
    says: Mapping[str, str] | None = None,
    overrides: tuple[str, ...] = (),
    has_changed: str = "",
) -> KubeflowRun:
    """Plays the product's pipeline, and gives the server what it shows of it."""

    def execute(step: Step) -> int | str:
        step.write_outputs()
        if step.task == "compare":
            step.output("has_changed").write_text(has_changed)
        node = step.pod["metadata"]["annotations"]["workflows.argoproj.io/node-id"]
        told = (says or {}).get(step.task, f"{step.task} is done")
        ended = (ends or {}).get(step.task, 0)
        if ended != "killed":
            server.logs[node] = f"{LAUNCHER}{told}\n{ARGO}"
        step_seconds = {"train": 3600, "profile": 180}.get(step.task, 5)
        run.clock.sleep(step_seconds)
        return ended

    definition = compiled(*overrides).definition
    run = KubeflowRun(Pipeline(definition), execute=execute, store=store)
    state = run.run()
    server.tell(*run.workflow_nodes())
    server.end(state)
    return run


def started(server: KfpServer, *overrides: str) -> str:
    upload(server, *overrides)
    return client_at(server).start(workload(*overrides), ()).run


def test_the_steps_are_the_pipelines_own_in_its_order_with_seconds(server, tmp_path):
    run = started(server)
    played(server, Store(tmp_path))
    state = client_at(server).status(run)
    assert [step.name for step in state.steps] == TASKS
    assert {step.status for step in state.steps} == {"SUCCEEDED"}
    seconds = {step.name: step.seconds for step in state.steps}
    assert (seconds["train"], seconds["profile"], seconds["gate"]) == (3600, 180, 5)
    assert state.exit_code == 0


def test_a_profile_from_the_cache_is_told_apart_from_one_that_ran(server, tmp_path):
    store = Store(tmp_path)
    run = started(server)
    played(server, store)
    assert "cached" not in {step.status for step in client_at(server).status(run).steps}
    run = client_at(server).start(workload(), ()).run
    played(server, store)
    steps = {step.name: step for step in client_at(server).status(run).steps}
    assert [name for name, step in steps.items() if step.status == "cached"] == ["profile"]
    assert steps["profile"].seconds is None
    assert steps["profile"].log == ""


SKIPS = (
    "skip_unchanged=true",
    "kubernetes.memory=pvc://runs/memory",
    "channels={train: {uri: pvc://datasets/digits}}",
)
SINCE = "nothing changed since mnist-1a2b3c4d of 2026-11-19: skipped"


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_skipped_run_says_since_which_run_and_its_tasks_did_not_run(is_kept, server, tmp_path):
    run = started(server, *SKIPS)
    played(server, Store(tmp_path), overrides=SKIPS, has_changed="false", says={"unchanged": SINCE})
    if not is_kept:
        server.logs.clear()
    state = client_at(server).status(run)
    assert (state.status, state.exit_code) == ("SUCCEEDED", 0)
    assert state.reason.startswith(SINCE if is_kept else "nothing changed since the last run")
    statuses = {step.name: step.status for step in state.steps}
    ran = [name for name, status in statuses.items() if status == "SUCCEEDED"]
    assert ran == ["compare", "unchanged", "finish"]
    assert {statuses[name] for name in statuses if name not in ran} == {"not run"}
    told: list[str] = []
    client_at(server).wait(run, show=told.append)
    assert not [line for line in told if line.startswith("train ") and "not run" not in line]


def test_a_run_that_was_compared_and_trains_is_no_skipped_one(server, tmp_path):
    run = started(server, *SKIPS)
    played(server, Store(tmp_path), overrides=SKIPS, has_changed="true")
    state = client_at(server).status(run)
    statuses = {step.name: step.status for step in state.steps}
    assert statuses.pop("unchanged") == "not run"
    assert [*statuses] == ["compare", *TASKS[:-1], "remember", "finish"]
    assert set(statuses.values()) == {"SUCCEEDED"}
    assert (state.exit_code, state.reason) == (0, "")


@pytest.mark.parametrize(
    ("task", "ended", "words", "code"),
    [
        ("gate", 3, GATE, 3),
        ("gate", 3, CRASH, 6),
        ("gate", 3, "the training was stopped after 40 steps", 4),
        ("gate", 3, "the training did no step (was its checkpoint already there?)", 3),
        ("profile", 2, "no such pool: gpu-large", 4),
        ("decide", 1, "a bug", 4),
        ("train", 4, "the cluster refused it: exceeded quota", 4),
        ("evaluate", 1, "profile.json: not JSON", 4),
    ],
)
def test_a_failed_step_says_why_in_its_own_words_and_the_exit_code_tells_what(
    task, ended, words, code, server, tmp_path
):
    """Red before: no reason for any of them, and 3 for a training that crashed."""
    run = started(server)
    said = f"a line before\nerror: {words}\nwhere: the step\ntry:   this"
    played(server, Store(tmp_path), ends={task: ended}, says={task: said})
    state = client_at(server).status(run)
    failed = {step.name: step for step in state.steps if step.status == "FAILED"}
    assert failed[task].reason == words
    assert failed[task].lines == tuple(said.splitlines())
    assert state.reason == f"{task}: {words}"
    assert state.exit_code == code
    later = TASKS[TASKS.index(task) + 1 : -1]
    statuses = {step.name: step.status for step in state.steps}
    assert {statuses[name] for name in later} <= {"not run"}
    assert statuses["finish"] == "SUCCEEDED"
    assert f"pipeline/runid={run},stoker/step={task} -c main" in state.note


def test_a_killed_follower_has_a_command_for_its_log_and_no_made_up_reason(server, tmp_path):
    run = started(server)
    played(server, Store(tmp_path), ends={"train": "killed"})
    state = client_at(server).status(run)
    (failed,) = [step for step in state.steps if step.status == "FAILED"]
    assert (failed.name, failed.reason, failed.lines) == ("train", "", ())
    assert "stoker/step=train" in failed.log
    assert state.exit_code == 4


def test_a_run_that_goes_on_has_no_exit_code(server, project):
    upload(server)
    begun = stoker("start", "kubeflow", "w.yaml", "--json")
    assert json.loads(begun.stdout)["exit_code"] is None
    shown = stoker("status", "kubeflow", "mnist", "--workload", "w.yaml", "--json")
    told = json.loads(shown.stdout)
    assert (told["exit_code"], shown.returncode) == (None, 0)
    assert {step["status"] for step in told["steps"]} == {"PENDING"}


def test_status_and_wait_print_the_failed_steps_own_last_lines(
    server, project, tmp_path, monkeypatch
):
    upload(server)
    monkeypatch.setattr("stoker.pipelines.base.WAIT_SECONDS", 0.0)
    says = {"gate": f"error: {GATE}\nwhere: the gate"}

    def ends() -> None:
        server.logs.clear()
        played(server, Store(tmp_path / "store"), ends={"gate": 3}, says=says)

    server.script = [lambda: None, ends, lambda: None]
    waited = stoker("start", "kubeflow", "w.yaml", "--wait", "--yes")
    assert waited.returncode == 3, waited.stderr
    assert f"has ended: FAILED: gate: {GATE}" in waited.stderr
    assert f"    error: {GATE}\n    where: the gate\n" in waited.stderr
    assert "launcher_v2" not in waited.stderr
    shown = stoker("status", "kubeflow", "mnist", "--workload", "w.yaml")
    assert shown.returncode == 3
    lines = shown.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.split()[0] in TASKS] == TASKS
    assert f"    error: {GATE}" in lines
    assert not any("driver" in line or "exit-handler" in line for line in lines)


def test_the_items_of_a_loop_are_steps_by_their_number(server, tmp_path):
    def sweep() -> None:
        run = PipelineRun.of(workload())
        measured = kubeflow.profile(**run.inputs(kubeflow.profile))
        profiled = follower(measured, run, name="Profile").outputs["profile"]
        decided = kubeflow.decide(profile=profiled, **run.inputs(kubeflow.decide))
        with dsl.ParallelFor([1, 2, 3]) as epochs:
            trial = run.given(epochs=epochs)
            decision = decided.outputs["decision"]
            job = kubeflow.train(
                profile=profiled, decision=decision, **trial.inputs(kubeflow.train)
            )
            follower(job, run, name="Train")

    definition = kubeflow.compiled(dsl.pipeline(name="mnist")(sweep))
    run = started(server)
    ((versions,),) = [server.versions.values()]
    documents = [*yaml.load_all(definition, Loader=yaml.CSafeLoader)]
    versions[-1]["pipeline_spec"] = {
        "pipeline_spec": documents[0],
        "platform_spec": documents[1],
    }

    def execute(step: Step) -> int:
        step.write_outputs()
        return 0

    ran = KubeflowRun(Pipeline(definition), execute=execute, store=Store(tmp_path))
    assert ran.run() == "SUCCEEDED"
    server.tell(*ran.workflow_nodes())
    server.end("SUCCEEDED")
    names = [step.name for step in client_at(server).status(run).steps]
    assert names == ["profile", "decide", "train[0]", "train[1]", "train[2]"]


def test_lines_of_kubeflows_launcher_and_of_argo_are_not_the_steps():
    log = f"{LAUNCHER}first\n{ARGO}\nF1126 10:00:00.000000 9 main.go:63] failed: exit status 3\n"
    assert own_lines(log) == ("first",)
    assert reason_in(()) == ""
    assert reason_in(("a", "b")) == "b"
    assert len(own_lines("\n".join(map(str, range(1000))))) == 20


@pytest.mark.parametrize(
    ("failed", "code"),
    [
        ({"Metadata": {"Fail": {"ErrorMessage": f"mnist: {GATE}; report: s3://a"}}}, 3),
        ({"Metadata": {"Fail": {"ErrorMessage": f"mnist: {CRASH}; report: s3://a"}}}, 6),
        ({"Metadata": {"Fail": {"ErrorMessage": "mnist: the training was stopped"}}}, 4),
        ({"Metadata": {"Fail": {"ErrorMessage": "least is 0.95, found 0.9"}}}, 3),
        ({"FailureReason": f"mnist: {CRASH}", "Metadata": {"Fail": {}}}, 4),
        ({"FailureReason": "ClientError: no image"}, 4),
        ({"FailureReason": "AlgorithmError: , exit code: 3"}, 3),
        ({"FailureReason": "AlgorithmError: , exit code: 6"}, 6),
        ({"FailureReason": "AlgorithmError: , exit code: 137"}, 4),
    ],
)
def test_on_sagemaker_a_gate_is_3_and_a_crash_is_another_code(failed, code):
    steps = [{"StepName": "A", "StepStatus": "Succeeded"}, {"StepStatus": "Failed", **failed}]
    assert exit_code_of(steps) == code


def test_on_sagemaker_steps_have_seconds_cache_reason_and_the_command_for_their_log():
    times = {"StartTime": "2026-11-26T10:00:00+00:00", "EndTime": "2026-11-26T10:03:00+00:00"}
    arn = "arn:aws:sagemaker:eu-west-1:1:processing-job/pipelines-a1-Train-x"
    job = {"Metadata": {"ProcessingJob": {"Arn": arn}}}
    about = {"aws": Aws(region="eu-west-1"), "is_over": True}
    ran = run_step({"StepName": "Train", "StepStatus": "Succeeded", **times, **job}, **about)
    assert ran.seconds == 180
    assert "--log-stream-name-prefix pipelines-a1-Train-x/" in ran.log
    hit = {"CacheHitResult": {"SourcePipelineExecutionArn": "arn"}}
    cached = run_step({"StepName": "P", "StepStatus": "Succeeded", **times, **hit}, **about)
    assert (cached.status, cached.seconds, cached.log) == ("cached", None, "")
    inner = {"IfSteps": [{"Name": "Register"}], "ElseSteps": [{"Name": "Refuse"}]}
    steps = [{"Name": "Train"}, {"Name": "Gate", "Arguments": inner}]
    assert [*step_names(json.dumps({"Steps": steps}))] == ["Train", "Gate", "Register", "Refuse"]


COMPARED = {
    "StepName": "Compare",
    "StepDisplayName": "What has changed?",
    "StepStatus": "Succeeded",
    "Metadata": {"ProcessingJob": {"Arn": "arn:aws:sagemaker:eu-west-1:1:processing-job/p-a1-x"}},
}
WORDS = "nothing changed since mnist--abc of 2026-11-20: skipped"


def asked(outcome):
    return {"StepName": "HasChanged", "Metadata": {"Condition": {"Outcome": outcome}}}


def logs_of(*lines):
    stream = {"logStreamName": "p-a1-x/algo-1"}
    events = [{"message": line} for line in lines]
    answers = {"DescribeLogStreams": {"logStreams": [stream]}, "GetLogEvents": {"events": events}}

    def call(service: str, operation: str, **about: object) -> Mapping[str, object]:
        if not lines:
            raise ServiceError("access denied", kind="denied")
        return answers[operation]

    return SimpleNamespace(call=call)


@pytest.mark.parametrize(
    ("outcome", "lines", "words"),
    [
        ("False", (WORDS, "written: comparison.json"), WORDS),
        ("False", (), "nothing changed since the last run that passed: skipped"),
        ("True", (), ""),
        (None, (), ""),
    ],
)
def test_on_sagemaker_a_run_that_trained_nothing_says_why(outcome, lines, words):
    steps = [COMPARED, *([asked(outcome)] if outcome else [])]
    assert skipped_words(logs_of(*lines), steps) == words
    # Of two branches, one has trained.
    assert skipped_words(logs_of(*lines), [*steps, asked("True")]) == ""
