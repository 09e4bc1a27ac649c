"""Measures the example's MNIST job with two workers: samples/s, and time to the first batch."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measuring import HERE, Row, rotated, run, say, spread, times
from stoker_hosts import run_under_stoker

EXAMPLE = HERE.parent / "examples" / "mnist"
WORKERS = 2
LOADERS = ("torch local", "stoker local", "stoker encrypted")
_SECONDS = 300.0
_MIN_SHARE_OF_TORCH = 0.97
_MAX_TIMES_TORCH = 1.5

Seen = dict[str, list[dict[str, list[float]]]]


def trained(loader: str, step: str, *, num_batches: int) -> dict[str, list[float]]:
    """Returns what `job_trainer.py` saw."""
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        result = folder / "result.json"
        is_remote = loader == "stoker encrypted"
        command = [sys.executable, str(HERE / "job_trainer.py"), loader.split()[0], step]
        command += [str(0 if is_remote else WORKERS), str(num_batches), str(result)]
        if is_remote:
            (folder / "hosts").mkdir()
            run_under_stoker(
                [*command, "1"],
                folder=folder / "hosts",
                hosts=1,
                workers_each=WORKERS,
                seconds=_SECONDS,
                modules=[EXAMPLE],
            )
        else:
            run(command, _SECONDS, environ={**os.environ, "PYTHONPATH": f"{EXAMPLE}:{HERE}"})
        seen: dict[str, list[float]] = json.loads(result.read_text())
    return seen


def rows(*, repetitions: int, is_quick: bool) -> Iterator[Row]:
    """Returns the rows of both parts, mnist and first."""
    seen: dict[str, Seen] = {"look": {}, "train": {}}
    turn = 0
    for _ in range(repetitions):
        for step, found_by in seen.items():
            for loader in rotated(LOADERS, turn):
                found = trained(loader, step, num_batches=25 if is_quick else 60)
                say(f"mnist {step} {loader}: {found['samples_per_second']:.0f} samples/s")
                found_by.setdefault(loader, []).append(found)
            turn += 1
    for step, found_by in seen.items():
        for loader in LOADERS:
            yield _speed(step, loader, found_by)
    # Both steps wait for their first batch in the same way: all runs count.
    every = {loader: [*seen["look"][loader], *seen["train"][loader]] for loader in LOADERS}
    for number, when in enumerate(("first epoch", "second epoch")):
        for loader in LOADERS:
            yield _first(number, when, loader, every)


def _speed(step: str, loader: str, seen: Seen) -> Row:
    def all_of(which: str, figure: str) -> list[float]:
        return [float(str(found[figure])) for found in seen[which]]

    mine = all_of(loader, "samples_per_second")
    theirs = all_of("torch local", "samples_per_second")
    is_torch = loader == "torch local"
    return Row(
        part="mnist",
        case=f"MNIST job, 2 workers, {'loader alone' if step == 'look' else 'with its training'}",
        loader=_name(loader),
        figure="samples/s",
        value=spread(mine),
        comparisons=()
        if is_torch
        else (times(mine, theirs, beside="torch local", at_least=_MIN_SHARE_OF_TORCH),),
        details={"job_samples_per_second": spread(all_of(loader, "job_samples_per_second"))},
    )


def _first(number: int, when: str, loader: str, seen: Seen) -> Row:
    mine = [found["first_batch_seconds"][number] for found in seen[loader]]
    theirs = [found["first_batch_seconds"][number] for found in seen["torch local"]]
    is_torch = loader == "torch local"
    is_local = loader.endswith("local")
    state = "workers start" if is_local else ("no session yet", "session open")[number]
    return Row(
        part="first",
        case=f"MNIST job, first batch of the {when}",
        loader=_name(loader),
        figure="ms",
        value=spread([1000 * seconds for seconds in mine]),
        comparisons=()
        if is_torch
        else (times(mine, theirs, beside="torch local", at_most=_MAX_TIMES_TORCH),),
        details={"state": state},
        note=state if is_local else f"data host up, {state}",
    )


def _name(loader: str) -> str:
    return loader if loader.endswith("local") else f"{loader}, 1 data host"
