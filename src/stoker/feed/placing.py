"""Where batches live: in memory that is used again, pinned or not."""

import numpy as np
import torch

from stoker.errors import FeedError
from stoker.feed.landing import Bytes, Landing
from stoker.feed.plans import Plans
from stoker.feed.sealing import TAG_BYTES
from stoker.feed.session import Outcome
from stoker.feed.shipping import unpack_error


class Placing:
    """Used by one thread.

    Args:
        landing: Memory that is not pinned; absent: one of its own.
    """

    def __init__(self, landing: Landing | None = None) -> None:
        self._landing = landing or Landing()
        self._plans = Plans()
        self._pins_on: int | None = None

    def landed(self, source: Bytes, pins_on: int | None) -> Bytes:
        """`source` copied, once, to where the batch will live."""
        payload, _ = self._room(source.nbytes, pins_on)
        np.copyto(payload, source)
        return payload

    def room_to_receive(self, nbytes: int, pins_on: int | None) -> tuple[Bytes, memoryview]:
        """Memory where a batch will live, and the same with TAG_BYTES more, to receive it in.

        Args:
            pins_on: Number of the accelerator that it is to be pinned for; None: it is not.
        """
        payload, whole = self._room(nbytes, pins_on, spare=TAG_BYTES)
        return payload, whole.data

    def _room(self, nbytes: int, pins_on: int | None, *, spare: int = 0) -> tuple[Bytes, Bytes]:
        """An array of `nbytes`, and one of all of its memory.

        Pinned, it is of torch's allocator, which uses it again and knows of the copies to the
        accelerator that are under way; ours could not.
        """
        if pins_on is None:
            whole = self._landing.take(nbytes + spare)
            return whole[:nbytes], whole
        if self._pins_on != pins_on:
            # The device is the thread's; without this, every rank would open device 0.
            torch.accelerator.set_device_index(pins_on)
            self._pins_on = pins_on
        pinned = torch.empty(nbytes + spare, dtype=torch.uint8, pin_memory=True)
        # The base of the array is a tensor: see Plans.
        return pinned[:nbytes].numpy(), pinned.numpy()

    def decoded(self, tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> Outcome:
        """The batch, or the error that it cannot be made of that."""
        try:
            return Outcome(self._plans.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return Outcome(error=err)


def error_in(data: bytes | memoryview) -> Exception:
    """The error that was sent, or the one that it cannot be rebuilt."""
    try:
        return unpack_error(data)
    except FeedError as err:
        return err
