"""The component verbs work as a pipeline's containers run them: texts and paths in, files out."""

import json
import sys
from pathlib import Path

import pytest

from stoker.errors import UsageError
from stoker.platforms.local import channel_folder
from stoker.records import Decision, Evaluation, Json, Profile, read_json, to_json, write_json
from support import sample_records
from support.command import process, stoker


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_json(tmp_path / "profile.json", sample_records.profile())
    write_json(tmp_path / "decision.json", sample_records.decision())
    return tmp_path


WORKLOAD = to_json(sample_records.workload())


def executor_input(folder: Path, *parameters: str) -> str:
    outputs: dict[str, Json] = {
        "outputFile": str(folder / "kfp" / "executor_output.json"),
        "parameters": {name: {"outputFile": "unused"} for name in parameters},
        "artifacts": {
            "metrics": {
                "artifacts": [{"type": {"schemaTitle": "system.Metrics"}, "uri": "s3://metrics"}]
            }
        },
    }
    return json.dumps({"outputs": outputs})


def told(folder: Path) -> tuple[dict[str, str], dict[str, float]]:
    """Returns parameters and metrics that Kubeflow was told."""
    document = json.loads((folder / "kfp" / "executor_output.json").read_text())
    metrics = document["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    return document["parameterValues"], metrics


def test_profile_takes_the_one_that_it_is_given(folder: Path) -> None:
    profile = (folder / "profile.json").read_text()
    given = json.loads(WORKLOAD)
    script = folder / str(given["command"][1])
    script.parent.mkdir(parents=True)
    script.write_text("")
    done = stoker(
        *("profile", WORKLOAD, "--platform=local", "--out=out/profile", "--summary=out/words.md"),
        *("--param=instance_type=", "--param=instance_count=0", f"--param=reuse_profile={profile}"),
        *("--executor-input", executor_input(folder)),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert read_json(folder / "out" / "profile", Profile) == sample_records.profile()
    assert told(folder)[1]["step_seconds"] == sample_records.profile().timed_step.step_seconds
    assert not (folder / "runs").exists()
    other = json.dumps({**given, "command": ["python", "other.py"]})
    (folder / "other.py").write_text("")
    done = stoker("profile", other, f"--param=reuse_profile={_of_a_workload(profile)}", cwd=folder)
    assert done.returncode == 2
    assert "the profile was made for another workload" in done.stderr


def _of_a_workload(profile: str) -> str:
    digest = sample_records.workload().digest()
    return json.dumps({**json.loads(profile), "workload_sha256": digest})


def test_decide_takes_its_workload_as_a_text_and_tells_kubeflow_what_to_do(folder: Path) -> None:
    done = stoker(
        *("decide", "profile.json", "--workload", WORKLOAD, "--out=out/decision"),
        *("--summary=out/summary.md", "--param=max_data_hosts=0", "--param=pools_file="),
        *("--executor-input", executor_input(folder, "action", "where")),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    decision = read_json(folder / "out" / "decision", Decision)
    parameters, metrics = told(folder)
    assert parameters["action"] == decision.action
    assert parameters["where"] in ("pod", "job")
    promise = decision.plan.predicted
    assert promise
    assert metrics["step_seconds"] == promise.step_seconds
    summary = (folder / "out" / "summary.md").read_text()
    assert summary.startswith("# Decision\n")
    assert "How it was decided" in summary


def test_evaluate_takes_a_training_as_a_text_and_its_gate_fails_in_its_words(folder: Path) -> None:
    done = stoker(
        *("evaluate", WORKLOAD, "--profile=profile.json", "--decision=decision.json"),
        *("--training", to_json(sample_records.training()), "--param=gate=accuracy>=1.5"),
        *("--out=evaluation", "--report=report", "--always"),
        *("--executor-input", executor_input(folder, "passed")),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    evaluation = read_json(folder / "evaluation", Evaluation)
    parameters, metrics = told(folder)
    assert parameters == {"passed": "false"}
    assert metrics["passed"] == 0
    assert "<html" in (folder / "report").read_text()
    gate = process("evaluate", "--gate-of=evaluation", cwd=folder)
    assert gate.returncode == 3
    assert gate.stderr.startswith(f"error: {evaluation.reason}")


def test_a_gate_that_holds_is_open(folder: Path) -> None:
    write_json(folder / "evaluation.json", Evaluation(passed=True))
    gate = stoker("evaluate", "--gate-of", "evaluation.json", cwd=folder)
    assert gate.returncode == 0
    assert "passed" in gate.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["decide", "profile.json", "--executor-input", "{{$}}"], "not what Kubeflow gives a step"),
        (["evaluate", WORKLOAD, "--profile=profile.json"], "--decision is missing"),
        (["evaluate", "--gate-of", "missing.json"], "no such file: missing.json"),
        (
            ["train", WORKLOAD, "--clean-up", "FAILED"],
            "--clean-up needs a workload and the name of the run",
        ),
        (
            ["train", "--clean-up", "FAILED", "--run-id", "1"],
            "--clean-up needs a workload and the name of the run",
        ),
    ],
)
def test_what_a_step_lacks_is_said_in_three_lines(
    folder: Path, words: list[str], said: str
) -> None:
    done = stoker(*words, cwd=folder)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3


def test_a_component_with_an_output_that_its_verb_has_not_is_refused_at_once(folder: Path) -> None:
    done = stoker(
        *("decide", "profile.json", "--workload", WORKLOAD, "--out=out/decision"),
        *("--executor-input", executor_input(folder, "best_type")),
        cwd=folder,
    )
    assert done.returncode == 2
    assert "has no output parameter best_type" in done.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ('{"state": "SUCCEEDED", "error": {}}', "succeeded"),
        ('{"state": "FAILED", "error": {"message": "no node"}}', "failed: no node"),
        ("COMPLETE", "complete"),
        ("", "unknown"),
    ],
)
def test_the_last_word_of_a_run_is_how_it_ended(folder: Path, status: str, words: str) -> None:
    name = f"{sample_records.workload().name}-5f0c1a2b"
    done = stoker(
        *("train", WORKLOAD, "--platform=local", "--run-id=5F0C1A2B-77aa", "--clean-up", status),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"run {name}: {words}", "no job of the run was left"]


