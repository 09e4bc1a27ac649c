"""NetworkPolicies that keep everybody but stoker's own pods away from the pods of runs.

They are for a namespace, and applied once: pods of all runs are known by their labels. A run's own
keys keep the runs of one namespace apart.
"""

from stoker.platforms.kubernetes.names import MANAGED_BY_LABEL, ROLE_LABEL
from stoker.records import Json, Workload
from stoker.records.engine_check import completed


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
