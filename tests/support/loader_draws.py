"""Datasets and samplers that draw: for scripts, and for processes that are spawned."""

import hashlib
import random

import numpy as np
import torch
import torch.utils.data as data


class Drawing(data.Dataset[torch.Tensor]):
    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


def hashes(loader: data.DataLoader[torch.Tensor], epochs: int = 2) -> list[str]:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    return [
        hashlib.sha256(batch.numpy().tobytes()).hexdigest()
        for _ in range(epochs)
        for batch in loader
    ]
