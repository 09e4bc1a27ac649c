"""What the workload says of one group's pods, by its role and by its node pool."""

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.records import Group, Json, KubernetesSettings, PodSettings, bare_type
from stoker.records.base import Document, mapping, mappings
from stoker.records.platforms import NodePool, amount, lacks_arm_image

NO_GPUS = "the data group has no GPUs: it makes batches for the dnn group"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """What the workload says of one group's pods: the keys of its role and of its node pool.

    Attributes:
        pods: The keys of the role.
        pool_name: Key of the pool in `kubernetes.pools`.
        node_type: The instance type, as clouds label their nodes with it.
        patches: Patches of the pods by their key in the workload, the pool's first.
        disk_bytes: What the pod's volumes may take of its node's disk; None: not known.
        lacks_arm_image: Whether the nodes are arm64, and the image is the dnn hosts'.
    """

    group: Group
    pods: PodSettings
    pool_name: str
    pool: NodePool
    node_type: str
    patches: Mapping[str, Document]
    disk_bytes: int | None
    lacks_arm_image: bool


def group_settings(group: Group, settings: KubernetesSettings) -> GroupSettings:
    """Returns what the settings say of a group's pods; refuses nothing."""
    is_dnn = group.role == "dnn"
    pods = settings.dnn if is_dnn else settings.data
    pool_name, pool = settings.pool_of(group.instance_type)
    patches = {
        f"kubernetes.pools.{pool_name}.pod": pool.pod.document,
        f"kubernetes.{group.role}.pod": pods.pod.document,
    }
    on_node: list[Json] = [] if settings.output and is_dnn else [settings.scratch]
    for patch in patches.values():
        for volume in mappings(patch, "spec", "volumes"):
            folder = mapping(volume, "emptyDir")
            if folder.get("medium") != "Memory":
                on_node.append(folder.get("sizeLimit"))
    sizes = [amount(str(size)) for size in on_node if size is not None]
    return GroupSettings(
        group=group,
        pods=pods,
        pool_name=pool_name,
        pool=pool,
        node_type=bare_type(group.instance_type),
        patches=patches,
        disk_bytes=int(sum(sizes)) if sizes else None,
        lacks_arm_image=lacks_arm_image(settings, group.instance_type),
    )
