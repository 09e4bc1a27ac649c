"""Which files a process reads, and making the next read of them a cold one."""

import contextlib
import os
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

# A program's own files are no data.
_CODE = (".py", ".pyc", ".pyi", ".so", ".pth", ".toml", ".egg-link")
_MAX_FILES = 20_000
# Of a file beyond that, dropping what others may have cached of it is more than a look costs.
_MAX_FILE_BYTES = 16 << 30
_MODE_ARGUMENT = 1


class OpenedFiles:
    """Remembers which files are opened, from its making to the process's end.

    An audit hook cannot be taken away again: only for processes that end soon. Files that a library
    in C opens by itself are seen only while they stay open.
    """

    def __init__(self) -> None:
        self._names: dict[str | int, None] = {}
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and len(self._names) < _MAX_FILES:
            name = arguments[0]
            if isinstance(name, bytes):
                name = os.fsdecode(name)
            if isinstance(name, str):
                self._names[name] = None

    def paths(self) -> list[Path]:
        """Regular files that hold data, those open or mapped now among them."""
        names = [name for name in list(self._names) if isinstance(name, str)]
        real = dict.fromkeys(os.path.realpath(name) for name in [*names, *_open_now(), *_mapped()])
        return [Path(name) for name in real if _is_data(name)]


def drop_cached(paths: Iterable[Path]) -> int:
    """Asks the kernel to forget what it has cached of these files; gives for how many it was."""
    if not hasattr(os, "posix_fadvise"):
        return 0
    dropped = 0
    for path in paths:
        with contextlib.suppress(OSError):
            # Never blocks on what is no file any more.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += 1
            finally:
                os.close(descriptor)
    return dropped


def _open_now() -> list[str]:
    folder = "/proc/self/fd"
    found = []
    with contextlib.suppress(OSError):
        for number in os.listdir(folder):
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"{folder}/{number}"))
    return found


def _mapped() -> list[str]:
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read().splitlines()
    except OSError:
        return []
    words = [line.split(maxsplit=5) for line in lines]
    return [each[5] for each in words if len(each) == 6 and "x" not in each[_MODE_ARGUMENT]]


def _is_data(name: str) -> bool:
    if not name.startswith("/") or name.startswith(("/proc/", "/sys/", "/dev/")):
        return False
    if name.endswith(_CODE) or ".so." in name:
        return False
    try:
        found = os.stat(name)
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(found.st_mode) and 0 < found.st_size <= _MAX_FILE_BYTES
