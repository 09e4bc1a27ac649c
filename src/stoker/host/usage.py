"""What this host has in use: CPU time, time in the run queue, what a quota stopped, and memory.

Files in the page cache, which the kernel drops before it kills, are no part of the memory in use.
"""

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stoker.host.machine import (
    group_cpu_seconds,
    groups_of,
    num_cpus,
    number_in,
    numbers_in,
    vcpu_capacity,
)


def thread_seconds(task: str = "/proc/self") -> tuple[float, float]:
    """Returns the seconds for which a thread, by its folder in /proc, ran and waited for a CPU."""
    try:
        ran, queued, _ = Path(task, "schedstat").read_bytes().split()
    except (OSError, ValueError):
        return 0.0, 0.0
    return int(ran) / 1e9, int(queued) / 1e9


def throttling(group: Path) -> tuple[float, int, int]:
    """Returns for how long the quota of `group` has stopped it so far, in how many periods of all.

    Version 1 of cgroups counts in nanoseconds, version 2 in microseconds.
    """
    counts = numbers_in(group / "cpu.stat")
    seconds = counts.get("throttled_time", 0) / 1e9 + counts.get("throttled_usec", 0) / 1e6
    return seconds, counts.get("nr_throttled", 0), counts.get("nr_periods", 0)


def children_cpu_seconds() -> float:
    """Returns CPU-seconds of all processes below this one, with those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = ended.ru_utime + ended.ru_stime
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds


def machine_cpu_seconds() -> float:
    """Returns CPU-seconds of all processes on the vCPUs of this one.

    Where a quota or its pod's request limits this process, only its group counts; if the kernel
    does not count it, this process and those below it.
    """
    if vcpu_capacity() < num_cpus():
        own = [group_cpu_seconds(group) for group in groups_of("cpu")[:1]]
        return next(filter(None, own), time.process_time() + children_cpu_seconds())
    times = psutil.cpu_times(percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(times))
    busy = 0.0
    for cpu in allowed:
        # user includes guests; steal is the time that other virtual machines took.
        fields = times[cpu]._asdict()
        idle = sum(fields.get(name, 0.0) for name in ("idle", "iowait", "guest", "guest_nice"))
        busy += sum(fields.values()) - idle
    return busy


# Version 2 and version 1 of cgroups; above the last the kernel slows the processes of a group.
_LIMITS = (("memory.max", "memory.limit_in_bytes"), ("memory.high",))
_USED = ("memory.current", "memory.usage_in_bytes")
# Files in the page cache; version 1 tells the sums over the groups below by other names.
_FILES = ("inactive_file", "active_file")
# Inodes and names of many small files. Version 1 counts them as used, and does not tell how many.
_DROPPABLE_KERNEL_MEMORY = "slab_reclaimable"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that is in use, of what may be used.

    Attributes:
        used_bytes: Without files in the page cache, which the kernel drops before it kills.
        limit_bytes: Of a cgroup, or the machine's memory.
        is_cgroups: Whether the limit is a cgroup's.
    """

    used_bytes: int
    limit_bytes: int
    is_cgroups: bool

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes


def memory_use() -> MemoryUse:
    """Returns the use that is nearest to its limit, of all cgroups and of the machine.

    Reads a few small files (0.1 to 0.2 ms).
    """
    return max(_uses(), key=lambda use: use.share)


def room_bytes() -> int:
    """Returns what may still be used before a limit."""
    return max(0, min(use.limit_bytes - use.used_bytes for use in _uses()))


def _uses() -> Iterator[MemoryUse]:
    for group in groups_of("memory"):
        # First, as most groups have none, and what is used takes ten times as long to read.
        limits = [limit for names in _LIMITS if (limit := number_in(group, *names))]
        used = number_in(group, *_USED) if limits else None
        if used is not None:
            sizes = numbers_in(group / "memory.stat")
            files = sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in _FILES)
            used = max(0, used - files - sizes.get(_DROPPABLE_KERNEL_MEMORY, 0))
            yield from (MemoryUse(used, limit, is_cgroups=True) for limit in limits)
    machine = psutil.virtual_memory()
    yield MemoryUse(machine.total - machine.available, machine.total, is_cgroups=False)
