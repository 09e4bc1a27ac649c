"""A control group with a quota of CPU, as a container has one; of version 1 or 2, made by root."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.local_job import until

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000


@contextlib.contextmanager
def cpu_quota(*, vcpus: float) -> Iterator[Path]:
    """The folder of a group that may use `vcpus`; gone when the context ends.

    Other programs do not take them away, however many there are.
    """
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if is_v2 else _ROOT / "cpu") / f"stoker-test-{os.getpid()}"
    quota = int(vcpus * _PERIOD_US)
    try:
        if is_v2 and "cpu" not in (_ROOT / "cgroup.subtree_control").read_text().split():
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
    except OSError as err:
        pytest.skip(f"no control group of our own: {err}")
    try:
        if is_v2:
            (folder / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            (folder / "cpu.weight").write_text("10000")
        else:
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
            (folder / "cpu.shares").write_text("262144")
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), what="the group is empty")
        folder.rmdir()
