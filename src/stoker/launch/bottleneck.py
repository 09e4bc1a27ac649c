"""What limits a run right now, from what the feed does: the place where the next gain is."""

from dataclasses import dataclass
from typing import Literal

from stoker.launch.feed_interval import FeedInterval, HostRate

Limit = Literal["unknown", "trainer", "workers", "order", "connection", "hand-out"]

# Less waiting than this is the feed's own overhead (1 to 3 % over the bound, benchmarks).
MIN_WAIT_SHARE = 0.05
# Workers that are at work for longer than this are what all wait for.
MIN_BUSY_SHARE = 0.8
# Of the time at work; below, a worker waits for storage, or shares its CPU with another.
MIN_CPU_SHARE = 0.7
# So many batches lie ready, and yet the trainer waits: for one that is not among them.
MIN_READY = 2.0
MIN_CREDIT_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What limits the run.

    Attributes:
        limit: trainer: data is there in time; workers: too few or too slow data workers; order: one
            late batch holds up others that are ready; connection: workers idle while all that may
            be asked for is asked for; hand-out: less is asked for than could be.
        words: What was seen.
        advice: What to do about it.
    """

    limit: Limit
    words: str
    advice: str


def bottleneck_of(interval: FeedInterval) -> Bottleneck:
    """Names the limit of an interval (of several: see `feed_interval.mean`)."""
    wait = interval.wait_share
    if wait is None:
        return Bottleneck(
            "unknown", "not known: no step ended in this time", "look again after a few steps"
        )
    if wait < MIN_WAIT_SHARE:
        ready = interval.queue_depth
        queue = "" if ready is None else f", {ready:.1f} batches lie ready"
        return Bottleneck(
            "trainer",
            f"the trainer: data is there in time ({wait:.0%} of a step is wait{queue})",
            "a faster trainer, or fewer data hosts",
        )
    hosts = [host for host in interval.hosts if host.credits]
    if not hosts:
        return Bottleneck(
            "workers",
            f"the lack of data workers: none is there ({wait:.0%} of a step is wait)",
            "see the data hosts' logs, and stoker doctor --peer HOST",
        )
    return _of_the_feed(hosts, wait=wait, ready=interval.queue_depth or 0.0)


def _of_the_feed(hosts: list[HostRate], *, wait: float, ready: float) -> Bottleneck:
    workers = sum(host.workers for host in hosts)
    busy = sum(host.busy_workers * _counted(host) for host in hosts)
    cpus = sum(host.busy_cpus * _counted(host) for host in hosts)
    asked = sum(host.in_flight for host in hosts)
    credits = sum(host.credits for host in hosts)
    waits = f"{wait:.0%} of a step is wait"
    share = busy / workers if workers else 0.0
    if share >= MIN_BUSY_SHARE:
        seen = f"the data workers: {share:.0%} of their time at work, {waits}"
        if cpus >= MIN_CPU_SHARE * busy:
            return Bottleneck("workers", seen, "more data hosts, or a cheaper transform")
        return Bottleneck(
            "workers",
            f"{seen}, their CPUs at {cpus / busy:.0%} of that",
            "faster storage, or more workers where they wait for it; where workers share cores, "
            "more data hosts",
        )
    if ready >= MIN_READY:
        slowest = min(hosts, key=_pace)
        return Bottleneck(
            "order",
            f"one late batch: {ready:.1f} others lie ready, {waits}; slowest is {slowest.name}",
            "even out the cost of batches, or raise feed.credits and feed.max_bytes",
        )
    if credits and asked >= MIN_CREDIT_SHARE * credits:
        return Bottleneck(
            "connection",
            f"the way to the trainer: workers are at work for {share:.0%} of the time, "
            f"{asked} of {credits} batches asked for, {waits}",
            "smaller batches on the wire (uint8), a faster network, or feed.credits",
        )
    return Bottleneck(
        "hand-out",
        f"the hand-out: {asked} of {credits} batches asked for, {waits}",
        "raise feed.max_bytes; look at what the sampler costs",
    )


def _counted(host: HostRate) -> float:
    """A batch counts as work when it has come: a short interval may show more than all workers."""
    return min(1.0, host.workers / host.busy_workers) if host.busy_workers else 1.0


def _pace(host: HostRate) -> float:
    """Batches a second of each of the host's workers."""
    return host.batches_per_second / max(host.workers, 1)
