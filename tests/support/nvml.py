"""A double of NVML and its package: what it answers and refuses is as in nvml.h and pynvml.

Never kinder than the real one: it answers nothing before nvmlInit, nothing for a GPU that is lost,
and of a MIG slice, or a GPU in MIG mode, only what those tell.
"""

import dataclasses
import json
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

NVML_CLOCK_SM = 1
NVML_PCIE_UTIL_RX_BYTES = 1
VARIABLE = "DOUBLE_OF_NVML"

# Codes and texts of the errors.
ERRORS = {
    1: ("UNINITIALIZED", "Uninitialized"),
    2: ("INVALID_ARGUMENT", "Invalid Argument"),
    3: ("NOT_SUPPORTED", "Not Supported"),
    4: ("NO_PERMISSION", "Insufficient Permissions"),
    6: ("NOT_FOUND", "Not Found"),
    9: ("DRIVER_NOT_LOADED", "Driver Not Loaded"),
    10: ("TIMEOUT", "Timeout"),
    12: ("LIBRARY_NOT_FOUND", "NVML Shared Library Not Found"),
    13: ("FUNCTION_NOT_FOUND", "Function Not Found"),
    15: ("GPU_IS_LOST", "GPU is lost"),
    16: ("RESET_REQUIRED", "GPU requires restart"),
    18: ("LIB_RM_VERSION_MISMATCH", "RM has detected an NVML/RM version mismatch."),
    999: ("UNKNOWN", "Unknown Error"),
}


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value

    def __str__(self) -> str:
        return ERRORS[self.value][1]


def error_class(code: int) -> str:
    return "NVMLError_" + string.capwords(ERRORS[code][0], "_").replace("_", "")


_CLASSES = {code: type(error_class(code), (NVMLError,), {}) for code in ERRORS}


def error(code: int) -> NVMLError:
    return _CLASSES[code](code)


@dataclass(frozen=True)
class FakeSlice:
    uuid: str = "MIG-5c0b5d57-3ee3-5c5c-8b0e-6f0d9b9a1f00"
    memory_total: int = 10 << 30
    memory_used: int = 2 << 30


@dataclass
class FakeGpu:
    """A GPU; `refuses`: code of the error by function; `lost_after`: looks until it is lost.

    `utilization`: percent in successive looks, again and again. `contexts`: folder with a file for
    each process that computes there, named by its pid; `foreign_pids`: further ones. Of a container
    the driver tells the host's pids, which are not those that the container sees.
    """

    uuid: str = "GPU-c4b1b2e6-3a1e-4f4f-9e1a-000000000000"
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: tuple[int, ...] = (28,)
    memory_total: int = 80 << 30
    memory_used: int = 12 << 30
    power_mw: int = 210_000
    sm_clock: int = 1755
    pcie_kb: int = 1_200_000
    reasons: int = 0
    refuses: dict[str, int] = field(default_factory=dict)
    slices: tuple[FakeSlice, ...] | None = None
    lost_after: int | None = None
    lost_code: int = 15
    looks: int = 0
    contexts: str = ""
    foreign_pids: tuple[int, ...] = ()


@dataclass
class _Handle:
    gpu: FakeGpu
    slice: FakeSlice | None = None


