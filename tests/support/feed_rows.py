"""Makes a metrics.jsonl: two data hosts, one of which is lost for a while, and local workers."""

from io import StringIO
from pathlib import Path
from random import Random

import msgspec

from stoker.figures.intervals import HostRate, Interval, RankRate
from stoker.logs import Log

SECONDS = 2.0
LOST = range(26, 40)


def host_rate(name, rate, *, workers=4) -> HostRate:
    """Makes a host whose workers are busy on a CPU each, or that is gone (rate 0)."""
    return HostRate(
        name=name,
        batches_per_second=rate,
        bytes_per_second=rate * 4.8e6,
        workers=workers,
        busy_workers=0.9 * workers if rate else 0.0,
        busy_cpus=0.85 * workers if rate else 0.0,
        credits=2 * workers if rate else 0,
    )


def feed_line(*hosts: HostRate) -> str:
    rank = RankRate(name="0", batches_per_second=30.0, wait_share=0.4, queue_depth=0.5)
    interval = Interval(start_seconds=4.0, seconds=2.0, ranks=(rank,), hosts=hosts)
    stream = StringIO()
    Log(run="mnist-1", host="gpu-1", stream=stream).event(
        "interval", row=msgspec.json.encode(interval).decode()
    )
    return stream.getvalue()


def feed_intervals(*, hosts: int = 2, intervals: int = 60) -> list[Interval]:
    """Makes a run in which data-1 is lost in the intervals of LOST."""
    random = Random(1)
    made = []
    for number in range(intervals):
        is_lost = number in LOST
        rates = [
            host_rate(
                f"data-{host + 1}",
                0.0 if is_lost and host == 0 else random.uniform(18, 22),
            )
            for host in range(hosts)
        ]
        rates.append(host_rate("gpu-1", 7.5, workers=2))
        rank = RankRate(
            name="0",
            batches_per_second=sum(rate.batches_per_second for rate in rates),
            wait_share=0.45 if is_lost else random.uniform(0.0, 0.03),
            queue_depth=0.1 if is_lost else random.uniform(2, 7),
        )
        when = {"start_seconds": number * SECONDS, "seconds": SECONDS}
        made.append(Interval(ranks=(rank,), hosts=tuple(rates), **when))
    return made


def write_feed(folder: Path, *, hosts: int = 2, intervals: int = 60) -> Path:
    file = folder / "metrics.jsonl"
    rows = msgspec.json.Encoder().encode_lines(feed_intervals(hosts=hosts, intervals=intervals))
    file.write_bytes(rows)
    return file
