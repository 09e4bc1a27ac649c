"""What the kernel counts of processes, quotas, interfaces, storage; 0 where it does not."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from stoker.feed.process_io import bytes_read


class Scheduled(NamedTuple):
    """Seconds that a thread had a CPU, and that it was ready to run while others had it."""

    cpu: float
    queued: float


class Throttling(NamedTuple):
    """Of a control group's CPU quota: periods, those in which it was stopped, and for how long."""

    periods: int = 0
    throttled_periods: int = 0
    throttled_seconds: float = 0.0

    def since(self, before: "Throttling") -> "Throttling":
        """What came after `before`."""
        return Throttling(
            self.periods - before.periods,
            self.throttled_periods - before.throttled_periods,
            self.throttled_seconds - before.throttled_seconds,
        )


def scheduled(thread: str) -> Scheduled | None:
    """Of a thread or a process's first one, by its folder in /proc; None if it has ended."""
    try:
        words = Path(thread, "schedstat").read_bytes().split()
        return Scheduled(int(words[0]) / 1e9, int(words[1]) / 1e9)
    except (OSError, ValueError, IndexError):
        return None


class OwnSchedule:
    """Of the calling thread, read again and again for a few microseconds each; close it."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def queued_seconds(self) -> float:
        """So far; 0 where the kernel does not say."""
        if self._file is None:
            return 0.0
        try:
            return int(os.pread(self._file, 80, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def throttling(group: Path) -> Throttling:
    """How often the quota of `group` stopped it so far."""
    try:
        lines = (group / "cpu.stat").read_text().splitlines()
        counts = {name: int(count) for name, count in (line.split() for line in lines)}
    except (OSError, ValueError):
        return Throttling()
    # Control groups of version 1 count in nanoseconds, those of version 2 in microseconds.
    seconds = counts.get("throttled_time", 0) / 1e9 + counts.get("throttled_usec", 0) / 1e6
    return Throttling(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), seconds)


def received_bytes(table: Path = Path("/proc/self/net/dev")) -> int:
    """Bytes that the network interfaces received so far, loopback left out."""
    try:
        lines = table.read_text().splitlines()[2:]
        columns = [
            (name.strip(), rest) for name, _, rest in (line.partition(":") for line in lines)
        ]
        return sum(int(rest.split()[0]) for name, rest in columns if name != "lo")
    except (OSError, ValueError, IndexError):
        return 0


def read_bytes(pids: Iterable[int]) -> int:
    """Bytes from storage so far, by this process, its ended children, and `pids`."""
    books = [bytes_read(pid) for pid in (None, *pids)]
    return sum(book.fetched for book in books if book)


def storage_stall_seconds(pressure: Path = Path("/proc/pressure/io")) -> float | None:
    """Seconds so far in which some process of the machine waited for storage; None: not known."""
    try:
        line = next(own for own in pressure.read_text().splitlines() if own.startswith("some"))
        return int(line.rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, StopIteration):
        return None
