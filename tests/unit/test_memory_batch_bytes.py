"""Batches of any kind have a size, and none of them ends a training."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.feed.memory import num_bytes
from support.property_tests import examples


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
        ([torch.eye(3).to_sparse(), torch.zeros(1)], 64),
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


@settings(max_examples=examples(50), derandomize=True)
@given(st.recursive(st.none() | st.integers(0, 9), lambda x: st.lists(x, max_size=4), max_leaves=9))
def test_nesting_changes_nothing(tree):
    def filled(node: object) -> object:
        if isinstance(node, int):
            return torch.zeros(node, dtype=torch.uint8)
        return [filled(item) for item in node] if isinstance(node, list) else node

    def total(node: object) -> int:
        return (
            sum(map(total, node))
            if isinstance(node, list)
            else node
            if isinstance(node, int)
            else 0
        )

    assert num_bytes(filled(tree)) == total(tree)
