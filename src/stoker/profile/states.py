"""The states that limit a training, each with the figures that it rests on. Pure.

Which limit binds (CPU, accelerator, loader, storage) is `Work.bottleneck` in `decide/model.py`. The
storage is named by time that workers were seen to wait, never by rates alone. *transfer* and
*neighbour* are only shown by an accelerator, by its own clock; on CPUs both are part of the CPU
time of a step. *launch* is shown by the driver: no batch is waited for, and yet no kernel runs.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from stoker.decide.model import LEAST_GAIN, Work, more_workers
from stoker.profile.rank_results import Drain, Evidence, RankResult
from stoker.records import ProfileState, StepTerms
from stoker.records.profile import MAX_OTHERS, GpuLoads, during_steps, used_gpus
from stoker.units import count, ms, percentage, size, vcpus_words

# A container that its quota stops in fewer periods hardly notices.
MIN_THROTTLED = 0.10
# A share of this many knocks is known to about 0.1.
_MIN_KNOCKS = 15
# A loop of Python code holds the interpreter lock at nearly all knocks, torch's operations at few.
# What the main thread's own CPU does not explain, others hold.
_MIN_HELD = 0.4
_MIN_HELD_BY_OTHERS = 0.3
# Neither running nor ready to, while another thread has a good part of a vCPU.
_MIN_STARVED = 0.3
_MIN_OTHER_THREADS = 0.15
# Alone it holds the lock more often, runs or could for most of its time, and hardly waits.
_MIN_HELD_ALONE = 0.6
_MIN_OUTSIDE = 0.7
# Ranks of one training run differ by less.
_MIN_STRAGGLING = 0.15
# Taking a batch over from its worker costs this much of a short step, on any worker.
_MAX_LOST = 0.15
# Below this share, a worker that does not compute handles memory pages and pipes; it does not wait.
_MIN_WORKER_IDLE = 0.5
# A loader that alone delivers a batch in less of a step is not what steps wait for.
_MIN_LOADING = 0.6
# vCPUs that are so busy have nothing left for more workers.
_BUSY = 0.75
# Of a step in which no kernel runs; of shorter times the driver knows too little.
_MIN_IDLE = 0.3
_LEAST_GPU_SECONDS = 3.0

# A state's id, its text and its share.
_State = tuple[str, tuple[str, float]]


def others_by_host(ranks: Sequence[RankResult]) -> Mapping[str, float]:
    """Returns the vCPUs that other programs kept busy on each host; needs all of its ranks."""
    others = {}
    for host in {rank.host: None for rank in ranks}:
        here = [rank for rank in ranks if rank.host == host]
        used = sum(rank.used_vcpus for rank in here)
        # Of B busy vCPUs a rank calls B - u others', u being its own: over n ranks, with what they
        # used, the sum is n B.
        busy = sum(rank.taken.others_vcpus for rank in here) + used
        others[host] = max(0.0, busy / len(here) - used)
    return others


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
        parts: Parts of the step; None: the loader was not measured alone.
        step: The profile's step.
        gpus: Loads of the GPUs during the steps as they are.
    """
    hosts = {rank.host: rank for rank in ranks}.values()
    vcpus = sum(rank.vcpus for rank in hosts)
    # The others wait for this rank in all-reduce: it shows what all of them wait for.
    waiting = max(ranks, key=lambda rank: rank.wait_seconds)
    states = dict(_of_processes(ranks, waiting, vcpus=vcpus))
    # A group that is stopped has no idle vCPUs, even if the machine has.
    busy = 1.0
    if "throttled" not in states:
        seen = (rank.evidence for rank in hosts)
        used = sum(evidence.busy_seconds / max(evidence.seconds, 1e-9) for evidence in seen)
        busy = min(1.0, max(used, sum(rank.used_vcpus for rank in ranks)) / vcpus)
    states |= _of_loading(ranks, waiting, parts, vcpus=vcpus, busy=busy)
    # Without a CPU a worker does not compute either: that is no waiting for reads.
    if "throttled" in states:
        states.pop("storage", None)
    if "storage" in states:
        states.pop("workers", None)
    states |= _of_accelerator(ranks, parts, step, gpus)
    # A GPU that idles does not set the pace; Python code in the main thread is a cause of its own.
    if "gil" in states:
        states.pop("launch", None)
    if "gil" in states or "launch" in states:
        states.pop("accelerator", None)
    by_share = sorted(states.items(), key=lambda state: -state[1][1])
    return tuple(
        ProfileState(id=name, text=text, share=min(1.0, share)) for name, (text, share) in by_share
    )


