"""A profile says what a global step of the workload waits for, measured on today's cluster."""

from typing import Literal

import msgspec

from stoker.errors import UsageError
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
from stoker.text import wait_share

# Of means over minutes, in which pauses count: from here on a part is probably the limit, and up to
# here it has room (the published jobs that were CPU-bound had CPU 99 %, GPU 38 to 48 %).
_BUSY = 0.85
_SLACK = 0.7


class ProfiledHost(Record, frozen=True, kw_only=True):
    """Holds the hosts that were measured; vcpus and accelerators of one host, else the catalog's.

    Attributes:
        instance_type: Type of these hosts, as the catalog calls it.
        count: Number of hosts.
        vcpus: Whole vCPUs of one host that the training may use, by affinity, the control group's
            quota and what its pod asks for; more where the measured steps had more.
        quota_vcpus: The same if that is no whole number, such as 1.5.
        accelerators: Accelerators of one host, as NVML or the driver counts them.
        accelerator_model: Name of the accelerators, as the driver spells it.
        cpu_model: Model of the CPU, as the kernel spells it.
    """

    instance_type: Name
    count: PositiveInt = 1
    vcpus: PositiveInt | None = None
    quota_vcpus: PositiveFloat | None = None
    accelerators: NonNegativeInt | None = None
    accelerator_model: Name | None = None
    cpu_model: Name | None = None

    @property
    def capacity(self) -> float | None:
        """Returns the vCPUs of one host to divide by; None: the catalog's."""
        return self.vcpus if self.quota_vcpus is None else self.quota_vcpus


class ProfiledData(Record, frozen=True, kw_only=True):
    """Data hosts of one type worked next to the hosts that were measured.

    Attributes:
        instance_type: Type of these hosts, as the catalog calls it.
        count: Number of hosts.
        workers_per_host: Data workers of one host; absent: not known.
    """

    instance_type: Name
    count: PositiveInt
    workers_per_host: NonNegativeInt | None = None


class StepTerms(Record, frozen=True, kw_only=True):
    """Holds the parts of one *global* step: all ranks together do one step.

    Attributes:
        step_seconds: A step as it is, in seconds of wall clock, median.
        wait_seconds: Seconds of a step in which the rank that waits longest waits for data.
        accelerator_step_seconds: Seconds of a step with cached batches, all-reduce inside.
        loader_cpu_seconds: CPU-seconds of loading and augmenting, all ranks, every vCPU busy.
        receive_seconds: Seconds that receiving a batch with the feed takes of a rank's own thread,
            not overlapped.
        local_receive_seconds: Seconds that taking a batch from today's local workers takes of a
            rank's own thread, not overlapped.
        handover_seconds: Seconds of wall clock of that thread to take a batch that is ready from a
            local worker that makes the next one, per rank; not with CUDA, where the GPU works
            meanwhile.
        receive_cpu_seconds: CPU-seconds of the feed's receive side off that thread, per rank.
        loader_wall_seconds: Seconds of loader workers for the same loading, all ranks, with idle
            vCPUs.
        trainer_cpu_seconds: CPU-seconds of the trainer processes themselves, all ranks.
        trainer_vcpus: vCPUs of one host that the trainer keeps busy, where trainer_cpu_seconds is
            not known.
        used_cpu_seconds: CPU-seconds that trainers and loader workers used in a step as it is, all
            ranks: more than each of them needs alone where they take turns on cores and caches.
        num_workers: Loader workers of one host, all ranks.
        global_batch_size: Samples of one step, all ranks; absent where only a log told the step.
        batch_bytes: Bytes of the batches of one step, all ranks.
        read_bytes: Bytes that one step reads from storage, all ranks.
        storage_bytes_per_second: Rate at which one host reads from storage, in bytes per second.
    """

    step_seconds: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None
    accelerator_step_seconds: NonNegativeFloat | None = None
    loader_cpu_seconds: NonNegativeFloat | None = None
    receive_seconds: NonNegativeFloat | None = None
    local_receive_seconds: NonNegativeFloat | None = None
    handover_seconds: NonNegativeFloat | None = None
    receive_cpu_seconds: NonNegativeFloat | None = None
    loader_wall_seconds: NonNegativeFloat | None = None
    trainer_cpu_seconds: NonNegativeFloat | None = None
    trainer_vcpus: NonNegativeFloat | None = None
    used_cpu_seconds: NonNegativeFloat | None = None
    num_workers: NonNegativeInt | None = None
    global_batch_size: PositiveInt | None = None
    batch_bytes: NonNegativeFloat | None = None
    read_bytes: NonNegativeFloat | None = None
    storage_bytes_per_second: PositiveFloat | None = None

    @property
    def wait_share(self) -> float | None:
        """Returns the share of a step that waits for data; None: not known."""
        if self.wait_seconds is None:
            return None
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class LoaderRate(Record, frozen=True, kw_only=True):
    """The loader alone, without the model, reaches this rate at one number of workers.

    Attributes:
        workers: Loader workers of one host, all ranks.
        steps_per_second: Steps per second that the loaders of all hosts could feed: global batches
            per second.
        wait_seconds: Worker-seconds of a step in which workers neither compute nor are ready to:
            they wait for storage, a service, or each other. Absent: not measured.
    """

    workers: PositiveInt
    steps_per_second: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None


