"""kfp's own local runner runs the compiled Kubeflow pipeline on a real Docker engine.

That runner loses exit codes now and then, ignores pods, and hands a component's artifacts on only
if the executor's output names them: files and metadata are what can be relied on here.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stoker.orchestrators.kubeflow.compile import compile_kubeflow
from stoker.records import Decision, Evaluation, Profile, Training, read_json
from stoker.settings import workload_from
from support.docker import ROOT, Engine

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(400),
    # What it decides follows from what it measures.
    pytest.mark.alone,
    # A step's name in the console.
    pytest.mark.filterwarnings("ignore:Task .*'display_name'.* no effect:UserWarning"),
]

WORKLOAD = workload_from(
    {
        "name": "mini",
        "command": ["python3", "examples/mnist/train.py", "--workers", "0", "--samples", "512"],
        "image": "job:latest",
        "platform": "local",
        "cluster": {"dnn": {"instance_type": "local.c1", "count": 1}},
        "hyperparameters": {"epochs": 8},
        "training": {"epochs": 8, "samples_per_epoch": 512, "global_batch_size": 64},
        "constraints": {"objective": "time", "max_data_hosts": 1},
        "gate": [{"metric": "accuracy", "min": 0.02}],
        # Of a busy machine: what the parts do not explain is not to decide which branch is taken.
        "profile": {"budget_seconds": 12, "max_unexplained": 0.9},
    },
    overrides=["constraints.allowed_instance_types=[local.c1]"],
)


class Runs:
    """Makes runs of one compiled pipeline, all below one folder."""

    def __init__(self, folder: Path, definition: str) -> None:
        from kfp import components

        self.folder = folder / "root"
        file = folder / "pipeline.yaml"
        file.write_text(definition)
        self._pipeline = components.load_component_from_file(str(file))

    def run(self, **parameters: str | int) -> dict[str, Path]:
        """Runs the pipeline; maps each step that told something to the folder with its outputs."""
        before = set(self.folder.glob("*"))
        self._pipeline(**parameters)
        made = sorted(set(self.folder.glob("*")) - before)
        return {step.name: step for run in made for step in run.rglob("*") if _is_step(step)}


def _is_step(folder: Path) -> bool:
    return (folder / "executor_output.json").is_file()


def told(step: Path) -> dict[str, Any]:
    """Returns what the step told Kubeflow."""
    document: dict[str, Any] = json.loads((step / "executor_output.json").read_text())
    return document


def metrics(step: Path) -> Mapping[str, float]:
    found: Mapping[str, float] = told(step)["artifacts"]["metrics"]["artifacts"][0]["metadata"]
    return found


@pytest.fixture
def runs(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    local = pytest.importorskip("kfp.local")
    from kfp.local.config import LocalExecutionConfig

    monkeypatch.setenv("DOCKER_HOST", engine.environ["DOCKER_HOST"])
    local.init(
        # The image's entry point is a training job's; a pod's command takes its place.
        runner=local.DockerRunner(network_mode="none", entrypoint=["/usr/bin/env"]),
        pipeline_root=str(tmp_path / "root"),
        raise_on_error=False,
    )
    yield Runs(tmp_path, compile_kubeflow(WORKLOAD, folder=ROOT).definition)
    LocalExecutionConfig.instance = None


def test_all_steps_and_both_branches_run_as_containers(
    runs: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    steps = runs.run(max_data_hosts=0, epochs=3)
    words = capfd.readouterr().out
    print(words)
    assert set(steps) == {"profile", "decide", "train", "evaluate"}, words[-3000:]
    profile = read_json(steps["profile"] / "profile", Profile)
    decision = read_json(steps["decide"] / "decision", Decision)
    training = read_json(steps["train"] / "record", Training)
    evaluation = read_json(steps["evaluate"] / "evaluation", Evaluation)
    assert profile.step.loader_cpu_seconds
    assert told(steps["decide"])["parameterValues"] == {"action": decision.action, "where": "pod"}
    assert all(plan.groups[0].role == "dnn" and len(plan.groups) == 1 for plan in decision.plans)
    assert training.status == "succeeded"
    assert training.workload_sha256 == decision.workload_sha256 == profile.workload_sha256
    assert training.job.name.startswith("mini-")
    assert (steps["train"] / "model" / "model.pt").is_file()
    assert training.model_uri == str(steps["train"] / "model")
    assert metrics(steps["train"])["accuracy"] == training.metrics["accuracy"]
    assert metrics(steps["evaluate"])["passed"] == 1
    assert evaluation.passed
    assert evaluation.performance
    assert "<svg" in (steps["evaluate"] / "report").read_text()
    for step in steps.values():
        assert (step / "summary").read_text().startswith("# ")
    assert f"run {training.job.name}: succeeded" in words

    again = runs.run(max_data_hosts=1, epochs=2, gate="accuracy>=1.5")
    words = capfd.readouterr().out
    print(words)
    assert set(again) == {"profile", "decide", "train-2", "evaluate"}, words[-3000:]
    decision = read_json(again["decide"] / "decision", Decision)
    training = read_json(again["train-2"] / "record", Training)
    evaluation = read_json(again["evaluate"] / "evaluation", Evaluation)
    assert told(again["decide"])["parameterValues"] == {"action": "heterogeneous", "where": "job"}
    assert {group.role for group in training.groups} == {"dnn", "data"}
    assert {host.group for host in training.hosts} == {"dnn", "data"}
    assert training.status == "succeeded"
    assert training.measured
    assert training.measured.steps == 2 * 8
    assert not evaluation.passed
    assert told(again["evaluate"])["parameterValues"] == {"passed": "false"}
    assert f"error: {evaluation.reason}" in words
    assert f"run {training.job.name}: " in words
    print(f"both runs: {time.monotonic() - started:.0f} s", file=sys.stderr)
