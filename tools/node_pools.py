"""A pools file from the nodes of a Kubernetes cluster.

    kubectl get nodes -o json | python tools/node_pools.py > configs/kubernetes/pools.csv

A row is the nodes of one pool, of one machine type, spot or not. What a pod gets is the allocatable
CPU and memory of the smallest node, less half a core and 1 GiB for daemons. Prices and speeds are
those of stoker's catalog. Spot nodes and machines of other clouds have no price: fill it in.
"""

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from math import floor
from typing import Any, TextIO

from stoker.catalog import load_catalog
from stoker.records.platforms import amount

Node = Mapping[str, Any]

COLUMNS = (
    *("instance_type", "family", "vcpus", "memory_gib", "gpus", "gpu_model", "gpu_memory_gib_each"),
    *("network_gbps", "network_kind", "coremark_per_vcpu", "ec2_usd_per_hour_us_east_1"),
    *("priced_on", "node_selector", "taints", "source"),
)
PRICE = COLUMNS[10]
# What is left to the daemons of a node: network, proxy, storage, logs, metrics.
DAEMON_CORES, DAEMON_GIB = Decimal("0.5"), 1
TYPE, ARCHITECTURE, GPU = "node.kubernetes.io/instance-type", "kubernetes.io/arch", "nvidia.com/gpu"
KARPENTER = "karpenter.sh/nodepool"
POOL_LABELS = (
    *(KARPENTER, "eks.amazonaws.com/nodegroup", "alpha.eksctl.io/nodegroup-name"),
    *("cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool"),
    # Without a provider's label, the machine or its GPU makes the pool.
    *(TYPE, f"{GPU}.product"),
)
# Labels of spot nodes. Pods select by them, whatever the value is: a pool may have both kinds.
SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
NOT_FOR_TRAINING = (
    *("node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"),
    "eks.amazonaws.com/compute-type",
)
# Taints of a node's state, and that of GPUs, which dnn pods tolerate anyway.
PASSING_TAINTS = (
    *("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/", GPU),
    *("ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler"),
)


def pools(nodes: Iterable[Node], *, pool_label: str | None = None) -> list[dict[str, str]]:
    """Returns the rows of the pools file; names on stderr the nodes that are in none."""
    members: dict[tuple[str, str, str, bool], list[Node]] = {}
    for node in nodes:
        labels = labels_of(node)
        if labels.get("kubernetes.io/os", "linux") != "linux" or labels.keys() & NOT_FOR_TRAINING:
            continue
        label = next((k for k in ((pool_label,) if pool_label else POOL_LABELS) if k in labels), "")
        why = problem(node) or ("" if label else "no label names its pool (--pool-label KEY)")
        if why:
            say(f"node {node['metadata']['name']} left out: {why}")
            continue
        key = (label, labels[label], labels.get(TYPE, ""), is_spot(labels))
        members.setdefault(key, []).append(node)
    rows = []
    for (label, value, kind, spot), same in members.items():
        alike = [key for key in members if key[:2] == (label, value)]
        has_types = label == KARPENTER or len({key[2] for key in alike}) > 1
        name = f"{value}-{kind}" if has_types and kind and label != TYPE else value
        if spot and any(key[2] == kind and not key[3] for key in alike):
            name = f"{name}-spot"
        rows.append(row_of(same, name=name, label=label))
    return sorted(rows, key=lambda row: row["instance_type"])


