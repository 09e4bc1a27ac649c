"""CPUs, memory, accelerators and network interfaces of this host, and limits of control groups.

The CPU clocks of processes and threads are exact to a nanosecond; /proc counts in units of 10 ms.
"""

import contextlib
import math
import os
import re
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

# Linux encodes a process's CPU clock by its inverted pid and a thread's by its inverted tid.
_PROCESS = 0b010
_THREAD = 0b110
CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Version 1 has a folder for each controller; two may share one.
_V1_FOLDERS = ("cpu", "cpu,cpuacct")
_CPU_FILES = ("cpu.stat", "cpu.max", "cpu.cfs_quota_us")
# Requests of a pod's container, in thousandths of a vCPU.
CPU_REQUEST = "STOKER_CPU_REQUEST_MILLI"
CpuLimit = Literal["machine", "affinity", "quota", "pod"]
_ACCELERATOR = re.compile(r"^nvidia\d+$")


def process_clock(pid: int) -> float | None:
    """Returns user and system seconds of a process; None if it ended or has no such clock."""
    return _read(pid, _PROCESS)


def thread_clock(tid: int) -> float | None:
    return _read(tid, _THREAD)


def _read(number: int, kind: int) -> float | None:
    try:
        return time.clock_gettime((~number << 3) | kind)
    except (OSError, AttributeError):
        return None


def usable_vcpus() -> int:
    """Returns the vCPUs that this process may use, as a number of workers: rounded, at least 1."""
    return max(1, round(vcpu_capacity()))


def vcpu_capacity() -> float:
    """Returns the vCPUs that this process may count on; not rounded.

    The least of affinity, quota of its groups, and the request of its pod: a pod without a limit
    may use its whole node only while others do not.
    """
    return min(num_cpus(), cpu_quota() or math.inf, requested_vcpus() or math.inf)


def cpu_limit() -> CpuLimit:
    """Returns what sets `vcpu_capacity`; of several with the same, the strictest."""
    capacity = vcpu_capacity()
    # A quota is kept to by the kernel at any time, a request only where others run.
    if cpu_quota() == capacity:
        return "quota"
    if num_cpus() == capacity:
        return "affinity" if capacity < (os.cpu_count() or 1) else "machine"
    return "pod"


def requested_vcpus(environ: Mapping[str, str] = os.environ) -> float | None:
    request = environ.get(CPU_REQUEST, "")
    if request.isdigit():
        return int(request) / 1000 or None
    return None


def cpu_quota(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> float | None:
    """Returns the smallest quota from this process's group to the root, in vCPUs; None: none."""
    quotas = [group_quota(group) for group in cpu_groups(root=root, membership=membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def limiting_group(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> Path | None:
    """Returns the group whose quota, or pod's request, is below this process's affinity."""
    groups = cpu_groups(root=root, membership=membership)
    limits = [(group_quota(group), group) for group in groups]
    limits += [(requested_vcpus(), group) for group in groups[:1]]
    quotas = [(quota, group) for quota, group in limits if quota is not None]
    # The first of several with the same.
    quota, group = min(quotas, key=lambda own: own[0], default=(math.inf, None))
    return group if quota < num_cpus() else None


def cpu_groups(*, root: Path = CGROUP, membership: Path = MEMBERSHIP) -> tuple[Path, ...]:
    """Returns the folders of this process's CPU group and its ancestors, as seen here.

    In a container the group's name may be the host's: then only the mounted root is known.
    """
    # Where both versions are in use, version 2 is mounted below.
    tops = [(root, ""), (root / "unified", ""), *((root / name, "cpu") for name in _V1_FOLDERS)]
    # The path may be the host's, and the root already the container's group.
    memberships = [*_memberships(membership), (["", "cpu"], "/")]
    folders: list[Path] = []
    for top, controller in tops:
        for controllers, path in memberships:
            if controller in controllers:
                folders += _upwards(top, path)
    return tuple(dict.fromkeys(filter(_has_cpu_files, folders)))


def _has_cpu_files(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _CPU_FILES)


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
    for line in _lines(folder / "cpu.stat"):
        name, _, count = line.partition(" ")
        if name == "usage_usec" and count.strip().isdigit():
            return int(count) / 1e6
    counted = _lines(folder / "cpuacct.usage")
    if counted and counted[0].isdigit():
        return int(counted[0]) / 1e9
    return None


def num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS


def _memberships(file: Path) -> Iterator[tuple[list[str], str]]:
    for line in _lines(file):
        controllers, _, path = line.partition(":")[2].partition(":")
        yield controllers.split(","), path


def _upwards(top: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        parts = []
    for depth in range(len(parts), -1, -1):
        yield top.joinpath(*parts[:depth])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def host_bytes() -> int:
    """Returns the memory that this process may use without being slowed or killed for it."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *_limits("memory.max", "memory.high", "memory.limit_in_bytes")])


def limit_bytes() -> int | None:
    """Returns the smallest memory limit of this process's cgroup and those around it.

    None: there is none. Version 1 shows "no limit" as a number of nearly 2**63.
    """
    return min(_limits("memory.max", "memory.limit_in_bytes"), default=None)


def _limits(*names: str) -> list[int]:
    lines = _memory_lines(*names)
    return [int(line) for line in lines if line.isdigit() and 0 < int(line) < 1 << 60]


def memory_groups() -> list[Path]:
    """Returns folders that may limit this process's memory: its cgroups, the nearest first.

    In a container the group's name may be the host's: then only the mounted root is known.
    """
    groups: list[Path] = []
    for controllers, path in _memberships(MEMBERSHIP):
        if "memory" in controllers:
            groups += _upwards(CGROUP / "memory", path)
        elif controllers == [""]:
            groups += _upwards(CGROUP, path)
            # Where both versions are in use, version 2 is mounted below.
            groups += _upwards(CGROUP / "unified", path)
    return [*groups, CGROUP, CGROUP / "memory"]


def task_groups() -> list[Path]:
    """Returns folders that may limit the tasks of this process: its cgroups, the nearest first."""
    groups: list[Path] = []
    for controllers, path in _memberships(MEMBERSHIP):
        if "pids" in controllers:
            groups += _upwards(CGROUP / "pids", path)
        elif controllers == [""]:
            groups += _upwards(CGROUP, path)
    return groups


def num_memory_kills() -> int | None:
    pairs = (line.split() for line in _memory_lines("memory.events", "memory.oom_control"))
    return next((int(pair[1]) for pair in pairs if pair[:1] == ["oom_kill"]), None)


def is_killed_together() -> bool:
    """Whether the kernel kills all processes of a group at once if one passes the limit.

    Kubernetes sets it for containers (1.28 and later, control groups of version 2).
    """
    return "1" in _memory_lines("memory.oom.group")


def _memory_lines(*names: str) -> Iterator[str]:
    for group in memory_groups():
        for name in names:
            yield from _lines(group / name)


def num_accelerators(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that CUDA_VISIBLE_DEVICES, else the host, offers."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return _num_named(visible)
    try:
        return sum(bool(_ACCELERATOR.match(name)) for name in os.listdir("/dev"))
    except OSError:
        return 0


def _num_named(visible: str) -> int:
    """Returns the number of GPUs in a list, which CUDA ends at the first entry that names none.

    As `host.gpus.visible_places`, without the driver: whether an index exists is not known here.
    """
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        if not name[:1].isdigit() and not name.startswith(("GPU-", "MIG-")):
            break
        # A GPU that is named twice makes the list empty.
        if name in names:
            return 0
        names.append(name)
    return len(names)


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
