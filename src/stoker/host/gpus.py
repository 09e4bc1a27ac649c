"""NVIDIA's GPUs of this host, and their load, as the driver's library NVML tells it.

A GPU, a slice of one (MIG) or a virtual GPU answers some questions and refuses others: what is
refused is None. NVML numbers GPUs by their place on the PCI bus. Its package (nvidia-ml-py) is
imported where a reader is opened; the library comes with the driver.
"""

import contextlib
import importlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Annotated, Literal, get_args

import msgspec

VISIBLE = "CUDA_VISIBLE_DEVICES"
_CAPABILITY = "NVIDIA_DRIVER_CAPABILITIES=compute,utility"
# Of AMD's driver, whose GPUs NVML does not know.
ROCM_DEVICE = Path("/dev/kfd")
_DEVICES = Path("/dev")

ThrottleReason = Literal["power", "thermal", "other"]
THROTTLE_REASONS: tuple[ThrottleReason, ...] = get_args(ThrottleReason)

# Codes of NVML's errors (nvml.h). After these a GPU, or the driver, is gone.
_LOST = (1, 9, 15, 16)
# After these the same question gets the same answer: invalid, not supported, no permission, not in
# this version of the library.
_REFUSED = (2, 3, 4, 13, 25, 26)
_LIBRARY_NOT_FOUND = 12
_DRIVER_NOT_LOADED = 9
_VERSION_MISMATCH = 18
_FUNCTION_NOT_FOUND = 13
_FIXES: Mapping[int, str] = MappingProxyType(
    {
        # The container toolkit gives the library only to those that ask for it.
        _LIBRARY_NOT_FOUND: f" (containers: {_CAPABILITY})",
        _VERSION_MISMATCH: " (the driver was updated while it was loaded: restart)",
    }
)
# A look in which no question is answered, so often in a row: the GPU does not answer any more.
_SILENT_LOOKS = 3

# Bits of nvmlDeviceGetCurrentClocksEventReasons. Left out: idle, and clocks that a user set.
_POWER_BITS = 0x4 | 0x80
_THERMAL_BITS = 0x20 | 0x40
# Hardware slowdown of no named cause, sync boost, limits of the board.
_OTHER_BITS = 0x8 | 0x10 | 0x200 | 0x400

# The questions, with the name of each in a message. Of a slice NVML tells the memory alone; its
# clocks are the whole GPU's, power and PCIe are shared with strangers.
_QUESTIONS: Mapping[str, str] = MappingProxyType(
    {
        "utilization": "utilization",
        "memory_bytes": "memory",
        "power_watts": "power",
        "sm_clock_mhz": "SM clock",
        "throttled": "throttling",
        "pcie_received_bytes_per_second": "PCIe traffic",
    }
)
_OF_SLICE = ("utilization", "memory_bytes", "sm_clock_mhz", "throttled")
_OF_WHOLE_GPU = ("sm_clock_mhz", "throttled")
# Of a core: the driver counts PCIe traffic for 20 ms, asleep or not.
_PCIE_CPU_SHARE = 0.0002

_Amount = Annotated[float, msgspec.Meta(ge=0)]
_BusyShare = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=4096)]
_MAX_TEXT = 200
_DriverText = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_TEXT)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, or the `slice` of one; `index` is NVML's."""

    index: _Place
    slice: _Place | None = None
    uuid: _DriverText
    model: _DriverText | None = None
    memory_total_bytes: Annotated[int, msgspec.Meta(ge=0)] | None = None

    @property
    def number(self) -> str:
        """The GPU on its host: `0`, or `0.1` for the second slice of the first one."""
        if self.slice is None:
            return str(self.index)
        return f"{self.index}.{self.slice}"


class GpuSample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One look at a GPU; None: it does not tell.

    Attributes:
        utilization: Share of the last sixth of a second to second (by model) in which a kernel ran.
        pcie_received_bytes_per_second: Over 20 ms.
        throttled: Why the clocks are lowered, now.
    """

    utilization: _BusyShare | None = None
    memory_bytes: _Amount | None = None
    power_watts: _Amount | None = None
    sm_clock_mhz: _Amount | None = None
    pcie_received_bytes_per_second: _Amount | None = None
    throttled: tuple[ThrottleReason, ...] | None = None


class GpuState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU and its latest sample."""

    gpu: Gpu
    sample: GpuSample


