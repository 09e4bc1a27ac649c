"""The clock by which steps are timed: the device's where the script trains on one, else the host's.

The host runs ahead of an accelerator: it launches kernels and takes batches that the device reaches
later, so times of the host say how fast launches come and not how fast steps are. A mark puts an
event into the script's stream. The device passes it in its turn, behind the work launched before.

    clock = StepClock()
    asked = clock.mark()
    batch = next(batches)
    taken = clock.mark()
    ...
    if clock.is_passed(taken):
        idle = clock.seconds(asked, taken)

`idle` is the time for which the device had nothing of this script to do: 0 where it was still busy
with steps before, however long the host waited in next(). A mark costs some microseconds of the
host and never waits; only `wait_for` does.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

HOST = "host"


class DeviceEvent(Protocol):
    """A place in a device's stream, as `torch.cuda.Event(enable_timing=True)`."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Blocks until the device has passed it."""

    def elapsed_time(self, end_event: "DeviceEvent") -> float:
        """Returns the milliseconds between two passed events of one device."""


class Device(Protocol):
    """A device with streams and timed events; `name` is as in `torch.device`."""

    name: str

    def is_capturing(self) -> bool:
        """Whether the current stream records a graph: then nothing may be asked of the device."""

    def record(self) -> DeviceEvent:
        """Returns an event at the end of the script's current stream; does not wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in the script's loop.

    Attributes:
        host_seconds: Monotonic seconds at which the host was there.
        device: Name of the device whose stream holds `event`.
        event: None: the host's clock counts here.
    """

    host_seconds: float
    device: str = HOST
    event: DeviceEvent | None = None


class StepClock:
    """Marks in a loop and the seconds between them, by the device that this process trains on.

    A device is looked for at each mark until the process holds memory of one: scripts make their
    model before their first step, or in it.
    """

    def __init__(
        self,
        *,
        find: "Callable[[], Device | None] | None" = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._find = find or find_device
        self._now = now
        self._device: Device | None = None

    @property
    def name(self) -> str:
        """The device's name, as `cuda:0`, or HOST."""
        return self._device.name if self._device else HOST

    def look_again(self) -> None:
        """Looks for the device once more: a script may have moved to another one."""
        self._device = self._find() or self._device

    def mark(self) -> Mark:
        """Marks where host and stream are now; does not wait for the device."""
        if self._device is None:
            self._device = self._find()
        device = self._device
        now = self._now()
        # An error of the device is the script's: its next operation raises it.
        with contextlib.suppress(RuntimeError):
            if device is not None and not device.is_capturing():
                return Mark(host_seconds=now, device=device.name, event=device.record())
        return Mark(host_seconds=now)

    def is_passed(self, mark: Mark) -> bool:
        """Whether the device has reached the mark; does not wait.

        False while a graph is captured: a question would spoil it.
        """
        device = self._device
        if mark.event is None or device is None:
            return True
        try:
            return not device.is_capturing() and mark.event.query()
        except RuntimeError:
            # The device is lost: nothing passes any more.
            return True

    def wait_for(self, mark: Mark) -> None:
        """Blocks until the device has reached the mark: for the end of a phase."""
        if mark.event is not None:
            with contextlib.suppress(RuntimeError):
                mark.event.synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        """Returns the seconds between two passed marks.

        The device's where both are in the stream of one device, else the host's.
        """
        if first.event is not None and last.event is not None and first.device == last.device:
            with contextlib.suppress(RuntimeError):
                return max(0.0, first.event.elapsed_time(last.event) / 1e3)
        return last.host_seconds - first.host_seconds


def find_device() -> Device | None:
    """Returns the device on which this process holds memory; None: it uses none.

    The current one, else the one with most memory: scripts without `set_device` train on another.
    It neither initialises a device nor makes a context on one.
    """
    # Looked up, not imported: the launcher and TensorFlow's scripts need none.
    torch = sys.modules.get("torch")
    accelerator = _accelerator(torch) if torch else None
    if torch is None or accelerator is None:
        return None
    module = torch.cuda if accelerator == "cuda" else torch.get_device_module(accelerator)
    # XPU and others have it as CUDA has; MPS needs no initialisation.
    if not getattr(module, "is_initialized", lambda: True)():
        return None
    current = int(getattr(module, "current_device", lambda: 0)())
    if _held_bytes(module, current):
        return _device(accelerator, current)
    others = range(int(module.device_count()))
    most = max(others, key=lambda index: _held_bytes(module, index), default=current)
    return _device(accelerator, most) if _held_bytes(module, most) else None


def _accelerator(torch: ModuleType) -> str | None:
    """Returns the type of this machine's accelerator, `cuda` for NVIDIA's and AMD's."""
    if torch.cuda.is_available():
        return "cuda"
    # From torch 2.6 on.
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None or not accelerator.is_available():
        return None
    return str(accelerator.current_accelerator().type)


def _held_bytes(module: ModuleType, index: int) -> int:
    if hasattr(module, "memory_allocated"):
        return int(module.memory_allocated(index))
    # MPS has one device.
    return int(getattr(module, "current_allocated_memory", lambda: 1)())


def _device(kind: str, index: int) -> Device:
    return CudaDevice(index) if kind == "cuda" else AcceleratorDevice(kind, index)


class CudaDevice:
    """A CUDA or ROCm device."""

    def __init__(self, index: int) -> None:
        import torch

        self.name = f"cuda:{index}"
        self._index = index
        self._cuda = torch.cuda

    def is_capturing(self) -> bool:
        return self._cuda.is_current_stream_capturing()

    def record(self) -> DeviceEvent:
        event = self._cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._cuda.current_stream(self._index))
        return cast("DeviceEvent", event)


class AcceleratorDevice:
    """Any other device that `torch.accelerator` knows, with torch's general events."""

    def __init__(self, kind: str, index: int) -> None:
        import torch

        self.name = f"{kind}:{index}"
        self._index = index
        self._torch = torch

    def is_capturing(self) -> bool:
        return False

    def record(self) -> DeviceEvent:
        event = self._torch.Event(self.name, enable_timing=True)
        event.record(self._torch.accelerator.current_stream(self._index))
        return cast("DeviceEvent", event)
