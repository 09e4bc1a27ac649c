"""The rights that submitting, following and stopping a run takes, and no more.

Neither Kubeflow's `pipeline-runner` nor a profile's `default-editor` has them.
"""

from collections.abc import Sequence

from stoker.errors import UsageError
from stoker.platforms.kubernetes.names import MANAGED_BY_LABEL
from stoker.records import Json, KubernetesSettings

ROLE = "stoker-submit"


def rbac(
    settings: KubernetesSettings, *, service_account: str | None = None
) -> list[dict[str, Json]]:
    """ServiceAccount, Role and RoleBinding for who submits runs.

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
    """What the Role allows; deleting a job deletes what it owns, without a right of its own."""
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
