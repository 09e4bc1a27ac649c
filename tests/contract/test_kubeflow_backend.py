"""Compiled pipelines and components run through a double of Kubeflow 2.17."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

pytest.importorskip("kfp")

from kfp import dsl
from kfp.dsl import Artifact, ContainerSpec, Output

from stoker import kubeflow
from stoker.kubeflow import compile_kubeflow
from stoker.records import Workload
from stoker.workload_file import read_workload
from support import examples
from support.kubeflow_backend import KubeflowRun, Pipeline, Step
from support.kubeflow_pipeline import COMPONENTS

ROOT = Path(__file__).resolve().parents[2]
# As its user says it who has no claim yet; kept in a bucket, data is nothing that pods mount.
WITHOUT_CLAIM = "channels={}"
POOL = "{cpu: 3, memory: 12Gi, gpus: 1}"
# Workloads that the repository ships with an image: those for SageMaker need a pool here.
SHIPPED = {
    "claim": ("mnist-kubeflow",),
    "no claim": ("mnist-kubeflow", WITHOUT_CLAIM),
    "sagemaker": (
        "mnist-sagemaker",
        WITHOUT_CLAIM,
        f"kubernetes.pools={{g5.xlarge: {POOL}}}",
        # The other types of SageMaker are no pools.
        "constraints.allowed_instance_types=[ml.g5.xlarge]",
    ),
}


def played(
    definition: str, folder: Path, *, ends: Mapping[str, Sequence[int | str]] = MappingProxyType({})
) -> KubeflowRun:
    """Runs a pipeline; `ends` are of a task's attempts."""

    def execute(step: Step) -> int | str:
        step.write_outputs()
        left = ends.get(step.task, ())[step.attempt :]
        return left[0] if left else 0

    run = KubeflowRun(pipeline=Pipeline(definition), execute=execute, folder=folder)
    run.run()
    return run


def shipped(kind: str) -> Workload:
    name, *overrides = SHIPPED[kind]
    return read_workload(examples.document(f"{name}.yaml"), overrides=["image=a/b:1", *overrides])


@dsl.container_component
def make(made: Output[Artifact]):  # type: ignore[no-untyped-def]
    """Makes a file."""
    return ContainerSpec(image="a/b", command=["make", made.path])


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_alone_runs_with_its_required_inputs_only(name, tmp_path):
    component = getattr(kubeflow, name)
    inputs = component.component_spec.inputs.items()
    needed = {key: about.type for key, about in inputs if not about.optional and key != "outcome"}

    def one() -> None:
        given: dict[str, object] = {"String": "x", "Integer": 1}
        if name == "finish":
            with dsl.ExitHandler(component(**{key: given[kind] for key, kind in needed.items()})):
                make()
        else:
            made = make().outputs["made"]
            component(**{key: given.get(kind, made) for key, kind in needed.items()})

    run = played(kubeflow.compiled(dsl.pipeline(name="small")(one)), tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    (step,) = [step for step in run.steps if step.task == name]
    assert not [word for word in step.command if "{{" in word]


@pytest.mark.parametrize("kind", SHIPPED)
def test_each_shipped_workload_runs_to_its_gate(kind, tmp_path):
    definition = compile_kubeflow(shipped(kind), folder=ROOT).definition
    run = played(definition, tmp_path)
    assert run.state == "SUCCEEDED", run.logs
    tasks = ["profile", "decide", "train", "evaluate", "gate", "finish"]
    assert [step.task for step in run.steps] == tasks
    for step in run.steps:
        assert not [word for word in step.command if "{{" in word]
        assert step.container["image"] == "a/b:1"
        given = step.executor_input["inputs"]["parameterValues"]
        has_job = step.task in ("profile", "train", "finish")
        assert given.get("run_id") == (run.run_id if has_job else None)
    train = run.steps[2]
    assert train.environment["POD_RUN_ID"] == run.run_id
    assert train.environment["POD_NAME"] == train.pod["metadata"]["name"]


@pytest.mark.parametrize("task", ["profile", "train"])
def test_a_follower_whose_pod_vanishes_is_tried_again(task, tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    run = played(definition, tmp_path, ends={task: ["vanished"]})
    assert [step.attempt for step in run.steps if step.task == task] == [0, 1]
    assert run.state == "SUCCEEDED", run.logs


def test_after_a_failed_gate_the_run_has_failed_and_finish_is_told(tmp_path):
    definition = compile_kubeflow(shipped("claim"), folder=ROOT).definition
    run = played(definition, tmp_path, ends={"gate": [3]})
    assert run.state == "FAILED"
    outcome = run.steps[-1].executor_input["inputs"]["parameterValues"]["outcome"]
    assert (run.steps[-1].task, outcome["state"]) == ("finish", "FAILED")
