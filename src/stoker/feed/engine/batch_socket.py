"""Both ends of a worker's connection: sealed messages, and the memory that they are received into.

Both ends block, in threads: one system call moves up to 4 MiB without the GIL. A batch may take as
long as the network needs: while bytes flow, the connection is alive. Fresh memory for each batch
costs page faults (0.02 to 0.08 CPU-s/GB), so blocks are reused once their last view is gone.
"""

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
    ConnectionKeys,
    Sealer,
    Unsealer,
    records,
)

Bytes = npt.NDArray[np.uint8]

# Below this the allocator reuses memory as well.
_SMALL_BYTES = 64 << 10
# Of a line of a processor's caches, at which torch's memory begins.
ALIGNMENT = 64
# Without a byte for that long in the middle of a message the connection is lost.
SILENCE_SECONDS = 5.0
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


class _Lent(weakref.ref["Bytes"]):
    """A lent block and its exporting array (three times cheaper than `weakref.finalize`)."""

    __slots__ = ("block", "free")
    block: mmap.mmap
    free: deque[mmap.mmap]


class BufferPool:
    """Pool of writable byte arrays, with up to `max_idle_bytes` of unused blocks; thread-safe."""

    def __init__(self, *, max_idle_bytes: int = MAX_IDLE_BYTES) -> None:
        self._max_idle_bytes = max_idle_bytes
        # By size class. Only atomic operations: a finalizer may run even within these methods.
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._lent: dict[int, _Lent] = {}

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
        # The callback runs only while the weak reference itself lives, in `_lent`.
        lent = _Lent(array, self._give_back)
        lent.free = free
        lent.block = block
        self._lent[id(lent)] = lent
        return array

    def idle_bytes(self) -> int:
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _give_back(self, lent: "_Lent") -> None:
        del self._lent[id(lent)]
        # No lock: a finalizer must not wait. Two threads may exceed the bound by one block.
        if self.idle_bytes() + len(lent.block) <= self._max_idle_bytes:
            lent.free.append(lent.block)


def tune(connection: socket.socket) -> None:
    """Makes a connection blocking and, if it is TCP, sets its options."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _TCP_OPTIONS.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # With a timeout, Python would poll before each call; the reader sets SO_RCVTIMEO instead.
    connection.settimeout(None)


class MessageWriter:
    """The sending half of one end; used by one thread."""

    def __init__(self, connection: socket.socket, sealer: Sealer) -> None:
        self._socket = connection
        self._sealer = sealer
        # Grows to the longest record; memory in use stays in the processor's cache.
        self._buffer = memoryview(bytearray(HEAD_BYTES))
        self._gathered = memoryview(bytearray())

    def write(self, packed: bytes, leaves: Sequence[memoryview] = ()) -> None:
        """Seals a message and its payload, and sends them; blocks until the kernel has taken it.

        Raises:
            OSError: The connection is lost.
        """
        offsets, nbytes = layout([leaf.nbytes for leaf in leaves])
        head = self._sealer.head(packed, payload_bytes=nbytes)
        longest = min(max(nbytes, len(packed) - FIRST_BYTES, 0), RECORD_BYTES)
        if len(self._buffer) < HEAD_BYTES + longest + TAG_BYTES:
            self._buffer = memoryview(bytearray(HEAD_BYTES + longest + TAG_BYTES))
        buffer = self._buffer
        buffer[:HEAD_BYTES] = head
        rest = memoryview(packed)[FIRST_BYTES:]
        plain_records = [rest[start:end] for start, end in records(rest.nbytes)]
        # Head and first record in one call: with TCP_NODELAY each call is a packet.
        filled = HEAD_BYTES
        for plain in chain(plain_records, self._payload(offsets, leaves, nbytes)):
            end = filled + plain.nbytes + TAG_BYTES
            self._sealer.record(plain, buffer[filled:end])
            self._socket.sendall(buffer[:end])
            filled = 0
        # Nothing followed the head: a short message without payload.
        if filled:
            self._socket.sendall(buffer[:filled])

    def _payload(
        self, offsets: Sequence[int], leaves: Sequence[memoryview], nbytes: int
    ) -> Iterator[memoryview]:
        """Yields the payload's records, of a long leaf without a copy."""
        placed = deque(zip(offsets, leaves, strict=True))
        for start, end in records(nbytes):
            # Leaves that end before this record were sent.
            while placed[0][0] + placed[0][1].nbytes <= start:
                placed.popleft()
            at, leaf = placed[0]
            if at <= start and end <= at + leaf.nbytes:
                yield leaf[start - at : end - at]
                continue
            if len(self._gathered) < end - start:
                self._gathered = memoryview(bytearray(end - start))
            for at, leaf in placed:
                if at >= end:
                    break
                first, last = max(at, start), min(at + leaf.nbytes, end)
                self._gathered[first - start : last - start] = leaf[first - at : last - at]
            yield self._gathered[: end - start]


