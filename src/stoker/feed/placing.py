"""Where batches live: the memory that they were received into, or other, pinned or not."""

import numpy as np
import torch

from stoker.errors import FeedError
from stoker.feed.landing import SMALL_BYTES, Bytes, Landing
from stoker.feed.plans import Plans
from stoker.feed.session import Outcome
from stoker.feed.shipping import unpack_error


class Placing:
    """Used by the pump's thread."""

    def __init__(self) -> None:
        self._landing = Landing()
        self._plans = Plans()
        self._pins_on: int | None = None

    def kept(self, source: Bytes, pins_on: int | None) -> Bytes:
        """`source` where the batch will live: where it was received, if that may be.

        Args:
            pins_on: Number of the accelerator that it is to be pinned for; None: it is not.
        """
        return source if pins_on is None and may_stay(source) else self.landed(source, pins_on)

    def landed(self, source: Bytes, pins_on: int | None) -> Bytes:
        """`source` copied, once, to where the batch will live."""
        payload = self.room(source.nbytes, pins_on)
        np.copyto(payload, source)
        return payload

    def room(self, nbytes: int, pins_on: int | None) -> Bytes:
        """Memory where a batch will live.

        Pinned, it is of torch's allocator, which uses it again and knows of the copies to the
        accelerator that are under way; ours could not.
        """
        if pins_on is None:
            return self._landing.take(nbytes)
        if self._pins_on != pins_on:
            # The device is the thread's; without this, every rank would open device 0.
            torch.accelerator.set_device_index(pins_on)
            self._pins_on = pins_on
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

    def decoded(self, tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> Outcome:
        """The batch, or the error that it cannot be made of that."""
        try:
            return Outcome(self._plans.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return Outcome(error=err)


def may_stay(source: Bytes) -> bool:
    """Whether the batch may live where it was received: the largest numbers lie well there."""
    # A fifth of the time that its address takes.
    return (
        source.nbytes >= SMALL_BYTES
        and np.frombuffer(source, dtype=np.uint64, count=1).flags.aligned
    )


def error_in(data: bytes | memoryview) -> Exception:
    """The error that was sent, or the one that it cannot be rebuilt."""
    try:
        return unpack_error(data)
    except FeedError as err:
        return err