# Index of a GPU among all of the host, and number of its slice; None: all of it.
GpuPlace = tuple[int, int | None]


@dataclass(frozen=True, slots=True)
class DeviceNames:
    """UUIDs of a GPU and, in MIG mode, of its slices."""

    uuid: str
    slices: tuple[str, ...] = ()
    is_sliced: bool = False


def visible_places(text: str | None, devices: Sequence[DeviceNames]) -> tuple[GpuPlace, ...]:
    """Returns index and slice of the GPUs that a process with this CUDA_VISIBLE_DEVICES may use.

    As CUDA reads it: a list ends at the first entry that names nothing or several, and a GPU that
    is named twice makes it empty. Of a GPU in MIG mode only slices can be used.

    Args:
        text: Value of the variable; None: it is not set.
        devices: All GPUs of the host, in NVML's order.
    """
    if text is None:
        return tuple(chain.from_iterable(_parts(index, devices) for index in range(len(devices))))
    chosen: list[GpuPlace] = []
    for entry in text.split(","):
        places = _named_by(entry.strip(), devices)
        if not places:
            break
        if any(place in chosen for place in places):
            return ()
        chosen += places
    return tuple(chosen)


def _parts(index: int, devices: Sequence[DeviceNames]) -> tuple[GpuPlace, ...]:
    device = devices[index]
    if not device.is_sliced:
        return ((index, None),)
    return tuple((index, place) for place in range(len(device.slices)))


def _named_by(entry: str, devices: Sequence[DeviceNames]) -> tuple[GpuPlace, ...]:
    # Drivers before 470 named a slice MIG-GPU-UUID/GI/CI.
    whole = entry.removeprefix("MIG-") if entry.startswith("MIG-GPU-") else entry
    if whole.startswith("GPU-"):
        uuid, _, _ = whole.partition("/")
        matches = [i for i, device in enumerate(devices) if device.uuid.startswith(uuid)]
        if len(matches) == 1:
            return _parts(matches[0], devices)
        return ()
    if entry.startswith("MIG-"):
        named: list[GpuPlace] = []
        for index, device in enumerate(devices):
            for place, slice_uuid in enumerate(device.slices):
                if slice_uuid.startswith(entry):
                    named.append((index, place))
        if len(named) == 1:
            return (named[0],)
        return ()
    # As strtoul reads a number: `1gpu` is 1.
    digits = entry[: len(entry) - len(entry.lstrip("0123456789"))]
    if not digits or int(digits) >= len(devices):
        return ()
    return _parts(int(digits), devices)


def throttle_reasons(bits: int) -> tuple[ThrottleReason, ...]:
    """Returns why clocks are lowered, by the bits of NVML's clock event reasons."""
    reasons: list[ThrottleReason] = []
    if bits & _POWER_BITS:
        reasons.append("power")
    if bits & _THERMAL_BITS:
        reasons.append("thermal")
    # The bit of a hardware slowdown is also set beside its cause's.
    named = bits & 0x8 and bits & (0x40 | 0x80)
    if bits & (_OTHER_BITS & ~0x8 if named else _OTHER_BITS):
        reasons.append("other")
    return tuple(reasons)


class GpusUnreadError(Exception):
    """Why no GPU's load can be read; `is_news` is False on a host that has no GPU."""

    def __init__(self, reason: str, *, is_news: bool = True) -> None:
        super().__init__(reason)
        self.is_news = is_news


def has_devices(folder: Path = _DEVICES) -> bool:
    """Whether the host shows a device of NVIDIA's driver."""
    return any(folder.glob("nvidia[0-9]*"))


def _import_nvml() -> ModuleType:
    return importlib.import_module("pynvml")


