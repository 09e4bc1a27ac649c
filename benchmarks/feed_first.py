"""Measures an epoch of a few long batches: its first one, its last four, and all; beside torch.

The first epoch, in which workers start, is left out. Samples sleep, so that two cores are enough.
"""

import argparse
import statistics
from collections.abc import Iterator, Sequence

from measuring import rotated, say, seen_by_trainer, spread
from rows import Row, times

LOADERS = ("torch local", "stoker encrypted")
_ON_TWO_HOSTS = "stoker encrypted, 2 data hosts"
# Of even costs: what it gives that two data hosts make the first batch, each with as many workers.
# And where the last batch takes five times as long: that they make it together.
EVEN_LOADERS = (*LOADERS, _ON_TWO_HOSTS)
# Of heavy costs: what it gives that a dear batch is shared out in mid-epoch.
HEAVY_LOADERS = (*LOADERS, "stoker encrypted, batches whole")
_LOADERS_OF = {"even": EVEN_LOADERS, "last": EVEN_LOADERS, "heavy": HEAVY_LOADERS}
COSTS = ("even", "exponential", "pareto", "last", "heavy")
# Seconds of a batch, workers, how the costs of samples are distributed.
Case = tuple[float, int, str]
CASES = tuple(
    (batch_seconds, workers, costs)
    for batch_seconds in (0.6, 2.0)
    for workers in (4, 8, 16)
    for costs in COSTS
)
QUICK_CASES = tuple((0.6, 4, costs) for costs in COSTS if costs != "exponential")
_SECONDS = 300.0
_MAX_TIMES_TORCH = 1.0


def epoch_seconds(loader: str, batch_seconds: float, workers: int, costs: str) -> dict[str, float]:
    """Returns the medians over the epochs behind the first one."""
    seconds: dict[str, list[float]] = seen_by_trainer(
        "first_trainer.py",
        loader,
        [str(workers), str(batch_seconds), costs],
        hosts=2 if loader == _ON_TWO_HOSTS else 1,
        workers_each=workers,
        seconds=_SECONDS,
        feed={"split_batches": False} if "whole" in loader else {},
    )
    return {figure: statistics.median(values[1:]) for figure, values in seconds.items()}


def case(text: str) -> Case:
    """Reads a case, such as 2,8,even; raises ArgumentTypeError."""
    try:
        seconds, workers, costs = text.split(",")
        named = float(seconds), int(workers), costs
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not SECONDS,WORKERS,COSTS") from None
    if costs not in COSTS:
        raise argparse.ArgumentTypeError(f"{costs!r} is none of {', '.join(COSTS)}")
    return named


def rows(*, repetitions: int, cases: Sequence[Case]) -> Iterator[Row]:
    """Returns a row of each loader and case."""
    for batch_seconds, workers, costs in cases:
        loaders = _LOADERS_OF.get(costs, LOADERS)
        seen: dict[str, list[dict[str, float]]] = {loader: [] for loader in loaders}
        for turn in range(repetitions):
            for loader in rotated(loaders, turn):
                seconds = epoch_seconds(loader, batch_seconds, workers, costs)
                shown = ", ".join(f"{figure} {value:.2f} s" for figure, value in seconds.items())
                say(f"{batch_seconds} s, {workers} workers, {costs}, {loader}: {shown}")
                seen[loader].append(seconds)
        words = f"{batch_seconds} s, {costs} costs, {workers} workers"
        yield from _rows_of("first batch", words, seen)
        yield from _rows_of("last batches", words, seen)
        yield from _rows_of("epoch", words, seen)


def _rows_of(figure: str, words: str, seen: dict[str, list[dict[str, float]]]) -> Iterator[Row]:
    theirs = [seconds[figure] for seconds in seen["torch local"]]
    on_one_host = [seconds[figure] for seconds in seen["stoker encrypted"]]
    for loader, runs in seen.items():
        mine = [seconds[figure] for seconds in runs]
        name = loader
        comparisons = [times(mine, theirs, beside="torch local", at_most=_MAX_TIMES_TORCH)]
        if loader == "torch local":
            comparisons = []
        elif loader == _ON_TWO_HOSTS:
            comparisons.append(times(mine, on_one_host, beside="1 data host"))
        else:
            name = f"{loader}, 1 data host"
        yield Row(
            part="first",
            case=f"{figure}, {words}",
            loader=name,
            figure="ms",
            value=spread([1000 * seconds for seconds in mine]),
            comparisons=tuple(comparisons),
        )
