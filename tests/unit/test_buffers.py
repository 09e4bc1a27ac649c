"""A batch lives where it was received and decrypted, as long as anything looks at it."""

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

from stoker.errors import ProtocolError
from stoker.feed.trainer import buffers
from stoker.feed.trainer.buffers import MAX_PLANS, BatchBuffers, LayoutCache
from stoker.feed.wire.blocks import BlockBatch
from stoker.feed.wire.codec import Bytes1D, decode, encode
from stoker.feed.wire.sealing import TAG_BYTES, Sealer, Unsealer
from stoker.feed.wire.stream import BufferPool

NBYTES = 300_000
KEY = bytes(32)


def test_no_view_is_overwritten_by_what_comes_later():
    buffers = BatchBuffers()
    sealer, unsealer = Sealer(KEY), Unsealer(KEY)
    # Of every kind: VIEWS.
    views: list[np.ndarray] = []
    for number in range(100):
        pixels = torch.from_numpy(np.full(NBYTES, number, dtype=np.uint8))
        encoded = encode(pixels, allow_pickle=False)
        sent = bytearray(encoded.nbytes)
        encoded.write_into(memoryview(sent))
        sealed = bytearray(len(sent) + TAG_BYTES)
        sealer.record(memoryview(sent), memoryview(sealed))
        payload = buffers.room(len(sent), None)
        unsealer.record(memoryview(sealed), payload.data)
        # From the third on, as all batches that are described alike.
        value = buffers.decoded(encoded.tree, payload, allow_pickle=False).value
        assert value.data_ptr() == payload.ctypes.data
        views.append(value[10:20].numpy())
        del payload, value
    gc.collect()
    assert [view.tolist() for view in views] == [[number] * 10 for number in range(100)]


@pytest.mark.parametrize("size", [0, 1, 17, 1000, 65535, 65536, 300_000])
def test_memory_of_a_batch_begins_with_a_line_of_the_caches_as_torchs_does(size):
    pool = BufferPool()
    taken = [pool.take(size) for _ in range(20)]
    assert {array.ctypes.data % 64 for array in taken} == {0}
    for number, array in enumerate(taken):
        array[:] = number
    assert [array.tolist() for array in taken] == [[number] * size for number in range(20)]


def sent(value: object) -> tuple[bytes, Bytes1D]:
    encoded = encode(value, allow_pickle=True)
    payload = np.empty(encoded.nbytes, dtype=np.uint8)
    encoded.write_into(payload.data)
    return encoded.tree, payload


def decoded(known: LayoutCache, value: object) -> object:
    tree, payload = sent(value)
    return known.decode(tree, payload, allow_pickle=True)


@pytest.fixture
def judged(monkeypatch):
    trees: list[bytes] = []

    def recorded(tree: bytes, payload: Bytes1D | None, *, allow_pickle: bool) -> object:
        trees.append(tree)
        return decode(tree, payload, allow_pickle=allow_pickle)

    monkeypatch.setattr(buffers, "decode", recorded)
    return trees


def image(start: int) -> torch.Tensor:
    return torch.arange(start, start + 24, dtype=torch.int32).reshape(2, 3, 4)


VALUES: dict[str, Callable[[int], object]] = {
    "tensor": image,
    "pair": lambda n: [image(n), torch.tensor([1.5 * n])],
    "tuple": lambda n: (image(n), (image(n + 1), "train", 3, None)),
    "dict": lambda n: {"image": image(n), 2: [torch.tensor([n], dtype=torch.bfloat16)]},
    "300 features": lambda n: {f"feature_{i}": torch.full((32,), n + i) for i in range(300)},
    "empty": lambda n: [image(n), torch.empty(0, 3)],
    "array": lambda n: [image(n), np.arange(n, n + 3)],
    "another order": lambda n: image(n).permute(2, 0, 1),
    "scalar": lambda n: [image(n), np.float32(2)],
    "pickle": lambda n: [image(n), range(3)],
}
PLAIN = {"tensor", "pair", "tuple", "dict", "300 features"}


@pytest.mark.parametrize("kind", VALUES)
def test_batches_are_what_decode_makes_and_plain_ones_are_judged_twice_only(kind, judged):
    known = LayoutCache()
    for n in range(5):
        value = VALUES[kind](n)
        again = decoded(known, value)
        assert repr(again) == repr(decode(*sent(value), allow_pickle=True))
    assert len(judged) == (2 if kind in PLAIN else 5)


