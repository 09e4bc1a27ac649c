"""Handles an output pipe that its reader closes: `stoker catalog | head -1`.

A command that only prints then ends, without an error. A training goes on; its output is dropped
from then on.
"""

import io
import os
import stat
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# These verbs do work that goes on when nobody reads their output; all others only print.
_WORKING_VERBS = ("run", "profile", "train", "start", "upload")


class ReaderGoneError(BaseException):
    """The reader of this command's output has gone."""


def guard_standard_streams(arguments: list[str]) -> None:
    """Replaces sys.stdout and sys.stderr where they are pipes.

    Args:
        arguments: The command line, whose verb decides what a closed pipe means.
    """
    goes_on = any(verb in arguments[:1] for verb in _WORKING_VERBS)
    sys.stdout = _guarded(sys.stdout, goes_on=goes_on)
    # A person who closes stderr has read enough of it; the command goes on.
    sys.stderr = _guarded(sys.stderr, goes_on=True)


def _guarded(stream: TextIO, *, goes_on: bool) -> TextIO:
    """Returns the stream, or one that handles a closed pipe in its place."""
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
        """Writes; after the reader has gone, this and all later output is dropped."""
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if self._goes_on:
                return len(memoryview(data).cast("B"))
            raise ReaderGoneError from None
