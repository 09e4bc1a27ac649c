"""Datasets and samplers that draw: for scripts, and for processes that are spawned."""

import hashlib
import random
from collections.abc import Iterator

import numpy as np
import torch
import torch.utils.data as data

from support.dropin_claims import AtOnce, Plain


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


class Counting:
    """Yields ten numbers, and has a state: for a sampler, or an iterable dataset."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        while self.at < 10:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, object]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def drawn(kind: type[data.DataLoader[int]], options: dict[str, object]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    loader = kind(Plain(), batch_sampler=AtOnce(generator), generator=generator, **options)
    return [batch.tolist() for _ in range(3) for batch in loader]


DRAWN: list[dict[str, object]] = [
    {},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True, "timeout": 60},
]
