"""Four ranks and one data host of 8 workers: equal ranks, one whose batches cost more, one alone.

This file is also the script of each rank, under torchrun. A rank takes its batches as fast as they
come, after 20 in which the workers start; a batch costs its worker as long as it sleeps.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset, default_collate

from measuring import Row, say, spread
from stoker import DataLoader
from stoker_hosts import run_under_stoker

RANKS, WORKERS, WARM_UP, BATCH_SIZE = 4, 8, 20, 8
_SECONDS = 60.0
# Milliseconds of a batch on each rank; 0: it takes none.
COSTS = {"equal": (20, 20, 20, 20), "unequal": (60, 20, 20, 20), "one alone": (20, 0, 0, 0)}


def rows(*, repetitions: int, is_quick: bool) -> Iterator[Row]:
    """Returns a row for each case: batches a second of the busiest rank."""
    num_batches = 100 if is_quick else 200
    for case, costs in COSTS.items():
        speeds = [_run(costs, num_batches) for _ in range(repetitions)]
        say(f"ranks, {case}: {speeds}")
        yield Row(
            part="ranks",
            case=f"1 data host x {WORKERS} workers, {RANKS} ranks, {case}",
            loader="stoker encrypted",
            figure="batches/s, slowest rank that loads",
            value=spread(speeds),
        )


def _run(costs: Sequence[int], num_batches: int) -> float:
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        (folder / "hosts").mkdir()
        run_under_stoker(
            [sys.executable, __file__, str(folder), str(num_batches), *map(str, costs)],
            folder=folder / "hosts",
            hosts=1,
            workers_each=WORKERS,
            seconds=_SECONDS,
            ranks=RANKS,
        )
        found = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return min(found)


# ---- a rank


class Numbers(Dataset[torch.Tensor]):
    """Holds as sample n 8 kB of n."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((8192,), index % 251, dtype=torch.uint8)


class Slept:
    """Collates after a batch's cost."""

    def __init__(self, milliseconds: int) -> None:
        self._seconds = milliseconds / 1000

    def __call__(self, samples: Sequence[torch.Tensor]) -> object:
        time.sleep(self._seconds)
        return default_collate(list(samples))


def train(folder: Path, num_batches: int, costs: Sequence[int]) -> None:
    """Is one rank; writes how many batches came in a second."""
    rank = int(os.environ["RANK"])
    if not costs[rank]:
        return
    data = Numbers((WARM_UP + num_batches + 40) * BATCH_SIZE)
    loader = DataLoader(data, batch_size=BATCH_SIZE, collate_fn=Slept(costs[rank]), num_workers=2)
    began = 0.0
    for number, _ in enumerate(loader):
        if number == WARM_UP:
            began = time.monotonic()
        if number == WARM_UP + num_batches:
            break
    speed = num_batches / (time.monotonic() - began)
    (folder / f"rank-{rank}.json").write_text(json.dumps(round(speed, 1)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]), [int(cost) for cost in sys.argv[3:]])
