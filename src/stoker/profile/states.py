"""Names the states that a training is in, each with the figures that it rests on. Pure."""

from collections.abc import Sequence
from statistics import median

from stoker.profile.process_states import interpreter_lock, oversubscribed, straggler, throttled
from stoker.profile.raw import RankResult
from stoker.profile.signs import (
    MIN_SHARE,
    Signs,
    busy_share,
    in_ms,
    others_of,
    signs_of,
    vcpus_of,
    within,
)
from stoker.records import Parts, State
from stoker.records.parts import MAX_OTHERS

# Taking a batch over from its worker costs this much of a short step, whoever made it.
MAX_LOST = 0.15
# With less waiting between batches, time that a loader does not compute is pages and pipes.
MIN_WORKER_IDLE = 0.5
# A loader that alone delivers a batch in less of a step is not what steps wait for.
MIN_LOADING = 0.6
# A batch comes over the network where so much of it is received; compressed images are a tenth.
MIN_RECEIVED = 0.05
# A read from storage costs a little more even where the storage keeps up.
MIN_COLD_RATIO = 1.5
# vCPUs that are so busy have nothing left for more workers, and from here on they are the limit.
BUSY = 0.75
# Beyond what the same loading differs by, from one process to another.
MIN_THREADS_RATIO = 1.5
# Beyond what one epoch differs from another.
MIN_FIRST_RATIO = 1.5
MIN_PASS = 5


def find_states(ranks: Sequence[RankResult], *, parts: Parts | None) -> tuple[State, ...]:
    """The states that the figures speak for, the one with the largest share of a step first.

    Args:
        ranks: Whose steps as is are all known.
        parts: Of the step; None: the loader could not be measured alone.
    """
    signs = [signs_of(rank) for rank in ranks]
    waiting = max(signs, key=lambda own: own.as_is.wait_seconds.median)
    stopped = throttled(signs)
    vcpus = vcpus_of(signs)
    # A group that is stopped has no idle vCPUs, whatever the machine has.
    busy = 1.0 if stopped else busy_share(signs, vcpus=vcpus)
    binding = within(parts, vcpus=vcpus, is_throttled=bool(stopped)).limit if parts else None
    is_serial = parts is not None and parts.workers == 0
    # Threads of a group that is stopped hold their locks: knocks say nothing then.
    gil = None if stopped else interpreter_lock(signs)
    found = [
        stopped,
        gil,
        straggler(signs),
        _other_programs(signs, vcpus=vcpus),
        _cpu(signs, vcpus=vcpus, busy=busy) if binding in ("cpu", None) else None,
        # So do workers: what they do not compute then is not reading.
        (
            _cold_reads(waiting)
            or _reads(
                waiting,
                is_shared=parts is not None and parts.is_shared,
                is_storage=binding == "storage",
            )
        )
        if binding != "cpu" and not stopped
        else None,
        _few_workers(waiting, busy=busy) if binding == "latency" and not is_serial else None,
        _serial(waiting) if binding == "latency" and is_serial else None,
        oversubscribed(waiting),
        _first_epoch(waiting),
        None if gil else _accelerator(signs, is_binding=binding == "accelerator"),
    ]
    return tuple(sorted((own for own in found if own), key=lambda own: -(own.share or 0.0)))


def _other_programs(signs: Sequence[Signs], *, vcpus: float) -> State | None:
    hosts: dict[str, list[Signs]] = {}
    for own in signs:
        hosts.setdefault(own.rank.host, []).append(own)
    taken = {host: others_of(ranks) for host, ranks in hosts.items()}
    others = sum(taken.values())
    if others <= MAX_OTHERS * vcpus:
        return None
    most = max(taken, key=lambda host: taken[host])
    where = f", most of them on {most}" if len(taken) > 1 else ""
    return State(
        id="other-programs",
        text=f"other programs kept {others:.1f} of the {vcpus:.3g} vCPUs busy{where}: profile "
        "again when it is quiet",
        share=min(1.0, others / vcpus),
    )


def _cpu(signs: Sequence[Signs], *, vcpus: float, busy: float) -> State | None:
    lost = max(own.lost_share for own in signs)
    if lost < MIN_SHARE or busy < BUSY:
        return None
    workers = sum(own.as_is.children_cpu_seconds for own in signs)
    trainers = sum(own.as_is.trainer_cpu_seconds for own in signs)
    others = others_of(signs)
    return State(
        id="cpu",
        text=f"CPU-bound: a step uses {workers:.3f} CPU-seconds of loader workers and "
        f"{trainers:.3f} of trainers, on {vcpus:.3g} vCPUs that were {busy:.0%} busy"
        + (f", {others / vcpus:.0%} with other programs" if others > MAX_OTHERS * vcpus else ""),
        share=lost,
    )


