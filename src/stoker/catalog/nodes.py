"""Node pools out of a cluster's nodes: their labels, taints, and what a pod can have of a node."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from stoker.records import Json
from stoker.records.cloud import amount

Document = Mapping[str, Json]

INSTANCE_TYPE = "node.kubernetes.io/instance-type"
_ZONE, _REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
_ARCHITECTURE, _SYSTEM = "kubernetes.io/arch", "kubernetes.io/os"
# A pool of Karpenter's has nodes of any type that its rules allow: its name alone says too little.
_KARPENTER = "karpenter.sh/nodepool"
_POOL_LABELS = (
    _KARPENTER,
    "eks.amazonaws.com/nodegroup",
    "alpha.eksctl.io/nodegroup-name",
    "cloud.google.com/gke-nodepool",
    "kubernetes.azure.com/agentpool",
)
# Label and value of nodes that may be taken back. Whatever the value is, pods select by it: pools
# of Karpenter's and node groups may mix both kinds.
_SPOT = {
    "karpenter.sh/capacity-type": "spot",
    "eks.amazonaws.com/capacityType": "SPOT",
    "cloud.google.com/gke-spot": "true",
    "cloud.google.com/gke-preemptible": "true",
    "kubernetes.azure.com/scalesetpriority": "spot",
}
_GPU = "nvidia.com/gpu"
_GPU_PRODUCT, _GPU_MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
_GPU_MODELS = (_GPU_PRODUCT, "cloud.google.com/gke-accelerator")
# Nodes that no training goes to.
_NOT_OURS = {
    "node-role.kubernetes.io/control-plane": None,
    "node-role.kubernetes.io/master": None,
    "eks.amazonaws.com/compute-type": "fargate",
    "type": "virtual-kubelet",
}
# Taints that come and go with a node's state, and that of GPUs, which dnn pods tolerate anyway.
_PASSING_TAINTS = ("node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/")
_PASSING_KEYS = ("ToBeDeletedByClusterAutoscaler", "DeletionCandidateOfClusterAutoscaler", _GPU)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPool:
    """Nodes of one kind.

    Attributes:
        name: What plans call it.
        nodes: Names of those that are there now.
        instance_type: Of the machine, where its label says it.
        cpu: Cores that pods can have of a node, daemons among them; of the smallest node.
        memory: Bytes, likewise.
        gpu_memory: GiB of one GPU, where a label says it.
    """

    name: str
    nodes: tuple[str, ...]
    instance_type: str | None
    is_spot: bool
    node_selector: Mapping[str, str]
    taints: tuple[str, ...]
    cpu: Decimal
    memory: Decimal
    gpus: int
    gpu_model: str | None
    gpu_memory: Decimal | None
    zones: tuple[str, ...]
    region: str | None
    architecture: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """What the nodes of a pool have in common."""

    label: str
    value: str
    instance_type: str | None
    is_spot: bool

    @property
    def has_own_types(self) -> bool:
        """Whether the label says the machine, too."""
        return self.label in (INSTANCE_TYPE, _GPU_PRODUCT)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    name: str
    labels: Mapping[str, str]
    document: Document

    @property
    def instance_type(self) -> str | None:
        return self.labels.get(INSTANCE_TYPE)

    @property
    def is_spot(self) -> bool:
        return any(self.labels.get(label) == value for label, value in _SPOT.items())

    def allocatable(self, resource: str) -> Decimal:
        found = _mapping(self.document, "status", "allocatable").get(resource, "0")
        return amount(str(found))

    def taints(self) -> set[str]:
        taints = _items(_mapping(self.document, "spec").get("taints"))
        return {_taint(taint) for taint in taints if not _is_passing(str(taint.get("key")))}


def pools_of(
    nodes: Sequence[Document], *, pool_label: str | None = None
) -> tuple[list[ClusterPool], list[str]]:
    """The pools of a cluster by name, and what is to be said of nodes that are in none.

    Args:
        nodes: As the API gives them.
        pool_label: Label whose value is a node's pool; absent: those of the known providers.
    """
    labels = (pool_label,) if pool_label else _POOL_LABELS
    ours = [node for node in map(_node, nodes) if _is_ours(node)]
    usable = [node for node in ours if not _problem(node)]
    notes = [f"node {node.name} left out: {_problem(node)}" for node in ours if _problem(node)]
    kinds: dict[_Kind, list[_Node]] = {}
    for node in usable:
        label = next((label for label in labels if node.labels.get(label)), None)
        if label is None and pool_label is None:
            label = next((key for key in (INSTANCE_TYPE, _GPU_PRODUCT) if key in node.labels), None)
        if label is None:
            notes.append(
                f"node {node.name} left out: no label says its pool; give it one, and name the "
                "label with --pool-label"
            )
            continue
        kind = _Kind(
            label=label,
            value=node.labels[label],
            instance_type=node.instance_type,
            is_spot=node.is_spot,
        )
        kinds.setdefault(kind, []).append(node)
    pools = [_pool(kind, members, named=_name(kind, kinds)) for kind, members in kinds.items()]
    return sorted(pools, key=lambda pool: pool.name), notes


def daemon_requests(pods: Sequence[Document]) -> tuple[Decimal, Decimal]:
    """Cores and bytes that a node's daemons ask for: what is on every node like it."""
    cpu = memory = Decimal(0)
    for pod in pods:
        owners = _items(_mapping(pod, "metadata").get("ownerReferences"))
        if not any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners):
            continue
        spec = _mapping(pod, "spec")
        sidecars = [c for c in _items(spec.get("initContainers")) if c.get("restartPolicy")]
        for container in (*_items(spec.get("containers")), *sidecars):
            requests = _mapping(container, "resources", "requests")
            cpu += amount(str(requests.get("cpu", "0")))
            memory += amount(str(requests.get("memory", "0")))
    return cpu, memory


