"""Measured steps and GPU loads of a run.

Batches come in bursts, so a median of single steps would miss the wait that ends a burst: medians
are over means of blocks.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import median, quantiles

from stoker.feed import timeline
from stoker.feed.step_times import whole_run
from stoker.feed.timeline import (
    MeasuredStep,
    block_means,
    steady,
    steps_in,
    typical_step,
    typical_wait_share,
    waits_longest,
)
from stoker.figures.intervals import GpuRate, Interval, mean_over_time
from stoker.figures.progress import ProgressByRank
from stoker.records import GpuLoad, Measured, Spread
from stoker.records.profile import GpuLoads
from stoker.units import wait_share

StepsByRank = Mapping[int, Sequence[MeasuredStep]]


def measure(
    ranks: StepsByRank,
    progress: ProgressByRank,
    *,
    replica_of: Callable[[int], int] = int,
) -> Measured | None:
    """Measures the steps of the rank that waits longest; None without a timeline.

    For a rank on another host, the wait share is the reported one, and the step time comes from
    the leader's ranks. Ranks of one replica share their samples.
    """
    if not ranks:
        return None
    shares = {rank: typical_wait_share(steps) for rank, steps in ranks.items()}
    shown = waits_longest(shares)
    for rank, report in progress.items():
        seconds = report.steady_wait_seconds + report.steady_compute_seconds
        if rank not in shares and seconds > 0:
            shares[rank] = wait_share(step_seconds=seconds, wait_seconds=report.steady_wait_seconds)
    slowest = waits_longest(shares)
    steps = ranks[shown]
    # Without first and last steps of epochs, which wait for workers and validate.
    kept = steady(steps)
    # Spreads come from means of blocks: single steps scatter with the network and the scheduler.
    blocks = {"step_seconds": block_means(kept, attrgetter("seconds"))}
    step_seconds, wait_seconds = typical_step(steps)
    if slowest == shown:
        blocks["wait_seconds"] = block_means(kept, attrgetter("wait_seconds"))
        blocks["compute_seconds"] = block_means(kept, attrgetter("compute_seconds"))
        compute_seconds = median(blocks["compute_seconds"])
    else:
        # Of another host's rank only sums over steps are known.
        wait_seconds = shares[slowest] * step_seconds
        compute_seconds = step_seconds - wait_seconds
    whole = whole_run(steps)
    return Measured(
        step_seconds=step_seconds,
        wait_seconds=wait_seconds,
        compute_seconds=compute_seconds,
        samples_per_second=_samples_per_second(ranks, progress, replica_of=replica_of),
        steps=steps_in(steps),
        spread={name: spread_of(values) for name, values in blocks.items()},
        rank=slowest,
        least_wait_share=min(shares.values()) if len(shares) > 1 else None,
        timeline_file=timeline.FILE.format(rank=shown),
        whole_step_seconds=whole.step_seconds if whole else None,
        epochs=whole.times if whole else None,
    )


def _samples_per_second(
    ranks: StepsByRank,
    progress: ProgressByRank,
    *,
    replica_of: Callable[[int], int],
) -> float:
    """Returns the sum over replicas, whose ranks share their samples."""
    rates = {replica_of(rank): _rate(steps) for rank, steps in ranks.items()}
    for rank, report in progress.items():
        # Timelines of other hosts are on their disks: only reports are here.
        seconds = report.wait_seconds + report.compute_seconds + report.between_seconds
        if rank not in ranks and seconds:
            rate = report.samples / seconds
            rates[replica_of(rank)] = max(rates.get(replica_of(rank), 0.0), rate)
    return sum(rates.values())


def _rate(steps: Sequence[MeasuredStep]) -> float:
    """Returns the samples per second of whole epochs; of all steps where there are few."""
    whole = whole_run(steps)
    if whole and whole.step_seconds:
        return whole.samples / whole.steps / whole.step_seconds
    seconds = sum(step.seconds for step in steps)
    return sum(step.samples for step in steps) / seconds if seconds else 0.0


def spread_of(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        return Spread(low=values[0], high=values[0], samples=1)
    low, _, high = quantiles(values, n=4, method="inclusive")
    return Spread(low=low, high=high, samples=len(values))


def gpu_loads(intervals: Sequence[Interval]) -> GpuLoads:
    """Returns the loads of a run's GPUs in the intervals with steps."""
    # The first one has the script's start in it.
    stepping = [interval for interval in intervals if interval.steps][1:]
    rows = defaultdict[tuple[str, int], list[tuple[float, GpuRate]]](list)
    for interval in stepping:
        for rate in interval.gpus:
            rows[rate.host, rate.index].append((interval.seconds, rate))
    loads = []
    for of_gpu in rows.values():
        _, gpu = of_gpu[-1]
        busy = ((seconds, rate.utilization) for seconds, rate in of_gpu)
        memory = ((seconds, rate.memory_bytes) for seconds, rate in of_gpu)
        load = GpuLoad(
            host=gpu.host,
            index=gpu.index,
            model=gpu.model,
            memory_total_bytes=gpu.memory_total_bytes,
            seconds=sum(seconds for seconds, _ in of_gpu),
            utilization=mean_over_time(busy),
            memory_bytes=mean_over_time(memory),
        )
        loads.append(load)
    return tuple(loads)
