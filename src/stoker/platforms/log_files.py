"""The log files of a run's hosts, written as they are followed; and a file that grows, read."""

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

from stoker.platforms.base import LogLine

_CHUNK_BYTES = 1 << 16
# Of one file: a follower's pod has a small disk.
MAX_LOG_BYTES = 256 << 20
# A longer line is taken in pieces.
MAX_LINE_BYTES = 1 << 20


class LogFiles:
    """GROUP-HOST.log files of a run; those of an earlier attempt are replaced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._sizes: Counter[str] = Counter()
        # A run may be stopped by a thread that does not read its lines.
        self._lock = threading.Lock()

    def write(self, line: LogLine) -> None:
        """Adds a line to its host's file, which takes no more than MAX_LOG_BYTES."""
        # Both names come from a log: no name must lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        # On a full disk the job continues without its log.
        with self._lock, contextlib.suppress(OSError):
            if self._sizes[name] > MAX_LOG_BYTES:
                return
            if name not in self._open:
                self._folder.mkdir(parents=True, exist_ok=True)
                mode = "a" if name in self._sizes else "w"
                self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
            self._sizes[name] += self._open[name].write(line.text + "\n")
            self._open[name].flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        with self._lock:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._open.clear()


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
