"""Timed events in the stream of the device that a script trains on.

The host runs ahead of an accelerator: what it launches now, the device reaches later. An event at
the end of the stream is passed by the device in its turn; the time between two is the device's.
Torch is looked up and not imported, as TensorFlow's scripts have none.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Protocol, cast

# A batch that is ready comes in less: then nothing is asked of the device.
_LEAST_SECONDS = 0.5e-3


class DeviceEvent(Protocol):
    """A place in a device's stream, as `torch.cuda.Event(enable_timing=True)`; times are in ms."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "DeviceEvent") -> float: ...


class Device:
    """A CUDA or ROCm device; `name` is as in `torch.device`."""

    def __init__(self, index: int, cuda: ModuleType) -> None:
        self.name = f"cuda:{index}"
        self._index = index
        self._cuda = cuda

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph: then nothing may be asked of the device."""
        return bool(self._cuda.is_current_stream_capturing())

    def record(self) -> DeviceEvent:
        """Returns an event at the end of the script's current stream; does not wait."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._index))
        return cast("DeviceEvent", event)


def find_device() -> Device | None:
    """Returns the CUDA or ROCm device on which this process holds memory; None: it uses none.

    The current one, else the one with most memory: scripts without `set_device` train on another.
    """
    torch = sys.modules.get("torch")
    # Not whether CUDA is available: ranks that the script forks later could not use it then.
    if torch is None or not torch.cuda.is_initialized():
        return None
    cuda = torch.cuda
    held = [int(cuda.memory_allocated(index)) for index in range(cuda.device_count())]
    if not any(held):
        return None
    current = int(cuda.current_device())
    return Device(current if held[current] else held.index(max(held)), cuda)


class FoundDevice:
    """The device that this process trains on, looked for until there is one."""

    def __init__(self, find: Callable[[], Device | None] = find_device) -> None:
        self.device: Device | None = None
        self._find = find

    def look(self) -> Device | None:
        self.device = self.device or self._find()
        return self.device


class ExposedWait:
    """The part of a wait in next() for which the device had nothing of the script to do.

    It may still have been busy with steps before, behind which the host's wait was hidden. Only for
    the main thread: another one may capture a graph, in which no question is allowed. An error of
    the device is the script's, whose next operation raises.
    """

    def __init__(self, found: FoundDevice) -> None:
        self._found = found
        self._asked: DeviceEvent | None = None
        self._got: DeviceEvent | None = None
        self._is_hidden = False

    def asked(self, *, is_first: bool = False) -> None:
        """Records that the script asks for a batch; of the `is_first` the whole wait counts."""
        self._asked = self._got = None
        self._is_hidden = False
        device = self._device()
        if device is not None and not is_first:
            with contextlib.suppress(RuntimeError):
                self._asked = device.record()

    def got(self, *, wait_seconds: float) -> None:
        """Records that it has it, after `wait_seconds` of the host; does not wait."""
        if self._asked is None or wait_seconds < _LEAST_SECONDS:
            return
        device = self._device()
        if device is not None:
            with contextlib.suppress(RuntimeError):
                self._is_hidden = not self._asked.query()
                # The stream is empty now, so that the device passes it at once.
                self._got = None if self._is_hidden else device.record()

    def seconds(self, wait_seconds: float) -> float:
        """Returns the exposed part of the wait; all of it where it is not known."""
        if self._is_hidden:
            return 0.0
        if self._asked is not None and self._got is not None and self._device() is not None:
            with contextlib.suppress(RuntimeError):
                if self._got.query():
                    return min(wait_seconds, self._asked.elapsed_time(self._got) / 1e3)
        return wait_seconds

    def _device(self) -> Device | None:
        device = self._found.look()
        if device is None or threading.current_thread() is not threading.main_thread():
            return None
        return None if device.is_capturing() else device
