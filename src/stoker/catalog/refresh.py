"""The shipped table is refreshed with today's prices, and so is a cluster's pools file.

These functions read what AWS answered; `stoker.cli.catalog` asks.
"""

import csv
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from importlib import resources
from math import floor

from stoker.catalog.catalog import Catalog, Instance, Table
from stoker.catalog.pools import ClusterPool
from stoker.errors import UsageError
from stoker.records import Json, bare_type
from stoker.records.base import mapping

_GIB = 2**30
# What daemons ask of a node where that cannot be read: network, proxy, storage, logs, metrics.
ASSUMED_DAEMONS = (Decimal("0.5"), Decimal(_GIB))
_PLAIN_PRICE = "usd_per_hour"
# Filled in by hand: kept from an earlier file where the cluster does not say it.
_BY_HAND = ("family", "gpu_model", "network_gbps", "network_kind", "coremark_per_vcpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsTable:
    """A pools file lists the node pools of a cluster; here it is before it is written.

    Attributes:
        columns: Names of the columns, in order.
        rows: Cells by column; a pool each.
        notes: What is to be said of them, for people.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]

    def csv(self) -> str:
        """Returns the file's text."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def pools_table(
    pools: Sequence[ClusterPool],
    *,
    daemons: Mapping[str, tuple[Decimal, Decimal]],
    catalog: Catalog,
    earlier: Table | None = None,
    left_out: Sequence[str] = (),
) -> PoolsTable:
    """Returns the pools as a pools file holds them.

    Args:
        pools: Pools of the cluster.
        daemons: Cores and bytes that daemons ask of a node, by pool.
        catalog: Prices and speeds of machines.
        earlier: The file as it was: prices in it are kept.
        left_out: What is to be said of nodes that are in no pool.

    Raises:
        UsageError: If no pool has room for a pod.
    """
    machines = {pool.name: _machine(pool, catalog) for pool in pools}
    column = _price_column(machines.values(), catalog, earlier)
    kept = (
        {row.cells["instance_type"].strip(): row.cells for row in earlier.rows} if earlier else {}
    )
    rows: list[Mapping[str, str]] = []
    notes: list[str] = []
    for pool in pools:
        cpu, memory = daemons.get(pool.name, ASSUMED_DAEMONS)
        # Rounded down: a pod that asks for a core more than a node has free waits for ever.
        vcpus, gib = floor(pool.cpu - cpu), floor((pool.memory - memory) / _GIB)
        if vcpus < 1 or gib < 1:
            notes.append(f"{pool.name} left out: daemons leave no core or no GiB of its nodes")
            continue
        machine = machines[pool.name]
        row = _cells(pool, machine, vcpus=vcpus, gib=gib)
        # Under any other heading (of another region, say) the catalog's price would be untrue.
        if column in (_catalog_column(catalog), _PLAIN_PRICE):
            row |= _priced(pool, machine, column)
        notes += _keep(row, kept.get(pool.name, {}), column=column)
        notes += _notes(pool, machine, is_priced=bool(row.get(column)))
        rows.append(row)
    # A pool that is scaled to zero has no node to be seen by; an autoscaler brings it back.
    for name in sorted(set(kept) - {pool.name for pool in pools}):
        rows.append(kept[name])
        notes.append(f"{name} has no node now: its row is kept as it was")
    if not rows:
        raise UsageError(
            "no node pool was found: "
            + "; ".join([*left_out, *notes] or ["the cluster has no nodes"]),
            where="the cluster's nodes",
            fix="pools that were scaled to zero are not seen: start one node of each",
        )
    regions = {p.region for p in pools if p.region and machines[p.name]} - {catalog.region}
    if column == _catalog_column(catalog) and regions:
        notes.append(
            f"prices are those of {catalog.region}, and nodes are in {', '.join(sorted(regions))}: "
            f"rename the column {column}, and put your own in"
        )
    others = [c for c in earlier.columns if c not in _columns(column)] if earlier else []
    return PoolsTable(columns=(*_columns(column), *others), rows=tuple(rows), notes=tuple(notes))


def _catalog_column(catalog: Catalog) -> str:
    return f"ec2_usd_per_hour_{(catalog.region or '').replace('-', '_')}"


def _price_column(
    machines: Iterable[Instance | None], catalog: Catalog, earlier: Table | None
) -> str:
    """Returns the earlier file's price column, else the catalog's with its region if priced."""
    if earlier and earlier.price_column:
        return earlier.price_column
    is_priced = any(machine and machine.usd_per_hour for machine in machines)
    return _catalog_column(catalog) if is_priced and catalog.region else _PLAIN_PRICE


