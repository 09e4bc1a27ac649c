"""Two reports of the ranks become rates, and these a row and a log line, which are read back."""

from io import StringIO

import msgspec
import pytest

from stoker.feed.engine.run_messages import FeedWork, HostWork, MemoryPeak, Progress
from stoker.figures.intervals import (
    Interval,
    IntervalLog,
    RankRate,
    interval_in,
    joined,
    rates_between,
    read_intervals,
)
from stoker.figures.limit import feed_limit_of
from stoker.figures.progress import RunSteps
from stoker.logs import Log, parse_line
from support import feed_rows


def host_work(name="data-1", *, batches=0, is_local=False):
    return HostWork(
        host=name,
        is_local=is_local,
        batches=batches,
        frame_bytes=batches * 1000,
        credits=4,
        busy_seconds=batches * 0.5,
        cpu_seconds=batches * 0.25,
        num_workers=2,
    )


def report(rank=0, *, seconds, batches=0, waited=0.0, computed=0.0, hosts=None):
    return Progress(
        rank=rank,
        steps=batches,
        samples=batches * 8,
        wait_seconds=waited,
        compute_seconds=computed,
        feed=FeedWork(
            seconds=seconds,
            taken=batches,
            ready_at_takes=batches * 3,
            ready=1,
            hosts=(host_work(batches=batches),) if hosts is None else hosts,
        ),
    )


def between(before, *after):
    earlier = {before.rank: before} if before else {}
    later = {each.rank: each for each in after}
    return rates_between(earlier, later)


def host_rate(name="data-1", **changes):
    """Makes a host with four workers, one of which is busy, and eight batches asked for."""
    own = {"busy_workers": 1.0, "busy_cpus": 1.0}
    rate = feed_rows.host_rate(name, 10.0)
    return msgspec.structs.replace(rate, **{"bytes_per_second": 1e6, **own, **changes})


def interval(*hosts, wait=0.5, ready=0.0):
    rank = RankRate(name="0", batches_per_second=10.0, wait_share=wait, queue_depth=ready)
    return Interval(start_seconds=0.0, seconds=2.0, ranks=(rank,), hosts=hosts)


def test_rates_are_over_the_ranks_own_clock():
    # The leader looked after 2.0 s; the rank's reports that it has are 4.0 s apart.
    (rank,), (host,) = between(
        report(seconds=20.0, batches=100, waited=1.0, computed=9.0),
        report(seconds=24.0, batches=140, waited=2.0, computed=12.0),
    )
    assert (rank.batches_per_second, rank.wait_share) == (10.0, 0.25)
    assert rank.queue_depth == 3.0
    assert (host.name, host.workers) == ("data-1", 2)
    assert (host.batches_per_second, host.bytes_per_second) == (10.0, 10_000.0)
    assert (host.busy_workers, host.busy_cpus) == (5.0, 2.5)
    assert host.credits == 4


def stream(*hosts, shards, ready=0.0):
    value = interval(*hosts, ready=ready)
    rank = msgspec.structs.replace(value.ranks[0], shards=shards)
    return msgspec.structs.replace(value, ranks=(rank,))


SLOWER = host_rate("data-2", batches_per_second=3.0)


@pytest.mark.parametrize(
    ("value", "limit", "words"),
    [
        (interval(host_rate(), wait=None), "unknown", "not known: no step"),
        (interval(host_rate(), wait=0.02, ready=5.0), "accelerator", "data is there in time"),
        (interval(host_rate(credits=0, batches_per_second=0)), "workers", "none is connected"),
        # A run of seconds, whose hosts have gone by its last report.
        (joined([interval(host_rate(credits=0))]), "network", "at work 25% of the time"),
        (joined([interval(host_rate()), interval(host_rate(credits=0))]), "network", "at work"),
        (interval(host_rate(busy_workers=3.9, busy_cpus=3.8)), "cpu", "at work 98% of the time"),
        (interval(host_rate(), SLOWER, ready=6.0), "order", "slowest is data-2"),
        (interval(host_rate()), "network", "at work 25% of the time"),
        (stream(host_rate(), shards=4, ready=3.0), "order", "3.0 others are ready"),
    ],
)
def test_the_bottleneck_is_named_with_what_was_seen(value, limit, words):
    found = feed_limit_of(value)
    assert found.limit == limit
    assert words in found.words
    assert found.advice


MEMORY = MemoryPeak(limit_bytes=8, peak_bytes=3, used_bytes=2)


def ticked(file, *, seconds):
    """Lets a leader look at a rank that ends five batches a second, and returns what it logged."""
    now, stream = 0.0, StringIO()
    log = IntervalLog(
        path=file,
        log=Log(run="run", host="gpu-1", stream=stream),
        steps=RunSteps(file.parent),
        progress=lambda: {0: report(seconds=now, batches=round(5 * now))},
        memory=lambda: {"gpu-1": MEMORY},
        clock=lambda: now,
    )
    for second in range(1, seconds + 1):
        now = float(second)
        log.tick()
    log.close()
    log.close()
    return stream.getvalue()


def test_the_leader_leaves_rows_and_lines_every_two_seconds(tmp_path):
    lines = ticked(tmp_path / "metrics.jsonl", seconds=10).splitlines()
    found = read_intervals(tmp_path / "metrics.jsonl")
    assert [each.start_seconds for each in found] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert all(each.ranks[0].batches_per_second == 5.0 for each in found)
    assert all(each.memory == {"gpu-1": MEMORY} for each in found)
    assert [interval_in(parse_line(line)) for line in lines] == found
