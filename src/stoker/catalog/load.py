"""Loading a catalog: the package's table or the local types, and the user's prices."""

import os
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from stoker.catalog.instances import Catalog, Instance
from stoker.catalog.table import Table, parse_table, platform_name, to_instance
from stoker.errors import UsageError
from stoker.records import PlatformName, nearest, read_text

# Nominal: it lets local plans be compared in money, nobody is billed it. Near what a vCPU costs.
LOCAL_USD_PER_CORE_HOUR = 0.05
# Loopback carries more than any plan here needs; the receive CPU limits first.
_LOOPBACK_GBPS = 20.0
_PLATFORMS: Mapping[str, PlatformName] = MappingProxyType(
    {"local": "local", "sagemaker": "sagemaker", "kubernetes": "kubernetes"}
)
_LOCAL = re.compile(r"^local\.c([1-9]\d{0,3})$")


def load_catalog(platform: str, prices: Path | None = None, *, cores: int | None = None) -> Catalog:
    """The instance types a plan on `platform` can be made of.

    Args:
        platform: SageMaker pays its own prices, Kubernetes those of EC2, local hosts nominal ones.
        prices: CSV file whose rows extend the catalog or replace types of the same name; columns
            it does not have are kept from the catalog.
        cores: Cores of this machine (local only); absent: those this process may use.

    Raises:
        UsageError: If the platform is unknown, or the file is missing or wrong, with line and
            column.
    """
    if platform not in _PLATFORMS:
        raise UsageError(
            f"no platform is called {platform!r}", fix=nearest(platform, list(_PLATFORMS))
        )
    named = _PLATFORMS[platform]
    catalog = _local(cores) if named == "local" else _aws(named)
    if prices is None:
        return catalog
    table = parse_table(read_text(prices), platform=catalog.platform, source=str(prices))
    return extended(catalog, table)


def local_instance(instance_type: str) -> Instance | None:
    """The local type of that name (`local.cN`: N cores); None if it is no such name."""
    match = _LOCAL.match(instance_type)
    if match is None or int(match.group(1)) > 4096:
        return None
    cores = int(match.group(1))
    return Instance(
        type=instance_type,
        family="local",
        vcpus=cores,
        network_gbps=_LOOPBACK_GBPS,
        coremark_per_vcpu=1.0,
        usd_per_hour=round(cores * LOCAL_USD_PER_CORE_HOUR, 6),
        in_training_enum=False,
    )


def _local(cores: int | None) -> Catalog:
    available = cores if cores is not None else _cores()
    made = (local_instance(f"local.c{number}") for number in range(1, available + 1))
    return Catalog(
        platform="local",
        instances=[instance for instance in made if instance is not None],
        source=f"nominal: {LOCAL_USD_PER_CORE_HOUR} $ a core and hour, billed by nobody",
        purchase="nominal",
        max_total_vcpus=available,
        make=local_instance,
    )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _aws(platform: PlatformName) -> Catalog:
    name = "aws_training_instances.csv"
    text = resources.files("stoker.catalog").joinpath(name).read_text(encoding="utf-8")
    table = parse_table(text, platform=platform, source=name)
    return Catalog(
        platform=platform,
        instances=[to_instance(row, table, platform=platform, base=None) for row in table.rows],
        source="AWS price list, SageMaker training"
        if platform == "sagemaker"
        else "AWS price list, EC2 Linux",
        region=table.region,
    )


def extended(catalog: Catalog, table: Table) -> Catalog:
    """The catalog with the table's rows added, or in place of types of the same name.

    Raises:
        UsageError: If a row is wrong, with line and column.
    """
    platform = catalog.platform
    instances = {instance.type: instance for instance in catalog.instances}
    for row in table.rows:
        name = platform_name(row.cells["instance_type"].strip(), platform)
        base = instances.get(name)
        if base is None and platform == "local":
            base = local_instance(name)
        instances[name] = to_instance(row, table, platform=platform, base=base)
    has_prices = table.price_column is not None
    return Catalog(
        platform=platform,
        instances=instances.values(),
        source=f"{table.source}, else {catalog.source}" if has_prices else catalog.source,
        region=table.region or catalog.region,
        purchase="as in the price file" if has_prices else catalog.purchase,
        max_total_vcpus=catalog.max_total_vcpus,
        make=local_instance if platform == "local" else None,
    )
