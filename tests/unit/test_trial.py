"""How the first batch of a data host is compared with torch's own."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed.trial import difference

FLOATS = torch.linspace(0, 1, 11)


@pytest.mark.parametrize(
    ("one", "other", "leaf"),
    [
        ([5, 5], [5, 5], ""),
        # The same object stands in two places.
        ([5, 5], [7, 5], "batch[0]"),
        ((1, {"a": "x"}), (1, {"a": "y"}), "batch[1]['a']"),
        ({"a": 1}, {"b": 1}, "batch: other keys"),
        (torch.zeros(2), torch.zeros(3), "batch: torch.float32 of (2,)"),
        (torch.zeros(2), torch.zeros(2).double(), "batch: torch.float32 of (2,)"),
        (FLOATS, FLOATS + 0.009, ""),
        (FLOATS, FLOATS + 0.02, "batch: other values"),
        (torch.tensor([np.nan, 1.0]), torch.tensor([np.nan, 1.0]), ""),
        (np.uint8([3, 250]), np.uint8([5, 248]), ""),
        (np.uint8([3, 250]), np.uint8([6, 250]), "batch: other values"),
        (torch.tensor([3]), torch.tensor([4]), "batch: other values"),
        (SimpleNamespace(x=FLOATS), SimpleNamespace(x=-FLOATS), "batch['x']: other values"),
    ],
)
def test_batches_differ_beyond_what_another_cpu_does(one, other, leaf):
    found = difference(one, other)
    assert found.startswith(leaf)
    assert bool(found) == bool(leaf)
