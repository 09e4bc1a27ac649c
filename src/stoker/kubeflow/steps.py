"""Steps of a pipeline: components in the pods that they need, and the compiled pipeline.

    measured = profile(**run.inputs(profile))
    follower(measured, run, name="Profile")

A pipeline may train more than once: `run.branch("large")` gives a training run its own job, and a
`dsl.ParallelFor` gives each of its items one.

The steps of a project's pipeline are listed in its own file, pipelines/kubeflow.py at the top of a
checkout; `stoker.parameters` has the parameters of a run. `control_step` and `follower` take and
return kfp's own task, and work on any step of any pipeline. kfp-kubernetes cannot set a priority
class (use configs/kubernetes/priority.yaml), variables from all keys of a secret, node affinity by
a rule, a seccomp profile or an fsGroup. Kubeflow Pipelines 2.16 and later set the seccomp profile
and drop capabilities.
"""

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kfp import compiler, dsl, kubernetes
from kfp.dsl.base_component import BaseComponent as Component
from kfp.dsl.pipeline_task import PipelineTask as Task
from kfp.kubernetes import set_security_context

from stoker.environment import STEP_WORKLOAD
from stoker.errors import UsageError
from stoker.kubeflow.branches import TrainingComponent, checked_branch
from stoker.parameters import BRANCH_INPUT, Parameter
from stoker.pipelines.kubeflow.compile import (
    CHAMPION,
    CHAMPIONS_FOLDER,
    CHANNELS_FOLDER,
    MEMORY,
    MEMORY_FOLDER,
    KubeflowRequest,
    kubeflow_request,
    workload_text,
)
from stoker.platforms.kubernetes.follower import FOLLOWER_LABELS
from stoker.platforms.kubernetes.layout import MAX_LABEL, STEP_LABEL
from stoker.platforms.kubernetes.pod_template import STAY_ANNOTATIONS, claim_of
from stoker.records import Workload, nearest
from stoker.records.platforms import amount
from stoker.records.profile_key import same_cost_names

# Stands for the run's id, but only as the whole value of an input.
RUN_ID: str = dsl.PIPELINE_JOB_ID_PLACEHOLDER

