"""The results of one rank, as in `profile-rank{R}.json`, and their statistics."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, variance
from typing import Literal

import msgspec

from stoker.errors import UsageError
from stoker.host.machine import CpuLimit
from stoker.records import (
    EpochPause,
    EpochTimes,
    GpuDecoding,
    GrowingObjects,
    HeldObjects,
    KeptObjects,
    Shippable,
    read_text,
)
from stoker.step_model import LEAST_GAIN

# Of steps that no device timed.
HOST = "host"
# Blocks of steps of which a median and its quartiles are taken.
MIN_BLOCKS = 3
# Steps of a block at least, against noise.
_LEAST_BLOCK = 4
# Gradients are accumulated over 32 batches at most, as a rule; three cycles show one.
_MAX_CYCLE = 32
_CYCLE_REPEATS = 3
_CYCLE_LOOK = 256
# Steps that scatter by less are alike.
_EVEN = 0.05
# Nine of ten steps are shorter than a usual long one.
_CLIP = 2.0
_RARE = 3
_UNEXPLAINED = 0.2
_NO_PAUSE = EpochPause(seconds=0.0, low_seconds=0.0, high_seconds=0.0, count=0)


class ProfiledEpoch(msgspec.Struct, frozen=True, kw_only=True):
    """Means of an epoch of the main loader, less its first batch, which waits for new workers."""

    batches: int
    wait_seconds: float
    step_seconds: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the watched time: the steps as is that count.

    The *reading thread* is the one that takes batches: the trainer's main thread, as a rule.

    Attributes:
        wait_seconds: Time of the reading thread in next().
        own_cpu_seconds: CPU of the reading thread outside next().
        queued_seconds: The reading thread was ready to run and others had the CPU.
        other_threads_seconds: CPU of the trainer process's other threads.
        knocks: How often another thread asked for the interpreter lock, the reading thread being
            outside next().
        held_knocks: Knocks at which the lock was held for 0.5 ms or more.
        collective_knocks: Knocks at which the reading thread was in a collective or backward.
        busy_vcpus: vCPUs that were busy with any program; under a quota, its group's only.
        elsewhere_vcpus: Busy vCPUs of this machine that this process may not use.
        quota_vcpus: Smallest CPU quota of this control group and those above it.
        periods: Periods of the CPU quota; 0: there is no quota.
        throttled_seconds: Time for which its threads were stopped, summed over vCPUs.
        storage_stall_seconds: Some process of the machine waited for storage; None: not known.
        core_looks: CPU-seconds of one and the same short computation, one every 0.1 s.
    """

    seconds: float = 0.0
    steps: int = 0
    wait_seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    queued_seconds: float = 0.0
    other_threads_seconds: float = 0.0
    knocks: int = 0
    held_knocks: int = 0
    collective_knocks: int = 0
    busy_vcpus: float = 0.0
    elsewhere_vcpus: float = 0.0
    quota_vcpus: float | None = None
    periods: int = 0
    throttled_periods: int = 0
    throttled_seconds: float = 0.0
    received_bytes: int = 0
    storage_stall_seconds: float | None = None
    core_looks: tuple[float, ...] = ()
    epochs: tuple[ProfiledEpoch, ...] = ()

    @property
    def outside_seconds(self) -> float:
        return max(0.0, self.seconds - self.wait_seconds)

    @property
    def held_share(self) -> float:
        """Share of time outside next() with the interpreter lock held; 0: not known."""
        if not self.knocks:
            return 0.0
        return self.held_knocks / self.knocks

    @property
    def idle_seconds(self) -> float:
        """Seconds in which the reading thread, outside next(), neither ran nor could."""
        return max(0.0, self.outside_seconds - self.own_cpu_seconds - self.queued_seconds)

    @property
    def collective_seconds(self) -> float:
        """Seconds of a step in collectives and in backward."""
        if not self.knocks or not self.steps:
            return 0.0
        # Knocks are samples of the time outside next(), at even intervals.
        return self.collective_knocks / self.knocks * self.outside_seconds / self.steps


class Quartiles(msgspec.Struct, frozen=True, kw_only=True):
    """One quantity; `samples` is the number of steps or batches behind it."""

    mean: float
    median: float
    low: float
    high: float
    samples: int


