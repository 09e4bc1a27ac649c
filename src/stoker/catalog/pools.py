"""The node pools of a cluster, from which plans on Kubernetes are made in place of instance types.

A pools file has the catalog's columns. It gives one pod's vCPUs, memory and GPUs: a whole node's,
less the share of daemons. Two more columns tell where the pods run:

| column | what it holds |
| --- | --- |
| node_selector | node labels, KEY=VALUE, space-separated; blank: the name is a type |
| taints | of the nodes, which its pods tolerate: KEY=VALUE:EFFECT or KEY:EFFECT, space-separated |
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import floor
from pathlib import Path

import msgspec

from stoker.catalog.catalog import (
    Catalog,
    Instance,
    Row,
    Table,
    extended,
    load_catalog,
    parse_table,
    short_table,
    unknown_instance,
)
from stoker.environment import cloud_region
from stoker.records import KubernetesSettings, NodePool, Workload, bare_type, read_text
from stoker.records.base import Document
from stoker.records.platforms import ObjectPatch, Patch, PlatformName, amount, lacks_arm_image

# Whose section of a workload the pools are in.
_OF_POOLS: PlatformName = "kubernetes"
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def catalog_of(
    workload: Workload,
    prices: Path | None = None,
    *,
    is_service_type: Callable[[str], bool] = lambda name: False,
) -> Catalog:
    """Returns the instance types that plans for `workload` can be made of.

    On Kubernetes these are the node pools only, where the workload names some.

    Args:
        workload: Its platform, prices and pools.
        prices: A CSV file that goes before `constraints.prices_file`, the pools file and the
            catalog.
        is_service_type: Whether SageMaker trains on a type; asked where the catalog lacks it.

    Raises:
        UsageError: If a table is wrong.
    """
    catalog = load_catalog(workload.platform)
    region = None
    if workload.platform_info.needs_training_enum:
        region = workload.sagemaker_region or cloud_region()
    settings = workload.kubernetes
    has_pools = settings is not None and bool(settings.pools or settings.pools_file)
    is_of_pools = has_pools and workload.platform_info.has_node_pools
    table = _table(workload) if is_of_pools else None
    if table:
        catalog = extended(catalog, table)
    texts = {"constraints.prices_file": workload.constraints.prices_file}
    if prices:
        texts[str(prices)] = read_text(prices)
    for source, text in texts.items():
        if text is not None:
            priced = parse_table(text, platform=catalog.platform, source=source, region=region)
            catalog = extended(catalog, priced)
    if is_of_pools:
        return _of_pools(workload, catalog, table, has_own_prices=any(texts.values()))
    if not catalog.info.needs_training_enum:
        return catalog

    def of_service(name: str) -> Instance | None:
        instance = unknown_instance(name, platform=workload.platform)
        return instance if is_service_type(instance.type) else None

    is_elsewhere = region is not None and catalog.region not in (None, region)
    return replace(catalog, make=of_service, hosts_region=region if is_elsewhere else None)


def _of_pools(
    workload: Workload, catalog: Catalog, table: Table | None, *, has_own_prices: bool
) -> Catalog:
    """Returns the node pools that a workload names, with the catalog's prices."""
    settings = workload.kubernetes_settings
    pools = {_bare(name): pool for name, pool in settings.pools.items()}
    merged = with_pools(workload).kubernetes_settings
    instances = []
    for name in dict.fromkeys([*(table.rows if table else ()), *pools]):
        instance = _instance(name, catalog.find(name), pools.get(name))
        if instance is not None:
            instances.append(_barred(instance, merged))
    today = _bare(workload.todays_type)
    # A column of plain prices does not say of which region they are.
    is_plain = table is not None and table.has_prices and table.region is None
    return replace(
        catalog,
        instances=instances,
        region=None if is_plain and not has_own_prices else catalog.region,
        # Not proposed, but today's hosts need a price and a speed to be compared with.
        make=lambda name: catalog.find(name) if _bare(name) == today else None,
        added_by="kubernetes.pools_file",
        has_pools=True,
    )


def with_pools(workload: Workload) -> Workload:
    """Returns the workload whose `kubernetes.pools` holds the pools of its pools file, too.

    A pool of both is the workload's. Raises UsageError if the file is wrong, with line and column.
    """
    settings = workload.kubernetes_settings
    table = _table(workload)
    if table is None:
        return workload
    catalog = extended(load_catalog(_OF_POOLS), table)
    pools = {name: _pool(row, catalog.get(name)) for name, row in table.rows.items()}
    pools |= settings.pools
    return msgspec.structs.replace(
        workload, kubernetes=msgspec.structs.replace(settings, pools=pools)
    )


def with_short_prices(workload: Workload) -> Workload:
    """Returns the workload whose prices file has no columns that only repeat the catalog's.

    A pipeline passes the text on; a table of all types would be too long for Kubeflow.
    """
    text = workload.constraints.prices_file
    if text is None:
        return workload
    shorter = msgspec.structs.replace(workload.constraints, prices_file=short_table(text))
    return msgspec.structs.replace(workload, constraints=shorter)


def _table(workload: Workload) -> Table | None:
    text = workload.kubernetes_settings.pools_file
    if text is None:
        return None
    return parse_table(text, platform=_OF_POOLS, source="kubernetes.pools_file")


def _bare(name: str) -> str:
    return bare_type(name.strip())


def _instance(name: str, listed: Instance | None, pool: NodePool | None) -> Instance | None:
    """Returns the pool as plans see it; None where its vCPUs are not known."""
    instance = listed
    if pool is not None and pool.cpu is not None:
        # Whole vCPUs, as instance types have: 3.9 are three that a worker can keep busy.
        cpu = max(1, floor(amount(str(pool.cpu))))
        instance = replace(listed or Instance(type=name, family=name, vcpus=cpu), vcpus=cpu)
    if instance is not None and pool is not None and pool.gpus is not None:
        instance = replace(instance, accelerators=pool.gpus)
    return instance


def _barred(instance: Instance, settings: KubernetesSettings) -> Instance:
    if instance.accelerators or not lacks_arm_image(settings, instance.type):
        return instance
    why = f"{instance.type} is arm64, and kubernetes.data.image names no image for it"
    return replace(instance, barred=why)


def _pool(row: Row, instance: Instance) -> NodePool:
    # Without labels the pool's name is a type, by whose label its nodes are found.
    spec: Patch = {"nodeSelector": dict(_labels(row)), "tolerations": list(_tolerations(row))}
    memory = row.cells.get("memory_gib")
    return NodePool(
        pod=ObjectPatch(spec={key: value for key, value in spec.items() if value}),
        cpu=instance.vcpus if row.cells.get("vcpus") else None,
        memory=f"{memory}Gi" if memory else None,
        gpus=instance.accelerators if "gpus" in row.cells else None,
    )


def _labels(row: Row) -> Iterator[tuple[str, str]]:
    for word in row.cells.get("node_selector", "").split():
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise row.error("node_selector", f"expected KEY=VALUE, found {word!r}")
        yield key, value


def _tolerations(row: Row) -> Iterator[Document]:
    for word in row.cells.get("taints", "").split():
        label, _, effect = word.rpartition(":")
        key, equals, value = label.partition("=")
        if not key or effect not in _EFFECTS:
            raise row.error("taints", f"expected KEY=VALUE:EFFECT or KEY:EFFECT, found {word!r}")
        operator: Document = {"operator": "Equal", "value": value} if equals else {}
        yield {"key": key, "operator": "Exists", "effect": effect, **operator}