class GpuReader:
    """NVML, for the GPUs that a command may use; not for several threads at once.

    A driver in trouble may block any call, also for good: calls belong in a thread that may be
    left.

    Args:
        environ: Variables of the command.
        nvml: Imports the package.
        rocm_device: File that a host with AMD's driver has.
        devices: Folder of device files.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        *,
        nvml: Callable[[], ModuleType] = _import_nvml,
        rocm_device: Path = ROCM_DEVICE,
        devices: Path = _DEVICES,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._open = False
        is_here = has_devices(devices)
        try:
            self._nvml = nvml()
            self._nvml.nvmlInit()
        except ImportError:
            if rocm_device.exists():
                raise _no_rocm() from None
            raise GpusUnreadError(
                "nvidia-ml-py is not installed (it comes with stoker[torch])", is_news=is_here
            ) from None
        except Exception as err:  # of the driver's library, whatever it raises
            if rocm_device.exists() and not is_here:
                raise _no_rocm() from None
            code = _code_of(err)
            is_absent = code in (_LIBRARY_NOT_FOUND, _DRIVER_NOT_LOADED) and not is_here
            fix = _FIXES.get(code or 0, "")
            raise GpusUnreadError(f"NVML: {err}{fix}", is_news=not is_absent) from None
        self._open = True
        self._handles: dict[Gpu, _Handles] = {}
        self.left_out = ""
        try:
            self._find(environ.get(VISIBLE))
        except Exception as err:  # likewise
            self.close()
            raise GpusUnreadError(f"NVML: {err}") from None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that answer."""
        return tuple(self._handles)

    def pids_on(self, gpu: Gpu) -> tuple[int, ...] | None:
        """Returns the processes that compute on a GPU, as the host numbers them; None: untold."""
        try:
            return self._handles[gpu].pids(self._nvml)
        except Exception:  # of the driver's library; that a GPU is lost is told by its look
            return None

    def close(self) -> None:
        """Closes the library; may be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(Exception):
                self._nvml.nvmlShutdown()

    def look(self) -> "Look":
        """Asks all GPUs; takes about 20 ms for each GPU whose PCIe traffic is counted."""
        states = []
        refused = defaultdict[str, list[str]](list)
        lost = []
        pcie_cpu_seconds = 0.0
        for gpu, handles in list(self._handles.items()):
            answers = handles.look(self._nvml, self._clock, self._cpu_clock)
            pcie_cpu_seconds += answers.pcie_cpu_seconds
            for question in answers.refused:
                refused[question].append(gpu.number)
            if answers.lost:
                del self._handles[gpu]
                lost.append(f"GPU {gpu.number} ({gpu.uuid}): {answers.lost}")
            elif answers.sample:
                states.append(GpuState(gpu=gpu, sample=answers.sample))
        return Look(
            tuple(states),
            refused=tuple(f"{what} of {_gpus(which)}" for what, which in refused.items()),
            lost=tuple(lost),
            pcie_cpu_seconds=pcie_cpu_seconds,
        )

    def _find(self, visible: str | None) -> None:
        nvml = self._nvml
        devices = []
        for index in range(int(nvml.nvmlDeviceGetCount())):
            # One GPU that has fallen off the bus must not hide the others.
            with contextlib.suppress(Exception):
                devices.append((index, nvml.nvmlDeviceGetHandleByIndex(index)))
        slices = [_slices_of(nvml, handle) for _, handle in devices]
        names = []
        for (_, handle), parts in zip(devices, slices, strict=True):
            uuids = [_text(nvml.nvmlDeviceGetUUID(part)) for part in (handle, *(parts or ()))]
            names.append(DeviceNames(uuids[0], tuple(uuids[1:]), is_sliced=parts is not None))
        for place, part in visible_places(visible, names):
            index, handle = devices[place]
            parts = slices[place] or ()
            device = handle if part is None else parts[part]
            uuid = names[place].uuid if part is None else names[place].slices[part]
            gpu = Gpu(
                index=index,
                slice=part,
                uuid=uuid,
                model=_model_of(nvml, handle),
                memory_total_bytes=_memory_of(nvml, device),
            )
            self._handles[gpu] = _Handles(device, whole=handle, is_slice=part is not None)
        if names and not self._handles:
            shown = "" if visible is None else f"{VISIBLE}={visible!r} names none"
            self.left_out = shown or "all are in MIG mode, without a slice"


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at all GPUs gave.

    Attributes:
        refused: Questions that are not answered, once each, with the GPUs that refuse them.
        lost: GPUs that do not answer any more, once each.
        pcie_cpu_seconds: CPU time of the question about PCIe, which is asked rarely if it costs.
    """

    states: tuple[GpuState, ...]
    refused: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pcie_cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Answers:
    sample: GpuSample | None = None
    refused: tuple[str, ...] = ()
    lost: str = ""
    pcie_cpu_seconds: float = 0.0


