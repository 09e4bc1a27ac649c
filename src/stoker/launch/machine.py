"""What this host has: vCPUs that may be used, accelerators, interfaces, kills for memory."""

import os
import re
import socket
from collections.abc import Mapping

from stoker.feed import memory
from stoker.feed.memory import lines_of, memory_groups
from stoker.host import cpu as cpu_quota

_ACCELERATOR = re.compile(r"^nvidia\d+$")


def usable_vcpus() -> int:
    """vCPUs that this process may use, as a number of workers: at least 1."""
    return cpu_quota.usable_vcpus()


def num_accelerators(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that the training may use; CUDA_VISIBLE_DEVICES narrows them down."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return sum(bool(_ACCELERATOR.match(name)) for name in os.listdir("/dev"))
    except OSError:
        return 0


def has_interface(name: str) -> bool:
    """Whether this host has a network interface of that name."""
    return any(known == name for _, known in socket.if_nameindex())


def num_memory_kills() -> int | None:
    """How often the kernel has killed a process of this cgroup for its memory, if it says so."""
    for group in memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            for line in lines_of(group / name):
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
    return None


def memory_limit_bytes() -> int | None:
    """The memory limit of this cgroup, where there is one."""
    return memory.limit_bytes()
