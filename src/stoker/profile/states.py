"""Names the states that a training is in, each with the figures that it rests on. Pure."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from stoker.profile.predict import Parts, limit
from stoker.profile.raw import RankResult
from stoker.profile.signs import Signs, signs_of
from stoker.records import State

# Below this share of a step a state is not worth a line; it is what two profiles of one training
# differ by.
MIN_SHARE = 0.05
# Taking a batch over from its worker costs this much of a short step, whoever made it.
MAX_LOST = 0.15
# A container that its quota stops in fewer periods hardly notices.
MIN_THROTTLED = 0.10
MIN_PERIODS = 5
# Ranks of one training differ by less: their samples do, and knocks are counted in tens.
MIN_STRAGGLING = 0.15
# A share of so many knocks is known to about 0.1.
MIN_KNOCKS = 15
# A loop of Python code holds the interpreter lock at 0.98 of all knocks, a small model of torch's
# operations at 0.05, the same beside a busy thread at 0.5 and more.
MIN_HELD = 0.4
MIN_HELD_BY_OTHERS = 0.3
MIN_HELD_ALONE = 0.6
MIN_BUSY = 0.6
MIN_OUTSIDE = 0.7
MIN_STARVED = 0.3
MIN_OTHER_THREADS = 0.15
# With less waiting between batches, time that a loader does not compute is pages and pipes.
MIN_WORKER_IDLE = 0.5
# A loader that alone delivers a batch in less of a step is not what steps wait for.
MIN_LOADING = 0.6
# More workers that get no more than this share more a batch share something that is used up.
MAX_SHARED_GAIN = 1.3
MIN_SHARED_RATIO = 2.0
# A batch comes over the network where so much of it is received; compressed images are a tenth.
MIN_RECEIVED = 0.05
# vCPUs that are so busy have nothing left for more workers, and from here on they are the limit.
BUSY = 0.75
# One worker more a vCPU keeps it busy while another waits; beyond, they only take turns.
MIN_WORKERS_A_VCPU = 1.5
MIN_QUEUED = 0.25
# Beyond what one epoch differs from another.
MIN_FIRST_RATIO = 1.5
MIN_PASS = 5


def find_states(ranks: Sequence[RankResult], *, parts: Parts | None) -> tuple[State, ...]:
    """The states that the figures speak for, the one with the largest share of a step first.

    Args:
        ranks: Whose steps as is are all known.
        parts: Of the cost model; None: the loader could not be measured alone.
    """
    signs = [signs_of(rank) for rank in ranks]
    waiting = max(signs, key=lambda own: own.as_is.wait_seconds.median)
    throttled = _throttled(signs)
    vcpus = _vcpus(signs)
    # A group that is stopped has no idle vCPUs, whatever the machine has.
    busy = 1.0 if throttled else _busy_share(signs, vcpus=vcpus)
    binding = limit(_within(parts, vcpus, throttled), ranks=len(ranks)) if parts else None
    # Threads of a group that is stopped hold their locks: knocks say nothing then.
    gil = None if throttled else _gil(signs)
    found = [
        throttled,
        gil,
        _straggler(signs),
        _cpu(signs, vcpus=vcpus, busy=busy) if binding in ("cpu", None) else None,
        # So do workers: what they do not compute then is not reading.
        _reads(waiting) if binding != "cpu" and not throttled else None,
        _few_workers(waiting, busy=busy) if binding == "workers" else None,
        _serial(waiting) if binding == "serial" else None,
        _oversubscribed(waiting),
        _first_epoch(waiting),
        None if gil else _accelerator(signs, is_binding=binding == "accelerator"),
    ]
    return tuple(sorted((own for own in found if own), key=lambda own: -(own.share or 0.0)))


def _throttled(signs: Sequence[Signs]) -> State | None:
    def stopped(own: Signs) -> float:
        seen = own.evidence
        if seen.periods < MIN_PERIODS or not seen.seconds:
            return 0.0
        return min(seen.throttled_periods / seen.periods, seen.throttled_seconds / seen.seconds)

    worst = max(signs, key=stopped)
    seen, share = worst.evidence, stopped(worst)
    if share < MIN_THROTTLED:
        return None
    return State(
        id="throttled",
        text=f"throttled container: its CPU quota stopped it in {seen.throttled_periods} of "
        f"{seen.periods} periods, {seen.throttled_seconds:.1f} s in {seen.seconds:.1f} s"
        f"{_where(worst, signs)}",
        share=min(1.0, share),
    )


def _gil(signs: Sequence[Signs]) -> State | None:
    """One Python thread at a time: the trainer's own waits for its turn, or takes all of it."""
    worst = max(signs, key=lambda own: own.evidence.held_share)
    seen = worst.evidence
    if seen.knocks < MIN_KNOCKS or not seen.seconds or not seen.outside_seconds:
        return None
    held = f"the interpreter lock was taken at {seen.held_knocks} of {seen.knocks} looks"
    starved = seen.idle_seconds / seen.outside_seconds
    ran = seen.own_cpu_seconds / seen.outside_seconds
    others = seen.other_threads_seconds / seen.seconds
    if (
        seen.held_share >= max(MIN_HELD, ran + MIN_HELD_BY_OTHERS)
        and others >= MIN_OTHER_THREADS
        and starved >= MIN_STARVED
        and seen.idle_seconds >= MIN_SHARE * seen.seconds
    ):
        return State(
            id="gil",
            text=f"GIL-bound main process: {held}, and another thread of the trainer used "
            f"{others:.1f} vCPUs while the main one neither ran nor was ready to, "
            f"{starved:.0%} of its time outside next(){_where(worst, signs)}",
            share=min(1.0, seen.idle_seconds / seen.seconds),
        )
    outside = seen.outside_seconds / seen.seconds
    if seen.held_share >= MIN_HELD_ALONE and 1 - starved >= MIN_BUSY and outside >= MIN_OUTSIDE:
        return State(
            id="gil",
            text=f"GIL-bound main process: {held}: {seen.held_share * outside:.0%} of a step is "
            f"Python code in the trainer's main thread, not the model{_where(worst, signs)}",
            share=min(1.0, seen.held_share * outside),
        )
    return None


