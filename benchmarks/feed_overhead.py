"""Measures what the feed adds to a step, next to a raw-socket loader and torch's own local one.

Every repetition runs every loader at every number of workers, in an order that rotates; a loader is
compared with the others of its own repetition. benchmarks/README.md says what each figure means.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cases import Case
from measuring import Comparison, Row, points, rotated, say, spread, trained

LOADERS = ("raw", "stoker encrypted", "torch local")
UNORDERED = (*LOADERS, "torch unordered")
# Points over the raw loader.
LIMITS = {
    "even": {"stoker encrypted": 2.0},
    "exponential": {"stoker encrypted": 3.0},
    "straggler": {"stoker encrypted": 3.0},
}
WORKERS = {"even": (1, 2, 3, 4, 5, 6), "exponential": (3, 4), "straggler": (4,)}
QUICK_WORKERS = {"even": (1, 4), "exponential": (4,), "straggler": (4,)}
_FIGURE = "% over the bound"


def case_of(name: str, *, workers: int, is_quick: bool) -> Case:
    """Returns the case, with fewer steps where each is longer: about 3 s per measurement."""
    steps = {1: 50, 2: 70}.get(workers, 100)
    even = Case(workers=workers, steps=steps // 2 if is_quick else steps, warmup=20)
    if name == "exponential":
        # The bound is of the same draws, but too few of them hardly vary.
        return replace(even, is_exponential=True, steps=60 if is_quick else 160)
    if name == "straggler":
        return replace(even, slow_factor=3.0, warmup=30)
    return even


def rows(
    name: str,
    *,
    repetitions: int,
    is_quick: bool,
    ks: Sequence[int] = (),
    one_worker_hosts: bool = False,
) -> Iterator[Row]:
    """Returns the rows of one case.

    Args:
        name: even, exponential or straggler.
        ks: Numbers of workers, in place of the case's own.
        one_worker_hosts: stoker's workers are on as many data hosts, not all on one.
    """
    loaders = LOADERS if name == "even" else UNORDERED
    ks = ks or (QUICK_WORKERS if is_quick else WORKERS)[name]
    seen: dict[tuple[int, str], list[dict[str, float]]] = {}
    turn = 0
    for _ in range(repetitions):
        for k in ks:
            case = case_of(name, workers=k, is_quick=is_quick)
            for loader in rotated(loaders, turn):
                found = trained(loader, case, hosts=k if one_worker_hosts else 1)
                found["excess"] = 100 * (found["step_seconds"] / case.bound_seconds() - 1)
                say(f"{name} k={k} {loader}: {found['excess']:+.1f}%")
                seen.setdefault((k, loader), []).append(found)
            turn += 1
    for k in ks:
        for loader in loaders:
            yield _row(name, k, loader, {each: seen[k, each] for each in loaders})


def _row(name: str, k: int, loader: str, seen: dict[str, list[dict[str, float]]]) -> Row:
    mine = seen[loader]
    excess = {each: [found["excess"] for found in seen[each]] for each in seen}
    limit = LIMITS[name].get(loader)
    comparisons: list[Comparison] = []
    if loader != "raw":
        comparisons.append(points(excess[loader], excess["raw"], beside="raw", at_most=limit))
    if limit is not None:
        for other in ("torch local", "torch unordered"):
            if other in excess:
                # Only in the even case is it a target to be below torch.
                below = name == "even"
                comparisons.append(
                    points(excess[loader], excess[other], beside=other, is_below=below)
                )
    is_in_order = all(found["is_in_order"] for found in mine)
    figures = (
        "step_seconds",
        "resident_step_seconds",
        "cpu_seconds_per_gb",
        "megabytes_per_second",
        "first_batch_seconds",
    )
    return Row(
        part=name,
        case=f"{name}, k={k}",
        loader=loader,
        figure=_FIGURE,
        value=spread(excess[loader]),
        comparisons=tuple(comparisons),
        details={
            "workers": k,
            "is_in_order": is_in_order,
            **{figure: spread([found[figure] for found in mine]) for figure in figures},
        },
        note="" if is_in_order else "order lost",
    )
