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


def own_gpu_uuids() -> tuple[str, ...]:
    """Returns the UUIDs of the CUDA devices on which this process holds memory.

    Without the kind that the driver writes before them (GPU-, MIG-). Empty: it holds none, or this
    torch does not tell.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ()
    uuids = list[str]()
    for index in range(int(torch.cuda.device_count())):
        if not _held_bytes(torch.cuda, index):
            continue
        properties = torch.cuda.get_device_properties(index)
        # From torch 2.4 on.
        if not hasattr(properties, "uuid"):
            return ()
        uuids.append(bare_uuid(str(properties.uuid)))
    return tuple(uuids)


def bare_uuid(text: str) -> str:
    """Returns a device's UUID without the kind of device that a driver writes before it."""
    return text.removeprefix("GPU-").removeprefix("MIG-")


def _accelerator(torch: ModuleType) -> str | None:
    """Returns the type of this machine's accelerator, `cuda` for NVIDIA's and AMD's.

    Whether CUDA is available is not asked: ranks that the script forks later could not use it then.
    """
    if torch.cuda.is_initialized():
        return "cuda"
    # From torch 2.6 on.
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        return None
    kind = accelerator.current_accelerator()
    if kind is None or kind.type == "cuda" or not accelerator.is_available():
        return None
    return str(kind.type)


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


class FoundDevice:
    """The device that this process trains on, looked for until there is one."""

    def __init__(self, find: Callable[[], Device | None] = find_device) -> None:
        self.device: Device | None = None
        self._find = find
        self._looks = 0

    def look(self) -> Device | None:
        """Returns the device; looks for it ever more rarely, as that takes 0.1 ms."""
        if self.device is None:
            self._looks += 1
            if self._looks & (self._looks - 1) == 0:
                self.device = self._find()
        return self.device

    def look_again(self) -> None:
        self.device = self._find() or self.device


class ExposedWait:
    """The part of a wait in next() for which the device had nothing of the script to do.

    It may still have been busy with steps before, behind which the host's wait was hidden. Only for
    CUDA and the main thread: another one may capture a graph, in which no question is allowed.
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
            # Here and below: an error of the device is the script's, whose next operation raises.
            with contextlib.suppress(RuntimeError):
                self._asked = device.record()

    def got(self, *, wait_seconds: float) -> None:
        """Records that it has it, after `wait_seconds` of the host; does not wait."""
        device = self._device()
        if self._asked is None or device is None or wait_seconds < _LEAST_SECONDS:
            return
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
        if device is None or not device.name.startswith("cuda"):
            return None
        if threading.current_thread() is not threading.main_thread() or device.is_capturing():
            return None
        return device
