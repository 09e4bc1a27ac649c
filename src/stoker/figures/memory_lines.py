"""The memory of a run's hosts now: a line of the leader's log, which `stoker watch` reads."""

import csv
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from io import StringIO
from typing import Annotated

import msgspec

from stoker.figures.feed_intervals import interval_of
from stoker.logs import EventName, Log, LogEvent
from stoker.record_words import short_memory_words
from stoker.records.profile import NEAR_LIMIT
from stoker.units import percentage, size

# Container runtimes cut lines at 16 KiB.
_HOSTS_IN_A_LINE = 100


class HostMemoryNow(msgspec.Struct, frozen=True, kw_only=True):
    """What a host's memory has in use now, without files that the kernel drops before it kills.

    Attributes:
        limit_bytes: The limit that is nearest now: a control group's, or the machine's memory.
        peak_bytes: Highest use so far.
        waiting_share: The share of `feed.max_bytes` that may wait.
        kills: Processes that the kernel has killed for memory.
    """

    host: str
    used_bytes: Annotated[int, msgspec.Meta(ge=0)]
    limit_bytes: Annotated[int, msgspec.Meta(gt=0)]
    peak_bytes: Annotated[int, msgspec.Meta(ge=0)]
    waiting_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    kills: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def share(self) -> float:
        """Share of the limit that is in use."""
        return self.used_bytes / self.limit_bytes

    @property
    def is_short(self) -> bool:
        """Whether it is short now, or a process was killed for it."""
        return self.share >= NEAR_LIMIT or self.waiting_share < 1 or self.kills > 0

    @property
    def words(self) -> str:
        """`14.9 GB of 16.0 GB (93%), at most 15.2 GB; ...`: with what comes of it."""
        felt = short_memory_words(least_share=self.waiting_share, kills=self.kills)
        used = f"{size(self.used_bytes)} of {size(self.limit_bytes)} ({percentage(self.share)})"
        return f"{used}, at most {size(self.peak_bytes)}{felt}"


def memories_in(event: LogEvent) -> tuple[HostMemoryNow, ...]:
    """Returns the hosts of a `host_memory` line, the nearest to their limits first.

    Empty for another or a broken line.
    """
    if event.event != EventName.HOST_MEMORY:
        return ()
    rows = csv.reader(event.values.get("rows", "").split())
    names = HostMemoryNow.__struct_fields__
    try:
        cells = [dict(zip(names, row, strict=True)) for row in rows]
        memories = msgspec.convert(cells, list[HostMemoryNow], strict=False)
    except (msgspec.ValidationError, ValueError, csv.Error):
        return ()
    return tuple(sorted(memories, key=lambda memory: -memory.share))


def nearest_words(memories: Sequence[HostMemoryNow]) -> str:
    """Returns a short host's state in some words, that of the one nearest to its limit.

    Empty: no host is short.
    """
    short = [memory for memory in memories if memory.is_short]
    if not short:
        return ""
    nearest = max(short, key=lambda memory: memory.share)
    return f"memory {percentage(nearest.share)} full on {nearest.host}"


@dataclass(eq=False)
class MemoryLines:
    """Logs the memory of all hosts where it has changed, as often as the feed's rates at most."""

    log: Log
    _: KW_ONLY
    hosts: Callable[[], Sequence[HostMemoryNow]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began = self._looked_at = self.clock()
        self._logged: list[tuple[object, ...]] = []

    def tick(self) -> None:
        """Logs the line if it is due, and a host has a hundredth of its limit more or less."""
        now = self.clock()
        if now - self._looked_at < interval_of(now - self._began):
            return
        self._looked_at = now
        hosts = self.hosts()[:_HOSTS_IN_A_LINE]
        shown = [_shown(memory) for memory in hosts]
        if shown == self._logged:
            return
        self._logged = shown
        text = StringIO()
        csv.writer(text, lineterminator="\n").writerows(map(msgspec.structs.astuple, hosts))
        self.log.event(EventName.HOST_MEMORY, rows=text.getvalue())

    def close(self) -> None:
        """Does nothing: the latest line is as good as a last one."""


def _shown(memory: HostMemoryNow) -> tuple[object, ...]:
    return (memory.host, percentage(memory.share), memory.waiting_share, memory.kills)