def layout(sizes: Sequence[int]) -> tuple[tuple[int, ...], int]:
    """Returns where each leaf begins in the payload, and the payload's bytes."""
    offsets = []
    end = 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets.append(start)
        end = start + size
    return tuple(offsets), end


class MessageReader:
    """The receiving half of one end; used by one thread.

    Methods block; they raise OSError if the connection is lost, and ProtocolError if a message
    fails authentication or its packed part is longer than `max_packed_bytes`, before memory is
    allocated for it.
    """

    def __init__(
        self,
        connection: socket.socket,
        unsealer: Unsealer,
        *,
        max_packed_bytes: int,
    ) -> None:
        self._socket = connection
        self._unsealer = unsealer
        self._max_packed_bytes = max_packed_bytes
        self._head = memoryview(bytearray(HEAD_BYTES))
        self._sealed = memoryview(bytearray())
        # Counts for each call: only a connection without a single byte for that long is lost.
        seconds, rest = divmod(SILENCE_SECONDS, 1)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def head(self) -> tuple[bytes, int]:
        """Returns the next message and its payload's size; waits for its begin without limit."""
        self._fill(self._head, may_wait=True)
        head = self._unsealer.head(self._head)
        if not head.missing_bytes:
            return head.packed, head.payload_bytes
        if head.missing_bytes > self._max_packed_bytes:
            raise ProtocolError(f"a message of {head.missing_bytes} bytes")
        rest = bytearray(head.missing_bytes)
        self.read(memoryview(rest))
        return head.packed + rest, head.payload_bytes

    def read(self, memory: memoryview) -> None:
        """Receives as many bytes of the payload as `memory` has."""
        longest = min(memory.nbytes, RECORD_BYTES) + TAG_BYTES
        if len(self._sealed) < longest:
            self._sealed = memoryview(bytearray(longest))
        for start, end in records(memory.nbytes):
            sealed = self._sealed[: end - start + TAG_BYTES]
            self._fill(sealed)
            self._unsealer.record(sealed, memory[start:end])

    def _fill(self, view: memoryview, *, may_wait: bool = False) -> None:
        filled = 0
        while filled < view.nbytes:
            try:
                received = self._socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if may_wait and not filled:
                    # The next one is not made yet; TCP's keepalive notices a vanished host.
                    continue
                raise TimeoutError(f"no byte for {SILENCE_SECONDS:g} s") from None
            if not received:
                raise ConnectionResetError("closed by the other end")
            filled += received


class Connection:
    """One end of a worker's connection; `writer` and `reader` may be in two threads."""

    def __init__(
        self,
        connection: socket.socket,
        key: bytes,
        *,
        is_workers: bool = False,
        max_packed_bytes: int = 0,
    ) -> None:
        tune(connection)
        keys = ConnectionKeys.of(key)
        sent, received = (keys.batches, keys.orders) if is_workers else (keys.orders, keys.batches)
        self.socket = connection
        self.writer = MessageWriter(connection, Sealer(sent))
        self.reader = MessageReader(
            connection,
            Unsealer(received),
            max_packed_bytes=max_packed_bytes,
        )

    def shut(self) -> None:
        """Ends the connection and blocking calls of other threads; may be called twice."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shut()
        self.socket.close()
