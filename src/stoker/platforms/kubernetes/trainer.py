"""A run is one job: a JobSet, or for Kubeflow Trainer a TrainJob with its TrainingRuntime.

Success is the dnn group's alone: its end ends the JobSet, whose controller then deletes the pods of
the data group. A failed job is looked at before success is, so that the data group's job must never
fail: its pods are started again without end. Nothing here needs an alpha feature of JobSet.

A TrainJob can say little of a second group, so that the runtime holds both groups whole. It may be
there already, applied by those who run the cluster (`stoker render runtime`): it is the same for
all runs of a workload on one plan; what is a run's alone is patched in by the TrainJob.
"""

import hashlib
import json
from collections.abc import Mapping

from stoker.platforms.kubernetes.objects import (
    MANAGED_BY_LABEL,
    QUEUE_LABEL,
    REQUEST_ANNOTATION,
    RUN_ANNOTATION,
    TRAINER_JOB,
    Layout,
    PodGroup,
    environment_of_run,
    mounts_of,
    pod_template,
    verbatim,
    volumes_of_run,
    zone_affinity,
)
from stoker.records import Json

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# Kubernetes' largest limit: a failed pod of the data group is always replaced.
WITHOUT_END = 2**31 - 1


def jobset(layout: Layout) -> dict[str, Json]:
    """Returns the JobSet that runs `layout`.

    Raises:
        UsageError: If the groups' pods are none that Kubernetes can run.
    """
    spec = jobset_spec(layout, of_run=True)
    network: dict[str, Json] = {
        "enableDNSHostnames": True,
        "subdomain": layout.name,
        "publishNotReadyAddresses": True,
    }
    return {
        "apiVersion": JOBSET_API,
        "kind": "JobSet",
        "metadata": metadata(layout, queued=True),
        "spec": {**spec, "network": network},
    }


def jobset_spec(
    layout: Layout, *, of_run: bool, job_labels: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, Json]:
    """Returns the spec that a JobSet and the template of a TrainingRuntime have in common.

    Args:
        layout: Of the job.
        of_run: With what is this run's alone.
        job_labels: Labels of jobs, by the replicated job's name.
    """
    settings = layout.settings
    spec: dict[str, Json] = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [layout.dnn.job]},
        "failurePolicy": _failure_policy(layout),
        # Pods find each other before they are ready: the feed waits for nobody.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "ttlSecondsAfterFinished": settings.keep_seconds,
        "replicatedJobs": [
            _replicated_job(layout, group, of_run=of_run, labels=(job_labels or {}).get(group.job))
            for group in layout.groups
        ],
    }
    return spec


def metadata(layout: Layout, *, name: str | None = None, queued: bool = False) -> dict[str, Json]:
    """Returns the metadata of an object of the run: its name, namespace, labels and annotations.

    Args:
        layout: Of the job.
        name: Absent: the run's.
        queued: Whether Kueue admits the object.
    """
    settings = layout.settings
    labels = {**settings.labels, MANAGED_BY_LABEL: "stoker"}
    if queued and settings.queue:
        labels[QUEUE_LABEL] = settings.queue
    described: dict[str, Json] = {"name": name or layout.name}
    if settings.namespace:
        described["namespace"] = settings.namespace
    described["labels"] = labels
    described["annotations"] = {RUN_ANNOTATION: layout.job.name}
    return described


def _failure_policy(layout: Layout) -> dict[str, Json]:
    policy: dict[str, Json] = {"maxRestarts": layout.settings.max_restarts}
    if layout.settings.max_restarts:
        # A new leader must not be taken for the old one, which has the same name.
        policy["restartStrategy"] = "BlockingRecreate"
        if layout.settings.max_run_seconds:
            policy["rules"] = [
                {
                    "name": "out_of_time",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["DeadlineExceeded"],
                }
            ]
    return policy