class _Handles:
    """Handles of one GPU, or of its slice, and the questions that it still answers."""

    def __init__(self, own: object, *, whole: object, is_slice: bool) -> None:
        self._own = own
        self._whole = whole
        self._is_slice = is_slice
        self._questions = list(_OF_SLICE if is_slice else _QUESTIONS)
        self._pcie_at = -math.inf
        self._silent = 0

    def pids(self, nvml: ModuleType) -> tuple[int, ...]:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(self._own)
        return tuple(int(process.pid) for process in processes)

    def look(
        self, nvml: ModuleType, clock: Callable[[], float], cpu_clock: Callable[[], float]
    ) -> _Answers:
        answers: dict[str, object] = {}
        refused = []
        failed = ""
        pcie_cpu_seconds = 0.0
        for question in list(self._questions):
            is_pcie = question == "pcie_received_bytes_per_second"
            if is_pcie and clock() < self._pcie_at:
                continue
            before = cpu_clock()
            try:
                handle = self._own
                if self._is_slice and question in _OF_WHOLE_GPU:
                    handle = self._whole
                answers[question] = _asked(question, nvml, handle)
            except Exception as err:  # of the driver's library, whatever it raises
                failed = str(err) or type(err).__name__
                code = _code_of(err)
                if code in _LOST:
                    return _Answers(lost=failed)
                if code in _REFUSED:
                    self._questions.remove(question)
                    refused.append(f"{_QUESTIONS[question]} ({failed})")
            if is_pcie:
                pcie_cpu_seconds = cpu_clock() - before
                self._pcie_at = clock() + pcie_cpu_seconds / _PCIE_CPU_SHARE
        self._silent = 0 if answers or not failed else self._silent + 1
        if not answers and (not self._questions or self._silent >= _SILENT_LOOKS):
            return _Answers(refused=tuple(refused), lost=f"it answers nothing: {failed}")
        sample = msgspec.convert(answers, GpuSample) if answers else None
        return _Answers(sample, refused=tuple(refused), pcie_cpu_seconds=pcie_cpu_seconds)


def _gpus(numbers: Sequence[str]) -> str:
    if len(numbers) == 1:
        return f"GPU {numbers[0]}"
    return f"{len(numbers)} GPUs"


def _asked(question: str, nvml: ModuleType, handle: object) -> object:
    match question:
        case "utilization":
            return min(1.0, nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100)
        case "memory_bytes":
            return float(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        case "power_watts":
            return nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        case "sm_clock_mhz":
            return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        case "throttled":
            # The older name: drivers before 535, and packages of their time.
            try:
                bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
            except Exception as err:
                if _code_of(err) != _FUNCTION_NOT_FOUND:
                    raise
                bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
            return throttle_reasons(int(bits))
        case _:
            # KB/s.
            rate = nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
            return rate * 1000.0


def _slices_of(nvml: ModuleType, handle: object) -> tuple[object, ...] | None:
    """Returns the handles of a GPU's slices; None: it is not in MIG mode."""
    try:
        is_sliced, _after_reset = nvml.nvmlDeviceGetMigMode(handle)
        num_places = int(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) if is_sliced else 0
    except Exception:  # of the driver's library: GPUs before A100 do not know the question
        return None
    if not is_sliced:
        return None
    slices = []
    for place in range(num_places):
        # Places without a slice are not found.
        with contextlib.suppress(Exception):
            slices.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return tuple(slices)


def _model_of(nvml: ModuleType, handle: object) -> str | None:
    with contextlib.suppress(Exception):
        return _text(nvml.nvmlDeviceGetName(handle))
    return None


def _memory_of(nvml: ModuleType, handle: object) -> int | None:
    with contextlib.suppress(Exception):
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    return None


def _code_of(err: Exception) -> int | None:
    if isinstance(err, AttributeError):
        # The installed package is older than the function.
        return _FUNCTION_NOT_FOUND
    code = getattr(err, "value", None)
    return code if isinstance(code, int) else None


def _text(value: str | bytes) -> str:
    # Packages before 12.0 return bytes.
    text = value.decode(errors="replace") if isinstance(value, bytes) else value
    # A control character of a virtual GPU's name would reach terminals.
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(printable.split())[:_MAX_TEXT] or "not known"


def _no_rocm() -> GpusUnreadError:
    return GpusUnreadError("not read on ROCm: NVML knows only NVIDIA's GPUs")
