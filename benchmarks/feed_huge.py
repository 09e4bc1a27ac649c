"""Measures the first batches of huge samples, made in parts as `auto` has it, beside whole ones.

Parts of a batch are written once more and read once more: of samples of some megabytes that may
cost more than it gives, which the feed sees from the first part.
"""

from collections.abc import Iterator

from measuring import rotated, say, seen_by_trainer, spread
from rows import Row, times

_WORKERS = 2
# Samples of a batch, megabytes of each.
_CASES = ((2, 77.0), (8, 20.0))
_WHOLE = "stoker encrypted, batches whole"
LOADERS = ("torch local", "stoker encrypted", _WHOLE)
_SECONDS = 120.0


def rows(*, repetitions: int) -> Iterator[Row]:
    """Returns a row of each loader, case and figure."""
    for samples, megabytes in _CASES:
        seen: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
        for turn in range(repetitions):
            for loader in rotated(LOADERS, turn):
                seconds = _first_epoch(loader, samples, megabytes)
                shown = ", ".join(f"{figure} {value:.2f} s" for figure, value in seconds.items())
                say(f"{samples} samples of {megabytes:g} MB, {loader}: {shown}")
                seen[loader].append(seconds)
        words = f"{samples} samples of {megabytes:g} MB, {_WORKERS} workers"
        for figure in seen[_WHOLE][0]:
            yield from _rows_of(figure, words, seen)


def _first_epoch(loader: str, samples: int, megabytes: float) -> dict[str, float]:
    seen: dict[str, float] = seen_by_trainer(
        "huge_trainer.py",
        loader,
        [str(_WORKERS), str(samples), str(megabytes)],
        workers_each=_WORKERS,
        seconds=_SECONDS,
        feed={"split_batches": False} if loader == _WHOLE else {},
    )
    return seen


def _rows_of(figure: str, words: str, seen: dict[str, list[dict[str, float]]]) -> Iterator[Row]:
    whole = [seconds[figure] for seconds in seen[_WHOLE]]
    for loader, runs in seen.items():
        mine = [seconds[figure] for seconds in runs]
        yield Row(
            part="huge",
            case=f"{figure}, {words}",
            loader=loader,
            figure="ms",
            value=spread([1000 * seconds for seconds in mine]),
            comparisons=() if loader == _WHOLE else (times(mine, whole, beside=_WHOLE),),
        )
