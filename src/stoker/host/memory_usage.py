"""How near this host's memory is to its limit, what processes hold of it, and what is paged.

Files in the page cache, which the kernel drops before it kills, are no part of what is in use.
"""

import ctypes
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from stoker.host import machine

_MEMINFO = Path("/proc/meminfo")
_VMSTAT = Path("/proc/vmstat")
_OWN_STATUS = Path("/proc/self/status")
_KIB = 1024
# Version 2 and version 1 of cgroups.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# Version 2 alone: above it the kernel slows the processes of a group, and takes pages from them.
_SLOWING = ("memory.high",)
_USED = ("memory.current", "memory.usage_in_bytes")
# Files in the page cache; version 1 tells the sums over the groups below by other names.
_FILES = (("inactive_file", "active_file"), ("total_inactive_file", "total_active_file"))
# Inodes and names of many small files. Version 1 counts them as used, and does not tell how many.
_DROPPABLE_KERNEL_MEMORY = "slab_reclaimable"
# Refaults of files; until Linux 5.9 there were no others.
_REFAULTS = ("workingset_refault_file", "workingset_refault")
# What goes to compressed memory in front of a swap file (zswap) is counted apart.
_SWAPPED_IN = ("pswpin", "zswpin")
_SWAPPED_OUT = ("pswpout", "zswpout")
# What a group may have in swap, and has: version 2. Version 1 limits both together.
_SWAP_LIMIT = ("memory.swap.max",)
_SWAP_USED = ("memory.swap.current",)
_LIMIT_WITH_SWAP = ("memory.memsw.limit_in_bytes",)
# Version 1 shows "no limit" as a number of nearly 2**63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory that is in use, of what may be used.

    Attributes:
        used_bytes: Without files in the page cache, which the kernel drops before it kills.
        limit_bytes: Of a cgroup, or the machine's memory.
        is_cgroups: Whether the limit is a cgroup's.
        only_slows: Whether the kernel slows processes there, and kills none (`memory.high`).
    """

    used_bytes: int
    limit_bytes: int
    is_cgroups: bool
    only_slows: bool = False

    @property
    def share(self) -> float:
        return self.used_bytes / self.limit_bytes

    @property
    def room_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """Memory of a process, in bytes, as `smaps_rollup` has it.

    Attributes:
        pss_bytes: Resident; a page that several processes share is divided among them.
        private_bytes: Written by this process, and shared with no other one.
        anonymous_bytes: Resident without files and shared memory, inherited pages included.
        swapped_bytes: Swapped out.
        pss_anonymous_bytes: As `pss_bytes`, of `anonymous_bytes`; None: before Linux 4.20.
    """

    pss_bytes: int
    private_bytes: int
    anonymous_bytes: int
    swapped_bytes: int
    pss_anonymous_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Paging:
    """What the kernel had to read again so far, of this process's group or of the machine.

    Attributes:
        refaulted_bytes: Pages of files that had been thrown out of the page cache shortly before.
        major_faults: Accesses to memory that waited for a disk.
        swapped_in_bytes: Of the machine.
        swapped_out_bytes: Of the machine.
    """

    refaulted_bytes: int
    major_faults: int
    swapped_in_bytes: int
    swapped_out_bytes: int


def process_memory(pid: int) -> ProcessMemory | None:
    """Returns the memory of a process; None: it has ended, or may not be looked at.

    The kernel walks all its pages: 2 ms for 0.1 GB, about 10 ms for a GB.
    """
    sizes = {
        name.rstrip(":"): kib * _KIB for name, kib in _pairs(Path(f"/proc/{pid}/smaps_rollup"))
    }
    if "Pss" not in sizes:
        return None
    return ProcessMemory(
        pss_bytes=sizes["Pss"],
        private_bytes=sizes.get("Private_Dirty", 0),
        anonymous_bytes=sizes.get("Anonymous", 0),
        swapped_bytes=sizes.get("Swap", 0),
        pss_anonymous_bytes=sizes.get("Pss_Anon"),
    )


def written_bytes(pid: int | None = None) -> int:
    """Returns a process's memory without files, swapped out or not; takes 0.05 ms.

    Batches that workers wrote into shared memory are part of it while the process holds them.

    Args:
        pid: Of the process; None: this one.
    """
    sizes = dict(_pairs(Path(f"/proc/{pid or 'self'}/status")))
    return sum(sizes.get(name, 0) for name in ("RssAnon:", "RssShmem:", "VmSwap:")) * _KIB


class _MallocFigures(ctypes.Structure):
    """What `mallinfo2` of glibc tells: ten sizes, of which the ninth is free."""

    _fields_: ClassVar = [("before", ctypes.c_size_t * 8), ("free", ctypes.c_size_t * 2)]


def asked_bytes() -> int:
    """Returns the memory that this process has asked for and not freed, written or not.

    An array of zeros has all of its memory from the beginning, and its pages as they are written.
    What was freed and glibc keeps is left out, from glibc 2.33 on. Takes 0.05 ms, and more where
    glibc keeps many pieces.
    """
    sizes = dict(_pairs(_OWN_STATUS))
    reserved = sum(sizes.get(name, 0) for name in ("VmData:", "RssShmem:")) * _KIB
    return reserved - _free_in_malloc()


def _free_in_malloc() -> int:
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo is None:
        return 0
    mallinfo.restype = _MallocFigures
    return int(mallinfo().free[0])


def give_back_freed() -> None:
    """Gives pages back that this process has freed, and that glibc keeps for later.

    Takes a millisecond or so for each 100 MB; does nothing with other allocators.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def is_swapping() -> bool:
    """Returns whether anything of this machine is swapped out."""
    sizes = dict(_pairs(_MEMINFO))
    return sizes.get("SwapTotal:", 0) > sizes.get("SwapFree:", 0)


