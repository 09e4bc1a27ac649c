"""Components of stoker for pipelines on Kubeflow, and the pods that their steps need.

    from kfp import dsl
    from stoker.kubeflow import PipelineRun, control_step, decide, follower, profile
    from stoker.settings import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))

    @dsl.pipeline(name="mine")
    def mine() -> None:
        measured = follower(profile(**run.inputs(profile)), run, name="Profile")
        found = decide(profile=measured.outputs["profile"], **run.inputs(decide))
        control_step(found, run, name="Decide")

Needs the extra `kubeflow`. The components alone take texts and numbers: nothing of a
workload file is needed to use `profile(image=..., workload=...)` in a pipeline.

Each takes the image of its pod as an input, so that one compiled component serves everybody
(Kubeflow Pipelines 2.4 or later puts it in its place). All other inputs, and the places of the
outputs, reach the verb as one JSON document, `--executor-input`: an input that is left out is then
as the workload says. In a word of the command such an input would end the run, because Kubeflow
Pipelines 2.17 refuses a step whose command names an input that the run has no value for.
"""

import inspect
from collections.abc import Callable, Mapping
from types import UnionType
from typing import TYPE_CHECKING, ParamSpec, Union

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
    from kfp.dsl.pipeline_task import PipelineTask as Task
except ModuleNotFoundError as err:
    raise MissingExtraError.of(err, extra="kubeflow") from None

from stoker.kubeflow.steps import (
    RUN_ID,
    PipelineRun,
    TrainingComponent,
    compiled,
    control_step,
    follower,
    pipeline,
)
from stoker.pipelines.kubeflow.compile import KubeflowRequest

P = ParamSpec("P")

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# The number of a span of `$0` days: the same text all through it. No days: another text each time.
_PERIOD = (
    'mkdir -p "$(dirname "$1")" && '
    'if [ "$0" -gt 0 ]; then echo "$0.$(($(date +%s) / 86400 / $0))"; else date +%s.%N; fi > "$1"'
)


def _component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component of a function: kfp calls it once, with a placeholder for each argument."""
    return _shown(_made(function), function)


def _training_component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component that hands hyperparameters on: `profile(..., hyperparameters={...})`."""
    return _shown(TrainingComponent(_made(function).component_spec, function), function)


def _made(function: Callable[P, ContainerSpec]) -> Component:
    own = inspect.signature(function)
    # To kfp `str | None` is the name of an artifact, and Optional[str] what it means.
    read = [
        each.replace(annotation=Union[each.annotation.__args__])  # noqa: UP007
        if isinstance(each.annotation, UnionType)
        else each
        for each in own.parameters.values()
    ]
    vars(function)["__signature__"] = own.replace(parameters=read)
    made: Component = dsl.container_component(function)
    vars(function)["__signature__"] = own
    return made


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
    """Returns a step of a verb.

    Args:
        image: Image of the step's pod.
        verb: Verb of the command line.
        words: Flags and paths of artifacts, which no caller can leave out.
    """
    told = ("--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER)
    # kfp takes a placeholder as an image only inside of a text.
    return ContainerSpec(image=f"{image}", command=["stoker", verb], args=[*words, *told])


@_component
def period(number: OutputText, image: str, cache_days: int) -> ContainerSpec:
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
    job_image: str | None = None,
    instance_type: str | None = None,
    instance_count: int | None = None,
    input_data: str | None = None,
    pools_file: str | None = None,
    reuse_profile: str | None = None,
    cache_key: str | None = None,
) -> ContainerSpec:
    """Measures what a training step waits for: runs the unchanged command for a few minutes.

    The measured hosts are a job that this step creates and follows. An input that is left out is
    as the workload says.

    Args:
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, that trains today.
        instance_count: Hosts that train today.
        input_data: Address of the training data.
        pools_file: Text of the CSV file of node pools.
        reuse_profile: Text of a profile.json that is taken as it is; empty or left out: profile.
        cache_key: Any text: Kubeflow re-uses only a profile that was made with the same.
        hyperparameters: Values in place of the workload's, by the names of their parameters:
            {"batch_size": 128}.
        profile: profile.json.
        metrics: Seconds of a step and of its parts.
        summary: The verdict in words.
    """
    return _container(
        image, "profile", f"--out={profile.path}", f"--summary={summary.path}", "--yes"
    )


@_component
def decide(
    profile: Input[Artifact],
    decision: Output[Artifact],
    metrics: Output[Metrics],
    summary: Output[Markdown],
    action: OutputText,
    image: str,
    workload: str,
    instance_type: str | None = None,
    instance_count: int | None = None,
    objective: str | None = None,
    max_usd_per_hour: str | None = None,
    max_data_hosts: int | None = None,
    allowed_types: str | None = None,
    replace_dataloader: str | None = None,
    epochs: int | None = None,
    pools_file: str | None = None,
) -> ContainerSpec:
    """Ranks the clusters that could train, in time and money: records and prices in, plans out.

    An input that is left out is as the workload says.

    Args:
        profile: profile.json.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        instance_type: Instance type, or node pool, that trains today.
        instance_count: Hosts that train today.
        objective: What ranks the plans: cost or time.
        max_usd_per_hour: Dollars an hour that all hosts may cost; empty: no limit.
        max_data_hosts: Most data hosts that a plan may have; 0: no data group.
        allowed_types: Types that a plan may have, by commas; empty: all that are known.
        replace_dataloader: As for train.
        epochs: Epochs of the training.
        pools_file: Text of the CSV file of node pools.
        decision: decision.json.
        metrics: What the chosen plan promises.
        summary: The plans, and why, in words.
        action: keep, tune, scale_up, heterogeneous or scale_out.
    """
    return _container(
        image, "decide", profile.path, f"--out={decision.path}", f"--summary={summary.path}"
    )


