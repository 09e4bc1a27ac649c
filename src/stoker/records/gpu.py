"""The load of a run's GPUs, as the driver counts it."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from stoker.records.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    Record,
)
from stoker.units import known_mean


class GpuFigure(Record, frozen=True, kw_only=True):
    """One quantity of a GPU over time, weighted by time.

    Attributes:
        mean: Mean, in the unit of the quantity.
        low: Lower quartile, likewise.
        median: Median, in the same unit.
        high: Upper quartile, likewise.
    """

    mean: NonNegativeFloat
    low: NonNegativeFloat
    median: NonNegativeFloat
    high: NonNegativeFloat


class GpuLoad(Record, frozen=True, kw_only=True):
    """Load of one GPU. None: the driver does not tell it there, as on slices and virtual GPUs.

    Attributes:
        host: Name of its host.
        index: Index of the GPU on its host, as the driver counts.
        slice: Index of the MIG slice in its GPU. None: a whole GPU.
        uuid: UUID, as the driver spells it.
        model: Model, as the driver spells it.
        memory_total_bytes: Memory of the GPU, or of its slice.
        during: Time of the figures. steps: from the first to the last step, without the first two
            of the run; command: the whole command, as no step was timed.
        begin_seconds: Begin of that time, in seconds of the host's gpu.csv.
        end_seconds: End of that time, likewise.
        samples: Samples, about one a second.
        utilization: Share of the time in which a kernel ran, 0 to 1.
        step_utilization: Its mean over the steps alone, without what is between epochs.
        memory_bytes: Memory in use.
        power_watts: Power that the GPU draws.
        sm_clock_mhz: Clock of the multiprocessors.
        pcie_received_bytes_per_second: Data received over PCIe.
        throttled: Share of the time with lowered clocks, by reason: power, thermal, other.
    """

    host: Name
    index: NonNegativeInt
    slice: NonNegativeInt | None = None
    uuid: Name
    model: Name | None = None
    memory_total_bytes: NonNegativeInt | None = None
    during: Literal["steps", "command"] = "steps"
    begin_seconds: NonNegativeFloat | None = None
    end_seconds: NonNegativeFloat | None = None
    samples: PositiveInt
    utilization: GpuFigure | None = None
    step_utilization: Fraction | None = None
    memory_bytes: GpuFigure | None = None
    power_watts: GpuFigure | None = None
    sm_clock_mhz: GpuFigure | None = None
    pcie_received_bytes_per_second: GpuFigure | None = None
    throttled: dict[Name, Fraction] = {}

    @property
    def number(self) -> str:
        """The GPU on its host: `0`, or `0.1` for the second slice of the first one."""
        if self.slice is None:
            return str(self.index)
        return f"{self.index}.{self.slice}"


# Of all GPUs of a run.
GpuLoads = tuple[GpuLoad, ...]


def loads_as_json(gpus: Sequence[GpuLoad], *, max_bytes: int) -> bytes:
    """Returns the loads of the first GPUs, as many as there is room for."""
    for number in range(len(gpus), 0, -1):
        text = msgspec.json.encode(gpus[:number])
        if len(text) <= max_bytes:
            return text
    return b""


def loads_in(text: bytes) -> GpuLoads:
    """Reads such JSON; raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=GpuLoads)


def used_gpus(gpus: Sequence[GpuLoad]) -> GpuLoads:
    """Returns the GPUs that were ever busy; all of them if none was.

    A script may use one of eight: the others' idleness is no news of its loop.
    """
    with_utilization = tuple(gpu for gpu in gpus if gpu.utilization is not None)
    busy = tuple(gpu for gpu in with_utilization if gpu.utilization and gpu.utilization.mean > 0)
    return busy or with_utilization


def busy_share(gpus: Sequence[GpuLoad]) -> float | None:
    """Returns the mean busy share of the GPUs that are in use; None: not known."""
    share = known_mean(gpu.utilization.mean for gpu in used_gpus(gpus) if gpu.utilization)
    if share is None:
        return None
    return min(1.0, share)


def during_steps(gpus: Sequence[GpuLoad]) -> GpuLoads:
    """Returns the loads that are of the steps, and not of a command that is mostly its start."""
    return tuple(gpu for gpu in gpus if gpu.during == "steps")


def step_busy_share(gpus: Sequence[GpuLoad]) -> float | None:
    """Returns the same over the steps alone; None: not known.

    Of a GPU with no sample within a step, it is the share from the first to the last step.
    """
    share = known_mean(map(_step_share, used_gpus(during_steps(gpus))))
    if share is None:
        return None
    return min(1.0, share)


def _step_share(gpu: GpuLoad) -> float | None:
    if gpu.step_utilization is not None:
        return gpu.step_utilization
    if gpu.utilization:
        return gpu.utilization.mean
    return None
