"""A rank of balance.py: steps as long as its batch has bytes, with a barrier after each."""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, DistributedSampler

import stoker

# What the accelerator takes for an element of a sample, and how long samples may be.
SECONDS = 4e-6
MAX_LENGTH = 2000


class Texts(Dataset[torch.Tensor]):
    """Rows whose lengths are Pareto distributed, cut as texts are."""

    def __init__(self, count: int, alpha: float) -> None:
        drawn = random.Random(1)
        lengths = [round(200 * drawn.paretovariate(alpha)) for _ in range(count)]
        self.lengths = [min(length, MAX_LENGTH) for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(self.lengths[index])


def collated(rows: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
    return pad_sequence(rows), sum(len(row) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--torch", action="store_true", help="PyTorch's own loader")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data = Texts(options.batch * options.steps * world_size, options.alpha)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, seed=3)
    loader_class = torch.utils.data.DataLoader if options.torch else stoker.DataLoader
    loader = loader_class(
        data, batch_size=options.batch, sampler=sampler, num_workers=1, collate_fn=collated
    )
    steps = []
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for _, length in loader:
            began = time.monotonic()
            time.sleep(length * SECONDS)
            computed = time.monotonic()
            dist.barrier()
            steps.append([epoch, computed - began, time.monotonic() - began])
    (options.folder / f"rank-{rank}.json").write_text(json.dumps(steps))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
