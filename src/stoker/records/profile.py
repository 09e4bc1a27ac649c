"""The profile: what a global step of the workload waits for, measured on today's cluster."""

from collections.abc import Sequence
from datetime import date
from typing import Literal

from msgspec.structs import replace

from stoker.records.base import (
    Fraction,
    Name,
    Names,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Record,
    Value,
)
from stoker.units import known_mean, wait_share

# Means over minutes, pauses included: above the first a part is probably the limit, below the
# second it has room (published CPU-bound jobs: CPU 99%, GPU 38 to 48%).
_BUSY = 0.85
_SLACK = 0.7
# Of a limit of memory: from here on the feed lowers what waits (feed/memory.py).
NEAR_LIMIT = 0.92


# Minimum share of the vCPUs that other programs leave.
LEAST_FREE = 0.02
# Share of the vCPUs used by other programs above which the figures are uncertain.
MAX_OTHERS = 0.10
# Other programs may leave, or return while the plan runs: used over left vCPUs is the relative
# error of a step. Above this no band would help, and nothing is recommended.
_BEYOND_TELLING = 0.6
# Start of what is said of other programs, with how many vCPUs they used.
OTHERS = "other programs were using"
# Data, drivers and hosts drift; Kubeflow's `cache_days` ends the use of a profile then, too.
MAX_PROFILE_DAYS = 30


class GpuLoad(Record, frozen=True, kw_only=True):
    """Load of one GPU. None: the driver does not tell it there, as on virtual GPUs.

    Attributes:
        host: Name of its host.
        index: Index of the GPU on its host, as the driver counts.
        model: Model, as the driver spells it.
        memory_total_bytes: Memory of the GPU.
        seconds: Length of the intervals in which steps ended; the figures are of these.
        utilization: Share of the time in which a kernel ran, 0 to 1.
        memory_bytes: Memory in use, mean.
    """

    host: Name
    index: NonNegativeInt
    model: Name | None = None
    memory_total_bytes: NonNegativeInt | None = None
    seconds: NonNegativeFloat
    utilization: NonNegativeFloat | None = None
    memory_bytes: NonNegativeFloat | None = None


# Of all GPUs of a run.
GpuLoads = tuple[GpuLoad, ...]


def used_gpus(gpus: Sequence[GpuLoad]) -> GpuLoads:
    """Returns the GPUs that were ever busy; all of them if none was.

    A script may use one of eight: the others' idleness is no news of its loop.
    """
    with_utilization = tuple(gpu for gpu in gpus if gpu.utilization is not None)
    busy = tuple(gpu for gpu in with_utilization if gpu.utilization)
    return busy or with_utilization


def busy_share(gpus: Sequence[GpuLoad]) -> float | None:
    """Returns the mean busy share of the GPUs that are in use; None: not known."""
    share = known_mean(gpu.utilization for gpu in used_gpus(gpus))
    if share is None:
        return None
    return min(1.0, share)


class EpochPause(Record, frozen=True, kw_only=True):
    """A pause that each epoch has once.

    Attributes:
        seconds: Mean, in seconds.
        low_seconds: Lower quartile, in seconds.
        high_seconds: Upper quartile, in seconds.
        count: Pauses that were measured. 0: computed, from the time of a batch in one worker.
    """

    seconds: NonNegativeFloat
    low_seconds: NonNegativeFloat
    high_seconds: NonNegativeFloat
    count: NonNegativeInt

    def scaled(self, factor: float) -> "EpochPause":
        """Returns the pause, `factor` times as long."""
        return replace(
            self,
            seconds=self.seconds * factor,
            low_seconds=self.low_seconds * factor,
            high_seconds=self.high_seconds * factor,
        )


PauseField = Literal["seconds", "low_seconds", "high_seconds"]


