"""A job as Kubernetes runs it: its objects, a pure value."""

import dataclasses
import json
from dataclasses import dataclass

import msgspec

from stoker.platforms.base import JobSpec, hyperparameters
from stoker.platforms.kubernetes.groups import Layout, lay_out
from stoker.platforms.kubernetes.jobset import jobset, metadata
from stoker.platforms.kubernetes.names import (
    REQUEST_ANNOTATION,
    WORKLOAD_ANNOTATION,
    config_map,
    token_secret,
)
from stoker.platforms.kubernetes.reading import Document, mapping
from stoker.platforms.kubernetes.rules import check_objects
from stoker.platforms.kubernetes.trainer import digest, train_job, training_runtime
from stoker.platforms.kubernetes.volumes import (
    HYPERPARAMETERS_KEY,
    TOKEN_KEY,
    channels_of,
    inputs_key,
)
from stoker.records import Json, KubernetesSettings

# What stands for the token wherever the Secret is shown: a launcher refuses it as none.
NO_TOKEN = "made-when-the-job-is-submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesRequest:
    """A job as Kubernetes runs it.

    The job owns secret, configuration and a runtime of its own; their owner references, and the
    job's own to the pod that submits it, are set by submit().

    Attributes:
        layout: The groups behind the objects.
        main: The JobSet, or the TrainJob.
        runtime: The TrainingRuntime that the TrainJob needs; None with a JobSet.
        runtime_is_ours: Whether submit() makes the runtime; else it must be there, as it is here.
        config: The ConfigMap with what launchers read.
        secret: The Secret, with NO_TOKEN in place of the token.
    """

    job: JobSpec
    layout: Layout
    main: Document
    runtime: Document | None
    runtime_is_ours: bool
    config: Document
    secret: Document

    @property
    def name(self) -> str:
        """Of the job's objects."""
        return self.layout.name

    @property
    def namespace(self) -> str | None:
        """Absent: that of the pod or kube config that submits."""
        return self.layout.settings.namespace

    @property
    def objects(self) -> tuple[Document, ...]:
        """All that submit() makes, in the order in which one needs the other."""
        runtime = (self.runtime,) if self.runtime and self.runtime_is_ours else ()
        return (self.secret, self.config, *runtime, self.main)

    @property
    def request_sha256(self) -> str:
        """Of the job's spec and configuration: an earlier attempt's job has the same."""
        return str(mapping(self.main, "metadata", "annotations")[REQUEST_ANNOTATION])


def plan_request(job: JobSpec) -> KubernetesRequest:
    """The objects for `job`; reads and asks nothing.

    Raises:
        UsageError: If the cluster would refuse them, with the rule, the reason and a fix.
    """
    layout = lay_out(job)
    config = _config(layout)
    runtime: Document | None = None
    if layout.settings.api == "jobset":
        main = jobset(layout)
    else:
        runtime = training_runtime(layout, name=layout.settings.runtime or layout.name)
        main = train_job(layout, runtime=layout.settings.runtime or layout.name)
    request = KubernetesRequest(
        job=job,
        layout=layout,
        main=_signed(main, layout, parts=[config["data"], runtime and runtime["spec"]]),
        runtime=runtime,
        runtime_is_ours=runtime is not None and layout.settings.runtime is None,
        config=config,
        secret=_secret(layout),
    )
    check_objects(_checked(request))
    return request


def plan_runtime(job: JobSpec, *, name: str) -> Document:
    """The TrainingRuntime for runs like `job`, to be applied before them and named by them.

    Raises:
        UsageError: If the cluster would refuse it.
    """
    settings = msgspec.structs.replace(job.kubernetes or KubernetesSettings(), api="trainer")
    runtime = training_runtime(lay_out(dataclasses.replace(job, kubernetes=settings)), name=name)
    check_objects((runtime,))
    return runtime


def _checked(request: KubernetesRequest) -> tuple[Document, ...]:
    objects = request.objects
    if request.runtime and not request.runtime_is_ours:
        return (request.runtime, *objects)
    return objects


def _signed(main: dict[str, Json], layout: Layout, *, parts: list[Json]) -> Document:
    """The job with what an earlier attempt's job is known by: a digest of it and of `parts`."""
    described = mapping(main, "metadata")
    annotations = {**mapping(described, "annotations")}
    annotations[REQUEST_ANNOTATION] = digest([main["spec"], *parts])
    if layout.job.workload_sha256:
        annotations[WORKLOAD_ANNOTATION] = layout.job.workload_sha256
    return {**main, "metadata": {**described, "annotations": annotations}}


def _config(layout: Layout) -> Document:
    data: dict[str, Json] = {
        HYPERPARAMETERS_KEY: _json(hyperparameters(layout.job.hyperparameters)),
    }
    for group in layout.groups:
        channels = channels_of(layout, group)
        data[inputs_key(group)] = _json(
            {
                name: {
                    "TrainingInputMode": "File",
                    "S3DistributionType": "FullyReplicated",
                    "RecordWrapperType": "None",
                }
                for name in channels
            }
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(layout, name=config_map(layout.name)),
        "immutable": True,
        "data": data,
    }


def _secret(layout: Layout) -> Document:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(layout, name=token_secret(layout.name)),
        "type": "Opaque",
        "immutable": True,
        "stringData": {TOKEN_KEY: NO_TOKEN},
    }


def _json(document: Json) -> str:
    return json.dumps(document, indent=2, sort_keys=True) + "\n"
