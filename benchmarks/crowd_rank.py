"""One rank of the crowd takes batches of cheap workers, checks each, stops twice to be looked at.

    python crowd_rank.py FOLDER NUM_BATCHES

Under torchrun. Writes at-0-RANK and at-1-RANK (its pid) where it waits for go-0 and go-1, in the
middle and at the end, and rank-RANK.json. Speed is that of the second quarter: a hundred workers
start in the first one.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset, default_collate

from stoker import DataLoader

BATCH_SIZE = 8
SAMPLE_BYTES = 8192
# What a batch costs its worker, slept: a hundred workers on two cores.
COST_SECONDS = 0.02

_WAIT_SECONDS = 120.0


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Holds as sample n the number n, and 8 kB that follow from it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((SAMPLE_BYTES,), index % 251, dtype=torch.uint8)


def slept(samples: Sequence[tuple[int, torch.Tensor]]) -> object:
    time.sleep(COST_SECONDS)
    return default_collate(list(samples))


def main(folder: Path, num_batches: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # More batches than are taken, so that the epoch is under way when it is looked at.
    spare = 200
    length = (num_batches + spare) * BATCH_SIZE * world_size
    mine = range(rank, length, world_size)
    loader = DataLoader(
        Numbers(length), batch_size=BATCH_SIZE, sampler=mine, collate_fn=slept, num_workers=0
    )
    batches = iter(loader)
    num_right = 0
    began, warm, first_look = time.monotonic(), num_batches // 4, num_batches // 2
    warm_at = looked_at = 0.0
    for number in range(num_batches):
        indices, pixels = next(batches)
        if number == warm:
            warm_at = time.monotonic()
        expected = torch.tensor(mine[number * BATCH_SIZE : (number + 1) * BATCH_SIZE])
        is_right = bool((indices == expected).all())
        is_right = is_right and bool((pixels[:, ::512] == (expected % 251)[:, None]).all())
        num_right += is_right
        if number == first_look:
            # Later ones were made while all stood still: they say nothing about speed.
            looked_at = time.monotonic()
            _be_looked_at(folder, 0, rank)
    _be_looked_at(folder, 1, rank)
    seen = {
        "num_batches": num_batches,
        "num_right": num_right,
        "warm_up_seconds": warm_at - began,
        "batches_per_second": (first_look - warm) / (looked_at - warm_at),
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))


def _be_looked_at(folder: Path, turn: int, rank: int) -> None:
    (folder / f"at-{turn}-{rank}").write_text(str(os.getpid()))
    deadline = time.monotonic() + _WAIT_SECONDS
    while not (folder / f"go-{turn}").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody looked within {_WAIT_SECONDS:.0f} s")
        time.sleep(0.02)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