def _of_processes(
    ranks: Sequence[RankResult], waiting: RankResult, *, vcpus: float
) -> Iterator[_State]:
    """Yields what stops or delays processes, whatever they do."""

    def where(rank: RankResult) -> str:
        return f" (rank {rank.rank}, host {rank.host})" if len(ranks) > 1 else ""

    # One stopped rank is enough: the others wait for it in all-reduce.
    stopped = max(ranks, key=lambda rank: rank.evidence.stopped_share)
    seen = stopped.evidence
    if seen.stopped_share >= MIN_THROTTLED:
        text = (
            f"throttled container: its CPU quota stopped it in {seen.throttled_periods} of "
            f"{seen.periods} periods, {seen.throttled_seconds:.1f} s in {seen.seconds:.1f} s"
        )
        yield "throttled", (text + where(stopped), seen.stopped_share)
    else:
        # Threads that a quota stops hold their locks: looks at the lock say nothing then.
        worst = max(ranks, key=lambda rank: rank.evidence.held_share)
        for text, share in _interpreter_lock(worst.evidence):
            yield "gil", (text + where(worst), share)
    waits = [rank.wait_seconds for rank in ranks if rank is not waiting]
    if waits:
        share = (waiting.wait_seconds - median(waits)) / waiting.step_seconds
        text = (
            f"one slow rank: rank {waiting.rank} (host {waiting.host}) waits "
            f"{ms(waiting.wait_seconds)} of a step for its data, the others {ms(median(waits))}, "
            "and they wait for it"
        )
        if share >= _MIN_STRAGGLING:
            yield "straggler", (text, share)
    by_host = others_by_host(ranks)
    others = sum(by_host.values())
    if others > MAX_OTHERS * vcpus:
        most = f", most of them on {max(by_host, key=by_host.__getitem__)}"
        text = (
            f"other programs kept {others:.1f} of the {vcpus_words(vcpus)} busy"
            f"{most if len(by_host) > 1 else ''}: profile again on a quiet machine"
        )
        yield "other-programs", (text, others / vcpus)


def _interpreter_lock(seen: Evidence) -> Iterator[tuple[str, float]]:
    """Yields how the lock delays the trainer: its thread waits for it, or always holds it."""
    outside = seen.outside_seconds
    if seen.knocks < _MIN_KNOCKS or not outside:
        return
    held = (
        "GIL-bound main process: the interpreter lock was held at "
        f"{seen.held_knocks} of {seen.knocks} looks"
    )
    starved = seen.idle_seconds / outside
    others = seen.other_threads_seconds / seen.seconds
    lost = seen.idle_seconds / seen.seconds
    if (
        seen.held_share >= max(_MIN_HELD, seen.own_cpu_seconds / outside + _MIN_HELD_BY_OTHERS)
        and others >= _MIN_OTHER_THREADS
        and starved >= _MIN_STARVED
        and lost >= LEAST_GAIN
    ):
        text = (
            f"{held}, and another thread of the trainer used {others:.1f} vCPUs while the main "
            f"one waited, {percentage(starved)} of its time outside next()"
        )
        yield text, lost
    elif (
        seen.held_share >= _MIN_HELD_ALONE
        and starved < 1 - _MIN_HELD_ALONE
        and outside >= _MIN_OUTSIDE * seen.seconds
        and seen.own_cpu_seconds >= seen.other_threads_seconds
    ):
        share = seen.held_share * outside / seen.seconds
        text = (
            f"{held}: {percentage(share)} of a step is Python code in the trainer's main "
            "thread, not the model"
        )
        yield text, share


def _of_loading(
    ranks: Sequence[RankResult],
    waiting: RankResult,
    parts: Work | None,
    *,
    vcpus: float,
    busy: float,
) -> Iterator[_State]:
    """Yields why steps wait for data: busy CPUs, what workers share, or too few workers."""
    bottleneck = parts.bottleneck if parts else None
    lost = max(rank.lost_share for rank in ranks)
    if bottleneck in ("cpu", None) and lost >= LEAST_GAIN and busy >= _BUSY:
        workers = sum(rank.taken.children_cpu_seconds for rank in ranks)
        trainers = sum(rank.taken.trainer_cpu_seconds for rank in ranks)
        used = f"{workers:.3f} CPU-seconds of loader workers and {trainers:.3f} of trainers"
        if not any(rank.num_workers for rank in ranks):
            used = f"{trainers:.3f} CPU-seconds of trainers, which load their batches themselves"
        text = f"CPU-bound: a step uses {used}, on {vcpus_words(vcpus)}, {percentage(busy)} busy"
        yield "cpu", (text, lost)
    share = waiting.wait_share
    if parts is None or share < LEAST_GAIN:
        return
    tried = waiting.tried
    # What is read ahead may hide all waiting of a lone worker, and none of many workers.
    ends = [*tried[:1], *tried[-1:]]
    # If the parts name storage, any wait counts: copying can be most of a worker's time.
    is_waiting = bottleneck == "storage" or _is_loading_awaited(waiting)
    if parts.is_shared and bottleneck != "cpu" and ends and is_waiting:
        idlest = max(ends, key=lambda drain: drain.idle_share)
        many = "" if idlest.workers == 1 else f"with {idlest.workers} workers, "
        text = (
            f"bound by storage or network: {many}{_batch_words(idlest)}; it waits for reads, and "
            f"more workers get hardly more{_rates(tried)}"
        )
        yield "storage", (text, share * idlest.idle_share)
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
        loads = "1 worker loads"
        if waiting.num_workers != 1:
            loads = f"{waiting.num_workers} workers load"
        text = f"too few workers: {loads}, and {why}{_rates(tried)}"
    yield "workers", (text, share)


