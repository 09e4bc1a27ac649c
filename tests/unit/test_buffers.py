"""A batch lives where it was received and decrypted, as long as anything looks at it."""

import gc
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed.trainer.buffers import BatchBuffers, current_device, set_device
from stoker.feed.wire.codec import encode
from stoker.feed.wire.sealing import TAG_BYTES, Sealer, Unsealer

NBYTES = 300_000


def in_inference_mode(batch: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return batch[10:20]


VIEWS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda batch: batch,
    lambda batch: batch.detach(),
    lambda batch: batch[7:9],
    lambda batch: batch.data,
    lambda batch: batch.numpy(),
    lambda batch: batch[5:].numpy()[2:30],
    lambda batch: torch.from_numpy(batch.numpy()),
    lambda batch: batch.view(torch.int32).view(torch.uint8),
    lambda batch: memoryview(batch.numpy()),
    lambda batch: batch.untyped_storage(),
    in_inference_mode,
)

KEY = bytes(32)


def test_no_view_is_overwritten_by_what_comes_later():
    buffers = BatchBuffers()
    sealer, unsealer = Sealer(KEY), Unsealer(KEY)
    views: list[object] = []
    for number in range(100):
        encoded = encode(
            torch.from_numpy(np.full(NBYTES, number, dtype=np.uint8)), allow_pickle=False
        )
        sent = bytearray(encoded.nbytes)
        encoded.write_into(memoryview(sent))
        sealed = bytearray(len(sent) + TAG_BYTES)
        sealer.record(memoryview(sent), memoryview(sealed))
        payload = buffers.room(len(sent), None)
        unsealer.record(memoryview(sealed), payload.data)
        # From the third on, as all batches that are described alike.
        value = buffers.decoded(encoded.tree, payload, allow_pickle=False).value
        assert isinstance(value, torch.Tensor)
        assert value.data_ptr() == payload.ctypes.data
        views.append(VIEWS[number % len(VIEWS)](value))
        del payload, value
    gc.collect()
    for number, view in enumerate(views):
        if isinstance(view, torch.UntypedStorage):
            view = torch.empty(0, dtype=torch.uint8).set_(view)
        array = np.asarray(view)
        assert array.size > 1
        assert (array == number).all()


@pytest.mark.parametrize("accelerator", [None, SimpleNamespace(current_device_idx=min)])
def test_older_torch_pins_for_the_current_device_of_cuda(accelerator, monkeypatch):
    if accelerator is None:
        monkeypatch.delattr(torch, "accelerator", raising=False)
    else:
        monkeypatch.setattr(torch, "accelerator", accelerator, raising=False)
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    set_device(current_device())
    assert chosen == [3]
