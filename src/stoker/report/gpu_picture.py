"""The picture of the GPUs' load: a strip over the time of the steps, before and after."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from stoker.figures.gpu_log import GpuRow, read_rows
from stoker.records import GpuLoad
from stoker.records.gpu import GpuFigure, busy_share, used_gpus
from stoker.report.svg import Drawing, time_axis
from stoker.units import NBSP, NOT_KNOWN, count, digits, percent, size

_LABEL = 13.0
_PLOT = 34.0
_AXIS = 40.0
_ROW = _LABEL + 6 + _PLOT + _AXIS
# More points cannot be told apart, and make the page large.
_MAX_POINTS = 160
# More GPUs are summed up by the picture.
_MAX_ROWS = 32


@dataclass(frozen=True, slots=True)
class GpuStrip:
    """The busy share of one run's GPUs, of those of the first training host that are in use.

    Attributes:
        name: `Before`, `After` or `This run`.
        points: Start and end, in seconds since the first one's start, and the share between.
        busy: Busy share of the run's GPUs, of all hosts.
        gpus: Number of the GPUs in the picture.
        model: Model of the first one.
    """

    name: str
    points: tuple[tuple[float, float, float], ...]
    busy: float
    gpus: int
    model: str

    @property
    def title(self) -> str:
        what = count(self.gpus, "GPU") + (f" ({self.model})" if self.model else "")
        return f"{self.name}: {what}"

    @property
    def right(self) -> str:
        return f"{percent(self.busy)} busy, top 100%"


def read_gpu_strip(name: str, path: Path | None, gpus: Sequence[GpuLoad]) -> GpuStrip | None:
    """Reads a gpu.csv; None where it is missing, or does not tell how busy the GPUs were.

    Args:
        gpus: Loads of the run's GPUs, the leader's first.
    """
    share = busy_share(gpus)
    if path is None or share is None:
        return None
    leaders_gpus = used_gpus([gpu for gpu in gpus if gpu.host == gpus[0].host])
    numbers = {gpu.number for gpu in leaders_gpus}
    begin = min((gpu.begin_seconds or 0.0 for gpu in leaders_gpus), default=0.0)
    ends = [gpu.end_seconds for gpu in leaders_gpus if gpu.end_seconds is not None]
    end = max(ends, default=math.inf)
    rows = [
        row for row in read_rows(path) if row.gpu in numbers and begin <= row.middle_seconds <= end
    ]
    points = _points(rows)
    if not points:
        return None
    model = leaders_gpus[0].model or ""
    return GpuStrip(name, points, busy=share, gpus=len(leaders_gpus), model=model)


def _points(rows: Sequence[GpuRow]) -> tuple[tuple[float, float, float], ...]:
    """Returns the mean over the GPUs at each moment, at most _MAX_POINTS of them."""
    moments = defaultdict[tuple[float, float], list[float]](list)
    for row in rows:
        if row.utilization is not None:
            moments[row.start_seconds, row.end_seconds].append(row.utilization)
    ordered = [(begin, end, fmean(shares)) for (begin, end), shares in sorted(moments.items())]
    step = math.ceil(len(ordered) / _MAX_POINTS) or 1
    return tuple(
        _joined(ordered[first : first + step], zero=ordered[0][0])
        for first in range(0, len(ordered), step)
    )


def _joined(
    points: Sequence[tuple[float, float, float]], *, zero: float
) -> tuple[float, float, float]:
    # Joined, not sampled, so that no idle second is lost between two points.
    whole = sum(end - begin for begin, end, _ in points)
    mean = sum((end - begin) * share for begin, end, share in points) / whole
    return points[0][0] - zero, points[-1][1] - zero, mean


def draw_gpus(strips: Sequence[GpuStrip], *, width: float, name: str) -> Drawing:
    """Draws a row for each run, each with its own axis of time, as runs differ in length."""
    drawing = Drawing(
        name=name,
        width=width,
        height=len(strips) * _ROW,
        title="Load of the GPUs, " + " and ".join(strip.name.lower() for strip in strips),
        description=" ".join(f"{strip.title}: {strip.right}." for strip in strips),
    )
    for number, strip in enumerate(strips):
        base = number * _ROW
        floor = base + _LABEL + 6 + _PLOT
        drawing.heads(strip.title, strip.right, base=base + _LABEL, size=_LABEL)
        drawing.rect(0, floor - _PLOT, width, _PLOT, "ground")
        seconds = strip.points[-1][1]
        scale = width / seconds
        outline: list[tuple[float, float]] = [(0.0, floor)]
        for begin, end, share in strip.points:
            top = floor - min(share, 1.0) * _PLOT
            outline += [(begin * scale, top), (end * scale, top)]
        drawing.area([*outline, (outline[-1][0], floor)], "compute")
        time_axis(drawing, floor + 2, seconds=seconds, scale=scale)
    return drawing


@dataclass(frozen=True, slots=True)
class GpuCells:
    """A row of the table of GPUs, as texts."""

    name: str
    model: str
    busy: str
    middle: str
    memory: str
    power: str
    clock: str
    received: str
    lowered: str


def gpu_rows(gpus: Sequence[GpuLoad], *, names: dict[str, str]) -> list[GpuCells]:
    """Returns the table of a run's GPUs, the first of them; names: shown names of hosts."""
    return [_cells(gpu, names.get(gpu.host, gpu.host)) for gpu in gpus[:_MAX_ROWS]]


def _cells(gpu: GpuLoad, host: str) -> GpuCells:
    busy = middle = received = NOT_KNOWN
    if load := gpu.utilization:
        busy = percent(load.mean)
        middle = f"{percent(load.low)} to {percent(load.high)}"
    if rate := gpu.pcie_received_bytes_per_second:
        # In GB a second, as the specifications of PCIe are.
        received = digits(rate.mean / 1e9, 2, max_places=2)
    return GpuCells(
        name=f"{host}, GPU {gpu.number}",
        model=gpu.model or NOT_KNOWN,
        busy=busy,
        middle=middle,
        memory=_memory(gpu),
        power=_mean(gpu.power_watts, "W"),
        clock=_mean(gpu.sm_clock_mhz, "MHz"),
        received=received,
        lowered=_lowered(gpu),
    )


def _memory(gpu: GpuLoad) -> str:
    if gpu.memory_bytes is None:
        return NOT_KNOWN
    used = size(gpu.memory_bytes.mean)
    if not gpu.memory_total_bytes:
        return used
    return f"{used} of {size(gpu.memory_total_bytes)}"


def _mean(figure: GpuFigure | None, symbol: str) -> str:
    if figure is None:
        return NOT_KNOWN
    return f"{figure.mean:.0f}{NBSP}{symbol}"


def _lowered(gpu: GpuLoad) -> str:
    """Returns the shares of time for which the driver lowered the clocks, with its reasons."""
    if not gpu.throttled:
        return NOT_KNOWN
    # Less would be shown as 0%.
    reasons = [f"{percent(share)} {why}" for why, share in gpu.throttled.items() if share >= 0.005]
    return ", ".join(reasons) or "never"
