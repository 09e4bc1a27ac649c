"""A workload's pipeline on Kubeflow, compiled: parameters, pods of its steps, the YAML."""

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stoker.catalog import with_pools
from stoker.errors import UsageError
from stoker.parameters import Kind, Parameter, parameters_of
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.objects import PodGroup, claim_of, lay_out
from stoker.platforms.local import CLAIMS_FOLDER
from stoker.records import Group, KubernetesSettings, Workload, to_document
from stoker.targets.compiled import Compiled
from stoker.targets.project import project_pipeline

# Of SageMaker's model registry; and Kubeflow's own cache re-uses a profile of the same inputs.
_NOT_HERE = ("model_group", "approval", "reuse_profile")
# The pipeline carries it as a text, which ends as one argument of a process among others.
MAX_WORKLOAD_BYTES = 48 << 10
COMPONENTS = ("profile", "decide", "train", "evaluate")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPod:
    """What the pod of a step needs to be a host of today's type.

    Attributes:
        group: As a job on Kubernetes would have it.
        claims: Name of each claim with data to where it is mounted.
    """

    group: PodGroup
    claims: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeflowRequest:
    """All that pipelines/kubeflow.py builds a pipeline from.

    Attributes:
        workload: As the steps read it.
        parameters: Of the pipeline; the first is the workload itself.
        pod: Of a step on a host of today's type; None: the workload's platform is `local`, where
            every pod is as good as another.
        settings: For Kubernetes.
    """

    workload: Workload
    parameters: tuple[Parameter, ...]
    pod: StepPod | None
    settings: KubernetesSettings

    @property
    def image(self) -> str:
        """Of all steps, unless a run names another."""
        assert self.workload.image
        return self.workload.image


def compile_kubeflow(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """The workload's pipeline: the same text whenever and wherever, made with no network.

    Args:
        workload: With an image, today's cluster, and, but for the platform `local`, its pool.
        folder: Project folder; absent: the current one.

    Raises:
        UsageError: If the workload lacks what the pipeline needs, the cluster would refuse a pod
            of it, or the project's files or kfp cannot be used.
    """
    request = kubeflow_request(workload)
    with project_pipeline("kubeflow", folder=folder or Path.cwd()) as module:
        definition = str(module.build(request))
    return Compiled(
        name=workload.name,
        description=description_of(request.workload),
        definition=definition,
        parameters=request.parameters,
        uploads={},
    )


def component_files(workload: Workload, *, folder: Path | None = None) -> dict[str, str]:
    """One shareable YAML document for each component, by its name.

    Args:
        workload: Names the image.
        folder: Project folder; absent: the current one.

    Raises:
        UsageError: As `compile_kubeflow`.
    """
    request = kubeflow_request(workload)
    with project_pipeline("kubeflow", folder=folder or Path.cwd()) as module:
        made = module.component_files(request.image)
    return {name: str(made[name]) for name in COMPONENTS}


def kubeflow_request(workload: Workload) -> KubeflowRequest:
    """What the pipeline of `workload` is built from.

    Raises:
        UsageError: If the workload lacks what the pipeline needs.
    """
    for key, found, example in (
        ("image", workload.image, "image: REGISTRY/stoker:TAG"),
        ("cluster", workload.cluster, "cluster: {dnn: {instance_type: g5.xlarge}}"),
    ):
        if found is None:
            raise UsageError(
                f"the pipeline needs the workload's {key}",
                where=f"workload {workload.name}, key {key}",
                fix=f"add {example}",
            )
    settings = workload.kubernetes or KubernetesSettings()
    # The compiling user's own connections are none of a pod's.
    inside = msgspec.structs.replace(settings, kubeflow=None, context=None)
    placed = msgspec.structs.replace(
        workload,
        platform="local" if workload.platform == "local" else "kubernetes",
        sagemaker=None,
        kubernetes=inside if workload.kubernetes else None,
    )
    pod = None if placed.platform == "local" else _step_pod(placed)
    parameters = kubeflow_parameters(placed, pod=pod)
    text = workload_text(placed)
    if len(text.encode()) > MAX_WORKLOAD_BYTES:
        raise UsageError(
            f"the workload's document has {len(text.encode())} bytes, at most {MAX_WORKLOAD_BYTES}",
            where=f"workload {workload.name}",
            fix="shorten it; a pools file needs only the pools that plans may have",
        )
    return KubeflowRequest(workload=placed, parameters=parameters, pod=pod, settings=settings)


def kubeflow_parameters(workload: Workload, *, pod: StepPod | None) -> tuple[Parameter, ...]:
    """The pipeline's parameters; those of GPUs and nodes only where there are such."""
    known = [p for p in parameters_of(workload) if p.name not in _NOT_HERE]
    mine = [_fixed("workload", "string", "The workload, as JSON.", workload_text(workload))]
    if pod and pod.group.gpus:
        mine += [
            _fixed("gpu_type", "string", "What the cluster calls its GPUs.", _gpu_type(workload)),
            _fixed("gpu_count", "integer", "GPUs of the steps that train.", pod.group.gpus),
        ]
    if pod:
        labels = json.dumps(dict(pod.group.node_selector), sort_keys=True)
        text = "Labels of the nodes of instance_type, on which profile and small trainings run."
        mine += [_fixed("node_selector", "object", text, labels)]
    return (*mine[:1], *known, *mine[1:])


def workload_text(workload: Workload) -> str:
    """The workload's document as the pipeline carries it."""
    return json.dumps(to_document(workload), sort_keys=True, separators=(",", ":"))


def description_of(workload: Workload) -> str:
    """The pipeline's description, in a sentence."""
    return f"stoker: profile, decide, train, evaluate {workload.name}."


def _step_pod(workload: Workload) -> StepPod:
    assert workload.cluster
    today = Group.of_today(workload.cluster.dnn)
    job = JobSpec.of(with_pools(workload), groups=[today], run_dir=Path("runs"), name=workload.name)
    layout = lay_out(job)
    claims = {
        claim_of(channel.uri, where=f"key channels.{name}.uri")[0]
        for name, channel in workload.channels.items()
    }
    return StepPod(
        group=layout.dnn,
        claims={claim: posixpath.join(CLAIMS_FOLDER, claim) for claim in sorted(claims)},
    )


def _gpu_type(workload: Workload) -> str:
    return (workload.kubernetes or KubernetesSettings()).gpu_resource


def _fixed(name: str, kind: Kind, text: str, default: str | int) -> Parameter:
    return Parameter(
        name=name,
        kind=kind,
        text=text,
        default=lambda workload: default,
        overrides=lambda value: (),
    )


__all__ = [
    "COMPONENTS",
    "KubeflowRequest",
    "StepPod",
    "compile_kubeflow",
    "component_files",
    "kubeflow_parameters",
    "kubeflow_request",
    "workload_text",
]
