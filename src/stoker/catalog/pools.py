"""Plans on Kubernetes are made of a cluster's node pools, in place of instance types.

A pools file has the catalog's columns. What it says of vCPUs, memory and GPUs is what one pod gets:
of a whole node, what daemons leave of it. Two more columns say where the pods go:

| column | what it holds |
| --- | --- |
| node_selector | labels of the pool's nodes, KEY=VALUE, by spaces; blank: the name is a type |
| taints | of the nodes, which its pods tolerate: KEY=VALUE:EFFECT or KEY:EFFECT, by spaces |
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import floor
from pathlib import Path
from typing import Literal

import msgspec

from stoker.catalog.catalog import (
    Catalog,
    Instance,
    Row,
    Table,
    extended,
    load_catalog,
    parse_table,
)
from stoker.records import (
    KubernetesSettings,
    NodePool,
    Toleration,
    Workload,
    bare_type,
    read_text,
)
from stoker.records.base import Document, mapping, mappings
from stoker.records.platforms import amount, lacks_arm_image

_SOURCE = "kubernetes.pools_file"
_EFFECTS: tuple[Literal["NoSchedule", "PreferNoSchedule", "NoExecute"], ...] = (
    "NoSchedule",
    "PreferNoSchedule",
    "NoExecute",
)


def catalog_of(workload: Workload, prices: Path | None = None) -> Catalog:
    """Returns the instance types that plans for `workload` can be made of.

    On Kubernetes these are the node pools, where the workload names some: nothing else is proposed.

    Args:
        workload: Its platform pays; `kubernetes.pools_file` and `kubernetes.pools` are its pools.
        prices: CSV file that goes before the pools file and the catalog.

    Raises:
        UsageError: If a table is wrong, with line and column.
    """
    settings = workload.kubernetes or KubernetesSettings()
    if not workload.platform_info.has_node_pools or not (settings.pools or settings.pools_file):
        return load_catalog(workload.platform, prices=prices)
    table = _table(settings)
    catalog = _with(load_catalog("kubernetes"), table)
    if prices:
        catalog = _with(
            catalog, parse_table(read_text(prices), platform="kubernetes", source=str(prices))
        )
    known = {instance.type: instance for instance in catalog.instances}
    names = [_bare(row.cells["instance_type"]) for row in table.rows] if table else []
    names += [_bare(name) for name in settings.pools]
    merged = with_pools(workload).kubernetes or settings
    today = _bare(workload.cluster.dnn.instance_type) if workload.cluster else ""
    pools = {_bare(name): pool for name, pool in settings.pools.items()}
    listed = (_instance(name, known.get(name), pools.get(name)) for name in dict.fromkeys(names))
    # A column of plain prices does not say of which region they are.
    is_plain = table is not None and table.price_column is not None and table.region is None
    return Catalog(
        platform="kubernetes",
        instances=[_barred(instance, merged) for instance in listed if instance is not None],
        source=catalog.source,
        region=None if is_plain and not prices else catalog.region,
        purchase=catalog.purchase,
        # Not proposed, but today's hosts need a price and a speed to be compared with.
        make=lambda name: known.get(name) if _bare(name) == today else None,
        added_by="kubernetes.pools_file",
    )


def with_pools(workload: Workload) -> Workload:
    """Returns the workload whose `kubernetes.pools` holds the pools of its pools file, too.

    The file does not override what `kubernetes.pools` says of a pool itself.

    Raises:
        UsageError: If the file is wrong, with line and column.
    """
    settings = workload.kubernetes
    table = _table(settings) if settings else None
    if settings is None or table is None:
        return workload
    catalog = _with(load_catalog("kubernetes"), table)
    pools = dict(settings.pools)
    for row in table.rows:
        name = _bare(row.cells["instance_type"])
        pools[name] = _merged(_pool(row, catalog.get(name)), pools.get(name))
    return msgspec.structs.replace(
        workload, kubernetes=msgspec.structs.replace(settings, pools=pools)
    )


def _table(settings: KubernetesSettings) -> Table | None:
    if settings.pools_file is None:
        return None
    return parse_table(settings.pools_file, platform="kubernetes", source=_SOURCE)


def _with(catalog: Catalog, table: Table | None) -> Catalog:
    return catalog if table is None else extended(catalog, table)


def _bare(name: str) -> str:
    return bare_type(name.strip())


def _instance(name: str, listed: Instance | None, pool: NodePool | None) -> Instance | None:
    """Returns the pool as plans see it; None where nothing says how many vCPUs it has."""
    # Whole vCPUs, as instance types have: 3.9 are three that a worker can keep busy.
    cpu = floor(amount(str(pool.cpu))) if pool and pool.cpu is not None else None
    if listed is None and cpu:
        listed = Instance(type=name, family=name, vcpus=cpu)
    if listed is None or pool is None:
        return listed
    return replace(
        listed,
        vcpus=max(1, listed.vcpus if cpu is None else cpu),
        accelerators=listed.accelerators if pool.gpus is None else pool.gpus,
    )


def _barred(instance: Instance, settings: KubernetesSettings) -> Instance:
    if instance.accelerators or not lacks_arm_image(settings, instance.type):
        return instance
    why = f"{instance.type} is arm64, and kubernetes.data.image names no image for it"
    return replace(instance, barred=why)


def _pool(row: Row, instance: Instance) -> NodePool:
    def is_said(column: str) -> bool:
        return bool(row.cells.get(column, "").strip())

    return NodePool(
        # None: the pool's name is a type, by whose label its nodes are found.
        node_selector=dict(_labels(row)) or None,
        tolerations=tuple(_tolerations(row)),
        cpu=instance.vcpus if is_said("vcpus") else None,
        memory=f"{row.cells['memory_gib'].strip()}Gi" if is_said("memory_gib") else None,
        gpus=instance.accelerators if "gpus" in row.cells else None,
    )


def _merged(pool: NodePool, own: NodePool | None) -> NodePool:
    if own is None:
        return pool
    said = {
        name: getattr(own, name)
        for name in own.__struct_fields__
        # What the workload leaves at the default is not said there: the file's stays.
        if getattr(own, name) not in (None, ())
    }
    return msgspec.structs.replace(pool, **said)


def _labels(row: Row) -> Iterator[tuple[str, str]]:
    for word in row.cells.get("node_selector", "").split():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise row.error("node_selector", f"expected KEY=VALUE, found {word!r}")
        yield key, value


def _tolerations(row: Row) -> Iterator[Toleration]:
    for word in row.cells.get("taints", "").split():
        label, _, effect = word.rpartition(":")
        key, equals, value = label.partition("=")
        chosen = next((known for known in _EFFECTS if known == effect), None)
        if not key or chosen is None:
            raise row.error("taints", f"expected KEY=VALUE:EFFECT or KEY:EFFECT, found {word!r}")
        if equals:
            yield Toleration(key=key, operator="Equal", value=value, effect=chosen)
        else:
            yield Toleration(key=key, effect=chosen)


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
    """A pool consists of the nodes of one kind that a cluster has now.

    Attributes:
        name: What plans call it.
        nodes: Names of those that are there now.
        instance_type: Type of the machine, where a label says it.
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
    """Holds the facts that the nodes of a pool have in common."""

    label: str
    value: str
    instance_type: str | None
    is_spot: bool

    @property
    def has_own_types(self) -> bool:
        """Returns whether the label says the machine, too."""
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
        found = mapping(self.document, "status", "allocatable").get(resource, "0")
        return amount(str(found))

    def taints(self) -> set[str]:
        taints = mappings(mapping(self.document, "spec").get("taints"))
        return {_taint(taint) for taint in taints if not _is_passing(str(taint.get("key")))}


