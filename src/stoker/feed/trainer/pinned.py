"""Pinned memory, from which an accelerator copies without the host's help.

All of it is torch's: its allocator knows which copies are under way, and keeps what is free.
Nothing here initialises an accelerator that the script does not use.
"""

import functools
import threading
import time
from collections.abc import Callable

import torch

from stoker.feed.wire.stream import Bytes

# Between two looks at how much is pinned: each takes 0.1 ms.
_LOOK_SECONDS = 1.0


# torch.accelerator has these names from 2.7 on; before, torch pins for CUDA.
def current_device() -> int:
    """Returns the number of this thread's accelerator, which batches are pinned for."""
    accelerator = getattr(torch, "accelerator", None)
    return int(getattr(accelerator, "current_device_index", torch.cuda.current_device)())


def set_device(number: int) -> None:
    accelerator = getattr(torch, "accelerator", None)
    getattr(accelerator, "set_device_index", torch.cuda.set_device)(number)


def device_in_use() -> int | None:
    """Returns the number of the accelerator that this process uses; None: none so far."""
    kind = _kind_of_accelerator()
    module = getattr(torch, kind) if kind else None
    is_initialized = getattr(module, "is_initialized", None)
    if is_initialized is None or not is_initialized():
        return None
    return current_device()


@functools.cache
def _kind_of_accelerator() -> str | None:
    """Returns what torch was built for: cuda (ROCm's name, too), xpu ...; None: CPUs only."""
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return "cuda"
    device = accelerator.current_accelerator()
    return None if device is None else str(device.type)


class PinnedMemory:
    """Pinned memory for the batches of a process; thread-safe.

    Args:
        max_bytes: From there on what is free is given back. Where more than half of that is in use,
            once it has doubled: to give back waits for the accelerator. torch pins powers of two.
        warn: Called once, with the reason, if memory cannot be pinned; then nothing more is.
    """

    def __init__(
        self, *, max_bytes: int = 1 << 30, warn: Callable[[str], None] = lambda reason: None
    ) -> None:
        self.has_failed = False
        self._max_bytes = self._limit = max_bytes
        self._warn = warn
        self._look_at = 0.0
        self._lock = threading.Lock()
        self._of_thread = threading.local()

    def take(self, nbytes: int, device: int) -> Bytes | None:
        """Returns memory pinned for that device, a tensor as its base; None: there is none."""
        if self.has_failed:
            return None
        try:
            if getattr(self._of_thread, "device", None) != device:
                # Set for each thread; without this, every rank would open device 0.
                set_device(device)
                self._of_thread.device = device
            self._give_back()
            return _pinned(nbytes)
        except RuntimeError as err:
            return self._take_of_freed(nbytes, reason=str(err).partition("\n")[0])

    def _take_of_freed(self, nbytes: int, *, reason: str) -> Bytes | None:
        try:
            # What lies free may be of other sizes.
            empty_host_cache()
            return _pinned(nbytes)
        except RuntimeError:
            with self._lock:
                is_first = not self.has_failed
                self.has_failed = True
            if is_first:
                self._warn(f"{nbytes} bytes: {reason}")
            return None

    def _give_back(self) -> None:
        now = time.monotonic()
        with self._lock:
            is_early = now < self._look_at
            if not is_early:
                self._look_at = now + _LOOK_SECONDS
        if not is_early and pinned_bytes() > self._limit:
            empty_host_cache()
            self._limit = max(self._max_bytes, 2 * pinned_bytes())


def _pinned(nbytes: int) -> Bytes:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()


def pinned_bytes() -> int:
    """Returns what torch has pinned, in use or free; 0 where it does not say (before 2.7)."""
    stats_of = getattr(torch.cuda, "host_memory_stats_as_nested_dict", None)
    stats = stats_of() if stats_of is not None and _kind_of_accelerator() == "cuda" else {}
    # Up to 2.8 `allocated_bytes` is what is in use. What is in use is miscounted up to 2.11: a
    # block that was copied from leaves it by the wrong size, in ATen's CachingHostAllocator.h.
    total = stats.get("reserved_bytes") or stats.get("allocated_bytes") or {"current": 0}
    return int(total["current"])


def empty_host_cache() -> None:
    """Gives pinned memory that is free back to the system; waits for the accelerator."""
    accelerator = getattr(torch, "accelerator", None)
    empty = getattr(accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", None))
    if empty is not None:
        empty()
