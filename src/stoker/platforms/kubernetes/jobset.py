"""The job of a run: a JobSet, or a TrainJob with its TrainingRuntime.

Nothing here needs an alpha feature of JobSet. A TrainingRuntime is the same for all runs of a
workload on one plan, and an administrator may have applied it; its TrainJob patches in the rest.

The server checks what users write. Checked here is only what it accepts and then cannot run.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import RESTARTING_CODES, UsageError
from stoker.platforms.base import NOT_COMPARED
from stoker.platforms.kubernetes.api import name_of, number, text
from stoker.platforms.kubernetes.layout import (
    REQUEST_ANNOTATION,
    RESERVED_METADATA,
    RUN_ANNOTATION,
    WORKLOAD_ANNOTATION,
    Layout,
    is_dns_label,
)
from stoker.platforms.kubernetes.pod_template import (
    Pods,
    verbatim,
)
from stoker.platforms.patch import check_patch, mapping_of
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings
from stoker.records.platforms import patch_document

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# Kubernetes' largest limit: a failed pod of the data group is always replaced.
WITHOUT_END = 2**31 - 1
TRAINER_API = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
# In runtimePatches: a domain and a path, by Trainer's rule.
MANAGER = "stoker/run"
KEEP_SECONDS = 86400
# Paths that `kubernetes.jobset` cannot set, and what to do instead.
_RESERVED = {
    **RESERVED_METADATA,
    "spec replicatedJobs": "use kubernetes.dnn.pod and kubernetes.data.pod",
    "spec failurePolicy": "use kubernetes.max_restarts and kubernetes.max_fresh_starts",
    **{
        f"spec {key}": ""
        for key in ("successPolicy", "startupPolicy", "network", "coordinator", "suspend")
    },
}


def object_of_run(version: str, kind: str, metadata: Document, **parts: Json) -> dict[str, Json]:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}


def job_of(
    layout: Layout, pods: Sequence[Pods], *, files: Document
) -> tuple[Document, Document | None]:
    """Returns the run's JobSet, or its TrainJob and the TrainingRuntime that it refers to.

    Args:
        layout: The job on pods.
        pods: Those of each group.
        files: What launchers read; an attempt finds its job by a digest of it and of the spec.

    Raises:
        UsageError: For what a server would accept and could not run.
    """
    settings = layout.settings
    # Kueue admits the main object: it gets the patch's labels.
    described = mapping_of(metadata(layout), patch_document(settings.jobset.metadata))
    spec = _jobset_spec(layout, pods)
    if settings.api == "jobset":
        main = object_of_run(JOBSET_API, "JobSet", described, spec=spec)
        job = _signed(main, layout, parts=[files, None])
        runtime = None
    else:
        name = settings.runtime or layout.name
        runtime = _training_runtime(layout, spec, name=name)
        main_spec = _train_job_spec(layout, pods, runtime=name)
        main = object_of_run(TRAINER_API, "TrainJob", described, spec=main_spec)
        job = _signed(main, layout, parts=[files, runtime["spec"]])
    check_objects([*([runtime] if runtime else []), job])
    return job, runtime


def _signed(main: dict[str, Json], layout: Layout, *, parts: list[Json]) -> Document:
    """Returns the job with a digest of it and `parts`, by which an attempt finds its job."""
    described = mapping(main, "metadata")
    sha256 = digest([main["spec"], *parts])
    annotations = {**mapping(described, "annotations"), REQUEST_ANNOTATION: sha256}
    if layout.job.settings.workload_sha256:
        annotations[WORKLOAD_ANNOTATION] = layout.job.settings.workload_sha256
    return {**main, "metadata": {**described, "annotations": annotations}}


def _jobset_spec(layout: Layout, pods: Sequence[Pods]) -> dict[str, Json]:
    """Returns the spec of a JobSet, or of a TrainingRuntime's, which is the same for all runs."""
    settings = layout.settings
    spec: dict[str, Json] = {
        # The dnn group's end ends the JobSet, and its controller deletes the data group's pods.
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [layout.dnn.job]},
        "failurePolicy": _failure_policy(layout),
        "network": {
            "enableDNSHostnames": True,
            # JobSet's default; written, as `host_pattern` relies on it.
            **({"subdomain": layout.name} if settings.api == "jobset" else {}),
            # The feed waits for no host: pods find each other before they are ready.
            "publishNotReadyAddresses": True,
        },
        "ttlSecondsAfterFinished": KEEP_SECONDS,
        "replicatedJobs": [_replicated_job(layout, pods_of_group) for pods_of_group in pods],
    }
    reserved = _RESERVED
    if settings.api == "trainer":
        # Trainer 2.1 to 2.3 makes the JobSet of a failed TrainJob again when its TTL has deleted
        # it, and so trains again, for ever (kubeflow/trainer#3779). Later ones refuse it here.
        del spec["ttlSecondsAfterFinished"]
        reserved = {**_RESERVED, "spec ttlSecondsAfterFinished": "a TrainJob has no TTL"}
    outline: Document = {"metadata": {"labels": {}, "annotations": {}}, "spec": spec}
    check_patch(settings.jobset.document, outline, key="kubernetes.jobset", reserved=reserved)
    return mapping_of(spec, patch_document(settings.jobset.spec))


