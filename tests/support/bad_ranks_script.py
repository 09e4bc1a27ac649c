"""Ranks read a dataset of which some samples are bad, and meet after each step.

bad_ranks_script.py FOLDER EPOCHS [--drop-last] [--batches]: FOLDER/rank-N.json has the batches of
rank N, by epoch. A rank with fewer steps than the others would block them for ever.
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from stoker import DataLoader

NUM_SAMPLES = 51
BATCH_SIZE = 4
RAISING = (0, 8, 29)
# All of one rank: the second, of two as well as of three.
CRASHING, HANGING = 7, 37
# The second batch of the first rank is bad from the first to the last sample.
BAD_BATCH = 1


class Damaged(Dataset):
    """Draws random numbers, so that what a bad sample has drawn would show."""

    def __init__(self, num_ranks: int) -> None:
        first = BAD_BATCH * BATCH_SIZE * num_ranks
        batch = range(first, first + BATCH_SIZE * num_ranks, num_ranks)
        self.raising = {*RAISING, *batch}

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(1)
        if index == CRASHING:
            os.kill(os.getpid(), signal.SIGSEGV)
        if index == HANGING:
            time.sleep(3600)
        if index in self.raising:
            raise ValueError(f"file {index}, damaged")
        return index + drawn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--batches", action="store_true", help="by a batch sampler")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    dataset = Damaged(dist.get_world_size())
    sampler: DistributedSampler = DistributedSampler(dataset, shuffle=False)
    if options.batches:
        batches = BatchSampler(sampler, BATCH_SIZE, options.drop_last)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=1)
    else:
        loader = DataLoader(
            dataset, BATCH_SIZE, sampler=sampler, num_workers=1, drop_last=options.drop_last
        )
    epochs = []
    for _ in range(options.epochs):
        steps = []
        for batch in loader:
            steps.append(batch.flatten().tolist())
            # As where gradients are averaged.
            dist.barrier()
        epochs.append(steps)
    file = options.folder / f"rank-{dist.get_rank()}.json"
    file.write_text(json.dumps(epochs))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
