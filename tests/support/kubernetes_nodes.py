"""Builds nodes of a cluster, as the API gives them."""

from typing import Any

Document = dict[str, Any]


def node(
    name,
    *,
    labels=None,
    kind=None,
    cpu="15890m",
    memory="29317Mi",
    gpus=0,
    taints=(),
    zone="us-east-1a",
    ready=True,
    cordoned=False,
    offers=None,
):
    """Builds a node; taints are KEY=VALUE:EFFECT; `offers` has more resources."""
    allocatable = {"cpu": cpu, "memory": memory, "pods": "110", **(offers or {})}
    if gpus:
        allocatable["nvidia.com/gpu"] = str(gpus)
    found = {
        "kubernetes.io/hostname": name,
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": "amd64",
        "topology.kubernetes.io/zone": zone,
        "topology.kubernetes.io/region": zone[:-1],
        **({"node.kubernetes.io/instance-type": kind} if kind else {}),
        **(labels or {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": found},
        "spec": {
            "taints": [_taint(text) for text in taints],
            **({"unschedulable": True} if cordoned else {}),
        },
        "status": {
            "allocatable": allocatable,
            "capacity": {**allocatable, "cpu": "16"},
            "conditions": [{"type": "Ready", "status": "True" if ready else "Unknown"}],
        },
    }


def _taint(text: str) -> Document:
    label, _, effect = text.rpartition(":")
    key, equals, value = label.partition("=")
    return {"key": key, "effect": effect, **({"value": value} if equals else {})}


# An EKS cluster: Karpenter's pool of two types, a node group with a GPU, spot, and what is in none.
KARPENTER = "karpenter.sh/nodepool"
ON_DEMAND = {KARPENTER: "cpu", "karpenter.sh/capacity-type": "on-demand"}
SPOT = {**ON_DEMAND, "karpenter.sh/capacity-type": "spot"}
NODE_GROUP = {"eks.amazonaws.com/nodegroup": "gpu", "eks.amazonaws.com/capacityType": "ON_DEMAND"}
EKS: tuple[Document, ...] = (
    node("control", labels={"node-role.kubernetes.io/control-plane": ""}, cpu="2"),
    node(
        "gpu-1",
        kind="g5.xlarge",
        labels=NODE_GROUP,
        cpu="3920m",
        memory="14400Mi",
        gpus=1,
        taints=["nvidia.com/gpu=true:NoSchedule", "team=vision:NoSchedule"],
    ),
    node("cpu-1", kind="c7i.4xlarge", labels=ON_DEMAND),
    node(
        "cpu-2",
        kind="c7i.4xlarge",
        labels=ON_DEMAND,
        cpu="15800m",
        zone="us-east-1b",
        taints=["node.kubernetes.io/unreachable:NoExecute"],
    ),
    node("cpu-3", kind="c7i.4xlarge", labels=SPOT, taints=["spot=true:NoSchedule"]),
    node("cpu-4", kind="c7i.2xlarge", labels=ON_DEMAND, cpu="7910m", memory="14000Mi"),
    node("broken", kind="c7i.4xlarge", labels={KARPENTER: "cpu"}, ready=False),
    node("cordoned", kind="c7i.4xlarge", labels={KARPENTER: "cpu"}, cordoned=True),
    node("fargate", labels={"eks.amazonaws.com/compute-type": "fargate"}),
    node("windows", kind="m5.large", labels={"kubernetes.io/os": "windows"}),
    node("stray"),
)
