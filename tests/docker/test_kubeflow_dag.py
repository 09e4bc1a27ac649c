"""The compiled Kubeflow pipeline runs to its gate: Kubeflow's double, steps and jobs in containers.

The double resolves inputs as Kubeflow 2.17 does, the kubelet's runs what the API server's makes of
the steps' requests: volumes at the paths that were compiled, users, names, in-cluster credentials.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import pytest

pytest.importorskip("kfp")

from kfp import dsl
from kfp.dsl import ContainerSpec

from stoker import kubeflow
from stoker.kubeflow import PipelineRun, control_step
from stoker.logs import parse_line
from stoker.pipelines.kubeflow.compile import compile_kubeflow, kubeflow_request
from stoker.platforms.kubernetes.rights import rules
from stoker.records import (
    Decision,
    Evaluation,
    Json,
    Profile,
    Record,
    Training,
    Workload,
    read_json,
)
from stoker.records.base import mapping
from stoker.workload_file import workload_from
from support.docker_engine import ROOT
from support.kubeflow_backend import KubeflowRun, Pipeline, Step, Store
from support.kubelet import Kubelet, claims_in
from support.kubernetes_api import NAMESPACE
from support.unchanged import BATCH_SIZE, PLAIN, STREAM

pytestmark = [
    pytest.mark.docker,
    pytest.mark.timeout(900),
    # What it decides follows from what it measures.
    pytest.mark.alone,
]

R = TypeVar("R", bound=Record)
TYPE = "c7i.large"
DIGITS = "/opt/ml/input/data/training"
DOCUMENT: Mapping[str, Json] = {
    "name": "mini",
    "command": ["python3", "examples/mnist/train.py", "--workers", "0", "--samples", "512"],
    "image": "job:latest",
    "platform": "kubernetes",
    "cluster": {"dnn": {"instance_type": TYPE, "count": 1}},
    "hyperparameters": {"epochs": 8},
    "training": {"epochs": 8, "samples_per_epoch": 512, "global_batch_size": 64},
    "constraints": {"objective": "time", "max_data_hosts": 1, "allowed_instance_types": [TYPE]},
    "gate": [{"metric": "accuracy", "min": 0.02}],
    # Of a busy machine: what the parts do not explain is not to decide anything.
    "profile": {"budget_seconds": 12, "max_unexplained": 0.9},
    "kubernetes": {
        "namespace": NAMESPACE,
        "pools": {TYPE: {"cpu": 1, "memory": "2Gi", "gpus": 0}},
        "max_run_seconds": 600,
    },
}
WITHOUT_CLAIM = workload_from(DOCUMENT)
WITH_CLAIM = workload_from(
    {
        **DOCUMENT,
        # Not those that are in the image.
        "command": [*DOCUMENT["command"], "--data", DIGITS],  # type: ignore[misc]
        "channels": {"training": {"uri": "pvc://datasets/mnist"}},
        "kubernetes": {
            **mapping(DOCUMENT, "kubernetes"),
            "output": "pvc://runs/stoker",
            "champion": "pvc://champions/digits",
        },
    }
)


@pytest.fixture
def kubelet(engine, tmp_path):
    digits = tmp_path / "drawn"
    shutil.copytree(ROOT / "examples" / "mnist" / "data", digits / "mnist")
    claims = dict(claims_in(tmp_path, datasets=digits, runs=None, champions=None))
    with Kubelet(engine, tmp_path, claims=claims) as made:
        yield made


class Run:
    """A run of a pipeline on the kubelet's cluster, with the records that its steps left."""

    def __init__(
        self,
        kubelet: Kubelet,
        folder: Path,
        workload: Workload,
        *,
        definition: str = "",
        state: str = "SUCCEEDED",
        # The profile needs 30 batches, the training no more than three epochs.
        parameters: Mapping[str, Json] = MappingProxyType({"epochs": 3}),
    ) -> None:
        # A pod may do what the rendered Role allows, and nothing more.
        kubelet.api.role = rules(workload.kubernetes)
        definition = definition or compile_kubeflow(workload, folder=ROOT).definition
        self.kubeflow = KubeflowRun(
            Pipeline(definition),
            execute=kubelet.run_step,
            store=Store(folder / "store"),
            parameters=dict(parameters),
            namespace=NAMESPACE,
            workflow="mini-x7k2p",
        )
        kubelet.api.put("workflows", self.kubeflow.workflow_document())
        ended = self.kubeflow.run()
        words = kubelet.all_logs()
        print(words)
        assert ended == state, f"{self.kubeflow.logs}\n{words}"

    def step(self, task: str) -> Step:
        return [step for step in self.kubeflow.steps if step.task == task][-1]

    def record(self, task: str, output: str, kind: type[R]) -> R:
        return read_json(self.step(task).output(output), kind)

    def check(self, *, has_claim: bool) -> Training:
        profile = self.record("profile", "profile", Profile)
        decision = self.record("decide", "decision", Decision)
        training = self.record("train", "record", Training)
        evaluation = self.record("evaluate", "evaluation", Evaluation)
        assert profile.step.loader_cpu_seconds
        assert training.status == "succeeded"
        assert training.workload_sha256 == decision.workload_sha256 == profile.workload_sha256
        assert training.job.name.startswith("mini-")
        assert evaluation.passed
        assert "<svg" in self.step("evaluate").output("report").read_text()
        for task in ("profile", "decide", "train", "evaluate"):
            assert self.step(task).output("summary").read_text().startswith("# ")
        told = json.loads(self.step("train").at(self._told("train")).read_text())
        metrics = told["artifacts"]["metrics"]["artifacts"][0]["metadata"]
        assert metrics["accuracy"] == training.metrics["accuracy"]
        assert bool(training.model_uri) == has_claim
        return training

    def _told(self, task: str) -> str:
        return str(self.step(task).executor_input["outputs"]["outputFile"])


