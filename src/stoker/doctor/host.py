"""The host itself: Python, PyTorch, processors, memory, accelerators, clock."""

import os
import platform
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

import stoker
from stoker.doctor.check import Check
from stoker.launch import machine
from stoker.logs import now_utc

MIN_PYTHON = (3, 11)
# Below this a training process and its libraries alone may not fit.
MIN_MEMORY_BYTES = 2 << 30
# PyTorch's own loader workers pass their batches through it; stoker's workers do not.
MIN_SHARED_MEMORY_BYTES = 1 << 30


def python_check() -> Check:
    """The Python that runs stoker."""
    text = f"{platform.python_version()} ({sys.executable}), stoker {stoker.__version__}"
    if sys.version_info < MIN_PYTHON:
        return Check(name="python", state="fail", text=text, fix="use Python 3.11 or newer")
    return Check(name="python", state="ok", text=text)


def torch_check(*, trains: bool) -> Check:
    """PyTorch and its CUDA.

    Args:
        trains: The host has a part in a run, which needs it.
    """
    try:
        import torch
    except (ImportError, OSError) as err:
        missing = isinstance(err, ModuleNotFoundError)
        return Check(
            name="torch",
            state="fail" if trains or not missing else "warn",
            text="not installed" if missing else f"cannot be imported: {err}",
            fix="pip install 'stoker[torch]', or the launcher image, where this host has to train",
        )
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return Check(name="torch", state="ok", text=f"{torch.__version__}, {cuda}")


def vcpus_check() -> Check:
    """vCPUs that may be used, of those that are there."""
    usable, total = machine.usable_vcpus(), os.cpu_count() or 1
    text = f"{usable} usable" + (f" of {total} (quota or affinity)" if usable < total else "")
    if usable < 2:
        return Check(
            name="vcpus",
            state="warn",
            text=text,
            fix="trainer and loader take turns on it: give the host two or more",
        )
    return Check(name="vcpus", state="ok", text=text)


def memory_check() -> Check:
    """Memory that is free, within the container's limit."""
    found = psutil.virtual_memory()
    limit = machine.memory_limit_bytes()
    usable = min(found.available, limit or found.available)
    text = f"{_gib(found.available)} free of {_gib(found.total)}"
    if limit and limit < found.total:
        text += f", limit {_gib(limit)}"
    if usable < MIN_MEMORY_BYTES:
        return Check(name="memory", state="warn", text=text, fix="a larger host or limit")
    return Check(name="memory", state="ok", text=text)


def shared_memory_check(path: Path = Path("/dev/shm")) -> Check:
    """The size of /dev/shm."""
    try:
        total = shutil.disk_usage(path).total
    except OSError as err:
        return Check(
            name="shm",
            state="warn",
            text=f"{path}: {err.strerror}",
            fix="mount a tmpfs there: PyTorch's own loader workers need it",
        )
    if total < MIN_SHARED_MEMORY_BYTES:
        return Check(
            name="shm",
            state="warn",
            text=f"{path} has {_gib(total)}",
            fix="docker run --shm-size, or an emptyDir of medium Memory: PyTorch's own loader "
            "workers need it, stoker's do not",
        )
    return Check(name="shm", state="ok", text=f"{path} has {_gib(total)}")


def accelerators_check(environ: Mapping[str, str]) -> Check:
    """NVIDIA GPUs, and whether PyTorch can use them."""
    num_devices = machine.num_accelerators(environ)
    if num_devices == 0:
        return Check(name="gpus", state="ok", text="none")
    try:
        import torch
    except (ImportError, OSError):
        return Check(name="gpus", state="warn", text=f"{num_devices}, and no PyTorch to use them")
    if not torch.cuda.is_available():
        return Check(
            name="gpus",
            state="fail",
            text=f"{num_devices}, of which PyTorch can use none",
            fix="an image whose PyTorch has CUDA, of a version that the host's driver knows",
        )
    count = torch.cuda.device_count()
    text = f"{count} x {torch.cuda.get_device_name(0)}"
    if count < num_devices:
        return Check(
            name="gpus", state="warn", text=f"{text}; PyTorch misses {num_devices - count}"
        )
    return Check(name="gpus", state="ok", text=text)


def clock_check(now: float | None = None) -> Check:
    """The clock: not before stoker was installed, for AWS refuses a clock that is minutes off."""
    seconds = time.time() if now is None else now
    if seconds < Path(stoker.__file__).stat().st_mtime - 60:
        return Check(
            name="clock",
            state="fail",
            text=f"{now_utc()} is before stoker was installed here",
            fix="set the host's clock (NTP): AWS refuses requests that are minutes off",
        )
    return Check(name="clock", state="ok", text=now_utc())


def _gib(num_bytes: float) -> str:
    return (
        f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 29 else f"{num_bytes / 2**20:.0f} MiB"
    )