def row_of(nodes: Sequence[Node], *, name: str, label: str) -> dict[str, str]:
    """Returns a pool's row: what a pod gets on its smallest node."""
    labels, count = labels_of(nodes[0]), len(nodes)
    least = {key: min(free(node, key) for node in nodes) for key in ("cpu", "memory", GPU)}
    # Rounded down: a pod that asks for more than a node has free stays pending.
    vcpus, gib = floor(least["cpu"] - DAEMON_CORES), floor(least["memory"] / 2**30) - DAEMON_GIB
    keys = (label, TYPE, *SPOT, *((ARCHITECTURE,) if labels.get(ARCHITECTURE) == "arm64" else ()))
    spot = is_spot(labels)
    shared = set.intersection(*(taints(node) for node in nodes))
    gpu_mib = labels.get(f"{GPU}.memory", "")
    model = labels.get(f"{GPU}.product") or labels.get("cloud.google.com/gke-accelerator") or ""
    row = dict.fromkeys(COLUMNS, "") | {
        "instance_type": name,
        "vcpus": str(vcpus),
        "memory_gib": str(gib),
        "gpus": str(int(least[GPU])),
        "gpu_model": model if least[GPU] else "",
        "gpu_memory_gib_each": f"{int(gpu_mib) / 1024:g}" if gpu_mib and least[GPU] else "",
        "node_selector": " ".join(f"{k}={labels[k]}" for k in dict.fromkeys(keys) if k in labels),
        "taints": " ".join(sorted(shared)),
        "source": f"{count} node{'s' * (count > 1)} {labels.get(TYPE, '')}{' spot' * spot}",
    }
    listed = load_catalog("kubernetes").instances
    machine = next((each for each in listed if each.type == labels.get(TYPE)), None)
    if machine:
        row["family"] = machine.family
        if machine.coremark_per_vcpu:
            row["coremark_per_vcpu"] = f"{machine.coremark_per_vcpu:g}"
        if least[GPU]:
            row["gpu_model"] = machine.accelerator_model or ""
            row["gpu_memory_gib_each"] = f"{machine.accelerator_memory_gib or 0:g}"
        if machine.network_gbps:
            row["network_gbps"] = f"{machine.network_gbps:g}"
            row["network_kind"] = "up_to" if machine.is_burst_network else "sustained"
        if machine.usd_per_hour and not spot:
            row |= {PRICE: f"{machine.usd_per_hour:g}", "priced_on": str(machine.priced_on or "")}
        if machine.accelerators and not least[GPU]:
            say(f"{name} offers no GPU of its {machine.type}: does the device plugin run there?")
    if not row[PRICE]:
        say(f"{name} has no price, so no plan uses it: fill it in")
    if model.endswith("-SHARED"):
        say(f"{name} shares its GPUs among pods: predictions do not hold there")
    return row


def labels_of(node: Node) -> Mapping[str, str]:
    found: Mapping[str, str] = node["metadata"].get("labels", {})
    return found


def is_spot(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key) == value for key, value in SPOT.items())


def problem(node: Node) -> str:
    """Returns why no pod can be put on the node; "" where one can."""
    if node["spec"].get("unschedulable"):
        return "cordoned"
    ready = {"type": "Ready", "status": "True"}
    conditions = node["status"].get("conditions", [])
    return "" if any(ready.items() <= each.items() for each in conditions) else "not ready"


def free(node: Node, resource: str) -> Decimal:
    return amount(str(node["status"].get("allocatable", {}).get(resource, "0")))


def taints(node: Node) -> set[str]:
    """Returns the taints that stay, as KEY=VALUE:EFFECT."""
    return {
        f"{each['key']}{'=' * bool(each.get('value'))}{each.get('value', '')}:{each['effect']}"
        for each in node["spec"].get("taints", [])
        if not each["key"].startswith(PASSING_TAINTS)
    }


def say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None, *, nodes: TextIO, out: TextIO) -> None:
    parser = argparse.ArgumentParser(description="kubectl get nodes -o json | node_pools.py")
    parser.add_argument("--pool-label", metavar="KEY", help="label that names a node's pool")
    given = parser.parse_args(arguments)
    if not (text := nodes.read()):
        raise SystemExit("error: no nodes on stdin: kubectl get nodes -o json")
    rows = pools(json.loads(text)["items"], pool_label=given.pool_label)
    usable = [row for row in rows if int(row["vcpus"]) > 0 and int(row["memory_gib"]) > 0]
    if not usable:
        raise SystemExit("error: no node pool has room for a pod")
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(usable)


if __name__ == "__main__":
    main(nodes=sys.stdin, out=sys.stdout)
