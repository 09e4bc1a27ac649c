"""Rights that a run takes: the rules of its Role, and whether the caller has them.

Kubeflow's `pipeline-runner` and `default-editor` lack them (configs/kubernetes/rbac.yaml).
"""

import itertools
from collections.abc import Iterator, Sequence

from stoker.errors import PlatformError, ServiceError
from stoker.logs import EventName, Log
from stoker.platforms.kubernetes.api import (
    ACCESS_REVIEWS,
    BUDGETS,
    WORKFLOWS,
    ApiAction,
    ClusterApi,
)
from stoker.platforms.kubernetes.manifest import manifest
from stoker.records import Json, KubernetesSettings
from stoker.records.base import Document, mapping, mappings, texts

# A run works without them, but: fewer reasons in the log (events); a new attempt's Workflow does
# not own its predecessor's job; no lease, no disruption budget; a cancelled run's job continues; a
# retried step finds no record of a deleted job.
_USEFUL = (
    "events",
    "poddisruptionbudgets",
    "workflows",
    "patch jobsets",
    "patch trainjobs",
    "get configmaps",
    "patch configmaps",
)


def rules(settings: KubernetesSettings) -> list[Json]:
    """Returns the Role's rules; deleting a job deletes what it owns without a further right."""
    # Patched: an attempt that adopts a job adds its Workflow to the owners.
    job = ("create", "get", "list", "watch", "patch", "delete")
    needed = [_rule("jobset.x-k8s.io", ["jobsets"], job)]
    if settings.api == "trainer":
        # Patched: it exists before the TrainJob that owns it. Or only read.
        runtime = ("get",) if settings.runtime else ("create", "get", "patch", "delete")
        trainer = "trainer.kubeflow.org"
        needed = [_rule(trainer, ["trainjobs"], job), _rule(trainer, ["trainingruntimes"], runtime)]
    return [
        *needed,
        # Made after the job, which owns them: a token is never read back.
        _rule("", ["secrets"], ("create",)),
        # Patched: the follower's lease. Read: records, by which a pipeline's last step follows a
        # job, and a retried step need not train again.
        _rule("", ["configmaps"], ("create", "get", "patch")),
        # A drain waits for the dnn group.
        _rule(BUDGETS.group, [BUDGETS.plural], ("create",)),
        # get: the follower's, whose Workflow owns the job.
        _rule("", ["pods"], ("get", "list", "watch")),
        _rule("", ["events"], ("list", "watch")),
        _rule("", ["pods/log"], ("get",)),
        # Whether the run is being cancelled: without it a job outlives its follower's SIGTERM.
        _rule(WORKFLOWS.group, [WORKFLOWS.plural], ("get",)),
    ]


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> dict[str, Json]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def check_rights(
    cluster: ClusterApi, settings: KubernetesSettings, *, is_pod: bool, log: Log
) -> None:
    """Raises PlatformError with all missing rights, and the Role that has them."""
    try:
        missing = [
            action
            for action in needed_rights(settings, cluster.namespace)
            if (is_pod or action.resource != WORKFLOWS.plural) and not is_allowed(cluster, action)
        ]
    except ServiceError as err:
        # Not reached, or not logged in: the calls themselves would fail, too.
        if err.code in ("", "401"):
            raise
        return
    vital = [action for action in missing if not is_useful(action)]
    if vital:
        raise denied([action.right for action in vital], settings, namespace=cluster.namespace)
    for action in missing:
        log.event(EventName.PERMISSION_MISSING, right=action.right, namespace=action.namespace)


def explained_denial(
    err: ServiceError, settings: KubernetesSettings, *, namespace: str
) -> PlatformError:
    """Returns the error, with the Role that has the right where one is missing."""
    if err.kind != "denied":
        return err
    return denied([err.action], settings, namespace=namespace, user=err.user)


def denied(
    rights: Sequence[str], settings: KubernetesSettings, *, namespace: str, user: str = ""
) -> PlatformError:
    """Returns the error for missing rights, with the Role to apply."""
    role: dict[str, Json] = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "stoker-submit", "namespace": namespace},
        "rules": rules(settings),
    }
    return PlatformError(
        f"rights are missing in namespace {namespace}: {', '.join(rights)}",
        where=f"role of {user or 'the caller'}",
        fix="let an administrator add the account to configs/kubernetes/kustomization.yaml "
        f"(kubectl apply -k configs/kubernetes). This is its Role:\n{manifest([role])}".rstrip(),
    )


def needed_rights(settings: KubernetesSettings, namespace: str) -> Iterator[ApiAction]:
    for rule in mappings(rules(settings)):
        parts = (texts(rule, key) for key in ("apiGroups", "resources", "verbs"))
        for group, resource, verb in itertools.product(*parts):
            yield ApiAction(verb=verb, group=group, resource=resource, namespace=namespace)


def is_allowed(cluster: ClusterApi, action: ApiAction) -> bool:
    resource, _, part = action.resource.partition("/")
    attributes = {
        "namespace": action.namespace,
        "verb": action.verb,
        "group": action.group,
        "resource": resource,
        "subresource": part,
    }
    review: Document = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
    }
    return mapping(cluster.create(ACCESS_REVIEWS, review), "status").get("allowed") is True


def is_useful(action: ApiAction) -> bool:
    """Whether the run works without the right."""
    return action.resource in _USEFUL or f"{action.verb} {action.resource}" in _USEFUL
