"""The crowd's ranks read this dataset: in a module, so that all ranks pickle it alike.

Data hosts hold one copy, and one set of workers, for each different pickle. Classes that a script
defines itself are pickled with a random id, so that each rank's would be another.
"""

import time
from collections.abc import Sequence

import torch
from torch.utils.data import Dataset, default_collate

BATCH_SIZE = 8
SAMPLE_BYTES = 8192
# What a batch costs its worker, slept: a hundred workers on two cores.
COST_SECONDS = 0.02


class Numbers(Dataset[tuple[int, torch.Tensor]]):
    """Holds as sample n the number n, and 8 kB that follow from it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.full((SAMPLE_BYTES,), index % 251, dtype=torch.uint8)


def slept(samples: Sequence[tuple[int, torch.Tensor]]) -> object:
    time.sleep(COST_SECONDS)
    return default_collate(list(samples))
