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


def test_a_cache_holds_copies_gives_copies_and_goes_round():
    cache = Cache()
    batch = torch.zeros(1)
    for number in range(CACHED_BATCHES + 5):
        batch.fill_(number)
        cache.add(batch)
    assert len(cache.batches) == CACHED_BATCHES
    for _ in range(2):
        given = cache.give(CACHED_BATCHES + 1)
        assert torch.equal(given, torch.ones(1))
        given.fill_(7)


def test_a_loader_beside_is_replayed_for_as_long_as_its_epoch_lasts():
    others, own, unread = OtherLoaders(), loader(), loader()
    # One that was not read as is, is not replayed.
    batch = others.next_batch(unread, iter(unread), delivered=0, is_replaying=True)
    assert torch.equal(batch, torch.arange(4.0))
    assert others.count == 0
    inner = iter(own)
    read = [others.next_batch(own, inner, delivered=at, is_replaying=False) for at in range(3)]
    assert others.count == 3
    assert others.take_waited() > 0
    assert others.take_waited() == 0.0
    # Replayed, its own iterator is not asked: it is at its end.
    again = [others.next_batch(own, inner, delivered=at, is_replaying=True) for at in range(3)]
    assert all(torch.equal(one, other) for one, other in zip(read, again, strict=True))
    with pytest.raises(StopIteration):
        others.next_batch(own, inner, delivered=3, is_replaying=True)
    assert others.count == 3
    assert others.take_waited() == 0.0


def test_a_loader_without_a_length_never_ends_in_the_replay():
    others = OtherLoaders()
    own = DataLoader(Stream(), batch_size=2)
    inner = iter(own)
    others.next_batch(own, inner, delivered=0, is_replaying=False)
    for index in range(20):
        others.next_batch(own, inner, delivered=index, is_replaying=True)
    assert others.count == 1