class FakeNvml:
    """The package's functions. `init_code`: the error of nvmlInit; `lacks`: missing functions."""

    NVML_CLOCK_SM = NVML_CLOCK_SM
    NVML_PCIE_UTIL_RX_BYTES = NVML_PCIE_UTIL_RX_BYTES

    def __init__(
        self,
        *gpus: FakeGpu,
        init_code: int | None = None,
        lacks: tuple[str, ...] = (),
        gives_bytes: bool = False,
    ) -> None:
        self._gpus = gpus
        self._init_code = init_code
        self._lacks = lacks
        self._gives_bytes = gives_bytes
        self.opened = 0

    def nvmlInit(self) -> None:
        if self._init_code is not None:
            raise error(self._init_code)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._must_be_open()
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._must_be_open()
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        self._must_be_open()
        if not 0 <= index < len(self._gpus):
            raise error(2)
        gpu = self._gpus[index]
        self._ask(_Handle(gpu), "nvmlDeviceGetHandleByIndex")
        return _Handle(gpu)

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str | bytes:
        self._ask(handle, "nvmlDeviceGetUUID")
        return self._text(handle.slice.uuid if handle.slice else handle.gpu.uuid)

    def nvmlDeviceGetName(self, handle: _Handle) -> str | bytes:
        self._ask(handle, "nvmlDeviceGetName")
        return self._text(handle.gpu.name)

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        self._ask(handle, "nvmlDeviceGetMigMode")
        is_sliced = int(handle.gpu.slices is not None)
        return [is_sliced, is_sliced]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: _Handle) -> int:
        self._ask(handle, "nvmlDeviceGetMaxMigDeviceCount")
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: _Handle, index: int) -> _Handle:
        self._ask(handle, "nvmlDeviceGetMigDeviceHandleByIndex")
        slices = handle.gpu.slices or ()
        if index >= len(slices):
            raise error(6)
        return _Handle(handle.gpu, slices[index])

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> SimpleNamespace:
        gpu = handle.gpu
        gpu.looks += 1
        self._ask(handle, "nvmlDeviceGetUtilizationRates", is_of_whole=True)
        at = (gpu.looks - 1) % len(gpu.utilization)
        return SimpleNamespace(gpu=gpu.utilization[at], memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle) -> SimpleNamespace:
        self._ask(handle, "nvmlDeviceGetMemoryInfo")
        of = handle.slice or handle.gpu
        total, used = of.memory_total, of.memory_used
        return SimpleNamespace(total=total, used=used, free=total - used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: _Handle) -> list[SimpleNamespace]:
        self._ask(handle, "nvmlDeviceGetComputeRunningProcesses")
        gpu = handle.gpu
        pids = list(gpu.foreign_pids)
        if gpu.contexts and os.path.isdir(gpu.contexts):
            pids += [int(name) for name in os.listdir(gpu.contexts)]
        return [SimpleNamespace(pid=pid, usedGpuMemory=1 << 30) for pid in pids]

    def nvmlDeviceGetPowerUsage(self, handle: _Handle) -> int:
        self._ask(handle, "nvmlDeviceGetPowerUsage")
        self._must_be_whole(handle)
        return handle.gpu.power_mw

    def nvmlDeviceGetClockInfo(self, handle: _Handle, kind: int) -> int:
        self._ask(handle, "nvmlDeviceGetClockInfo")
        self._must_be_whole(handle)
        if kind != NVML_CLOCK_SM:
            raise error(2)
        return handle.gpu.sm_clock

    def nvmlDeviceGetPcieThroughput(self, handle: _Handle, counter: int) -> int:
        self._ask(handle, "nvmlDeviceGetPcieThroughput", is_of_whole=True)
        if counter not in (0, 1):
            raise error(2)
        return handle.gpu.pcie_kb

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        self._ask(handle, "nvmlDeviceGetCurrentClocksEventReasons")
        self._must_be_whole(handle)
        return handle.gpu.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: _Handle) -> int:
        self._ask(handle, "nvmlDeviceGetCurrentClocksThrottleReasons")
        self._must_be_whole(handle)
        return handle.gpu.reasons

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_") and name in self._lacks:
            raise AttributeError(f"module 'pynvml' has no attribute '{name}'")
        return super().__getattribute__(name)

    def _must_be_open(self) -> None:
        if not self.opened:
            raise error(1)

    def _must_be_whole(self, handle: _Handle) -> None:
        if handle.slice is not None:
            raise error(3)

    def _ask(self, handle: _Handle, function: str, *, is_of_whole: bool = False) -> None:
        self._must_be_open()
        gpu = handle.gpu
        if gpu.lost_after is not None and gpu.looks > gpu.lost_after:
            raise error(gpu.lost_code)
        if function in gpu.refuses:
            raise error(gpu.refuses[function])
        # Nothing of this kind is told of a GPU in MIG mode, or of its slices.
        if is_of_whole and gpu.slices is not None:
            raise error(3)

    def _text(self, text: str) -> str | bytes:
        return text.encode() if self._gives_bytes else text


def environment(*gpus: FakeGpu, init_code: int | None = None) -> str:
    """Returns the text with which `fake_nvml/pynvml.py` is such a double."""
    described = [dataclasses.asdict(gpu) for gpu in gpus]
    return json.dumps({"gpus": described, "init_code": init_code})


def from_environment(environ: Mapping[str, str] = os.environ) -> FakeNvml:
    document = json.loads(environ[VARIABLE])
    gpus = []
    for fields in document["gpus"]:
        slices = fields.pop("slices")
        parts = None if slices is None else tuple(FakeSlice(**part) for part in slices)
        fields["utilization"] = tuple(fields["utilization"])
        fields["foreign_pids"] = tuple(fields["foreign_pids"])
        gpus.append(FakeGpu(**fields, slices=parts))
    return FakeNvml(*gpus, init_code=document["init_code"])