class AsIs(msgspec.Struct, frozen=True, kw_only=True):
    """The user's loop, untouched; per step.

    Attributes:
        step_seconds: Time from batch to batch, over blocks of steps (workers deliver in bursts).
        wait_seconds: Part of step_seconds in next().
        trainer_cpu_seconds: Without workers, loading included.
        children_cpu_seconds: Of all processes below the trainer, on the vCPUs that it may use.
        outside_cpu_seconds: Of those that left its affinity, on other vCPUs.
        receive_seconds: CPU-seconds of the trainer's own thread inside next().
        first_wait_seconds: Median wait for the first batch of an epoch; None: not met.
        others_vcpus: vCPUs of this process that other programs kept busy during that time.
        clock: By which steps and waits were timed: `host`, or the device's name, as `cuda:0`.
        host_wait_seconds: Median time of the host in next(), a part of which a device may not have
            noticed; None: it is wait_seconds.
    """

    step_seconds: Quartiles
    wait_seconds: Quartiles
    trainer_cpu_seconds: float
    children_cpu_seconds: float
    outside_cpu_seconds: float = 0.0
    receive_seconds: float
    first_wait_seconds: float | None = None
    others_vcpus: float = 0.0
    epoch_batches: int | None = None
    clock: str = HOST
    host_wait_seconds: float | None = None

    @property
    def hidden_seconds(self) -> float:
        """Seconds of next() in which the device was still busy with steps before."""
        if self.host_wait_seconds is None:
            return 0.0
        return max(0.0, self.host_wait_seconds - self.wait_seconds.median)

    def bounds(self, cached: Quartiles) -> float:
        """Returns the median of steps on cached batches, at most these steps where they show it.

        By a device's clock a step as it is that waits for nothing is such a step as well, and its
        batches lie where the loader puts them. It counts where the cached steps have two speeds, of
        which the faster is its own.
        """
        is_on_device = self.clock != HOST
        busy_seconds = self.step_seconds.median - self.wait_seconds.median
        waits_for_nothing = self.wait_seconds.median < LEAST_GAIN * self.step_seconds.median
        has_its_speed = cached.low <= (1 + LEAST_GAIN) * busy_seconds
        if is_on_device and waits_for_nothing and has_its_speed:
            return min(cached.median, busy_seconds)
        return cached.median


class AcceleratorOnly(msgspec.Struct, frozen=True, kw_only=True):
    """The steps on cached batches: the trainer's cost where it never waits for data."""

    step_seconds: Quartiles
    trainer_cpu_seconds: Quartiles
    cached_batches: int


class ReplayVariants(msgspec.Struct, frozen=True, kw_only=True):
    """Further steps on cached batches where a device trains; None: not tried, or not possible.

    Attributes:
        on_device: Steps whose batch lies on the device already: the script's copies take nothing.
        pinned: Steps whose batch lies in pinned memory and is copied without waiting.
        beside_workers: Steps beside today's loader workers, which make a batch for each of them.
        copied_bytes: Bytes that the script copies to the device in a step.
        is_pinned: All of them lie in pinned memory.
        is_waiting: The script waits for some of these copies, as without `non_blocking`.
        pin_seconds: Time of a thread that pins the batch, as with `pin_memory`; None: it is pinned.
    """

    on_device: Quartiles | None = None
    pinned: Quartiles | None = None
    beside_workers: Quartiles | None = None
    copied_bytes: int = 0
    is_pinned: bool = False
    is_waiting: bool = False
    pin_seconds: float | None = None


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """The loader without the model, at one number of workers of this rank.

    Attributes:
        cpu_seconds: CPU time of a worker for a batch: fetch, collate and hand-over.
        wall_seconds: Time of a worker for a batch, less the time when it was ready to run and
            others had the CPU: more than cpu_seconds where it waits for storage or a service.
        batches_per_second: Rate of all its workers; 0: too few batches.
        handover_seconds: Time to take a batch that is ready, while its worker makes the next one.
    """

    workers: int
    cpu_seconds: Quartiles
    wall_seconds: Quartiles
    batches_per_second: float
    handover_seconds: Quartiles | None = None

    @property
    def idle_seconds(self) -> float:
        """A worker's time for a batch in which it neither computes nor is ready to."""
        return max(0.0, self.wall_seconds.mean - self.cpu_seconds.mean)

    @property
    def idle_share(self) -> float:
        if self.wall_seconds.mean <= 0:
            return 0.0
        return self.idle_seconds / self.wall_seconds.mean


