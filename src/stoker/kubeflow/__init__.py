"""Components of stoker for pipelines on Kubeflow, and the pods that their steps need.

    from kfp import dsl
    from stoker.kubeflow import RUN_ID, PipelineRun, decide, profile
    from stoker.workload_file import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))

    @dsl.pipeline(name="mine")
    def mine(epochs: int = 3) -> None:
        first = profile(
            image=run.image, workload=run.workload, run_id=RUN_ID, params={"epochs": epochs}
        )
        measured = run.step(first, "Profile", follows_job=True)
        second = decide(
            image=run.image,
            workload=measured.outputs["resolved"],
            profile=measured.outputs["profile"],
        )
        run.step(second, "Decide")

Needs the extra `kubeflow`. The inputs of a component are texts: a pipeline can use one alone, and
without a workload file. The graph of all steps is pipelines/kubeflow.py.

Each component takes the image of its pod as an input, so that all users share one compiled file.
The verb reads all inputs, and the paths of its outputs, from one JSON document, `--executor-input`:
Kubeflow Pipelines 2.17 refuses a step if its command names an input without a value.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Optional, ParamSpec

from stoker.errors import MissingExtraError

try:
    from kfp import dsl
    from kfp.dsl import (
        HTML,
        Artifact,
        ContainerSpec,
        Input,
        Markdown,
        Metrics,
        Model,
        Output,
        PipelineTaskFinalStatus,
    )
    from kfp.dsl.base_component import BaseComponent as Component
    from kfp.dsl.container_component_class import ContainerComponent
    from kfp.dsl.pipeline_channel import PipelineChannel
    from kfp.dsl.pipeline_task import PipelineTask as Task
    from kfp.dsl.structures import InputSpec
except ModuleNotFoundError as err:
    raise MissingExtraError.of(err, extra="kubeflow") from None

from stoker.kubeflow.steps import RUN_ID, PipelineRun, compiled
from stoker.kubeflow.steps import compile_kubeflow as compile_kubeflow
from stoker.parameters import PARAMETER_INPUT, PARAMETERS_INPUT

P = ParamSpec("P")

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# kfp's names for the types of inputs; of loops it has Python's names.
_INPUT_TYPES = {str: "String", int: "Integer", float: "Float", bool: "Boolean"}
_TYPE_NAMES = {kind.__name__: name for kind, name in _INPUT_TYPES.items()}


class ProfileComponent(ContainerComponent):  # type: ignore[misc]
    """The component that gets a run's parameters: `profile(..., params={"epochs": epochs})`.

    Its step has a typed input for each of them, as kfp resolves a value of the pipeline only as a
    whole input. The compiled component, the same for all workloads, has one input `params`.
    """

    def __call__(self, *, params: object = None, **inputs: object) -> Task:
        """Makes the step; `params` is a mapping, or one text that is such a JSON object."""
        named = params if isinstance(params, Mapping) else {}
        if params is not None and params is not named:
            inputs[PARAMETERS_INPUT] = params
        given = {f"{PARAMETER_INPUT}{name}": value for name, value in named.items()}
        further = {name: InputSpec(type=_type_of(value)) for name, value in given.items()}
        spec = dataclasses.replace(
            self.component_spec, inputs={**self.component_spec.inputs, **further}
        )
        task: Task = ContainerComponent(spec, self.pipeline_func)(**inputs, **given)
        return task


def _type_of(value: object) -> str:
    """Returns kfp's name for the type of an input."""
    if isinstance(value, PipelineChannel):
        plain = str(value.channel_type).partition("[")[0]
        return _TYPE_NAMES.get(plain, plain)
    return _INPUT_TYPES[type(value)]


def _profile_component(function: Callable[P, ContainerSpec]) -> Component:
    return ProfileComponent(dsl.container_component(function).component_spec, function)