def test_a_failed_training_fails_its_step_unless_always_is_asked_for(folder: Path) -> None:
    workload = json.dumps({"name": "bad", "command": [sys.executable, "-c", "raise SystemExit(9)"]})
    words = ["train", workload, "--platform=local", "--yes", "--out=record", "--run-id=1234567890"]
    assert stoker(*words, cwd=folder).returncode == 6
    done = stoker(
        *words,
        "--always",
        *("--executor-input", executor_input(folder, "status", "training")),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    parameters, _ = told(folder)
    assert parameters["status"] == "failed"
    assert json.loads(parameters["training"])["exit_code"] == 9
    assert json.loads(parameters["training"])["job"]["name"] == "bad-12345678"


def test_a_model_is_copied_to_where_it_is_to_stay(folder: Path) -> None:
    script = "import os; open(os.environ['SM_MODEL_DIR'] + '/weights', 'w').write('w')"
    workload = json.dumps({"name": "model", "command": [sys.executable, "-c", script]})
    done = stoker("train", workload, "--yes", "--out=record", "--model=kept/model", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert (folder / "kept" / "model" / "weights").read_text() == "w"
    assert json.loads((folder / "record").read_text())["model_uri"] == "kept/model"


def test_a_channel_of_a_claim_is_the_folder_where_the_step_mounts_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.platforms.local.CLAIMS_FOLDER", str(folder))
    (folder / "datasets" / "digits").mkdir(parents=True)
    assert channel_folder("train", "pvc://datasets/digits") == folder / "datasets" / "digits"
    with pytest.raises(UsageError, match="no such folder"):
        channel_folder("train", "pvc://datasets/other")
    with pytest.raises(UsageError, match="not a folder of a claim"):
        channel_folder("train", "pvc://datasets/../datasets/digits")
