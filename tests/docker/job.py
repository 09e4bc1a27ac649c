"""Plays a training that sums numbers from their channel, on the data hosts, over its ranks."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

import stoker

CHANNEL = Path("/opt/ml/input/data/numbers")
COUNT = 400


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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    mine = range(rank, COUNT, world_size)
    remote = stoker.remote("job:numbers")
    loader = stoker.DataLoader(remote, batch_size=5, sampler=mine, num_workers=0)
    total = torch.zeros(1, dtype=torch.int64)
    for batch in loader:
        total += batch.sum()
        dist.all_reduce(total.clone())
    dist.all_reduce(total)
    if rank == 0:
        stoker.log_metrics(total=float(total), channel_is_here=float(CHANNEL.exists()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
