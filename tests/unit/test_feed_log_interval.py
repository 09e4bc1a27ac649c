"""Two reports of the ranks become rates, and these a file and a log line, which are read back."""

import dataclasses
from io import StringIO

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.feed.wire.protocol import FeedWork, HostWork, Progress, WorkerWork
from stoker.figures.feed_intervals import (
    COLUMNS,
    FeedInterval,
    FeedLog,
    Figure,
    HostRate,
    RankRate,
    csv_text,
    feed_limit_of,
    interval_between,
    interval_in,
    joined,
    read_csv,
)
from stoker.logs import Log, parse_line
from support import feed_rows

HEAD = ",".join(COLUMNS) + "\n"


def host_work(name="data-1", *, batches=0, is_local=False):
    return HostWork(
        host=name,
        is_local=is_local,
        batches=batches,
        frame_bytes=batches * 1000,
        in_flight=3,
        credits=4,
        busy_seconds=batches * 0.5,
        cpu_seconds=batches * 0.25,
        num_workers=2,
        workers=(
            WorkerWork(0, batches // 4, batches * 0.25),
            WorkerWork(1, batches - batches // 4, batches * 0.25),
        ),
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
            window=9,
            hosts=(host_work(batches=batches),) if hosts is None else hosts,
        ),
    )


def between(before, *after):
    earlier = {before.rank: before} if before else {}
    later = {each.rank: each for each in after}
    return interval_between(earlier, later, start_seconds=10.0, seconds=2.0)


def host_rate(name="data-1", **changes):
    """Makes a host with four workers, one of which is busy, and eight batches asked for."""
    own = {"busy_workers": 1.0, "busy_cpus": 1.0, "slowest_worker": 2.0, "fastest_worker": 3.0}
    rate = feed_rows.host_rate(name, 10.0)
    return dataclasses.replace(rate, **{"bytes_per_second": 1e6, **own, **changes})


def interval(*hosts, wait=0.5, ready=0.0):
    rank = RankRate(
        name="0", batches_per_second=10.0, wait_share=wait, queue_depth=ready, window=20
    )
    return FeedInterval(start_seconds=0.0, seconds=2.0, ranks=(rank,), hosts=hosts)


def test_rates_are_over_the_ranks_own_clock():
    # The leader looked after 2.0 s; the rank's reports that it has are 4.0 s apart.
    found = between(
        report(seconds=20.0, batches=100, waited=1.0, computed=9.0),
        report(seconds=24.0, batches=140, waited=2.0, computed=12.0),
    )
    assert (found.start_seconds, found.seconds) == (10.0, 2.0)
    rank = found.ranks[0]
    assert (rank.batches_per_second, rank.wait_share) == (10.0, 0.25)
    assert (rank.queue_depth, rank.window) == (3.0, 9)
    host = found.hosts[0]
    assert (host.kind, host.name, host.workers) == ("host", "data-1", 2)
    assert (host.batches_per_second, host.bytes_per_second) == (10.0, 10_000.0)
    assert (host.busy_workers, host.busy_cpus) == (5.0, 2.5)
    assert (host.slowest_worker, host.fastest_worker) == (2.5, 7.5)
    assert (host.in_flight, host.credits) == (3, 4)


# Local workers of two ranks have the same numbers, and are different workers.
@pytest.mark.parametrize(
    ("is_local", "workers", "slowest", "fastest"), [(False, 2, 7.5, 22.5), (True, 4, 2.5, 15.0)]
)
def test_ranks_that_share_a_host_add_up(is_local, workers, slowest, fastest):
    shared = (host_work(batches=40, is_local=is_local),)
    found = between(
        None,
        report(0, seconds=4.0, batches=40, hosts=shared),
        report(1, seconds=2.0, batches=40, hosts=shared),
    )
    assert len(found.ranks) == 2
    host = found.hosts[0]
    assert (host.kind, host.workers) == ("local" if is_local else "host", workers)
    assert (host.batches_per_second, host.credits) == (30.0, 8)
    assert (host.slowest_worker, host.fastest_worker) == (slowest, fastest)


def test_a_rank_that_started_again_counts_from_its_start():
    found = between(report(seconds=500.0, batches=9000), report(seconds=2.0, batches=4))
    assert found.ranks[0].batches_per_second == 2.0
    assert found.hosts[0].batches_per_second == 2.0


def test_a_rank_without_a_new_report_has_no_rates():
    same = report(seconds=20.0, batches=100)
    assert interval_between({0: same}, {0: same}, start_seconds=0.0, seconds=2.0) is None
    without = Progress(rank=0, steps=1, samples=1, wait_seconds=1.0, compute_seconds=1.0)
    assert interval_between({}, {0: without}, start_seconds=0.0, seconds=2.0) is None


def test_a_rank_that_ended_no_step_has_no_wait_share():
    rank = between(report(seconds=1.0), report(seconds=3.0)).ranks[0]
    assert (rank.wait_share, rank.queue_depth, rank.batches_per_second) == (None, None, 0.0)


numbers = st.floats(0, 1e12, allow_nan=False).map(lambda value: float(f"{value:.6g}"))
counts = st.integers(min_value=0, max_value=1 << 40)


def rates(kind, **named):
    by_type = {int: counts, Figure: numbers, Figure | None: st.none() | numbers}
    types = {each.name: each.type for each in dataclasses.fields(kind)}
    drawn = {name: by_type[its] for name, its in types.items() if its in by_type}
    return st.builds(kind, **drawn, **named)


ranks_of = rates(RankRate, name=st.integers(0, 4000).map(str))
hosts_of = rates(HostRate, name=st.from_regex(r"[a-z0-9][a-z0-9.,-]{0,60}", fullmatch=True))
intervals = st.builds(
    FeedInterval,
    start_seconds=numbers,
    seconds=numbers.filter(lambda value: value > 0),
    ranks=st.lists(ranks_of, min_size=1, max_size=3).map(tuple),
    hosts=st.lists(hosts_of, max_size=3).map(tuple),
)


@given(intervals)
def test_an_interval_comes_back_from_its_log_line(value):
    stream = StringIO()
    Log(run="run", host="gpu-1", stream=stream).event("feed", rows=csv_text(value))
    assert interval_in(parse_line(stream.getvalue())) == value


def test_cut_and_strange_rows_are_left_out():
    rank, host = csv_text(interval(host_rate())).splitlines()
    figures = [host.replace("1e+06", figure) for figure in ("nan", "inf", "-1", "x", "")]
    rows = [rank, host, *figures, "2,2,rank,0,-5,,,,", "4,2,ho"]
    assert read_csv(HEAD + "\n".join(rows)) == [interval(host_rate())]
    assert read_csv("") == []


def test_the_mean_of_intervals_is_weighted_with_their_length():
    first = interval(host_rate(batches_per_second=10.0, moved=1), wait=0.2)
    second = dataclasses.replace(
        interval(host_rate(batches_per_second=40.0, moved=2, credits=0), wait=None),
        start_seconds=2.0,
        seconds=4.0,
    )
    whole = joined([first, second])
    assert (whole.start_seconds, whole.seconds) == (0.0, 6.0)
    assert whole.hosts[0].batches_per_second == 30.0
    assert (whole.hosts[0].moved, whole.hosts[0].credits) == (3, 0)
    assert whole.wait_share == 0.2, "unknown is not zero"
    with pytest.raises(ValueError, match="no interval"):
        joined([])


def stream(*hosts, shards, workers, ready=0.0):
    value = interval(*hosts, ready=ready)
    rank = dataclasses.replace(value.ranks[0], shards=shards, shard_workers=workers)
    return dataclasses.replace(value, ranks=(rank,))


SLOWER = host_rate("data-2", batches_per_second=3.0)
# A batch of this host took longer than the interval: no work of the others.
SLOWEST = host_rate("slow", workers=1, busy_workers=4.0, batches_per_second=0.4)
BUSY = host_rate(workers=8, busy_workers=8.0, busy_cpus=7.5)


@pytest.mark.parametrize(
    ("value", "limit", "words"),
    [
        (interval(host_rate(), wait=None), "unknown", "not known: no step"),
        (interval(host_rate(), wait=0.02, ready=5.0), "accelerator", "5.0 batches are ready"),
        (interval(host_rate(credits=0)), "workers", "none is connected"),
        (interval(host_rate(busy_workers=3.9, busy_cpus=3.8)), "cpu", "at work 98% of the time"),
        (interval(host_rate(busy_workers=4.0, busy_cpus=0.4)), "workers", "have a CPU for 10%"),
        (interval(host_rate(), SLOWER, ready=6.0), "order", "slowest is data-2"),
        (interval(host_rate(busy_workers=1.6), SLOWEST, ready=48.5), "order", "slowest is slow"),
        (interval(host_rate()), "network", "8 of 8 batches asked for"),
        # More shards than workers: it is short of workers.
        (stream(BUSY, shards=8, workers=2), "cpu", "at work 100% of the time"),
        # One late shard.
        (stream(host_rate(), shards=4, workers=4, ready=3.0), "order", "3.0 others are ready"),
        (interval(host_rate(in_flight=1)), "hand-out", "1 of 8 batches asked for"),
    ],
)
def test_the_bottleneck_is_named_with_what_was_seen(value, limit, words):
    found = feed_limit_of(value)
    assert found.limit == limit
    assert words in found.words
    assert found.advice


def at_starts(value, share):
    """Changes an interval: so much of the wait is for the first batches of epochs."""
    rank = dataclasses.replace(value.ranks[0], start_wait_share=share)
    return dataclasses.replace(value, ranks=(rank,))


@pytest.mark.parametrize(
    ("value", "limit"),
    [
        # Seven others are ready with an epoch's first batch: none of them is late.
        (at_starts(interval(host_rate(), wait=0.24, ready=7.0), 0.23), "start"),
        (at_starts(interval(host_rate(), wait=0.24, ready=7.0), 0.15), "start"),
        # More hosts do not help, however busy these are while the trainer waits.
        (at_starts(interval(host_rate(busy_workers=3.9, busy_cpus=3.8), wait=0.3), 0.28), "start"),
        (at_starts(interval(host_rate(busy_workers=3.9, busy_cpus=3.8), wait=0.3), 0.1), "cpu"),
        (at_starts(interval(host_rate(), SLOWER, wait=0.5, ready=6.0), 0.05), "order"),
        (at_starts(interval(host_rate(), wait=0.5), 0.1), "network"),
        # Epochs of 8 batches, and 10 credits.
        (at_starts(interval(host_rate(in_flight=0), wait=0.65, ready=1.1), 0.38), "start"),
        (at_starts(interval(host_rate(in_flight=0), wait=0.65, ready=1.1), 0.1), "hand-out"),
    ],
)
def test_wait_for_the_first_batch_of_epochs_is_no_late_batch(value, limit):
    found = feed_limit_of(value)
    assert found.limit == limit
    if limit == "start":
        assert "as it is begun with the epoch" in found.words
        assert "persistent_workers" in found.advice


def test_wait_at_the_start_of_epochs_is_told_apart():
    def told(seconds, *, waited, steady):
        whole = report(seconds=seconds, batches=int(seconds * 20), waited=waited, computed=seconds)
        return msgspec.structs.replace(whole, steady_steps=1, steady_wait_seconds=steady)

    found = between(told(10.0, waited=5.0, steady=1.0), told(12.0, waited=6.0, steady=1.25))
    (rank,) = found.ranks
    assert rank.wait_share == pytest.approx(1 / 3)
    assert rank.start_wait_share == pytest.approx(0.75 / 3)
    assert found.start_wait_share == rank.start_wait_share
    (same,) = read_csv(HEAD + csv_text(found))
    assert same.start_wait_share == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("host", "shards", "words"),
    [
        # One shard, eight workers: the one that makes it computes, or waits for what it reads.
        (host_rate(workers=1, busy_workers=1.0), 1, "only shard: "),
        (host_rate(workers=1, busy_workers=1.0, busy_cpus=0.1), 1, "7 more could work"),
        # Between two epochs nothing is asked for: no sampler is to blame, as a stream has none.
        (host_rate(in_flight=0, busy_workers=0.2), 8, "8 shards: "),
    ],
)
def test_a_stream_with_too_few_shards_is_told_to_have_more(host, shards, words):
    found = feed_limit_of(stream(host, shards=shards, workers=8))
    assert found.limit == "shards"
    assert words in found.words
    assert "num_workers" in found.advice
    assert "data hosts" not in found.advice


