"""Components of stoker for pipelines on Kubeflow, and the pods that their steps need.

    from kfp import dsl
    from stoker.kubeflow import PipelineRun, control_step, decide, follower, profile
    from stoker.workload_file import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-kubeflow.yaml"))

    @dsl.pipeline(name="mine")
    def mine() -> None:
        measured = follower(profile(**run.inputs(profile)), run, name="Profile")
        found = decide(profile=measured.outputs["profile"], **run.inputs(decide))
        control_step(found, run, name="Decide")

Needs the extra `kubeflow`. The inputs of a component are texts and numbers: a pipeline can use
`profile(image=..., workload=...)` without a workload file.

Each component takes the image of its pod as an input, so that all users share one compiled file
(Kubeflow Pipelines 2.4 or later). The verb reads all other inputs, and the paths of its outputs,
from one JSON document, `--executor-input`. An input that is left out has the workload's value. The
command itself names no such input: Kubeflow Pipelines 2.17 refuses a step if its command names an
input without a value.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
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

from stoker.kubeflow.branches import TrainingComponent
from stoker.kubeflow.steps import (
    RUN_ID,
    PipelineRun,
    compiled,
    control_step,
    follower,
    image_to_compare,
    mounted_channels,
    pipeline,
    with_image_and_data,
)
from stoker.pipelines.kubeflow.compile import KubeflowRequest

P = ParamSpec("P")

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# The number of a period of `$0` days. 0 days: a new number each time.
_PERIOD = (
    'mkdir -p "$(dirname "$1")" && '
    'if [ "$0" -gt 0 ]; then echo "$0.$(($(date +%s) / 86400 / $0))"; else date +%s.%N; fi > "$1"'
)


def _component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component of a function; kfp calls it once, with a placeholder for each argument."""
    signature = inspect.signature(function)
    # To kfp `str | None` is the name of an artifact, and Optional[str] what it means.
    read = [
        each.replace(annotation=Union[each.annotation.__args__])  # noqa: UP007
        if isinstance(each.annotation, UnionType)
        else each
        for each in signature.parameters.values()
    ]
    vars(function)["__signature__"] = signature.replace(parameters=read)
    component: Component = dsl.container_component(function)
    vars(function)["__signature__"] = signature
    # For notebooks and editors: kfp's own object shows neither docstring nor inputs.
    inputs = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in signature.parameters.items()
        if name in (component.component_spec.inputs or {})
        and parameter.annotation is not PipelineTaskFinalStatus
    ]
    component.__doc__ = function.__doc__
    component.__signature__ = inspect.Signature(inputs, return_annotation=Task)
    return component


def _training_component(function: Callable[P, ContainerSpec]) -> Component:
    """Makes a component with hyperparameters: `profile(..., hyperparameters={...})`."""
    plain = _component(function)
    component = TrainingComponent(plain.component_spec, function)
    shown = plain.__signature__
    changed = shown.parameters["hyperparameters"].replace(
        annotation=Mapping[str, object] | str | None
    )
    component.__doc__ = plain.__doc__
    parameters = {**shown.parameters, "hyperparameters": changed}
    component.__signature__ = shown.replace(parameters=list(parameters.values()))
    return component


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


# The components are tables: kfp reads the inputs and outputs of each from its parameters, so that
# tests/data/house.json has them among the functions with many.


@_component
def period(number: OutputText, image: str, cache_days: int) -> ContainerSpec:
    """Numbers periods of days, to limit how long a cached profile is used.

    Kubeflow's cache never expires. As the cache_key of `profile`, the number ends the use of
    profiles from earlier periods.

    Args:
        image: Image of the step's pod: any image with a shell.
        cache_days: Length of a period; 0: a new number in each run, so that nothing is reused.
        number: The number of the period.
    """
    return ContainerSpec(
        image=f"{image}", command=["sh", "-c", _PERIOD], args=[f"{cache_days}", number]
    )