def _reads(own: Signs, *, is_shared: bool, is_storage: bool) -> State | None:
    """Workers wait for what they read; where the parts name the storage, however little they wait.

    Copying what was read can be most of a worker's time.
    """
    if own.wait_share < MIN_SHARE or not own.alone:
        return None
    rate = own.rate(max(1, own.workers)) or own.alone.batches_per_second
    is_waiting = own.worker_idle_share >= MIN_WORKER_IDLE
    if not is_storage and (not is_waiting or rate * own.step_seconds * MIN_LOADING > 1):
        return None
    wall, cpu = own.alone.wall_seconds.mean, own.alone.cpu_seconds.mean
    share = own.wait_share * own.worker_idle_share
    batch = f"a batch takes a worker {in_ms(wall)}, of which it computes {in_ms(cpu)}"
    size = own.rank.batch.num_bytes if own.rank.batch else 0
    received = own.received_per_second * own.step_seconds / max(1, own.rank.ranks_on_host)
    rates = own.rates
    if is_shared and received >= max(1.0, MIN_RECEIVED * size):
        return State(
            id="network",
            text=f"network-bound: {batch}; {own.received_per_second * 8e-6:.1f} Mbit/s are "
            f"received, and more workers get no more ({rates})",
            share=share,
        )
    if is_shared or is_storage:
        stall = own.evidence.storage_stall_seconds
        stalled = f"; storage was waited for {stall:.1f} s" if stall else ""
        return State(
            id="storage",
            text=f"storage-bound: {batch}; it waits for reads, and more workers get "
            f"{'no' if is_waiting else 'little'} more ({rates}){stalled}",
            share=share,
        )
    grows = f"; more workers wait at the same time ({rates})" if rates else ""
    return State(
        id="latency",
        text=f"latency-bound: {batch}: it waits for its reads, not for a CPU{grows}",
        share=share,
    )


def _cold_reads(own: Signs) -> State | None:
    """Steps wait for storage, although the loader alone found its files in memory by then."""
    reads = own.rank.reads
    if own.wait_share < MIN_SHARE or reads is None or reads.bytes_per_second is None:
        return None
    cold, warm = reads.cold_seconds.mean, reads.warm_seconds.mean
    if cold < MIN_COLD_RATIO * warm or cold < MIN_LOADING * own.step_seconds * max(1, own.workers):
        return None
    return State(
        id="storage",
        text=f"storage-bound: a batch of {reads.batch_bytes.mean / 1e6:.2f} MB takes a worker "
        f"{in_ms(cold)} from storage and {in_ms(warm)} from memory; the storage gives "
        f"{reads.bytes_per_second.mean / 1e6:.0f} MB/s",
        share=own.wait_share * (1 - warm / cold),
    )


def _few_workers(own: Signs, *, busy: float) -> State | None:
    if own.wait_share < MIN_SHARE or busy >= BUSY or own.worker_idle_share >= MIN_WORKER_IDLE:
        return None
    if own.many is not None and own.many.workers > own.workers:
        today = own.rate(own.workers)
        if today and own.many.batches_per_second < (1 + MIN_SHARE) * today:
            return None
    rates = own.rates
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
        f"{in_ms(own.as_is.wait_seconds.median)} of each step of {in_ms(own.step_seconds)}"
        + _threads(own),
        share=own.wait_share,
    )


def _threads(own: Signs) -> str:
    """What sets the main process apart from a worker; empty where both load alike."""
    threads = own.rank.loader.torch_threads if own.rank.loader else None
    if own.alone is None or own.alone.workers != 1 or threads == 1:
        return ""
    if others_of([own]) > MAX_OTHERS * own.rank.vcpus:
        # Whoever has to wait for a vCPU takes longer, with any number of threads.
        return ""
    wait, wall = own.as_is.wait_seconds.median, own.alone.wall_seconds.median
    if 1 / MIN_THREADS_RATIO <= wait / max(wall, 1e-9) <= MIN_THREADS_RATIO:
        return ""
    said = f"; a worker, which gives torch's operations one thread, takes {in_ms(wall)} for it"
    if wait < wall:
        return said
    return (
        f"{said}: the main process's many threads wait for each other "
        "(torch.set_num_threads(1) shows it)"
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
        text=f"first-epoch effect: a step of the first epoch waits {in_ms(first.wait_seconds)}, of "
        f"the {len(passes) - 1} later ones {in_ms(later)}: something is cached, and a whole "
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
        text=f"accelerator-bound: a step takes {in_ms(waiting.step_seconds)}, with cached batches "
        f"{in_ms(replayed)}; {waiting.wait_share:.0%} of it is waiting for data",
        share=min(1.0, replayed / waiting.step_seconds),
    )
