"""Checks of this host for what a run needs; those of a platform are in `services`."""

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import stoker
from stoker.environment import from_environment
from stoker.errors import install_command
from stoker.host import machine

FindingState = Literal["ok", "warn", "fail"]

_MIN_TORCH = (2, 4)
# PyTorch's own loader workers pass their batches through it; stoker's workers do not.
_MIN_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: with `fail` a run cannot work like this, with `warn` less well.

    The text never holds a secret.
    """

    name: str
    state: FindingState
    text: str
    fix: str = ""

    def __str__(self) -> str:
        fix = f"\n{'':<15}try: {self.fix}" if self.state != "ok" and self.fix else ""
        return f"{self.state:<5} {self.name:<8} {self.text}{fix}"


def examine_host(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Checks this host; yields each finding at once."""
    text = f"{platform.python_version()} ({sys.executable}), stoker {stoker.__version__}"
    yield Finding("python", "ok", text)
    yield torch_check(environ)
    folder = Path("/dev/shm")
    fix = "docker run --shm-size, or kubernetes.shm: PyTorch's own loader workers need it"
    shared = shutil.disk_usage(folder).total if folder.is_dir() else 0
    state: FindingState = "ok" if shared >= _MIN_SHARED_MEMORY_BYTES else "warn"
    yield Finding("shm", state, f"{shared / 2**30:.1f} GiB", fix)
    yield port_check(from_environment(environ).feed.port)


def torch_check(environ: Mapping[str, str] = os.environ) -> Finding:
    """Checks PyTorch, which a data host need not have, and that it can use the host's GPUs."""
    try:
        import torch
    except ModuleNotFoundError:
        fix = f"{install_command('torch')}, or use the launcher image, if this host has to train"
        return Finding("torch", "warn", "not installed", fix)
    except (ImportError, OSError) as err:
        # OSError: a library of PyTorch is missing.
        return Finding("torch", "fail", f"cannot be imported: {err}", "install it again")
    text = f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}"
    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < _MIN_TORCH:
        return Finding("torch", "fail", text, "use PyTorch 2.4 or newer")
    num_devices = machine.num_accelerators(environ)
    if num_devices and not torch.cuda.is_available():
        fix = "use an image whose PyTorch has CUDA, of a version that the host's driver supports"
        return Finding("torch", "fail", f"{text}: it can use none of {num_devices} GPUs", fix)
    if num_devices:
        text += f"; {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return Finding("torch", "ok", text)


def port_check(port: int) -> Finding:
    """Checks whether the feed's port is free."""
    with socket.socket() as probe:
        # As the launcher binds it: connections in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as err:
            fix = "end the process that uses it, or set feed.port in the workload"
            return Finding("port", "fail", f"{port}: {err.strerror}", fix)
    return Finding("port", "ok", f"{port} is free")