# Steps that write to MLflow, and the variables of its login.
_TRACKED = ("train", "evaluate")
MLFLOW_SECRETS = tuple(f"MLFLOW_TRACKING_{key}" for key in ("TOKEN", "USERNAME", "PASSWORD"))
_PROFILE = "profile"
_WORKLOAD_ANNOTATION = "stoker/step-workload"
_TYPES = {"string": str, "integer": int, "number": float, "boolean": bool}
_RETRY_SECONDS = 60
# Of a small step, whose failure may also be an honest one, such as the gate's.
_CONTROL_RETRY_SECONDS = 10
# From the start of the first attempt: a later attempt is ended then. kfp's default, one hour, would
# end a follower in the middle of a training run; kfp cannot express "no limit".
_RETRIES_END_SECONDS = 365 * 86400
# What a follower reads of its pod. The label is Kubeflow's. As an input, the run's id would keep
# profiles from being taken from the cache.
_OWN_POD = {
    "NAME": "name",
    "UID": "uid",
    "NAMESPACE": "namespace",
    "RUN_ID": "labels['pipeline/runid']",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """The workload of a run, and the values of the pipeline's parameters.

    Attributes:
        request: What the pipeline is compiled from.
        parameters: Values by name; a parameter without a value has the workload's.
        branches: What tells this training run from the run's others, from the outermost branch on.
        comparison: Output of the step `compare`; None: the pipeline has none.
    """

    request: KubeflowRequest
    parameters: Mapping[str, object] = field(default_factory=dict)
    branches: tuple[object, ...] = ()
    comparison: object = None

    @classmethod
    def of(cls, workload: Workload, **parameters: object) -> "PipelineRun":
        """Returns a run for a pipeline of your own.

        Args:
            workload: Workload with an image and today's cluster, from
                `stoker.workload_file.read_workload`.
            parameters: Parameters of your pipeline that replace the workload's values: image=image.

        Raises:
            UsageError: If the workload lacks what the steps need, or has no such parameter.
        """
        return cls(request=kubeflow_request(workload)).given(**parameters)

    def given(self, **parameters: object) -> "PipelineRun":
        """Returns the run with other values of parameters: learning_rate=0.1.

        Raises:
            UsageError: If a run has no such parameter.
        """
        if unknown := next((name for name in parameters if name not in self._known), None):
            raise UsageError(
                f"a run of {self.request.workload.name} has no parameter {unknown}",
                fix=nearest(unknown, list(self._known)),
            )
        return dataclasses.replace(self, parameters={**self.parameters, **parameters})

    def branch(self, name: object) -> "PipelineRun":
        """Returns the run for another training run, beside this one's.

        The names of its jobs and of their folders contain `name`: a text, or a value that the
        pipeline knows only when it runs, such as an output of an earlier step. Items of
        `dsl.ParallelFor` are in the names by themselves.

        Raises:
            UsageError: If a text has characters other than letters, digits and single dashes.
        """
        return dataclasses.replace(self, branches=(*self.branches, checked_branch(name)))

    @property
    def image(self) -> object:
        """Image of the training."""
        return self.value("image")

    @property
    def control_image(self) -> object:
        """Image of the steps, which do not train."""
        return self.value("control_image" if "control_image" in self._known else "image")

    @property
    def has_memory(self) -> bool:
        """Whether the training's runs are remembered: there is a claim, and it is in no branch."""
        return self.request.memory is not None and not self.branches

    def value(self, name: str) -> object:
        """Returns the run's value of a parameter, or else the workload's."""
        if name in self.parameters:
            return self.parameters[name]
        return self._known[name].default(self.request.workload)

    def inputs(self, component: Component, **own: object) -> dict[str, object]:
        """Returns the inputs of a component that the run knows.

        Args:
            component: Component of stoker, or yours with inputs of the same names.
            own: Inputs that replace these.
        """
        shared = {"image": self.control_image, "job_image": self.image, "run_id": RUN_ID}
        if self.request.memory and self.has_memory:
            shared[MEMORY] = self.request.memory.folder
        if self.comparison is not None:
            shared["comparison"] = self.comparison
        named = component.component_spec.inputs or {}
        values = {name: self.value(name) for name in named if name in self._known}
        if isinstance(component, TrainingComponent):
            changes = [name for name, each in self._known.items() if each.hyperparameter]
            if component.component_spec.name == _PROFILE:
                # What Kubeflow compares: `follower` gives the pod the whole workload.
                values["workload"] = self.request.profiled
                changes = [name for name in changes if not self._is_same_cost(name)]
            values["hyperparameters"] = {name: self.value(name) for name in changes}
            values[BRANCH_INPUT] = self.branches
        return {**values, **{n: v for n, v in shared.items() if n in named}, **own}

    def _is_same_cost(self, name: str) -> bool:
        hyperparameter = self._known[name].hyperparameter
        return hyperparameter in same_cost_names(self.request.workload)

    @property
    def _known(self) -> dict[str, Parameter]:
        return {parameter.name: parameter for parameter in self.request.parameters}


def control_step(task: Task, run: PipelineRun, *, name: str, num_retries: int = 3) -> Task:
    """Gives a step a small pod on any node, retries, and no result from the cache.

    A step with an input `champion` gets the claim of `kubernetes.champion` mounted, and one with an
    input `memory` that of `kubernetes.memory`.

    Args:
        task: A step of kfp.
        run: Run with `kubernetes.control`: the pod's resources and time limit.
        name: Name in the console.
        num_retries: Number of retries, after ten seconds, twenty, forty: its pod may be evicted.
    """
    task.set_display_name(name).set_caching_options(False)
    # The name in the pipeline: only by a label can `kubectl logs` tell a step's pods.
    kubernetes.add_pod_label(task, STEP_LABEL, task.name[:MAX_LABEL].strip("-"))
    settings = run.request.settings
    control = settings.control
    user = settings.run_as
    # The user of the jobs' pods.
    set_security_context(task, run_as_user=user, run_as_group=user, run_as_non_root=True)
    # The image may not know the user.
    task.set_env_variable("HOME", "/tmp").set_env_variable("USER", "stoker")
    if settings.image_pull_policy:
        kubernetes.set_image_pull_policy(task, settings.image_pull_policy)
    if settings.step_pull_secrets:
        kubernetes.set_image_pull_secrets(task, list(settings.step_pull_secrets))
    _secrets(task, run)
    # Images for GPUs ask for all GPUs of the node, whatever the pod has.
    task.set_env_variable("NVIDIA_VISIBLE_DEVICES", "void")
    champions = run.request.champions
    if champions and CHAMPION in task.inputs:
        claim, folder = champions
        kubernetes.mount_pvc(task, pvc_name=claim, mount_path=CHAMPIONS_FOLDER, sub_path=folder)
    memory = run.request.memory
    if memory and MEMORY in task.inputs:
        kubernetes.mount_pvc(
            task, pvc_name=memory.claim, mount_path=MEMORY_FOLDER, sub_path=memory.mounted
        )
    task.set_cpu_request(str(control.cpu))
    if settings.cpu_limit:
        task.set_cpu_limit(str(control.cpu_limit))
    task.set_memory_request(_memory(control.memory)).set_memory_limit(_memory(control.memory_limit))
    if control.max_run_seconds:
        kubernetes.set_timeout(task, control.max_run_seconds)
    _retried(task, num_retries, after_seconds=_CONTROL_RETRY_SECONDS)
    return task


def with_image_and_data(task: Task, run: PipelineRun, *, name: str) -> Task:
    """Gives a step the pod of `control_step`, with the job's image and the channels' claims.

    The image is pulled again by its tag where the workload does not say how, as a node may have an
    earlier one.
    """
    step = control_step(task, run, name=name)
    if not run.request.settings.image_pull_policy and not _is_pinned(run.request.image):
        kubernetes.set_image_pull_policy(step, "Always")
    # Its own pod shows the digest of the image.
    kubernetes.use_field_path_as_env(step, "POD_NAMESPACE", "metadata.namespace")
    for channel, address in run.request.workload.channels.items():
        claim, folder = claim_of(address.uri, where=f"key channels.{channel}.uri")
        path = f"{CHANNELS_FOLDER}/{channel}"
        kubernetes.mount_pvc(step, pvc_name=claim, mount_path=path, sub_path=folder)
    return step


def image_to_compare(run: PipelineRun) -> object:
    """Returns the image of the step that compares: the small one where the digest is in a name."""
    if _is_pinned(run.request.image):
        return run.control_image
    return run.image


def mounted_channels(run: PipelineRun) -> str:
    """Returns where `with_image_and_data` mounts the channels, by their addresses, as JSON."""
    channels = run.request.workload.channels.items()
    return json.dumps({channel.uri: f"{CHANNELS_FOLDER}/{name}" for name, channel in channels})


def _is_pinned(image: str) -> bool:
    return "@sha256:" in image


def _retried(task: Task, num_retries: int, *, after_seconds: int) -> None:
    if num_retries:
        task.set_retry(
            num_retries,
            backoff_duration=f"{after_seconds}s",
            backoff_factor=2.0,
            backoff_max_duration=f"{_RETRIES_END_SECONDS}s",
        )


def follower(task: Task, run: PipelineRun, *, name: str, num_retries: int = 3) -> Task:
    """Gives a step that creates and follows a job a small pod, which autoscalers leave alone.

    The step has no time limit except the job's, and the label that
    configs/kubernetes/priority.yaml selects.

    Args:
        task: A step of kfp.
        run: Run as for `control_step`.
        name: Name in the console.
        num_retries: Number of retries, after one minute, two, four. A retry adopts the job, and
            fails only if the cluster refuses or does not answer.
    """
    control_step(task, run, name=name, num_retries=0)
    _retried(task, num_retries, after_seconds=_RETRY_SECONDS)
    kubernetes.set_timeout(task, 0)
    for key, path in _OWN_POD.items():
        kubernetes.use_field_path_as_env(task, f"POD_{key}", f"metadata.{path}")
    for key, text in STAY_ANNOTATIONS.items():
        kubernetes.add_pod_annotation(task, key, text)
    if task.component_spec.name == _PROFILE:
        # Not an input: a profile is found again whatever its gate or learning rate.
        text = workload_text(run.request.workload)
        kubernetes.add_pod_annotation(task, _WORKLOAD_ANNOTATION, text)
        path = f"metadata.annotations['{_WORKLOAD_ANNOTATION}']"
        kubernetes.use_field_path_as_env(task, STEP_WORKLOAD, path)
    for key, text in FOLLOWER_LABELS.items():
        kubernetes.add_pod_label(task, key, text)
    return task


def pipeline(
    request: KubeflowRequest, body: Callable[[PipelineRun], None], *, description: str
) -> str:
    """Returns the compiled pipeline, as YAML: the same text for the same request.

    Args:
        request: Request with its name and parameters.
        body: Function that makes the steps. Its first argument is the run; other arguments, with
            types and defaults, become parameters of the pipeline.
        description: Description that Kubeflow shows.
    """
    body_parameters = list(inspect.signature(body).parameters.values())[1:]
    names = [parameter.name for parameter in request.parameters]

    def graph(*values: object) -> None:
        given = dict(zip((*names, *(each.name for each in body_parameters)), values, strict=True))
        parameters = {name: given.pop(name) for name in names}
        body(PipelineRun(request=request, parameters=parameters), **given)

    signature = [
        inspect.Parameter(
            parameter.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=parameter.default(request.workload),
            annotation=_TYPES[parameter.kind],
        )
        for parameter in request.parameters
    ]
    signature += body_parameters
    graph.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    # Kubeflow's console shows a parameter's description next to its field.
    texts = [f"{parameter.name}: {parameter.text}" for parameter in request.parameters]
    lines = "\n".join(f"    {text}" for text in (*texts, *_texts_of(body)))
    graph.__doc__ = f"{description}\n\nArgs:\n{lines}\n"
    return compiled(dsl.pipeline(name=request.workload.name, description=description)(graph))


def compiled(component: object) -> str:
    """Returns a component or pipeline of kfp as YAML."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled.yaml"
        compiler.Compiler().compile(component, str(file))
        return file.read_text(encoding="utf-8")


def _texts_of(body: Callable[[PipelineRun], None]) -> list[str]:
    """Returns the lines on arguments of a function's docstring, without the first argument's."""
    _, _, lines = (inspect.getdoc(body) or "").partition("Args:\n")
    texts = [line.strip() for line in lines.partition("\n\n")[0].splitlines()]
    return [line for line in texts if not line.startswith("run:")]


def _secrets(task: Task, run: PipelineRun) -> None:
    """Gives a step the secrets that it needs: MLflow's login, or the webhook's address."""
    workload = run.request.workload
    name = task.component_spec.name
    tracking = workload.tracking
    notify = workload.notify
    if tracking.mlflow and tracking.secret and name in _TRACKED:
        # Optional: the secret has only the keys that the server needs.
        keys = {key: key for key in MLFLOW_SECRETS}
        kubernetes.use_secret_as_env(task, tracking.secret, keys, optional=True)
    if notify and notify.secret and name == "finish":
        # Optional: a missing secret must not prevent the clean-up.
        kubernetes.use_secret_as_env(task, notify.secret, {"url": notify.variable}, optional=True)


def _memory(quantity: str | int | float) -> str:
    """Returns MiB, rounded up: kfp takes no fractions."""
    return f"{-(-int(amount(str(quantity))) // 2**20)}Mi"
