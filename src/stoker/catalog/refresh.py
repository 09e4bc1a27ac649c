"""The pools file of a cluster: its nodes, with the prices that are known."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import floor

from stoker.catalog.instances import Catalog, Instance
from stoker.catalog.nodes import ClusterPool
from stoker.catalog.table import Table
from stoker.errors import UsageError

_GIB = 2**30
# What daemons ask of a node where that cannot be read: network, proxy, storage, logs, metrics.
ASSUMED_DAEMONS = (Decimal("0.5"), Decimal(_GIB))
_PLAIN_PRICE = "usd_per_hour"
# Kept of an earlier file where the cluster does not say it: filled in by hand.
_BY_HAND = ("family", "gpu_model", "network_gbps", "network_kind", "coremark_per_vcpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsTable:
    """A pools file.

    Attributes:
        columns: In order.
        rows: Cells by column; a pool each.
        notes: What is to be said of them, for people.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]

    def csv(self) -> str:
        """The file's text."""
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
) -> PoolsTable:
    """The pools as a pools file holds them.

    Args:
        pools: Of the cluster.
        daemons: Cores and bytes that daemons ask of a node, by pool.
        catalog: Prices and speeds of machines.
        earlier: The file as it was: prices that stand there are kept.

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
        vcpus, gib = floor(pool.cpu - cpu), floor((pool.memory - memory) / _GIB)
        if vcpus < 1 or gib < 1:
            notes.append(f"{pool.name} left out: daemons leave no core or no GiB of its nodes")
            continue
        machine = machines[pool.name]
        row = _cells(pool, machine, vcpus=vcpus, gib=gib)
        if column in (_catalog_column(catalog), _PLAIN_PRICE):
            row |= _priced(pool, machine, column)
        notes += _keep(row, kept.get(pool.name, {}), column=column)
        notes += _notes(pool, machine, is_priced=bool(row.get(column)))
        rows.append(row)
    for name in sorted(set(kept) - {pool.name for pool in pools}):
        rows.append(kept[name])
        notes.append(f"{name} has no node now: its row is kept as it was")
    if not rows:
        raise UsageError(
            "no node pool was found: " + "; ".join(notes or ["the cluster has no nodes"]),
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
    """That of the earlier file; else the catalog's, with its region, where it knows a price."""
    if earlier and earlier.price_column:
        return earlier.price_column
    is_priced = any(machine and machine.usd_per_hour for machine in machines)
    return _catalog_column(catalog) if is_priced and catalog.region else _PLAIN_PRICE


def _priced(pool: ClusterPool, machine: Instance | None, column: str) -> dict[str, str]:
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
    """Puts what an earlier file has in the row; gives what is to be said of it."""
    for name in _BY_HAND:
        if not row.get(name) and kept.get(name, "").strip():
            row[name] = kept[name].strip()
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
        notes.append(f"{pool.name} has no price, and is no part of plans: {why}; put it in")
    if machine and machine.accelerators and not pool.gpus:
        notes.append(
            f"{pool.name} offers none of the {machine.accelerators} GPUs of a {machine.type}: "
            "does the device plugin run there?"
        )
    if pool.architecture == "arm64":
        notes.append(f"{pool.name} is arm64: the image has to be made for it")
    if pool.gpus and (pool.gpu_model or "").endswith("-SHARED"):
        notes.append(f"{pool.name} shares its GPUs among pods: predictions do not hold there")
    return notes


__all__ = ["ASSUMED_DAEMONS", "PoolsTable", "pools_table"]