class Observed(Record, frozen=True, kw_only=True):
    """Says how much of the dnn hosts was used: fractions of all vCPUs and of all GPUs.

    Attributes:
        cpu_utilization: Busy share of all vCPUs, 0 to 1.
        gpu_utilization: Busy share of all GPUs, 0 to 1.
        hosts: Number of hosts that were looked at.
        others_vcpus: vCPUs of all hosts that other programs kept busy during the steps as is.
        elsewhere_vcpus: vCPUs of the machine that its only host may not use, and that were busy: by
            other programs, where another host of the local platform would be.
        cpu_speed_spread: Standard deviation of the CPU's own speed from second to second during
            the steps as is, as a share of its mean; of several hosts the largest.
    """

    cpu_utilization: Fraction | None = None
    gpu_utilization: Fraction | None = None
    hosts: PositiveInt | None = None
    others_vcpus: NonNegativeFloat | None = None
    elsewhere_vcpus: NonNegativeFloat | None = None
    cpu_speed_spread: NonNegativeFloat | None = None

    @property
    def is_known(self) -> bool:
        """Returns whether anything was observed."""
        return self.cpu_utilization is not None or self.gpu_utilization is not None

    @property
    def suspect(self) -> Literal["cpu", "accelerator", "neither", "unknown"]:
        """Returns the limit that such a load suggests, and does not prove: means hide single steps.

        `neither`: both idle, so steps wait for something else (storage, a service, too few loader
        workers), or one thread sets the pace.
        """
        cpu, gpu = self.cpu_utilization, self.gpu_utilization
        # GPUs first: while they are busy, busy CPUs cost nothing.
        if gpu is not None and gpu >= _BUSY:
            return "accelerator"
        # Between the two bounds a mean can be of either kind of step.
        if cpu is None or gpu is None or gpu > _SLACK:
            return "unknown"
        if cpu >= _BUSY:
            return "cpu"
        return "neither" if cpu <= _SLACK else "unknown"


class Spread(Record, frozen=True, kw_only=True):
    """Says how widely one measured field spread.

    Attributes:
        low: Lower quartile, in the field's unit.
        high: Upper quartile, in the field's unit.
        samples: Number of samples behind them.
    """

    low: NonNegativeFloat
    high: NonNegativeFloat
    samples: PositiveInt


class Check(Record, frozen=True, kw_only=True):
    """Answers the self-check: do the parts explain the whole?

    Attributes:
        predicted_step_seconds: The step that the parts give, in seconds.
        error: How far the parts are off, as a fraction of the measured step: predicted / measured -
            1, so -0.07 if they give 7 % less.
        explained: Whether the error is at most `profile.max_unexplained`, so that spending may be
            advised.
        state: Where it is not: the state that explains the step, which the parts do not show.
    """

    predicted_step_seconds: NonNegativeFloat
    error: float
    explained: bool
    state: Name | None = None


class TransformCost(Record, frozen=True, kw_only=True):
    """This row says what one part of loading costs, in CPU-seconds of one worker alone.

    The rows `getitem` and `collate` are the whole; what a row is `within` is part of it.

    Attributes:
        name: `getitem`, `collate`, or a transform's class or function.
        within: The row that holds this one; absent: none.
        cpu_seconds: CPU-seconds per sample.
        share: Share of getitem and collate together, 0 to 1.
        bytes_in: Mean bytes of what it is given, where that can be told.
        bytes_out: Mean bytes of what it gives.
        samples: Calls that were timed.
    """

    name: Name
    within: Literal["getitem", "collate"] | None = None
    cpu_seconds: NonNegativeFloat
    share: Fraction
    bytes_in: NonNegativeFloat | None = None
    bytes_out: NonNegativeFloat | None = None
    samples: PositiveInt


