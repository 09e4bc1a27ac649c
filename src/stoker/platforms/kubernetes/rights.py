"""What the caller may do in the namespace, asked before anything is made there."""

from collections.abc import Iterator, Sequence

import msgspec

from stoker.errors import PlatformError
from stoker.logs import Log
from stoker.platforms.kubernetes.api import Cluster
from stoker.platforms.kubernetes.api_errors import Action, ApiError
from stoker.platforms.kubernetes.manifest import manifest
from stoker.platforms.kubernetes.rbac import rbac, rules
from stoker.platforms.kubernetes.reading import Document, mapping, mappings, texts
from stoker.platforms.kubernetes.resources import ACCESS_REVIEWS
from stoker.records import KubernetesSettings

# Without them a run goes on: what is not told then is told by the pods; a new attempt's pod does
# not come to own its predecessor's job.
_USEFUL = ("events", "patch jobsets", "patch trainjobs")
_ACCOUNT = "system:serviceaccount:"


def check_rights(cluster: Cluster, settings: KubernetesSettings, *, log: Log) -> None:
    """Checks that the caller has the rights that a run takes.

    A cluster that does not answer such questions is none that refuses them: then the first call
    that is refused tells.

    Raises:
        PlatformError: With all rights that are missing, and the Role that has them.
    """
    missing = []
    for action in _needed(settings, cluster.namespace):
        try:
            if not _is_allowed(cluster, action):
                missing.append(action)
        except ApiError as err:
            if err.code in (0, 401):
                raise
            return
    vital = [action for action in missing if not _is_useful(action)]
    if vital:
        raise denied(vital, settings, namespace=cluster.namespace)
    for action in missing:
        log.event("right_is_missing", right=action.right, namespace=action.namespace)


def explained_denial(
    err: ApiError, settings: KubernetesSettings, *, namespace: str
) -> PlatformError:
    """The error itself, or, where a right was missing, with the Role that has it."""
    if not err.is_denied or err.action is None:
        return err
    return denied([err.action], settings, namespace=namespace, user=err.user)


def denied(
    actions: Sequence[Action], settings: KubernetesSettings, *, namespace: str, user: str = ""
) -> PlatformError:
    """The error for rights that are missing: all of them by name, and what to apply."""
    named = ", ".join(action.right for action in actions)
    account = None
    if user.startswith(_ACCOUNT):
        place, _, name = user.removeprefix(_ACCOUNT).partition(":")
        account = name if place == namespace else None
    here = msgspec.structs.replace(settings, namespace=namespace)
    objects = rbac(here, service_account=account or "YOUR-SERVICE-ACCOUNT")
    return PlatformError(
        f"rights are missing in namespace {namespace}: {named}",
        where=f"role of {user or 'the caller'}",
        fix=f"let an administrator apply this (stoker render rbac WORKLOAD"
        f"{f' --service-account {account}' if account else ''}):\n{manifest(objects)}".rstrip(),
    )


def _needed(settings: KubernetesSettings, namespace: str) -> Iterator[Action]:
    for rule in mappings({"rules": rules(settings)}, "rules"):
        for group in texts(rule, "apiGroups"):
            for resource in texts(rule, "resources"):
                for verb in texts(rule, "verbs"):
                    yield Action(verb=verb, group=group, resource=resource, namespace=namespace)


def _is_allowed(cluster: Cluster, action: Action) -> bool:
    resource, _, part = action.resource.partition("/")
    asked = {
        "namespace": action.namespace,
        "verb": action.verb,
        "group": action.group,
        "resource": resource,
        "subresource": part,
    }
    review: Document = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: value for key, value in asked.items() if value}},
    }
    return mapping(cluster.create(ACCESS_REVIEWS, review), "status").get("allowed") is True


def _is_useful(action: Action) -> bool:
    return action.resource in _USEFUL or f"{action.verb} {action.resource}" in _USEFUL