@pytest.mark.parametrize(
    ("does_loading_wait", "is_storage_named", "are_hosts_named"),
    [(True, True, False), (False, False, True), (None, True, True)],
)
def test_faster_storage_is_no_advice_for_a_loader_that_waits_for_none(
    does_loading_wait, is_storage_named, are_hosts_named
):
    # Workers without a CPU: they read, or other processes have their cores.
    value = interval(host_rate(busy_workers=4.0, busy_cpus=2.2))
    found = feed_limit_of(value, does_loading_wait=does_loading_wait)
    assert found.limit == {True: "latency", False: "cpu", None: "workers"}[does_loading_wait]
    advice = found.advice
    assert ("storage" in advice) == is_storage_named
    assert ("data hosts" in advice) == are_hosts_named


def ticked(file, *, seconds):
    """Lets a leader look at a rank that ends five batches a second, and returns what it logged."""
    now, stream = 0.0, StringIO()
    log = FeedLog(
        file,
        Log(run="run", host="gpu-1", stream=stream),
        progress=lambda: {0: report(seconds=now, batches=round(5 * now))},
        clock=lambda: now,
    )
    for second in range(1, seconds + 1):
        now = float(second)
        log.tick()
    log.close()
    log.close()
    return stream.getvalue()


def test_the_leader_leaves_rows_and_lines_every_two_seconds(tmp_path):
    lines = ticked(tmp_path / "feed.csv", seconds=10).splitlines()
    found = read_csv((tmp_path / "feed.csv").read_text())
    assert [each.start_seconds for each in found] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert all(each.ranks[0].batches_per_second == 5.0 for each in found)
    assert [interval_in(parse_line(line)) for line in lines] == found


def test_a_long_run_leaves_fewer_rows(tmp_path):
    ticked(tmp_path / "feed.csv", seconds=24 * 3600)
    assert 1000 < len(read_csv((tmp_path / "feed.csv").read_text())) < 3000


def test_a_full_disk_ends_the_picture_and_nothing_else(tmp_path):
    logged = ticked(tmp_path / "missing" / "feed.csv", seconds=10)
    assert logged.count("feed_write_failed") == 1
    assert logged.count(" feed rows=") == 5
