import gc
import os
import resource
from collections.abc import Callable

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from stoker.profile.batches import CACHED_BATCHES, Cache, OtherLoaders, copy_of, kind_of
from stoker.profile.steps import StepClock

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
    others, own, unread, clock = OtherLoaders(), loader(), loader(), StepClock()
    # One that was not read as is, is not replayed.
    batch = others.next_batch(unread, iter(unread), delivered=0, is_replaying=True, clock=clock)
    assert torch.equal(batch, torch.arange(4.0))
    assert others.count == 0
    others.take_waits()
    inner = iter(own)
    read = [
        others.next_batch(own, inner, delivered=at, is_replaying=False, clock=clock)
        for at in range(3)
    ]
    assert others.count == 3
    waits = others.take_waits()
    assert all(clock.seconds(asked, got) > 0 for asked, got in waits)
    assert len(waits) == 3
    assert others.take_waits() == ()
    # Replayed, its own iterator is not asked: it is at its end.
    again = [
        others.next_batch(own, inner, delivered=at, is_replaying=True, clock=clock)
        for at in range(3)
    ]
    assert all(torch.equal(one, other) for one, other in zip(read, again, strict=True))
    with pytest.raises(StopIteration):
        others.next_batch(own, inner, delivered=3, is_replaying=True, clock=clock)
    assert others.count == 3
    assert others.take_waits() == ()


def test_a_loader_without_a_length_never_ends_in_the_replay():
    others, clock = OtherLoaders(), StepClock()
    own = DataLoader(Stream(), batch_size=2)
    inner = iter(own)
    others.next_batch(own, inner, delivered=0, is_replaying=False, clock=clock)
    for index in range(20):
        others.next_batch(own, inner, delivered=index, is_replaying=True, clock=clock)
    assert others.count == 1


def faults(read: Callable[[], object]) -> int:
    """Returns how many pages were mapped into this process while something was read."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    read()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux maps pages when they are read")
def test_a_batch_of_a_worker_is_replayed_in_memory_that_was_not_read_before():
    cache = Cache()
    # As torch hands a worker's batch over.
    batch = torch.rand(2, 3, 256, 1024).share_memory_()
    pages = batch.numel() * batch.element_size() // resource.getpagesize()
    assert kind_of(batch) == "worker"
    cache.add(batch)
    for _ in range(2):
        given = cache.give(0)
        assert faults(given.sum) > pages / 64
        assert torch.equal(given, batch)
        given.fill_(7)
    # What the trainer makes itself lies in memory that it has read.
    own = Cache()
    own.add(torch.rand(2, 3, 256, 1024))
    given = own.give(0)
    assert faults(given.sum) < pages / 64


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux maps pages when they are read")
def test_a_batch_that_its_worker_holds_is_mapped_again_and_frees_nothing():
    cache = Cache()
    assert not cache.keep_pages()
    batch = torch.rand(2, 3, 256, 1024)
    pages = batch.numel() * batch.element_size() // resource.getpagesize()
    cache.add({"pixels": batch.share_memory_(), "labels": torch.arange(2)})
    assert cache.keep_pages()
    # Once: it has nothing more to change.
    assert not cache.keep_pages()
    # What tests before have left has descriptors as well.
    gc.collect()
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        given = cache.give(0)
        assert faults(given["pixels"].sum) > pages / 64
        assert torch.equal(given["pixels"], batch)
        assert given["labels"].tolist() == [0, 1]
        # What a script changes is in no later batch.
        given["pixels"].fill_(7)
        assert len(os.listdir("/proc/self/fd")) <= files + 2
    del given, cache
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("kind", ["own", "worker", "pinned"])
def test_a_copy_has_the_values_type_and_layout_of_its_batch(kind):
    images = torch.rand(4, 3, 256, 256).to(memory_format=torch.channels_last)
    for tensor in (images, images.to(torch.bfloat16), torch.tensor(3), torch.zeros(0, 5)):
        made = copy_of(tensor, kind)
        assert torch.equal(made, tensor)
        assert (made.dtype, made.stride()) == (tensor.dtype, tensor.stride())
        assert made.data_ptr() != tensor.data_ptr() or not tensor.numel()
    # Part of a batch, and one that needs gradients.
    assert torch.equal(copy_of(images[1:, :1], kind), images[1:, :1])
    assert not copy_of(images.clone().requires_grad_(), kind).requires_grad


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a device pins memory")
def test_a_pinned_batch_is_replayed_in_pinned_memory():
    cache = Cache()
    cache.add({"x": torch.rand(1 << 20).pin_memory(), "y": torch.rand(4)})
    given = cache.give(0)
    assert given["x"].is_pinned()
    assert not given["y"].is_pinned()
