"""NVIDIA's GPUs of this host, and their load, as the driver's library NVML tells it.

What a GPU does not tell is None. NVML numbers GPUs by their place on the PCI bus. Its package
(nvidia-ml-py) is imported where a reader is opened; the library comes with the driver.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ParamSpec, TypeVar

import msgspec

_P = ParamSpec("_P")
_T = TypeVar("_T")

_VISIBLE = "CUDA_VISIBLE_DEVICES"

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_BusyShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
_MAX_TEXT = 200
_DriverText = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]


class GpuState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, and its load at one look or over some; None: it does not tell.

    Attributes:
        index: NVML's.
        utilization: Share of the last sixth of a second to second (by model) in which a kernel ran.
    """

    index: Annotated[int, msgspec.Meta(ge=0, le=4096)]
    model: _DriverText | None = None
    memory_total_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None
    utilization: _BusyShare | None = None
    memory_bytes: _Amount | None = None


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
        named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            named = [int(entry)]
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
        try:
            self._nvml = nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handles = [*map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))]
            uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        except ImportError:
            why = "nvidia-ml-py is not installed (it comes with stoker[torch])"
            raise GpusUnreadError(why) from None
        except Exception as err:  # of the driver's library, whatever it raises
            raise GpusUnreadError(f"NVML: {err}") from None
        visible = environ.get(_VISIBLE)
        self._gpus: list[tuple[GpuState, object]] = []
        for index in visible_gpus(visible, uuids):
            handle = handles[index]
            model = _answer(nvml.nvmlDeviceGetName, handle)
            memory = _answer(nvml.nvmlDeviceGetMemoryInfo, handle)
            gpu = GpuState(
                index=index,
                model=_text(model) if model else None,
                memory_total_bytes=int(memory.total) if memory else None,
            )
            self._gpus.append((gpu, handle))
        if not self._gpus:
            raise GpusUnreadError(f"{_VISIBLE}={visible!r} names none")

    def close(self) -> None:
        """Closes the library; may be called twice."""
        with contextlib.suppress(Exception):
            self._nvml.nvmlShutdown()

    def look(self) -> list[GpuState]:
        """Returns a sample of each GPU; what one does not tell, or not any more, is None."""
        nvml = self._nvml
        states: list[GpuState] = []
        for gpu, handle in self._gpus:
            rates = _answer(nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = _answer(nvml.nvmlDeviceGetMemoryInfo, handle)
            state = msgspec.structs.replace(
                gpu,
                utilization=min(1.0, rates.gpu / 100) if rates else None,
                memory_bytes=float(memory.used) if memory else None,
            )
            states.append(state)
        return states


def _answer(question: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T | None:
    # Of the driver's library, whatever it raises: not supported, no permission, gone.
    with contextlib.suppress(Exception):
        return question(*arguments, **options)
    return None


def has_devices(folder: Path = Path("/dev")) -> bool:
    """Whether the host shows a device of NVIDIA's driver."""
    return any(folder.glob("nvidia[0-9]*"))


def _text(value: str | bytes) -> str:
    # Packages before 12.0 return bytes.
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    # A control character of a virtual GPU's name would reach terminals.
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:_MAX_TEXT] or "not known"
