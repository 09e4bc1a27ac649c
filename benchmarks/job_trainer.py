"""Trains the example's MNIST over one loader: how fast it goes, and when the first batch comes.

    python job_trainer.py torch|stoker STEP NUM_WORKERS BATCHES RESULT [HOSTS]

STEP is `look` (pixels as numbers, nothing else: the loader is what is measured) or `train` (the
example's normalisation, network and optimizer). With HOSTS, the data hosts that make the batches
are waited for first; NUM_WORKERS is then 0. Four epochs of so many batches.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.utils.data import Subset
from train import BUNDLED, Network, normalise, read_split

from stoker import DataLoader
from stoker_hosts import wait_for_fork_servers

BATCH_SIZE = 64
IMAGE_SHAPE = (1, 96, 96)
# Of each epoch, not counted in the steady speed.
WARMUP_BATCHES = 10
EPOCHS = 4
_DEVICE = torch.device("cpu")

Step = Callable[[torch.Tensor, torch.Tensor], object]


def step_of(name: str) -> Step:
    if name == "look":
        # Into memory that is used again: whether glibc's heap has room for 2 MB more at each step,
        # or grows to 250 MB, is chance, with any loader, and 8% of the samples a second.
        numbers = torch.empty((BATCH_SIZE, *IMAGE_SHAPE))
        return lambda pixels, _labels: numbers.copy_(pixels)
    network = Network()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)

    def train(pixels: torch.Tensor, labels: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(network(normalise(pixels, _DEVICE)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return train


def main(kind: str, step_name: str, num_workers: int, num_batches: int) -> dict[str, object]:
    torch.manual_seed(0)
    whole, _ = read_split(BUNDLED)
    dataset = Subset(whole, range(BATCH_SIZE * num_batches))
    step = step_of(step_name)
    loader_type = DataLoader if kind == "stoker" else torch.utils.data.DataLoader
    loader: torch.utils.data.DataLoader[tuple[torch.Tensor, torch.Tensor]] = loader_type(
        dataset,
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(0),
        drop_last=True,
    )
    # What is imported and compiled at the first use is no loader's.
    step(torch.zeros((BATCH_SIZE, *IMAGE_SHAPE), dtype=torch.uint8), torch.zeros(BATCH_SIZE).long())
    firsts: list[float] = []
    steady_seconds = 0.0
    begun = time.monotonic()
    for _ in range(EPOCHS):
        asked = warm = time.monotonic()
        for number, (pixels, labels) in enumerate(loader):
            if number == 0:
                firsts.append(time.monotonic() - asked)
            step(pixels, labels)
            if number == WARMUP_BATCHES - 1:
                warm = time.monotonic()
            last = time.monotonic()
        steady_seconds += last - warm
    job_seconds = time.monotonic() - begun
    steady_samples = EPOCHS * (len(loader) - WARMUP_BATCHES) * BATCH_SIZE
    return {
        "samples_per_second": steady_samples / steady_seconds,
        "job_samples_per_second": EPOCHS * len(loader) * BATCH_SIZE / job_seconds,
        "first_batch_seconds": firsts,
    }


if __name__ == "__main__":
    _kind, _step, _num_workers, _batches, _result, *_hosts = sys.argv[1:]
    if _hosts:
        # Trainer, launcher, benchmark.
        wait_for_fork_servers(psutil.Process().parents()[1], int(_hosts[0]))
    # As many as the workers leave: threads of torch that spin take the workers' time.
    torch.set_num_threads(1)
    _seen = main(_kind, _step, int(_num_workers), int(_batches))
    Path(_result).write_text(json.dumps(_seen))
