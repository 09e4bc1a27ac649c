"""Pipelines of your own on Kubeflow use these components of stoker, and the pods that they need.

    from kfp import dsl
    from stoker.kubeflow import PipelineRun, control_step, decide, on_todays_host, profile
    from stoker.settings import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))

    @dsl.pipeline(name="mine")
    def mine() -> None:
        measured = on_todays_host(profile(**run.inputs(profile)), run, name="Profile")
        found = decide(profile=measured.outputs["profile"], **run.inputs(decide))
        control_step(found, run, name="Decide")

Needs the extra `kubeflow`. The components alone take texts and numbers: nothing of a
workload file is needed to use `profile(image=..., workload=...)` in a pipeline.

Each takes the image of its pod as an input, so that one compiled component serves everybody
(Kubeflow Pipelines 2.4 or later puts it in its place). Paths and scalars go in; what comes out is
told to Kubeflow by the verb itself (`--executor-input`), for its pages and for later steps.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec

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

from stoker.kubeflow.steps import (
    RUN_ID,
    Component,
    PipelineRun,
    Task,
    TrainingComponent,
    compiled,
    control_step,
    follower,
    on_todays_host,
    pipeline,
)

P = ParamSpec("P")

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# Kubeflow puts a JSON document in its place: the step's inputs, and where its outputs belong.
_EXECUTOR_INPUT: str = dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER

# The number of a span of `$0` days: the same text all through it. No days: another text each time.
_PERIOD = (
    'mkdir -p "$(dirname "$1")" && '
    'if [ "$0" -gt 0 ]; then echo "$0.$(($(date +%s) / 86400 / $0))"; else date +%s.%N; fi > "$1"'
)


def _component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component of a function: kfp calls it once, with a placeholder for each argument."""
    return _shown(dsl.container_component(function), function)


