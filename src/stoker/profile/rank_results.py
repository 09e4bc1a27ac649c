"""The results of one rank, as in `profile-rank{R}.json`, and their statistics."""

from pathlib import Path

import msgspec

from stoker.records import EpochTimes, ProfiledLoader, TransformCost
from stoker.units import wait_share

# Of steps that no device timed.
HOST = "host"
# A quota that stops its group in fewer periods says nothing.
_MIN_PERIODS = 5
# A container that its quota stops in fewer periods hardly notices.
_MIN_THROTTLED = 0.10


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the watched time: the steps as is that count.

    The *reading thread* is the one that takes batches: the trainer's main thread, as a rule.

    Attributes:
        own_cpu_seconds: CPU of the reading thread.
        looks: How often another thread asked for the interpreter lock.
        held_looks: Looks at which the lock was held for 4 ms or more, the reading thread being
            outside next().
        process_seconds: CPU of the trainer process, likewise `children_seconds` of all below it.
        busy_seconds: CPU time of any program on these vCPUs; under a quota, of its group only.
        periods: Periods of the CPU quota; 0: there is no quota.
        throttled_seconds: Time for which its threads were stopped, summed over vCPUs.
    """

    seconds: float = 0.0
    steps: int = 0
    own_cpu_seconds: float = 0.0
    looks: int = 0
    held_looks: int = 0
    process_seconds: float = 0.0
    children_seconds: float = 0.0
    busy_seconds: float = 0.0
    periods: int = 0
    throttled_periods: int = 0
    throttled_seconds: float = 0.0

    @property
    def stopped_share(self) -> float:
        """Share of the time for which a CPU quota stopped the processes."""
        if self.periods < _MIN_PERIODS or not self.seconds:
            return 0.0
        return min(self.throttled_periods / self.periods, self.throttled_seconds / self.seconds)

    @property
    def is_throttled(self) -> bool:
        return self.stopped_share >= _MIN_THROTTLED

    def used_vcpus(self, *, capacity: float, limit: float) -> float:
        """Returns a host's vCPUs: a pod without a limit may use the idle CPUs of its node."""
        busy = self.busy_seconds / max(self.seconds, 1e-9)
        return max(capacity, min(limit, round(busy, 1)))