def test_batches_share_nothing_but_how_they_were_read():
    known = LayoutCache()
    batches = [decoded(known, {"images": [image(n)]}) for n in range(4)]
    for n, batch in enumerate(batches):
        assert torch.equal(batch["images"][0], image(n))
        batch["images"][0].zero_()
        batch["images"].append("more")
    assert len({id(batch["images"]) for batch in batches}) == 4
    assert torch.equal(batches[3]["images"][0], torch.zeros_like(image(0)))


def in_torchs_memory(value: object) -> tuple[bytes, Bytes1D]:
    tree, payload = sent(value)
    return tree, torch.from_numpy(payload).clone().numpy()


def test_tensors_of_a_batch_in_pinned_memory_are_changed_one_without_the_other():
    known = LayoutCache()
    weight = torch.nn.Parameter(torch.ones(2))
    for n in range(4):
        tree, payload = in_torchs_memory([torch.full((2,), float(n)), torch.ones(2), torch.ones(3)])
        inputs, labels, _ = batch = known.decode(tree, payload, allow_pickle=False)
        loss = (inputs * weight).sum()
        labels.zero_()
        loss.backward()
        labels.mul_(weight)
        assert len({tensor.untyped_storage().data_ptr() for tensor in batch}) == 1
        assert labels.tolist() == [0, 0]
    assert weight.grad.tolist() == [6, 6]


@pytest.mark.parametrize("kind", VALUES)
def test_batches_in_pinned_memory_are_what_was_sent(kind):
    known = LayoutCache()
    for n in range(4):
        value = VALUES[kind](n)
        tree, payload = in_torchs_memory(value)
        assert repr(known.decode(tree, payload, allow_pickle=True)) == repr(value)


AS_TORCH_PINS = {"tensor", "pair", "dict", "300 features"}


@pytest.mark.parametrize("kind", VALUES)
def test_torch_need_not_pin_what_lies_in_pinned_memory_and_would_stay_as_it_is(kind):
    batches = BatchBuffers()
    for n in range(4):
        for tree, payload in (in_torchs_memory(VALUES[kind](n)), sent(VALUES[kind](n))):
            is_torchs = isinstance(payload.base, torch.Tensor)
            outcome = batches.decoded(tree, payload, allow_pickle=True)
            # torch makes lists of tuples, and calls what pins itself.
            assert outcome.is_pinned == (is_torchs and n > 0 and kind in AS_TORCH_PINS)


@pytest.mark.parametrize("kind", VALUES)
def test_a_batch_left_as_its_block_is_the_same_batch(kind):
    batches = BatchBuffers()
    for n in range(4):
        for tree, payload in (in_torchs_memory(VALUES[kind](n)), sent(VALUES[kind](n))):
            outcome = batches.decoded(tree, payload, allow_pickle=True, keeps_block=True)
            value = outcome.value
            assert isinstance(value, BlockBatch) == (n > 0 and kind in PLAIN)
            if isinstance(value, BlockBatch):
                assert value.nbytes == payload.nbytes
                value = value.batch()
            assert repr(value) == repr(VALUES[kind](n))


def test_a_known_tree_with_a_payload_of_another_size_is_judged_and_one_refused_is_refused_again():
    known = LayoutCache()
    tree, payload = sent(image(0))
    for _ in range(3):
        known.decode(tree, payload, allow_pickle=False)
    for of, nbytes in [(known, 64), *[(LayoutCache(), 8)] * 4]:
        with pytest.raises(ProtocolError):
            of.decode(tree, payload[:nbytes].copy(), allow_pickle=False)


def test_few_kinds_are_remembered():
    known = LayoutCache()
    for size in range(1, 3 * MAX_PLANS):
        for _ in range(3):
            decoded(known, torch.zeros(size))
    assert len(known._known) == MAX_PLANS


SIZE = 1 << 20
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
    view = VIEWS[name](torch.frombuffer(pool.take(SIZE), dtype=torch.uint8))
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


def test_blocks_that_wait_for_use_are_given_back_where_memory_is_short():
    pool = BufferPool()
    arrays = [pool.take(SIZE) for _ in range(4)]
    del arrays
    assert pool.idle_bytes() == 4 * SIZE
    pool.keep_at_most(2 * SIZE)
    assert pool.idle_bytes() == 2 * SIZE
    # Also what is given back later.
    arrays = [pool.take(SIZE) for _ in range(4)]
    del arrays
    assert pool.idle_bytes() == 2 * SIZE
