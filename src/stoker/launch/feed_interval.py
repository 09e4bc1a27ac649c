"""How the feed did over a few seconds: rates of hosts and ranks, from the counts that ranks tell.

The leader writes each interval twice: as rows of `feed.csv` beside the timeline (for the report),
and as one line of its log (for whoever holds only that). Both are read back here.

Columns of `feed.csv`; a cell that does not apply is empty:

    start_seconds       of the interval, since the leader began to look
    seconds             its length
    kind                rank | host | local: a trainer process, a data host, local workers of a host
    name                number of the rank, or name of the host
    batches_per_second  taken by the rank; made by the host and used
    bytes_per_second    that came from the host
    wait_share          of the rank's time, waiting for data, 0..1
    queue_depth         batches that lay ready when the rank took one, mean
    window              how far ahead of the rank batches are made, at the end of the interval
    workers             of the host that have made a batch so far
    busy_workers        at work at a time, mean
    busy_cpus           CPUs that they used, mean
    slowest_worker      batches a second of the host's slowest worker
    fastest_worker      and of its fastest
    in_flight           batches asked for, at the end of the interval
    credits             how many could be; 0: the host is gone
    moved               batches taken away from the host (lost, dropped or late) and made elsewhere
    duplicates          batches that came after another host's
"""

import csv
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Literal, TypeVar

from stoker.logs import LogEvent

Kind = Literal["rank", "host", "local"]

# Of the log line.
EVENT = "feed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRate:
    """One trainer process over an interval; see the module's list of columns."""

    name: str
    batches_per_second: float
    wait_share: float | None
    queue_depth: float | None
    window: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRate:
    """The data workers of one host over an interval; see the module's list of columns."""

    kind: Kind
    name: str
    batches_per_second: float
    bytes_per_second: float
    workers: int
    busy_workers: float
    busy_cpus: float
    slowest_worker: float | None
    fastest_worker: float | None
    in_flight: int
    credits: int
    moved: int
    duplicates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedInterval:
    """All ranks and hosts over the same seconds."""

    start_seconds: float
    seconds: float
    ranks: tuple[RankRate, ...]
    hosts: tuple[HostRate, ...]

    @property
    def wait_share(self) -> float | None:
        """Of the rank that waits longest; None where none finished a step."""
        return max((r.wait_share for r in self.ranks if r.wait_share is not None), default=None)

    @property
    def queue_depth(self) -> float | None:
        """Batches that lay ready for a rank, mean over the ranks."""
        depths = [rank.queue_depth for rank in self.ranks if rank.queue_depth is not None]
        return sum(depths) / len(depths) if depths else None


_ROW = (
    "batches_per_second",
    "bytes_per_second",
    "wait_share",
    "queue_depth",
    "window",
    "workers",
    "busy_workers",
    "busy_cpus",
    "slowest_worker",
    "fastest_worker",
    "in_flight",
    "credits",
    "moved",
    "duplicates",
)
COLUMNS = ("start_seconds", "seconds", "kind", "name", *_ROW)

_RateT = TypeVar("_RateT", RankRate, HostRate)