def _name(kind: _Kind, kinds: Collection[_Kind]) -> str:
    """What a pool is called: stays the same as long as other kinds of nodes do not come to it."""
    alike = [k for k in kinds if (k.label, k.value) == (kind.label, kind.value)]
    name = kind.value
    has_types = kind.label == _KARPENTER or len({k.instance_type for k in alike}) > 1
    if has_types and kind.instance_type and not kind.has_own_types:
        name = f"{name}-{kind.instance_type}"
    has_both = any(
        k.instance_type == kind.instance_type and k.is_spot != kind.is_spot for k in alike
    )
    return f"{name}-spot" if kind.is_spot and has_both else name


def _pool(kind: _Kind, members: Sequence[_Node], *, named: str) -> ClusterPool:
    first = members[0].labels
    selector = {kind.label: kind.value}
    if kind.instance_type:
        selector[INSTANCE_TYPE] = kind.instance_type
    selector |= {label: first[label] for label in _SPOT if label in first}
    memory = first.get(_GPU_MEMORY, "")
    return ClusterPool(
        name=named,
        nodes=tuple(sorted(node.name for node in members)),
        instance_type=kind.instance_type,
        is_spot=kind.is_spot,
        node_selector=selector,
        taints=tuple(sorted(set.intersection(*(node.taints() for node in members)))),
        cpu=min(node.allocatable("cpu") for node in members),
        memory=min(node.allocatable("memory") for node in members),
        gpus=int(min(node.allocatable(_GPU) for node in members)),
        gpu_model=next((first[label] for label in _GPU_MODELS if label in first), None),
        gpu_memory=Decimal(memory) / 1024 if memory.isdigit() else None,
        zones=tuple(sorted({n.labels[_ZONE] for n in members if _ZONE in n.labels})),
        region=first.get(_REGION),
        architecture=first.get(_ARCHITECTURE),
    )


def _node(document: Document) -> _Node:
    metadata = _mapping(document, "metadata")
    labels = {key: str(value) for key, value in _mapping(metadata, "labels").items()}
    return _Node(name=str(metadata.get("name")), labels=labels, document=document)


def _is_ours(node: _Node) -> bool:
    if node.labels.get(_SYSTEM, "linux") != "linux":
        return False
    return not any(
        label in node.labels and value in (None, node.labels[label])
        for label, value in _NOT_OURS.items()
    )


def _problem(node: _Node) -> str:
    if _mapping(node.document, "spec").get("unschedulable"):
        return "cordoned"
    conditions = _items(_mapping(node.document, "status").get("conditions"))
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return "" if ready else "not ready"


def _is_passing(key: str) -> bool:
    return key.startswith(_PASSING_TAINTS) or key in _PASSING_KEYS


def _taint(taint: Document) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def _mapping(document: Json, *keys: str) -> Document:
    value: Json = document
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def _items(value: Json) -> Iterator[Document]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        yield from (item for item in value if isinstance(item, Mapping))