def _replicated_job(
    layout: Layout, group: PodGroup, *, of_run: bool, labels: Mapping[str, str] | None
) -> dict[str, Json]:
    count = group.group.count
    job: dict[str, Json] = {
        "parallelism": count,
        "completions": count,
        "completionMode": "Indexed",
        "backoffLimit": 0 if group.is_dnn else WITHOUT_END,
    }
    if group.is_dnn and layout.settings.max_run_seconds:
        job["activeDeadlineSeconds"] = layout.settings.max_run_seconds
    job["template"] = pod_template(layout, group, of_run=of_run)
    template: dict[str, Json] = {"metadata": {"labels": dict(labels)}} if labels else {}
    return {"name": group.job, "replicas": 1, "template": {**template, "spec": job}}


TRAINER_API = "trainer.kubeflow.org/v1alpha1"
ANCESTOR_LABEL = "trainer.kubeflow.org/trainjob-ancestor-step"
FRAMEWORK_LABEL = "trainer.kubeflow.org/framework"
# Who patches: a domain and a path, by Trainer's rule.
MANAGER = "stoker/run"


def training_runtime(layout: Layout, *, name: str) -> dict[str, Json]:
    """Returns the TrainingRuntime of `layout`, without what is a run's alone.

    Raises:
        UsageError: If the groups' pods are none that Kubernetes can run.
    """
    # The trainer's label is what tells Trainer which job a TrainJob's settings go to.
    ancestors = {TRAINER_JOB: {ANCESTOR_LABEL: "trainer"}}
    spec: dict[str, Json] = {
        # Without torch's policy: stoker's launcher starts torchrun itself.
        "mlPolicy": {"numNodes": layout.dnn.group.count},
        "template": {"spec": jobset_spec(layout, of_run=False, job_labels=ancestors)},
    }
    described = metadata(layout, name=name)
    labels = described["labels"]
    assert isinstance(labels, dict)
    described["labels"] = {**labels, FRAMEWORK_LABEL: "torch"}
    described["annotations"] = {REQUEST_ANNOTATION: digest(spec)}
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainingRuntime",
        "metadata": described,
        "spec": spec,
    }


def train_job(layout: Layout, *, runtime: str) -> dict[str, Json]:
    """Returns the TrainJob that runs `layout` on the TrainingRuntime called `runtime`."""
    dnn = layout.dnn
    trainer: dict[str, Json] = {
        "image": layout.image,
        "command": [verbatim(word) for word in layout.settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "numNodes": dnn.group.count,
        "resourcesPerNode": {"requests": dict(dnn.requests), "limits": dict(dnn.limits)},
        "env": environment_of_run(layout, dnn),
    }
    patches: list[Json] = [_patch(layout, group) for group in layout.groups]
    return {
        "apiVersion": TRAINER_API,
        "kind": "TrainJob",
        "metadata": metadata(layout, queued=True),
        "spec": {
            "runtimeRef": {
                "apiGroup": TRAINER_API.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": runtime,
            },
            "trainer": trainer,
            "runtimePatches": [
                {
                    "manager": MANAGER,
                    "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": patches}}},
                }
            ],
        },
    }


def digest(spec: Json) -> str:
    """Returns the digest by which two objects' specs are compared: 64 hexadecimal digits."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _patch(layout: Layout, group: PodGroup) -> dict[str, Json]:
    mounted = volumes_of_run(layout, group)
    container: dict[str, Json] = {"name": group.job, "volumeMounts": mounts_of(mounted)}
    if not group.is_dnn:
        # Trainer takes the variables of its own container from the TrainJob's trainer only.
        container["env"] = environment_of_run(layout, group)
    spec: dict[str, Json] = {
        "containers": [container],
        "volumes": [one.volume for one in mounted],
    }
    affinity = zone_affinity(layout)
    if affinity:
        spec["affinity"] = affinity
    return {"name": group.job, "template": {"spec": {"template": {"spec": spec}}}}
