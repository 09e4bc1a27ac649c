"""Plays a training that reads its numbers where their channel is, and checks that it got them all.

With `--fail-at RANK` that rank raises after its third batch.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import stoker

CHANNEL = Path("/opt/ml/input/data/numbers")


class Numbers(Dataset):
    def __init__(self, channel: Path) -> None:
        self.values = [int(word) for word in (channel / "numbers.txt").read_text().split()]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.values[index])


def numbers() -> Numbers:
    return Numbers(CHANNEL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--fail-at", type=int, default=-1)
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    loader = stoker.DataLoader(
        stoker.remote("job:numbers"),
        batch_size=5,
        sampler=range(rank, options.count, world_size),
        num_workers=0,
    )
    total = torch.zeros(1, dtype=torch.int64)
    for number, batch in enumerate(loader):
        if rank == options.fail_at and number == 3:
            raise ValueError(f"digit {number} is upside down: " + "very " * 400 + "much so")
        total += batch.sum()
        dist.all_reduce(total.clone())
    dist.all_reduce(total)
    if rank == 0:
        stoker.log_metrics(total=float(total), channel_is_here=float(CHANNEL.exists()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