def metadata(layout: Layout, *, name: str | None = None) -> dict[str, Json]:
    """Returns the metadata of an object of the run; its name is the run's by default."""
    namespace = layout.settings.namespace
    return {
        "name": name or layout.name,
        **({"namespace": namespace} if namespace else {}),
        "labels": layout.labels,
        "annotations": {RUN_ANNOTATION: layout.job.run_name},
    }


def _failure_policy(layout: Layout) -> dict[str, Json]:
    policy: dict[str, Json] = {"maxRestarts": layout.settings.max_restarts}
    rules: list[Json] = []
    if layout.settings.max_run_seconds and layout.settings.api == "jobset":
        # By default JobSet would restart all hosts, for as long again; and its state says by which
        # action it failed, not why.
        reasons: Json = ["DeadlineExceeded"]
        rules += [{"name": "out_of_time", "action": "FailJobSet", "onJobFailureReasons": reasons}]
    if layout.settings.output:
        disrupted: Document = {
            "name": "disrupted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            # The only pod failure policy is the one for disruptions and lost hosts.
            "onJobFailureReasons": ["PodFailurePolicy"],
            "targetReplicatedJobs": [layout.dnn.job],
        }
        rules.append(disrupted)
    if rules or layout.settings.max_restarts:
        # A new leader must not be mistaken for the old one, which has the same name.
        policy["restartStrategy"] = "BlockingRecreate"
    if rules:
        policy["rules"] = rules
    return policy


def _replicated_job(layout: Layout, pods: Pods) -> dict[str, Json]:
    group = pods.group
    job: dict[str, Json] = {
        "parallelism": group.group.count,
        "completions": group.group.count,
        # Gives each pod its number, and with it a stable name in the DNS.
        "completionMode": "Indexed",
        # JobSet checks failed jobs before success: the data group's job must never fail, not even
        # as the training ends. After a failed dnn pod JobSet restarts all hosts (maxRestarts).
        "backoffLimit": 0 if group.is_dnn else WITHOUT_END,
    }
    if not group.is_dnn:
        # Not after its end, which a disconnected node never reports.
        job["podReplacementPolicy"] = "TerminatingOrFailed"
    elif layout.settings.max_run_seconds and layout.settings.api == "jobset":
        # A TrainJob has the limit itself.
        job["activeDeadlineSeconds"] = layout.settings.max_run_seconds
    if group.is_dnn and layout.settings.output:
        disrupted: Json = {"type": "DisruptionTarget", "status": "True"}
        # The pod that fails first decides: one that is drained, killed or deleted, or a survivor.
        codes: Json = {"operator": "In", "values": list(RESTARTING_CODES)}
        job["podFailurePolicy"] = {
            "rules": [
                {"action": "FailJob", "onPodConditions": [disrupted]},
                {"action": "FailJob", "onExitCodes": codes},
            ],
        }
    job["template"] = pods.template
    template: dict[str, Json] = {"spec": job}
    if layout.settings.api == "trainer" and group.is_dnn:
        # The label by which Trainer finds the job that a TrainJob's settings go to.
        template = {"metadata": {"labels": {ANCESTOR_LABEL: "trainer"}}, **template}
    return {"name": group.job, "replicas": 1, "template": template}


def _training_runtime(layout: Layout, jobset: Document, *, name: str) -> dict[str, Json]:
    spec: dict[str, Json] = {
        # Without torch's policy: stoker's launcher starts torchrun itself.
        "mlPolicy": {"numNodes": layout.dnn.group.count},
        # Both groups whole: a TrainJob sets count, image and resources of the trainer's job only.
        "template": {"spec": jobset},
    }
    described = metadata(layout, name=name)
    described["labels"] = {**layout.labels, FRAMEWORK_LABEL: "torch"}
    described["annotations"] = {REQUEST_ANNOTATION: digest(spec)}
    return object_of_run(TRAINER_API, "TrainingRuntime", described, spec=spec)


def _train_job_spec(layout: Layout, pods: Sequence[Pods], *, runtime: str) -> dict[str, Json]:
    dnn = layout.dnn
    trainer: dict[str, Json] = {
        "image": layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "numNodes": dnn.group.count,
        "resourcesPerNode": {"requests": dict(dnn.requests), "limits": dict(dnn.limits)},
        "env": pods[0].variables,
    }
    patches: list[Json] = [_patch(pods_of_group) for pods_of_group in pods]
    patch: Document = {"template": {"spec": {"replicatedJobs": patches}}}
    limit = layout.settings.max_run_seconds
    group = TRAINER_API.partition("/")[0]
    return {
        "runtimeRef": {"apiGroup": group, "kind": "TrainingRuntime", "name": runtime},
        **({"activeDeadlineSeconds": limit} if limit else {}),
        "trainer": trainer,
        "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patch}],
    }