@_training_component
def compare(
    comparison: OutputText,
    has_changed: OutputText,
    words: OutputText,
    since: OutputText,
    record: Output[Artifact],
    image: str,
    workload: str,
    memory: str,
    channels: str,
    job_image: str | None = None,
    instance_type: str | None = None,
    instance_count: int | None = None,
    input_data: str | None = None,
    objective: str | None = None,
    max_usd_per_hour: str | None = None,
    max_usd: str | None = None,
    max_data_hosts: int | None = None,
    allowed_types: str | None = None,
    replace_dataloader: str | None = None,
    epochs: int | None = None,
    gate: str | None = None,
    pools_file: str | None = None,
    skip_unchanged: str | None = None,
    branch: str | None = None,
    hyperparameters: str | None = None,
) -> ContainerSpec:
    """Compares what a run would train with the last run that passed.

    This step succeeds whatever it finds; what it cannot read counts as changed. An input that is
    left out has the workload's value. `if_changed` makes it, with the pod that it needs.

    Args:
        image: Image of the step's pod: the job's, whose digest it reads, unless that is in its
            name.
        workload: The workload, as JSON.
        memory: Folder in which `remember` keeps what passed.
        channels: Folder of each channel that is mounted, by its address, as JSON.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, of today's cluster.
        instance_count: Number of hosts in today's cluster.
        input_data: Address of the training data.
        objective: As for decide.
        max_usd_per_hour: As for decide.
        max_usd: As for decide.
        max_data_hosts: As for decide.
        allowed_types: As for decide.
        replace_dataloader: As for train.
        epochs: Number of training epochs.
        gate: As for evaluate.
        pools_file: The CSV file of node pools, as text.
        skip_unchanged: false: the run counts as changed.
        branch: As for train.
        hyperparameters: As for train.
        comparison: comparison.json, as text.
        has_changed: true or false.
        words: What has changed, or that nothing has.
        since: The run that it was compared with; empty: none.
        record: comparison.json.
    """
    return _container(image, "compare", f"--memory={memory}", f"--out={record.path}")


@_component
def unchanged(image: str, words: str) -> ContainerSpec:
    """Prints why a run was skipped.

    Args:
        image: Image of the step's pod: any image.
        words: What is printed.
    """
    return ContainerSpec(image=f"{image}", command=["echo"], args=[words])


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
    branch: str | None = None,
    hyperparameters: str | None = None,
) -> ContainerSpec:
    """Runs the unchanged command for a few minutes, and measures what a training step waits for.

    This step creates and follows the job that is measured. An input that is left out has the
    workload's value.

    Args:
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, of today's cluster.
        instance_count: Number of hosts in today's cluster.
        input_data: Address of the training data.
        pools_file: The CSV file of node pools, as text.
        reuse_profile: A profile.json, as text, to use instead of a new one; empty: a new one.
        cache_key: Any text. Kubeflow reuses only profiles that were made with the same text.
        branch: Part of the job's name, for a run that profiles more than once.
        hyperparameters: Values that replace the workload's, by parameter, as JSON:
            {"batch_size": 128}. In Python a mapping, too.
        profile: profile.json.
        metrics: Seconds per step, in total and for each part.
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
    verdict: OutputText,
    image: str,
    workload: str,
    instance_type: str | None = None,
    instance_count: int | None = None,
    objective: str | None = None,
    max_usd_per_hour: str | None = None,
    max_usd: str | None = None,
    max_data_hosts: int | None = None,
    allowed_types: str | None = None,
    replace_dataloader: str | None = None,
    epochs: int | None = None,
    pools_file: str | None = None,
    memory: str | None = None,
) -> ContainerSpec:
    """Ranks the clusters on which the training could run, by time or cost.

    An input that is left out has the workload's value.

    Args:
        profile: profile.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        instance_type: Instance type, or node pool, of today's cluster.
        instance_count: Number of hosts in today's cluster.
        objective: What the plans are ranked by: cost or time.
        max_usd_per_hour: Limit for the cost of all hosts, in dollars per hour; empty: no limit.
        max_usd: Limit for the cost of the training, in dollars; empty: no limit.
        max_data_hosts: Limit for the number of data hosts; 0: no data group.
        allowed_types: Instance types to choose from, separated by commas; empty: all known types.
        replace_dataloader: As for train.
        epochs: Number of training epochs.
        pools_file: The CSV file of node pools, as text.
        memory: Folder in which `remember` keeps what passed: the last run's plan stays until
            another one is clearly better. Empty: every run decides from the start.
        decision: decision.json.
        metrics: Predictions for the chosen plan.
        summary: The plans and the reasons, in words.
        action: keep, tune, scale_up, heterogeneous or scale_out.
        verdict: sure, probable, none or unknown. A probable plan is only followed if the workload
            says so (constraints.follow).
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
    max_usd: str | None = None,
    replace_dataloader: str | None = None,
    epochs: int | None = None,
    pools_file: str | None = None,
    branch: str | None = None,
    hyperparameters: str | None = None,
) -> ContainerSpec:
    """Trains on the chosen cluster, as a job that this step creates and follows.

    An input that is left out has the workload's value.

    Args:
        profile: profile.json, to evaluate the training if this step is lost.
        decision: decision.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        run_id: Id of the run. The job's name contains it, so that a retry adopts the job.
        job_image: Image of the job's hosts.
        instance_type: Instance type, or node pool, of today's cluster.
        instance_count: Number of hosts in today's cluster.
        input_data: Address of the training data.
        max_usd: Dollars at which the training is ended; empty: no limit.
        replace_dataloader: Whether stoker feeds loaders of PyTorch's own class: auto, true, false.
        epochs: Number of training epochs.
        pools_file: The CSV file of node pools, as text.
        branch: Part of the job's name, for a run that trains more than once.
        hyperparameters: Values that replace the workload's, by parameter, as JSON:
            {"batch_size": 128}. In Python a mapping, too.
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
    """Compares the model with the gate, and the run with its prediction.

    This step succeeds whatever the verdict. An input that is left out has the workload's value.

    Args:
        profile: profile.json.
        decision: decision.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        training: training.json, as text.
        instance_type: Instance type, or node pool, of today's cluster.
        instance_count: Number of hosts in today's cluster.
        gate: Bounds for the model's metrics, such as accuracy>=0.94, loss<=0.2; empty: no gate.
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


