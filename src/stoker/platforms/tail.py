"""Reading the lines of a file that is still being written."""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_CHUNK_BYTES = 1 << 16


class Tail:
    """Gives the whole lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """The new lines, without their ends; with `is_last` also one that has no end."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
