"""A worker's seeds are those of torch's own worker loop."""

import random

import numpy as np
import torch

from stoker.feed import seeding

Draws = tuple[float, float, float]


def draws() -> Draws:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_torch_seeding_is_that_of_torchs_worker_loop():
    class Drawing:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Draws:
            return draws()

    loader = torch.utils.data.DataLoader(
        Drawing(),
        num_workers=2,
        batch_size=None,
        generator=torch.Generator().manual_seed(3),
        multiprocessing_context="fork",
    )
    found = [tuple(map(float, batch)) for batch in loader]
    base = int(
        torch.empty((), dtype=torch.int64)
        .random_(generator=torch.Generator().manual_seed(3))
        .item()
    )
    for worker_id in range(2):
        assert seeding.seed_as_torch(base, worker_id) == base + worker_id
        assert draws() == found[worker_id]
