"""Makes a control group with a limit of memory, as containers have; version 1 or 2, as root."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.local_job import until

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count(1)
UNLIMITED = 1 << 50


class MemoryGroup:
    """A group whose processes have a limit of memory together."""

    def __init__(self, folder: Path, *, is_v2: bool) -> None:
        self.folder = folder
        self.is_v2 = is_v2

    def let_swap(self, num_bytes: int | str) -> None:
        """Sets what may be swapped out of it, or "max"; version 1 lets it swap all it may."""
        file = self.folder / "memory.swap.max"
        if file.exists():
            file.write_text(str(num_bytes))

    def limit(self, num_bytes: int) -> None:
        """Sets the limit; where more is in use, blocks until so much is swapped out or dropped."""
        until(lambda: self._is_limited(num_bytes), what="the limit is set", seconds=120)

    def _is_limited(self, num_bytes: int) -> bool:
        name = "memory.max" if self.is_v2 else "memory.limit_in_bytes"
        try:
            (self.folder / name).write_text(str(num_bytes))
        except OSError as err:
            # Version 1 gives up after some rounds of reclaiming.
            if err.errno != errno.EBUSY:
                raise
            return False
        return True

    def peak_bytes(self) -> int:
        """Returns what was in use at most; skips the test where the kernel does not tell."""
        name = "memory.peak" if self.is_v2 else "memory.max_usage_in_bytes"
        if not (self.folder / name).exists():
            pytest.skip(f"this kernel has no {name}")
        return int(self._read(name))

    def num_kills(self) -> int:
        return self.events()["oom_kill"]

    def events(self) -> dict[str, int]:
        """Returns how often limits were passed, as the kernel counts, by its names."""
        name = "memory.events" if self.is_v2 else "memory.oom_control"
        pairs = [line.split() for line in self._read(name).splitlines()]
        return {event: int(number) for event, number in pairs}

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()


@contextlib.contextmanager
def memory_limit(num_bytes: int = UNLIMITED) -> Iterator[MemoryGroup]:
    """Yields a group of at most `num_bytes`; skips the test where none can be made."""
    is_v2 = (_ROOT / "cgroup.controllers").exists()
    folder = (
        _ROOT if is_v2 else _ROOT / "memory"
    ) / f"stoker-memory-{os.getpid()}-{next(_NUMBERS)}"
    if is_v2 and "memory" not in (_ROOT / "cgroup.subtree_control").read_text().split():
        with contextlib.suppress(OSError):
            (_ROOT / "cgroup.subtree_control").write_text("+memory")
    with _folder(folder):
        if not (folder / "memory.stat").exists():
            pytest.skip("this machine has no control groups for memory")
        group = MemoryGroup(folder, is_v2=is_v2)
        group.let_swap(0)
        group.limit(num_bytes)
        yield group


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    """Makes a group's folder, and removes it once its processes have ended."""
    try:
        folder.mkdir()
    except OSError as err:
        pytest.skip(f"cannot make a control group: {err}")
    try:
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), what="the group is empty")
        folder.rmdir()
