"""How near the memory of a run's hosts came to its limit, and what was swapped out or killed.

Each launcher looks at its own host once a second; other hosts send the leader their highest use
with their heartbeats. Who else fills the machine, or the container, is looked at only where memory
is short, as the kernel then counts the pages of each process.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec
import psutil

from stoker.feed.memory_guard import MemoryShares
from stoker.feed.wire.protocol import MemoryNow, MemoryPeak
from stoker.figures.feed_intervals import ProgressByRank
from stoker.figures.memory_lines import HostMemoryNow
from stoker.host import machine
from stoker.host.memory_usage import (
    MemoryUse,
    is_swapping,
    memory_use,
    process_memory,
    swapped_bytes,
)
from stoker.launch.topology import Topology
from stoker.records import HostMemory
from stoker.repeat import Clock

LOOK_SECONDS = 1.0
# Of the limit: from here on it matters who holds what is in use.
_SHORT = 0.8
# Pages are counted again once so much more of the limit is in use, and in 1% of the time at most.
_MORE = 0.02
_MAX_SHARE = 0.01


def _processes() -> list[int]:
    here = psutil.Process()
    return [here.pid, *(child.pid for child in here.children(recursive=True))]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySources:
    """Where a watch reads what it looks at.

    Attributes:
        use: What is in use, of which limit.
        is_swapping: Whether anything of this machine is swapped out.
        num_kills: Processes of this host's group that the kernel has killed for memory.
        processes: Pids of this launcher and of all below it.
    """

    use: Callable[[], MemoryUse | None] = memory_use
    is_swapping: Callable[[], bool] = is_swapping
    num_kills: Callable[[], int | None] = machine.num_memory_kills
    processes: Callable[[], list[int]] = _processes


class HostMemoryWatch:
    """Looks at this host's memory once a second, and keeps what was highest.

    Args:
        shares: Returns the shares of batches that may wait, now and at least, on a data host.
        sources: What is looked at.
    """

    def __init__(
        self,
        *,
        shares: Callable[[], MemoryShares] = MemoryShares,
        sources: MemorySources | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._shares = shares
        self._sources = sources or MemorySources()
        self._clock = clock
        self._due_at = self._processes_due_at = 0.0
        # The control group may be older than this run.
        self._kills_before = self._sources.num_kills() or 0
        self._peak: MemoryUse | None = None
        self._now: MemoryUse | None = None
        self._ours_bytes: int | None = None
        self._counted_share = 0.0
        self._swapped_bytes = 0

    def look(self) -> bool:
        """Looks if it is due, and returns whether it was.

        Takes a third of a millisecond, and 1% of the time where a machine's memory is short.
        """
        now = self._clock()
        is_due = now >= self._due_at
        if is_due:
            self._due_at = now + LOOK_SECONDS
            self._look(now)
        return is_due

    def peak(self) -> MemoryPeak | None:
        """Returns what was highest so far, after a look if one is due; None: nothing is known."""
        self.look()
        if self._peak is None or self._now is None:
            return None
        shares = self._shares()
        return MemoryPeak(
            limit_bytes=self._peak.limit_bytes,
            peak_bytes=self._peak.used_bytes,
            is_cgroups=self._peak.is_cgroups,
            ours_bytes=self._ours_bytes,
            swapped_bytes=self._swapped_bytes,
            least_share=shares.least,
            kills=max(0, (self._sources.num_kills() or 0) - self._kills_before),
            now=MemoryNow(
                limit_bytes=self._now.limit_bytes,
                used_bytes=self._now.used_bytes,
                waiting_share=shares.now,
            ),
        )

    def _look(self, now: float) -> None:
        use = self._sources.use()
        if use is None:
            return
        self._now = use
        # By share, as the nearest limit may be another one later.
        if self._peak is None or use.share > self._peak.share:
            self._peak = use
        if self._sources.is_swapping():
            swapped = swapped_bytes(self._sources.processes())
            self._swapped_bytes = max(self._swapped_bytes, swapped)
        is_short = use.share >= _SHORT
        if is_short and use.share >= self._counted_share + _MORE and now >= self._processes_due_at:
            self._counted_share = use.share
            self._ours_bytes = self._count_ours()
            seconds = self._clock() - now
            # The count took so many seconds: they are 1% of the time until the next one.
            self._processes_due_at = now + seconds / _MAX_SHARE

    def _count_ours(self) -> int:
        memories = map(process_memory, self._sources.processes())
        return sum(memory.pss_bytes for memory in memories if memory is not None)


class MemoryLog:
    """The highest use of each host; other threads may add to it."""

    def __init__(self) -> None:
        self._peaks: dict[str, MemoryPeak] = {}

    def add(self, host: str, peak: MemoryPeak | None) -> None:
        """Adds what a host has seen so far; None: nothing. A host may have begun again."""
        if peak is None:
            return
        before = self._peaks.get(host)
        if before is not None:
            peak = _higher(before, peak)
        self._peaks[host] = peak

    def hosts(self, trainers: Mapping[str, Iterable[float]]) -> tuple[HostMemory, ...]:
        """Returns the record of each host.

        Args:
            trainers: The least share of batches that could wait, of each rank, by its host.
        """
        return tuple(
            _record(host, peak, trainers.get(host, ()))
            for host, peak in sorted(self._peaks.items())
        )

    def now(self, trainers: Mapping[str, Iterable[float]]) -> tuple[HostMemoryNow, ...]:
        """Returns what each host has in use now, as it said last.

        Args:
            trainers: The share of batches that may wait, of each rank, by its host.
        """
        memories = []
        for host, peak in sorted(self._peaks.items()):
            if peak.now is not None:
                memories.append(
                    HostMemoryNow(
                        host=host,
                        used_bytes=peak.now.used_bytes,
                        limit_bytes=peak.now.limit_bytes,
                        peak_bytes=peak.peak_bytes,
                        waiting_share=min([peak.now.waiting_share, *trainers.get(host, ())]),
                        kills=peak.kills,
                    )
                )
        return tuple(memories)


def _higher(before: MemoryPeak, peak: MemoryPeak) -> MemoryPeak:
    highest = max(before, peak, key=lambda one: one.peak_bytes / one.limit_bytes)
    # A report without a count does not undo an earlier one.
    ours = peak.ours_bytes
    if ours is None:
        ours = before.ours_bytes
    return msgspec.structs.replace(
        highest,
        ours_bytes=ours,
        swapped_bytes=max(before.swapped_bytes, peak.swapped_bytes),
        least_share=min(before.least_share, peak.least_share),
        kills=max(before.kills, peak.kills),
        now=peak.now,
    )


def _record(host: str, peak: MemoryPeak, trainers: Iterable[float]) -> HostMemory:
    return HostMemory(
        host=host,
        limit_bytes=peak.limit_bytes,
        peak_bytes=peak.peak_bytes,
        limited_by="cgroup" if peak.is_cgroups else "machine",
        ours_bytes=peak.ours_bytes,
        swapped_bytes=peak.swapped_bytes,
        least_share=min([peak.least_share, *trainers]),
        kills=peak.kills,
    )


def memory_shares(
    topology: Topology,
    progress: ProgressByRank,
    processes_per_host: int,
    *,
    of: Literal["memory_share", "least_memory_share"],
) -> dict[str, list[float]]:
    """Returns the share of batches that may wait, of each rank, by its host.

    Args:
        topology: The run's dnn hosts.
        progress: What the ranks have reported.
        processes_per_host: Ranks of each dnn host.
        of: The share now, or the least so far.
    """
    shares: dict[str, list[float]] = {host: [] for host in topology.dnn_hosts}
    for rank, report in progress.items():
        # Ranks are numbered host by host.
        place = rank // max(1, processes_per_host)
        if place < len(topology.dnn_hosts):
            shares[topology.dnn_hosts[place]].append(getattr(report, of))
    return shares
