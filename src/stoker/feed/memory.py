"""Memory: what this host has, and how much of it batches may take that wait."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from stoker.records import FeedSettings

CGROUP = Path("/sys/fs/cgroup")
# Of a host's memory, for batches that wait, where `feed.max_bytes` does not say it: the training,
# its pinned copies and the page cache want the rest.
DEFAULT_SHARE = 0.25
# Of a batch before any has come: larger than most, so that the first ones do not fill the memory.
UNKNOWN_BATCH_BYTES = 64 << 20


class Holding(Protocol):
    """One loader's batches."""

    @property
    def committed_bytes(self) -> int:
        """Of the batches that wait, and of those under way as far as can be known."""
        ...


def host_bytes() -> int:
    """The memory limit of this cgroup, else the memory of the machine."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(limit_bytes() or physical, physical)


def limit_bytes() -> int | None:
    """The memory limit of this cgroup, where there is one."""
    for group in memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            for line in lines_of(group / name):
                if line.isdigit() and int(line) < 1 << 60:
                    return int(line)
    return None


def max_bytes(feed: FeedSettings) -> int:
    """Bytes of batches that may wait in this host, for all its loaders and ranks together."""
    return feed.max_bytes or int(host_bytes() * DEFAULT_SHARE)


def max_message_bytes(feed: FeedSettings) -> int:
    """Of one batch on the wire: one always goes, but for one that this host cannot hold at all."""
    return max(max_bytes(feed), host_bytes()) + (16 << 20)


def allowance(total_bytes: int, *, others: Iterable[Holding]) -> int:
    """What one loader's batches may take, beside those of the other loaders of its process.

    An equal part, and no more than is free: together they stay within `total_bytes` (but that each
    may have one batch), also while a new one joins.

    Args:
        total_bytes: Of the process.
        others: The other loaders that are iterated over now.
    """
    taken = [other.committed_bytes for other in others]
    return max(0, min(total_bytes // (len(taken) + 1), total_bytes - sum(taken)))


def memory_groups() -> list[Path]:
    """Folders that may describe this process's memory cgroup, the nearest first."""
    groups = []
    for line in lines_of(Path("/proc/self/cgroup")):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            groups.append(CGROUP / "memory" / path.lstrip("/"))
        elif not controllers:
            groups.append(CGROUP / path.lstrip("/"))
    return [*groups, CGROUP, CGROUP / "memory"]


def lines_of(path: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