def _priced(pool: ClusterPool, machine: Instance | None, column: str) -> dict[str, str]:
    # The catalog has on-demand prices only.
    if machine is None or machine.usd_per_hour is None or pool.is_spot:
        return {}
    return {column: f"{machine.usd_per_hour:g}", "priced_on": str(machine.priced_on or "")}


def _columns(price: str) -> tuple[str, ...]:
    return (
        "instance_type",
        "family",
        "vcpus",
        "memory_gib",
        "gpus",
        "gpu_model",
        "gpu_memory_gib_each",
        "network_gbps",
        "network_kind",
        "coremark_per_vcpu",
        price,
        "priced_on",
        "node_selector",
        "taints",
        "source",
    )


def _machine(pool: ClusterPool, catalog: Catalog) -> Instance | None:
    if pool.instance_type is None:
        return None
    return next((i for i in catalog.instances if i.type == pool.instance_type), None)


def _cells(pool: ClusterPool, machine: Instance | None, *, vcpus: int, gib: int) -> dict[str, str]:
    model = machine.accelerator_model if machine and machine.accelerators else pool.gpu_model
    gpu_memory = machine.accelerator_memory_gib if machine else pool.gpu_memory
    row = {
        "instance_type": pool.name,
        "vcpus": str(vcpus),
        "memory_gib": str(gib),
        "gpus": str(pool.gpus),
        "gpu_model": (model or "") if pool.gpus else "",
        "gpu_memory_gib_each": f"{gpu_memory:g}" if gpu_memory and pool.gpus else "",
        "node_selector": " ".join(f"{k}={v}" for k, v in pool.node_selector.items()),
        "taints": " ".join(pool.taints),
        "source": _source(pool),
    }
    if machine:
        row["family"] = machine.family
        if machine.network_gbps:
            row["network_gbps"] = f"{machine.network_gbps:g}"
            row["network_kind"] = "up_to" if machine.is_burst_network else "sustained"
        if machine.coremark_per_vcpu:
            row["coremark_per_vcpu"] = f"{machine.coremark_per_vcpu:g}"
    return row


def _source(pool: ClusterPool) -> str:
    count = len(pool.nodes)
    words = [f"{count} node{'s' if count > 1 else ''}", pool.instance_type, *pool.zones]
    words.append("spot" if pool.is_spot else None)
    return " ".join(word for word in words if word)


def _keep(row: dict[str, str], kept: Mapping[str, str], *, column: str) -> list[str]:
    """Fills the row from an earlier file; returns remarks on what was kept."""
    for name in _BY_HAND:
        if not row.get(name) and kept.get(name, "").strip():
            row[name] = kept[name].strip()
    # A price that somebody put in goes before the list's: he may have a discount.
    price = kept.get(column, "").strip()
    if not price or price == row.get(column):
        return []
    row[column], row["priced_on"] = price, kept.get("priced_on", "").strip()
    return [f"{row['instance_type']}: its price of the earlier file is kept, {price} $ an hour"]


def _notes(pool: ClusterPool, machine: Instance | None, *, is_priced: bool) -> list[str]:
    notes = []
    if not is_priced:
        why = f"nothing is known of {pool.instance_type or 'its nodes'}"
        if pool.is_spot:
            why = "its nodes are spot, whose price changes"
            if machine and machine.usd_per_hour:
                why += f" (on demand: {machine.usd_per_hour:g} $ an hour)"
        notes.append(f"{pool.name} has no price, so plans leave it out: {why}; put it in")
    if machine and machine.accelerators and not pool.gpus:
        notes.append(
            f"{pool.name} offers none of the {machine.accelerators} GPUs of a {machine.type}: "
            "does the device plugin run there?"
        )
    if pool.architecture == "arm64":
        notes.append(f"{pool.name} is arm64: name an image for it in kubernetes.data.image")
    if pool.gpus and (pool.gpu_model or "").endswith("-SHARED"):
        notes.append(f"{pool.name} shares its GPUs among pods: predictions do not hold there")
    return notes