class EpochTimes(Record, frozen=True, kw_only=True):
    """Time beyond the usual steps of whole epochs, without the start of the run.

    None: not known; no figure counts it then.

    Attributes:
        steps: Steps of an epoch, mean.
        start: Wait for an epoch's first batch, beyond the wait of a usual step.
        between: From the end of an epoch's last step to the request for the next epoch's first
            batch: validation, checkpoints, logging.
        inside_seconds: Seconds of a mean step beyond the usual one, without its wait: validation
            and checkpoints in mid-epoch.
    """

    steps: PositiveFloat | None = None
    start: EpochPause | None = None
    between: EpochPause | None = None
    inside_seconds: NonNegativeFloat | None = None

    @property
    def pauses(self) -> tuple[EpochPause, ...]:
        """The known pauses of an epoch."""
        return tuple(pause for pause in (self.start, self.between) if pause is not None)

    @property
    def figures(self) -> dict[str, float]:
        """The known figures by name, for metrics."""
        pauses = {"epoch_start_seconds": self.start, "between_epochs_seconds": self.between}
        figures = {name: pause.seconds for name, pause in pauses.items() if pause is not None}
        if self.steps is not None:
            figures["epoch_steps"] = self.steps
        return figures

    def whole_step_seconds(self, step_seconds: float, *, pause: PauseField = "seconds") -> float:
        """Returns the seconds of a step with its share of all that whole epochs have beyond it.

        Args:
            step_seconds: Of a step within epochs.
            pause: What counts of each pause: its mean, or a quartile.
        """
        inside = self.inside_seconds or 0.0
        pauses = sum(getattr(each, pause) for each in self.pauses)
        return step_seconds + inside + (pauses / self.steps if self.steps else 0.0)


class ProfiledHost(Record, frozen=True, kw_only=True):
    """The hosts that were measured.

    Attributes:
        instance_type: Type in the catalog.
        count: Number of hosts.
        vcpus: Whole vCPUs of one host that the training may use. None: the catalog's.
        quota_vcpus: The same if it is not a whole number, such as 1.5.
        accelerators: Accelerators of one host. None: the catalog's.
        accelerator_model: Accelerator model, as the driver spells it.
    """

    instance_type: Name
    count: PositiveInt = 1
    vcpus: PositiveInt | None = None
    quota_vcpus: PositiveFloat | None = None
    accelerators: NonNegativeInt | None = None
    accelerator_model: Name | None = None

    @property
    def capacity(self) -> float | None:
        """vCPUs of one host, fractions included; None: the catalog's."""
        if self.quota_vcpus is None:
            return self.vcpus
        return self.quota_vcpus


class StepTerms(Record, frozen=True, kw_only=True):
    """Parts of one *global* step: all ranks together do one step.

    Attributes:
        step_seconds: Median step, in seconds of wall clock.
        wait_seconds: Wait for data of the rank that waits longest, in seconds per step.
        accelerator_step_seconds: Step without loading, all-reduce included, in seconds. None: not
            measured.
        transfer_seconds: Part of accelerator_step_seconds in which the accelerator waits for copies
            from the host. None: not measured, or no accelerator.
        neighbour_seconds: How much longer a step that waits for nothing takes while the host's
            loader workers are busy. None: not measured, or no accelerator.
        loader_cpu_seconds: CPU-seconds of loading, all ranks, with all vCPUs busy.
        loader_wall_seconds: Worker-seconds of loading, all ranks, with idle vCPUs.
        trainer_cpu_seconds: CPU-seconds of the trainer processes, all ranks.
        used_cpu_seconds: CPU-seconds of trainers and workers in the unchanged step, all ranks.
        num_workers: Loader workers of one host, all ranks.
        global_batch_size: Samples of one step, all ranks.
        batch_bytes: Bytes of the batches of one step, all ranks.
    """

    step_seconds: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None
    accelerator_step_seconds: NonNegativeFloat | None = None
    transfer_seconds: NonNegativeFloat | None = None
    neighbour_seconds: NonNegativeFloat | None = None
    loader_cpu_seconds: NonNegativeFloat | None = None
    loader_wall_seconds: NonNegativeFloat | None = None
    trainer_cpu_seconds: NonNegativeFloat | None = None
    used_cpu_seconds: NonNegativeFloat | None = None
    num_workers: NonNegativeInt | None = None
    global_batch_size: PositiveInt | None = None
    batch_bytes: NonNegativeFloat | None = None

    @property
    def wait_share(self) -> float | None:
        """Share of a step that waits for data."""
        if self.wait_seconds is None:
            return None
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)


