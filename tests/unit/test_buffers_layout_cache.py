from collections.abc import Callable

import numpy as np
import pytest
import torch

from stoker.errors import ProtocolError
from stoker.feed.trainer import buffers
from stoker.feed.trainer.buffers import MAX_PLANS, LayoutCache
from stoker.feed.wire.codec import Bytes1D, decode, encode


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
    "empty": lambda n: [image(n), torch.empty(0, 3)],
    "array": lambda n: [image(n), np.arange(n, n + 3)],
    "another order": lambda n: image(n).permute(2, 0, 1),
    "scalar": lambda n: [image(n), np.float32(2)],
    "pickle": lambda n: [image(n), range(3)],
}


PLAIN = {"tensor", "pair", "tuple", "dict"}


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
        assert isinstance(batch, dict)
        assert torch.equal(batch["images"][0], image(n))
        batch["images"][0].zero_()
        batch["images"].append("more")
    assert len({id(batch["images"]) for batch in batches if isinstance(batch, dict)}) == 4
    assert torch.equal(batches[3]["images"][0], torch.zeros_like(image(0)))


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
