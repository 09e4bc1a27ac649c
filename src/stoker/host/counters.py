"""Counters of the kernel: CPU time, quotas, network, storage and page cache."""

import contextlib
import operator
import os
import resource
import stat
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from stoker.host.machine import group_cpu_seconds, limiting_group, process_clock, thread_clock
from stoker.host.processes import descendant_pids

_CODE = (".py", ".pyc", ".pyi", ".so", ".pth", ".toml", ".egg-link")
_MAX_FILES = 20_000
# Dropping a larger file may cost other processes more than the measurement is worth.
_MAX_FILE_BYTES = 16 << 30
_MODE_ARGUMENT = 1


class BytesRead(NamedTuple):
    """Bytes that a process has read: `asked` by read calls, `fetched` from storage."""

    asked: int
    fetched: int


def bytes_read(pid: int | None = None) -> BytesRead | None:
    """Returns what process `pid`, else this one, has read; None if the kernel does not say."""
    try:
        rows = [line.split() for line in Path(f"/proc/{pid or 'self'}/io").read_text().splitlines()]
        counts = {name: int(value) for name, value in rows}
        return BytesRead(asked=counts["rchar:"], fetched=counts["read_bytes:"])
    except (OSError, ValueError, KeyError):
        return None


class Scheduled(NamedTuple):
    """Seconds a thread ran, and seconds it waited for a CPU."""

    cpu: float
    queued: float


class Throttling(NamedTuple):
    """Periods of a control group's CPU quota, periods in which it was stopped, and for how long."""

    periods: int = 0
    throttled_periods: int = 0
    throttled_seconds: float = 0.0

    def since(self, before: "Throttling") -> "Throttling":
        return Throttling(*map(operator.sub, self, before))


def scheduled(thread: str) -> Scheduled | None:
    """Returns the times of a thread, by its folder in /proc; None if it has ended."""
    try:
        words = Path(thread, "schedstat").read_bytes().split()
        return Scheduled(int(words[0]) / 1e9, int(words[1]) / 1e9)
    except (OSError, ValueError, IndexError):
        return None


class OwnSchedule:
    """The calling thread's waiting time, read within a few microseconds; to be closed."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def queued_seconds(self) -> float:
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 80, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def throttling(group: Path) -> Throttling:
    """Returns how often and how long the quota of `group` has stopped it so far."""
    try:
        lines = (group / "cpu.stat").read_text().splitlines()
        words = map(str.split, lines)
        counts = {name: int(count) for name, count in words}
    except (OSError, ValueError):
        return Throttling()
    # Version 1 counts in nanoseconds, version 2 in microseconds.
    seconds = counts.get("throttled_time", 0) / 1e9 + counts.get("throttled_usec", 0) / 1e6
    return Throttling(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), seconds)


def received_bytes(table: Path = Path("/proc/self/net/dev")) -> int:
    try:
        rows = [line.partition(":") for line in table.read_text().splitlines()[2:]]
        return sum(int(rest.split()[0]) for name, _, rest in rows if name.strip() != "lo")
    except (OSError, ValueError, IndexError):
        return 0


def storage_stall_seconds(pressure: Path = Path("/proc/pressure/io")) -> float | None:
    try:
        line = next(row for row in pressure.read_text().splitlines() if row.startswith("some"))
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, StopIteration):
        return None


def children_cpu_seconds() -> float:
    """Returns CPU-seconds of all processes below this one, with those that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    live = sum(_whole_cpu_seconds(pid) for pid in descendant_pids())
    return ended.ru_utime + ended.ru_stime + live


class StrayCpu(NamedTuple):
    """CPU-seconds of processes that may use vCPUs beyond this one's; `inside` may be on its own."""

    seconds: float = 0.0
    inside: float = 0.0


class StrayProcesses:
    """Processes below this one whose CPU affinity goes beyond its vCPUs, as a compiler's helpers.

    How much they use of this process's vCPUs is not counted by the kernel: at most the share of
    their vCPUs that these are. A process that starts and ends between two looks is not seen.
    """

    def __init__(self) -> None:
        self._seen: dict[int, float] | None = None
        self._total = StrayCpu()

    def cpu_seconds(self) -> StrayCpu:
        """Returns their CPU-seconds since the first call; takes milliseconds."""
        if not hasattr(os, "sched_getaffinity"):
            return self._total
        own_cpus = os.sched_getaffinity(0)
        if len(own_cpus) >= (os.cpu_count() or 1):
            # There is nothing beyond: no process is looked at.
            return self._total
        before = self._seen
        seen = {}
        for pid in descendant_pids():
            seen[pid] = _whole_cpu_seconds(pid)
            cpus = _affinity(pid)
            if before is not None and cpus - own_cpus:
                used = max(0.0, seen[pid] - before.get(pid, 0.0))
                inside = used * len(cpus & own_cpus) / len(cpus)
                self._total = StrayCpu(self._total.seconds + used, self._total.inside + inside)
        self._seen = seen
        return self._total


