"""The states that limit a training, each with the figures that it rests on. Pure.

Which limit binds (CPU, accelerator, loader, storage) is `Work.bottleneck` in `decide/model.py`.
*transfer* and *neighbour* are only shown by an accelerator, by its own clock; on CPUs both are part
of the CPU time of a step. *launch* is shown by the driver: no batch is waited for, and yet no
kernel runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from types import MappingProxyType

from stoker.decide.model import LEAST_GAIN, Work, more_workers
from stoker.profile.rank_results import Drain, RankResult
from stoker.records import ProfileState, StepTerms
from stoker.records.profile import MAX_OTHERS, GpuLoads, used_gpus
from stoker.units import ms, numbered, percentage, vcpus_words

# A share of this many looks is known to about 0.1.
_MIN_LOOKS = 15
# A loop of Python code holds the interpreter lock at nearly all looks, torch's operations at few.
_MIN_HELD = 0.4
# Ranks of one training run differ by less.
_MIN_STRAGGLING = 0.15
# Taking a batch over from its worker costs this much of a short step, on any worker.
_MAX_LOST = 0.15
# Below this share, a worker that does not compute handles memory pages and pipes; it does not wait.
_MIN_WORKER_IDLE = 0.5
# vCPUs that are so busy have nothing left for more workers.
_BUSY = 0.75
# Of a step in which no kernel runs; of shorter times the driver knows too little.
_MIN_IDLE = 0.3
_LEAST_GPU_SECONDS = 3.0
# What a state explains, or makes a look at it worthless.
_EXPLAINS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # Threads that a quota stops hold their locks, and wait for no reads.
        "throttled": ("gil", "storage"),
        "storage": ("workers",),
        # A GPU that idles does not set the pace.
        "gil": ("launch", "accelerator"),
        "launch": ("accelerator",),
    }
)

# A state's id, its share of a step, and its text.
_State = tuple[str, float, str]


def capacity(ranks: Sequence[RankResult]) -> float:
    """Returns the vCPUs of all hosts."""
    return sum({rank.host: rank.vcpus for rank in ranks}.values())


def others_vcpus(ranks: Sequence[RankResult]) -> float:
    """Returns the vCPUs that other programs kept busy on all hosts; needs all of their ranks."""
    others = {rank.host: rank.evidence.busy_seconds for rank in ranks}
    seconds = {rank.host: max(rank.evidence.seconds, 1e-9) for rank in ranks}
    for rank in ranks:
        others[rank.host] -= rank.evidence.process_seconds + rank.evidence.children_seconds
    return sum(max(0.0, others[host] / seconds[host]) for host in others)


def saved_by(parts: Work, *, seconds: float) -> float:
    """Returns how much shorter a step is if the accelerator's part of it is, by so many seconds."""
    terms = dict(parts.terms)
    terms["accelerator"] -= seconds
    return max(0.0, parts.step_seconds - max(terms.values()))


def find_states(
    ranks: Sequence[RankResult],
    *,
    parts: Work | None,
    step: StepTerms,
    gpus: GpuLoads,
) -> tuple[ProfileState, ...]:
    """Returns the states that the figures support, the one with the largest share of a step first.

    Args:
        ranks: Results of all ranks, whose steps as is are known.
        parts: Work of the step; None: the loader was not measured alone.
        step: The profile's step.
        gpus: Loads of the GPUs during the steps as they are.
    """
    # The others wait for this rank in all-reduce: it shows what all of them wait for.
    waiting = max(ranks, key=lambda rank: rank.wait_share)
    vcpus = capacity(ranks)
    busy = min(1.0, (sum(rank.used_vcpus for rank in ranks) + others_vcpus(ranks)) / vcpus)
    if any(rank.evidence.is_throttled for rank in ranks):
        # A group that is stopped has no idle vCPUs, even if the machine has.
        busy = 1.0
    found = [*_of_processes(ranks, waiting), *_of_limit(ranks, parts, busy=busy)]
    if parts:
        found += _of_loading(waiting, parts, busy=busy)
        found += _of_accelerator(parts, step, gpus)
    states = {name: (share, text) for name, share, text in found}
    for name, explained in _EXPLAINS.items():
        for other in explained if name in states else ():
            states.pop(other, None)
    return tuple(
        ProfileState(id=name, text=text, share=min(1.0, share))
        for name, (share, text) in sorted(states.items(), key=lambda state: -state[1][0])
    )


def _of_processes(ranks: Sequence[RankResult], waiting: RankResult) -> Iterator[_State]:
    """Yields what stops or delays processes, whatever they do."""
    # One stopped rank is enough: the others wait for it in all-reduce.
    for rank in sorted(ranks, key=lambda rank: rank.evidence.stopped_share):
        seen = rank.evidence
        where = f" (rank {rank.rank}, host {rank.host})" if len(ranks) > 1 else ""
        if seen.is_throttled:
            text = (
                f"throttled container: its CPU quota stopped it in {seen.throttled_periods} of "
                f"{seen.periods} periods, {seen.throttled_seconds:.1f} s in {seen.seconds:.1f} s"
            )
            yield "throttled", seen.stopped_share, text + where
        held = seen.held_looks / max(1, seen.looks)
        if seen.looks >= _MIN_LOOKS and held >= _MIN_HELD:
            others = seen.process_seconds - seen.own_cpu_seconds
            thread = "Python code in the trainer's main thread"
            if others > seen.own_cpu_seconds:
                thread = f"another thread ({others / seen.seconds:.1f} vCPUs)"
            text = f"GIL-bound main process: {thread} held the interpreter lock at "
            yield "gil", held, f"{text}{seen.held_looks} of {seen.looks} looks{where}"
    waits = [rank.wait_seconds for rank in ranks if rank is not waiting]
    longer = waiting.wait_seconds - median(waits or [waiting.wait_seconds])
    if longer >= _MIN_STRAGGLING * waiting.step_seconds:
        text = (
            f"one slow rank: rank {waiting.rank} (host {waiting.host}) waits "
            f"{ms(waiting.wait_seconds)} of a step for its data, the others {ms(median(waits))}, "
            "and they wait for it"
        )
        yield "straggler", longer / waiting.step_seconds, text
    others = others_vcpus(ranks)
    vcpus = capacity(ranks)
    if others > MAX_OTHERS * vcpus:
        text = (
            f"other programs kept {others:.1f} of the {vcpus_words(vcpus)} busy: profile again on "
            "a quiet machine"
        )
        yield "other-programs", others / vcpus, text