def swap_room_bytes() -> int:
    """Returns what may still be swapped out of this process's group; 0: the kernel kills first."""
    room = dict(_pairs(_MEMINFO)).get("SwapFree:", 0) * _KIB
    for group in dict.fromkeys(machine.memory_groups()):
        limit = _number(group, _SWAP_LIMIT)
        both = _number(group, _LIMIT_WITH_SWAP)
        if limit is not None:
            room = min(room, limit - (_number(group, _SWAP_USED) or 0))
        elif both is not None and both < _NO_LIMIT:
            room = min(room, both - (_number(group, _LIMITS) or 0))
    return max(0, room)


def swapped_bytes(pids: Iterable[int]) -> int:
    """Returns what of these processes is swapped out; takes 0.03 ms for each of them."""
    statuses = (dict(_pairs(Path(f"/proc/{pid}/status"))) for pid in pids)
    return sum(status.get("VmSwap:", 0) for status in statuses) * _KIB


def paging() -> Paging:
    """Returns what was paged so far: files by this process's group, if it counts, and swap."""
    whole = dict(_pairs(_VMSTAT))
    counts = next(filter(None, map(_refaults, _counters(whole))), (0, 0))
    page = os.sysconf("SC_PAGE_SIZE")
    return Paging(
        refaulted_bytes=counts[0] * page,
        major_faults=counts[1],
        swapped_in_bytes=sum(whole.get(name, 0) for name in _SWAPPED_IN) * page,
        swapped_out_bytes=sum(whole.get(name, 0) for name in _SWAPPED_OUT) * page,
    )


def group_shared_bytes() -> int | None:
    """Returns the shared memory of this process's group, with files in memory; None: unknown."""
    for group in machine.memory_groups():
        sizes = dict(_pairs(group / "memory.stat"))
        # Version 1 has sums over the groups below by names that begin with "total_".
        shared = sizes.get("total_shmem", sizes.get("shmem"))
        if shared is not None:
            return shared
    return None


def memory_use() -> MemoryUse | None:
    """Returns the use that is nearest to its limit, of all cgroups and of the machine.

    Reads a few small files (0.1 to 0.2 ms). None: nothing is known.
    """
    return max(memory_uses(), key=lambda use: use.share, default=None)


def memory_uses() -> list[MemoryUse]:
    """Returns the use of each cgroup that has a limit, and of the machine."""
    return [*_of_groups(), *_of_machine()]


def room_bytes(available_bytes: int) -> int:
    """Returns what may still be used before a limit, and no more than the machine has available."""
    return min([available_bytes, *(max(0, use.room_bytes) for use in memory_uses())])


def _of_groups() -> Iterator[MemoryUse]:
    # A folder may be found in two ways.
    for group in dict.fromkeys(machine.memory_groups()):
        # First, as most groups have none, and what is used takes ten times as long to read.
        limits = [(names, _number(group, names)) for names in (_LIMITS, _SLOWING)]
        bounds = [(names, limit) for names, limit in limits if limit and limit < _NO_LIMIT]
        used = _number(group, _USED) if bounds else None
        if used is None:
            continue
        used = max(0, used - _droppable(group / "memory.stat"))
        for names, limit in bounds:
            yield MemoryUse(used, limit, is_cgroups=True, only_slows=names == _SLOWING)


def _of_machine() -> Iterator[MemoryUse]:
    sizes = {name.rstrip(":"): kib for name, kib in _pairs(_MEMINFO)}
    total = sizes.get("MemTotal")
    available = sizes.get("MemAvailable")
    if total and available is not None:
        yield MemoryUse((total - available) * _KIB, total * _KIB, is_cgroups=False)


def _counters(of_machine: dict[str, int]) -> Iterator[dict[str, int]]:
    """Yields the counters of this process's groups, the nearest first, then the machine's."""
    for group in machine.memory_groups():
        yield dict(_pairs(group / "memory.stat"))
    yield of_machine


def _refaults(counters: dict[str, int]) -> tuple[int, int] | None:
    # Version 1 has sums over the groups below by names that begin with "total_".
    for prefix in ("total_", ""):
        for name in _REFAULTS:
            refaults = counters.get(prefix + name)
            if refaults is not None:
                return refaults, counters.get(f"{prefix}pgmajfault", 0)
    return None


def _droppable(path: Path) -> int:
    sizes = dict(_pairs(path))
    files = max(sizes.get(inactive, 0) + sizes.get(active, 0) for inactive, active in _FILES)
    return files + sizes.get(_DROPPABLE_KERNEL_MEMORY, 0)


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
        # Without a buffer it takes a third of the time of `read_text`.
        with open(path, "rb", buffering=0) as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