def _container(image: str, verb: str, *words: str) -> ContainerSpec:
    """Returns a step that runs a verb, such as step train.

    Args:
        image: Image of the step's pod.
        verb: One word or two.
        words: Its flags, and paths of artifacts.
    """
    inputs_and_outputs = ("--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER)
    # kfp takes a placeholder as an image only inside a text.
    return ContainerSpec(
        image=f"{image}", command=["stoker", *verb.split()], args=[*words, *inputs_and_outputs]
    )


# The components are tables: kfp reads the inputs and outputs of each from its parameters.


@_profile_component
def profile(
    profile: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    resolved: OutputText,
    image: str,
    workload: str,
    run_id: str,
    params: Optional[str] = None,
    branch: Optional[str] = None,
) -> ContainerSpec:
    """Applies the run's parameters to the workload, and measures what a training step waits for.

    A profile that is given (the parameter reuse_profile) or kept is used; else this step creates
    and follows a job that runs the unchanged command for a few minutes.

    Args:
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        run_id: Id of the run. The job's name contains it, so that a retry adopts the job.
        params: Parameters of the run, as JSON: {"epochs": 3}. In Python a mapping, too.
        branch: Part of the job's name, for a run that trains more than once.
        profile: profile.json.
        metrics: Seconds per step, in total and for each part.
        summary: The verdict in words.
        resolved: The workload with the run's parameters, as JSON: what all later steps read.
    """
    return _container(
        image, "step profile", f"--out={profile.path}", f"--summary={summary.path}", "--yes"
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def decide(
    profile: Input[Artifact],
    decision: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    action: OutputText,
    verdict: OutputText,
    image: str,
    workload: str,
) -> ContainerSpec:
    """Ranks the clusters on which the training could run, by time or cost.

    Args:
        profile: profile.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        decision: decision.json.
        metrics: Predictions for the chosen plan.
        summary: The plans and the reasons, in words.
        action: keep, tune, scale_up, heterogeneous or scale_out.
        verdict: sure, probable, none or unknown. A probable plan is not followed.
    """
    return _container(
        image, "decide", profile.path, f"--out={decision.path}", f"--summary={summary.path}"
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def train(
    decision: Input[Artifact],
    record: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    model: Output[Model],
    status: OutputText,
    training: OutputText,
    image: str,
    workload: str,
    run_id: str,
    branch: Optional[str] = None,
) -> ContainerSpec:
    """Trains on the chosen cluster, as a job that this step creates and follows.

    Args:
        decision: decision.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        run_id: Id of the run. The job's name contains it, so that a retry adopts the job.
        branch: Part of the job's name, for a run that trains more than once.
        record: training.json.
        metrics: Metrics that the script reported, and seconds per step.
        summary: The training in words.
        model: Address of the trained model.
        status: succeeded, failed or stopped. A failed training run does not fail this step.
        training: training.json, as text.
    """
    return _container(
        image,
        "step train",
        f"--decision={decision.path}",
        f"--out={record.path}",
        f"--summary={summary.path}",
        f"--model={model.path}",
        "--always",
        "--yes",
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def evaluate(
    profile: Input[Artifact],
    decision: Input[Artifact],
    evaluation: Output[Artifact],
    report: Output[HTML],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    passed: OutputText,
    image: str,
    workload: str,
    training: str,
    champion: Optional[str] = None,
) -> ContainerSpec:
    """Compares the model with the gate, and the run with its prediction.

    This step succeeds whatever the verdict.

    Args:
        profile: profile.json.
        decision: decision.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        training: training.json, as text.
        champion: The model in use, for gates such as accuracy>=champion-0.005: a folder of
            champions, an evaluation.json, or registry:GROUP of SageMaker; empty: no model.
        evaluation: evaluation.json.
        report: Report on the whole run, an HTML page.
        metrics: The gate's metrics, speed and cost.
        summary: The verdict in words.
        passed: true or false.
    """
    return _container(
        image,
        "step evaluate",
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        f"--out={evaluation.path}",
        f"--report={report.path}",
        f"--summary={summary.path}",
        "--always",
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def gate(evaluation: Input[Artifact], image: str, champion: Optional[str] = None) -> ContainerSpec:
    """Fails if the evaluation did not pass, else makes its model the champion.

    Args:
        evaluation: evaluation.json.
        image: Image of the step's pod; needs no torch.
        champion: Folder of champions, to which the model is added; empty: no folder.
    """
    return _container(image, "step gate", f"--gate-of={evaluation.path}", "--promote")


@dsl.container_component  # type: ignore[untyped-decorator]
def finish(
    outcome: PipelineTaskFinalStatus, image: str, workload: str, run_id: str
) -> ContainerSpec:
    """Deletes the jobs that are left of a run, and reports how it ended.

    For `dsl.ExitHandler`. Needs Kubeflow Pipelines 2.14 or later to know how the run ended.

    Args:
        outcome: How the run ended, as Kubeflow reports it.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        run_id: Id of the run.
    """
    return _container(image, "step finish")


__all__ = [
    "RUN_ID",
    "PipelineRun",
    "Task",
    "compiled",
    "decide",
    "evaluate",
    "finish",
    "gate",
    "profile",
    "train",
]
