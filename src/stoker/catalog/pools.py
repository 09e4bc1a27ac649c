"""The node pools of a cluster, from which plans on Kubernetes are made in place of instance types.

A pools file has the catalog's columns. It gives one pod's vCPUs, memory and GPUs: a whole node's,
less the share of daemons. Two more columns tell where the pods run:

| column | what it holds |
| --- | --- |
| node_selector | node labels, KEY=VALUE, space-separated; blank: the name is a type |
| taints | of the nodes, which its pods tolerate: KEY=VALUE:EFFECT or KEY:EFFECT, space-separated |
"""

import re
from collections.abc import Iterator
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
)
from stoker.environment import cloud_region
from stoker.records import NodePool, Workload, bare_type, read_text
from stoker.records.base import Document
from stoker.records.platforms import ObjectPatch, Patch, PlatformName, amount, lacks_arm_image

# Whose section of a workload the pools are in.
_OF_POOLS: PlatformName = "kubernetes"
_TAINT = re.compile(
    r"(?P<key>[^=:]+)(=(?P<value>[^:]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)"
)


def catalog_of(workload: Workload, prices: Path | None = None) -> Catalog:
    """Returns the instance types that plans for `workload` can be made of.

    On Kubernetes these are the node pools only, where the workload names some.

    Args:
        workload: Its platform, prices and pools.
        prices: A CSV file that goes before `constraints.prices_file`, the pools file and the
            catalog.

    Raises:
        UsageError: If a table is wrong.
    """
    catalog = load_catalog(workload.platform)
    info = workload.platform_info
    region = None
    if info.needs_training_enum:
        region = workload.sagemaker_region or cloud_region()
    texts = {"constraints.prices_file": workload.constraints.prices_file}
    if prices:
        texts[str(prices)] = read_text(prices)
    tables = [
        parse_table(text, platform=catalog.platform, source=source, region=region)
        for source, text in texts.items()
        if text is not None
    ]
    of_pools = _table(workload) if info.has_node_pools else None
    for table in filter(None, (of_pools, *tables)):
        catalog = extended(catalog, table)
    if of_pools and of_pools.has_prices and not (of_pools.region or tables):
        # A column of plain prices does not say of which region they are.
        catalog = replace(catalog, region=None)
    if info.has_node_pools:
        return _of_pools(workload, catalog)
    is_elsewhere = region is not None and catalog.region not in (None, region)
    return replace(catalog, hosts_region=region) if is_elsewhere else catalog


def _of_pools(workload: Workload, catalog: Catalog) -> Catalog:
    """Returns the node pools that a workload names, with the catalog's prices; else the catalog."""
    settings = with_pools(workload).kubernetes_settings
    if not settings.pools:
        return catalog
    instances = []
    for given, pool in settings.pools.items():
        name = bare_type(given.strip())
        instance = catalog.find(name)
        if pool.cpu is not None:
            # Whole vCPUs, as instance types have: 3.9 are three that a worker can keep busy.
            cpu = max(1, floor(amount(str(pool.cpu))))
            instance = replace(instance or Instance(type=name, family=name, vcpus=cpu), vcpus=cpu)
        if instance is None:
            # Its vCPUs are not known.
            continue
        if pool.gpus is not None:
            instance = replace(instance, accelerators=pool.gpus)
        if not instance.accelerators and lacks_arm_image(settings, name):
            why = f"{name} is arm64, and kubernetes.data.image names no image for it"
            instance = replace(instance, barred=why)
        instances.append(instance)
    # Today's hosts need a price and a speed to be compared with.
    today = catalog.find(workload.todays_type)
    if today and today.type not in {instance.type for instance in instances}:
        instances.append(today)
    return replace(catalog, instances=instances, added_by="kubernetes.pools_file")


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


def _table(workload: Workload) -> Table | None:
    text = workload.kubernetes_settings.pools_file
    if text is None:
        return None
    return parse_table(text, platform=_OF_POOLS, source="kubernetes.pools_file")


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
        match = _TAINT.fullmatch(word)
        if match is None:
            raise row.error("taints", f"expected KEY=VALUE:EFFECT or KEY:EFFECT, found {word!r}")
        key, value, effect = match["key"], match["value"], match["effect"]
        operator: Document = {} if value is None else {"operator": "Equal", "value": value}
        yield {"key": key, "operator": "Exists", "effect": effect, **operator}
