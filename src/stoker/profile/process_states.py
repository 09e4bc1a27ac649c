"""States of a trainer's processes: threads, quotas, ranks and workers in each other's way."""

from collections.abc import Sequence
from statistics import median

from stoker.profile.signs import MIN_SHARE, Signs, in_ms, where
from stoker.records import State

# A container that its quota stops in fewer periods hardly notices.
MIN_THROTTLED = 0.10
MIN_PERIODS = 5
# A share of so many knocks is known to about 0.1.
MIN_KNOCKS = 15
# A loop of Python code holds the interpreter lock at 0.98 of all knocks, a small model of torch's
# operations at 0.05, the same beside a busy thread at 0.9 (2 cores, python 3.11). What the main
# thread's own CPU does not explain, others hold.
MIN_HELD = 0.4
MIN_HELD_BY_OTHERS = 0.3
# Neither running nor ready to, and a thread beside it that has a good part of a vCPU.
MIN_STARVED = 0.3
MIN_OTHER_THREADS = 0.15
# Alone it holds the lock more often, runs or is ready to for most of its time, and hardly waits
# for data: then it is what sets the pace.
MIN_HELD_ALONE = 0.6
MIN_BUSY = 0.6
MIN_OUTSIDE = 0.7
# Ranks of one training differ by less: their samples do, and knocks are counted in tens.
MIN_STRAGGLING = 0.15
# One worker more a vCPU keeps it busy while another waits; beyond, they only take turns.
MIN_WORKERS_A_VCPU = 1.5
MIN_QUEUED = 0.2


def throttled(signs: Sequence[Signs]) -> State | None:
    """A quota of CPU stops the processes, whatever the machine has left."""

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
        f"{where(worst, signs)}",
        share=min(1.0, share),
    )


def interpreter_lock(signs: Sequence[Signs]) -> State | None:
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
            f"{starved:.0%} of its time outside next(){where(worst, signs)}",
            share=min(1.0, seen.idle_seconds / seen.seconds),
        )
    outside = seen.outside_seconds / seen.seconds
    if (
        seen.held_share >= MIN_HELD_ALONE
        and 1 - starved >= MIN_BUSY
        and outside >= MIN_OUTSIDE
        and seen.own_cpu_seconds >= seen.other_threads_seconds
    ):
        return State(
            id="gil",
            text=f"GIL-bound main process: {held}: {seen.held_share * outside:.0%} of a step is "
            f"Python code in the trainer's main thread, not the model{where(worst, signs)}",
            share=min(1.0, seen.held_share * outside),
        )
    return None


def straggler(signs: Sequence[Signs]) -> State | None:
    """All ranks wait for one, in collectives: it is there for less of a step than the others."""
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
        f"{in_ms(slowest.own_seconds)} of a step outside collectives and backward, the others "
        f"{in_ms(usual)}, and they wait for it; it is late {why}",
        share=min(1.0, share),
    )


def oversubscribed(own: Signs) -> State | None:
    """More workers than vCPUs take turns, also with the main thread."""
    seen, here = own.evidence, own.rank
    workers = own.workers * here.ranks_on_host
    queued = seen.worker_queued_seconds / seen.worker_seconds if seen.worker_seconds else 0.0
    main = seen.queued_seconds / seen.seconds if seen.seconds else 0.0
    if workers < MIN_WORKERS_A_VCPU * here.vcpus or workers < 2:
        return None
    # Workers wait for each other, or the main thread for them: the longer it waits, the longer they
    # rest with all that they may make ahead.
    if max(queued, main) < MIN_QUEUED:
        return None
    enough = max(1, round(here.vcpus) // here.ranks_on_host)
    today, best = own.rate(own.workers), own.rate(enough)
    loses = 1 - today / best if today and best else 0.0
    rates = (
        f"; alone {enough} load {best:.1f} batches a second, {own.workers} load {today:.1f}"
        if today and best
        else ""
    )
    return State(
        id="oversubscribed",
        text=f"oversubscribed workers: {workers} on {here.vcpus:.3g} vCPUs, ready to run while "
        f"others have the CPU {queued:.0%} of their time, the main thread {main:.0%} of its{rates}",
        share=min(1.0, max(0.0, loses, main)),
    )