def csv_text(interval: FeedInterval) -> str:
    """The interval as rows of feed.csv, without the head."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = (_short(interval.start_seconds), _short(interval.seconds))
    rates: tuple[RankRate | HostRate, ...] = (*interval.ranks, *interval.hosts)
    for rate in rates:
        kind = rate.kind if isinstance(rate, HostRate) else "rank"
        writer.writerow([*head, kind, rate.name, *(_cell(rate, column) for column in _ROW)])
    return text.getvalue()


def read_csv(text: str) -> list[FeedInterval]:
    """The intervals in a feed.csv; rows that are not whole are left out."""
    found: dict[tuple[float, float], tuple[list[RankRate], list[HostRate]]] = {}
    for row in csv.DictReader(text.splitlines()):
        try:
            span = (_number(row["start_seconds"]), _number(row["seconds"]))
            ranks, hosts = found.setdefault(span, ([], []))
            if row["kind"] == "rank":
                ranks.append(_rate(RankRate, row))
            elif row["kind"] in ("host", "local"):
                hosts.append(_rate(HostRate, row))
        except (KeyError, TypeError, ValueError):
            continue
    return [
        FeedInterval(start_seconds=start, seconds=seconds, ranks=tuple(ranks), hosts=tuple(hosts))
        for (start, seconds), (ranks, hosts) in found.items()
        if seconds > 0 and (ranks or hosts)
    ]


def log_values(interval: FeedInterval) -> dict[str, str | float]:
    """The interval as the values of one log event: a column is a list, one item a host or rank."""
    values: dict[str, str | float] = {
        "start_seconds": interval.start_seconds,
        "seconds": interval.seconds,
        "ranks": _list(rank.name for rank in interval.ranks),
    }
    for column in ("batches_per_second", "wait_share", "queue_depth", "window"):
        values[f"rank_{column}"] = _list(_cell(rank, column) for rank in interval.ranks)
    values["hosts"] = _list(host.name for host in interval.hosts)
    for column in ("kind", *_ROW):
        if column in HostRate.__slots__:
            values[column] = _list(_cell(host, column) for host in interval.hosts)
    return values


def of_event(event: LogEvent) -> FeedInterval | None:
    """The interval in a log event; None if it holds none."""
    if event.event != EVENT:
        return None
    try:
        return FeedInterval(
            start_seconds=_number(event.values["start_seconds"]),
            seconds=_number(event.values["seconds"]),
            ranks=tuple(_rate(RankRate, row) for row in _rows(event, "ranks", prefix="rank_")),
            hosts=tuple(_rate(HostRate, row) for row in _rows(event, "hosts", prefix="")),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _rows(event: LogEvent, names: str, *, prefix: str) -> Iterator[dict[str, str]]:
    listed = event.values[names]
    columns = {"name": listed.split(",") if listed else []}
    for column in ("kind", *_ROW):
        if prefix + column in event.values:
            columns[column] = event.values[prefix + column].split(",")
    for cells in zip(*columns.values(), strict=False):
        yield dict(zip(columns, cells, strict=True))


def _rate(kind: type[_RateT], row: Mapping[str, str]) -> _RateT:
    found: dict[str, str | float | int | None] = {}
    for each in dataclasses.fields(kind):
        text = row[each.name]
        if each.name in ("name", "kind"):
            found[each.name] = text
        elif each.type is int:
            found[each.name] = int(text)
        elif text == "" and each.type is not float:
            found[each.name] = None
        else:
            found[each.name] = _number(text)
    return kind(**found)  # type: ignore[arg-type]


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError(text)
    return value


def _cell(rate: RankRate | HostRate, column: str) -> str:
    value: str | float | int | None = getattr(rate, column, None)
    return "" if value is None else _short(value) if isinstance(value, float) else str(value)


def _short(value: float) -> str:
    return f"{value:.6g}"


def _list(items: Iterable[str]) -> str:
    # A host name has no comma; what else came over the wire must not shift the columns.
    return ",".join(item.replace(",", "_") for item in items)


def mean(intervals: Sequence[FeedInterval]) -> FeedInterval:
    """Several intervals as one, each weighted with its length; what is counted now is the last's.

    Raises:
        ValueError: If there is none.
    """
    if not intervals:
        raise ValueError("no interval")
    whole = sum(each.seconds for each in intervals)
    last = intervals[-1]
    ranks: dict[str, list[tuple[float, RankRate]]] = {}
    hosts: dict[str, list[tuple[float, HostRate]]] = {}
    for each in intervals:
        for rank in each.ranks:
            ranks.setdefault(rank.name, []).append((each.seconds, rank))
        for host in each.hosts:
            hosts.setdefault(host.name, []).append((each.seconds, host))
    return FeedInterval(
        start_seconds=intervals[0].start_seconds,
        seconds=last.start_seconds + last.seconds - intervals[0].start_seconds,
        ranks=tuple(
            RankRate(
                name=name,
                batches_per_second=_total(seen, "batches_per_second") / whole,
                wait_share=_known_mean(seen, "wait_share"),
                queue_depth=_known_mean(seen, "queue_depth"),
                window=seen[-1][1].window,
            )
            for name, seen in ranks.items()
        ),
        hosts=tuple(
            dataclasses.replace(
                seen[-1][1],
                batches_per_second=_total(seen, "batches_per_second") / whole,
                bytes_per_second=_total(seen, "bytes_per_second") / whole,
                busy_workers=_total(seen, "busy_workers") / whole,
                busy_cpus=_total(seen, "busy_cpus") / whole,
                slowest_worker=_known_mean(seen, "slowest_worker"),
                fastest_worker=_known_mean(seen, "fastest_worker"),
                workers=max(host.workers for _, host in seen),
                moved=sum(host.moved for _, host in seen),
                duplicates=sum(host.duplicates for _, host in seen),
            )
            for name, seen in hosts.items()
        ),
    )


def _total(seen: Sequence[tuple[float, RankRate | HostRate]], column: str) -> float:
    return sum(seconds * float(getattr(rate, column)) for seconds, rate in seen)


def _known_mean(seen: Sequence[tuple[float, RankRate | HostRate]], column: str) -> float | None:
    known = [(seconds, getattr(rate, column)) for seconds, rate in seen]
    known = [(seconds, float(value)) for seconds, value in known if value is not None]
    whole = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / whole if whole else None