class LoaderRate(Record, frozen=True, kw_only=True):
    """Throughput of the loader alone with one number of workers.

    Attributes:
        workers: Loader workers of one host, all ranks.
        steps_per_second: Global batches per second, all hosts.
        wait_seconds: Worker-seconds per step spent waiting for storage, a service or other workers.
    """

    workers: PositiveInt
    steps_per_second: PositiveFloat
    wait_seconds: NonNegativeFloat | None = None


class Observed(Record, frozen=True, kw_only=True):
    """Utilization of the dnn hosts.

    Attributes:
        cpu_utilization: Busy share of all vCPUs, 0 to 1.
        gpu_utilization: Busy share of the GPUs in use, 0 to 1; where steps were timed, during them.
        gpus: Load of each GPU, while the script ran unchanged.
        others_vcpus: vCPUs of all hosts that other programs used during the unchanged steps.
    """

    cpu_utilization: Fraction | None = None
    gpu_utilization: Fraction | None = None
    gpus: GpuLoads = ()
    others_vcpus: NonNegativeFloat | None = None

    @property
    def suspect(self) -> Literal["cpu", "accelerator", "neither", "unknown"]:
        """The limit that these loads suggest; means over minutes prove nothing.

        `neither`: both idle, so steps wait for storage, a service or too few workers, or one thread
        sets the pace.
        """
        cpu = self.cpu_utilization
        gpu = self.gpu_utilization
        # GPUs first: while they are busy, busy CPUs do not matter.
        if gpu is not None and gpu >= _BUSY:
            return "accelerator"
        # Between the bounds a mean fits either kind of step.
        if cpu is None or gpu is None or gpu > _SLACK:
            return "unknown"
        if cpu >= _BUSY:
            return "cpu"
        return "neither" if cpu <= _SLACK else "unknown"


class Spread(Record, frozen=True, kw_only=True):
    """Spread of one measured field.

    Attributes:
        low: Lower quartile, in the field's unit.
        high: Upper quartile, likewise.
        samples: Number of samples.
    """

    low: NonNegativeFloat
    high: NonNegativeFloat
    samples: PositiveInt


class Check(Record, frozen=True, kw_only=True):
    """Self-check: whether the parts add up to the step.

    Attributes:
        predicted_step_seconds: Step computed from the parts, in seconds.
        error: predicted / measured - 1.
        explained: Whether the error is within `profile.max_unexplained`.
    """

    predicted_step_seconds: NonNegativeFloat
    error: float
    explained: bool


class TransformCost(Record, frozen=True, kw_only=True):
    """Cost of one part of loading, in one worker alone.

    The rows `getitem` and `collate` are the whole; other rows are `within` one of them.

    Attributes:
        name: `getitem`, `collate`, or a transform's class or function.
        within: Row that contains this one.
        cpu_seconds: CPU-seconds per sample.
        share: Share of getitem and collate together, 0 to 1.
        samples: Calls that were timed.
    """

    name: Name
    within: Literal["getitem", "collate"] | None = None
    cpu_seconds: NonNegativeFloat
    share: Fraction
    samples: PositiveInt


class Fix(Record, frozen=True, kw_only=True):
    """A change to the script or its settings that costs no host.

    Attributes:
        id: Name for programs.
        text: What to change.
        saves_seconds: Seconds saved per step.
        cost: Work needed. none: a setting; small: some lines of code; large: more.
    """

    id: Name
    text: str
    saves_seconds: NonNegativeFloat | None = None
    cost: Literal["none", "small", "large"] = "none"


class ProfileState(Record, frozen=True, kw_only=True):
    """A state that limits the training.

    Attributes:
        id: cpu, accelerator, transfer, neighbour, launch, storage (or network), workers, gil,
            throttled, straggler or other-programs; later versions may add others.
        text: The state and its figures.
        share: Share of a step that it explains or costs, 0 to 1.
    """

    id: Name
    text: str
    share: Fraction | None = None


