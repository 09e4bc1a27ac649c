"""Whole epochs of a plan: its steps, the wait for each first batch, and what lies between.

With torch's own loader one worker makes an epoch's first batch. With the feed all workers of a host
do, where its samples are made one by one, and several data hosts together where that is worth the
samples' way (docs/feed.md, "Several workers, one batch").
Validation and checkpoints take as long with any data hosts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from stoker.decide.model import (
    NETWORK_EFFICIENCY,
    ClusterShape,
    Hosts,
    StepWork,
    worker_seconds,
)
from stoker.records import EpochPause, EpochTimes
from stoker.records.workload import MAX_STRETCHES, MIN_SPLIT_SECONDS

# Which host makes the first batch is not known, nor what else its cores do then.
_START_WIDTH = 0.25
# Of the samples' way, what a batch is there sooner at least, where data hosts make it together
# (feed.trainer.shared_batch).
_MIN_SHARING_GAIN = 4.0


class Bounds(NamedTuple):
    """Seconds, and the bounds of their error band."""

    seconds: float
    low: float
    high: float

    @classmethod
    def exactly(cls, seconds: float) -> "Bounds":
        return cls(seconds, seconds, seconds)


def of_whole_epochs(step: Bounds, times: EpochTimes | None) -> Bounds:
    """Returns the seconds of whole epochs over their steps; the step's, if they are not known."""
    if times is None:
        return step
    return Bounds(
        times.whole_step_seconds(step.seconds),
        times.at_low().whole_step_seconds(step.low),
        times.at_high().whole_step_seconds(step.high),
    )


def planned_epochs(work: StepWork, shape: ClusterShape) -> EpochTimes | None:
    """Returns the epochs of a cluster; None where nothing is known of today's."""
    times = work.epochs
    if times is None or not (times.steps or times.inside_seconds):
        return None
    return msgspec.structs.replace(times, start=_start(times.start, work, shape))


def _start(todays: EpochPause | None, work: StepWork, shape: ClusterShape) -> EpochPause | None:
    makers = [hosts for hosts in (shape.dnn, *shape.data) if hosts.workers != 0]
    if not makers:
        # The trainer makes the first batch as it makes any other.
        if work.num_workers == 0:
            return todays
        return None
    first = max(_first_seconds(work, hosts) for hosts in makers)
    if shape.dnn.workers == 0:
        first = min(first, _shared_seconds(work, shape.data, alone=first))
    # At most as long as in one worker: what a profile cannot see, such as samples that are
    # pictures of PIL, keeps the workers from sharing.
    longest = max(_batch_seconds(work, hosts) for hosts in makers)
    if work.num_workers == 0:
        # No worker made a batch: the first one is the trainer's no more.
        return EpochPause(
            seconds=first,
            low_seconds=first * (1 - _START_WIDTH),
            high_seconds=longest * (1 + _START_WIDTH),
            count=0,
        )
    if todays is None:
        return None
    here = _batch_seconds(work, Hosts(instance=work.reference, count=1))
    if not here or (not shape.data and longest == here):
        return todays
    scaled = todays.scaled(first / here)
    in_one_worker = todays.seconds * longest / here
    return msgspec.structs.replace(
        scaled,
        low_seconds=min(scaled.low_seconds, scaled.seconds * (1 - _START_WIDTH)),
        high_seconds=max(scaled.high_seconds, in_one_worker * (1 + _START_WIDTH)),
    )


def _first_seconds(work: StepWork, hosts: Hosts) -> float:
    """Returns the seconds in which a host makes an epoch's first batch, with all its workers.

    Measured on sleeping samples: 0.29 of a batch's time with 4 workers (benchmarks/feed.py --only
    first); the rest beyond 1/4 is the collation and the way.
    """
    alone = _batch_seconds(work, hosts)
    if not work.splits or alone < MIN_SPLIT_SECONDS:
        return alone
    return alone * _share_of_one(work, hosts.all_workers // hosts.count)


def _share_of_one(work: StepWork, workers: float) -> float:
    """Returns which share of a rank's batch one of so many workers makes: whole stretches of it."""
    if work.global_batch_size is None:
        return 1 / workers
    samples = work.global_batch_size / (work.ranks * work.ranks_per_process)
    of_stretch = math.ceil(samples / MAX_STRETCHES)
    stretches = math.ceil(samples / of_stretch)
    return math.ceil(stretches / workers) / stretches


def _shared_seconds(work: StepWork, data: Sequence[Hosts], *, alone: float) -> float:
    """Returns the seconds in which data hosts make an epoch's first batch together.

    Args:
        work: Of a step.
        data: The data hosts, which make all batches.
        alone: In which one of them makes it; returned where it is not worth that others help.
    """
    count = sum(hosts.count for hosts in data)
    longest = max(_batch_seconds(work, hosts) for hosts in data)
    if not work.splits or count < 2 or longest < MIN_SPLIT_SECONDS:
        return alone
    ranks = work.ranks * work.ranks_per_process
    workers = sum(hosts.all_workers for hosts in data)
    together = longest * _share_of_one(work, workers / max(1.0, ranks))
    # What the others make goes to the trainer, and from there to the host that collates.
    slowest = min(hosts.instance.sustained_gbps or math.inf for hosts in data)
    moved_bytes = 2 * (1 - 1 / count) * work.batch_bytes / ranks
    way = moved_bytes * 8 / (NETWORK_EFFICIENCY * slowest * 1e9)
    if alone - together < _MIN_SHARING_GAIN * way:
        return alone
    return together


def _batch_seconds(work: StepWork, hosts: Hosts) -> float:
    """Returns the seconds in which one worker makes one rank's batch."""
    ranks = work.ranks * work.ranks_per_process
    return (worker_seconds(work, hosts.instance) + work.shared.seconds) / ranks


def epochs_elsewhere(profiled: StepWork, scaled: StepWork) -> EpochTimes | None:
    """Returns the epochs of work that was scaled to another type: workers are faster or slower."""
    times = profiled.epochs
    if times is None or times.start is None or not profiled.loader_wall_seconds:
        return times
    factor = scaled.loader_wall_seconds / profiled.loader_wall_seconds
    return msgspec.structs.replace(times, start=times.start.scaled(factor))
