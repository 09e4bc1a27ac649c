"""Makes a control group with a limit of memory, as containers have; version 1 or 2, as root."""

import contextlib
import errno
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.local_job import until
from support.processes import ran

_ROOT = Path("/sys/fs/cgroup")
_NUMBERS = itertools.count(1)
UNLIMITED = 1 << 50


class MemoryGroup:
    """A group whose processes have a limit of memory together."""

    def __init__(self, folder: Path, *, is_v2: bool) -> None:
        self.folder = folder
        self.is_v2 = is_v2

    @contextlib.contextmanager
    def child(self) -> Iterator["MemoryGroup"]:
        """Yields a group in this one, without a limit; only processes of the child may be here."""
        if self.is_v2:
            (self.folder / "cgroup.subtree_control").write_text("+memory")
        with _folder(self.folder / "child") as folder:
            yield MemoryGroup(folder, is_v2=self.is_v2)

    def set_of_v2(self, name: str, value: int) -> None:
        """Sets what only version 2 has, such as `memory.high`; skips the test with version 1."""
        if not self.is_v2:
            pytest.skip(f"version 1 of control groups has no {name}")
        (self.folder / name).write_text(str(value))

    def let_swap(self, num_bytes: int | str) -> None:
        """Sets what may be swapped out of it, or "max"; version 1 lets it swap all it may."""
        file = self.folder / "memory.swap.max"
        if file.exists():
            file.write_text(str(num_bytes))

    def limit(self, num_bytes: int) -> None:
        """Sets the limit; where more is in use, blocks until so much is swapped out or dropped."""
        until(lambda: self._is_limited(num_bytes), what="the limit is set", seconds=120)

    def squeeze(self, num_bytes: int) -> None:
        """Has the kernel swap out what is above, and kill nothing; else as `limit`."""
        if not self.is_v2:
            self.limit(num_bytes)
            return
        # `memory.max` kills, where a swap file is slower than the kernel waits for it.
        (self.folder / "memory.high").write_text(str(num_bytes))

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

    def held_bytes(self) -> int:
        """Returns what is in use without files in the page cache."""
        stat = dict(line.split() for line in self._read("memory.stat").splitlines())
        files = ("inactive_file", "active_file")
        used = self._read("memory.current" if self.is_v2 else "memory.usage_in_bytes")
        return int(used) - sum(int(stat[name]) for name in files)

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


@contextlib.contextmanager
def swap_file(folder: Path, num_bytes: int) -> Iterator[None]:
    """Lets this machine swap to a file there; skips the test where it may not.

    All programs of the machine swap meanwhile, and no limit of a group kills: be alone.
    """
    file = folder / "swap"
    file.touch(mode=0o600)
    with file.open("wb") as opened:
        # Without holes, which a swap file must not have.
        for _ in range(num_bytes >> 20):
            opened.write(bytes(1 << 20))
        os.fsync(opened.fileno())
    for command in ("mkswap", "swapon"):
        try:
            done = ran([command, str(file)])
        except OSError as err:
            pytest.skip(f"no {command}: {err}")
        if done.returncode:
            pytest.skip(f"cannot swap here: {done.stderr.strip()}")
    try:
        yield
    finally:
        assert ran(["swapoff", str(file)]).returncode == 0
