"""A double of NVML and its package: what it answers and refuses is as in nvml.h and pynvml.

Never kinder than the real one: it answers nothing before nvmlInit, for a GPU that is lost,
or what it refuses.
"""

import dataclasses
import json
import os
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace

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


@dataclass
class FakeGpu:
    """A GPU; `refuses`: code of the error by function; `lost_after`: looks until it is lost.

    `utilization`: percent in successive looks, again and again.
    """

    uuid: str = "GPU-c4b1b2e6-3a1e-4f4f-9e1a-000000000000"
    name: str = "NVIDIA H100 80GB HBM3"
    utilization: tuple[int, ...] = (28,)
    memory_total: int = 80 << 30
    memory_used: int = 12 << 30
    refuses: dict[str, int] = field(default_factory=dict)
    lost_after: int | None = None
    looks: int = 0


@dataclass
class _Handle:
    gpu: FakeGpu


class FakeNvml:
    """The package's functions. `init_code`: the error of nvmlInit."""

    def __init__(
        self,
        *gpus: FakeGpu,
        init_code: int | None = None,
    ) -> None:
        self._gpus = gpus
        self._init_code = init_code
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

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        self._ask(handle, "nvmlDeviceGetUUID")
        return handle.gpu.uuid

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        self._ask(handle, "nvmlDeviceGetName")
        return handle.gpu.name

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> SimpleNamespace:
        gpu = handle.gpu
        gpu.looks += 1
        self._ask(handle, "nvmlDeviceGetUtilizationRates")
        at = (gpu.looks - 1) % len(gpu.utilization)
        return SimpleNamespace(gpu=gpu.utilization[at], memory=0)

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle) -> SimpleNamespace:
        self._ask(handle, "nvmlDeviceGetMemoryInfo")
        total, used = handle.gpu.memory_total, handle.gpu.memory_used
        return SimpleNamespace(total=total, used=used, free=total - used)

    def _must_be_open(self) -> None:
        if not self.opened:
            raise error(1)

    def _ask(self, handle: _Handle, function: str) -> None:
        self._must_be_open()
        gpu = handle.gpu
        if gpu.lost_after is not None and gpu.looks > gpu.lost_after:
            raise error(15)
        if function in gpu.refuses:
            raise error(gpu.refuses[function])


def environment(*gpus: FakeGpu, init_code: int | None = None) -> str:
    """Returns the text with which `fake_nvml/pynvml.py` is such a double."""
    described = [dataclasses.asdict(gpu) for gpu in gpus]
    return json.dumps({"gpus": described, "init_code": init_code})


def from_environment(environ: Mapping[str, str] = os.environ) -> FakeNvml:
    document = json.loads(environ[VARIABLE])
    gpus = []
    for fields in document["gpus"]:
        fields["utilization"] = tuple(fields["utilization"])
        gpus.append(FakeGpu(**fields))
    return FakeNvml(*gpus, init_code=document["init_code"])