class Receive(msgspec.Struct, frozen=True, kw_only=True):
    """The feed's cost for the trainer per batch: CPU time of its thread, and of others."""

    thread_seconds: Quartiles
    cpu_seconds: Quartiles


class Reads(msgspec.Struct, frozen=True, kw_only=True):
    """Reads of this rank's workers, with their files dropped from the page cache and again.

    Attributes:
        cold_seconds: Time of a worker for a batch from storage, less its time in the run queue.
        bytes_per_second: Rate of all these workers, from the time that cold batches waited longer
            than warm ones; None: they did not, the storage keeps up.
    """

    workers: int
    batch_bytes: Quartiles
    cold_seconds: Quartiles
    warm_seconds: Quartiles
    bytes_per_second: Quartiles | None = None


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Cost of one part of loading per sample, in one worker alone; see TransformCost."""

    name: str
    within: Literal["getitem", "collate"] | None = None
    cpu_seconds: float
    samples: int


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """Equipment and name of this host, and the `source` of the name; None: not known."""

    accelerators: int | None = None
    accelerator_model: str | None = None
    cpu_model: str | None = None
    instance_type: str | None = None
    source: str = ""


class BatchFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Samples and bytes of a batch, and how its images are stored.

    `is_uint8_like`: float images hold only multiples of 1/255, or whole numbers from 0 to 255.
    """

    samples: int
    num_bytes: int
    float_image_bytes: int = 0
    is_uint8_like: bool = False
    sizes: Quartiles | None = None


class LoaderFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that the script gave its loader.

    Attributes:
        class_name: Of a class made from one of a library that loads in its own way, the library's.
        divides: Whether the dataset asked `get_worker_info()` in a worker; None: no worker ran.
        made_here: Why the trainer's host makes its batches under a data group; empty: it is not
            known that it does.
        in_step: Why nothing may be made before the loop asks; empty: nothing was seen to change.
        fails_in_workers: What a loader without workers raised in all of them; empty: nothing.
        shippable: Whether its dataset can be sent to data hosts; None: not known.
        splits: Whether the samples of a batch are made one by one; None: not known.
        start_method: How its workers begin: fork, spawn or forkserver.
    """

    num_workers: int
    pin_memory: bool
    persistent_workers: bool
    dataset: str
    torch_threads: int | None = None
    class_name: str = ""
    reach: Literal["stoker", "torch", "left", "own"] = "torch"
    iterable: bool = False
    divides: bool | None = None
    made_here: str = ""
    in_step: str = ""
    fails_in_workers: str = ""
    shippable: Shippable | None = None
    splits: bool | None = None
    start_method: str = "fork"

    @property
    def is_forked(self) -> bool:
        """Whether workers share what the trainer has, until they write to it."""
        return self.start_method == "fork"


class WorkerGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of one fresh worker alone while it made samples, after its first third.

    Attributes:
        samples: Samples that it made.
        copied_bytes_per_sample: Inherited pages of which it got a copy, as it wrote to them.
        grown_bytes_per_sample: New pages of its own.
        growing: What of its dataset grew meanwhile.
    """

    samples: int
    copied_bytes_per_sample: float
    grown_bytes_per_sample: float
    growing: tuple[GrowingObjects, ...] = ()


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a rank, its workers and its host while the steps ran unchanged; see ProfiledMemory.

    Attributes:
        looks: How often it was looked at; `look_seconds` is the mean time of one.
        grown_bytes: What the worker that grew most grew by, in all.
        epoch_samples: Samples of an epoch of this rank; None: a stream does not say.
        others_bytes: What other programs of this rank's control group held; looked at as the files
            are, where memory is short.
    """

    looks: int
    look_seconds: float
    limit_bytes: int = 0
    used_bytes: int = 0
    is_cgroups: bool = False
    only_slows: bool = False
    trainer_bytes: int = 0
    workers: int = 0
    worker_bytes: float = 0.0
    worker_private_bytes: float = 0.0
    copied_bytes_per_sample: float = 0.0
    grown_bytes_per_sample: float = 0.0
    grown_bytes: float = 0.0
    swapped_bytes: int = 0
    swapped_bytes_per_second: float = 0.0
    refaulted_bytes_per_second: float = 0.0
    major_faults_per_second: float = 0.0
    prefetch_factor: int = 0
    epoch_samples: int | None = None
    others_bytes: int = 0
    largest_other: str = ""
    files_bytes: int = 0
    files_folder: str = ""


class LoopGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """How this rank's process grows by its loop, while the steps ran unchanged.

    Attributes:
        seen_bytes: What it grew by after a warm-up, in all; without memory that it had asked for
            before, where nothing is found that keeps it.
    """

    grown_bytes_per_step: float
    seen_bytes: int = 0
    kept: tuple[KeptObjects, ...] = ()


class RankResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one rank; phases that were not reached are None.

    Attributes:
        missing: Why the profile is incomplete; empty where it is not.
        needed_seconds: Budget with which it would be complete; None: the budget is not the reason.
        vcpus: vCPUs that this process may use: 1.5 under a quota of one and a half.
        cpu_limit: What sets `vcpus`; pod: the pod's request, beyond which idle vCPUs may be used.
        is_pod: The process runs in a pod of Kubernetes.
        gpu_uuids: UUIDs of the GPUs on which it held memory, as `own_gpu_uuids` has them.
        has_ended: The profile ended the process, not the script.
        ended_before: What the script was about to do to a user's file, which ended the profile.
    """

    rank: int
    world_size: int
    host: str
    missing: str = ""
    needed_seconds: float | None = None
    vcpus: float
    cpu_limit: CpuLimit = "machine"
    is_pod: bool = False
    ranks_on_host: int
    uses_cuda: bool = False
    gpu_uuids: tuple[str, ...] = ()
    steps: int = 0
    replayed_steps: int = 0
    loaders: int = 0
    as_is: AsIs | None = None
    evidence: Evidence | None = None
    accelerator: AcceleratorOnly | None = None
    variants: ReplayVariants | None = None
    drains: tuple[Drain, ...] = ()
    receive: Receive | None = None
    reads: Reads | None = None
    costs: tuple[Cost, ...] = ()
    gpu_decoding: GpuDecoding | None = None
    inventory: Inventory | None = None
    batch: BatchFacts | None = None
    loader: LoaderFacts | None = None
    seed: int | None = None
    # Not shared: msgspec makes a new empty dict for each object.
    versions: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    has_ended: bool = False
    ended_before: str = ""
    epoch_times: EpochTimes | None = None
    memory: RankMemory | None = None
    held_objects: tuple[HeldObjects, ...] = ()
    worker_growth: WorkerGrowth | None = None
    loop: LoopGrowth | None = None

    @property
    def num_workers(self) -> int:
        """Loader workers of this rank; 0: it loads itself, or its loader is not known."""
        if self.loader is None:
            return 0
        return self.loader.num_workers

    @property
    def replayed_seconds(self) -> float:
        """A step on cached batches, as `AsIs.bounds` has it; 0: there was none."""
        if self.accelerator is None:
            return 0.0
        cached = self.accelerator.step_seconds
        if self.as_is is None:
            return cached.median
        return self.as_is.bounds(cached)


