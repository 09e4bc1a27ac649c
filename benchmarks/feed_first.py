"""Measures when an epoch's first batch is there, where a batch takes long: next to torch's workers.

The first epoch, in which workers start, is left out. Samples sleep, so that two cores are enough.
"""

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measuring import HERE, rotated, run, say, spread
from rows import Row, times
from stoker_hosts import run_under_stoker

LOADERS = ("torch local", "stoker encrypted")
# Seconds of a batch, workers, how the costs of samples are distributed.
CASES = tuple(
    (batch_seconds, workers, costs)
    for batch_seconds in (0.6, 2.0)
    for workers in (4, 8, 16)
    for costs in ("even", "exponential", "pareto")
)
QUICK_CASES = ((0.6, 4, "even"), (0.6, 4, "pareto"))
_SECONDS = 300.0
_MAX_TIMES_TORCH = 1.0


def first_seconds(loader: str, batch_seconds: float, workers: int, costs: str) -> float:
    """Returns the median over the epochs behind the first one."""
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        result = folder / "result.json"
        command = [sys.executable, str(HERE / "first_trainer.py"), loader.split()[0]]
        command += [str(workers), str(batch_seconds), costs, str(result)]
        if loader == "torch local":
            run(command, _SECONDS)
        else:
            (folder / "hosts").mkdir()
            run_under_stoker(
                command,
                folder=folder / "hosts",
                hosts=1,
                workers_each=workers,
                seconds=_SECONDS,
            )
        seconds: list[float] = json.loads(result.read_text())
    return statistics.median(seconds[1:])


def rows(*, repetitions: int, is_quick: bool) -> Iterator[Row]:
    """Returns a row of each loader and case."""
    for batch_seconds, workers, costs in QUICK_CASES if is_quick else CASES:
        seen: dict[str, list[float]] = {loader: [] for loader in LOADERS}
        for turn in range(repetitions):
            for loader in rotated(LOADERS, turn):
                seconds = first_seconds(loader, batch_seconds, workers, costs)
                say(f"{batch_seconds} s, {workers} workers, {costs}, {loader}: {seconds:.2f} s")
                seen[loader].append(seconds)
        for loader, mine in seen.items():
            is_torch = loader == "torch local"
            compared = times(
                mine, seen["torch local"], beside="torch local", at_most=_MAX_TIMES_TORCH
            )
            yield Row(
                part="first",
                case=f"first batch, {batch_seconds} s, {costs} costs, {workers} workers",
                loader=loader if is_torch else f"{loader}, 1 data host",
                figure="ms",
                value=spread([1000 * seconds for seconds in mine]),
                comparisons=() if is_torch else (compared,),
            )
