"""Reads a dataset of which some samples are bad, two epochs, and writes what it got.

bad_samples_script.py FILE WORKERS [--kill] [--slow] [--deadly]
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from stoker import DataLoader

NUM_SAMPLES = 90
BAD = (3, 4, 17, 40, 41, 42, 43, 88)
# With --deadly these end their process, or hang.
CRASHING, HANGING = 21, 60


class Damaged(Dataset):
    """Draws random numbers, so that what a bad sample has drawn would show."""

    def __init__(self, killed: str, seconds: float, *, is_deadly: bool) -> None:
        self.killed = killed
        self.is_deadly = is_deadly
        self.seconds = seconds

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.rand(3)
        # Slow enough for several workers to make one batch.
        time.sleep(self.seconds)
        if index == 50 and self.killed and not os.path.exists(self.killed):
            Path(self.killed).touch()
            os._exit(9)
        if self.is_deadly and index == CRASHING:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.is_deadly and index == HANGING:
            time.sleep(3600)
        if index in BAD:
            raise ValueError(f"file {index}, damaged")
        return index + noise


def main() -> None:
    file, workers = Path(sys.argv[1]), int(sys.argv[2])
    killed = str(file.with_suffix(".killed")) if "--kill" in sys.argv else ""
    torch.manual_seed(5)
    seconds = 0.01 if "--slow" in sys.argv else 0.0
    dataset = Damaged(killed, seconds, is_deadly="--deadly" in sys.argv)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
    batches = [batch.tolist() for _ in range(2) for batch in loader]
    file.write_text(json.dumps(batches))


if __name__ == "__main__":
    main()
