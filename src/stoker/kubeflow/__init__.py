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

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter as Argument
from pathlib import Path
from typing import TYPE_CHECKING, Optional, ParamSpec

import msgspec

from stoker.errors import MissingExtraError, UsageError

try:
    from kfp import compiler, dsl, kubernetes
    from kfp.dsl import (
        HTML,
        Artifact,
        ContainerSpec,
        Input,
        Metrics,
        Model,
        Output,
        PipelineTaskFinalStatus,
    )
    from kfp.dsl.base_component import BaseComponent as Component
    from kfp.dsl.container_component_class import ContainerComponent
    from kfp.dsl.graph_component import GraphComponent
    from kfp.dsl.pipeline_channel import PipelineChannel
    from kfp.dsl.pipeline_task import PipelineTask as Task
    from kfp.dsl.structures import InputSpec
    from kfp.kubernetes import set_security_context
except ModuleNotFoundError as err:
    raise MissingExtraError.of(err, extra="kubeflow") from None

from stoker.parameters import PARAMETER_INPUT, PARAMETERS_INPUT, Parameter, parameters_of
from stoker.pipelines.base import Compiled, about, checked, project_pipeline
from stoker.pipelines.kubeflow import workload_text
from stoker.platforms.kubernetes.pods import FOLLOWER_LABELS, STAY_ANNOTATIONS, claim_of
from stoker.records import KubeflowSettings, KubernetesSettings, Workload
from stoker.records.platforms import amount

P = ParamSpec("P")

# Stands for the run's id, but only as the whole value of an input.
RUN_ID: str = dsl.PIPELINE_JOB_ID_PLACEHOLDER

# Steps that write to MLflow, and the variables of its login.
_TRACKED = ("train", "evaluate")
# Secrets of the namespace that the steps get, if they are there: docs/how-to/monitoring.md.
_MLFLOW_SECRET = "stoker-mlflow"
_WEBHOOK_SECRET = "stoker-webhook"
MLFLOW_SECRETS = tuple(f"MLFLOW_TRACKING_{key}" for key in ("TOKEN", "USERNAME", "PASSWORD"))
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool}
_BY_NAME = Argument.POSITIONAL_OR_KEYWORD
# Kubeflow has no address that every pod can read, so the parameter is the profile itself.
_REUSE = "Text of a profile.json to use instead of a new profile; empty: profile."
# Where steps have the folder of champions.
_CHAMPIONS_FOLDER = "/mnt/champions"
# Later steps get it as an output parameter of the first, where its quotes are escaped.
MAX_WORKLOAD_BYTES = 16 << 10
# Of a step that follows a job; and of a small one, whose failure may also be an honest one, such
# as the gate's.
_RETRY_SECONDS = 60
_CONTROL_RETRY_SECONDS = 10
# From the start of the first attempt: a later attempt is ended then. kfp's default, one hour, would
# end a follower in the middle of a training run; kfp cannot express "no limit".
_RETRIES_END_SECONDS = 365 * 86400
# What a follower reads of its pod. The label is Kubeflow's.
_OWN_POD = {
    "NAME": "name",
    "UID": "uid",
    "NAMESPACE": "namespace",
    "RUN_ID": "labels['pipeline/runid']",
}

if TYPE_CHECKING:
    OutputText = str
else:
    OutputText = dsl.OutputPath(str)

