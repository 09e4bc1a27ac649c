"""Standard output and errors may lose their reader: `stoker catalog | head -1`.

A command that only prints ends there, quietly. A training does not end because nobody watches it:
what it says goes nowhere from then on.
"""

import io
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# They do work that goes on without anybody who reads: all others only print.
_WORKING_VERBS = ("run", "profile", "train", "start", "upload")


class ReaderGoneError(BaseException):
    """Nobody reads any more what this command prints."""


def guard_standard_streams(arguments: list[str]) -> None:
    """Replaces sys.stdout and sys.stderr where they are pipes.

    Args:
        arguments: Of the command line: the verb decides what a closed pipe means.
    """
    goes_on = any(verb in arguments[:1] for verb in _WORKING_VERBS)
    sys.stdout = _guarded(sys.stdout, goes_on=goes_on)
    # Errors are read by people; what they read of them is enough.
    sys.stderr = _guarded(sys.stderr, goes_on=True)


def _guarded(stream: TextIO, *, goes_on: bool) -> TextIO:
    """Returns the stream itself, or one in its place that minds a closed pipe."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):
        return stream
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return stream
    raw = _Pipe(stream.fileno(), goes_on=goes_on)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Pipe(io.FileIO):
    def __init__(self, descriptor: int, *, goes_on: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._goes_on = goes_on

    def write(self, data: "ReadableBuffer", /) -> int:
        """Writes; what nobody reads any more is dropped, here and by all that writes there."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self._goes_on:
                return len(memoryview(data).cast("B"))
            raise ReaderGoneError from None