def test_the_pipeline_with_claims_runs_to_its_gate(kubelet, tmp_path):
    training = Run(kubelet, tmp_path, WITH_CLAIM).check(has_claim=True)
    made = tmp_path / "claims" / "runs" / "stoker" / training.job.name / "model" / "model.pt"
    assert made.is_file()
    champions = list((tmp_path / "claims" / "champions" / "digits").rglob("*.json"))
    assert champions, "the gate has promoted nothing"


@pytest.mark.parametrize("script", [PLAIN, STREAM], ids=lambda script: script.name)
def test_an_unchanged_script_is_fed_to_its_gate(kubelet, tmp_path, script):
    # The claim has the script, next to what it reads.
    script.write(tmp_path / "claims" / "datasets" / "mnist")
    size = {"epochs": script.epochs, "samples_per_epoch": 384, "global_batch_size": BATCH_SIZE}
    document = {
        **DOCUMENT,
        "command": ["python3", f"{DIGITS}/{script.name}.py", str(script.epochs)],
        "hyperparameters": {},
        "training": size,
        "gate": [],
        "channels": {"training": {"uri": "pvc://datasets/mnist"}},
    }
    run = Run(kubelet, tmp_path, workload_from(document), parameters={})
    profile = run.record("profile", "profile", Profile)
    training = run.record("train", "record", Training)
    evaluation = run.record("evaluate", "evaluation", Evaluation)
    assert (profile.loader.reach, profile.loader.shards) == ("torch", script.shards)
    assert training.status == "succeeded"
    assert training.steps == script.steps
    assert evaluation.passed
    assert evaluation.reason == ""


def test_a_pipeline_of_ones_own_runs_to_its_last_step(kubelet, tmp_path):
    """Its shape is that of examples/kubeflow_pipeline."""
    request = kubeflow_request(WITH_CLAIM)
    definition = kubeflow.pipeline(request, own_steps, description="Digits, every night.")
    run = Run(kubelet, tmp_path, WITH_CLAIM, definition=definition)
    run.check(has_claim=True)
    tasks = [step.task for step in run.kubeflow.steps]
    assert tasks[0] == "prepare"
    assert tasks[-2:] == ["deploy", "finish"]


