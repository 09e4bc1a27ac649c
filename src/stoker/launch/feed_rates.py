"""From what ranks tell of the feed, twice, to what went on in between."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.feed.messages import FeedWork, HostWork, Progress
from stoker.launch.feed_interval import FeedInterval, HostRate, RankRate

_NOTHING = FeedWork(seconds=0.0)


def interval_between(
    before: Mapping[int, Progress],
    after: Mapping[int, Progress],
    *,
    start_seconds: float,
    seconds: float,
) -> FeedInterval | None:
    """The rates between two looks at the ranks' reports; None where no rank has told anything new.

    A rank's rates are over its own clock: its reports reach the leader up to a second apart from
    the leader's looks. A rank that was started again counts from its start.
    """
    ranks = []
    hosts: dict[str, _Host] = {}
    for rank, now in sorted(after.items()):
        then = before.get(rank)
        work = now.feed
        if work is None:
            continue
        was = then.feed if then and then.feed and then.feed.seconds <= work.seconds else None
        span = work.seconds - (was or _NOTHING).seconds
        if span <= 0:
            continue
        ranks.append(_rank_rate(now, then if was else None, work, was or _NOTHING, span))
        known = {each.host: each for each in was.hosts} if was else {}
        for each in work.hosts:
            gathered = hosts.setdefault(each.host, _Host(each.is_local))
            gathered.add(rank, each, known.get(each.host, HostWork(host=each.host)), span)
    if not ranks:
        return None
    return FeedInterval(
        start_seconds=start_seconds,
        seconds=seconds,
        ranks=tuple(ranks),
        hosts=tuple(host.rate(name) for name, host in sorted(hosts.items())),
    )


def _rank_rate(
    now: Progress, then: Progress | None, work: FeedWork, was: FeedWork, span: float
) -> RankRate:
    waited = now.wait_seconds - (then.wait_seconds if then else 0.0)
    computed = now.compute_seconds - (then.compute_seconds if then else 0.0)
    taken = work.taken - was.taken
    return RankRate(
        name=str(now.rank),
        batches_per_second=max(taken, 0) / span,
        wait_share=max(waited, 0.0) / (waited + computed) if waited + computed > 0 else None,
        queue_depth=max(work.ready_at_takes - was.ready_at_takes, 0) / taken if taken > 0 else None,
        window=work.window,
    )


@dataclass(slots=True)
class _Host:
    """One host, gathered over the ranks."""

    is_local: bool
    batches: float = 0.0
    frame_bytes: float = 0.0
    busy: float = 0.0
    cpus: float = 0.0
    in_flight: int = 0
    credits: int = 0
    moved: int = 0
    duplicates: int = 0
    workers: int = 0
    # Local workers of two ranks are different processes under the same numbers.
    rates: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, rank: int, now: HostWork, was: HostWork, span: float) -> None:
        """What the host did for one rank in `span` seconds of that rank's clock."""
        self.batches += max(now.batches - was.batches, 0) / span
        self.frame_bytes += max(now.frame_bytes - was.frame_bytes, 0) / span
        self.busy += max(now.busy_seconds - was.busy_seconds, 0.0) / span
        self.cpus += max(now.cpu_seconds - was.cpu_seconds, 0.0) / span
        self.moved += max(now.moved - was.moved, 0)
        self.duplicates += max(now.duplicates - was.duplicates, 0)
        self.in_flight += now.in_flight
        self.credits += now.credits
        self.workers = (
            self.workers + now.num_workers if self.is_local else max(self.workers, now.num_workers)
        )
        known = {each.worker: each.batches for each in was.workers}
        for each in now.workers:
            key = (rank if self.is_local else -1, each.worker)
            rate = max(each.batches - known.get(each.worker, 0), 0) / span
            self.rates[key] = self.rates.get(key, 0.0) + rate

    def rate(self, name: str) -> HostRate:
        """The host over the interval."""
        return HostRate(
            kind="local" if self.is_local else "host",
            name=name,
            batches_per_second=self.batches,
            bytes_per_second=self.frame_bytes,
            workers=self.workers,
            busy_workers=self.busy,
            busy_cpus=self.cpus,
            slowest_worker=min(self.rates.values(), default=None),
            fastest_worker=max(self.rates.values(), default=None),
            in_flight=self.in_flight,
            credits=self.credits,
            moved=self.moved,
            duplicates=self.duplicates,
        )