def _straggler(signs: Sequence[Signs]) -> State | None:
    if len(signs) < 2 or any(own.evidence.knocks < MIN_KNOCKS for own in signs):
        return None
    slowest = max(signs, key=lambda own: own.own_seconds)
    others = [own for own in signs if own is not slowest]
    usual = median(own.own_seconds for own in others)
    late = slowest.own_seconds - usual
    share = late / slowest.step_seconds
    if share < MIN_STRAGGLING:
        return None
    more = slowest.as_is.wait_seconds.median - median(
        own.as_is.wait_seconds.median for own in others
    )
    why = "waiting for its data" if more >= 0.5 * late else "in its own loop, not for data"
    return State(
        id="straggler",
        text=f"one straggling rank: rank {slowest.rank.rank} (host {slowest.rank.host}) takes "
        f"{_ms(slowest.own_seconds)} of a step outside collectives and backward, the others "
        f"{_ms(usual)}, and they wait for it; it is late {why}",
        share=min(1.0, share),
    )


def _cpu(signs: Sequence[Signs], *, vcpus: float, busy: float) -> State | None:
    lost = max(own.lost_share for own in signs)
    if lost < MIN_SHARE or busy < BUSY:
        return None
    workers = sum(own.as_is.children_cpu_seconds for own in signs)
    trainers = sum(own.as_is.trainer_cpu_seconds for own in signs)
    return State(
        id="cpu",
        text=f"CPU-bound: a step uses {workers:.3f} CPU-seconds of loader workers and "
        f"{trainers:.3f} of trainers, on {vcpus:.3g} vCPUs that were {busy:.0%} busy",
        share=lost,
    )


def _reads(own: Signs) -> State | None:
    """Workers that wait for what they read, and for what."""
    if own.wait_share < MIN_SHARE or own.worker_idle_share < MIN_WORKER_IDLE or not own.alone:
        return None
    rate = own.rate(max(1, own.workers)) or own.alone.batches_per_second
    if rate * own.step_seconds * MIN_LOADING > 1:
        return None
    wall, cpu = own.alone.wall_seconds.mean, own.alone.cpu_seconds.mean
    share = own.wait_share * own.worker_idle_share
    batch = f"a batch takes a worker {_ms(wall)}, of which it computes {_ms(cpu)}"
    size = own.rank.batch.num_bytes if own.rank.batch else 0
    received = own.received_per_second * own.step_seconds / max(1, own.rank.ranks_on_host)
    is_shared = own.worker_ratio >= MIN_SHARED_RATIO and 0 < own.gain < MAX_SHARED_GAIN
    rates = _rates(own)
    if is_shared and received >= max(1.0, MIN_RECEIVED * size):
        return State(
            id="network",
            text=f"network-bound: {batch}; {own.received_per_second * 8e-6:.1f} Mbit/s are "
            f"received, and more workers get no more ({rates})",
            share=share,
        )
    if is_shared:
        stall = own.evidence.storage_stall_seconds
        stalled = f"; storage was waited for {stall:.1f} s" if stall else ""
        return State(
            id="storage",
            text=f"storage-bound: {batch}; it waits for reads, and more workers get no more "
            f"({rates}){stalled}",
            share=share,
        )
    grows = f"; more workers wait at the same time ({rates})" if rates else ""
    return State(
        id="latency",
        text=f"latency-bound: {batch}: it waits for its reads, not for a CPU{grows}",
        share=share,
    )


def _few_workers(own: Signs, *, busy: float) -> State | None:
    if own.wait_share < MIN_SHARE or busy >= BUSY or own.worker_idle_share >= MIN_WORKER_IDLE:
        return None
    if own.many is not None and own.many.workers > own.workers:
        today = own.rate(own.workers)
        if today and own.many.batches_per_second < (1 + MIN_SHARE) * today:
            return None
    rates = _rates(own)
    return State(
        id="workers",
        text=f"too few workers at idle CPUs: {own.workers} workers load, and the vCPUs are "
        f"{busy:.0%} busy" + (f" ({rates})" if rates else ""),
        share=own.wait_share,
    )