def test_a_lost_pod_that_follows_a_training_is_tried_again_and_adopts_it(kubelet, tmp_path):
    """The pipeline has no claim, and runs to its gate."""
    kubelet.lost = {"train": "vanished"}
    run = Run(kubelet, tmp_path, WITHOUT_CLAIM)
    run.check(has_claim=False)
    assert [step.attempt for step in run.kubeflow.steps if step.task == "train"] == [0, 1]
    events = [event for lines in kubelet.logs.values() for event in map(parse_line, lines) if event]
    made = [event.values["job"] for event in events if event.event == "job_created"]
    adopted = [event.values["job"] for event in events if event.event == "job_resumed"]
    assert made == ["mini-5b1f6c3e-profile", "mini-5b1f6c3e"]
    assert adopted == ["mini-5b1f6c3e"]


def test_a_training_that_has_lost_its_step_is_told_by_the_last_one(kubelet, tmp_path):
    """Kubeflow never tries an exit code again: the run stays FAILED, and its model is not lost."""
    kubelet.lost = {"train": "killed"}
    run = Run(kubelet, tmp_path, WITHOUT_CLAIM, state="FAILED")
    assert [step.attempt for step in run.kubeflow.steps if step.task == "train"] == [0]
    training = run.record("finish", "record", Training)
    assert training.status == "succeeded"
    assert run.record("finish", "evaluation", Evaluation).passed
    assert "<svg" in run.step("finish").output("report").read_text()
    log = kubelet.log(run.step("finish").pod["metadata"]["name"])
    assert "though the run has FAILED: Retry uses it" in log.splitlines()[-1]


@dsl.container_component
def prepare(folder: str, address: dsl.OutputPath(str)):  # type: ignore[no-untyped-def,valid-type]
    """Tells the address of the day's data."""
    words = 'printf "pvc://datasets/%s" "$0" > "$1"'
    return ContainerSpec(image="job:latest", command=["sh", "-c", words], args=[folder, address])


@dsl.container_component
def judge(training: str, score: dsl.OutputPath(float)):  # type: ignore[no-untyped-def,valid-type]
    """Judges a model by its record."""
    words = (
        "import json, sys; r = json.loads(sys.argv[1]); "
        "open(sys.argv[2], 'w').write('0.99' if r['status'] == 'succeeded' else '0')"
    )
    command = ["python3", "-c", words]
    return ContainerSpec(image="job:latest", command=command, args=[training, score])


@dsl.container_component
def deploy(training: str):  # type: ignore[no-untyped-def]
    """Deploys a model."""
    return ContainerSpec(image="job:latest", command=["sh", "-c", 'test -n "$0"'], args=[training])


def own_steps(run: PipelineRun, folder: str = "mnist", least: float = 0.95) -> None:
    """Makes the steps."""
    last = kubeflow.follower(kubeflow.finish(**run.inputs(kubeflow.finish)), run, name="Finish")
    with dsl.ExitHandler(last, name="run"):
        data = control_step(prepare(folder=folder), run, name="Prepare").output
        today = kubeflow.profile(**run.inputs(kubeflow.profile, input_data=data))
        profile = kubeflow.follower(today, run, name="Profile").outputs["profile"]
        decided = kubeflow.decide(profile=profile, **run.inputs(kubeflow.decide))
        decision = control_step(decided, run, name="Decide").outputs["decision"]
        made = {"profile": profile, "decision": decision}
        job = kubeflow.train(**made, **run.inputs(kubeflow.train, input_data=data))
        training = kubeflow.follower(job, run, name="Train").outputs["training"]
        score = control_step(judge(training=training), run, name="Hold-out").output
        judged = kubeflow.evaluate(**made, training=training, **run.inputs(kubeflow.evaluate))
        evaluation = control_step(judged, run, name="Evaluate").outputs["evaluation"]
        gate = kubeflow.gate(evaluation=evaluation, **run.inputs(kubeflow.gate))
        passed = control_step(gate, run, name="Gate")
        with dsl.If(score >= least, name="good-enough"):
            control_step(deploy(training=training).after(passed), run, name="Deploy")
