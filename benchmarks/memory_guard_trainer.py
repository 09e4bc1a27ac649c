"""A training script with as much memory as it is asked to hold; notes each wait for a batch.

Arguments: a file for the notes, steps, megabytes of a batch, megabytes that it holds, milliseconds
of a step, and mean milliseconds that a batch costs a worker, exponentially distributed.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

SAMPLES = 4
# Less is the hand-over itself.
WAITED_SECONDS = 0.005


class Samples(Dataset[torch.Tensor]):
    def __init__(self, batches: int, num_bytes: int, seconds: float) -> None:
        self.length = SAMPLES * batches
        self.width = num_bytes // SAMPLES // 4
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % SAMPLES == 0:
            time.sleep(np.random.default_rng(index).exponential(self.seconds))
        return torch.full((self.width,), float(index))


def main() -> None:
    file, *numbers = sys.argv[1:]
    steps, batch_mb, held_mb, step_ms, cost_ms = map(int, numbers)
    held = np.ones(held_mb << 20, dtype=np.uint8)
    dataset = Samples(steps, batch_mb << 20, cost_ms / 1000)
    weight = torch.zeros(1, requires_grad=True)
    waits: list[float] = []
    began = before = time.monotonic()
    for batch in DataLoader(dataset, SAMPLES, num_workers=2):
        waits.append(time.monotonic() - before)
        if len(waits) == 1:
            began = time.monotonic()
        time.sleep(step_ms / 1000)
        (weight * batch[:, 0].mean()).sum().backward()
        del batch
        before = time.monotonic()
    notes = {
        "steps": len(waits),
        "waited_steps": sum(wait > WAITED_SECONDS for wait in waits[1:]),
        "waited_seconds": sum(waits[1:]),
        "seconds": time.monotonic() - began,
        "held": int(held[-1]),
    }
    Path(file).write_text(json.dumps(notes))


if __name__ == "__main__":
    main()