# USE1-Train:ml.p4d.24xlarge; spot, reserved and cluster hours have other words before the colon.
_TRAINING = re.compile(r"^(?:[A-Z0-9]+-)?Train:(?P<type>ml\.[a-z0-9-]+\.[a-z0-9-]+)$")
_ON_DEMAND: Mapping[str, str] = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
}
_HOURS = ("hrs", "hr", "hours", "hour")
_NETWORK = re.compile(
    r"^(?P<burst>Up to )?(?:(?P<cards>\d+)x )?(?P<gbps>\d+(?:\.\d+)?) (?P<unit>Giga|Mega)bit$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """The price list gives dollars per hour by instance type, spelt without `ml.`.

    Attributes:
        usd: One price each.
        unclear: Types that the list has several prices of.
    """

    usd: Mapping[str, str]
    unclear: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Describes a type as EC2 does; None where it does not say."""

    vcpus: int | None = None
    cores: int | None = None
    memory_gib: float | None = None
    accelerators: int | None = None
    network_gbps: float | None = None
    is_burst_network: bool = False


def training_filters(region: str) -> list[dict[str, str]]:
    """Filters of GetProducts for AmazonSageMaker."""
    return _filters({"regionCode": region, "component": "Training"})


def ec2_filters(region: str) -> list[dict[str, str]]:
    """Filters of GetProducts for AmazonEC2: on demand, Linux, nothing installed."""
    return _filters({"regionCode": region, **_ON_DEMAND})


def training_prices(products: Iterable[Json], *, region: str) -> Priced:
    """Returns the prices of SageMaker training hours in an answer of GetProducts.

    Args:
        products: Items of PriceList: JSON, as text or parsed.
        region: Others' products are left out.
    """
    found: dict[str, set[str]] = {}
    for attributes, prices in _products(products, region):
        match = _TRAINING.match(str(attributes.get("usagetype", "")))
        if match:
            found.setdefault(bare_type(match.group("type")), set()).update(prices)
    return _priced_of(found)


def ec2_prices(products: Iterable[Json], *, region: str) -> Priced:
    """Returns the prices of EC2's on-demand Linux hours in an answer of GetProducts."""
    found: dict[str, set[str]] = {}
    for attributes, prices in _products(products, region):
        kind = attributes.get("instanceType")
        # Capacity blocks are sold on another market, at another price, under the same type.
        is_on_demand = attributes.get("marketoption", "OnDemand") == "OnDemand"
        is_plain = all(attributes.get(key) == value for key, value in _ON_DEMAND.items())
        if isinstance(kind, str) and is_on_demand and is_plain:
            found.setdefault(kind, set()).update(prices)
    return _priced_of(found)


def machines(described: Iterable[Mapping[str, Json]]) -> Mapping[str, Machine]:
    """Returns EC2's types by name, from an answer of DescribeInstanceTypes."""
    return {
        str(item["InstanceType"]): _machine_of(item)
        for item in described
        if item.get("InstanceType")
    }


def _machine_of(item: Mapping[str, Json]) -> Machine:
    vcpus, memory = mapping(item.get("VCpuInfo")), mapping(item.get("MemoryInfo"))
    mebibytes = memory.get("SizeInMiB")
    gbps, is_burst = _network(mapping(item.get("NetworkInfo")).get("NetworkPerformance"))
    return Machine(
        vcpus=_whole(vcpus.get("DefaultVCpus")),
        cores=_whole(vcpus.get("DefaultCores")),
        memory_gib=mebibytes / 1024 if isinstance(mebibytes, int) and mebibytes > 0 else None,
        accelerators=_accelerators(item),
        network_gbps=gbps,
        is_burst_network=is_burst,
    )


def _accelerators(item: Mapping[str, Json]) -> int | None:
    for holder, key in (("GpuInfo", "Gpus"), ("NeuronInfo", "NeuronDevices")):
        listed = mapping(item.get(holder)).get(key)
        if isinstance(listed, list):
            counts = [_whole(mapping(one).get("Count")) or 0 for one in listed]
            # A part of a GPU counts as none here: leave such types as they were.
            return sum(counts) or None
    return None


def _network(words: Json) -> tuple[float | None, bool]:
    match = _NETWORK.match(words) if isinstance(words, str) else None
    if match is None:
        return None, False
    # "4x 100 Gigabit" of a p4d: four network cards, 400 Gbit/s together.
    gbps = float(match.group("gbps")) * int(match.group("cards") or 1)
    return gbps / (1000 if match.group("unit") == "Mega" else 1), bool(match.group("burst"))


def _filters(fields: Mapping[str, str]) -> list[dict[str, str]]:
    return [
        {"Type": "TERM_MATCH", "Field": field, "Value": value} for field, value in fields.items()
    ]


def _products(
    products: Iterable[Json], region: str
) -> Iterator[tuple[Mapping[str, Json], set[str]]]:
    """Yields the attributes and hourly prices of each product of the region."""
    for product in products:
        document = _parsed(product)
        attributes = mapping(mapping(document.get("product")).get("attributes"))
        if attributes.get("regionCode", region) == region:
            yield attributes, set(_hourly(document))


def _hourly(document: Mapping[str, Json]) -> Iterator[str]:
    terms = mapping(mapping(document.get("terms")).get("OnDemand"))
    for term in terms.values():
        for dimension in mapping(mapping(term).get("priceDimensions")).values():
            price = mapping(dimension)
            usd = mapping(price.get("pricePerUnit")).get("USD")
            is_hourly = str(price.get("unit", "")).lower() in _HOURS
            if is_hourly and isinstance(usd, str) and _is_price(usd):
                yield _plain(usd)


def _parsed(product: Json) -> Mapping[str, Json]:
    if not isinstance(product, str):
        return mapping(product)
    try:
        document: Json = json.loads(product)
    except ValueError:
        return {}
    return mapping(document)


def _priced_of(found: Mapping[str, set[str]]) -> Priced:
    return Priced(
        # Of several prices none is taken: a price is never guessed.
        usd={kind: next(iter(prices)) for kind, prices in found.items() if len(prices) == 1},
        unclear=tuple(sorted(kind for kind, prices in found.items() if len(prices) > 1)),
    )


def _is_price(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    # Products of 0 $ are free tiers and capacity that is paid elsewhere.
    return math.isfinite(value) and 0 < value < 1e6


def _plain(usd: str) -> str:
    """Writes `3.0600000000` as `3.06`: the same price, however it is written."""
    return f"{float(usd):.10f}".rstrip("0").rstrip(".")


def _whole(value: Json) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


SHIPPED = "aws_training_instances.csv"
SHIPPED_REGION = "us-east-1"
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedTable:
    """A renewed table has today's types and prices, and says what was not found or has changed.

    Attributes:
        columns: Names of the columns, in order.
        rows: Cells by column.
        notes: What was not found or has changed, for people.
        priced: Types with a price of today, on SageMaker and on EC2.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]
    priced: tuple[int, int]

    def csv(self) -> str:
        """Returns the file's text."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def shipped_text() -> str:
    """Returns the table that comes with stoker."""
    return resources.files("stoker.catalog").joinpath(SHIPPED).read_text(encoding="utf-8")


def shipped_types() -> tuple[str, ...]:
    """Returns the shipped table's types, spelt without `ml.`."""
    rows = csv.DictReader(io.StringIO(shipped_text()))
    return tuple(bare_type(row["instance_type"]) for row in rows)


def renewed(
    text: str,
    *,
    region: str,
    training: Priced,
    ec2: Priced,
    described: Mapping[str, Machine],
    trainable: Collection[str],
    today: date,
) -> RenewedTable:
    """Returns the table with what AWS says today.

    A price that is not found stays with its date, or, where the table is of another region, is left
    blank: a price is never guessed.

    Args:
        text: The table's CSV, of SHIPPED_REGION.
        region: Region of the prices.
        training: SageMaker's.
        ec2: EC2's.
        described: EC2's types; empty: figures stay as they are.
        trainable: Types that a training job takes, with `ml.`.
        today: Date of the prices.
    """
    lines = csv.DictReader(io.StringIO(text))
    old_columns = tuple(lines.fieldnames or ())
    names = {name: _column(name, region) for name in old_columns}
    sagemaker, on_ec2 = _column(_SAGEMAKER, region), _column(_EC2, region)
    keeps = region == SHIPPED_REGION
    seen = _Remarks()
    rows = []
    for line in lines:
        row = {names[name]: cell for name, cell in line.items()}
        kind = bare_type(row["instance_type"])
        # `SM:price-api-...; EC2:...`: the source of each price, by its payer.
        parts = {part.split(":")[0]: part for part in map(str.strip, row["source"].split(";"))}
        has_training = _reprice(row, sagemaker, training.usd.get(kind), keeps=keeps)
        has_ec2 = _reprice(row, on_ec2, ec2.usd.get(kind), keeps=keeps)
        stamp = f"price-api-{today.isoformat()}"
        for label, is_new, column in (("SM", has_training, sagemaker), ("EC2", has_ec2, on_ec2)):
            if is_new:
                parts[label] = f"{label}:{stamp}"
            # No price any more, so no source of one.
            elif not row[column]:
                parts.pop(label, None)
        # The date is that of SageMaker's price, of EC2's only where there is no other.
        if has_training or (not row[sagemaker] and has_ec2):
            row["priced_on"] = today.isoformat()
        elif not row[sagemaker] and not row[on_ec2]:
            row["priced_on"] = ""
        row["source"] = "; ".join(parts.values())
        if described:
            seen.changed += _refigure(row, described.get(kind))
        row["in_training_enum"] = "yes" if f"ml.{kind}" in trainable else "no"
        seen.count(
            kind,
            row,
            has_training=has_training,
            has_ec2=has_ec2,
            is_described=kind in described,
        )
        rows.append(row)
    notes = seen.notes(region=region, keeps=keeps, is_described=bool(described))
    unclear = sorted({*training.unclear, *ec2.unclear} & {*seen.kinds})
    if unclear:
        notes.append(f"several prices are listed, and none is taken, of {_named(unclear)}")
    more = sorted(
        kind for kind in training.usd if kind not in seen.kinds and f"ml.{kind}" in trainable
    )
    if more:
        notes.append(
            f"AWS trains on {len(more)} more types, whose CPU speed is not known here: "
            f"{_named(more)}; add those you want with --prices"
        )
    return RenewedTable(
        columns=tuple(names.values()),
        rows=tuple(rows),
        notes=tuple(notes),
        priced=(len(seen.training), len(seen.ec2)),
    )


_SAGEMAKER = "sagemaker_usd_per_hour_us_east_1"
_EC2 = "ec2_usd_per_hour_us_east_1"


class _Remarks:
    """Holds the remarks that are made of all rows together."""

    def __init__(self) -> None:
        self.kinds: list[str] = []
        self.training: list[str] = []
        self.ec2: list[str] = []
        self.old: dict[str, list[str]] = {}
        self.blank: list[str] = []
        self.absent: list[str] = []
        self.changed: list[str] = []

    def count(
        self,
        kind: str,
        row: Mapping[str, str],
        *,
        has_training: bool,
        has_ec2: bool,
        is_described: bool,
    ) -> None:
        self.kinds.append(kind)
        if has_training:
            self.training.append(kind)
        elif row[_found(row, "sagemaker_usd_per_hour_")]:
            self.old.setdefault(row["priced_on"] or "unknown date", []).append(kind)
        elif row["in_training_enum"] == "yes":
            self.blank.append(kind)
        if has_ec2:
            self.ec2.append(kind)
        if not is_described:
            self.absent.append(kind)

    def notes(self, *, region: str, keeps: bool, is_described: bool) -> list[str]:
        notes = [
            f"no training price in the list: that of {when} is kept, of {_named(kinds)}"
            for when, kinds in sorted(self.old.items())
        ]
        if self.blank:
            notes.append(
                f"no training price, and no part of plans: {_named(self.blank)}"
                + ("" if keeps else f"; other regions' prices are not taken for {region}'s")
            )
        lacking = [kind for kind in self.kinds if kind not in self.ec2]
        if lacking:
            kept = "it stays as it was" if keeps else "it is left blank"
            notes.append(f"no EC2 price in the list: {kept}, of {_named(lacking)}")
        if is_described and self.absent:
            notes.append(f"EC2 has none of these in {region}: {_named(self.absent)}")
        return notes + self.changed


def _found(row: Mapping[str, str], head: str) -> str:
    # Not the prices of 2022 to 2024, which are there to reproduce published results.
    return next(name for name in row if name.startswith(head) and not name.endswith("_2024"))


def _column(name: str, region: str) -> str:
    if name not in (_SAGEMAKER, _EC2):
        return name
    return name.replace("us_east_1", region.replace("-", "_"))


def _reprice(row: dict[str, str], column: str, usd: str | None, *, keeps: bool) -> bool:
    """Sets the price; returns whether there is one of today."""
    if usd is not None:
        row[column] = usd
    elif not keeps:
        row[column] = ""
    return usd is not None


def _refigure(row: dict[str, str], machine: Machine | None) -> list[str]:
    """Sets EC2's figures; returns remarks on those that have changed."""
    if machine is None:
        return []
    network = machine.network_gbps is not None
    new = {
        "vcpus": machine.vcpus,
        "physical_cores": machine.cores,
        "memory_gib": machine.memory_gib,
        "gpus": machine.accelerators,
        "network_gbps": machine.network_gbps,
    }
    changed = [
        f"{name} {row[name] or 'unknown'} is {value:g}"
        for name, value in new.items()
        if value is not None and (not row[name].strip() or float(row[name]) != value)
    ]
    row |= {name: f"{value:g}" for name, value in new.items() if value is not None}
    if network:
        row["network_kind"] = "up_to" if machine.is_burst_network else "sustained"
    return [f"{row['instance_type']}: {', '.join(changed)}"] if changed else []


def _named(kinds: list[str]) -> str:
    shown = ", ".join(kinds[:_MOST_NAMED])
    more = len(kinds) - _MOST_NAMED
    return f"{shown} and {more} more" if more > 0 else shown