def _of_limit(ranks: Sequence[RankResult], parts: Work | None, *, busy: float) -> Iterator[_State]:
    """Yields whether the CPUs or the accelerator set the pace."""
    # Loading hardly lengthens a step of the latter, and its parts say so, too, if known.
    rank = max(ranks, key=lambda rank: rank.lost_share)
    bottleneck = parts.bottleneck if parts else None
    if bottleneck in ("cpu", None) and rank.lost_share >= LEAST_GAIN and busy >= _BUSY:
        workers = sum(rank.children_cpu_seconds for rank in ranks)
        trainers = sum(rank.taken.trainer_cpu_seconds for rank in ranks)
        text = (
            f"CPU-bound: a step uses {workers:.3f} CPU-seconds of loader workers and "
            f"{trainers:.3f} of trainers, on {vcpus_words(capacity(ranks))}, "
            f"{percentage(busy)} busy"
        )
        yield "cpu", rank.lost_share, text
    is_bound = bottleneck in ("accelerator", "none")
    is_bound |= bottleneck is None and rank.wait_share < LEAST_GAIN
    if rank.stocked and rank.lost_share < _MAX_LOST and is_bound:
        # The rest waits for copies: a separate state.
        computing = rank.compute_seconds - (rank.transfer_seconds or 0.0)
        text = (
            f"accelerator-bound: a step takes {ms(rank.step_seconds)}, without loading "
            f"{ms(rank.compute_seconds)}; {percentage(rank.wait_share)} of it is waiting for data"
        )
        yield "accelerator", computing / rank.step_seconds, text


def _of_loading(waiting: RankResult, parts: Work, *, busy: float) -> Iterator[_State]:
    """Yields why steps wait for data, besides busy CPUs: what workers share, or too few of them."""
    share = waiting.wait_share
    if share < LEAST_GAIN:
        return
    tried = waiting.tried
    if parts.bottleneck == "storage" and tried:
        # What is read ahead may hide all waiting of a lone worker, and none of many workers.
        idlest = max(tried[0], tried[-1], key=lambda drain: drain.idle_share)
        text = (
            f"bound by storage or network: with {numbered(idlest.workers, 'worker')}, "
            f"{_batch_words(idlest)}; it waits for reads, and more workers get hardly more"
        )
        yield "storage", share * idlest.idle_share, text
    if more_workers(parts) is None:
        return
    text = (
        "no workers: the main process loads the data itself (num_workers=0), "
        f"{ms(waiting.wait_seconds)} of each step's {ms(waiting.step_seconds)}"
    )
    if parts.workers:
        why = f"the vCPUs are {percentage(busy)} busy"
        if tried and tried[0].idle_share >= _MIN_WORKER_IDLE:
            why = f"{_batch_words(tried[0])}: it waits for its data, not for a CPU"
        today = numbered(waiting.num_workers, "worker")
        text = f"too few workers: {today} for each rank, and {why}"
    yield "workers", share, text


def _of_accelerator(parts: Work, step: StepTerms, gpus: GpuLoads) -> Iterator[_State]:
    """Yields what the accelerator waits for besides data."""
    copying = step.transfer_seconds or 0.0
    wait_share = step.wait_share or 0.0
    share = saved_by(parts, seconds=copying) / parts.step_seconds
    if share >= LEAST_GAIN:
        text = (
            f"waiting for transfers: the accelerator waits {ms(copying)} of a step for copies of "
            "its batch from the host"
        )
        yield "transfer", share, text
    share = saved_by(parts, seconds=parts.neighbour_seconds) / parts.step_seconds
    # After a wait kernels are launched into an empty stream, beside any host's loading.
    if share >= LEAST_GAIN and wait_share < LEAST_GAIN:
        workers = numbered(parts.workers, "busy loader worker")
        text = (
            f"slowed by its own loading: beside {workers} a step takes "
            f"{ms(parts.neighbour_seconds)} longer, as its kernels are launched late"
        )
        yield "neighbour", share, text
    shares = [
        gpu.utilization
        for gpu in used_gpus(gpus)
        if gpu.utilization is not None and gpu.seconds >= _LEAST_GPU_SECONDS
    ]
    if shares and parts.bottleneck in ("accelerator", "none"):
        # Of several GPUs that take turns, as the stages of a pipeline, each idles for the others.
        busy = max(shares)
        idle = 1 - busy - copying / step.step_seconds - wait_share
        text = (
            f"launch-bound: kernels run on the GPU for {percentage(busy)} of a step, though no "
            "batch is waited for: the script's own thread launches them too slowly, or waits for "
            "their results"
        )
        if idle >= _MIN_IDLE:
            yield "launch", idle, text


def _batch_words(drain: Drain) -> str:
    cpu = min(drain.cpu_seconds, drain.wall_seconds)
    return f"a batch takes a worker {ms(drain.wall_seconds)}, of which it computes {ms(cpu)}"
