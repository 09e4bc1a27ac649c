"""The log files of a run's hosts: written by the process that follows it, within a limit of bytes.

Also a file that grows, read line by line.
"""

import contextlib
import errno
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from stoker.platforms.base import LogLine

_CHUNK_BYTES = 1 << 16
# Of all log files of a run, about: a follower's pod has a small disk.
MAX_LOG_BYTES = 1 << 30
# A longer line is taken in pieces.
MAX_LINE_BYTES = 1 << 20


def full_disk(folder: Path) -> str:
    """Returns a warning where the disk of a folder is full, else an empty text."""
    with contextlib.suppress(OSError):
        if not shutil.disk_usage(folder).free:
            return f"no space is left for {folder}: its logs lack lines; the job continues"
    return ""


class LogFiles:
    """GROUP-HOST.log files of a run; those of an earlier attempt are replaced.

    A host's log that is too long for its share of MAX_LOG_BYTES continues in GROUP-HOST.more.log,
    which has its latest lines: with GROUP-HOST.more.log.old at least a third of the share.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._begun: set[str] = set()
        self._sizes: Counter[str] = Counter()
        # The file that has a host's latest lines, by the name of its first one.
        self._latest: dict[str, str] = {}
        self._missing: Counter[str] = Counter()
        # A run may be stopped by a thread that does not read its lines.
        self._lock = threading.Lock()

    def write(self, line: LogLine) -> str:
        """Adds a line to its host's file, or drops it where the disk is full.

        Returns words for the user: once when lines are dropped, once when it works again.
        """
        # Both names come from a log: no name must lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        with self._lock:
            try:
                self._add(name, line.text)
            except OSError as err:
                # Opened again for the next line; its buffer is lost.
                with contextlib.suppress(KeyError, OSError):
                    self._open.pop(name).close()
                self._missing[name] += 1
                words = f"cannot write {self._folder / name}: {err.strerror}; the job continues"
                return words if self._missing[name] == 1 else ""
            missing = self._missing.pop(name, 0)
        words = f"{self._folder / name} is written again; {missing} lines are missing"
        return words if missing else ""

    def _add(self, first: str, text: str) -> None:
        more = f"{first.removesuffix('.log')}.more.log"
        name = self._latest.setdefault(first, first)
        if first not in self._begun:
            self._folder.mkdir(parents=True, exist_ok=True)
            _refuse_link(self._folder)
            # Of an earlier attempt, whose lines would follow this one's.
            for stale in (more, f"{more}.old"):
                (self._folder / stale).unlink(missing_ok=True)
        # A third for each of the three files of a host, shared among all hosts.
        if self._sizes[name] > MAX_LOG_BYTES // (3 * len(self._latest)):
            if name == first:
                self._write(first, f"(the latest lines are in {more})")
            self._open.pop(name).close()
            if name == more:
                # One older part is kept, so that a failure's lines are there right after a change
                # of files.
                (self._folder / more).replace(self._folder / f"{more}.old")
            self._begun.discard(more)
            self._sizes[more] = 0
            name = self._latest[first] = more
        self._write(name, text)

    def _write(self, name: str, text: str) -> None:
        if name not in self._open:
            self._folder.mkdir(parents=True, exist_ok=True)
            _refuse_link(self._folder / name)
            mode = "a" if name in self._begun else "w"
            self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
            self._begun.add(name)
        file = self._open[name]
        self._sizes[name] += file.write(text + "\n")
        file.flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        with self._lock:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._open.clear()


def _refuse_link(path: Path) -> None:
    # One to a device overwrites nothing.
    if path.is_symlink() and not path.is_char_device():
        raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed")


def take_lines(rest: bytearray, chunk: bytes) -> list[bytes]:
    """Adds a chunk to `rest`, and takes the lines out that end in it: in time with the chunk.

    What has no end after MAX_LINE_BYTES is taken for a line.
    """
    begin = len(rest)
    rest += chunk
    end = rest.rfind(b"\n", begin) + 1
    lines = bytes(rest[:end]).split(b"\n")[:-1]
    del rest[:end]
    if len(rest) > MAX_LINE_BYTES:
        lines.append(bytes(rest))
        rest.clear()
    return lines


class FileTail:
    """Whole lines that were added to a file since the last read; a new file of its name is next."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = bytearray()

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Yields the new lines, without their ends; with `is_last` also an unfinished one."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        yield from self._added(self._file)
        with contextlib.suppress(OSError):
            if not os.path.samestat(self._path.stat(), os.fstat(self._file.fileno())):
                # What came since the end was read, and then the new file, with the next read.
                yield from self._added(self._file)
                self.close()
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest.clear()

    def _added(self, file: BinaryIO) -> Iterator[str]:
        while chunk := file.read(_CHUNK_BYTES):
            for line in take_lines(self._rest, chunk):
                yield line.decode(errors="replace").rstrip("\r")
            # A progress bar may have no line end for hours: its last state is kept.
            if b"\r" in chunk:
                del self._rest[: max(0, self._rest.rstrip(b"\r").rfind(b"\r"))]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
