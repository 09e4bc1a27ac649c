"""Who else holds this host's memory: other programs, and files in folders that are memory."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stoker.host.memory_usage import written_bytes

_MOUNTS = Path("/proc/self/mounts")
# Batches on their way, and semaphores.
_OF_WORKERS = ("torch_", "psm_", "sem.", "pymp-")
# Looked at in a folder: 0.2 s.
_MAX_FILES = 100_000
_OWN_NAME = "stoker"
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class HeldMemory:
    """Memory that something else than the run holds.

    Attributes:
        holder: Name of the program that holds most, or the folder. Empty: nothing is held.
    """

    num_bytes: int = 0
    holder: str = ""


def files_in_memory(*, least_bytes: int, mounts: Path = _MOUNTS) -> HeldMemory:
    """Returns the files of the folder in memory (tmpfs) that has most, as of a copied data set.

    Args:
        least_bytes: Folders with less are not looked at.
        mounts: The kernel's list of file systems.
    """
    most = HeldMemory()
    for folder in _folders_in_memory(mounts):
        # Files without a name, such as batches, are among them.
        if _used_bytes(folder) >= least_bytes:
            held = HeldMemory(_file_bytes(folder), folder)
            most = max(most, held, key=lambda one: one.num_bytes)
    return most


def other_programs(*, everywhere: bool = False) -> HeldMemory:
    """Returns what programs of this process's control group hold, but for the run's own.

    Takes 0.05 ms for each process of the machine.

    Args:
        everywhere: Programs of other groups count as well.
    """
    here = psutil.Process()
    ours = {process.pid for process in _own_tree(here)}
    group = _group_of(here.pid)
    total = largest = 0
    name = ""
    for process in psutil.process_iter():
        is_near = everywhere or _group_of(process.pid) == group
        if process.pid in ours or not is_near:
            continue
        num_bytes = written_bytes(process.pid)
        total += num_bytes
        if num_bytes > largest:
            largest = num_bytes
            name = _name_of(process)
    return HeldMemory(total, name)


def _own_tree(here: psutil.Process) -> list[psutil.Process]:
    """Returns the topmost command of stoker that leads to this process, and all below it."""
    top = here
    for parent in here.parents():
        if _is_own(parent):
            top = parent
    return [top, *top.children(recursive=True)]


def _is_own(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    # As `stoker train`, `python -m stoker.cli` or a launcher's module.
    return any(Path(word).name.split(".")[0] == _OWN_NAME for word in words[:4])


def _name_of(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _group_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _folders_in_memory(mounts: Path) -> Iterator[str]:
    try:
        lines = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.split()
        if len(words) >= 3 and words[2] == "tmpfs":
            yield words[1]


def _used_bytes(folder: str) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return (status.f_blocks - status.f_bfree) * status.f_frsize


def _file_bytes(folder: str) -> int:
    total = num_files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            num_files += 1
            if num_files > _MAX_FILES:
                return total
            if not name.startswith(_OF_WORKERS):
                total += _size_of(os.path.join(parent, name))
    return total


def _size_of(file: str) -> int:
    try:
        return os.lstat(file).st_blocks * _BLOCK
    except OSError:
        return 0