def quartiles(values: Sequence[float], *, samples: int | None = None) -> Quartiles:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Quartiles(
        mean=sum(ordered) / len(ordered),
        median=median(ordered),
        # Values that were measured, not interpolated: with five of them the second and the fourth.
        low=ordered[last // 4],
        high=ordered[last - last // 4],
        samples=samples or len(ordered),
    )


def block_steps(*, workers: int, cycle: int = 1) -> int:
    """Returns the steps of a block: whole bursts of workers and whole cycles; 4 at least.

    W workers deliver in bursts of W, and with gradient accumulation each n-th step is longer. Where
    only long blocks hold whole ones of both, they hold whole cycles.
    """
    size = math.lcm(max(1, workers), cycle)
    # Of 8 workers and a cycle of 3 a block has 9 steps, not 24.
    if size > 2 * max(workers, cycle):
        size = cycle * math.ceil(workers / cycle)
    return size * math.ceil(_LEAST_BLOCK / size)


def block_means(values: Sequence[float], *, workers: int) -> list[float]:
    """Returns the means of consecutive blocks of steps.

    A median of single steps would miss the wait that ends a burst. Fewer than three blocks say
    nothing of the spread: one mean says what there is.

    Args:
        values: One for each step.
        workers: Of the loader; a block holds whole bursts.
    """
    size = block_steps(workers=workers)
    # Too few for quartiles.
    if len(values) < MIN_BLOCKS * size:
        return [sum(values) / len(values)]
    blocks = [values[at : at + size] for at in range(0, len(values) - size + 1, size)]
    return [sum(block) / size for block in blocks]


def cycle_of(values: Sequence[float]) -> int:
    """Returns after how many steps the values repeat: 1 where they do not, or are all alike.

    Rare long steps, which compile or evaluate, are clipped: at twice what nine of ten stay below,
    and where that shows no cycle, at the fourth longest.
    """
    recent = values[-_CYCLE_LOOK:]
    if len(recent) < _CYCLE_REPEATS * 2:
        return 1
    ordered = sorted(recent)
    for highest in (_CLIP * ordered[len(ordered) * 9 // 10], ordered[-_RARE - 1]):
        period = _period([min(value, highest) for value in recent])
        if period > 1:
            return period
    return 1


def _period(values: Sequence[float]) -> int:
    """Returns the shortest period of which the place explains four fifths of the variance, or 1.

    By adjusted R squared, so that many places do not explain much by chance.
    """
    whole = variance(values)
    # All steps are alike: a period would only explain noise.
    if whole <= (_EVEN * fmean(values)) ** 2:
        return 1
    for period in range(2, min(_MAX_CYCLE, len(values) // _CYCLE_REPEATS) + 1):
        within = sum(_scatter(values[place::period]) for place in range(period))
        # The variance that is left, with a mean for each place: as many degrees of freedom less.
        if within / (len(values) - period) <= _UNEXPLAINED * whole:
            return period
    return 1


def _scatter(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)


def read_ranks(folder: Path) -> list[RankResult]:
    """Reads all results in `folder`, by rank; raises UsageError for a file of another kind."""
    results = []
    for path in folder.glob("profile-rank*.json"):
        try:
            results.append(msgspec.json.decode(read_text(path), type=RankResult))
        except msgspec.DecodeError as err:
            raise UsageError(
                f"not a result of a profile: {err}", where=str(path), fix="profile again"
            ) from None
    return sorted(results, key=lambda result: result.rank)


def epochs_of(rank: RankResult, *, batch_in_one_worker: Quartiles | None) -> EpochTimes | None:
    """Returns the epochs of a rank that was profiled; None: nothing is known of them.

    Where no second epoch began in the steps as they are, its start is the time in which one worker
    makes a batch, as all workers begin at once. What lies between epochs stays unknown then.
    """
    if rank.as_is is None or rank.epoch_times is None:
        return None
    start = rank.epoch_times.start
    if start is None and rank.num_workers == 0:
        start = _NO_PAUSE
    elif start is None and batch_in_one_worker is not None:
        start = _first_batch(batch_in_one_worker, usual_wait=rank.as_is.wait_seconds.median)
    return EpochTimes(
        steps=rank.epoch_times.steps,
        start=start,
        between=rank.epoch_times.between,
        # The script's warm-up is in the mean of its steps.
        inside_seconds=None,
    )


def batch_in_one_worker(rank: RankResult) -> Quartiles | None:
    """Returns the time in which one worker of this rank makes a batch; None: not measured."""
    alone = (drain.wall_seconds for drain in rank.drains if drain.workers == 1)
    return next(alone, None)


def _first_batch(batch: Quartiles, *, usual_wait: float) -> EpochPause:
    return EpochPause(
        seconds=max(0.0, batch.median - usual_wait),
        low_seconds=max(0.0, batch.low - usual_wait),
        high_seconds=max(0.0, batch.high - usual_wait),
        count=0,
    )
