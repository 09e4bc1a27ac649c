"""Checks batches that are given out again, and loaders that are read next to the main one."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from stoker.profile.batches import CACHED_BATCHES, Cache, OtherLoaders

Loader = DataLoader[torch.Tensor]


def loader(length: int = 12) -> Loader:
    return DataLoader(torch.arange(float(length)), batch_size=4)


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self):
        while True:
            yield torch.zeros(1)


def test_a_cache_holds_copies_and_gives_copies():
    cache = Cache()
    batch = torch.zeros(2)
    cache.add(batch)
    batch.fill_(9)
    given = cache.give(5)
    assert torch.equal(given, torch.zeros(2))
    given.fill_(7)
    assert torch.equal(cache.give(0), torch.zeros(2))


def test_a_cache_is_bounded_and_goes_round():
    cache = Cache()
    for number in range(CACHED_BATCHES + 5):
        cache.add(torch.tensor([float(number)]))
    assert len(cache.batches) == CACHED_BATCHES
    assert torch.equal(cache.give(CACHED_BATCHES + 1), torch.tensor([1.0]))


def test_a_loader_beside_is_replayed_for_as_long_as_its_epoch_lasts():
    others, own = OtherLoaders(), loader()
    inner = iter(own)
    read = [
        others.next_batch(own, inner, delivered=index, is_replaying=False) for index in range(3)
    ]
    assert others.count == 3
    assert others.take_waited() > 0
    assert others.take_waited() == 0.0
    # Replayed, its own iterator is not asked: it is at its end.
    again = [
        others.next_batch(own, inner, delivered=index, is_replaying=True) for index in range(3)
    ]
    assert all(torch.equal(one, other) for one, other in zip(read, again, strict=True))
    with pytest.raises(StopIteration):
        others.next_batch(own, inner, delivered=3, is_replaying=True)
    assert others.count == 3
    assert others.take_waited() == 0.0


def test_a_loader_that_was_not_read_as_is_is_not_replayed():
    others, own = OtherLoaders(), loader()
    batch = others.next_batch(own, iter(own), delivered=0, is_replaying=True)
    assert torch.equal(batch, torch.arange(4.0))
    assert others.count == 0


def test_a_loader_without_a_length_never_ends_in_the_replay():
    others = OtherLoaders()
    own = DataLoader(Stream(), batch_size=2)
    inner = iter(own)
    others.next_batch(own, inner, delivered=0, is_replaying=False)
    for index in range(20):
        others.next_batch(own, inner, delivered=index, is_replaying=True)
    assert others.count == 1