@_training_component
def train(
    profile: Input[Artifact],
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
    job_image: str | None = None,
    instance_type: str | None = None,
    instance_count: int | None = None,
    input_data: str | None = None,
    replace_dataloader: str | None = None,
    epochs: int | None = None,
    pools_file: str | None = None,
) -> ContainerSpec:
    """Trains on the cluster that was decided on, as a job that this step creates and follows.

    An input that is left out is as the workload says.

    Args:
        profile: profile.json, for the evaluation of a training whose step was lost.
        decision: decision.json.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        run_id: The run's own id: the job's name has it, so that a retry adopts the job.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, that trains today.
        instance_count: Hosts that train today.
        input_data: Address of the training data.
        replace_dataloader: Whether loaders of PyTorch's own class are fed: auto, true or false.
        epochs: Epochs of the training.
        pools_file: Text of the CSV file of node pools.
        hyperparameters: Values in place of the workload's, by the names of their parameters:
            {"batch_size": 128}.
        record: training.json.
        metrics: What the script reported, and seconds of a step.
        summary: What the training did, in words.
        model: Address of the model that it left.
        status: succeeded, failed or stopped: a failed training does not fail this step.
        training: training.json as a text.
    """
    return _container(
        image,
        "train",
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        f"--out={record.path}",
        f"--summary={summary.path}",
        f"--model={model.path}",
        "--always",
        "--yes",
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
    instance_type: str | None = None,
    instance_count: int | None = None,
    gate: str | None = None,
    champion: str | None = None,
) -> ContainerSpec:
    """Judges a run: did quality hold, did the promise hold? Ends well whatever the verdict.

    An input that is left out is as the workload says.

    Args:
        profile: profile.json.
        decision: decision.json.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        training: training.json as a text.
        instance_type: Instance type, or node pool, that trains today.
        instance_count: Hosts that train today.
        gate: What the model must reach, as accuracy>=0.94, loss<=0.2; empty: no gate.
        champion: The model in use, for gates such as accuracy>=champion-0.005: a folder of
            champions, an evaluation.json, or registry:GROUP of SageMaker; empty or left out: none.
        evaluation: evaluation.json.
        report: The whole run on a page.
        metrics: The gate's metrics, speed and cost.
        summary: The verdict in words.
        passed: true or false.
    """
    return _container(
        image,
        "evaluate",
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        f"--out={evaluation.path}",
        f"--report={report.path}",
        f"--summary={summary.path}",
        "--always",
    )


@_component
def gate(evaluation: Input[Artifact], image: str, champion: str | None = None) -> ContainerSpec:
    """Fails, in the evaluation's own words, where it did not pass; else its model is the champion.

    Args:
        evaluation: evaluation.json.
        image: Image of the step's pod; it needs no torch.
        champion: Folder of champions, where a model that passed becomes the one in use; empty or
            left out: there is none.
    """
    return _container(image, "evaluate", f"--gate-of={evaluation.path}", "--promote")


@_component
def finish(
    outcome: PipelineTaskFinalStatus,
    record: Output[Artifact],
    evaluation: Output[Artifact],
    report: Output[HTML],
    metrics: Output[Metrics],
    model: Output[Model],
    image: str,
    workload: str,
    run_id: str,
    gate: str | None = None,
) -> ContainerSpec:
    """Ends the workload's jobs of the run, its profile's too, and says how the run ended.

    A job of a failed run whose step was lost is first followed to its end, unless somebody has
    ended the run: then there are outputs, in place of those that the lost step would have left.

    For `dsl.ExitHandler`, placed with `follower`. Kubeflow Pipelines 2.14 or later says how the run
    ended.

    Args:
        outcome: How the run ended, as Kubeflow tells it.
        image: Image of the step's pod; it needs no torch.
        workload: The workload, as JSON.
        run_id: The run's own id.
        gate: As for evaluate; a champion is not compared with.
        record: training.json or profile.json of a job whose step was lost.
        evaluation: evaluation.json of a training whose step was lost.
        report: The page of a training whose step was lost.
        metrics: Figures of a job whose step was lost.
        model: Address of the model of a training whose step was lost.
    """
    return _container(
        image,
        "train",
        "--finish",
        f"--out={record.path}",
        f"--evaluation={evaluation.path}",
        f"--report={report.path}",
        f"--model={model.path}",
    )


__all__ = [
    "RUN_ID",
    "KubeflowRequest",
    "PipelineRun",
    "Task",
    "compiled",
    "control_step",
    "decide",
    "evaluate",
    "finish",
    "follower",
    "gate",
    "period",
    "pipeline",
    "profile",
    "train",
]