def _is_loading_awaited(rank: RankResult) -> bool:
    """Whether a lone worker mostly waits, and today's workers alone load no faster."""
    tried = rank.tried
    if not tried or tried[0].idle_share < _MIN_WORKER_IDLE:
        return False
    today = rank.drain(max(1, rank.num_workers)) or tried[0]
    # One batch is needed in a step's time.
    return today.batches_per_second * rank.step_seconds * _MIN_LOADING <= 1


def _of_accelerator(
    ranks: Sequence[RankResult], parts: Work | None, step: StepTerms, gpus: GpuLoads
) -> Iterator[_State]:
    """Yields how the accelerator sets the pace, and what it waits for besides data."""
    bottleneck = parts.bottleneck if parts else None
    is_bound = bottleneck in ("accelerator", "none")
    # Loading hardly lengthens a step, and its parts say so, too, where they are known.
    rank = max(ranks, key=lambda rank: rank.lost_share)
    is_likely = parts is None and rank.wait_share < LEAST_GAIN
    if rank.accelerator and rank.lost_share < _MAX_LOST and (is_bound or is_likely):
        # The rest waits for copies: a separate state.
        busy = rank.compute_seconds - (rank.transfer_seconds or 0.0)
        text = (
            f"accelerator-bound: a step takes {ms(rank.step_seconds)}, without loading "
            f"{ms(rank.compute_seconds)}; {percentage(rank.wait_share)} of it is waiting for data"
        )
        yield "accelerator", (text, busy / rank.step_seconds)
    slowest = max(ranks, key=lambda rank: rank.compute_seconds)
    computing = slowest.compute_seconds
    copies = slowest.copies
    if parts and copies and slowest.accelerator:
        seconds = min(copies.seconds, computing)
        share = saved_by(parts, seconds=seconds) / parts.step_seconds
        kind = "pinned" if copies.is_pinned else "not pinned"
        # Of other seconds: a step without loading may be a little longer than the step as it is.
        whole = max(step.step_seconds, computing)
        text = (
            f"waiting for transfers: the accelerator waits {ms(seconds)} of a step's {ms(whole)} "
            f"for {size(copies.copied_bytes)} from memory of the host that is {kind}"
        )
        if share >= LEAST_GAIN:
            yield "transfer", (text, share)
    late = slowest.neighbour_seconds
    # After a wait kernels are launched into an empty stream, beside any host's loading.
    if parts and late is not None and slowest.wait_share < LEAST_GAIN:
        share = saved_by(parts, seconds=parts.neighbour_seconds) / parts.step_seconds
        more = percentage(late / max(computing, 1e-9))
        text = (
            f"slowed by its own loading: a step that waits for no data takes {ms(computing)}, and "
            f"{ms(computing + late)} beside {count(parts.workers, 'busy loader worker')} "
            f"({more} more): its kernels are launched late"
        )
        if share >= LEAST_GAIN:
            yield "neighbour", (text, share)
    shares = [
        gpu.utilization.mean
        for gpu in used_gpus(during_steps(gpus))
        if gpu.utilization and gpu.seconds >= _LEAST_GPU_SECONDS
    ]
    if shares and is_bound:
        # Of several GPUs that take turns, as the stages of a pipeline, each idles for the others.
        busy = max(shares)
        copying = (step.transfer_seconds or 0.0) / step.step_seconds
        idle = 1 - busy - copying - (step.wait_share or 0.0)
        text = (
            f"launch-bound: kernels run on the GPU for {percentage(busy)} of a step, though no "
            "batch is waited for: the script's own thread launches them too slowly, or waits for "
            "their results"
        )
        if idle >= _MIN_IDLE:
            yield "launch", (text, idle)


def _batch_words(drain: Drain) -> str:
    wall = drain.wall_seconds.mean
    cpu = drain.cpu_seconds.mean
    return f"a batch takes a worker {ms(wall)}, of which it computes {ms(min(cpu, wall))}"


def _rates(tried: Sequence[Drain]) -> str:
    if len(tried) < 2:
        return ""
    few, many = tried[0], tried[-1]
    return (
        f" ({few.workers} alone: {few.batches_per_second:.1f} batches per second, "
        f"{many.workers}: {many.batches_per_second:.1f})"
    )
