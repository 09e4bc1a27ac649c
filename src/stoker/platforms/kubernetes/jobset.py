"""The JobSet of a run: one replicated job a group.

Success is the dnn group's alone: its end ends the JobSet, whose controller then deletes the pods of
the data group. A failed job is looked at before success is, so that the data group's job must never
fail: its pods are started again without end. Nothing here needs an alpha feature of JobSet.
"""

from collections.abc import Mapping

from stoker.platforms.kubernetes.groups import Layout, PodGroup
from stoker.platforms.kubernetes.names import MANAGED_BY_LABEL, QUEUE_LABEL, RUN_ANNOTATION
from stoker.platforms.kubernetes.pods import pod_template
from stoker.records import Json

JOBSET_API = "jobset.x-k8s.io/v1alpha2"
# Kubernetes' largest limit: a failed pod of the data group is always replaced.
WITHOUT_END = 2**31 - 1


def jobset(layout: Layout) -> dict[str, Json]:
    """The JobSet that runs `layout`.

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
    """What a JobSet and the template of a TrainingRuntime have in common.

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
    """Of an object of the run: its name, namespace and labels.

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
