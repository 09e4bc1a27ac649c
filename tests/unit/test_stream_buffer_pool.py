"""Blocks are used again with their last view, not before."""

import gc

import pytest
import torch

from stoker.feed.wire.stream import BufferPool

SIZE = 1 << 20


def tensor_on(pool):
    return torch.frombuffer(pool.take(SIZE), dtype=torch.uint8)


VIEWS = {
    "the tensor": lambda t: t,
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "numpy": lambda t: t.numpy(),
    "slice": lambda t: t[10:20],
    "numpy of a slice": lambda t: t[10:20].numpy()[2:3],
    "another dtype": lambda t: t.view(torch.float32)[4:8],
    "memoryview": lambda t: memoryview(t.numpy()),
    "inference mode": torch.inference_mode()(lambda t: t[10:20]),
    "storage": lambda t: t.untyped_storage(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_block_is_not_reused_while_a_view_lives(name):
    pool = BufferPool()
    view = VIEWS[name](tensor_on(pool))
    gc.collect()
    assert pool.idle_bytes() == 0
    del view
    gc.collect()
    assert pool.idle_bytes() == SIZE


def test_the_same_block_comes_back():
    pool = BufferPool()
    array = pool.take(SIZE)
    address = array.ctypes.data
    del array
    assert pool.take(SIZE - 100).ctypes.data == address


def test_idle_memory_is_bounded():
    pool = BufferPool(max_idle_bytes=3 * SIZE)
    arrays = [pool.take(SIZE) for _ in range(10)]
    arrays.clear()
    assert pool.idle_bytes() == 3 * SIZE


@pytest.mark.parametrize("size", [0, 1, 65535, 65536, 65537, 100_000, 4_816_896, 19_267_584])
def test_array_has_the_size_asked_for(size):
    assert BufferPool().take(size).nbytes == size


def test_at_most_a_quarter_of_a_block_is_unused():
    for size in range(1 << 20, 1 << 22, 12_345):
        pool = BufferPool()
        pool.take(size)
        assert size <= pool.idle_bytes() <= size * 1.25 + 4096
