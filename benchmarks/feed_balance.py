"""Measures the slowest rank where samples differ in length: torch, stoker, and stoker balanced.

There is no raw row: a connection without a sampler deals nothing. Runs are those of balance.py.
"""

from collections.abc import Iterator

from balance import ALPHAS, GOAL_PERCENT, KINDS, measured
from measuring import rotated, say, spread
from rows import Comparison, Row, alone, points, times

CASES = tuple((ranks, alpha) for ranks in (2, 4) for alpha in ALPHAS)
QUICK_CASES = ((2, 1.5),)
BATCH = 16


def rows(*, repetitions: int, is_quick: bool) -> Iterator[Row]:
    """Returns two rows of each loader and case: the slowest rank's excess, and a step's time."""
    for ranks, alpha in QUICK_CASES if is_quick else CASES:
        above: dict[str, list[float]] = {kind: [] for kind in KINDS}
        step_ms: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for turn in range(repetitions):
            for kind in rotated(KINDS, turn):
                percent, seconds = measured(kind, ranks=ranks, batch=BATCH, alpha=alpha)
                say(f"{ranks} ranks, Pareto {alpha:g}, {kind}: {percent:.1f}%")
                above[kind].append(percent)
                step_ms[kind].append(1000 * seconds)
        for kind in KINDS:
            case = f"balance, {ranks} ranks, lengths Pareto {alpha:g}"
            yield Row(
                part="balance",
                case=case,
                loader=kind,
                figure="slowest rank, % over the mean",
                value=spread(above[kind]),
                comparisons=_excess(kind, above),
            )
            is_torch = kind == "torch"
            beside = times(step_ms[kind], step_ms["torch"], beside="torch")
            yield Row(
                part="balance",
                case=case,
                loader=kind,
                figure="ms of a step",
                value=spread(step_ms[kind]),
                comparisons=() if is_torch else (beside,),
            )


def _excess(kind: str, above: dict[str, list[float]]) -> tuple[Comparison, ...]:
    if kind == "torch":
        return ()
    beside = points(above[kind], above["torch"], beside="torch")
    if kind != "stoker balanced":
        return (beside,)
    return (beside, alone(above[kind], at_most=GOAL_PERCENT))