class Fix(Record, frozen=True, kw_only=True):
    """Proposes a change to the script or its settings that costs no host.

    Attributes:
        id: Name of the change, for programs.
        text: What to change, in words.
        saves_seconds: Seconds that it takes off a step; absent: not known.
        cost: Work that it takes. none: a setting; small: some lines of code; large: more.
    """

    id: Name
    text: str
    saves_seconds: NonNegativeFloat | None = None
    cost: Literal["none", "small", "large"] = "none"


class ProfileState(Record, frozen=True, kw_only=True):
    """A state names what limits the training, with the figures that it rests on.

    Attributes:
        id: cpu, accelerator, storage (or network), workers, gil, throttled, straggler or
            other-programs; other versions may know others.
        text: The state and its figures, in words.
        share: Share of a step that it explains or costs, 0 to 1.
    """

    id: Name
    text: str
    share: Fraction | None = None


class ProfiledLoader(Record, frozen=True, kw_only=True):
    """The loader that made the batches of the profiled steps.

    Attributes:
        class_name: Full name of its class.
        reach: Whether data hosts can make its batches. stoker: it is stoker's class; torch: torch's
            class or a subclass, which stoker feeds, too; left: torch's class in a script that
            imports stoker's, which is fed only with `replace_dataloader: true`; own: it makes
            batches in its own way, so that data hosts cannot.
        iterable: Whether its dataset is an iterable one: a stream.
        shards: Shards of the stream, of all ranks: ranks x max(1, num_workers). No more workers can
            be busy. Absent: it is no stream.
        divides: Whether the stream asks `get_worker_info()`, and so can divide itself into more
            shards; absent: not known.
    """

    class_name: Name
    reach: Literal["stoker", "torch", "left", "own"]
    iterable: bool = False
    shards: PositiveInt | None = None
    divides: bool | None = None


class Profile(Record, frozen=True, kw_only=True):
    """Holds the measured parts of a global step of the workload.

    Attributes:
        schema: Version of this file's form.
        workload_sha256: Digest of command, strategy and engine.
        workload_keys: Keys that change what is measured, with their values: `cluster.dnn.` are the
            hosts that were measured. A workload with other values is refused. Absent: not known.
        host: The hosts that were measured.
        data: Data hosts that made batches for this step; none where the dnn hosts loaded alone.
            The step is that of the whole cluster, `loader_cpu_seconds` those of the dnn hosts' CPU.
        step: Parts of the step. Absent where no step was timed: then only `observed` is known, and
            no plan can be priced on it.
        observed: How busy the hosts were; absent: not measured.
        spread: Spread of the fields of `step`, by name.
        check: Whether the parts add up to the step; absent: parts are missing.
        states: States that the training is in, the weightiest first.
        fixes: Changes that help without any further host.
        loader_rates: Throughput of the loader alone, by number of workers: no plan is promised
            more from workers than these say.
        transforms: What loading a sample is made of, the most expensive part first.
        loader: The loader that made the batches; absent: none was seen.
        unmeasured: Parts that cannot be measured where no DataLoader of torch makes the batches:
            `accelerator`, `loader`. No spending is advised then.
        what: Facts about the profiled run, such as ranks and versions; which ones may change.
    """

    schema: Literal["stoker.profile/v1"] = "stoker.profile/v1"
    workload_sha256: str | None = None
    workload_keys: dict[str, str] | None = None
    host: ProfiledHost
    data: tuple[ProfiledData, ...] = ()
    step: StepTerms | None = None
    observed: Observed | None = None
    spread: dict[str, Spread] | None = None
    check: Check | None = None
    states: tuple[ProfileState, ...] = ()
    fixes: tuple[Fix, ...] = ()
    loader_rates: tuple[LoaderRate, ...] = ()
    transforms: tuple[TransformCost, ...] = ()
    loader: ProfiledLoader | None = None
    unmeasured: tuple[Name, ...] = ()
    what: dict[str, Value] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        # Of a job that ran, loads alone may be known: but something has to be.
        if self.step is None and (self.observed is None or not self.observed.is_known):
            raise ValueError("a profile says something of a step, or what was observed: key step")

    @property
    def timed_step(self) -> StepTerms:
        """Returns the step as it was timed.

        Raises:
            UsageError: If the profile knows of none.
        """
        if self.step is None:
            raise UsageError(
                "the profile has no step: only how busy the hosts were",
                where="profile, key step",
                fix="profile the training: stoker profile",
            )
        return self.step
