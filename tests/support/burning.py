"""Trains at a known cost: burns CPU in the dataset and in the model, by CPU time.

A script. Arguments: loading ms per batch, model ms per step, workers, batches per epoch, epochs,
[group=a control group to join].
"""

import atexit
import os
import sys
from pathlib import Path

import torch
from states_script import burn
from torch.utils.data import DataLoader, Dataset

BATCH = 8


class Burning(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, seconds: float, length: int) -> None:
        self.seconds = seconds
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        burn(self.seconds)
        return torch.full((3, 32, 32), float(index % 255)), index


def main() -> None:
    for group in sys.argv[6:]:
        Path(group.removeprefix("group="), "cgroup.procs").write_text(str(os.getpid()))
    loading, model, workers, batches, epochs = (float(word) for word in sys.argv[1:6])
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    atexit.register(lambda: print("exit handlers ran", flush=True))
    train = DataLoader(
        Burning(loading / 1000 / BATCH, int(batches) * BATCH),
        batch_size=BATCH,
        shuffle=True,
        num_workers=int(workers),
    )
    check = DataLoader(Burning(0.0, BATCH * 2), batch_size=BATCH)
    next(iter(check))  # a look at a batch, as scripts do: no training
    for epoch in range(int(epochs)):
        for images, _ in train:
            burn(model / 1000)
            images.div_(255)
            assert float(images.max()) <= 1.0, "a batch was changed by the step before"
            (weight * images.mean()).sum().backward()
        with torch.no_grad():
            for _ in check:
                pass
        print(f"epoch {epoch} done", flush=True)


if __name__ == "__main__":
    main()
