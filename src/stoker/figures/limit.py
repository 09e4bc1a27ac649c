"""What limits a run that is fed, by the rates of an interval, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

from stoker.figures.intervals import Interval
from stoker.records import Limit

# Less waiting is the feed's overhead (1 to 3% in benchmarks).
MIN_WAIT_SHARE = 0.05
# Workers that are busier than this are the bottleneck.
MIN_BUSY_SHARE = 0.8
# Of the time at work; below, a worker waits for storage, or shares its CPU.
MIN_CPU_SHARE = 0.7
# If the trainer waits with this many batches ready, it waits for another one.
MIN_READY = 2.0
# Of the credits; above, the way to the trainer is the bottleneck.
MIN_CREDIT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class FeedBottleneck:
    """What limits the run, what was measured, and what to do.

    Of the feed only: start is the first batch of each epoch; shards are fewer than workers; order
    is one late batch that delays others; hand-out are credits that are not used.
    """

    limit: Limit | Literal["workers", "unknown", "start", "shards", "order", "hand-out"]
    words: str
    advice: str


def feed_limit_of(interval: Interval) -> FeedBottleneck:
    """Returns the limit of an interval (of several: see `joined`), without the wait."""
    wait = interval.wait_share
    start = interval.start_wait_share
    ready = interval.queue_depth or 0.0
    if wait is None:
        return FeedBottleneck(
            "unknown", "not known: no step ended in this time", "look again after a few steps"
        )
    # In the order of certainty: where nothing waits, nothing else limits.
    if wait < MIN_WAIT_SHARE:
        words = "the trainer, as data is there in time"
        if interval.queue_depth is not None:
            words += f": {ready:.1f} batches are ready"
        return FeedBottleneck("accelerator", words, "a faster trainer, or fewer data hosts")
    # Only the first batches are late: more workers would wait as long.
    if wait - start < MIN_WAIT_SHARE:
        return _start_limit(wait, start)
    hosts = [host for host in interval.hosts if host.credits]
    if not hosts:
        words = "the lack of data workers: none is connected"
        return FeedBottleneck("workers", words, "see the data hosts' logs")
    workers = sum(host.workers for host in hosts)
    at_work = sum(host.workers * (host.busy_share or 0.0) for host in hosts)
    busy = at_work / workers if workers else 0.0
    shards = sum(rank.shards for rank in interval.ranks)
    spare_workers = sum(rank.shard_workers for rank in interval.ranks) - shards
    # With fewer workers than shards, workers are the bottleneck.
    may_bind = spare_workers >= 0 or busy < MIN_BUSY_SHARE
    if shards and ready < MIN_READY and may_bind:
        return FeedBottleneck(
            "shards",
            f"the stream's shards ({shards}): one worker makes a shard, at work {busy:.0%} of the "
            "time",
            "raise num_workers in the script, if the stream divides itself; "
            "persistent_workers=True if epochs are short; or a cheaper transform",
        )
    # Before what is requested, as busy workers also use up credits and delay batches.
    if busy >= MIN_BUSY_SHARE:
        # CPUs in use, scaled to the time at work as `busy_share` caps it.
        cpus = sum(
            host.busy_cpus * min(1.0, host.workers / host.busy_workers)
            for host in hosts
            if host.busy_workers
        )
        words = f"the data workers, which are at work {busy:.0%} of the time"
        # Busy without a CPU means waiting for reads, or for a core that others use.
        if cpus >= MIN_CPU_SHARE * at_work:
            return FeedBottleneck("cpu", words, "more data hosts, or a cheaper transform")
        return FeedBottleneck(
            "workers",
            f"{words} and have a CPU for {cpus / at_work:.0%} of that",
            "more data hosts, where workers share their cores with other processes; faster storage "
            "or more workers, where they wait for what they read",
        )
    # Workers are idle for a part of the time.
    in_flight = sum(host.in_flight for host in hosts)
    credits = sum(host.credits for host in hosts)
    is_requested = in_flight >= MIN_CREDIT_SHARE * credits
    # Workers that begin together are ready together: nothing is late. Of epochs of fewer batches
    # than may be requested, nothing is left to be handed out.
    if start >= wait / 2 and (ready >= MIN_READY or not is_requested):
        return _start_limit(wait, start)
    if ready >= MIN_READY:
        # In order: one late batch holds all that are ready behind it.
        slowest = min(hosts, key=lambda host: host.batches_per_second / max(host.workers, 1))
        words = f"one late batch: {ready:.1f} others are ready; slowest is {slowest.name}"
        advice = "even out the cost of batches, or raise feed.max_bytes"
        return FeedBottleneck("order", words, advice)
    requested = f"{in_flight} of {credits} batches asked for"
    # Workers are idle though all that may be requested is: the time passes on the way.
    if is_requested:
        words = f"the way to the trainer: workers are at work {busy:.0%} of the time, {requested}"
        advice = "smaller batches on the wire (uint8), or a faster network"
        return FeedBottleneck("network", words, advice)
    advice = "raise feed.max_bytes; look at what the sampler costs"
    return FeedBottleneck("hand-out", f"the hand-out: {requested}", advice)


def _start_limit(wait: float, start: float) -> FeedBottleneck:
    return FeedBottleneck(
        "start",
        f"the start of epochs: the trainer waits {start:.0%} of the time for their first batches, "
        f"and {wait - start:.0%} for all others, as it is begun with the epoch",
        "smaller batches (gradients of several accumulated) or longer epochs; "
        "persistent_workers=True, where an epoch starts new workers",
    )
