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
from functools import partial
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
from stoker.records import KubernetesSettings, NodePool, Workload, bare_type, read_text
from stoker.records.base import Document
from stoker.records.platforms import ObjectPatch, Patch, PlatformName, amount, lacks_arm_image
from stoker.workload_file import job_region

# Whose section of a workload the pools are in.
_OF_POOLS: PlatformName = "kubernetes"
_SOURCE = "kubernetes.pools_file"
_PRICES = "constraints.prices_file"
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
        prices: A CSV file that goes before `constraints.prices_file`, the pools file and the
            catalog.
        is_service_type: Whether SageMaker trains on a type; asked where the catalog lacks it.

    Raises:
        UsageError: If a table is wrong.
    """
    settings = workload.kubernetes
    has_pools = settings is not None and bool(settings.pools or settings.pools_file)
    if has_pools and workload.platform_info.has_node_pools:
        return _catalog_of_pools(workload, prices)
    region = job_region(workload)
    catalog = _priced(load_catalog(workload.platform), workload, prices=prices, region=region)
    if not catalog.info.needs_training_enum:
        return catalog
    make = partial(_of_service, is_service_type, workload.platform)
    return catalog.for_hosts_in(region).with_names(make)


def _catalog_of_pools(workload: Workload, prices: Path | None) -> Catalog:
    """Returns the node pools that a workload names, with their prices."""
    settings = workload.kubernetes_settings
    catalog = load_catalog(workload.platform)
    names: list[str] = []
    is_plain = False
    if table := _table(settings):
        catalog = extended(catalog, table)
        names = [_bare(row.cells["instance_type"]) for row in table.rows]
        # A column of plain prices does not say of which region they are.
        is_plain = table.price_column is not None and table.region is None
    catalog = _priced(catalog, workload, prices=prices, region=job_region(workload))
    by_type = {instance.type: instance for instance in catalog.instances}
    pools = {_bare(name): pool for name, pool in settings.pools.items()}
    merged = with_pools(workload).kubernetes_settings
    instances = []
    for name in dict.fromkeys([*names, *pools]):
        instance = _instance(name, by_type.get(name), pools.get(name))
        if instance is not None:
            instances.append(_barred(instance, merged))
    region = catalog.region
    if is_plain and not (prices or workload.constraints.prices_file):
        region = None
    today = _bare(workload.todays_type)

    def make_todays_type(name: str) -> Instance | None:
        # Not proposed, but today's hosts need a price and a speed to be compared with.
        if _bare(name) == today:
            return by_type.get(name)
        return None

    return replace(
        catalog,
        instances=instances,
        region=region,
        make=make_todays_type,
        added_by="kubernetes.pools_file",
        has_pools=True,
    )


def _priced(
    catalog: Catalog, workload: Workload, *, prices: Path | None, region: str | None
) -> Catalog:
    """Returns the catalog with the workload's prices, then with those of the file `prices`."""
    texts = {_PRICES: workload.constraints.prices_file}
    if prices:
        texts[str(prices)] = read_text(prices)
    for source, text in texts.items():
        if text is not None:
            table = parse_table(text, platform=catalog.platform, source=source, region=region)
            catalog = extended(catalog, table)
    return catalog


def _of_service(
    is_service_type: Callable[[str], bool], platform: PlatformName, name: str
) -> Instance | None:
    """Returns a type that the service has and the catalog lacks."""
    instance = unknown_instance(name, platform=platform)
    if is_service_type(instance.type):
        return instance
    return None


def with_pools(workload: Workload) -> Workload:
    """Returns the workload whose `kubernetes.pools` holds the pools of its pools file, too.

    The file does not override a pool that `kubernetes.pools` describes itself. Raises UsageError
    if it is wrong, with line and column.
    """
    settings = workload.kubernetes_settings
    table = _table(settings)
    if table is None:
        return workload
    catalog = extended(load_catalog(_OF_POOLS), table)
    pools = dict(settings.pools)
    for row in table.rows:
        name = _bare(row.cells["instance_type"])
        pools[name] = _merged(_pool(row, catalog.get(name)), pools.get(name))
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
    return msgspec.structs.replace(
        workload,
        constraints=msgspec.structs.replace(workload.constraints, prices_file=short_table(text)),
    )


def _table(settings: KubernetesSettings) -> Table | None:
    text = settings.pools_file
    if text is not None:
        return parse_table(text, platform=_OF_POOLS, source=_SOURCE)
    return None


def _bare(name: str) -> str:
    return bare_type(name.strip())


def _instance(name: str, listed: Instance | None, pool: NodePool | None) -> Instance | None:
    """Returns the pool as plans see it; None where its vCPUs are not known."""
    if pool is None:
        return listed
    instance = listed
    if pool.cpu is not None:
        # Whole vCPUs, as instance types have: 3.9 are three that a worker can keep busy.
        cpu = floor(amount(str(pool.cpu)))
        if instance is None and cpu:
            instance = Instance(type=name, family=name, vcpus=cpu)
        if instance is not None:
            instance = replace(instance, vcpus=max(1, cpu))
    if instance is not None and pool.gpus is not None:
        instance = replace(instance, accelerators=pool.gpus)
    return instance


def _barred(instance: Instance, settings: KubernetesSettings) -> Instance:
    if instance.accelerators or not lacks_arm_image(settings, instance.type):
        return instance
    why = f"{instance.type} is arm64, and kubernetes.data.image names no image for it"
    return replace(instance, barred=why)


def _pool(row: Row, instance: Instance) -> NodePool:
    def is_said(column: str) -> bool:
        return bool(row.cells.get(column, "").strip())

    # Without labels the pool's name is a type, by whose label its nodes are found.
    spec: Patch = {"nodeSelector": dict(_labels(row)), "tolerations": list(_tolerations(row))}
    return NodePool(
        pod=ObjectPatch(spec={key: value for key, value in spec.items() if value}),
        cpu=instance.vcpus if is_said("vcpus") else None,
        memory=f"{row.cells['memory_gib'].strip()}Gi" if is_said("memory_gib") else None,
        gpus=instance.accelerators if "gpus" in row.cells else None,
    )


def _merged(pool: NodePool, own: NodePool | None) -> NodePool:
    """Returns a pool of the file with what the workload says of it; that goes first."""
    if own is None:
        return pool
    return NodePool(
        pod=ObjectPatch(metadata=own.pod.metadata, spec={**pool.pod.spec, **own.pod.spec}),
        # What the workload leaves at the default is not said there: the file's stays.
        cpu=pool.cpu if own.cpu is None else own.cpu,
        memory=pool.memory if own.memory is None else own.memory,
        gpus=pool.gpus if own.gpus is None else own.gpus,
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
        if equals:
            yield {"key": key, "operator": "Equal", "value": value, "effect": effect}
        else:
            yield {"key": key, "operator": "Exists", "effect": effect}
