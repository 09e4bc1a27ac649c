"""The load of a run's GPUs, as the driver counts it."""

from collections.abc import Sequence
from typing import Literal

from stoker.records.base import Name, NonNegativeFloat, NonNegativeInt, Record
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
    """Load of one GPU. None: the driver does not tell it there, as on virtual GPUs.

    Attributes:
        host: Name of its host.
        index: Index of the GPU on its host, as the driver counts.
        uuid: UUID, as the driver spells it.
        model: Model, as the driver spells it.
        memory_total_bytes: Memory of the GPU.
        during: Time of the figures. steps: the intervals in which steps ended; command: the whole
            command, as no step was timed.
        seconds: Length of that time.
        utilization: Share of the time in which a kernel ran, 0 to 1.
        memory_bytes: Memory in use.
        power_watts: Power that the GPU draws.
        sm_clock_mhz: Clock of the multiprocessors.
    """

    host: Name
    index: NonNegativeInt
    uuid: Name
    model: Name | None = None
    memory_total_bytes: NonNegativeInt | None = None
    during: Literal["steps", "command"] = "steps"
    seconds: NonNegativeFloat
    utilization: GpuFigure | None = None
    memory_bytes: GpuFigure | None = None
    power_watts: GpuFigure | None = None
    sm_clock_mhz: GpuFigure | None = None

    @property
    def number(self) -> str:
        """The GPU on its host."""
        return str(self.index)


# Of all GPUs of a run.
GpuLoads = tuple[GpuLoad, ...]


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
