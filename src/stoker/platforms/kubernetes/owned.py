"""What a job owns besides its runtime: its Secret, ConfigMaps and budgets."""

from collections.abc import Mapping

from stoker.platforms.kubernetes.api import text
from stoker.platforms.kubernetes.jobset import metadata, object_of_run
from stoker.platforms.kubernetes.layout import (
    JOBSET_LABEL,
    ROLE_LABEL,
    STEP_LABEL,
    TOKEN_KEY,
    WORKFLOW_LABEL,
    Layout,
)
from stoker.records import Json
from stoker.records.base import Document

# In place of the token where the Secret is shown; a launcher refuses it as a token.
NO_TOKEN = "made-when-the-job-is-submitted"
# Followers that a budget keeps: more than one run can have.
_ALL_FOLLOWERS = 10_000


def token_secret(layout: Layout) -> Document:
    """Returns the Secret of the run's token, with NO_TOKEN in its place."""
    return object_of_run(
        "v1",
        "Secret",
        metadata(layout, name=layout.names.token),
        type="Opaque",
        immutable=True,
        stringData={TOKEN_KEY: NO_TOKEN},
    )


def config_map(layout: Layout, files: Mapping[str, str]) -> Document:
    """Returns the ConfigMap of what launchers read."""
    return _config_map(layout, layout.names.config, files)


def records_map(layout: Layout) -> Document | None:
    """Returns the ConfigMap for a later follower; None outside of pipelines."""
    if not layout.job.records:
        return None
    return _config_map(layout, layout.names.records, layout.job.records)


def _config_map(layout: Layout, name: str, data: Mapping[str, str]) -> Document:
    # Immutable: a run's settings do not change, and kubelets need not watch the object.
    described = metadata(layout, name=name)
    return object_of_run("v1", "ConfigMap", described, immutable=True, data=dict(data))


def follower_budget(layout: Layout, workflow: Document, labels: Document) -> Document:
    """Returns the budget, owned by a Workflow, by which a drain waits for the follower of a job.

    One for each step, whose pods alone have `labels`: the eviction API refuses a pod with two
    budgets by an error (500), on which a drain gives up instead of waiting. A step in a loop has
    many pods, so the budget asks for more than there can be: none may be evicted.
    """
    name = text(workflow, "name")
    described = metadata(layout, name=f"{name}-{text(labels, STEP_LABEL) or 'followers'}")
    del described["annotations"]
    described["ownerReferences"] = [dict(workflow)]
    return _budget(described, _ALL_FOLLOWERS, {WORKFLOW_LABEL: name, **labels})


def dnn_budget(layout: Layout) -> Document:
    """Returns the budget by which a drain waits for the dnn group to end."""
    labels = {JOBSET_LABEL: layout.name, ROLE_LABEL: "dnn"}
    return _budget(metadata(layout), layout.dnn.group.count, labels)


def _budget(described: dict[str, Json], count: int, labels: Document) -> Document:
    # Not maxUnavailable: a Workflow has no scale, and of a Job a budget does not know its pods.
    spec: Document = {"minAvailable": count, "selector": {"matchLabels": labels}}
    return object_of_run("policy/v1", "PodDisruptionBudget", described, spec=spec)
