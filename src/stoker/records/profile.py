"""Profile: what a global step of the workload waits for, measured on today's cluster."""

from typing import Literal

import msgspec

from stoker.records.base import (
    Fraction,
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    Value,
)


class ProfiledHost(Record, frozen=True, kw_only=True):
    """The hosts that were measured; vcpus and accelerators of one host, else the catalog's."""

    instance_type: Name
    count: PositiveInt = 1
    vcpus: PositiveInt | None = None
    accelerators: NonNegativeInt | None = None


class StepTerms(Record, frozen=True, kw_only=True):
    """The parts of one *global* step: all ranks together do one step.

    Attributes:
        step_seconds: Wall clock, median, as is.
        wait_seconds: Of it, waiting for data, of the rank that waits longest.
        accelerator_step_seconds: Replaying cached batches, all-reduce inside.
        loader_cpu_seconds: CPU-seconds of loading and augmenting, all ranks, every vCPU busy.
        receive_seconds: Of the trainer's own thread, not overlapped, a rank.
        receive_cpu_seconds: CPU-seconds of the feed's receive side off that thread, a rank.
        loader_wall_seconds: Worker-seconds of the same work, uncontended.
        trainer_cpu_seconds: CPU-seconds of the trainer processes themselves, all ranks.
        trainer_vcpus: Instead of it, where only that is known: vCPUs of one host that the trainer
            keeps busy.
        num_workers: Loader workers of one host, all ranks.
        global_batch_size: Samples, all ranks.
        batch_bytes: Bytes of a global batch.
        read_bytes: Bytes read from storage a global step.
        storage_bytes_per_second: Rate of one host.
    """

    step_seconds: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None
    accelerator_step_seconds: NonNegativeFloat | None = None
    loader_cpu_seconds: NonNegativeFloat | None = None
    receive_seconds: NonNegativeFloat | None = None
    receive_cpu_seconds: NonNegativeFloat | None = None
    loader_wall_seconds: NonNegativeFloat | None = None
    trainer_cpu_seconds: NonNegativeFloat | None = None
    trainer_vcpus: NonNegativeFloat | None = None
    num_workers: NonNegativeInt | None = None
    global_batch_size: PositiveInt
    batch_bytes: NonNegativeFloat | None = None
    read_bytes: NonNegativeFloat | None = None
    storage_bytes_per_second: PositiveFloat | None = None


class Observed(Record, frozen=True, kw_only=True):
    """Utilisation of the dnn hosts: fractions of all vCPUs and of all GPUs."""

    cpu_utilization: Fraction | None = None
    gpu_utilization: Fraction | None = None
    hosts: PositiveInt | None = None


class Spread(Record, frozen=True, kw_only=True):
    """Spread of one measured field: quartiles, and the number of samples behind it."""

    low: NonNegativeFloat
    high: NonNegativeFloat
    samples: PositiveInt


class Check(Record, frozen=True, kw_only=True):
    """Whether the parts explain the whole.

    Attributes:
        predicted_step_seconds: The step that the parts give.
        error: predicted / measured - 1.
        explained: Whether the error is small enough to advise spending.
    """

    predicted_step_seconds: NonNegativeFloat
    error: float
    explained: bool


class Fix(Record, frozen=True, kw_only=True):
    """A change to the script or its settings that costs no host."""

    id: Name
    text: str
    saves_seconds: NonNegativeFloat | None = None
    cost: Literal["none", "small", "large"] = "none"


class Profile(Record, frozen=True, kw_only=True):
    """What a global step of the workload waits for."""

    schema: Literal["stoker.profile/v1"] = "stoker.profile/v1"
    workload_sha256: str | None = None
    host: ProfiledHost
    step: StepTerms
    observed: Observed | None = None
    spread: dict[str, Spread] | None = None
    check: Check | None = None
    fixes: tuple[Fix, ...] = ()
    what: dict[str, Value] = msgspec.field(default_factory=dict)
