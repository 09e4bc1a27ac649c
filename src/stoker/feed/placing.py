"""Where batches live: in memory that is used again, pinned or not."""

import numpy as np
import torch

from stoker.errors import FeedError
from stoker.feed.landing import Bytes, Landing
from stoker.feed.plans import Plans
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
        payload = self.room(source.nbytes, pins_on)
        np.copyto(payload, source)
        return payload

    def room(self, nbytes: int, pins_on: int | None) -> Bytes:
        """Memory of `nbytes` where a batch will live.

        Pinned, it is of torch's allocator, which uses it again and knows of the copies to the
        accelerator that are under way; ours could not.

        Args:
            pins_on: Number of the accelerator that it is to be pinned for; None: it is not.
        """
        if pins_on is None:
            return self._landing.take(nbytes)
        if self._pins_on != pins_on:
            # The device is the thread's; without this, every rank would open device 0.
            torch.accelerator.set_device_index(pins_on)
            self._pins_on = pins_on
        # The base of the array is a tensor: see Plans.
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()

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
