"""Both ends of a worker's connection: sealed messages, and the memory that they are received into.

Both ends block, in threads: one system call moves up to 4 MiB without the GIL. A batch may take as
long as the network needs: while bytes flow, the connection is alive. Fresh memory for each batch
costs page faults (0.02 to 0.08 CPU-s/GB), so blocks are reused once their last view is gone.
"""

import bisect
import contextlib
import mmap
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from stoker.errors import ProtocolError
from stoker.feed.engine.records import (
    FIRST_BYTES,
    HEAD_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    Sealer,
    Unsealer,
    keys_of,
    records,
)

Bytes = npt.NDArray[np.uint8]

# Below this the allocator reuses memory as well.
_SMALL_BYTES = 64 << 10
# Of a line of a processor's caches, at which torch's memory begins.
ALIGNMENT = 64
# Without a byte for that long in the middle of a message the connection is lost.
SILENCE_SECONDS = 5
# A vanished host is noticed within 25 s (10 + 3 x 5), or 30 s with unacknowledged bytes.
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}
# Of blocks that wait to be used again, in a process.
MAX_IDLE_BYTES = 256 << 20


class BufferPool:
    """Pool of writable byte arrays, with up to 256 MiB of unused blocks; thread-safe."""

    def __init__(self) -> None:
        # By size class. Only atomic operations: a finalizer may run even within these methods.
        self._free: dict[int, deque[mmap.mmap]] = {}

    def take(self, size: int) -> Bytes:
        """Returns an array of `size` bytes with arbitrary content; reused after its last view."""
        if size < _SMALL_BYTES:
            # Products of matrices take another way through memory that begins elsewhere.
            memory: Bytes = np.empty(size + ALIGNMENT, dtype=np.uint8)
            start = -memory.ctypes.data % ALIGNMENT
            return memory[start : start + size]
        # Four classes to each doubling: at most 25% is unused.
        step = max(mmap.PAGESIZE, 1 << ((size - 1).bit_length() - 3))
        # Rounded up to a multiple of the step.
        size_class = -(-size // step) * step
        free = self._free.setdefault(size_class, deque())
        try:
            block = free.pop()
        except IndexError:
            block = mmap.mmap(-1, size_class)
        # Slices outlive a tensor: the finalizer is on the array that every view refers to.
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        weakref.finalize(array, self._give_back, block, free).atexit = False
        return array

    def _give_back(self, block: mmap.mmap, free: deque[mmap.mmap]) -> None:
        # No lock: a finalizer must not wait. Two threads may exceed the bound by one block.
        idle_bytes = sum(size * len(idle) for size, idle in list(self._free.items()))
        if idle_bytes + len(block) <= MAX_IDLE_BYTES:
            free.append(block)


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns where each leaf begins in the payload, and the payload's bytes."""
    offsets = []
    end = 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return tuple(offsets), end


class Connection:
    """One end of a worker's connection: one thread may write, and another one read.

    Methods block. They raise OSError if the connection is lost; those that read, ProtocolError if a
    message fails authentication or its packed part is longer than `max_packed_bytes`, before memory
    is allocated for it.
    """

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        *,
        is_workers: bool = False,
        max_packed_bytes: int = 0,
    ) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _TCP_OPTIONS.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        # With a timeout, Python would poll before each call. This one counts for each call that
        # receives: only a connection without a single byte for that long is lost.
        connection.settimeout(None)
        silence = struct.pack("ll", SILENCE_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
        orders, batches = keys_of(key)
        self.socket = connection
        self._sealer = Sealer(batches if is_workers else orders)
        self._unsealer = Unsealer(orders if is_workers else batches)
        self._max_packed_bytes = max_packed_bytes
        self._head = memoryview(bytearray(HEAD_BYTES))
        # What is sent and received, record by record, and what is gathered of several leaves. Pages
        # that no record has reached take no memory.
        most = HEAD_BYTES + RECORD_BYTES + TAG_BYTES
        self._sent, self._sealed, self._gathered = [memoryview(mmap.mmap(-1, most)) for _ in "abc"]

    def write(self, packed: bytes, leaves: Sequence[memoryview] = ()) -> None:
        """Seals a message and its payload, and sends them; blocks until the kernel has taken it."""
        offsets, nbytes = layout([leaf.nbytes for leaf in leaves])
        buffer = self._sent
        buffer[:HEAD_BYTES] = self._sealer.head(packed, payload_bytes=nbytes)
        rest = memoryview(packed)[FIRST_BYTES:]
        plain_records = [rest[start:end] for start, end in records(rest.nbytes)]
        # Head and first record in one call: with TCP_NODELAY each call is a packet.
        filled = HEAD_BYTES
        for plain in chain(plain_records, self._payload(offsets, leaves, nbytes)):
            end = filled + plain.nbytes + TAG_BYTES
            self._sealer.record(plain, buffer[filled:end])
            self.socket.sendall(buffer[:end])
            filled = 0
        # Nothing followed the head: a short message without payload.
        if filled:
            self.socket.sendall(buffer[:filled])

    def _payload(
        self, offsets: Sequence[int], leaves: Sequence[memoryview], nbytes: int
    ) -> Iterator[memoryview]:
        """Yields the payload's records, of a long leaf without a copy."""
        for start, end in records(nbytes):
            first = bisect.bisect_right(offsets, start) - 1
            at, leaf = offsets[first], leaves[first]
            if end <= at + leaf.nbytes:
                yield leaf[start - at : end - at]
                continue
            last = bisect.bisect_left(offsets, end)
            for at, leaf in zip(offsets[first:last], leaves[first:last], strict=True):
                part = leaf[max(0, start - at) : end - at]
                place = max(at, start) - start
                self._gathered[place : place + part.nbytes] = part
            yield self._gathered[: end - start]

    def head(self) -> tuple[bytes, int]:
        """Returns the next message and its payload's size; waits for its begin without limit."""
        self._fill(self._head, may_wait=True)
        packed, missing_bytes, payload_bytes = self._unsealer.head(self._head)
        if not missing_bytes:
            return packed, payload_bytes
        if missing_bytes > self._max_packed_bytes:
            raise ProtocolError(f"a message of {missing_bytes} bytes")
        rest = bytearray(missing_bytes)
        self.read(memoryview(rest))
        return packed + rest, payload_bytes

    def read(self, memory: memoryview) -> None:
        """Receives as many bytes of the payload as `memory` has."""
        for start, end in records(memory.nbytes):
            sealed = self._sealed[: end - start + TAG_BYTES]
            self._fill(sealed)
            self._unsealer.record(sealed, memory[start:end])

    def _fill(self, view: memoryview, *, may_wait: bool = False) -> None:
        filled = 0
        while filled < view.nbytes:
            try:
                received = self.socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if may_wait and not filled:
                    # The next one is not made yet; TCP's keepalive notices a vanished host.
                    continue
                raise TimeoutError(f"no byte for {SILENCE_SECONDS} s") from None
            if not received:
                raise ConnectionResetError("closed by the other end")
            filled += received

    def shut(self) -> None:
        """Ends the connection and blocking calls of other threads; may be called twice."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.socket.close()
