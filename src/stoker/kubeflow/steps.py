"""A run of a pipeline on Kubeflow: its parameters, and the pods of its steps.

kfp-kubernetes cannot set a priority class, variables from
all keys of a secret, node affinity by a rule, a seccomp profile or an fsGroup. Kubeflow Pipelines
2.16 and later set the seccomp profile and drop capabilities.
"""

import functools
import inspect
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, cast

from kfp import compiler, dsl, kubernetes
from kfp.dsl.graph_component import GraphComponent
from kfp.dsl.pipeline_task import PipelineTask as Task
from kfp.kubernetes import set_security_context

from stoker.pipelines.base import Compiled, project_pipeline
from stoker.pipelines.kubeflow import (
    CHAMPION,
    CHAMPIONS_FOLDER,
    KubeflowRequest,
    kubeflow_request,
    workload_text,
)
from stoker.platforms.kubernetes.pods import FOLLOWER_LABELS, STAY_ANNOTATIONS
from stoker.records import Workload
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A run of a pipeline: its workload, and the pods of its steps.

    Attributes:
        request: What the pipeline is compiled from.
    """

    request: KubeflowRequest

    @classmethod
    def of(cls, workload: Workload) -> "PipelineRun":
        """Returns a run for a pipeline of your own.

        Args:
            workload: Workload with an image and today's cluster, from
                `stoker.workload_file.read_workload`.

        Raises:
            UsageError: If the workload lacks what the steps need.
        """
        return cls(request=kubeflow_request(workload))

    @property
    def name(self) -> str:
        return self.request.workload.name

    @property
    def workload(self) -> str:
        """The workload as JSON, without the values of a run's parameters."""
        return workload_text(self.request.workload)

    @property
    def image(self) -> str:
        """Image of the steps: `kubernetes.control.image`, or the training's."""
        return self.request.settings.control.image or self.request.image

    @property
    def champion(self) -> str:
        """The model in use, as evaluate and gate name it; empty: none."""
        if self.request.champions:
            return CHAMPIONS_FOLDER
        return self.request.settings.champion or ""

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
        settings = self.request.settings
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
        champions = self.request.champions
        if champions and CHAMPION in task.inputs:
            claim, folder = champions
            kubernetes.mount_pvc(task, pvc_name=claim, mount_path=CHAMPIONS_FOLDER, sub_path=folder)
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
        own = [
            each
            for each in inspect.signature(steps).parameters.values()
            if each.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        named = [
            inspect.Parameter(
                each.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=each.default,
                annotation=_TYPES[each.kind],
            )
            for each in self.request.parameters
        ]
        names = [each.name for each in (*named, *own)]

        def graph(*values: object) -> None:
            given = dict(zip(names, values, strict=True))
            cast(Callable[[], None], functools.partial(steps, **given))()  # type: ignore[arg-type]

        signature = [each.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for each in own]
        graph.__signature__ = inspect.Signature([*named, *signature])  # type: ignore[attr-defined]
        about = f"stoker: profile, decide, train, evaluate {self.name}."
        # Kubeflow's console shows a parameter's description next to its field.
        texts = [f"    {each.name}: {each.text}" for each in self.request.parameters]
        graph.__doc__ = "\n".join([about, "", "Args:", *texts, ""])
        made: GraphComponent = dsl.pipeline(name=self.name, description=about)(graph)
        return made

    def _set_secrets(self, task: Task) -> None:
        """Gives a step the secrets that it needs: MLflow's login, or the webhook's address."""
        workload = self.request.workload
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
    return Compiled(
        name=workload.name,
        description=f"stoker: profile, decide, train, evaluate {workload.name}.",
        definition=compiled(module.build(run)),
        parameters=run.request.parameters,
        uploads={},
    )


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