def pools_of(
    nodes: Sequence[Document], *, pool_label: str | None = None
) -> tuple[list[ClusterPool], list[str]]:
    """Returns a cluster's pools by name, and what is to be said of nodes that are in none.

    Args:
        nodes: Nodes as the API gives them.
        pool_label: Label whose value is a node's pool; absent: those of the known providers.
    """
    labels = (pool_label,) if pool_label else _POOL_LABELS
    ours = [node for node in map(_node, nodes) if _is_ours(node)]
    usable = [node for node in ours if not _problem(node)]
    notes = [f"node {node.name} left out: {_problem(node)}" for node in ours if _problem(node)]
    kinds: dict[_Kind, list[_Node]] = {}
    unlabelled: list[str] = []
    for node in usable:
        label = next((label for label in labels if node.labels.get(label)), None)
        if label is None and pool_label is None:
            # No provider's label, as on clusters of one's own: the machine type makes the pool.
            label = next((key for key in (INSTANCE_TYPE, _GPU_PRODUCT) if key in node.labels), None)
        if label is None:
            unlabelled.append(node.name)
            continue
        kind = _Kind(
            label=label,
            value=node.labels[label],
            instance_type=node.instance_type,
            is_spot=node.is_spot,
        )
        kinds.setdefault(kind, []).append(node)
    if unlabelled:
        named = ", ".join(unlabelled[:3])
        more = f" and {len(unlabelled) - 3} more" if len(unlabelled) > 3 else ""
        notes.append(
            f"node {named}{more} left out: no label says the pool; give them one (kubectl label "
            "node NODE pool=NAME), and name it with --pool-label"
        )
    pools = [
        _pool_of_kind(kind, members, named=_name(kind, kinds)) for kind, members in kinds.items()
    ]
    return sorted(pools, key=lambda pool: pool.name), notes