def digest(spec: Json) -> str:
    """Returns the digest by which specs of objects are compared: 64 hexadecimal digits."""
    content = json.dumps(_compared(spec), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()


def _compared(spec: Json) -> Json:
    if isinstance(spec, Mapping):
        return {key: _compared(value) for key, value in spec.items()}
    if isinstance(spec, Sequence) and not isinstance(spec, str):
        kept = [each for each in spec if str(item_at(each, "name")) not in NOT_COMPARED]
        return [_compared(each) for each in kept]
    return spec


def _patch(pods: Pods) -> Document:
    group = pods.group
    spec = pods.of_run
    if group.is_dnn:
        # Trainer takes the variables of its container from the TrainJob's trainer only.
        (container,) = mappings(spec, "containers")
        shown = {key: value for key, value in container.items() if key != "env"}
        spec = {**spec, "containers": [shown]}
    return {"name": group.job, "template": {"spec": {"template": {"spec": spec}}}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedJob:
    """A replicated job of a JobSet, or of a runtime's template; `pods` is its pods' spec."""

    name: str
    path: str
    document: Document
    spec: Document
    template: Document
    pods: Document

    @property
    def labels(self) -> Document:
        return mapping(self.document, "template", "metadata", "labels")


def jobset_of(document: Document) -> tuple[str, Document]:
    """Returns path and spec of the JobSet in a JobSet or TrainingRuntime; else empty ones."""
    match document.get("kind"):
        case "JobSet":
            return "spec", mapping(document, "spec")
        case "TrainingRuntime":
            return "spec.template.spec", mapping(document, "spec", "template", "spec")
    return "", {}


def replicated_jobs(document: Document) -> Iterator[ReplicatedJob]:
    path, spec = jobset_of(document)
    for index, job in enumerate(mappings(spec, "replicatedJobs")):
        described = mapping(job, "template", "spec")
        template = mapping(described, "template")
        yield ReplicatedJob(
            name=text(job, "name"),
            path=f"{path}.replicatedJobs[{index}]",
            document=job,
            spec=described,
            template=template,
            pods=mapping(template, "spec"),
        )


def check_objects(objects: Sequence[Document]) -> None:
    """Raises UsageError with the rules that the first wrong object breaks."""
    # The server accepts a JobSet whose pods' names are too long: only events of its jobs say so,
    # while the other group is paid for.
    for document in objects:
        problems = list(problems_of(document, among=objects))
        if problems:
            raise UsageError(
                "the cluster would refuse this: " + "; ".join(problems[:5]),
                where=f"{document.get('kind')} {name_of(document)}",
                fix="change the workload's kubernetes settings",
            )


def problems_of(document: Document, *, among: Sequence[Document] = ()) -> Iterator[str]:
    """Yields what the server accepts in an object, although its pods could never run.

    A TrainJob takes the names of the jobs of its runtime, which is `among` the run's objects.
    """
    name = name_of(document)
    match document.get("kind"):
        case "JobSet":
            yield from _names_problems(document, name)
        case "TrainingRuntime":
            yield from filter(None, map(_priority_problem, replicated_jobs(document)))
        case "TrainJob":
            if not is_dns_label(name):
                yield f"metadata.name: {name} is not a host name"
            reference = text(document, "spec", "runtimeRef", "name")
            runtimes = [one for one in among if one.get("kind") == "TrainingRuntime"]
            for runtime in runtimes:
                if name_of(runtime) == reference:
                    yield from _names_problems(runtime, name)


def _priority_problem(job: ReplicatedJob) -> str:
    # All pods of a gang are scheduled at one priority: the trainer's.
    is_trainer = text(job.labels, ANCESTOR_LABEL) == "trainer"
    if "priorityClassName" not in job.pods or is_trainer:
        return ""
    return (
        f"{job.path}: with Kubeflow Trainer only the job that trains has a "
        "priority class (kubernetes.data.pod.spec.priorityClassName)"
    )


def _names_problems(document: Document, name: str) -> Iterator[str]:
    for job in replicated_jobs(document):
        yield from _name_problems(job, name)


def _name_problems(job: ReplicatedJob, name: str) -> Iterator[str]:
    """Checks the names that controllers will give jobs and pods, with their suffix of five."""
    names = [f"{name}-{job.name}-{number(job.document, 'replicas', 1) - 1}"]
    if text(job.spec, "completionMode") == "Indexed":
        names.append(f"{names[0]}-{number(job.spec, 'completions', 1) - 1}-abcde")
    for generated in names:
        if not is_dns_label(generated):
            yield (
                f"{job.path}: {generated} ({len(generated)} characters) is not a host name: "
                "small letters, digits and dashes, a letter first, 63 at most"
            )
