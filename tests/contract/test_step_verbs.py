"""The component verbs work as a pipeline's containers run them: texts and paths in, files out."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.records import (
    Decision,
    Evaluation,
    Json,
    Profile,
    Training,
    read_json,
    to_json,
    write_json,
)
from stoker.run.outputs import read_step
from support import sample_records
from support.command import Done, stoker, succeeds


@pytest.fixture
def folder(tmp_path):
    write_json(tmp_path / "profile.json", sample_records.profile())
    write_json(tmp_path / "decision.json", sample_records.decision())
    script = tmp_path / sample_records.workload().command[1]
    script.parent.mkdir(parents=True)
    script.write_text("")
    return tmp_path


def changed(file: Path, **keys: object) -> str:
    return json.dumps({**json.loads(file.read_text()), **keys})


WORKLOAD = to_json(sample_records.workload())


def executor_input(folder, *parameters, **inputs):
    """Returns what Kubeflow gives a step: its inputs, and the names of its output parameters."""
    metrics = [{"type": {"schemaTitle": "system.Metrics"}, "uri": "s3://metrics"}]
    outputs = {
        "outputFile": str(folder / "kfp" / "executor_output.json"),
        "parameters": {name: {"outputFile": "unused"} for name in parameters},
        "artifacts": {"metrics": {"artifacts": metrics}},
    }
    return json.dumps({"inputs": {"parameterValues": inputs}, "outputs": outputs})


def told(folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    document = json.loads((folder / "kfp" / "executor_output.json").read_text())
    metrics = document["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    return document["parameterValues"], metrics


def refused(*words: str, cwd: Path) -> str:
    done = stoker(*words, cwd=cwd)
    assert done.returncode == 2, done.stderr
    return done.stderr


def test_profile_takes_the_one_that_it_is_given(folder):
    profile = (folder / "profile.json").read_text()
    given = {"workload": WORKLOAD, "param_reuse_profile": profile, "params": '{"epochs": 7}'}
    words = ("step", "profile", "--out=out/profile")
    told_it = executor_input(folder, "resolved", image="i:1", run_id="r", **given)
    succeeds(*words, "--executor-input", told_it, cwd=folder)
    assert read_json(folder / "out" / "profile", Profile) == sample_records.profile()
    assert told(folder)[1]["step_seconds"] == sample_records.profile().step.step_seconds
    assert json.loads(told(folder)[0]["resolved"])["training"]["epochs"] == 7
    assert not (folder / "runs").exists()
    # People type what a pipeline tells.
    other = json.dumps({**json.loads(WORKLOAD), "command": ["python", "other.py"]})
    (folder / "other.py").write_text("")
    keys = sample_records.workload().profile_keys()
    foreign = changed(folder / "profile.json", workload_keys=keys)
    said = refused("step", "profile", other, f"--param=reuse_profile={foreign}", cwd=folder)
    assert "the profile was made for another workload" in said


def test_evaluate_compares_with_the_champion_and_its_gate_promotes_or_fails(folder):
    (folder / "champions").mkdir()

    def gate_of(accuracy: float) -> Done:
        found = {"metrics": {"accuracy": accuracy}}
        training = msgspec.structs.replace(sample_records.training(), **found)
        write_json(folder / "t.json", training)
        gates = [{"metric": "accuracy", "min_champion": -0.005}]
        workload = json.dumps({**json.loads(WORKLOAD), "gate": gates})
        told_it = executor_input(folder, "passed", workload=workload, champion="champions")
        words = ("step", "evaluate", "--profile=profile.json", "--decision=decision.json")
        words += (
            "--training=t.json",
            "--out=evaluation",
            "--report=report",
            "--executor-input",
            told_it,
        )
        succeeds(*words, cwd=folder)
        told_it = executor_input(folder, champion="champions")
        words = ("step", "gate", "--gate-of=evaluation", "--executor-input", told_it)
        return stoker(*words, cwd=folder)

    assert gate_of(0.95).stdout.endswith("it is the champion now: champions/champion.json\n")
    worse = gate_of(0.94)
    assert worse.returncode == 3
    reason = read_json(folder / "evaluation", Evaluation).reason
    assert "0.94 (at least 0.945, the model in use has 0.95)" in reason
    assert worse.stderr.startswith(f"error: {reason}")
    parameters, metrics = told(folder)
    assert (parameters, metrics["passed"]) == ({"passed": "false"}, 0)
    assert "<html" in (folder / "report").read_text()
    assert gate_of(0.946).returncode == 0
    second = read_json(folder / "champions" / "champion.json", Evaluation)
    assert second.metrics["accuracy"] == 0.946


def test_a_verb_takes_inputs_as_kubeflow_writes_them():
    given: dict[str, Json] = {
        "workload": "{}",
        "run_id": "r-1",
        "image": "control:1",
        "branch": None,
        "param_image": "job:1",
        "param_epochs": 3.0,
        "param_max_data_hosts": None,
        "param_gate": "",
        "param_lr": 0.5,
        "param_amp": True,
        "outcome": {"state": "FAILED", "error": {"message": "no node"}},
    }
    found = read_step(executor_input(Path(), **given))
    assert (found.workload, found.inputs["run_id"]) == ("{}", "r-1")
    assert json.loads(found.inputs["outcome"]) == given["outcome"]
    texts = ["amp=true", "epochs=3.0", "gate=", "image=job:1", "lr=0.5"]
    assert sorted(found.params) == texts
    assert read_step(None).params == []


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ('{"lr": 1e-4, "batch-size": 128}', ["batch-size=128", "lr=0.0001"]),
        ('{"amp": true, "note": "a b", "resume": null}', ["amp=true", "note=a b", "resume="]),
    ],
)
def test_parameters_of_any_workload_come_as_one_json_object(text, params):
    told_it = executor_input(Path(), workload="{}", image="i:1", params=text)
    assert sorted(read_step(told_it).params) == params


def test_inputs_that_are_left_out_are_as_the_workload_says(folder):
    document = {
        "name": "mini",
        "command": [sys.executable, "-c", "print('stoker metric accuracy=1')"],
        "constraints": {"max_data_hosts": 0, "objective": "time"},
        "gate": [{"metric": "accuracy", "min": 2}],
    }
    given: dict[str, Json] = {"image": "i:1", "workload": json.dumps(document)}

    def step(name: str, *words: str, parameters: tuple[str, ...] = (), **inputs: Json) -> None:
        told_it = executor_input(folder, *parameters, **{**given, **inputs})
        succeeds(*words, "--executor-input", told_it, cwd=folder)

    profile = to_json(sample_records.profile())
    words = ("step", "profile", "--out=p.json")
    step("profile", *words, parameters=("resolved",), param_reuse_profile=profile, run_id="1")
    words = ("decide", "p.json", "--out=d.json")
    step("decide", *words, parameters=("action", "verdict"))
    made = read_json(folder / "d.json", Decision)
    assert made.objective == "time"
    assert told(folder)[0] == {"action": made.action, "verdict": made.verdict}
    assert not [plan for plan in made.plans if len(plan.groups) > 1]
    words = ("step", "train", "--decision=d.json", "--out=t.json")
    step("train", *words, parameters=("status",), run_id="1234567890")
    assert told(folder)[0]["status"] == "succeeded"
    assert read_json(folder / "t.json", Training).job.name == "mini-12345678"
    words = ("step", "evaluate", "--profile=p.json", "--decision=d.json", "--training=t.json")
    step("evaluate", *words, "--out=e.json", parameters=("passed",))
    evaluation = read_json(folder / "e.json", Evaluation)
    assert [gate.min for gate in evaluation.gates] == [2]
    write_json(folder / "e.json", Evaluation(passed=True))
    step("gate", "step", "gate", "--gate-of=e.json")
    step("finish", "step", "finish", run_id="1234567890")


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"state": "SUCCEEDED", "error": {}}, "succeeded"),
        ({"state": "FAILED", "error": {"message": "no node"}}, "failed: no node"),
        (None, "unknown"),
    ],
)
def test_the_last_word_of_a_run_is_how_it_ended(folder, outcome, words):
    local = json.dumps({**json.loads(WORKLOAD), "platform": "local"})
    told_it = executor_input(folder, workload=local, run_id="5F0C1A2B-77aa", outcome=outcome)
    done = succeeds("step", "finish", "--executor-input", told_it, cwd=folder)
    name = f"{sample_records.workload().name}-5f0c1a2b"
    assert done.stdout.splitlines() == [f"run {name}: {words}", "no job of the run was left"]


def test_a_failed_training_fails_its_step_but_on_kubeflow(folder):
    workload = json.dumps({"name": "bad", "command": [sys.executable, "-c", "raise SystemExit(9)"]})
    words = ["step", "train", workload, "--out=record"]
    words += ["--name=bad-12345678"]
    assert stoker(*words, cwd=folder).returncode == 6
    told_it = executor_input(folder, "status")
    succeeds(*words, "--executor-input", told_it, cwd=folder)
    parameters, _ = told(folder)
    training = read_json(folder / "record", Training)
    assert (parameters["status"], training.exit_code) == ("failed", 9)
    assert training.job.name == "bad-12345678"
