"""The states of a training run, each with the figures that it rests on, and the free fixes. Pure.

Which limit binds (CPU, accelerator, loader, storage) is `Parts.limit` in `step_model.py`. The
storage is named by time that workers were seen to wait, never by rates alone.

Two states are only shown by an accelerator, from further steps on cached batches. *transfer*: its
stream waits for copies from the host; the same step on batches that are there already is shorter.
*neighbour*: loading on the host's own cores makes a step longer that waits for nothing, as its
kernels are launched late. On CPUs both are part of the CPU time of a step.

What the driver says of the GPUs is held against that step. *launch*: no batch is waited for, and
yet no kernel runs for a good part of it, as the script's own thread launches too slowly or waits
for results. A GPU that is busier than the step explains is used by something else as well.

Fixes are changes to the script that cost no host, where the measurement supports them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from stoker.profile.rank_results import (
    AsIs,
    Drain,
    Evidence,
    Quartiles,
    RankResult,
    ReplayVariants,
    batch_in_one_worker,
    epochs_of,
)
from stoker.records import Fix, ProfileState, StepTerms
from stoker.records.gpu import GpuLoads, during_steps, used_gpus
from stoker.records.other_programs import MAX_OTHERS
from stoker.step_model import LEAST_GAIN, WAITS, Neighbour, Parts, more_workers
from stoker.units import count, ms, numbered, percentage, size, vcpus_words, wait_share

# Two profiles of one training run differ by this much of a step.
MIN_SHARE = LEAST_GAIN
# A container that its quota stops in fewer periods hardly notices.
MIN_THROTTLED = 0.10
MIN_PERIODS = 5
# A share of this many knocks is known to about 0.1.
MIN_KNOCKS = 15
# A loop of Python code holds the interpreter lock at 0.98 of all knocks, a small model of torch's
# operations at 0.05, the same with another busy thread at 0.9 (2 cores, python 3.11). What the main
# thread's own CPU does not explain, others hold.
MIN_HELD = 0.4
MIN_HELD_BY_OTHERS = 0.3
# Neither running nor ready to, while another thread has a good part of a vCPU.
MIN_STARVED = 0.3
MIN_OTHER_THREADS = 0.15
# Alone it holds the lock more often, runs or could for most of its time, and hardly waits.
MIN_HELD_ALONE = 0.6
MIN_BUSY = 0.6
MIN_OUTSIDE = 0.7
# Ranks of one training run differ by less: their samples do, and knocks are counted in tens.
MIN_STRAGGLING = 0.15
# Taking a batch over from its worker costs this much of a short step, on any worker.
MAX_LOST = 0.15
# Below this share, a worker that does not compute handles memory pages and pipes; it does not wait.
MIN_WORKER_IDLE = 0.5
# A loader that alone delivers a batch in less of a step is not what steps wait for.
MIN_LOADING = 0.6
# A read from storage costs a little more even where the storage keeps up.
MIN_COLD_RATIO = 1.5
# vCPUs that are so busy have nothing left for more workers, and from here on they are the limit.
BUSY = 0.75
# Stalls are printed with one decimal.
_LEAST_STALLED = 0.05
# The same loading differs by less from one process to another.
MIN_THREADS_RATIO = 1.5
# Bytes in place of numbers of four bytes.
_UINT8_LESS = 0.75
_PIN = "pin_memory=True, and non_blocking=True where batches are copied to the accelerator"
_NOT_REACHED = (
    "give the class of the batches a method pin_memory(): the loader's pin_memory=True does not "
    "reach their tensors"
)
_NON_BLOCKING = (
    "non_blocking=True where batches are copied to the accelerator: they are pinned already"
)
_AHEAD = (
    "stoker.to_device(loader, device), with pin_memory=True: it copies the next batch while the "
    "accelerator works on this one"
)
# The driver counts time in which any kernel runs, in windows of a sixth of a second to a second.
_MIN_IDLE = 0.3
_MIN_STRANGE = 0.3
_LEAST_SAMPLES = 3
# Less than this share of a step is not worth a line.
_MIN_GAIN = 0.05
_MIN_FLOAT_BYTES = 1 << 20
_AS_FAST = 0.95
# One worker more than vCPUs keeps these busy while another waits; many more only take turns.
_MANY_WORKERS_PER_VCPU = 1.5
# More than one epoch differs from another by chance; with fewer batches that cannot be told.
_FIRST_RATIO = 1.5
_LEAST_BATCHES = 5
_LIMIT_OF_PODS = "kubernetes.cpu_limit sets it, to the cpu of the pool or of kubernetes.dnn"
_OF_STATES = {
    "throttled": Fix(
        id="throttled",
        text="remove the container's CPU limit, or raise it: its host may have idle vCPUs that "
        "it cannot use",
    ),
    "gil": Fix(
        id="gil",
        text="move Python work out of the trainer's main process: into the dataset or the collate "
        "function, with num_workers=1 or more; or run threads as separate processes",
        cost="small",
    ),
    "neighbour": Fix(
        id="neighbour",
        text="launch less: CUDA graphs (torch.compile with mode='reduce-overhead') launch a whole "
        "step at once, which busy cores can hardly delay; or make batches on data hosts",
        cost="small",
    ),
    "launch": Fix(
        id="launch",
        text="launch more at once: larger batches, CUDA graphs (torch.compile with "
        "mode='reduce-overhead'), fused or foreach optimizers; and ask for results (.item(), "
        ".cpu(), print) every some steps only",
        cost="small",
    ),
    "straggler": Fix(
        id="straggler",
        text="look at the host and the data of the slow rank: all other ranks wait for it",
        cost="small",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Signs:
    """Figures of a rank's phases: `alone` is its loader with fewest workers, `many` with most."""

    rank: RankResult
    as_is: AsIs
    evidence: Evidence
    alone: Drain | None = None
    many: Drain | None = None

    @property
    def workers(self) -> int:
        return self.rank.num_workers

    @property
    def step_seconds(self) -> float:
        return self.as_is.step_seconds.median

    @property
    def wait_share(self) -> float:
        return wait_share(
            step_seconds=self.step_seconds, wait_seconds=self.as_is.wait_seconds.median
        )

    @property
    def lost_share(self) -> float:
        """Share of a step that cached batches would save, waiting included; 0 to 1."""
        if self.rank.accelerator is None:
            return self.wait_share
        # Loading on the trainer's CPUs slows its steps even where no batch is waited for.
        return max(self.wait_share, 1 - self.rank.replayed_seconds / self.step_seconds)

    @property
    def worker_idle_share(self) -> float:
        """Share of a batch's time that is neither computing nor waiting for a CPU."""
        if self.alone is None:
            return 0.0
        return self.alone.idle_share

    @property
    def idlest(self) -> Drain | None:
        # What is read ahead may hide all waiting of a lone worker, and none of many workers.
        return max(
            (drain for drain in (self.alone, self.many) if drain),
            key=lambda drain: drain.idle_share,
            default=None,
        )

    @property
    def is_loading_awaited(self) -> bool:
        """Whether steps wait, and today's workers alone load no faster."""
        if self.wait_share < MIN_SHARE or self.alone is None:
            return False
        # The loader alone makes rate * step_seconds batches in a step's time; one is needed.
        rate = self.rate(max(1, self.workers)) or self.alone.batches_per_second
        return rate * self.step_seconds * MIN_LOADING <= 1

    @property
    def own_seconds(self) -> float:
        """Seconds of a step outside collectives and backward, which wait for ranks."""
        if not self.evidence.steps:
            return 0.0
        seconds = self.evidence.seconds / self.evidence.steps
        return max(0.0, seconds - self.evidence.collective_seconds)

    @property
    def rates(self) -> str:
        if self.alone is None or self.many is None:
            return ""
        return (
            f"{self.alone.workers} alone: {self.alone.batches_per_second:.1f} batches per second, "
            f"{self.many.workers}: {self.many.batches_per_second:.1f}"
        )

    def rate(self, workers: int) -> float:
        """Returns batches per second of the loader alone; 0: not tried with so many workers."""
        drain = self.drain(workers)
        if drain is None:
            return 0.0
        return drain.batches_per_second

    def drain(self, workers: int) -> Drain | None:
        drains = (d for d in self.rank.drains if d.workers == workers and d.batches_per_second > 0)
        return next(drains, None)


