"""A run needs rights in its namespace, and network policies; the caller's rights are checked here.

Neither Kubeflow's `pipeline-runner` nor a profile's `default-editor` has these rights.

Network policies are for a namespace, and applied once: pods of all runs are known by their labels.
A run's own keys keep the runs of one namespace apart.
"""

from collections.abc import Iterator, Sequence

import msgspec

from stoker.errors import PlatformError, UsageError
from stoker.logs import Log
from stoker.platforms.kubernetes.api import ACCESS_REVIEWS, Action, ApiError, ClusterApi
from stoker.platforms.kubernetes.objects import MANAGED_BY_LABEL, ROLE_LABEL
from stoker.platforms.kubernetes.reading import Document, mapping, mappings, texts
from stoker.platforms.kubernetes.request import manifest
from stoker.records import Json, KubernetesSettings, Workload
from stoker.records.engine_check import completed

ROLE = "stoker-submit"


def rbac(
    settings: KubernetesSettings, *, service_account: str | None = None
) -> list[dict[str, Json]]:
    """Returns ServiceAccount, Role and RoleBinding for who submits runs.

    Args:
        settings: Of the workload: its namespace, and whose API it uses.
        service_account: One that is there already, such as pipeline-runner; absent: `stoker-submit`
            is made.

    Raises:
        UsageError: If the workload names no namespace.
    """
    if settings.namespace is None:
        raise UsageError(
            "a service account's rights hold in a namespace, and none is named",
            where="key kubernetes.namespace",
            fix="add --set kubernetes.namespace=NAME; with Kubeflow's profiles the profile's own",
        )
    account = service_account or ROLE
    objects: list[dict[str, Json]] = []
    if service_account is None:
        objects.append(_object("v1", "ServiceAccount", settings, account))
    role = _object("rbac.authorization.k8s.io/v1", "Role", settings, ROLE)
    role["rules"] = rules(settings)
    name = ROLE if service_account is None else f"{ROLE}-{account}"
    binding = _object("rbac.authorization.k8s.io/v1", "RoleBinding", settings, name)
    binding["roleRef"] = {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "Role",
        "name": ROLE,
    }
    binding["subjects"] = [
        {"kind": "ServiceAccount", "name": account, "namespace": settings.namespace}
    ]
    return [*objects, role, binding]


def rules(settings: KubernetesSettings) -> list[Json]:
    """Returns the Role's rules; deleting a job deletes what it owns, without another right."""
    # Patched: an attempt that adopts a job adds its own pod to the owners.
    job = ("create", "get", "list", "watch", "patch", "delete")
    found = [_rule("jobset.x-k8s.io", ["jobsets"], job)]
    if settings.api == "trainer":
        found = [
            _rule("jobset.x-k8s.io", ["jobsets"], ("get", "list", "watch")),
            _rule("trainer.kubeflow.org", ["trainjobs"], job),
            # Patched: it is there before the TrainJob that comes to own it. Or only read.
            _rule(
                "trainer.kubeflow.org",
                ["trainingruntimes"],
                ("get",) if settings.runtime else ("create", "get", "patch", "delete"),
            ),
        ]
    return [
        *found,
        # Made after the job, which owns them: a token is never read back.
        _rule("", ["secrets", "configmaps"], ("create",)),
        _rule("", ["pods", "events"], ("get", "list", "watch")),
        _rule("", ["pods/log"], ("get",)),
    ]


def _rule(group: str, resources: Sequence[str], verbs: Sequence[str]) -> dict[str, Json]:
    return {"apiGroups": [group], "resources": list(resources), "verbs": list(verbs)}


def _object(api: str, kind: str, settings: KubernetesSettings, name: str) -> dict[str, Json]:
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": settings.namespace,
            "labels": {**settings.labels, MANAGED_BY_LABEL: "stoker"},
        },
    }


# Without them a run goes on: what is not told then is told by the pods; a new attempt's pod does
# not come to own its predecessor's job.
_USEFUL = ("events", "patch jobsets", "patch trainjobs")
_ACCOUNT = "system:serviceaccount:"


def check_rights(cluster: ClusterApi, settings: KubernetesSettings, *, log: Log) -> None:
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
    """Returns the error itself, or, where a right was missing, with the Role that has it."""
    if not err.is_denied or err.action is None:
        return err
    return denied([err.action], settings, namespace=namespace, user=err.user)


def denied(
    actions: Sequence[Action], settings: KubernetesSettings, *, namespace: str, user: str = ""
) -> PlatformError:
    """Returns the error for missing rights: all of them by name, and what to apply."""
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


def _is_allowed(cluster: ClusterApi, action: Action) -> bool:
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


def network_policies(workload: Workload) -> list[dict[str, Json]]:
    """Returns one policy for each role.

    Data hosts: only pods of runs reach the feed's two ports and the ports of the workload's engine.
    Ray also listens on ports of its own choice, so there all ports are open to pods of runs. Dnn
    hosts: only pods of runs reach them, on any port, because NCCL, gloo and MPI choose theirs when
    they start; the metrics port, if the workload serves metrics to other hosts, is open to all pods
    of the cluster.

    Args:
        workload: Its ports, engine and namespace.
    """
    feed = workload.feed
    engine = completed(workload.engine_settings)
    data: dict[str, Json] = {"from": [{"podSelector": _pods("dnn", "data")}]}
    if engine.name != "ray":
        data["ports"] = _tcp(feed.port, feed.port + 1, *sorted(set(engine.ports.values())))
    dnn: list[Json] = [{"from": [{"podSelector": _pods("dnn", "data")}]}]
    if feed.metrics_port and feed.metrics_address:
        dnn.append({"from": [{"namespaceSelector": {}}], "ports": _tcp(feed.metrics_port)})
    return [_policy(workload, "data", [data]), _policy(workload, "dnn", dnn)]


def _policy(workload: Workload, role: str, ingress: list[Json]) -> dict[str, Json]:
    settings = workload.kubernetes
    described: dict[str, Json] = {"name": f"stoker-{role}"}
    if settings is not None and settings.namespace:
        described["namespace"] = settings.namespace
    described["labels"] = {MANAGED_BY_LABEL: "stoker"}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": described,
        "spec": {"podSelector": _pods(role), "policyTypes": ["Ingress"], "ingress": ingress},
    }


def _pods(*roles: str) -> dict[str, Json]:
    return {
        "matchLabels": {MANAGED_BY_LABEL: "stoker"},
        "matchExpressions": [{"key": ROLE_LABEL, "operator": "In", "values": list(roles)}],
    }


def _tcp(*ports: int) -> list[Json]:
    return [{"protocol": "TCP", "port": port} for port in ports]
