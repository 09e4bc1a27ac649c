"""How near this host's memory is to its limit, without what the kernel can drop at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.host import machine

_MEMINFO = Path("/proc/meminfo")
# Version 2 and version 1 of cgroups.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
_USED = ("memory.current", "memory.usage_in_bytes")
# Files in the page cache; version 1 tells the sums over the groups below by other names.
_FILES = (("inactive_file", "active_file"), ("total_inactive_file", "total_active_file"))
# Version 1 shows "no limit" as a number of nearly 2**63.
_NO_LIMIT = 1 << 60


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


def memory_use() -> MemoryUse | None:
    """Returns the use that is nearest to its limit, of all cgroups and of the machine.

    Reads some files of at most 10 kB (0.1 to 0.3 ms). None: nothing is known.
    """
    uses = [*_of_groups(), *_of_machine()]
    return max(uses, key=lambda use: use.share, default=None)


def _of_groups() -> Iterator[MemoryUse]:
    for group in machine.memory_groups():
        limit, used = _number(group, _LIMITS), _number(group, _USED)
        if limit is None or used is None or not 0 < limit < _NO_LIMIT:
            continue
        dropped = _droppable(group / "memory.stat")
        yield MemoryUse(max(0, used - dropped), limit, is_cgroups=True)


def _of_machine() -> Iterator[MemoryUse]:
    sizes = {name.rstrip(":"): size for name, size in _pairs(_MEMINFO)}
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total and available is not None:
        kib = 1024
        yield MemoryUse((total - available) * kib, total * kib, is_cgroups=False)


def _droppable(path: Path) -> int:
    sizes = dict(_pairs(path))
    return max(sizes.get(inactive, 0) + sizes.get(active, 0) for inactive, active in _FILES)


def _number(group: Path, names: tuple[str, ...]) -> int | None:
    for name in names:
        text = _text(group / name).strip()
        if text.isdigit():
            return int(text)
    return None


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            yield words[0], int(words[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
