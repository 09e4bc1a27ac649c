"""Ranks read samples of very different lengths: what each got is written, and states of all.

After each step all meet, and each saves its state. FOLDER/rank-N.json has the steps of rank N:
epoch, indices, elements, and the sum of what was drawn for them.
"""

import argparse
import json
import os
import random
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, Dataset, DistributedSampler

from stoker import DataLoader

NUM_SAMPLES = 96
BATCH_SIZE = 8
SEED = 3


def lengths_of(num_samples: int) -> list[int]:
    """Returns Pareto distributed lengths, cut as texts are: else one may exceed all others."""
    drawn = random.Random(1)
    return [min(round(20 * drawn.paretovariate(1.5)), 100) for _ in range(num_samples)]


class Lengths(Dataset):
    def __init__(self, num_samples: int) -> None:
        self.lengths = lengths_of(num_samples)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(self.lengths[index])


def padded(samples):
    return torch.tensor([index for index, _ in samples]), pad_sequence([row for _, row in samples])


class Checkpoint:
    """States of this rank after its last two steps: one more than a rank that dies may have."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"checkpoint-{dist.get_rank()}.pt"
        self._saved: list[tuple[list, dict]] = []

    def save(self, steps: list, state: dict) -> None:
        self._saved = [*self._saved[-1:], (list(steps), state)]
        new = self._path.with_suffix(".new")
        torch.save(self._saved, new)
        new.rename(self._path)

    def load(self) -> tuple[list, dict]:
        """Returns steps and state of the last step that all ranks have saved."""
        saved = torch.load(self._path, weights_only=False)
        last = torch.tensor(len(saved[-1][0]))
        dist.all_reduce(last, dist.ReduceOp.MIN)
        return next(each for each in saved if len(each[0]) == int(last))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("epochs", type=int)
    parser.add_argument("--samples", type=int, default=NUM_SAMPLES)
    parser.add_argument("--batch", type=int, default=BATCH_SIZE)
    parser.add_argument("--drop-last", action="store_true")
    parser.add_argument("--in-order", action="store_true")
    parser.add_argument("--stop", default="", metavar="EPOCH:STEP", help="all ranks end after it")
    parser.add_argument("--kill", default="", metavar="RANK:EPOCH:STEP", help="before it is saved")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    data = Lengths(options.samples)
    sampler: DistributedSampler = DistributedSampler(data, seed=SEED, shuffle=not options.in_order)
    batches = BatchSampler(sampler, options.batch, options.drop_last)
    loader = DataLoader(data, batch_sampler=batches, num_workers=1, collate_fn=padded)
    checkpoint = Checkpoint(options.folder)
    first = 0
    got: list[list] = []
    if options.resume:
        got, state = checkpoint.load()
        first = got[-1][0]
        loader.load_state_dict(state)
    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for indices, rows in loader:
            cost = sum(data.lengths[index] for index in indices)
            got.append([epoch, indices.tolist(), cost, float(rows.sum())])
            here = f"{epoch}:{sum(step[0] == epoch for step in got)}"
            if f"{rank}:{here}" == options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            checkpoint.save(got, loader.state_dict())
            # As where gradients are averaged.
            dist.barrier()
            if here == options.stop:
                os._exit(0)
    name = f"rank-{rank}.json"
    (options.folder / name).write_text(json.dumps(got))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
