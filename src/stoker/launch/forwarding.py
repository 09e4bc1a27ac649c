"""What a command writes, on its way to the launcher's own output."""

import os
import select
import time
from collections import deque

STDERR_TAIL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 16
# What a command writes without an end of line (a prompt, dots) is shown after this.
_PARTIAL_LINE_SECONDS = 0.5


class Tail:
    """The last STDERR_TAIL_BYTES of a stream."""

    def __init__(self) -> None:
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def add(self, chunk: bytes) -> None:
        """Takes what was written next."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= STDERR_TAIL_BYTES:
            self._size -= len(self._chunks.popleft())

    def text(self) -> str:
        """What it holds; bytes that are no UTF-8 are replaced."""
        return b"".join(self._chunks)[-STDERR_TAIL_BYTES:].decode(errors="replace")


def forward(source: int, target: int, tail: Tail | None) -> None:
    """Copies a stream to its end, by whole lines: others are often written to the same file.

    A carriage return ends a line, too, as progress bars have it. What has no end is held back for
    half a second, or 64 KiB. It never blocks the command: where nobody reads `target` any more,
    the rest is read and dropped.

    Args:
        source: Descriptor to read from; it may be closed meanwhile, which ends the stream.
        tail: Gets all that was read.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    held, due = b"", 0.0
    is_open = True
    while True:
        left = due - time.monotonic()
        is_due = bool(held) and (left <= 0 or not poll.poll(left * 1000))
        chunk = b"" if is_due else _read(source)
        if tail and chunk:
            tail.add(chunk)
        if not held:
            due = time.monotonic() + _PARTIAL_LINE_SECONDS
        held += chunk
        end = 1 + max(held.rfind(b"\n"), held.rfind(b"\r"))
        if not chunk or len(held) - end > _CHUNK_BYTES:
            end = len(held)
        if end:
            is_open = is_open and _is_written(target, memoryview(held)[:end])
            held, due = held[end:], time.monotonic() + _PARTIAL_LINE_SECONDS
        if not chunk and not is_due:
            return


def _read(source: int) -> bytes:
    try:
        return os.read(source, _CHUNK_BYTES)
    except OSError:
        return b""


def _is_written(target: int, view: memoryview) -> bool:
    while view:
        try:
            view = view[os.write(target, view) :]
        except OSError:
            # Whoever read our output is gone; the command must not block on that.
            return False
    return True
