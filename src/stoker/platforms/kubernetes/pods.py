"""The pods of a group."""

from collections.abc import Sequence

from stoker.platforms.kubernetes.environment import (
    environment_of_group,
    environment_of_run,
    verbatim,
)
from stoker.platforms.kubernetes.groups import Layout, PodGroup
from stoker.platforms.kubernetes.names import (
    ISTIO_INJECT,
    JOBSET_LABEL,
    MANAGED_BY_LABEL,
    ROLE_LABEL,
    ZONE_LABEL,
)
from stoker.platforms.kubernetes.volumes import Mounted, volumes_of_group, volumes_of_run
from stoker.records import Json, NodeRule, Toleration

_ZONE_WEIGHT = 100
# A GPU host that is moved to save a node costs the whole run; a data host comes back.
_STAY = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}


def pod_template(layout: Layout, group: PodGroup, *, of_run: bool) -> dict[str, Json]:
    """The template of a group's pods.

    Args:
        layout: Of the job.
        group: One of its groups.
        of_run: With what is this run's alone: token, configuration, variables, zone.

    Raises:
        UsageError: If a volume or variable is none that pods can have.
    """
    settings, pods = layout.settings, group.settings
    mounted = volumes_of_group(layout, group)
    environment = environment_of_group(layout, group)
    if of_run:
        mounted += volumes_of_run(layout, group)
        environment += environment_of_run(layout, group)
    container: dict[str, Json] = {
        "name": group.job,
        "image": layout.image,
        "command": [verbatim(word) for word in settings.entrypoint],
        "args": [verbatim(word) for word in layout.job.command],
        "env": environment,
        "resources": {"requests": dict(group.requests), "limits": dict(group.limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
        },
        # The last words of a host that failed stand in its pod's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts_of(mounted),
    }
    if settings.image_pull_policy:
        container["imagePullPolicy"] = settings.image_pull_policy
    if pods.env_from_secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.env_from_secrets]
    spec: dict[str, Json] = {
        "restartPolicy": "Never" if group.is_dnn else "OnFailure",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": settings.run_as,
            "runAsGroup": settings.run_as,
            "fsGroup": settings.run_as,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "nodeSelector": dict(group.node_selector),
        "tolerations": [_toleration(toleration) for toleration in group.tolerations],
        "containers": [container],
        "volumes": [one.volume for one in mounted],
    }
    affinity = {**_node_affinity(pods.node_rules), **(zone_affinity(layout) if of_run else {})}
    if affinity:
        spec["affinity"] = affinity
    if settings.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    account = pods.service_account or settings.service_account
    if account:
        spec["serviceAccountName"] = account
    if pods.priority_class:
        spec["priorityClassName"] = pods.priority_class
    return {"metadata": _metadata(layout, group), "spec": spec}


def mounts_of(mounted: Sequence[Mounted]) -> list[Json]:
    """The mounts of a container."""
    return [mount for one in mounted for mount in one.mounts]


def zone_affinity(layout: Layout) -> dict[str, Json]:
    """All pods of the run in one zone, as far as that is asked for; {} for one pod."""
    if layout.settings.zone == "any" or sum(g.group.count for g in layout.groups) == 1:
        return {}
    term: dict[str, Json] = {
        "labelSelector": {"matchLabels": {JOBSET_LABEL: layout.name}},
        "topologyKey": ZONE_LABEL,
    }
    if layout.settings.zone == "require":
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    weighed: Json = {"weight": _ZONE_WEIGHT, "podAffinityTerm": term}
    return {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [weighed]}}


def _metadata(layout: Layout, group: PodGroup) -> dict[str, Json]:
    # A mesh's sidecar does not end when the training does, and stands between the hosts.
    no_mesh = {ISTIO_INJECT: "false"}
    return {
        "labels": {
            **layout.settings.labels,
            MANAGED_BY_LABEL: "stoker",
            ROLE_LABEL: group.group.role,
            **no_mesh,
            **group.settings.labels,
        },
        "annotations": {
            **no_mesh,
            **(_STAY if group.is_dnn else {}),
            **group.settings.annotations,
        },
    }


def _toleration(toleration: Toleration) -> dict[str, Json]:
    fields = {
        "key": toleration.key,
        "operator": toleration.operator,
        "value": toleration.value,
        "effect": toleration.effect,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _node_affinity(rules: Sequence[NodeRule]) -> dict[str, Json]:
    must: list[Json] = [_expression(rule) for rule in rules if rule.weight is None]
    better: list[Json] = [
        {"weight": rule.weight, "preference": {"matchExpressions": [_expression(rule)]}}
        for rule in rules
        if rule.weight is not None
    ]
    affinity: dict[str, Json] = {}
    if must:
        affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
            "nodeSelectorTerms": [{"matchExpressions": must}]
        }
    if better:
        affinity["preferredDuringSchedulingIgnoredDuringExecution"] = better
    return {"nodeAffinity": affinity} if affinity else {}


def _expression(rule: NodeRule) -> dict[str, Json]:
    expression: dict[str, Json] = {"key": rule.key, "operator": rule.operator}
    if rule.values:
        expression["values"] = list(rule.values)
    return expression
