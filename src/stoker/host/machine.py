"""This host's memory and its limit, accelerators, interfaces and kills for memory are read here."""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
_ACCELERATOR = re.compile(r"^nvidia\d+$")


def host_bytes() -> int:
    """Returns the memory limit of this cgroup, else the memory of the machine."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(limit_bytes() or physical, physical)


def limit_bytes() -> int | None:
    """Returns the memory limit of this cgroup, where there is one."""
    for group in memory_groups():
        for name in ("memory.max", "memory.limit_in_bytes"):
            for line in lines_of(group / name):
                if line.isdigit() and int(line) < 1 << 60:
                    return int(line)
    return None


def memory_groups() -> list[Path]:
    """Returns folders that may describe this process's memory cgroup, the nearest first."""
    groups = []
    for line in lines_of(Path("/proc/self/cgroup")):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            groups.append(CGROUP / "memory" / path.lstrip("/"))
        elif not controllers:
            groups.append(CGROUP / path.lstrip("/"))
    return [*groups, CGROUP, CGROUP / "memory"]


def num_memory_kills() -> int | None:
    """Returns how often the kernel killed a process of this cgroup for its memory, if known."""
    for group in memory_groups():
        for name in ("memory.events", "memory.oom_control"):
            for line in lines_of(group / name):
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
    return None


def num_accelerators(environ: Mapping[str, str]) -> int:
    """Counts the NVIDIA GPUs that the training may use; CUDA_VISIBLE_DEVICES narrows them down."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    try:
        return sum(bool(_ACCELERATOR.match(name)) for name in os.listdir("/dev"))
    except OSError:
        return 0


def has_interface(name: str) -> bool:
    """Returns whether this host has a network interface of that name."""
    return any(known == name for _, known in socket.if_nameindex())


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
