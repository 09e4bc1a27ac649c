"""CPUs, memory and accelerators of this host, and limits of control groups."""

import contextlib
import math
import os
import re
import resource
from collections.abc import Iterator, Mapping
from itertools import takewhile
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Requests of a pod's container, in thousandths of a vCPU.
CPU_REQUEST = "STOKER_CPU_REQUEST_MILLI"
# How CUDA_VISIBLE_DEVICES names a GPU.
_NAMED = re.compile(r"\s*(\d|GPU-|MIG-)")
# Version 1 of cgroups shows "no limit" as a number of nearly 2**63.
_NO_LIMIT = 1 << 60


def usable_vcpus() -> int:
    """Returns the vCPUs that this process may use, as a number of workers: rounded, at least 1."""
    return max(1, round(vcpu_capacity()))


def vcpu_capacity() -> float:
    """Returns the vCPUs that this process may count on; not rounded.

    The least of affinity, quota of its groups, and the request of its pod: a pod without a limit
    may use its whole node only while others do not.
    """
    return min(vcpu_limit(), requested_vcpus() or math.inf)


def vcpu_limit() -> float:
    """Returns the vCPUs that this process may use while others idle."""
    return min(num_cpus(), cpu_quota() or math.inf)


def requested_vcpus(environ: Mapping[str, str] = os.environ) -> float | None:
    request = environ.get(CPU_REQUEST, "")
    return int(request) / 1000 or None if request.isdigit() else None


def num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


# Control groups.


def groups_of(controller: str) -> tuple[Path, ...]:
    """Returns folders that may limit this process: its groups and their ancestors, nearest first.

    In a container the group's name may be the host's, and the mounted root already the container's
    group. Version 1 of control groups has a folder for each controller.
    """
    folders: list[Path] = []
    for line in (*_lines(MEMBERSHIP), f"0:{controller}:/", "0::/"):
        _, controllers, path = line.split(":", 2)
        top = CGROUP / controller if controllers else CGROUP
        if not controllers or controller in controllers.split(","):
            group = top / path.lstrip("/")
            folders += (each for each in (group, *group.parents) if each.is_relative_to(top))
    return tuple(dict.fromkeys(folder for folder in folders if folder.is_dir()))


def cpu_quota() -> float | None:
    """Returns the smallest quota from this process's group to the root, in vCPUs; None: none."""
    return min(filter(None, map(group_quota, groups_of("cpu"))), default=None)


def group_quota(folder: Path) -> float | None:
    words = " ".join(_lines(folder / "cpu.max")).split()
    if not words:
        # Version 1 has a file for each number.
        words = _lines(folder / "cpu.cfs_quota_us") + _lines(folder / "cpu.cfs_period_us")
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1]) or None


def group_cpu_seconds(folder: Path) -> float | None:
    """Returns CPU-seconds of all processes of a group so far; None if the kernel does not count."""
    microseconds = numbers_in(folder / "cpu.stat").get("usage_usec")
    if microseconds is not None:
        return microseconds / 1e6
    counted = number_in(folder, "cpuacct.usage")
    return None if counted is None else counted / 1e9


def number_in(folder: Path, *names: str) -> int | None:
    """Returns the number in the first of these files that has one, a limit of memory or a count."""
    for name in names:
        lines = _lines(folder / name)
        if lines and lines[0].isdigit() and int(lines[0]) < _NO_LIMIT:
            return int(lines[0])
    return None


def numbers_in(file: Path) -> dict[str, int]:
    """Returns the numbers of a file whose lines are a name and a number."""
    pairs = (line.split() for line in _lines(file))
    return {pair[0].rstrip(":"): int(pair[1]) for pair in pairs if pair[1:] and pair[1].isdigit()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


# Memory.


def host_bytes() -> int:
    """Returns the memory that this process may use without being slowed or killed for it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    slowed = (number_in(group, "memory.high") for group in groups_of("memory"))
    return min(filter(None, (physical, limit_bytes(), *slowed)))


def limit_bytes() -> int | None:
    """Returns the smallest memory limit of this process's cgroup and those around it, if any."""
    names = ("memory.max", "memory.limit_in_bytes")
    limits = (number_in(group, *names) for group in groups_of("memory"))
    return min(filter(None, limits), default=None)


def num_memory_kills() -> int | None:
    for group in groups_of("memory"):
        for name in ("memory.events", "memory.oom_control"):
            kills = numbers_in(group / name).get("oom_kill")
            if kills is not None:
                return kills
    return None


# Accelerators, and this process.


def num_accelerators(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES, else the host, offers."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        # CUDA ends the list at the first entry that names none.
        return len([*takewhile(_NAMED.match, visible.split(","))])
    return len([*Path("/dev").glob("nvidia[0-9]*")])


def turn_off_core_dumps() -> None:
    """Keeps this process, which has the run's keys, and later children from leaving core dumps."""
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


@contextlib.contextmanager
def without_preempting() -> Iterator[None]:
    """Keeps the calling thread, and threads that it starts, from preempting others on their core.

    A worker that hands over a batch wakes the agent, and the kernel may run the agent at once on
    the worker's core, even if another core is idle: the worker then waits while its batch is sealed
    (1 ms for 5 MB). SCHED_BATCH keeps threads from "extra preemptions (between the workload's
    tasks)", sched(7). A thread with a policy other than the default keeps it.
    """
    is_set = False
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_set = True
    try:
        yield
    finally:
        if is_set:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
