"""Trains with a loader and a step that cost what they are told: prediction.py predicts and runs it.

A plain PyTorch script. Costs are of a batch: `--burn` passes of a blur over each sample's image
(real CPU work), `--slept` seconds that the loader waits (storage, a service); the step burns
`--step-burn` passes on its own CPU and sleeps `--step-slept`, as one that waits for an accelerator.
"""

import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from stoker import DataLoader

# Enough that no profile and no run comes to the end of an epoch.
BATCHES = 20_000
# The image that is blurred; what a batch weighs is another matter.
SIDE = 96


class Images(Dataset):
    """Makes samples of `sample_bytes`: each is blurred `passes` times and waits `slept` seconds."""

    def __init__(self, length: int, *, passes: int, slept: float, sample_bytes: int) -> None:
        self.length = length
        self.passes = passes
        self.slept = slept
        self.sample_bytes = sample_bytes

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        value = blurred(self.passes, seed=index)
        if self.slept:
            time.sleep(self.slept)
        return torch.full((self.sample_bytes,), int(value), dtype=torch.uint8)


def blurred(passes: int, *, seed: int) -> float:
    """Blurs an image `passes` times with a cross of five pixels; a number from 0 to 255."""
    image = np.full((SIDE, SIDE), seed % 256, dtype=np.float32)
    image[seed % SIDE] = 255 - seed % 256
    for _ in range(passes):
        image[1:-1, 1:-1] = (
            image[1:-1, 1:-1] + image[:-2, 1:-1] + image[2:, 1:-1] + image[1:-1, :-2]
        ) * 0.25
    return float(image.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=BATCHES)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--burn", type=int, default=0, help="passes of a sample")
    parser.add_argument("--slept", type=float, default=0.0, help="seconds of a sample")
    parser.add_argument("--step-burn", type=int, default=0, help="passes of a step")
    parser.add_argument("--step-slept", type=float, default=0.0, help="seconds of a step")
    parser.add_argument("--sample-bytes", type=int, default=9216)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    images = Images(
        BATCHES * options.batch,
        passes=options.burn,
        slept=options.slept,
        sample_bytes=options.sample_bytes,
    )
    loader = DataLoader(images, batch_size=options.batch, num_workers=options.workers)
    gradient = torch.zeros(1024)
    for step, batch in enumerate(loader, start=1):
        gradient[0] = float(batch[0, 0])
        blurred(options.step_burn, seed=step)
        if options.step_slept:
            time.sleep(options.step_slept)
        if ranks > 1:
            dist.all_reduce(gradient)
        if step >= options.steps:
            break
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
