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


@dataclass(frozen=True, slots=True)
class FeedBottleneck:
    """What limits the run, what was measured, and what to do.

    Of the feed only: start is the first batch of each epoch; shards are fewer than workers; order
    is one late batch that delays others.
    """

    limit: Limit | Literal["workers", "unknown", "start", "shards", "order"]
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
        return FeedBottleneck("accelerator", words, "a faster trainer, or fewer data hosts")
    # More workers would wait as long for the first batches, as they begin together.
    if start > max(wait - MIN_WAIT_SHARE, wait / 2):
        return FeedBottleneck(
            "start",
            f"the start of epochs: the trainer waits {start:.0%} of the time for their first "
            f"batches, and {wait - start:.0%} for all others",
            "smaller batches (gradients of several accumulated) or longer epochs; "
            "persistent_workers=True, where an epoch starts new workers",
        )
    # A host without credits is gone by now, and may have made batches before.
    hosts = [host for host in interval.hosts if host.credits or host.batches_per_second]
    if not hosts:
        words = "the lack of data workers: none is connected"
        return FeedBottleneck("workers", words, "see the data hosts' logs")
    workers = sum(host.workers for host in hosts)
    at_work = sum(host.workers * (host.busy_share or 0.0) for host in hosts)
    busy = f"{at_work / max(workers, 1):.0%}"
    is_busy = at_work >= MIN_BUSY_SHARE * workers
    shards = sum(rank.shards for rank in interval.ranks)
    if shards and ready < MIN_READY:
        return FeedBottleneck(
            "shards",
            f"the stream's shards ({shards}): one worker makes a shard, at work {busy} of the time",
            "raise num_workers in the script, if the stream divides itself; "
            "persistent_workers=True if epochs are short; or a cheaper transform",
        )
    if is_busy:
        words = f"the data workers, which are at work {busy} of the time"
        # Busy without a CPU means waiting for reads, or for a core that others use.
        if sum(host.busy_cpus for host in hosts) >= MIN_CPU_SHARE * at_work:
            return FeedBottleneck("cpu", words, "more data hosts, or a cheaper transform")
        words += " without a CPU for much of it"
        advice = "faster storage, or more data hosts where workers share their cores"
        return FeedBottleneck("workers", words, advice)
    # Workers are idle for a part of the time.
    if ready >= MIN_READY:
        # In order: one late batch holds all that are ready behind it.
        slowest = min(hosts, key=lambda host: host.batches_per_second / max(host.workers, 1))
        words = f"one late batch: {ready:.1f} others are ready; slowest is {slowest.name}"
        advice = "even out the cost of batches, or raise feed.max_bytes"
        return FeedBottleneck("order", words, advice)
    words = f"the way to the trainer: workers are at work {busy} of the time"
    advice = "smaller batches on the wire (uint8), a faster network, or a higher feed.max_bytes"
    return FeedBottleneck("network", words, advice)
