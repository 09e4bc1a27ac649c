"""Batches of any kind have a size, and none of them ends a training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed.memory import num_bytes


class Unwilling:
    dtype = "float32"

    @property
    def nbytes(self) -> int:
        raise RuntimeError("on another device")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 4), 64),
        (torch.zeros(3, dtype=torch.bfloat16), 6),
        (np.zeros(3, np.uint8), 3),
        ({"x": [torch.zeros(2), (np.zeros(1), "name")], "y": 7}, 16),
        (SimpleNamespace(x=torch.zeros(2), y=torch.zeros(1), name="graph"), 12),
        # Two indices of 8 bytes and a value of 4 for each of three elements.
        (torch.eye(3).to_sparse(), 3 * (16 + 4)),
        ([[torch.eye(3).to_sparse(), [], [[torch.zeros(1)]]], None], 64),
        (Unwilling(), 0),
        ("text", 0),
        (b"bytes", 0),
        (None, 0),
        (3.5, 0),
    ],
)
def test_the_bytes_of_a_batch_are_those_of_its_tensors(batch, size):
    assert num_bytes(batch) == size


def test_a_batch_that_holds_itself_ends():
    batch: list[object] = [torch.zeros(1)]
    batch.append(batch)
    assert num_bytes(batch) >= 4
