"""Limits of this host's processes: files, tasks, address space; and those that are too low."""

import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from stoker.host.machine import task_groups

# A host of a run with others: its connections, its children's pipes.
MIN_FILES = 48
# Measured: a data host needs 12, a dnn host 20, each with one worker.
MIN_TASKS = {"data": 12, "dnn": 20}
# Below it no library of training can be loaded.
MIN_ADDRESS_BYTES = 1 << 30
_FIX_OF_TASKS = (
    "raise the limit: ulimit -u, the container's --pids-limit, or the kubelet's podPidsLimit"
)
_FIX_OF_FILES = "raise the limit of open files (ulimit -n 65536)"
_FIX_OF_ADDRESSES = (
    "take the limit away (ulimit -v unlimited); the container's memory limit is kept"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLimits:
    """What processes of this host may still have; None: no limit.

    Attributes:
        files: Files that one process may have open.
        tasks: Threads and processes that may still be started.
        tasks_of: What limits them.
        address_bytes: Address space of one process.
    """

    files: int | None = None
    tasks: int | None = None
    tasks_of: str = ""
    address_bytes: int | None = None


def too_low(limits: HostLimits, *, role: str) -> tuple[str, str] | None:
    """Returns which limit is below what a host of this role needs, and what to set; None: none."""
    least = MIN_TASKS[role]
    if limits.tasks is not None and limits.tasks < least:
        room = max(limits.tasks, 0)
        what = f"only {room} more threads and processes may be started ({limits.tasks_of})"
        return f"{what}, a {role} host needs {least}", _FIX_OF_TASKS
    if limits.files is not None and limits.files < MIN_FILES:
        what = f"at most {limits.files} files may be open at a time"
        return f"{what}, a {role} host needs {MIN_FILES}", _FIX_OF_FILES
    if limits.address_bytes is not None and limits.address_bytes < MIN_ADDRESS_BYTES:
        what = f"the address space of a process is limited to {limits.address_bytes >> 20} MiB"
        return f"{what}, a {role} host needs {MIN_ADDRESS_BYTES >> 20}", _FIX_OF_ADDRESSES
    return None


def limits_here() -> HostLimits:
    """Reads the limits of this process, its user and its cgroups."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    rooms = [*_rooms_of_groups(), *_room_of_user()]
    tasks, tasks_of = min(rooms, default=(None, ""))
    return HostLimits(
        files=None if files == resource.RLIM_INFINITY else files,
        tasks=tasks,
        tasks_of=tasks_of,
        address_bytes=None if addresses == resource.RLIM_INFINITY else addresses,
    )


def _rooms_of_groups() -> Iterator[tuple[int, str]]:
    for group in task_groups():
        most = _number(group / "pids.max")
        running = _number(group / "pids.current")
        if most is not None and running is not None:
            yield most - running, f"pids.max of the cgroup is {most}"


def _room_of_user() -> Iterator[tuple[int, str]]:
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = os.getuid()
    # The kernel does not hold root to it.
    if most != resource.RLIM_INFINITY and user != 0:
        yield most - _num_tasks_of(user), f"ulimit -u is {most}"


def _num_tasks_of(user: int) -> int:
    num_tasks = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids and uids.real == user:
            num_tasks += process.info["num_threads"] or 1
    return num_tasks


def _number(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    if text.isdecimal():
        return int(text)
    return None
