"""A pools file from the nodes of a Kubernetes cluster.

    kubectl get nodes -o json | python tools/node_pools.py > configs/kubernetes/pools.csv

A row is the nodes of one pool, of one machine type, spot or not. What a pod gets is the allocatable
CPU and memory of the smallest node, less half a core and 1 GiB for daemons. Prices and speeds are
those of stoker's catalog. Spot nodes and machines of other clouds have no price: fill it in.

GPUs are what a device plugin offers: nvidia.com/gpu, amd.com/gpu, Gaudi, Neuron, TPUs, parts of a
GPU (MIG). Pods ask for one of these, the workload's kubernetes.gpu_resource. JSON and YAML are
read: a list of nodes or single ones.
"""

import argparse
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from math import floor
from typing import Any, TextIO

import yaml

from stoker.catalog import load_catalog
from stoker.records import KubernetesSettings
from stoker.records.platforms import amount

Node = Mapping[str, Any]

COLUMNS = (
    *("instance_type", "family", "vcpus", "memory_gib", "gpus", "gpu_model"),
    *("sustained_gbps", "coremark_per_vcpu", "ec2_usd_per_hour_us_east_1"),
    *("priced_on", "node_selector", "taints", "source"),
)
PRICE = COLUMNS[8]
# What is left to the daemons of a node: network, proxy, storage, logs, metrics.
DAEMON_CORES, DAEMON_GIB = Decimal("0.5"), 1
TYPE, ARCHITECTURE, GPU = "node.kubernetes.io/instance-type", "kubernetes.io/arch", "nvidia.com/gpu"
KARPENTER = "karpenter.sh/nodepool"
POOL_LABELS = (
    *(KARPENTER, "eks.amazonaws.com/nodegroup", "alpha.eksctl.io/nodegroup-name"),
    *("cloud.google.com/gke-nodepool", "kubernetes.azure.com/agentpool"),
    # Without a provider's label, the machine or its GPU makes the pool.
    *(TYPE, f"{GPU}.product", "amd.com/gpu.product-name"),
)
# Resources of which a pod gets whole accelerators. A node may offer several names for the same
# device: the first one counts.
ACCELERATORS = (
    *(GPU, "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
    *("aws.amazon.com/neuron", "aws.amazon.com/neurondevice", "aws.amazon.com/neuroncore"),
    *("google.com/tpu", "huawei.com/Ascend910", "cambricon.com/mlu"),
)
# Parts of a GPU. A node may offer whole ones and parts: then the whole ones count.
_PARTS = re.compile(r"^nvidia\.com/(mig-|gpu\.shared$)")
# Of plugins that are not in the list; not Intel's shares and counters of a GPU.
_PERHAPS_GPUS = re.compile(
    r"^(?!gpu\.intel\.com/).*(gpu|tpu|npu|xpu|dcu|accelerator)", re.IGNORECASE
)
MODELS = (
    *(f"{GPU}.product", "amd.com/gpu.product-name", "cloud.google.com/gke-accelerator"),
    *("cloud.google.com/gke-tpu-accelerator", "gpu.intel.com/product"),
)
_READ_WITH = "kubectl get nodes -o json"
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
# Taints of a node's state. That of its GPUs, which dnn pods tolerate anyway, is left out, too.
PASSING_TAINTS = (
    *("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/"),
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
            say(f"node {name_of(node)} left out: {why}")
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
    resource = accelerator_of(nodes)
    least = {key: min(free(node, key) for node in nodes) for key in ("cpu", "memory", resource)}
    gpus = int(least[resource])
    # Rounded down: a pod that asks for more than a node has free stays pending.
    vcpus, gib = floor(least["cpu"] - DAEMON_CORES), floor(least["memory"] / 2**30) - DAEMON_GIB
    keys = (label, TYPE, *SPOT, *((ARCHITECTURE,) if labels.get(ARCHITECTURE) == "arm64" else ()))
    spot = is_spot(labels)
    shared = set.intersection(*(taints(node, accelerator=resource) for node in nodes))
    model = next((labels[key] for key in MODELS if labels.get(key)), "")
    row = dict.fromkeys(COLUMNS, "") | {
        "instance_type": name,
        "vcpus": str(vcpus),
        "memory_gib": str(gib),
        "gpus": str(gpus),
        "gpu_model": model if gpus else "",
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
        if gpus:
            row["gpu_model"] = machine.accelerator_model or ""
        if machine.sustained_gbps:
            row["sustained_gbps"] = f"{machine.sustained_gbps:g}"
        if machine.usd_per_hour and not spot:
            row |= {PRICE: f"{machine.usd_per_hour:g}", "priced_on": str(machine.priced_on or "")}
        if machine.accelerators and not gpus:
            say(f"{name} offers no GPU of its {machine.type}: does the device plugin run there?")
    say_accelerators(nodes, name=name, resource=resource, gpus=gpus)
    if not row[PRICE]:
        say(f"{name} has no price, so no plan uses it: fill it in")
    if model.endswith("-SHARED"):
        say(f"{name} shares its GPUs among pods: predictions do not hold there")
    return row


def accelerator_of(nodes: Sequence[Node]) -> str:
    """Returns the resource that is these nodes' GPU; nvidia.com/gpu where they have none."""
    offered = set().union(*(offers(node) for node in nodes))
    parts = sorted(name for name in offered if _PARTS.match(name))
    return next((name for name in (*ACCELERATORS, *parts) if name in offered), GPU)


def offers(node: Node) -> set[str]:
    """Returns the resources of which a pod can get some on the node."""
    return {name for name in allocatable(node) if free(node, name) > 0}


def say_accelerators(nodes: Sequence[Node], *, name: str, resource: str, gpus: int) -> None:
    """Names what the workload has to say of a pool's accelerators, and what is not counted.

    Args:
        nodes: The nodes of the pool.
        name: The pool's name.
        resource: The resource that is its GPU.
        gpus: How many of it a pod gets.
    """
    lacking = sum(resource not in offers(node) for node in nodes)
    if 0 < lacking < len(nodes):
        say(f"{name}: {lacking} of {len(nodes)} nodes offer no {resource}, so the pool has none")
    if gpus and resource != KubernetesSettings().gpu_resource:
        say(f"{name} has {resource}: set kubernetes.gpu_resource: {resource} to train there")
    if gpus and (
        _PARTS.match(resource) or "-MIG-" in labels_of(nodes[0]).get(f"{GPU}.product", "")
    ):
        say(f"{name} has parts of GPUs: predictions do not hold there")
    known = {*ACCELERATORS, resource}
    others = {each for node in nodes for each in offers(node) if each not in known}
    for other in sorted(others):
        if _PARTS.match(other) or (not gpus and _PERHAPS_GPUS.search(other)):
            say(f"{name} offers {other}, too, which is not counted")


def name_of(node: Node) -> str:
    return str((node.get("metadata") or {}).get("name") or "without a name")


def labels_of(node: Node) -> Mapping[str, str]:
    found: Mapping[str, str] = (node.get("metadata") or {}).get("labels") or {}
    return found


def is_spot(labels: Mapping[str, str]) -> bool:
    return any(labels.get(key) == value for key, value in SPOT.items())


def problem(node: Node) -> str:
    """Returns why no pod can be put on the node; "" where one can."""
    if (node.get("spec") or {}).get("unschedulable"):
        return "cordoned"
    ready = {"type": "Ready", "status": "True"}
    conditions = (node.get("status") or {}).get("conditions") or []
    return "" if any(ready.items() <= each.items() for each in conditions) else "not ready"


def allocatable(node: Node) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (node.get("status") or {}).get("allocatable") or {}
    return found


def free(node: Node, resource: str) -> Decimal:
    return amount(str(allocatable(node).get(resource, "0")))


def taints(node: Node, *, accelerator: str = GPU) -> set[str]:
    """Returns the taints that stay, as KEY=VALUE:EFFECT."""
    passing = (*PASSING_TAINTS, accelerator)
    return {
        f"{each['key']}{'=' * bool(each.get('value'))}{each.get('value') or ''}:{each['effect']}"
        for each in (node.get("spec") or {}).get("taints") or []
        if not each["key"].startswith(passing)
    }


def nodes_in(text: str) -> list[Node]:
    """Returns the nodes of kubectl's JSON or YAML: of lists and of single nodes.

    Raises:
        SystemExit: If it is neither, or holds other objects or no node.
    """
    nodes: list[Node] = []
    for document in documents_in(text.removeprefix("\ufeff")):
        items = document if isinstance(document, list) else [document]
        if isinstance(document, dict) and "items" in document:
            items = document["items"] or []
        for item in items:
            kind = item.get("kind", "Node") if isinstance(item, dict) else "text"
            if not isinstance(item, dict) or kind != "Node":
                raise SystemExit(f"error: expected nodes, found a {kind}: {_READ_WITH}")
            nodes.append(item)
    if not nodes:
        raise SystemExit("error: the list has no nodes: may this user list the cluster's nodes?")
    return nodes


def documents_in(text: str) -> Iterator[object]:
    """Yields the documents of a text: JSON, also one after the other, or YAML."""
    try:
        documents, rest = [], text.strip()
        while rest:
            document, end = json.JSONDecoder().raw_decode(rest)
            documents.append(document)
            rest = rest[end:].strip()
    except ValueError:
        try:
            documents = [each for each in yaml.safe_load_all(text) if each is not None]
        except yaml.YAMLError:
            raise SystemExit(f"error: neither JSON nor YAML: {_READ_WITH}") from None
    yield from documents


def say(note: str) -> None:
    print(f"note: {note}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None, *, nodes: TextIO, out: TextIO) -> None:
    parser = argparse.ArgumentParser(description="kubectl get nodes -o json | node_pools.py")
    parser.add_argument("--pool-label", metavar="KEY", help="label that names a node's pool")
    given = parser.parse_args(arguments)
    if not (text := nodes.read()).strip():
        raise SystemExit(f"error: no nodes on stdin: {_READ_WITH}")
    rows = pools(nodes_in(text), pool_label=given.pool_label)
    usable = [row for row in rows if int(row["vcpus"]) > 0 and int(row["memory_gib"]) > 0]
    if not usable:
        raise SystemExit("error: no node pool has room for a pod")
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(usable)


if __name__ == "__main__":
    main(nodes=sys.stdin, out=sys.stdout)