def _batch_words(drain: Drain) -> str:
    wall = drain.wall_seconds.mean
    cpu = drain.cpu_seconds.mean
    return f"a batch takes a worker {ms(wall)}, of which it computes {ms(min(cpu, wall))}"


def signs_of(rank: RankResult) -> Signs:
    assert rank.as_is is not None
    drains: Sequence[Drain] = sorted(
        (drain for drain in rank.drains if drain.batches_per_second > 0),
        key=lambda drain: drain.workers,
    )
    signs = Signs(rank=rank, as_is=rank.as_is, evidence=rank.evidence or Evidence())
    if drains:
        signs = replace(signs, alone=drains[0])
    if len(drains) > 1:
        signs = replace(signs, many=drains[-1])
    return signs


def without_stops(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns ranks whose loader alone takes its CPU time, where a quota stops the processes.

    It was stopped while it was measured, too, which is no waiting for data.
    """
    if not throttled([signs_of(rank) for rank in ranks if rank.as_is is not None]):
        return ranks
    return [
        msgspec.structs.replace(rank, drains=tuple(map(_unstopped, rank.drains))) for rank in ranks
    ]


def _unstopped(drain: Drain) -> Drain:
    wall = min(drain.wall_seconds, drain.cpu_seconds, key=lambda part: part.mean)
    return msgspec.structs.replace(drain, wall_seconds=wall)


def busy_share(signs: Sequence[Signs], *, vcpus: float) -> float:
    machines = {rank.rank.host: rank.evidence.busy_vcpus for rank in signs}
    used = sum(
        (rank.as_is.trainer_cpu_seconds + rank.as_is.children_cpu_seconds)
        / rank.as_is.step_seconds.mean
        for rank in signs
    )
    # The larger one: where nothing was watched during the steps, `busy_vcpus` is 0.
    return min(1.0, max(used, sum(machines.values())) / vcpus)


def others_by_host(signs: Sequence[Signs]) -> dict[str, float]:
    """Returns the vCPUs that other programs kept busy on each host; needs all of its ranks."""
    hosts: dict[str, list[AsIs]] = {}
    for own in signs:
        hosts.setdefault(own.rank.host, []).append(own.as_is)
    others = {}
    for host, ranks in hosts.items():
        used = sum(
            (own.trainer_cpu_seconds + own.children_cpu_seconds) / own.step_seconds.mean
            for own in ranks
        )
        # Of B busy vCPUs a rank calls B - u others', u being its own: over n ranks, with what they
        # used, the sum is n B.
        busy = sum(own.others_vcpus for own in ranks) + used
        others[host] = max(0.0, busy / len(ranks) - used)
    return others


def others_of(signs: Sequence[Signs]) -> float:
    return sum(others_by_host(signs).values())


def with_one_step(ranks: Sequence[RankResult]) -> Sequence[RankResult]:
    """Returns ranks whose steps have their mean as median where other programs ran.

    These come and go: their CPU time is a mean over the steps, to be compared with a mean only.
    """
    vcpus = sum({rank.host: rank.vcpus for rank in ranks}.values())
    if others_of([signs_of(rank) for rank in ranks]) <= MAX_OTHERS * vcpus:
        return ranks

    def mean(part: Quartiles) -> Quartiles:
        return msgspec.structs.replace(part, median=part.mean)

    return [
        msgspec.structs.replace(
            rank,
            as_is=msgspec.structs.replace(
                rank.as_is,
                step_seconds=mean(rank.as_is.step_seconds),
                wait_seconds=mean(rank.as_is.wait_seconds),
            ),
        )
        for rank in ranks
        if rank.as_is is not None
    ]


def where(own: Signs, signs: Sequence[Signs]) -> str:
    if len(signs) == 1:
        return ""
    return f" (rank {own.rank.rank}, host {own.rank.host})"


def throttled(signs: Sequence[Signs]) -> ProfileState | None:
    """Finds a CPU quota that stops the processes, even if the machine has idle CPUs."""

    def stopped(own: Signs) -> float:
        seen = own.evidence
        if seen.periods < MIN_PERIODS or not seen.seconds:
            return 0.0
        return min(seen.throttled_periods / seen.periods, seen.throttled_seconds / seen.seconds)

    # One stopped rank is enough: the others wait for it in all-reduce.
    worst = max(signs, key=stopped)
    seen = worst.evidence
    share = stopped(worst)
    if share < MIN_THROTTLED:
        return None
    return ProfileState(
        id="throttled",
        text=f"throttled container: its CPU quota stopped it in {seen.throttled_periods} of "
        f"{seen.periods} periods, {seen.throttled_seconds:.1f} s in {seen.seconds:.1f} s"
        f"{where(worst, signs)}",
        share=min(1.0, share),
    )


def interpreter_lock(signs: Sequence[Signs]) -> ProfileState | None:
    """Finds a trainer that the interpreter lock delays: its thread waits, or always holds it."""
    worst = max(signs, key=lambda own: own.evidence.held_share)
    seen = worst.evidence
    if seen.knocks < MIN_KNOCKS or not seen.seconds or not seen.outside_seconds:
        return None
    held = f"the interpreter lock was held at {seen.held_knocks} of {seen.knocks} looks"
    starved = seen.idle_seconds / seen.outside_seconds
    ran = seen.own_cpu_seconds / seen.outside_seconds
    others = seen.other_threads_seconds / seen.seconds
    # The lock is held beyond the main thread's CPU time, and it neither ran nor could.
    if (
        seen.held_share >= max(MIN_HELD, ran + MIN_HELD_BY_OTHERS)
        and others >= MIN_OTHER_THREADS
        and starved >= MIN_STARVED
        and seen.idle_seconds >= MIN_SHARE * seen.seconds
    ):
        return ProfileState(
            id="gil",
            text=f"GIL-bound main process: {held}, and another thread of the trainer used "
            f"{others:.1f} vCPUs while the main one neither ran nor was ready to, "
            f"{percentage(starved)} of its time outside next(){where(worst, signs)}",
            share=min(1.0, seen.idle_seconds / seen.seconds),
        )
    outside = seen.outside_seconds / seen.seconds
    if (
        seen.held_share >= MIN_HELD_ALONE
        and 1 - starved >= MIN_BUSY
        and outside >= MIN_OUTSIDE
        and seen.own_cpu_seconds >= seen.other_threads_seconds
    ):
        return ProfileState(
            id="gil",
            text=f"GIL-bound main process: {held}: {percentage(seen.held_share * outside)} of a "
            f"step is Python code in the trainer's main thread, not the model{where(worst, signs)}",
            share=min(1.0, seen.held_share * outside),
        )
    return None


def straggler(signs: Sequence[Signs]) -> ProfileState | None:
    """Finds the rank that all wait for in collectives: it spends less time in them."""
    if len(signs) < 2 or any(rank.evidence.knocks < MIN_KNOCKS for rank in signs):
        return None
    slowest = max(signs, key=lambda rank: rank.own_seconds)
    others = [rank for rank in signs if rank is not slowest]
    # In a collective all ranks wait for the last one: it alone spends its time outside of it.
    usual = median(rank.own_seconds for rank in others)
    late = slowest.own_seconds - usual
    share = late / slowest.step_seconds
    if share < MIN_STRAGGLING:
        return None
    more = slowest.as_is.wait_seconds.median - median(
        rank.as_is.wait_seconds.median for rank in others
    )
    is_data = more >= 0.5 * late
    why = "because it waits for its data" if is_data else "in its own loop, not because of data"
    return ProfileState(
        id="straggler",
        text=f"one slow rank: rank {slowest.rank.rank} (host {slowest.rank.host}) takes "
        f"{ms(slowest.own_seconds)} of a step outside collectives and backward, the others "
        f"{ms(usual)}, and they wait for it; it is slow {why}",
        share=min(1.0, share),
    )


def find_states(ranks: Sequence[RankResult], *, parts: Parts | None) -> tuple[ProfileState, ...]:
    """Returns the states that the figures support, the one with the largest share of a step first.

    The steps as is of all ranks must be known; without `parts` the loader was not measured alone.
    """
    signs = [signs_of(rank) for rank in ranks]
    vcpus = _vcpus_left(signs)
    bound = parts
    binding = None
    if parts:
        bound = replace(parts, vcpus=min(parts.vcpus, vcpus))
        binding = bound.bottleneck
    slowest = slowest_of(ranks)
    stopped = throttled(signs)
    gil = None
    busy = 1.0
    # A group that is stopped has no idle vCPUs, even if the machine has, and its threads hold
    # their locks: knocks say nothing then.
    if not stopped:
        busy = busy_share(signs, vcpus=vcpus)
        gil = interpreter_lock(signs)
    states = [
        stopped,
        gil,
        straggler(signs),
        _other_programs(signs, vcpus=vcpus),
    ]
    if binding in ("cpu", None):
        states.append(_cpu(signs, vcpus=vcpus, busy=busy))
    # The others wait for this rank in all-reduce: it shows what all of them wait for.
    waiting = max(signs, key=lambda rank: rank.as_is.wait_seconds.median)
    storage: ProfileState | None = None
    # Without a CPU a worker does not compute either: that is no waiting for reads.
    if not stopped and binding != "cpu":
        is_shared = parts is not None and parts.is_shared
        storage = _slow_reads(waiting, is_limit=binding == "storage", is_shared=is_shared)
    states.append(storage)
    if bound and not storage:
        states.append(_workers(waiting, parts=bound, busy=busy))
    if binding in ("accelerator", "none", None) and not gil:
        states.append(_accelerator(signs, is_known=bound is not None))
    states += [transfer(slowest, parts=parts), neighbour(slowest, parts=parts)]
    return tuple(sorted(filter(None, states), key=lambda state: -(state.share or 0.0)))


def _vcpus_left(signs: Sequence[Signs]) -> float:
    """Returns the vCPUs of all hosts, less what quotas take away."""
    hosts = {}
    for shown in signs:
        vcpus = shown.rank.vcpus
        hosts[shown.rank.host] = min(vcpus, shown.evidence.quota_vcpus or vcpus)
    return sum(hosts.values())


def _slow_reads(waiting: Signs, *, is_limit: bool, is_shared: bool) -> ProfileState | None:
    """Finds the storage, by cold reads, or by what workers share.

    Any share counts where the parts name the storage, by its rate or by what workers share.
    """
    cold = _cold_reads(waiting, is_limit=is_limit and not is_shared)
    if cold is None and is_shared:
        return _shared_reads(waiting, is_limit=is_limit)
    return cold


def _other_programs(signs: Sequence[Signs], *, vcpus: float) -> ProfileState | None:
    taken = others_by_host(signs)
    others = sum(taken.values())
    if others <= MAX_OTHERS * vcpus:
        return None
    where = ""
    if len(taken) > 1:
        where = f", most of them on {max(taken, key=taken.__getitem__)}"
    return ProfileState(
        id="other-programs",
        text=f"other programs kept {others:.1f} of the {vcpus_words(vcpus)} busy{where}: profile "
        "again on a quiet machine",
        share=min(1.0, others / vcpus),
    )


def _cpu(signs: Sequence[Signs], *, vcpus: float, busy: float) -> ProfileState | None:
    lost = max(rank.lost_share for rank in signs)
    if lost < MIN_SHARE or busy < BUSY:
        return None
    workers = sum(rank.as_is.children_cpu_seconds for rank in signs)
    trainers = sum(rank.as_is.trainer_cpu_seconds for rank in signs)
    others = others_of(signs) / vcpus
    also = ""
    if others > MAX_OTHERS:
        also = f", {percentage(others)} with other programs"
    used = f"{workers:.3f} CPU-seconds of loader workers and {trainers:.3f} of trainers"
    if not any(rank.workers for rank in signs):
        used = f"{trainers:.3f} CPU-seconds of trainers, which load their batches themselves"
    return ProfileState(
        id="cpu",
        text=f"CPU-bound: a step uses {used}, on {vcpus_words(vcpus)}, {percentage(busy)} "
        f"busy{also}",
        share=lost,
    )


def _shared_reads(own: Signs, *, is_limit: bool) -> ProfileState | None:
    drain = own.idlest
    if own.wait_share < MIN_SHARE or drain is None:
        return None
    is_waiting = own.worker_idle_share >= MIN_WORKER_IDLE
    # If the parts name storage, any wait counts: copying can be most of a worker's time.
    if not is_limit and not (is_waiting and own.is_loading_awaited):
        return None
    many = ""
    if drain.workers != 1:
        many = f"with {drain.workers} workers, "
    much = "no" if is_waiting else "little"
    return ProfileState(
        id="storage",
        text=f"bound by storage or network: {many}{_batch_words(drain)}; it waits for reads, and "
        f"more workers get {much} more ({own.rates}){_traffic_words(own.evidence)}",
        share=own.wait_share * drain.idle_share,
    )


def _traffic_words(evidence: Evidence) -> str:
    """Returns what was seen of the network and of the storage; empty: nothing."""
    seen = ""
    if evidence.seconds:
        # Megabits, as networks are named by.
        received = evidence.received_bytes * 8e-6 / evidence.seconds
        if received >= 0.1:
            seen += f"; {received:.1f} Mbit/s are received over the network"
    stalled = evidence.storage_stall_seconds or 0.0
    if stalled >= _LEAST_STALLED:
        seen += f"; processes waited {stalled:.1f} s for storage"
    return seen


def _cold_reads(own: Signs, *, is_limit: bool) -> ProfileState | None:
    """Finds steps that wait for storage, although the loader alone found its files in memory."""
    reads = own.rank.reads
    if own.wait_share < MIN_SHARE or reads is None or reads.bytes_per_second is None:
        return None
    cold = reads.cold_seconds.mean
    warm = reads.warm_seconds.mean
    is_slow = cold >= MIN_COLD_RATIO * warm
    is_awaited = cold >= MIN_LOADING * own.step_seconds * max(1, own.workers)
    if cold <= warm or not (is_limit or (is_slow and is_awaited)):
        return None
    return ProfileState(
        id="storage",
        text=f"bound by storage or network: a batch of {size(reads.batch_bytes.mean)} "
        f"takes a worker {ms(cold)} from storage and {ms(warm)} from memory; the storage "
        f"gives {size(reads.bytes_per_second.mean)}/s",
        share=own.wait_share * (1 - warm / cold),
    )


def _workers(own: Signs, *, parts: Parts, busy: float) -> ProfileState | None:
    """Describes steps that wait although more workers would make the batches sooner."""
    if own.wait_share < MIN_SHARE or more_workers(parts) is None:
        return None
    if parts.workers == 0:
        return _serial(own)
    return _few_workers(own, busy=busy)


def _few_workers(own: Signs, *, busy: float) -> ProfileState:
    """Describes too few workers: there are idle vCPUs, or the workers wait for their reads."""
    is_waiting = own.worker_idle_share >= MIN_WORKER_IDLE
    why = f"the vCPUs are {percentage(busy)} busy"
    if is_waiting and own.alone:
        why = f"{_batch_words(own.alone)}: it waits for its data, not for a CPU"
    if own.rates:
        why += f" ({own.rates})"
    workers = "1 worker loads" if own.workers == 1 else f"{own.workers} workers load"
    return ProfileState(
        id="workers", text=f"too few workers: {workers}, and {why}", share=own.wait_share
    )


def _serial(own: Signs) -> ProfileState:
    return ProfileState(
        id="workers",
        text=f"no workers: the main process loads the data itself (num_workers=0), "
        f"{ms(own.as_is.wait_seconds.median)} of each step's {ms(own.step_seconds)}"
        + _threads(own),
        share=own.wait_share,
    )


def _threads(own: Signs) -> str:
    if own.alone is None or own.alone.workers != 1:
        return ""
    if own.rank.loader and own.rank.loader.torch_threads == 1:
        return ""
    if others_of([own]) > MAX_OTHERS * own.rank.vcpus:
        # A process that waits for a vCPU takes longer, with any number of threads.
        return ""
    wait = own.as_is.wait_seconds.median + own.as_is.hidden_seconds
    wall = own.alone.wall_seconds.median
    if 1 / MIN_THREADS_RATIO <= wait / max(wall, 1e-9) <= MIN_THREADS_RATIO:
        return ""
    compared = f"; a worker, which gives torch's operations one thread, takes {ms(wall)} for it"
    if wait < wall:
        return compared
    return (
        f"{compared}: the many threads of the main process wait for each other "
        "(torch.set_num_threads(1) shows it)"
    )


def _accelerator(signs: Sequence[Signs], *, is_known: bool) -> ProfileState | None:
    """Describes a step that cached batches hardly shorten; is_known: its parts say so, too."""
    waiting = max(signs, key=lambda own: own.lost_share)
    if waiting.lost_share >= MAX_LOST or not (is_known or waiting.wait_share < MIN_SHARE):
        return None
    if waiting.rank.accelerator is None:
        return None
    replayed = waiting.rank.replayed_seconds
    # The rest of the cached step waits for copies: a separate state.
    busy = replayed - (transfer_seconds(waiting.rank) or 0.0)
    return ProfileState(
        id="accelerator",
        text=f"accelerator-bound: a step takes {ms(waiting.step_seconds)}, with cached batches "
        f"{ms(replayed)}; {percentage(waiting.wait_share)} of it is waiting for data",
        share=min(1.0, busy / waiting.step_seconds),
    )


def slowest_of(ranks: Sequence[RankResult]) -> RankResult:
    """Returns the rank whose cached steps take longest: all others wait for it."""
    return max(ranks, key=lambda rank: rank.replayed_seconds)


def transfer_seconds(rank: RankResult) -> float | None:
    """Returns the seconds of a step that waits for copies to the device; None: not measured."""
    variants = rank.variants
    if variants is None or variants.on_device is None:
        return None
    return max(0.0, rank.replayed_seconds - variants.on_device.median)


def neighbour_seconds(rank: RankResult) -> float | None:
    """Returns how much longer a step takes beside busy workers; None: not measured."""
    variants = rank.variants
    if variants is None or variants.beside_workers is None:
        return None
    beside_seconds = variants.beside_workers.median
    if rank.as_is is not None:
        # Its own workers are busy beside the step as it is, too.
        beside_seconds = rank.as_is.bounds(variants.beside_workers)
    return max(0.0, beside_seconds - rank.replayed_seconds)


def gain_of_pinning(rank: RankResult) -> float | None:
    """Returns what pinned batches, copied without waiting, save of a step; None: not tried."""
    variants = rank.variants
    if variants is None or variants.pinned is None:
        return None
    return _gain(rank, variants, step_seconds=variants.pinned.median)


def gain_of_copies_ahead(rank: RankResult) -> float | None:
    """Returns what pinned batches save that are copied while the one before is used."""
    variants = rank.variants
    if variants is None or variants.pinned is None or variants.on_device is None:
        return None
    # Copied beside the step before: the longer of the two counts.
    copying = variants.pinned.median - variants.on_device.median
    return _gain(rank, variants, step_seconds=max(variants.on_device.median, copying))


def _gain(rank: RankResult, variants: ReplayVariants, *, step_seconds: float) -> float:
    """Returns what a step of `step_seconds` saves if its batch is pinned during it."""
    pinning = variants.pin_seconds or 0.0
    # One thread of the trainer pins all batches: no step is shorter than that takes.
    reached = max(step_seconds, pinning)
    if rank.loader is not None and rank.loader.num_workers == 0:
        # Without workers it is the thread that trains.
        reached = step_seconds + pinning
    return max(0.0, rank.replayed_seconds - reached)


def lost_to_transfer(parts: Parts, *, seconds: float | None = None) -> float:
    """Returns how much shorter the step of the parts is without waiting for copies.

    Args:
        seconds: The part of this waiting that would end; None: all of it.
    """
    ended = parts.transfer_seconds
    if seconds is not None:
        ended = min(seconds, ended)
    less = replace(parts, accelerator_seconds=parts.accelerator_seconds - ended)
    # Loading that needs a larger share of a shorter step is not what is asked for.
    same = replace(less, neighbour=Neighbour())
    return replace(parts, neighbour=Neighbour()).step_seconds - same.step_seconds


def lost_to_neighbour(parts: Parts) -> float:
    """Returns how much shorter the step of the parts is if nothing is loaded on these hosts."""
    return parts.step_seconds - replace(parts, neighbour=Neighbour()).step_seconds


def transfer(rank: RankResult, *, parts: Parts | None) -> ProfileState | None:
    """Describes steps that wait for copies of their batch to the device."""
    variants = rank.variants
    seconds = transfer_seconds(rank)
    if parts is None or variants is None or seconds is None or rank.accelerator is None:
        return None
    share = lost_to_transfer(parts) / parts.step_seconds
    if share < LEAST_GAIN:
        return None
    replayed = rank.replayed_seconds
    # Measured on cached batches, whose steps may be a little longer than those as they are.
    step = max(parts.measured_seconds, replayed)
    kind = "pinned" if variants.is_pinned else "not pinned"
    return ProfileState(
        id="transfer",
        text=f"waiting for transfers: the accelerator waits {ms(seconds)} of a step's {ms(step)} "
        f"for {size(variants.copied_bytes)} from memory of the host that is {kind}; with the "
        f"batch there already, a step takes {ms(replayed - seconds)}",
        share=min(1.0, share),
    )


def neighbour(rank: RankResult, *, parts: Parts | None) -> ProfileState | None:
    """Describes steps that loading on the same cores makes longer, though they wait for nothing."""
    seconds = neighbour_seconds(rank)
    if parts is None or seconds is None or rank.accelerator is None:
        return None
    share = lost_to_neighbour(parts) / parts.step_seconds
    if share < LEAST_GAIN:
        return None
    replayed = rank.replayed_seconds
    workers = count(parts.workers, "busy loader worker")
    return ProfileState(
        id="neighbour",
        text=f"slowed by its own loading: a step that waits for no data takes {ms(replayed)}, and "
        f"{ms(replayed + seconds)} beside {workers} ({percentage(seconds / replayed)} more): its "
        "kernels are launched late",
        share=min(1.0, share),
    )


def launch(step: StepTerms, gpus: GpuLoads, *, parts: Parts | None) -> ProfileState | None:
    """Describes an accelerator without work in steps that wait for no batch.

    Args:
        step: The profile's step.
        gpus: Loads of the GPUs during the steps as they are.
        parts: Parts of the step; None: they were not measured.
    """
    shares = _step_shares(gpus)
    if parts is None or not shares or parts.bottleneck not in ("accelerator", "none"):
        return None
    # Of several GPUs that take turns, as the stages of a pipeline, each idles for the others.
    busy = max(shares)
    copying = (step.transfer_seconds or 0.0) / step.step_seconds
    waiting = wait_share(step_seconds=step.step_seconds, wait_seconds=step.wait_seconds or 0.0)
    idle = 1 - busy - copying - waiting
    if idle < _MIN_IDLE:
        return None
    unknown = "" if step.transfer_seconds is not None else " (or for copies, which were not timed)"
    return ProfileState(
        id="launch",
        text=f"launch-bound: kernels run on the GPU for {percentage(busy)} of a step, though no "
        "batch is waited for: the script's own thread launches them too slowly, or waits for "
        f"their results{unknown}",
        share=idle,
    )


def strange_load_words(step: StepTerms, gpus: GpuLoads) -> str:
    """Returns that GPUs are busier than the steps explain; empty: they are not, or not known."""
    seconds = step.accelerator_step_seconds
    shares = _step_shares(gpus)
    if seconds is None or not shares:
        return ""
    computes = min(1.0, (seconds + (step.neighbour_seconds or 0.0)) / step.step_seconds)
    busy = min(shares)
    if busy < computes + _MIN_STRANGE:
        return ""
    return (
        f"the GPU is busy for {percentage(busy)} of the time, and the steps need it for "
        f"{percentage(computes)}: another program uses it as well, or this training run's own "
        "loader does. Steps may be shorter without"
    )


def _step_shares(gpus: GpuLoads) -> list[float]:
    """Returns for how much of the steps each GPU in use was busy; empty: not known."""
    used = [gpu for gpu in used_gpus(during_steps(gpus)) if gpu.samples >= _LEAST_SAMPLES]
    return [gpu.step_utilization for gpu in used if gpu.step_utilization is not None]


def fixes_of_transfer(ranks: Sequence[RankResult], *, parts: Parts | None) -> list[Fix]:
    """Returns what shortens the copies, with the seconds that each saves of today's step.

    Where that was not measured, pinning is named without a figure.
    """
    first = ranks[0]
    slowest = slowest_of(ranks)
    # Other accelerators are known by their variants.
    trains_on_device = first.uses_cuda or slowest.variants is not None
    if not trains_on_device or first.loader is None:
        return []
    is_measured = parts is not None and transfer_seconds(slowest) is not None
    if not is_measured and first.loader.pin_memory:
        return []
    if parts is None or not is_measured:
        return [Fix(id="pin_memory", text=_PIN)]
    name = "pin_memory"
    text = _PIN
    if slowest.variants is not None and slowest.variants.is_pinned:
        name = "non_blocking"
        text = _NON_BLOCKING
    elif first.loader.pin_memory:
        text = _NOT_REACHED
    tried = (
        Fix(id=name, text=text, saves_seconds=gain_of_pinning(slowest)),
        Fix(id="to_device", text=_AHEAD, saves_seconds=gain_of_copies_ahead(slowest), cost="small"),
    )
    shorter = [_of_step(fix, parts) for fix in tried]
    return [fix for fix in shorter if fix is not None]


def _of_step(fix: Fix, parts: Parts) -> Fix | None:
    """Returns the fix with what it saves of a step, other limits counted; None: hardly anything."""
    saved = lost_to_transfer(parts, seconds=fix.saves_seconds or 0.0)
    if saved < LEAST_GAIN * parts.step_seconds:
        return None
    return msgspec.structs.replace(fix, saves_seconds=saved)


def gain_of_bytes(ranks: Sequence[RankResult], *, parts: Parts | None) -> float | None:
    """Returns what images as bytes save of a step's copies; None: not measured, or hardly any."""
    slowest = slowest_of(ranks)
    seconds = transfer_seconds(slowest)
    batch = slowest.batch
    if parts is None or not seconds or batch is None or not batch.num_bytes:
        return None
    # Copies take as long as they have bytes.
    fewer = _UINT8_LESS * min(1.0, batch.float_image_bytes / batch.num_bytes)
    saved = lost_to_transfer(parts, seconds=fewer * seconds)
    if saved < LEAST_GAIN * parts.step_seconds:
        return None
    return saved


def find_fixes(
    ranks: Sequence[RankResult],
    *,
    parts: Parts | None,
    step: StepTerms,
    states: Sequence[ProfileState] = (),
) -> tuple[Fix, ...]:
    named = {state.id for state in states}
    waiting = max(
        (signs_of(rank) for rank in ranks if rank.as_is is not None),
        key=lambda own: own.as_is.wait_seconds.median,
        default=None,
    )
    fixes = []
    # A host that is short of memory has no room for more workers.
    if parts and "memory" not in named:
        fixes.append(_more_workers(ranks, parts=parts, step=step))
    if waiting:
        fixes.append(_fewer_workers(waiting, is_throttled="throttled" in named))
    fixes += [_persistent_workers(ranks, step=step), _smaller_batches(ranks, step=step)]
    if waiting:
        fixes.append(_later_epochs(waiting))
    fixes += fixes_of_transfer(ranks, parts=parts)
    fixes.append(_uint8(ranks, parts=parts))
    fixes += [_of_state(name, ranks) for name in _OF_STATES if name in named]
    by_id: dict[str, Fix] = {}
    for fix in fixes:
        # The first of an id: more workers go before fewer.
        if fix is not None and fix.id not in by_id:
            by_id[fix.id] = fix
    return tuple(sorted(by_id.values(), key=lambda fix: -(fix.saves_seconds or 0.0)))


def _of_state(name: str, ranks: Sequence[RankResult]) -> Fix:
    fix = _OF_STATES[name]
    if name != "throttled" or not any(rank.is_pod for rank in ranks):
        return fix
    return msgspec.structs.replace(fix, text=f"{fix.text} ({_LIMIT_OF_PODS})")


def _fewer_workers(own: Signs, *, is_throttled: bool) -> Fix | None:
    vcpus = own.rank.vcpus
    ranks = own.rank.ranks_on_host
    # One for each vCPU that a rank has.
    enough = max(1, round(vcpus) // ranks)
    is_many = own.workers > enough + 1 and own.workers * ranks >= _MANY_WORKERS_PER_VCPU * vcpus
    many = own.drain(own.workers)
    few = own.drain(enough)
    if not is_many or many is None or few is None:
        return None
    # A quota gives its CPU in bursts of 100 ms, so that the rates of a second differ by 10%. Where
    # either number of workers uses it up, the rate follows from the CPU time of a batch.
    is_used_up = is_throttled and enough * ranks >= (own.evidence.quota_vcpus or math.inf)
    if is_used_up and few.wall_seconds.median <= WAITS * few.cpu_seconds.median:
        before = many.cpu_seconds.mean
        after = few.cpu_seconds.mean
        is_as_fast = before >= _AS_FAST * after
        evidence = f"a batch takes {ms(after)} of CPU time instead of {ms(before)}"
    else:
        today = many.batches_per_second
        fewer = few.batches_per_second
        is_as_fast = fewer >= _AS_FAST * today
        evidence = f"{fewer:.1f} batches per second instead of {today:.1f}"
    if not is_as_fast:
        return None
    return Fix(
        id="num_workers",
        text=f"num_workers={enough} instead of {own.workers}: as fast on {vcpus:.3g} vCPUs (the "
        f"loader alone: {evidence}), with less memory, and the main thread waits less for a CPU",
    )


def _later_epochs(own: Signs) -> Fix | None:
    """Suggests to profile later epochs, where the first one waits longer: it fills a cache."""
    epochs = [epoch for epoch in own.evidence.epochs if epoch.batches >= _LEAST_BATCHES]
    if len(epochs) < 2:
        return None
    first = epochs[0]
    # A median: one later epoch may have been disturbed.
    later = median(epoch.wait_seconds for epoch in epochs[1:])
    saved = first.wait_seconds - later
    if saved < 2 * MIN_SHARE * first.step_seconds or first.wait_seconds < _FIRST_RATIO * later:
        return None
    return Fix(
        id="first-epoch",
        text=f"a step of the first epoch waits {ms(first.wait_seconds)}, of the "
        f"{len(epochs) - 1} later ones {ms(later)}: something is cached. Fill the cache before "
        "the training, or profile later epochs: a training run of many epochs is nearer to those",
    )


def _more_workers(ranks: Sequence[RankResult], *, parts: Parts, step: StepTerms) -> Fix | None:
    better = more_workers(parts)
    loader = ranks[0].loader
    if better is None:
        return None
    # Workers are asked ahead: their batches would be older than what the loop changed.
    if loader is not None and (loader.in_step or loader.fails_in_workers):
        return None
    before = parts.step_seconds
    if parts.workers == 0 and step.wait_seconds is not None:
        # Loading in the main process was seen: with torch's threads, that no worker has.
        before = parts.accelerator_seconds + step.wait_seconds
    # A ratio of two modelled steps, applied to the measured one: what the model misses is in both.
    saves = max(0.0, step.step_seconds * (1 - better.step_seconds / before)) or None
    wall = parts.loader_wall_seconds
    cpu = parts.loader_cpu_seconds
    because = f"on {vcpus_words(parts.vcpus)} the loader alone is faster with that many"
    if wall > WAITS * cpu:
        because = (
            f"a batch takes a worker {ms(wall / len(ranks))}, of which it computes "
            f"{ms(cpu / len(ranks))}"
        )
        because += "; workers wait, so faster CPUs would not help"
        because += ", and more workers than vCPUs are fine" * (better.workers > parts.vcpus)
    workers = math.ceil(better.workers / len(ranks))
    if loader is not None and loader.iterable:
        if loader.divides is False:
            return Fix(
                id="divide-stream",
                text="let the stream divide itself by get_worker_info() (docs/libraries.md), "
                f"then set num_workers={workers}: as it is, more workers would only repeat its "
                "samples",
                saves_seconds=saves,
                cost="small",
            )
        because += "; a stream has as many shards, and no data host makes a part of one"
    return Fix(
        id="num_workers",
        text=f"num_workers={workers} instead of {parts.workers // len(ranks)}: {because}",
        saves_seconds=saves,
    )


def _persistent_workers(ranks: Sequence[RankResult], *, step: StepTerms) -> Fix | None:
    first = ranks[0]
    if first.as_is is None or first.loader is None or first.loader.persistent_workers:
        return None
    wait = first.as_is.first_wait_seconds
    length = first.as_is.epoch_batches
    if not first.loader.num_workers or wait is None or not length:
        return None
    # Workers that stay must make the first batch, too.
    batch_seconds = first.as_is.wait_seconds.median
    if batch := batch_in_one_worker(first):
        batch_seconds = max(batch.median, batch_seconds)
    starts = max(0.0, wait - batch_seconds)
    if starts / length < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="persistent_workers",
        text=f"persistent_workers=True: each epoch of {numbered(length, 'batch', 'batches')} "
        f"begins with {wait:.2f} s of waiting, {starts:.2f} s of it for new workers",
        saves_seconds=starts / length,
    )


def _smaller_batches(ranks: Sequence[RankResult], *, step: StepTerms) -> Fix | None:
    first = ranks[0]
    times = epochs_of(first, batch_in_one_worker=batch_in_one_worker(first))
    if times is None or times.start is None or not times.steps:
        return None
    # Half the batch is made in half the time; spread over the steps of an epoch.
    saves = times.start.seconds / 2 / times.steps
    if saves < _MIN_GAIN * step.step_seconds:
        return None
    return Fix(
        id="smaller_batches",
        text=f"half the batch, and gradients of two accumulated: each epoch of {times.steps:.0f} "
        f"batches begins with {times.start.seconds:.2g} s of waiting, as one worker makes its "
        "first batch; a smaller one is there sooner",
        saves_seconds=saves,
        cost="small",
    )


def _uint8(ranks: Sequence[RankResult], *, parts: Parts | None) -> Fix | None:
    # A byte in place of a float of four: pictures were read as bytes, and divided by 255.
    images = [rank.batch.float_image_bytes for rank in ranks if rank.batch]
    if sum(images) < _MIN_FLOAT_BYTES:
        return None
    is_exact = all(rank.batch.is_uint8_like for rank in ranks if rank.batch)
    loss = "nothing is lost" if is_exact else "normalise there; this rounds"
    return Fix(
        id="uint8",
        text=f"send images as uint8 and cast them on the accelerator: {size(sum(images))} "
        f"per step become {size(sum(images) / 4)} ({loss})",
        saves_seconds=gain_of_bytes(ranks, parts=parts),
        cost="small",
    )