# kfp's names for the types of inputs; of loops it has Python's names.
_INPUT_TYPES = {str: "String", int: "Integer", float: "Float", bool: "Boolean"}
_TYPE_NAMES = {kind.__name__: name for kind, name in _INPUT_TYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A run of a pipeline: its workload, and the pods of its steps.

    Attributes:
        record: Workload as the steps read it.
        settings: The workload's settings of Kubernetes.
        declared: The parameters of a run.
    """

    record: Workload
    settings: KubernetesSettings
    declared: tuple[Parameter, ...]

    @classmethod
    def of(cls, workload: Workload) -> "PipelineRun":
        """Returns a run for a pipeline of your own.

        Args:
            workload: Workload with an image and today's cluster, from
                `stoker.workload_file.read_workload`.

        Raises:
            UsageError: If the workload lacks what the steps need.
        """
        placed = checked(workload, target="kubeflow")
        settings = workload.kubernetes_settings
        inside = None
        if workload.kubernetes:
            # The connections of the user who compiles are not for pods.
            kept = KubeflowSettings(cache_days=(settings.kubeflow or KubeflowSettings()).cache_days)
            inside = msgspec.structs.replace(settings, kubeflow=kept, context=None)
        placed = msgspec.structs.replace(placed, sagemaker=None, kubernetes=inside)
        where = f"workload {workload.name}"
        if not settings.champion and any(gate.needs_champion for gate in workload.gate):
            raise UsageError(
                "a gate compares with the champion, but no champion is configured",
                where=f"{where}, key gate",
                fix="kubernetes.champion: pvc://CLAIM/FOLDER, or registry:GROUP of SageMaker",
            )
        size = len(workload_text(placed).encode())
        if size > MAX_WORKLOAD_BYTES:
            raise UsageError(
                f"the workload's document has {size} bytes, at most {MAX_WORKLOAD_BYTES}",
                where=where,
                fix="shorten it; a pools file needs only the pools that plans may have",
            )
        declared = tuple(
            replace(each, text=_REUSE) if each.name == "reuse_profile" else each
            for each in parameters_of(placed)
        )
        return cls(record=placed, settings=settings, declared=declared)

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def workload(self) -> str:
        """The workload as JSON, without the values of a run's parameters."""
        return workload_text(self.record)

    @property
    def image(self) -> str:
        """Image of the steps: `kubernetes.control.image`, or the training's."""
        return self.settings.control.image or self.record.image or ""

    @property
    def champion(self) -> str:
        """The model in use, as evaluate and gate name it; empty: none."""
        named = self.settings.champion or ""
        return _CHAMPIONS_FOLDER if named.startswith("pvc://") else named

    def step(
        self, task: Task, name: str, *, follows_job: bool = False, num_retries: int = 3
    ) -> Task:
        """Gives a step a small pod on any node, as `kubernetes.control` says, and retries.

        A step with an input `champion` gets the claim of `kubernetes.champion` mounted. Results
        are never taken from Kubeflow's cache.

        Args:
            task: A step of kfp.
            name: Name in the console.
            follows_job: Whether it creates and follows a job: autoscalers leave its pod alone, it
                has no time limit except the job's, and a retry adopts the job.
            num_retries: Number of retries, each after twice the time: a pod may be evicted.
        """
        task.set_display_name(name).set_caching_options(False)
        settings = self.settings
        control = settings.control
        user = settings.run_as
        # The user of the jobs' pods.
        set_security_context(task, run_as_user=user, run_as_group=user, run_as_non_root=True)
        # The image may not know the user.
        task.set_env_variable("HOME", "/tmp").set_env_variable("USER", "stoker")
        # Images for GPUs ask for all GPUs of the node, whatever the pod has.
        task.set_env_variable("NVIDIA_VISIBLE_DEVICES", "void")
        if settings.image_pull_policy:
            kubernetes.set_image_pull_policy(task, settings.image_pull_policy)
        if settings.step_pull_secrets:
            kubernetes.set_image_pull_secrets(task, list(settings.step_pull_secrets))
        self._set_secrets(task)
        if self.champion == _CHAMPIONS_FOLDER and "champion" in task.inputs:
            claim, folder = claim_of(str(settings.champion), where="key kubernetes.champion")
            kubernetes.mount_pvc(
                task, pvc_name=claim, mount_path=_CHAMPIONS_FOLDER, sub_path=folder
            )
        task.set_cpu_request(str(control.cpu))
        task.set_memory_request(_memory(control.memory)).set_memory_limit(_memory(control.memory))
        if follows_job:
            kubernetes.set_timeout(task, 0)
            _follow(task)
        elif control.max_run_seconds:
            kubernetes.set_timeout(task, control.max_run_seconds)
        if num_retries:
            seconds = _RETRY_SECONDS if follows_job else _CONTROL_RETRY_SECONDS
            task.set_retry(
                num_retries,
                backoff_duration=f"{seconds}s",
                backoff_factor=2.0,
                backoff_max_duration=f"{_RETRIES_END_SECONDS}s",
            )
        return task

    def pipeline(self, steps: Callable[P, None]) -> GraphComponent:
        """Returns kfp's pipeline of the workload's name.

        Args:
            steps: Function that makes the steps. Its `**params` are the run's parameters by name;
                its own arguments, with types and defaults, are further ones.
        """
        named = [
            Argument(each.name, _BY_NAME, default=each.default, annotation=_TYPES[each.kind])
            for each in self.declared
        ]
        own = inspect.signature(steps).parameters.values()
        named += [
            each.replace(kind=_BY_NAME) for each in own if each.kind is not Argument.VAR_KEYWORD
        ]

        def graph(*values: object) -> None:
            given = {each.name: value for each, value in zip(named, values, strict=True)}
            steps(**given)  # type: ignore[arg-type, call-arg]

        graph.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        # Kubeflow's console shows a parameter's description next to its field.
        texts = [f"    {each.name}: {each.text}" for each in self.declared]
        graph.__doc__ = "\n".join([about(self.name), "", "Args:", *texts, ""])
        made: GraphComponent = dsl.pipeline(name=self.name, description=about(self.name))(graph)
        return made

    def _set_secrets(self, task: Task) -> None:
        """Gives a step the secrets that it needs: MLflow's login, or the webhook's address."""
        workload = self.record
        name = task.component_spec.name
        tracking = workload.tracking
        notify = workload.notify
        # Optional: the Secret has only the keys that the server needs, or is not there.
        if tracking.mlflow and name in _TRACKED:
            keys = {key: key for key in MLFLOW_SECRETS}
            kubernetes.use_secret_as_env(task, _MLFLOW_SECRET, keys, optional=True)
        if notify and name == "finish":
            keys = {"url": notify.variable}
            kubernetes.use_secret_as_env(task, _WEBHOOK_SECRET, keys, optional=True)


def compiled(component: object) -> str:
    """Returns a component or pipeline of kfp as YAML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled.yaml"
        compiler.Compiler().compile(component, str(file))
        return file.read_text(encoding="utf-8")


def compile_kubeflow(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """Compiles the workload's pipeline, without network.

    Raises:
        UsageError: If the workload lacks something, or the project's files cannot be used.
    """
    run = PipelineRun.of(workload)
    module = project_pipeline("kubeflow", folder=folder or Path.cwd())
    definition = compiled(module.build(run))
    return Compiled(name=workload.name, definition=definition, parameters=run.declared)


def _follow(task: Task) -> None:
    """Tells a step its own pod, whose Workflow owns the job, and keeps autoscalers from it."""
    for key, path in _OWN_POD.items():
        kubernetes.use_field_path_as_env(task, f"POD_{key}", f"metadata.{path}")
    for key, text in STAY_ANNOTATIONS.items():
        kubernetes.add_pod_annotation(task, key, text)
    for key, text in FOLLOWER_LABELS.items():
        kubernetes.add_pod_label(task, key, text)


def _memory(quantity: str | int | float) -> str:
    """Returns MiB, rounded up: kfp takes no fractions."""
    return f"{-(-int(amount(str(quantity))) // 2**20)}Mi"


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
        spec = replace(self.component_spec, inputs={**self.component_spec.inputs, **further})
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
        resolved: The workload with the run's parameters, as JSON: what all later steps read.
    """
    return _container(image, "step profile", f"--out={profile.path}")


@dsl.container_component  # type: ignore[untyped-decorator]
def decide(
    profile: Input[Artifact],
    decision: Output[Artifact],
    metrics: Output[Metrics],
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
        action: keep, tune, scale_up, heterogeneous or scale_out.
        verdict: sure, probable, none or unknown. A probable plan is not followed.
    """
    return _container(image, "decide", profile.path, f"--out={decision.path}")


@dsl.container_component  # type: ignore[untyped-decorator]
def train(
    decision: Input[Artifact],
    training: Output[Artifact],
    metrics: Output[Metrics],
    model: Output[Model],
    status: OutputText,
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
        training: training.json.
        metrics: Metrics that the script reported, and seconds per step.
        model: Address of the trained model.
        status: succeeded, failed or stopped. A failed training run does not fail this step.
    """
    return _container(
        image,
        "step train",
        f"--decision={decision.path}",
        f"--out={training.path}",
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def evaluate(
    profile: Input[Artifact],
    decision: Input[Artifact],
    training: Input[Artifact],
    evaluation: Output[Artifact],
    report: Output[HTML],
    metrics: Output[Metrics],
    passed: OutputText,
    image: str,
    workload: str,
    champion: Optional[str] = None,
) -> ContainerSpec:
    """Compares the model with the gate, and the run with its prediction.

    This step succeeds whatever the verdict.

    Args:
        profile: profile.json.
        decision: decision.json.
        training: training.json.
        image: Image of the step's pod; needs no torch.
        workload: The workload, as JSON.
        champion: The model in use, for gates such as accuracy>=champion-0.005: a folder of
            champions, an evaluation.json, or registry:GROUP of SageMaker; empty: no model.
        evaluation: evaluation.json.
        report: Report on the whole run, an HTML page.
        metrics: The gate's metrics, speed and cost.
        passed: true or false.
    """
    return _container(
        image,
        "step evaluate",
        f"--profile={profile.path}",
        f"--decision={decision.path}",
        f"--training={training.path}",
        f"--out={evaluation.path}",
        f"--report={report.path}",
    )


@dsl.container_component  # type: ignore[untyped-decorator]
def gate(evaluation: Input[Artifact], image: str, champion: Optional[str] = None) -> ContainerSpec:
    """Fails if the evaluation did not pass, else makes its model the champion.

    Args:
        evaluation: evaluation.json.
        image: Image of the step's pod; needs no torch.
        champion: Folder of champions, to which the model is added; empty: no folder.
    """
    return _container(image, "step gate", f"--gate-of={evaluation.path}")


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
