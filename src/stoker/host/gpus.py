"""NVIDIA's GPUs of this host, and their load, as the driver's library NVML tells it.

What a GPU does not tell is None. NVML numbers GPUs by their place on the PCI bus. Its package
(nvidia-ml-py) is imported where a reader is opened; the library comes with the driver.
"""

import contextlib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated

import msgspec

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_BusyShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
_MAX_TEXT = 200
_DriverText = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU; `index` is NVML's."""

    index: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    uuid: _DriverText
    model: _DriverText | None = None
    memory_total_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def number(self) -> str:
        """The GPU on its host."""
        return str(self.index)


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One look at a GPU; None: it does not tell.

    Attributes:
        utilization: Share of the last sixth of a second to second (by model) in which a kernel ran.
    """

    utilization: _BusyShare | None = None
    memory_bytes: _Amount | None = None
    power_watts: _Amount | None = None
    sm_clock_mhz: _Amount | None = None


class GpuState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU and its latest sample."""

    gpu: Gpu
    sample: GpuSample


class GpusUnreadError(Exception):
    """Why no GPU's load can be read."""


def visible_gpus(text: str | None, uuids: Sequence[str]) -> list[int]:
    """Returns the indices of the GPUs that a process with this CUDA_VISIBLE_DEVICES may use.

    As CUDA reads it: a list ends at the first entry that names nothing.

    Args:
        text: Value of the variable; None: it is not set.
        uuids: Of all GPUs of the host, in NVML's order.
    """
    if text is None:
        return [*range(len(uuids))]
    indices: list[int] = []
    for entry in map(str.strip, text.split(",")):
        number = re.match(r"\d+", entry)
        named = [
            index
            for index, uuid in enumerate(uuids)
            if (index == int(number[0]) if number else entry and uuid.startswith(entry))
        ]
        if not named:
            break
        indices += named
    return indices


class GpuReader:
    """NVML, for the GPUs that a command may use; not for several threads at once.

    A driver in trouble may block any call, also for good: calls belong in a thread that may be
    left.

    Args:
        environ: Variables of the command.

    Raises:
        GpusUnreadError: There is none that can be read.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._handles: dict[Gpu, object] = {}
        visible = environ.get(_VISIBLE)
        try:
            self._nvml = nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            count = int(nvml.nvmlDeviceGetCount())
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        except Exception as err:  # of the driver's library, whatever it raises
            why = "nvidia-ml-py is not installed (it comes with stoker[torch])"
            raise GpusUnreadError(why if isinstance(err, ImportError) else f"NVML: {err}") from None
        for index in visible_gpus(visible, uuids):
            gpu = Gpu(
                index=index,
                uuid=uuids[index],
                model=_model_of(nvml, handles[index]),
                memory_total_bytes=_memory_of(nvml, handles[index]),
            )
            self._handles[gpu] = handles[index]
        if not self._handles:
            raise GpusUnreadError(f"{_VISIBLE}={visible!r} names none")

    def close(self) -> None:
        """Closes the library; may be called twice."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def look(self) -> list[GpuState]:
        """Returns a sample of each GPU; what one does not tell, or not any more, is None."""
        states: list[GpuState] = []
        for gpu, handle in self._handles.items():
            answers: dict[str, float] = {}
            for name, question in _QUESTIONS.items():
                # Of the driver's library, whatever it raises: not supported, no permission, gone.
                with contextlib.suppress(Exception):
                    answers[name] = question(self._nvml, handle)
            states.append(GpuState(gpu=gpu, sample=msgspec.convert(answers, GpuSample)))
        return states


_QUESTIONS: Mapping[str, Callable[[ModuleType, object], float]] = MappingProxyType(
    {
        "utilization": lambda nvml, gpu: min(
            1.0, nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100
        ),
        "memory_bytes": lambda nvml, gpu: float(nvml.nvmlDeviceGetMemoryInfo(gpu).used),
        "power_watts": lambda nvml, gpu: float(nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "sm_clock_mhz": lambda nvml, gpu: float(
            nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
        ),
    }
)


def has_devices(folder: Path = Path("/dev")) -> bool:
    """Whether the host shows a device of NVIDIA's driver."""
    return any(folder.glob("nvidia[0-9]*"))


def _model_of(nvml: ModuleType, handle: object) -> str | None:
    with contextlib.suppress(Exception):
        return _text(nvml.nvmlDeviceGetName(handle))
    return None


def _memory_of(nvml: ModuleType, handle: object) -> int | None:
    with contextlib.suppress(Exception):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _text(value: str | bytes) -> str:
    # Packages before 12.0 return bytes.
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    # A control character of a virtual GPU's name would reach terminals.
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:_MAX_TEXT] or "not known"
