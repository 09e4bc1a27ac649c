"""What a user's code makes in a forked child, as it may block or end its process."""

import contextlib
import faulthandler
import os
import select
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator

from stoker.host.spawn import end_with_parent

# The length of what follows.
_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 16


def last_made(make: Callable[[], Iterator[bytes]], *, max_seconds: float) -> bytes | None:
    """Returns the last bytes that `make` yields in a forked child, until that ends or hangs.

    Args:
        make: Whatever it raises ends it.
        max_seconds: That it may take, for which this blocks; the child is killed then.

    Returns:
        Empty: it has yielded nothing. None: no child could be forked.
    """
    parent = os.getpid()
    try:
        readable, writable = os.pipe()
    except OSError:
        return None
    with open(readable, "rb", buffering=0):
        try:
            pid = _fork()
        except OSError:
            os.close(writable)
            return None
        if not pid:
            _write(make, writable, parent=parent)
        os.close(writable)
        try:
            written = _read(readable, until=time.monotonic() + max_seconds)
        finally:
            # What hangs, and what has ended already; also where a signal's handler raises.
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    return _last_of(written)


def _fork() -> int:
    with warnings.catch_warnings():
        # Of threads, whose locks the child may never get: then it is killed.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _write(make: Callable[[], Iterator[bytes]], descriptor: int, *, parent: int) -> None:
    """Writes what `make` yields, and ends this process."""
    try:
        end_with_parent(signal.SIGKILL, parent=parent)
        # Its last words would be the worker's.
        faulthandler.disable()
        with open(descriptor, "wb", buffering=0) as file:
            for data in make():
                view = memoryview(_LENGTH.pack(len(data)) + data)
                while view:
                    view = view[file.write(view) or 0 :]
    finally:
        os._exit(0)


def _read(descriptor: int, *, until: float) -> bytearray:
    """Returns what is written until the other end closes, or that time comes."""
    data = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while (left := until - time.monotonic()) > 0 and poller.poll(left * 1000):
        piece = os.read(descriptor, _READ_BYTES)
        if not piece:
            break
        data += piece
    return data


def _last_of(data: bytearray) -> bytes:
    """Returns the last whole piece."""
    last = b""
    at = 0
    while at + _LENGTH.size <= len(data):
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(data, at)[0]
        if at <= len(data):
            last = bytes(data[begin:at])
    return last
