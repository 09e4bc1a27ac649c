"""Makes a control group with a quota of CPU, as containers have; version 1 or 2, as root."""

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from support.local_job import until

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 100_000
_NUMBERS = itertools.count(1)

TestT = TypeVar("TestT", bound=Callable[..., None])


def measures(test: TestT) -> TestT:
    """Marks a test that measures in a control group, where other programs do not disturb it."""
    return pytest.mark.skipif(not _has_quotas(), reason="no control group can be made here")(test)


@contextlib.contextmanager
def quiet_cpus() -> Iterator[Path | None]:
    """Makes a group of nearly two vCPUs for what `measures`, which sees no other load; or None."""
    if not _has_quotas():
        yield None
        return
    # A quota of all that there is would limit nothing: then all of the machine is looked at.
    with cpu_quota(vcpus=1.9) as group:
        yield group


@functools.cache
def _has_quotas() -> bool:
    try:
        with cpu_quota(vcpus=1.0):
            return True
    except pytest.skip.Exception:
        return False


@contextlib.contextmanager
def cpu_quota(*, vcpus: float) -> Iterator[Path]:
    """Yields a group that may use `vcpus`, which other programs do not take away."""
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    folder = (_ROOT if is_v2 else _ROOT / "cpu") / f"stoker-test-{os.getpid()}-{next(_NUMBERS)}"
    quota = int(vcpus * _PERIOD_US)
    try:
        if is_v2 and "cpu" not in (_ROOT / "cgroup.subtree_control").read_text().split():
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
    except OSError as err:
        pytest.skip(f"cannot make a control group: {err}")
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