def _affinity(pid: int) -> set[int]:
    try:
        return os.sched_getaffinity(pid)
    except OSError:
        return set()


def _whole_cpu_seconds(pid: int) -> float:
    """Returns CPU-seconds of a process and of its children that it has waited for.

    Without these a helper's children would count only when the helper itself has ended: all at
    once, in another step than the one in which they ran.
    """
    return _process_cpu_seconds(pid) + _waited_for_seconds(pid)


def _waited_for_seconds(pid: int) -> float:
    try:
        stat_line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    # The name before the bracket may hold spaces. Fields 16 and 17, in ticks of the kernel.
    fields = stat_line.rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def _process_cpu_seconds(pid: int) -> float:
    seconds = process_clock(pid)
    # None on macOS, and for a process that has ended.
    if seconds is None:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            return times.user + times.system
    return seconds or 0.0


def machine_cpu_seconds() -> float:
    """Returns CPU-seconds of all processes that share the vCPUs of this one.

    Where a control group's quota limits this process, only that group counts; if the kernel does
    not count it, this process and those below it. Otherwise the whole machine, on the same vCPUs.
    """
    group = limiting_group()
    if group is not None:
        seconds = group_cpu_seconds(group)
        if seconds is None:
            return time.process_time() + children_cpu_seconds()
        return seconds
    cpus = psutil.cpu_times(percpu=True)
    return sum(_busy(cpus[cpu]._asdict()) for cpu in _own_cpus(len(cpus)))


def others_cpu_seconds() -> float:
    """Returns CPU-seconds of programs on this process's vCPUs that are not below it."""
    own_seconds = time.process_time() + children_cpu_seconds()
    return machine_cpu_seconds() - own_seconds


def elsewhere_cpu_seconds() -> float:
    """Returns CPU-seconds on the machine's vCPUs that this process may not use."""
    cpus = psutil.cpu_times(percpu=True)
    others = set(range(len(cpus))) - _own_cpus(len(cpus))
    return sum(_busy(cpus[cpu]._asdict()) for cpu in others)


def _own_cpus(count: int) -> set[int]:
    cpus = set(range(count))
    if hasattr(os, "sched_getaffinity"):
        return cpus & os.sched_getaffinity(0)
    return cpus


def _busy(times: Mapping[str, float]) -> float:
    # user includes guests; steal is the time that other virtual machines took.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(seconds for name, seconds in times.items() if name not in idle)


def queued_seconds() -> float:
    times = scheduled("/proc/self")
    if times:
        return times.queued
    return 0.0


def threads_cpu_seconds(ids: set[int]) -> float:
    return sum(thread_clock(tid) or 0.0 for tid in ids)


class OpenedFiles:
    """Files that this process opens from now on.

    An audit hook cannot be removed: only for processes that end soon. Files that a C library opens
    are seen only while they are open.
    """

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        sys.addaudithook(self._add)

    def _add(self, event: str, arguments: tuple[object, ...]) -> None:
        # Runs in any thread that opens a file: an error would be raised there.
        if event == "open" and len(self._names) < _MAX_FILES:
            name = arguments[0]
            if isinstance(name, bytes):
                name = os.fsdecode(name)
            if isinstance(name, str):
                self._names[name] = None

    def paths(self) -> list[Path]:
        """Returns the regular files with data, including those open or mapped now."""
        names = [*list(self._names), *_open_now(), *_mapped()]
        real = dict.fromkeys(os.path.realpath(name) for name in names)
        return [Path(name) for name in real if _is_data(name)]


def drop_cached(paths: Iterable[Path]) -> int:
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in paths:
        with contextlib.suppress(OSError):
            # O_NONBLOCK: the path may be a pipe by now.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += 1
            finally:
                os.close(descriptor)
    return dropped


def _open_now() -> list[str]:
    folder = "/proc/self/fd"
    files = []
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                files.append(os.readlink(f"{folder}/{number}"))
    return files


def _mapped() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    words = [line.split(maxsplit=5) for line in lines]
    return [fields[5] for fields in words if len(fields) == 6 and "x" not in fields[_MODE_ARGUMENT]]


def _is_data(name: str) -> bool:
    if not name.startswith("/") or name.startswith(("/proc/", "/sys/", "/dev/")):
        return False
    if name.endswith(_CODE) or ".so." in name:
        return False
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(status.st_mode) and 0 < status.st_size <= _MAX_FILE_BYTES
