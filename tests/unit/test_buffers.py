"""A batch lives where it was received and decrypted, as long as anything looks at it."""

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stoker.feed.trainer.buffers import BatchBuffers, current_device, set_device
from stoker.feed.wire.codec import encode
from stoker.feed.wire.sealing import TAG_BYTES, Sealer, Unsealer

NBYTES = 300_000


KEY = bytes(32)


def test_no_view_is_overwritten_by_what_comes_later():
    buffers = BatchBuffers()
    sealer, unsealer = Sealer(KEY), Unsealer(KEY)
    # Of every kind: tests/unit/test_stream_buffer_pool.py.
    views: list[np.ndarray] = []
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
        views.append(value[10:20].numpy())
        del payload, value
    gc.collect()
    assert [view.tolist() for view in views] == [[number] * 10 for number in range(100)]


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