def _training_component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component that hands hyperparameters on: `profile(..., hyperparameters={...})`."""
    made = dsl.container_component(function)
    return _shown(TrainingComponent(made.component_spec, function), function)


def _shown(made: Component, function: Callable[P, ContainerSpec]) -> Component:
    # For notebooks and editors: kfp's own object has neither the words nor the inputs.
    inputs = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if name in (made.component_spec.inputs or {})
        and parameter.annotation is not PipelineTaskFinalStatus
    ]
    if isinstance(made, TrainingComponent):
        kind = inspect.Parameter.KEYWORD_ONLY
        changed = Mapping[str, object] | None
        inputs.append(inspect.Parameter("hyperparameters", kind, default=None, annotation=changed))
    shown = {
        "__doc__": function.__doc__,
        "__signature__": inspect.Signature(inputs, return_annotation=Task),
    }
    for name, value in shown.items():
        setattr(made, name, value)
    return made


def _container(image: str, verb: str, *words: str) -> ContainerSpec:
    # kfp takes a placeholder as an image only inside of a text.
    return ContainerSpec(image=f"{image}", command=["stoker", verb], args=list(words))


@_component
def period(number: OutputText, image: str, cache_days: int = 0) -> ContainerSpec:
    """Numbers spans of days, so that a cached profile is used for so many days only.

    Kubeflow's cache never expires. The number is the same all through a span: given to `profile`
    as its cache_key, it ends what was cached in an earlier one.

    Args:
        image: Image of the step's pod: any with a shell.
        cache_days: Days of a span; 0: another number each time, so that nothing is re-used.
        number: The number of the span.
    """
    return ContainerSpec(
        image=f"{image}", command=["sh", "-c", _PERIOD], args=[f"{cache_days}", number]
    )


@_training_component
def profile(
    profile: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    image: str,
    workload: str,
    instance_type: str = "",
    instance_count: int = 0,
    platform: str = "local",
    input_data: str = "",
    reuse_profile: str = "",
    cache_key: str = "",
) -> ContainerSpec:
    """Measures what a training step waits for: runs the unchanged command for a few minutes.

    Args:
        image: Image of the step's pod: stoker's, with the training's code.
        workload: The workload, as JSON.
        instance_type: Instance type, or node pool, that trains today; empty: the workload's.
        instance_count: Hosts that train today; 0: the workload's.
        platform: local: on this step's own node; kubernetes: as a job that it creates.
        input_data: Address of the training data; empty: the workload has none.
        reuse_profile: Text of a profile.json that is taken as it is; empty: profile.
        cache_key: Any text: Kubeflow re-uses only a profile that was made with the same.
        hyperparameters: Values in place of the workload's, by the names of their parameters:
            {"batch_size": 128}.
        profile: profile.json.
        metrics: Seconds of a step and of its parts.
        summary: The verdict in words.
    """
    return _container(
        image,
        "profile",
        workload,
        f"--platform={platform}",
        f"--param=instance_type={instance_type}",
        f"--param=instance_count={instance_count}",
        f"--param=input_data={input_data}",
        f"--param=reuse_profile={reuse_profile}",
        f"--out={profile.path}",
        f"--summary={summary.path}",
        *("--executor-input", _EXECUTOR_INPUT),
    )


@_component
def decide(
    profile: Input[Artifact],
    decision: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    action: OutputText,
    where: OutputText,
    image: str,
    workload: str,
    instance_type: str = "",
    instance_count: int = 0,
    objective: str = "cost",
    max_usd_per_hour: str = "",
    max_data_hosts: int = 8,
    allowed_types: str = "",
    epochs: int = 0,
    pools_file: str = "",
) -> ContainerSpec:
    """Ranks the clusters that could train, in time and money: records and prices in, plans out.

    Args:
        profile: profile.json.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        instance_type: Instance type, or node pool, that trains today; empty: the workload's.
        instance_count: Hosts that train today; 0: the workload's.
        objective: What ranks the plans: cost or time.
        max_usd_per_hour: Dollars an hour that all hosts may cost; empty: no limit.
        max_data_hosts: Most data hosts that a plan may have; 0: no data group.
        allowed_types: Types that a plan may have, by commas; empty: all that are known.
        epochs: Epochs of the training; 0: as the workload says.
        pools_file: Text of the CSV file of node pools; empty: those of the workload.
        decision: decision.json.
        metrics: What the chosen plan promises.
        summary: The plans, and why, in words.
        action: keep, tune, scale_up, heterogeneous or scale_out.
        where: pod: the plan is one host of today's type; job: any other.
    """
    return _container(
        image,
        "decide",
        profile.path,
        *("--workload", workload),
        f"--param=instance_type={instance_type}",
        f"--param=instance_count={instance_count}",
        f"--param=objective={objective}",
        f"--param=max_usd_per_hour={max_usd_per_hour}",
        f"--param=max_data_hosts={max_data_hosts}",
        f"--param=allowed_types={allowed_types}",
        f"--param=epochs={epochs}",
        f"--param=pools_file={pools_file}",
        f"--out={decision.path}",
        f"--summary={summary.path}",
        *("--executor-input", _EXECUTOR_INPUT),
    )


@_training_component
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
    platform: str,
    run_id: str,
    job_image: str,
    instance_type: str = "",
    instance_count: int = 0,
    input_data: str = "",
    epochs: int = 0,
    pools_file: str = "",
) -> ContainerSpec:
    """Trains on the cluster that was decided on.

    Args:
        decision: decision.json.
        image: Image of the step's pod; one that follows a job needs no torch.
        workload: The workload, as JSON.
        platform: local: in this step's own pod; kubernetes: as a job that it creates.
        run_id: The run's own id: the job's name has it, so that a retry adopts the job.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, that trains today; empty: the workload's.
        instance_count: Hosts that train today; 0: the workload's.
        input_data: Address of the training data; empty: the workload has none.
        epochs: Epochs of the training; 0: as the workload says.
        pools_file: Text of the CSV file of node pools; empty: those of the workload.
        hyperparameters: Values in place of the workload's, by the names of their parameters:
            {"batch_size": 128}.
        record: training.json.
        metrics: What the script reported, and seconds of a step.
        summary: What the training did, in words.
        model: The model that it left; of a job, its address.
        status: succeeded, failed or stopped: a failed training does not fail this step.
        training: training.json as a text, which branches of a pipeline can be joined on.
    """
    return _container(
        image,
        "train",
        workload,
        f"--platform={platform}",
        f"--decision={decision.path}",
        f"--run-id={run_id}",
        f"--param=instance_type={instance_type}",
        f"--param=instance_count={instance_count}",
        f"--param=image={job_image}",
        f"--param=input_data={input_data}",
        f"--param=epochs={epochs}",
        f"--param=pools_file={pools_file}",
        f"--out={record.path}",
        f"--summary={summary.path}",
        f"--model={model.path}",
        "--always",
        "--yes",
        *("--executor-input", _EXECUTOR_INPUT),
    )


@_component
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
    instance_type: str = "",
    instance_count: int = 0,
    gate: str = "",
    champion: str = "",
) -> ContainerSpec:
    """Judges a run: did quality hold, did the promise hold? Ends well whatever the verdict.

    Args:
        profile: profile.json.
        decision: decision.json.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        training: training.json as a text.
        instance_type: Instance type, or node pool, that trains today; empty: the workload's.
        instance_count: Hosts that train today; 0: the workload's.
        gate: What the model must reach, as accuracy>=0.94, loss<=0.2; empty: no gate.
        champion: The model in use, for gates such as accuracy>=champion-0.005: a folder of
            champions, an evaluation.json, or registry:GROUP of SageMaker; empty: none.
        evaluation: evaluation.json.
        report: The whole run on a page.
        metrics: The gate's metrics, speed and cost.
        summary: The verdict in words.
        passed: true or false.
    """
    return _container(
        image,
        "evaluate",
        workload,
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        *("--training", training),
        f"--param=instance_type={instance_type}",
        f"--param=instance_count={instance_count}",
        f"--param=gate={gate}",
        f"--champion={champion}",
        f"--out={evaluation.path}",
        f"--report={report.path}",
        f"--summary={summary.path}",
        "--always",
        *("--executor-input", _EXECUTOR_INPUT),
    )


@_component
def gate(evaluation: Input[Artifact], image: str, champion: str = "") -> ContainerSpec:
    """Fails, in the evaluation's own words, where it did not pass; else its model is the champion.

    Args:
        evaluation: evaluation.json.
        image: Image of the step's pod; it needs no torch.
        champion: Folder of champions, where a model that passed becomes the one in use; empty:
            there is none.
    """
    return _container(
        image,
        "evaluate",
        f"--gate-of={evaluation.path}",
        f"--champion={champion}",
        "--promote",
    )


@_component
def finish(
    outcome: PipelineTaskFinalStatus,
    image: str,
    workload: str,
    platform: str,
    run_id: str,
) -> ContainerSpec:
    """Ends the workload's jobs of the run, its profile's too, and says how the run ended.

    For `dsl.ExitHandler`. Kubeflow Pipelines 2.14 or later says how the run ended.

    Args:
        outcome: How the run ended, as Kubeflow tells it.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        platform: Platform of the job.
        run_id: The run's own id.
    """
    return _container(
        image,
        "train",
        workload,
        f"--platform={platform}",
        f"--run-id={run_id}",
        f"--clean-up={outcome}",
    )


__all__ = [
    "RUN_ID",
    "PipelineRun",
    "Task",
    "compiled",
    "control_step",
    "decide",
    "evaluate",
    "finish",
    "follower",
    "gate",
    "on_todays_host",
    "period",
    "pipeline",
    "profile",
    "train",
]