def _serial(own: Signs) -> State | None:
    if own.wait_share < MIN_SHARE:
        return None
    return State(
        id="serial",
        text=f"no workers: the main process loads by itself (num_workers=0), "
        f"{_ms(own.as_is.wait_seconds.median)} of each step of {_ms(own.step_seconds)}",
        share=own.wait_share,
    )


def _oversubscribed(own: Signs) -> State | None:
    seen, here = own.evidence, own.rank
    workers = own.workers * here.ranks_on_host
    queued = seen.worker_queued_seconds / seen.worker_seconds if seen.worker_seconds else 0.0
    if workers < MIN_WORKERS_A_VCPU * here.vcpus or workers < 2 or queued < MIN_QUEUED:
        return None
    enough = max(1, here.vcpus // here.ranks_on_host)
    today, best = own.rate(own.workers), own.rate(enough)
    loses = 1 - today / best if today and best else 0.0
    main = seen.queued_seconds / seen.seconds if seen.seconds else 0.0
    rates = (
        f"; alone {enough} load {best:.1f} batches a second, {own.workers} load {today:.1f}"
        if today and best
        else ""
    )
    return State(
        id="oversubscribed",
        text=f"oversubscribed workers: {workers} on {here.vcpus} vCPUs, ready to run while others "
        f"have the CPU {queued:.0%} of their time, the main thread {main:.0%} of its{rates}",
        share=min(1.0, max(0.0, loses, main)),
    )


def _first_epoch(own: Signs) -> State | None:
    passes = [each for each in own.evidence.passes if each.batches >= MIN_PASS]
    if len(passes) < 2:
        return None
    first = passes[0]
    later = median(each.wait_seconds for each in passes[1:])
    more = first.wait_seconds - later
    if more < 2 * MIN_SHARE * first.step_seconds or first.wait_seconds < MIN_FIRST_RATIO * later:
        return None
    return State(
        id="first-epoch",
        text=f"first-epoch effect: a step of the first epoch waits {_ms(first.wait_seconds)}, of "
        f"the {len(passes) - 1} later ones {_ms(later)}: something is cached, and a whole "
        "training is nearer to the later ones",
        share=min(1.0, more / first.step_seconds),
    )


def _accelerator(signs: Sequence[Signs], *, is_binding: bool) -> State | None:
    waiting = max(signs, key=lambda own: own.lost_share)
    if waiting.lost_share >= MAX_LOST or not (is_binding or waiting.wait_share < MIN_SHARE):
        return None
    accelerator = waiting.rank.accelerator
    if accelerator is None:
        return None
    replayed = accelerator.step_seconds.median
    return State(
        id="accelerator",
        text=f"accelerator-bound: a step takes {_ms(waiting.step_seconds)}, with cached batches "
        f"{_ms(replayed)}; {waiting.wait_share:.0%} of it is waiting for data",
        share=min(1.0, replayed / waiting.step_seconds),
    )


def _within(parts: Parts, vcpus: float, throttled: State | None) -> Parts:
    """The parts on the vCPUs that quotas leave."""
    wall, cpu = parts.loader_wall_seconds, parts.loader_cpu_seconds
    return replace(
        parts,
        vcpus=min(parts.vcpus, vcpus),
        # The loader alone was stopped by the quota, too.
        loader_wall_seconds=min(wall, cpu) if throttled else wall,
    )


def _vcpus(signs: Sequence[Signs]) -> float:
    """Of all hosts, as far as quotas let them be used."""
    hosts = {
        own.rank.host: min(own.rank.vcpus, own.evidence.quota_vcpus or own.rank.vcpus)
        for own in signs
    }
    return sum(hosts.values())


def _busy_share(signs: Sequence[Signs], *, vcpus: float) -> float:
    """Of all hosts' vCPUs; with those that others keep busy where no quota is what we may use."""
    machines = {own.rank.host: own.evidence.busy_vcpus for own in signs}
    has_quota = any(own.evidence.quota_vcpus for own in signs)
    used = sum(
        (own.as_is.trainer_cpu_seconds + own.as_is.children_cpu_seconds)
        / own.as_is.step_seconds.mean
        for own in signs
    )
    return min(1.0, max(used, 0.0 if has_quota else sum(machines.values())) / vcpus)


def _rates(own: Signs) -> str:
    if own.alone is None or own.many is None:
        return ""
    return (
        f"{own.alone.workers} alone: {own.alone.batches_per_second:.1f} batches a second, "
        f"{own.many.workers}: {own.many.batches_per_second:.1f}"
    )


def _where(own: Signs, signs: Sequence[Signs]) -> str:
    return f" (rank {own.rank.rank}, host {own.rank.host})" if len(signs) > 1 else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
