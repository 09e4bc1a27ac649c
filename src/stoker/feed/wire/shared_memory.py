"""Objects that processes share in memory, recognised while a dataset is pickled.

A copy on a data host would never see what the script changes in them, so a loader over such an
object is made in the trainer, by torch's workers. Two ways to recognise one: by its class (queues,
locks, managers), and by its address: the kernel lists which memory of a process is mapped shared.
The second holds for everything that lies there, however it got there: torch's storages,
multiprocessing's arrays, NumPy arrays over either of them, writable memory maps of files.
"""

import bisect
import ctypes
import functools
import mmap
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from stoker.errors import ShippingError

if TYPE_CHECKING:
    import torch

_MAPS = Path("/proc/self/maps")
# Start, end, rights, inode and file; pinned memory belongs to a driver.
_SHARED_MAP = re.compile(r"^(\w+)-(\w+) (r[w-])[x-]s \w+ (\S+ \d+) +(.*)$", re.MULTILINE)
_OF_DRIVERS = ("/dev/nvidia", "/dev/dri", "/dev/kfd", "/dev/accel")
# Forks of multiprocessing have the same modules: dill's and Celery's.
_PACKAGES = ("multiprocessing", "multiprocess", "billiard")
_CLASSES = (
    "connection._ConnectionBase",
    "managers.BaseManager",
    "managers.BaseProxy",
    "queues.Queue",
    "queues.SimpleQueue",
    "shared_memory.ShareableList",
    "shared_memory.SharedMemory",
    "sharedctypes.SynchronizedBase",
    "synchronize.Barrier",
    "synchronize.Condition",
    "synchronize.Event",
    "synchronize.SemLock",
)
_SHARING = frozenset(f"{package}.{name}" for package in _PACKAGES for name in _CLASSES)
# In place of an address: objects of the class are shared wherever they are.
_ANYWHERE = -1
_C_OBJECTS = (ctypes.Array, ctypes.Structure, ctypes.Union, ctypes._SimpleCData)


class SharedMemoryError(ShippingError):
    """A part of a loader is shared in memory; see `sharing_of`."""


class SharedRanges:
    """Addresses of this process that other processes may share, as the kernel maps them."""

    def __init__(self, maps: str) -> None:
        """Reads /proc/self/maps: a read-only map counts where the same file is mapped writable."""
        lines = [line for line in _SHARED_MAP.findall(maps) if not line[4].startswith(_OF_DRIVERS)]
        writable_inodes = {inode for _, _, rights, inode, _ in lines if rights == "rw"}
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end, _, inode, _ in lines:
            if inode in writable_inodes:
                self._starts.append(int(start, 16))
                self._ends.append(int(end, 16))

    def __contains__(self, address: int) -> bool:
        # The kernel lists maps by address, and they do not overlap.
        index = bisect.bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


class SharedMemory:
    """What of this process is shared in memory at one moment, that of the first question."""

    @functools.cached_property
    def _ranges(self) -> SharedRanges:
        return SharedRanges(_MAPS.read_text(errors="replace"))

    def holds(self, value: object) -> bool:
        """Returns whether `value` itself (not what it refers to) is shared between processes."""
        kind: type = type(value)
        read = _address_of(kind)
        if read is None:
            return False
        try:
            address = read(value)
        except (TypeError, ValueError, BufferError, RuntimeError):
            # A closed map, a tensor without memory.
            return False
        return address == _ANYWHERE or (address in self._ranges and not _is_pinned(value))


def sharing_of(value: object) -> str:
    """Returns the kind of a shared object in words: `a tensor in shared memory`."""
    kind: type = type(value)
    if kind.__module__.startswith("torch") and _address_of(kind) is not None:
        return "a tensor in shared memory"
    if kind.__name__ == "memmap":
        return "a writable numpy.memmap, which is shared memory"
    name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
    return f"{name}, shared between processes"


@functools.lru_cache(maxsize=4096)
def _address_of(kind: type) -> Callable[[object], int] | None:
    """Returns how to read the address of what objects of a class hold; None: no memory."""
    if not _SHARING.isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__):
        return _anywhere
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.ndarray):
        return _address_of_array
    if issubclass(kind, _C_OBJECTS):
        return _address_of_c_object
    if issubclass(kind, mmap.mmap | memoryview):
        return _address_of_buffer
    torch = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor | torch.UntypedStorage):
        return _address_of_tensor
    return None


def _anywhere(value: object) -> int:
    return _ANYWHERE


def _address_of_array(value: object) -> int:
    import numpy as np

    return np.asarray(value).ctypes.data


def _address_of_c_object(value: object) -> int:
    return ctypes.addressof(cast("ctypes.Array[ctypes.c_char]", value))


def _address_of_buffer(value: object) -> int:
    import numpy as np

    return np.frombuffer(cast("memoryview", value), dtype=np.uint8).ctypes.data


def _address_of_tensor(value: object) -> int:
    tensor = cast("torch.Tensor | torch.UntypedStorage", value)
    # The same memory on an accelerator is refused elsewhere.
    return tensor.data_ptr() if tensor.device.type == "cpu" else 0


def _is_pinned(value: object) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor | torch.UntypedStorage):
        return False
    # A driver maps pinned memory as shared; a question without an accelerator would start one.
    # Nor may it be asked whether there is one: ranks that the script forks could not use it then.
    return bool(torch.cuda.is_initialized() and value.is_pinned())
