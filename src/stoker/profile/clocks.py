"""CPU clocks of processes and threads, and of all that shares the vCPUs of this process."""

import os
import platform
import resource
import time
from collections.abc import Mapping

import psutil

from stoker.feed.cpu_clocks import process_clock, thread_clock
from stoker.feed.cpu_quota import group_cpu_seconds, limiting_group
from stoker.feed.descendants import descendant_pids
from stoker.profile.counters import scheduled

_HAS_CPU_CLOCKS = platform.system() == "Linux"


def process_cpu_seconds(pid: int) -> float | None:
    """User and system seconds of another process; None if it has ended."""
    if _HAS_CPU_CLOCKS:
        return process_clock(pid)
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return None
    return times.user + times.system


def children_cpu_seconds() -> float:
    """CPU-seconds of all processes below this one, those that have ended included."""
    live = (process_cpu_seconds(pid) for pid in pids_below())
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + sum(seconds or 0.0 for seconds in live)


def machine_cpu_seconds() -> float:
    """CPU-seconds of all processes that share the vCPUs of this one.

    Where a control group's quota limits it, only those of that group do: what neighbours on the
    node use is none of what the quota allows. Where the kernel does not count the group, it is
    those of this process and below it. Else all of the machine, on the same vCPUs.
    """
    group = limiting_group()
    if group is not None:
        seconds = group_cpu_seconds(group)
        return time.process_time() + children_cpu_seconds() if seconds is None else seconds
    cpus = psutil.cpu_times(percpu=True)
    return sum(_busy(cpus[cpu]._asdict()) for cpu in _own_cpus(len(cpus)))


def elsewhere_cpu_seconds() -> float:
    """CPU-seconds on the vCPUs of this machine that this process may not use."""
    cpus = psutil.cpu_times(percpu=True)
    others = set(range(len(cpus))) - _own_cpus(len(cpus))
    return sum(_busy(cpus[cpu]._asdict()) for cpu in others)


def _own_cpus(count: int) -> set[int]:
    cpus = set(range(count))
    return cpus & os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else cpus


def _busy(times: Mapping[str, float]) -> float:
    # Guests are inside user; steal is what other machines on the same metal took.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return sum(seconds for name, seconds in times.items() if name not in idle)


def queued_seconds() -> float:
    """Seconds that this process's first thread was ready to run while others had the CPU; or 0."""
    own = scheduled("/proc/self")
    return own.queued if own else 0.0


def descendants() -> list[psutil.Process]:
    """The processes below this one."""
    try:
        return psutil.Process().children(recursive=True)
    except psutil.Error:
        return []


def pids_below() -> list[int]:
    """The pids of the processes below this one."""
    told = descendant_pids()
    return [child.pid for child in descendants()] if told is None else told


def thread_ids() -> set[int]:
    """Native ids of this process's threads; empty where the system does not say."""
    try:
        return {int(name) for name in os.listdir("/proc/self/task")}
    except OSError:
        return set()


def threads_cpu_seconds(ids: set[int]) -> float:
    """CPU-seconds of these threads of this process."""
    return sum(thread_clock(tid) or 0.0 for tid in ids)