def daemon_requests(pods: Sequence[Document]) -> tuple[Decimal, Decimal]:
    """Returns the cores and bytes that a node's daemons ask for: what every node like it runs."""
    cpu = memory = Decimal(0)
    for pod in pods:
        owners = mappings(mapping(pod, "metadata").get("ownerReferences"))
        # Owned by a Node: the static pods that the kubelet starts on its own.
        if not any(owner.get("kind") in ("DaemonSet", "Node") for owner in owners):
            continue
        spec = mapping(pod, "spec")
        # An init container with a restart policy is a sidecar: it keeps what it asks for.
        sidecars = [c for c in mappings(spec.get("initContainers")) if c.get("restartPolicy")]
        for container in (*mappings(spec.get("containers")), *sidecars):
            requests = mapping(container, "resources", "requests")
            cpu += amount(str(requests.get("cpu", "0")))
            memory += amount(str(requests.get("memory", "0")))
    return cpu, memory


def _name(kind: _Kind, kinds: Collection[_Kind]) -> str:
    """Names a pool: the name stays as long as other kinds of nodes do not come to it."""
    alike = [k for k in kinds if (k.label, k.value) == (kind.label, kind.value)]
    name = kind.value
    # A node group has its type in the name only once it has several, so that names in a file of
    # plans do not change without need.
    has_types = kind.label == _KARPENTER or len({k.instance_type for k in alike}) > 1
    if has_types and kind.instance_type and not kind.has_own_types:
        name = f"{name}-{kind.instance_type}"
    has_both = any(
        k.instance_type == kind.instance_type and k.is_spot != kind.is_spot for k in alike
    )
    return f"{name}-spot" if kind.is_spot and has_both else name


def _pool_of_kind(kind: _Kind, members: Sequence[_Node], *, named: str) -> ClusterPool:
    first = members[0].labels
    # A pool may mix types, and spot with other nodes. A plan counts on one kind, with its price and
    # speed, so its pods select exactly that.
    selector = {kind.label: kind.value}
    if kind.instance_type:
        selector[INSTANCE_TYPE] = kind.instance_type
    selector |= {label: first[label] for label in _SPOT if label in first}
    if first.get(_ARCHITECTURE, "amd64") != "amd64":
        # So that the pods' own checks know it: not every image runs there.
        selector[_ARCHITECTURE] = first[_ARCHITECTURE]
    memory = first.get(_GPU_MEMORY, "")
    return ClusterPool(
        name=named,
        nodes=tuple(sorted(node.name for node in members)),
        instance_type=kind.instance_type,
        is_spot=kind.is_spot,
        node_selector=selector,
        # What one node has besides the others' keeps pods from that node only.
        taints=tuple(sorted(set.intersection(*(node.taints() for node in members)))),
        cpu=min(node.allocatable("cpu") for node in members),
        memory=min(node.allocatable("memory") for node in members),
        gpus=int(min(node.allocatable(_GPU) for node in members)),
        gpu_model=next((first[label] for label in _GPU_MODELS if label in first), None),
        # The label of NVIDIA's device discovery counts MiB.
        gpu_memory=Decimal(memory) / 1024 if memory.isdigit() else None,
        zones=tuple(sorted({n.labels[_ZONE] for n in members if _ZONE in n.labels})),
        region=first.get(_REGION),
        architecture=first.get(_ARCHITECTURE),
    )


def _node(document: Document) -> _Node:
    metadata = mapping(document, "metadata")
    labels = {key: str(value) for key, value in mapping(metadata, "labels").items()}
    return _Node(name=str(metadata.get("name")), labels=labels, document=document)


def _is_ours(node: _Node) -> bool:
    if node.labels.get(_SYSTEM, "linux") != "linux":
        return False
    return not any(
        label in node.labels and value in (None, node.labels[label])
        for label, value in _NOT_OURS.items()
    )


def _problem(node: _Node) -> str:
    if mapping(node.document, "spec").get("unschedulable"):
        return "cordoned"
    conditions = mappings(mapping(node.document, "status").get("conditions"))
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)
    return "" if ready else "not ready"


def _is_passing(key: str) -> bool:
    return key.startswith(_PASSING_TAINTS) or key in _PASSING_KEYS


def _taint(taint: Document) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"
