"""`stoker report A B C`: one table of how runs scale."""

from collections.abc import Mapping
from typing import TypedDict

from stoker.errors import UsageError
from stoker.records import Training
from stoker.units import ms, percentage, table_lines

_HEADS = ("run", "ranks", "dnn", "data", "step", "waits", "samples/s", "of the ideal", "$/million")


class RunRow(TypedDict):
    """A run of the table; `efficiency` is its throughput over the first run's, per rank."""

    name: str
    ranks: int
    dnn_hosts: int
    data_hosts: int
    step_seconds: float
    wait_share: float
    samples_per_second: float
    efficiency: float
    usd_per_million_samples: float | None


def rows_of_runs(runs: Mapping[str, Training]) -> list[RunRow]:
    """Returns a row for each run, the smallest first.

    Raises:
        UsageError: If a run has no measured step.
    """
    rows: list[RunRow] = []
    for name, training in runs.items():
        measured = training.measured
        if measured is None or not measured.samples_per_second or not measured.counted_seconds:
            raise UsageError(
                f"run {name} has no throughput: it {training.status}",
                where=f"{name}/training.json",
                fix="leave it out, or run it again",
            )
        dnn = [group for group in training.groups if group.role == "dnn"]
        hosts = sum(group.count for group in dnn)
        rate = measured.samples_per_second
        price = measured.usd_per_1000_steps
        if price is not None:
            price *= 1000 / measured.counted_seconds / rate
        row: RunRow = {
            "name": name,
            "ranks": sum(group.count * (group.processes_per_host or 1) for group in dnn),
            "dnn_hosts": hosts,
            "data_hosts": sum(group.count for group in training.groups) - hosts,
            "step_seconds": measured.counted_seconds,
            "wait_share": measured.wait_share,
            "samples_per_second": rate,
            "efficiency": 1.0,
            "usd_per_million_samples": price,
        }
        rows.append(row)
    rows.sort(key=lambda row: (row["ranks"], row["dnn_hosts"], row["data_hosts"]))
    smallest = rows[0]["samples_per_second"] / rows[0]["ranks"]
    for row in rows:
        row["efficiency"] = row["samples_per_second"] / row["ranks"] / smallest
    return rows


def table_of_runs(rows: list[RunRow]) -> str:
    """Returns the rows as text."""
    cells = []
    for row in rows:
        usd = row["usd_per_million_samples"]
        counts = [str(row["ranks"]), str(row["dnn_hosts"]), str(row["data_hosts"])]
        times = [ms(row["step_seconds"]), percentage(row["wait_share"])]
        rates = [f"{row['samples_per_second']:.1f}", percentage(row["efficiency"])]
        price = "?" if usd is None else f"{usd:.4g}"
        cells.append([row["name"], *counts, *times, *rates, price])
    return "\n".join(table_lines(_HEADS, cells))
