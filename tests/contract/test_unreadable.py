"""Datasets that can be pickled, and not read back: which part it is, tried in a child."""

import random
import sys

import pytest

from stoker.feed.wire import dataset
from stoker.feed.wire.dataset import DatasetSpec, pack_spec, unreadable_part


class Parts:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class NeedsSeed(random.Random):
    """Is made again without its argument as it is read back."""

    def __init__(self, seed):
        super().__init__(seed)


class EndsItself:
    def __setstate__(self, state):
        sys.exit(3)

    def __getstate__(self):
        return {"a": 1}


@pytest.mark.parametrize(
    ("attributes", "found"),
    [
        ({"numbers": [1, 2]}, ""),
        ({"inner": {"rng": [NeedsSeed(3)]}}, "dataset.inner['rng'][0] ("),
        ({"licence": EndsItself()}, "dataset.licence ("),
    ],
)
def test_what_cannot_be_read_back_is_named(attributes, found, monkeypatch):
    # However slow this machine is.
    monkeypatch.setattr(dataset, "_ERROR_SECONDS", 150.0)
    spec = DatasetSpec(dataset=Parts(**attributes), collate_fn=str)
    # As it is sent before.
    pack_spec(spec, max_bytes=1 << 20)
    part = unreadable_part(spec)
    assert part.startswith(found)
    assert bool(part) is bool(found)
