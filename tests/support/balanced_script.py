"""Ranks read samples of very different lengths: what each got is written, and states of all.

balanced_script.py FOLDER EPOCHS [--stop EPOCH:STEP] [--resume]
"""

import argparse
import json
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, DistributedSampler

from stoker import DataLoader

NUM_SAMPLES = 96
BATCH_SIZE = 8


class Lengths(Dataset):
    def __init__(self) -> None:
        drawn = random.Random(1)
        # Cut, as texts are: else one sample may be longer than all others.
        self.lengths = [min(round(20 * drawn.paretovariate(1.5)), 100) for _ in range(NUM_SAMPLES)]

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(self.lengths[index])


def padded(samples):
    return torch.tensor([index for index, _ in samples]), pad_sequence([row for _, row in samples])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--stop", default="")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    data = Lengths()
    sampler: DistributedSampler = DistributedSampler(data, seed=3)
    loader = DataLoader(
        data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=1, collate_fn=padded
    )
    checkpoint = options.folder / f"checkpoint-{rank}.pt"
    first, got = 0, []
    if options.resume:
        first, got, state = torch.load(checkpoint, weights_only=False)
        loader.load_state_dict(state)
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for indices, rows in loader:
            cost = sum(data.lengths[index] for index in indices)
            got.append([epoch, indices.tolist(), cost, float(rows.sum())])
            here = f"{epoch}:{sum(step[0] == epoch for step in got)}"
            if here == options.stop:
                torch.save((epoch, got, loader.state_dict()), checkpoint)
                dist.barrier()
                os._exit(0)
    name = f"rank-{rank}.json"
    (options.folder / name).write_text(json.dumps(got))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