@_component
def gate(evaluation: Input[Artifact], image: str, champion: str | None = None) -> ContainerSpec:
    """Fails if the evaluation did not pass, else makes its model the champion.

    Args:
        evaluation: evaluation.json.
        image: Image of the step's pod; needs no torch.
        champion: Folder of champions, to which the model is added; empty: no folder.
    """
    return _container(image, "step gate", f"--gate-of={evaluation.path}", "--promote")


@_component
def remember(
    profile: Input[Artifact],
    decision: Input[Artifact],
    evaluation: Input[Artifact],
    image: str,
    workload: str,
    memory: str,
    training: str,
    comparison: str | None = None,
) -> ContainerSpec:
    """Keeps a run that passed in the memory, for the next run's `compare` and `decide`.

    The last step of a run: what fails before it is not remembered.

    Args:
        profile: profile.json.
        decision: decision.json.
        evaluation: evaluation.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        memory: Folder of the memory.
        training: training.json, as text.
        comparison: comparison.json, as text; left out: no later run is skipped because of this one.
    """
    return _container(
        image,
        "step gate",
        f"--gate-of={evaluation.path}",
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        f"--remember={memory}",
    )


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
    """Ends the run's jobs, including a profile's, and prints how the run ended.

    If a run has failed because a step was lost, this step first follows the step's job to its end,
    and writes the outputs of the lost step. It does not if a person has ended the run.

    For `dsl.ExitHandler`, placed with `follower`. Needs Kubeflow Pipelines 2.14 or later to know
    how the run ended.

    Args:
        outcome: How the run ended, as Kubeflow reports it.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        run_id: Id of the run.
        gate: As for evaluate, without comparison with a champion.
        record: training.json or profile.json, if a step was lost.
        evaluation: evaluation.json, if the step of a training run was lost.
        report: Report on the run, if the step of a training run was lost.
        metrics: Metrics of the job, if a step was lost.
        model: Address of the trained model, if the step of a training run was lost.
    """
    return _container(
        image,
        "step finish",
        f"--out={record.path}",
        f"--evaluation={evaluation.path}",
        f"--report={report.path}",
        f"--model={model.path}",
    )


@contextlib.contextmanager
def if_changed(run: PipelineRun) -> Iterator[PipelineRun]:
    """Runs the steps in it only if something has changed since the last run that passed.

    Without `skip_unchanged` in the workload they always run. Else the run begins with a step that
    compares; where nothing has changed, a step that says so is the only other one. Yields the run
    for the steps.
    """
    if not run.request.workload.skip_unchanged:
        yield run
        return
    given = run.inputs(compare, image=image_to_compare(run), channels=mounted_channels(run))
    compared = with_image_and_data(compare(**given), run, name="Compare").outputs
    with dsl.If(compared["has_changed"] == "true", name="changed"):
        yield dataclasses.replace(run, comparison=compared["comparison"])
    # A step that ends after the other condition was found false: only the end of a step makes
    # Kubeflow tell the exit handler that all before it is complete.
    with dsl.If(compared["has_changed"] != "true", name="unchanged"):
        prints = unchanged(words=compared["words"], **run.inputs(unchanged))
        control_step(prints, run, name="Unchanged")


__all__ = [
    "RUN_ID",
    "KubeflowRequest",
    "PipelineRun",
    "Task",
    "compare",
    "compiled",
    "control_step",
    "decide",
    "evaluate",
    "finish",
    "follower",
    "gate",
    "if_changed",
    "period",
    "pipeline",
    "profile",
    "remember",
    "train",
    "unchanged",
]