class ProfiledLoader(Record, frozen=True, kw_only=True):
    """The loader that made the profiled batches.

    Attributes:
        class_name: Full name of its class.
        reach: Whether data hosts can make its batches. stoker, torch: yes; own: no.
        iterable: Whether its dataset is iterable-style.
        shards: Shards of an iterable dataset, all ranks; no more workers can be busy.
        made_ahead_at: Line of the script that makes this loader without workers, if its batches may
            be made ahead of the loop: it is map-style, its dataset can be pickled whole and did not
            change between steps. None: it has workers, or they may not.
        unsendable: Why its dataset cannot be sent to data hosts: the object that cannot, and its
            error; or why a loader without workers has to make its batches as its loop asks for
            them. Empty: it can, or that is not known.
        unsendable_fix: What to do about it.
    """

    class_name: Name
    reach: Literal["stoker", "torch", "own"]
    iterable: bool = False
    shards: PositiveInt | None = None
    made_ahead_at: str | None = None
    unsendable: str = ""
    unsendable_fix: str = ""


class Profile(Record, frozen=True, kw_only=True):
    """Measured parts of a global step of the workload.

    Attributes:
        schema: Version of the file format.
        workload_keys: Keys that affect the measurement; workloads with other values are refused.
        host: The hosts that were measured.
        step: Parts of the step.
        observed: Utilization of the hosts.
        spread: Spread of the fields of `step`, by name.
        check: Whether the parts add up to the step. None: parts are missing.
        states: States that limit the training, most important first.
        fixes: Changes that help without another host.
        loader_rates: Throughput of the loader alone by number of workers; upper bounds for plans.
        transforms: Parts of loading a sample, most expensive first.
        loader: The loader that made the batches.
        epochs: Time beyond the usual steps of whole epochs. None: not known.
        unmeasured: Parts that cannot be measured without torch's DataLoader.
        measured_at: Time of the measurement, UTC, ISO 8601. None: nothing was measured.
        what: Facts about the profiled run, such as ranks and command; not stable.
    """

    schema: Literal["stoker.profile/v1"] = "stoker.profile/v1"
    workload_keys: dict[str, str] | None = None
    host: ProfiledHost
    step: StepTerms
    observed: Observed | None = None
    spread: dict[str, Spread] | None = None
    check: Check | None = None
    states: tuple[ProfileState, ...] = ()
    fixes: tuple[Fix, ...] = ()
    loader_rates: tuple[LoaderRate, ...] = ()
    transforms: tuple[TransformCost, ...] = ()
    loader: ProfiledLoader | None = None
    epochs: EpochTimes | None = None
    unmeasured: Names = ()
    measured_at: Name | None = None
    what: dict[str, Value] = {}

    def too_old(self, today: date) -> str:
        """Returns that it is old and should be measured again; empty: it is not, or not known."""
        if self.measured_at is None:
            return ""
        days = (today - date.fromisoformat(self.measured_at[:10])).days
        if days <= MAX_PROFILE_DAYS:
            return ""
        age = f"the profile is {days} days old, more than {MAX_PROFILE_DAYS}"
        return f"{age}: measure again, stoker profile"

    @property
    def ranks(self) -> int | None:
        """Ranks of all hosts that trained; None: not known, as with typed figures."""
        ranks = self.what.get("ranks")
        if isinstance(ranks, int) and ranks > 0:
            return ranks
        return None

    @property
    def command(self) -> list[str]:
        """Words of the profiled command; empty: not known."""
        command = self.what.get("command")
        return [str(word) for word in command] if isinstance(command, list) else []


def is_beyond_telling(busy: float, *, vcpus: float) -> bool:
    """Returns whether other programs on `busy` of the vCPUs make times meaningless."""
    return error_width(busy, vcpus=vcpus) > _BEYOND_TELLING


def error_width(busy: float, *, vcpus: float) -> float:
    """Returns the relative error of a step's time beside other programs on `busy` of the vCPUs."""
    # Never all of them: the rest is a divisor.
    others = min(busy, vcpus * (1 - LEAST_FREE))
    if others > MAX_OTHERS * vcpus:
        return others / (vcpus - others)
    return 0.0
