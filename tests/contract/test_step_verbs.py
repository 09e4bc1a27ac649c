"""The component verbs work as a pipeline's containers run them: texts and paths in, files out."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from stoker.cli.options import OutputFiles
from stoker.errors import UsageError
from stoker.records import (
    Decision,
    Evaluation,
    Json,
    Profile,
    ProfiledLoader,
    read_json,
    to_json,
    write_json,
)
from stoker.run.outputs import step_inputs
from support import kubeflow_pipeline, sample_records
from support.command import Done, process, stoker, succeeds


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
FINISH_NEEDS = "the last step needs a workload and the id of the pipeline's run"


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
    given = {"workload": WORKLOAD, "reuse_profile": profile, "cache_key": "1.2"}
    words = ("profile", "--out=out/profile", "--summary=out/words.md", "--yes")
    told_it = executor_input(folder, image="i:1", **given)
    succeeds(*words, "--executor-input", told_it, cwd=folder)
    assert read_json(folder / "out" / "profile", Profile) == sample_records.profile()
    assert told(folder)[1]["step_seconds"] == sample_records.profile().timed_step.step_seconds
    assert not (folder / "runs").exists()
    # People type what a pipeline tells.
    other = json.dumps({**json.loads(WORKLOAD), "command": ["python", "other.py"]})
    (folder / "other.py").write_text("")
    foreign = changed(folder / "profile.json", workload_sha256=sample_records.workload().digest())
    said = refused("profile", other, f"--param=reuse_profile={foreign}", cwd=folder)
    assert "the profile was made for another workload" in said


@pytest.fixture
def own_loader(folder):
    loader = ProfiledLoader(class_name="litdata.StreamingDataLoader", reach="own")
    own = msgspec.structs.replace(sample_records.profile(), loader=loader)
    write_json(folder / "profile.json", own)
    return "litdata.StreamingDataLoader makes batches in its own way"


def test_a_loader_that_the_feed_cannot_reach_ends_the_step_that_decides(folder, own_loader):
    told_it = executor_input(folder, "action", workload=WORKLOAD)
    words = ("decide", "profile.json", "--out=decision.json")
    assert own_loader in refused(*words, "--executor-input", told_it, cwd=folder)
    off = executor_input(folder, "action", workload=WORKLOAD, replace_dataloader="false")
    succeeds(*words, "--executor-input", off, cwd=folder)
    # A person who asks is told, and has the record.
    assert own_loader in succeeds(*words, "--workload", WORKLOAD, cwd=folder).stdout


def test_a_loader_that_the_feed_cannot_reach_ends_stoker_run_before_it_decides(folder, own_loader):
    run = folder / "runs" / "mnist-20261123-120000"
    run.mkdir(parents=True)
    write_json(run / "workload.json", sample_records.workload())
    (folder / "profile.json").rename(run / "profile.json")
    (folder / "w.yaml").write_text(WORKLOAD)
    done = process("run", "w.yaml", "--from=decide", "--yes", cwd=folder)
    assert done.returncode == 2, done.stderr
    assert own_loader in done.stderr
    assert not (run / "decision.json").exists()


def test_evaluate_compares_with_the_champion_and_its_gate_promotes_or_fails(folder):
    (folder / "champions").mkdir()

    def gate_of(accuracy: float) -> Done:
        found = {"metrics": {"accuracy": accuracy}}
        training = to_json(msgspec.structs.replace(sample_records.training(), **found))
        given = {"training": training, "gate": "accuracy>=champion-0.005"}
        told_it = executor_input(folder, "passed", workload=WORKLOAD, champion="champions", **given)
        words = ("evaluate", "--profile=profile.json", "--decision=decision.json")
        words += ("--out=evaluation", "--report=report", "--always", "--executor-input", told_it)
        succeeds(*words, cwd=folder)
        told_it = executor_input(folder, champion="champions")
        words = ("evaluate", "--gate-of=evaluation", "--promote", "--executor-input", told_it)
        return stoker(*words, cwd=folder)

    assert gate_of(0.95).stdout.endswith("champion 1: champions/000001.json\n")
    worse = gate_of(0.94)
    assert worse.returncode == 3
    reason = read_json(folder / "evaluation", Evaluation).reason
    assert "0.94, asked for at least 0.945 (the model in use has 0.95)" in reason
    assert worse.stderr.startswith(f"error: {reason}")
    parameters, metrics = told(folder)
    assert (parameters, metrics["passed"]) == ({"passed": "false"}, 0)
    assert "<html" in (folder / "report").read_text()
    assert gate_of(0.946).returncode == 0
    second = read_json(folder / "champions" / "000002.json", Evaluation)
    assert second.metrics["accuracy"] == 0.946


@pytest.mark.parametrize("champion", [{}, {"champion": None}, {"champion": ""}])
def test_a_gate_without_a_folder_of_champions_promotes_nothing(folder, champion):
    write_json(folder / "evaluation.json", Evaluation(passed=True))
    words = ("evaluate", "--gate-of=evaluation.json", "--promote")
    gate = succeeds(*words, "--executor-input", executor_input(folder, **champion), cwd=folder)
    assert gate.stdout == "no gate: the training succeeded\n"


def test_a_verb_takes_inputs_as_kubeflow_writes_them():
    given: dict[str, Json] = {
        "workload": "{}",
        "run_id": "r-1",
        "image": "control:1",
        "cache_key": "30.1",
        "job_image": "job:1",
        "epochs": 3.0,
        "instance_count": None,
        "gate": "",
        "input_data": "",
        "pools_file": "",
        "hyperparameter_lr": 0.5,
        "hyperparameter_amp": True,
        "hyperparameter_gate": "x",
        "outcome": {"state": "FAILED", "error": {"message": "no node"}},
    }
    found = step_inputs(OutputFiles(executor_input=executor_input(Path(), **given)))
    assert (found.workload, found.run_id) == ("{}", "r-1")
    assert found.training is found.champion is None
    assert json.loads(found.outcome or "") == given["outcome"]
    texts = ["amp=true", "epochs=3", "gate=", "gate=x", "image=job:1", "lr=0.5"]
    assert sorted(found.params) == texts
    assert step_inputs(OutputFiles()).params == ()


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("", []),
        ("{}", []),
        ('{"lr": 1e-4, "batch-size": 128}', ["batch-size=128", "lr=0.0001"]),
        ('{"amp": true, "note": "a b", "resume": null}', ["amp=true", "note=a b", "resume="]),
        ('{"milestones": [30, 60], "names": ["a b"]}', ["milestones=30 60", "names='a b'"]),
        ('{"image": "x", "branch": "y"}', ["branch=y", "image=x"]),
    ],
)
def test_hyperparameters_of_any_workload_come_as_one_json_object(text, params):
    told_it = executor_input(Path(), workload="{}", image="i:1", hyperparameters=text)
    assert sorted(step_inputs(OutputFiles(executor_input=told_it)).params) == params


@pytest.mark.parametrize("text", ["lr=0.1", "[1]", "0.1", "{", "lr: 0.1"])
def test_hyperparameters_in_another_form_are_refused_with_the_form(text):
    told_it = executor_input(Path(), workload="{}", hyperparameters=text)
    with pytest.raises(UsageError, match="the input hyperparameters") as raised:
        step_inputs(OutputFiles(executor_input=told_it))
    assert '{"batch-size": 128' in raised.value.fix


@pytest.mark.parametrize("left_out", ["missing", "null"])
def test_inputs_that_are_left_out_are_as_the_workload_says(folder, left_out):
    document = {
        "name": "mini",
        "command": [sys.executable, "-c", "print('stoker metric accuracy=1')"],
        "constraints": {"max_data_hosts": 0, "objective": "time"},
        "gate": [{"metric": "accuracy", "min": 2}],
    }
    given: dict[str, Json] = {"image": "i:1", "workload": json.dumps(document)}

    def step(name: str, *words: str, parameters: tuple[str, ...] = (), **inputs: Json) -> None:
        about = kubeflow_pipeline.parsed(kubeflow_pipeline.shared()[name])[0]
        declared = about["components"][f"comp-{name}"]["inputDefinitions"]["parameters"]
        none = dict.fromkeys(declared) if left_out == "null" else {}
        told_it = executor_input(folder, *parameters, **{**none, **given, **inputs})
        succeeds(*words, "--executor-input", told_it, cwd=folder)

    profile = to_json(sample_records.profile())
    step("profile", "profile", "--out=p.json", "--yes", reuse_profile=profile)
    words = ("decide", "p.json", "--out=d.json", "--summary=summary.md")
    step("decide", *words, parameters=("action", "verdict"))
    made = read_json(folder / "d.json", Decision)
    assert made.objective == "time"
    assert told(folder)[0] == {"action": made.action, "verdict": made.verdict}
    assert (folder / "summary.md").read_text().startswith("# Decision\n")
    assert not [plan for plan in made.plans if len(plan.groups) > 1]
    words = ("train", "--profile=p.json", "--decision=d.json", "--out=t.json", "--always", "--yes")
    step("train", *words, parameters=("status", "training"), run_id="1234567890")
    assert told(folder)[0]["status"] == "succeeded"
    training = told(folder)[0]["training"]
    assert json.loads(training)["job"]["name"] == "mini-12345678"
    words = ("evaluate", "--profile=p.json", "--decision=d.json", "--out=e.json", "--always")
    step("evaluate", *words, parameters=("passed",), training=training)
    evaluation = read_json(folder / "e.json", Evaluation)
    assert [gate.min for gate in evaluation.gates] == [2]
    write_json(folder / "e.json", Evaluation(passed=True))
    step("gate", "evaluate", "--gate-of=e.json", "--promote")
    step("finish", "train", "--finish", run_id="1234567890")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decide", "profile.json", "--executor-input", "{{$}}"], "not what Kubeflow gives a step"),
        (["evaluate", WORKLOAD, "--profile=profile.json"], "missing --decision"),
        (["evaluate", "--gate-of", "missing.json"], "no such file: missing.json"),
        (["train", WORKLOAD, "--finish"], FINISH_NEEDS),
        (["train", "--finish", "--run-id", "1"], FINISH_NEEDS),
    ],
)
def test_what_a_step_lacks_is_said_in_three_lines(folder, words, said):
    found = refused(*words, cwd=folder)
    assert said in found
    assert len(found.strip().splitlines()) <= 3


def test_a_component_with_an_output_that_its_verb_has_not_is_refused_at_once(folder):
    words = ("decide", "profile.json", "--workload", WORKLOAD, "--out=out/decision")
    told_it = executor_input(folder, "best_type")
    said = refused(*words, "--executor-input", told_it, cwd=folder)
    assert "has no output parameter best_type" in said
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        ({"state": "SUCCEEDED", "error": {}}, "succeeded"),
        ({"state": "FAILED", "error": {"message": "no node"}}, "failed: no node"),
        ("{{$.pipeline_task_final_status}}", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_last_word_of_a_run_is_how_it_ended(folder, outcome, words):
    local = json.dumps({**json.loads(WORKLOAD), "platform": "local"})
    told_it = executor_input(folder, workload=local, run_id="5F0C1A2B-77aa", outcome=outcome)
    done = succeeds("train", "--finish", "--executor-input", told_it, cwd=folder)
    name = f"{sample_records.workload().name}-5f0c1a2b"
    assert done.stdout.splitlines() == [f"run {name}: {words}", "no job of the run was left"]


def test_a_failed_training_fails_its_step_unless_always_is_asked_for(folder):
    workload = json.dumps({"name": "bad", "command": [sys.executable, "-c", "raise SystemExit(9)"]})
    words = ["train", workload, "--platform=local", "--yes", "--out=record", "--run-id=1234567890"]
    assert stoker(*words, cwd=folder).returncode == 6
    told_it = executor_input(folder, "status", "training")
    succeeds(*words, "--always", "--executor-input", told_it, cwd=folder)
    parameters, _ = told(folder)
    training = json.loads(parameters["training"])
    assert (parameters["status"], training["exit_code"]) == ("failed", 9)
    assert training["job"]["name"] == "bad-12345678"


def test_a_model_is_copied_to_where_it_is_to_stay(folder):
    script = "import os; open(os.environ['SM_MODEL_DIR'] + '/weights', 'w').write('w')"
    workload = json.dumps({"name": "model", "command": [sys.executable, "-c", script]})
    succeeds("train", workload, "--yes", "--out=record", "--model=kept/model", cwd=folder)
    assert (folder / "kept" / "model" / "weights").read_text() == "w"
    assert json.loads((folder / "record").read_text())["model_uri"] == "kept/model"


@pytest.mark.parametrize(
    ("options", "code", "gates"),
    [([], 0, 0), (["--set", "gate=[{metric: accuracy, min: 1.5}]"], 3, 1)],
)
def test_evaluate_needs_no_workload_file_of_a_bare_command(folder, options, code, gates):
    write_json(folder / "training.json", sample_records.training())
    records = [f"--{name}={name}.json" for name in ("profile", "decision", "training")]
    done = stoker("evaluate", *records, *options, cwd=folder)
    assert done.returncode == code, done.stderr
    assert len(read_json(folder / "evaluation.json", Evaluation).gates) == gates
    # Another command's profile is refused.
    for name, script, digit in (("profile", "other.py", "b"), ("training", "train.py", "a")):
        file, keys = folder / f"{name}.json", {"command": f"python {script}"}
        file.write_text(changed(file, workload_sha256=digit * 64, workload_keys=keys))
    done = stoker("evaluate", *records, cwd=folder)
    assert "command: python other.py -> python train.py" in done.stderr


def test_decide_on_a_workstation_says_first_how_to_decide_for_another_machine(folder):
    profile = sample_records.profile()
    host = msgspec.structs.replace(profile.host, instance_type="local.c2", vcpus=2)
    local = msgspec.structs.replace(profile, host=host, workload_sha256=None, data=())
    write_json(folder / "profile.json", local)
    title, _, command = succeeds("decide", "profile.json", cwd=folder).stderr.partition(": ")
    assert title == "to decide for another machine"
    # The line can be typed as it stands.
    done = succeeds(*command.splitlines()[0].split()[1:], cwd=folder)
    assert title not in done.stderr