class Quartiles(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity; `samples` is the number of steps or batches behind it."""

    mean: float
    median: float
    low: float
    high: float
    samples: int


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Counted steps of one phase; times are over blocks of steps.

    Attributes:
        step_seconds: Time from batch to batch.
        wait_seconds: Part of it in next().
        compute_seconds: The rest.
        trainer_cpu_seconds: CPU-seconds of the trainer process in a step, without workers.
        clock: By which steps and waits were timed: `host`, or the device's name, as `cuda:0`.
    """

    step_seconds: Quartiles
    wait_seconds: Quartiles
    compute_seconds: Quartiles
    trainer_cpu_seconds: float
    clock: str = HOST


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """What it takes to copy a batch to the device.

    Attributes:
        seconds: As the batch lies.
        pinned_seconds: From pinned memory.
    """

    seconds: float
    pinned_seconds: float


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The loader without the model, at one number of workers of this rank.

    Attributes:
        cpu_seconds: CPU time of a worker for a batch: fetch, collate and hand-over.
        wall_seconds: Time of a worker for a batch, less the time when it was ready to run and
            others had the CPU: more than cpu_seconds where it waits for storage or a service.
        batches_per_second: Rate of all its workers; 0: too few batches.
    """

    workers: int
    cpu_seconds: float
    wall_seconds: float
    batches_per_second: float

    @property
    def idle_seconds(self) -> float:
        """A worker's time for a batch in which it neither computes nor is ready to."""
        return max(0.0, self.wall_seconds - self.cpu_seconds)

    @property
    def idle_share(self) -> float:
        return self.idle_seconds / max(self.wall_seconds, 1e-9)


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Equipment and type of this host; None: not known."""

    accelerators: int | None = None
    accelerator_model: str | None = None
    instance_type: str | None = None


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and bytes of a batch, and those of its images in float32."""

    samples: int
    num_bytes: int
    num_tensors: int = 1
    float_image_bytes: int = 0


class RankResult(msgspec.Struct, kw_only=True):
    """Results of one rank, filled in as it measures; phases that were not reached are None.

    Attributes:
        missing: Why the profile is incomplete; empty where it is not.
        vcpus: vCPUs that this process may use: 1.5 under a quota of one and a half; those that a
            pod without a limit used, if that is more than it asks for.
        as_is: The user's steps, untouched.
        children_cpu_seconds: Of all processes below the trainer, in such a step.
        stocked: The steps on stock, which never wait for the main loader.
        num_workers: Of its main loader, as the next two; 0: it loads itself, or is not known.
        loader: The main loader; its `shards` are this rank's.
    """

    rank: int
    world_size: int
    host: str
    missing: str = ""
    vcpus: float
    steps: int = 0
    as_is: StepTimes | None = None
    children_cpu_seconds: float = 0.0
    evidence: Evidence = Evidence()
    stocked: StepTimes | None = None
    copies: Copies | None = None
    drains: tuple[Drain, ...] = ()
    transforms: tuple[TransformCost, ...] = ()
    inventory: Inventory = Inventory()
    batch: BatchFacts | None = None
    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    loader: ProfiledLoader | None = None
    notes: list[str] = []
    epoch_times: EpochTimes | None = None

    @property
    def has_verdict(self) -> bool:
        """Whether its steps are known, though the script ended before those without loading."""
        return self.as_is is not None and not self.missing

    @property
    def taken(self) -> StepTimes:
        """The steps as they are, of a rank that has them."""
        assert self.as_is is not None
        return self.as_is

    @property
    def step_seconds(self) -> float:
        return self.taken.step_seconds.median

    @property
    def wait_seconds(self) -> float:
        return self.taken.wait_seconds.median

    @property
    def wait_share(self) -> float:
        return wait_share(step_seconds=self.step_seconds, wait_seconds=self.wait_seconds)

    @property
    def compute_seconds(self) -> float:
        """A step without loading; where none was timed, the step less its wait."""
        return (self.stocked or self.taken).compute_seconds.median

    @property
    def lost_share(self) -> float:
        """Share of a step that steps without loading would save, waiting included; 0 to 1."""
        # Loading on the trainer's CPUs slows its steps even where no batch is waited for.
        return max(self.wait_share, 1 - self.compute_seconds / self.step_seconds)

    @property
    def used_cpu_seconds(self) -> float:
        return self.taken.trainer_cpu_seconds + self.children_cpu_seconds

    @property
    def used_vcpus(self) -> float:
        # CPU-seconds are a sum over the steps: their mean belongs to it.
        return self.used_cpu_seconds / self.taken.step_seconds.mean

    @property
    def transfer_seconds(self) -> float | None:
        """Seconds of a step that waits for copies to the device; None: not measured."""
        if self.copies is None:
            return None
        return min(self.copies.seconds, self.compute_seconds)

    @property
    def neighbour_seconds(self) -> float | None:
        """How much longer a step takes beside busy workers; None: not measured."""
        if self.stocked is None or self.taken.clock == HOST or not self.num_workers:
            return None
        # The workers are busy beside the steps as they are.
        return max(0.0, self.step_seconds - self.wait_seconds - self.compute_seconds)

    @property
    def tried(self) -> list[Drain]:
        """The loader alone, where a rate is known, with the fewest workers first."""
        known = [drain for drain in self.drains if drain.batches_per_second > 0]
        return sorted(known, key=lambda drain: drain.workers)

    @property
    def lone_worker(self) -> Drain | None:
        return next((drain for drain in self.drains if drain.workers == 1), None)


def read_ranks(folder: Path) -> list[RankResult]:
    """Reads all results in `folder`, by rank; each was written whole."""
    files = sorted(folder.glob("profile-rank*.json"))
    results = (msgspec.json.decode(file.read_bytes(), type=RankResult) for file in files)
    return sorted(results, key=lambda result: result.rank)
