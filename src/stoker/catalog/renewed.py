"""The shipped table with today's prices and figures: what is not found stays, and is said. Pure."""

import csv
import io
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import date
from importlib import resources

from stoker.catalog.price_list import Machine, Priced

SHIPPED = "aws_training_instances.csv"
SHIPPED_REGION = "us-east-1"
_MOST_NAMED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedTable:
    """A catalog's table.

    Attributes:
        columns: In order.
        rows: Cells by column.
        notes: What was not found or has changed, for people.
        priced: Types with a price of today, on SageMaker and on EC2.
    """

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, str], ...]
    notes: tuple[str, ...]
    priced: tuple[int, int]

    def csv(self) -> str:
        """The file's text."""
        text = io.StringIO()
        writer = csv.DictWriter(text, self.columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        return text.getvalue()


def shipped_text() -> str:
    """The table that comes with stoker."""
    return resources.files("stoker.catalog").joinpath(SHIPPED).read_text(encoding="utf-8")


def shipped_types() -> tuple[str, ...]:
    """Its types, spelt without `ml.`."""
    rows = csv.DictReader(io.StringIO(shipped_text()))
    return tuple(row["instance_type"].removeprefix("ml.") for row in rows)


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
    """The table with what AWS says today.

    A price that is not found stays with its date, or, where the table is of another region, is left
    blank: a price is never guessed.

    Args:
        text: The table's CSV, of SHIPPED_REGION.
        region: Of the prices.
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
    seen = _Seen()
    rows = []
    for line in lines:
        row = {names[name]: cell for name, cell in line.items()}
        kind = row["instance_type"].removeprefix("ml.")
        parts = {part.split(":")[0]: part for part in map(str.strip, row["source"].split(";"))}
        has_training = _reprice(row, sagemaker, training.usd.get(kind), keeps=keeps)
        has_ec2 = _reprice(row, on_ec2, ec2.usd.get(kind), keeps=keeps)
        stamp = f"price-api-{today.isoformat()}"
        for label, is_new, column in (("SM", has_training, sagemaker), ("EC2", has_ec2, on_ec2)):
            if is_new:
                parts[label] = f"{label}:{stamp}"
            elif not row[column]:
                parts.pop(label, None)
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


class _Seen:
    """What is to be said of all rows together."""

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
    return next(name for name in row if name.startswith(head) and not name.endswith("_2024"))


def _column(name: str, region: str) -> str:
    if name not in (_SAGEMAKER, _EC2):
        return name
    return name.replace("us_east_1", region.replace("-", "_"))


def _reprice(row: dict[str, str], column: str, usd: str | None, *, keeps: bool) -> bool:
    """Puts the price in; gives whether there is one of today."""
    if usd is not None:
        row[column] = usd
    elif not keeps:
        row[column] = ""
    return usd is not None


def _refigure(row: dict[str, str], machine: Machine | None) -> list[str]:
    """Puts EC2's figures in; gives what has changed of them."""
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
