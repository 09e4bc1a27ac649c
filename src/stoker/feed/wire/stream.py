"""Transfer of sealed batches over TCP, into memory that is reused.

Both ends block, in threads: one system call moves up to 4 MiB without the GIL. A batch may take as
long as the network needs: while bytes flow, the connection is alive.

Fresh memory for each batch costs page faults (0.02 to 0.08 CPU-s/GB), so blocks are reused once
their last view is gone.
"""

import contextlib
import mmap
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from stoker.errors import ProtocolError
from stoker.feed.wire.sealing import (
    FIRST_BYTES,
    HEAD_BYTES,
    RECORD_BYTES,
    TAG_BYTES,
    Sealer,
    SessionEpoch,
    Unsealer,
    records,
)

Bytes = npt.NDArray[np.uint8]

# Below this the allocator reuses memory as well.
SMALL_BYTES = 64 << 10
# Bytes of a line of a processor's caches, at which torch's memory begins.
_LINE = 64
# Without a byte for that long in the middle of a batch the connection is lost.
RECEIVE_TIMEOUT_SECONDS = 30.0
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
        if size < SMALL_BYTES:
            # Products of matrices take another way through memory that begins elsewhere.
            memory: Bytes = np.empty(size + _LINE, dtype=np.uint8)
            start = -memory.ctypes.data % _LINE
            return np.frombuffer(memory.data, dtype=np.uint8, count=size, offset=start)
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

    def keep_at_most(self, max_idle_bytes: int) -> None:
        """Sets how many bytes of unused blocks are kept, and gives the others back."""
        self._max_idle_bytes = max_idle_bytes
        for free in list(self._free.values()):
            while free and self.idle_bytes() > max_idle_bytes:
                # Another thread may have taken the last one.
                with contextlib.suppress(IndexError):
                    free.pop()

    def idle_bytes(self) -> int:
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _give_back(self, lent: "_Lent") -> None:
        del self._lent[id(lent)]
        # No lock: a finalizer must not wait. Two threads may exceed the bound by one block.
        if self.idle_bytes() + len(lent.block) <= self._max_idle_bytes:
            lent.free.append(lent.block)


def tune(connection: socket.socket) -> None:
    """Sets the options of both ends of a connection for batches; makes it blocking."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    # With a timeout, Python would poll before each call; the reader sets SO_RCVTIMEO instead.
    connection.settimeout(None)


class BatchWriter:
    """The data host's end of a connection for sealed batches; used by one thread."""

    def __init__(self, connection: socket.socket, sealer: Sealer, pool: BufferPool) -> None:
        self._socket = connection
        self._sealer = sealer
        self._pool = pool

    def write(self, packed: bytes, payload: memoryview | None, *, of: SessionEpoch) -> None:
        """Seals a batch and sends it; blocks until the kernel has taken it.

        Args:
            packed: The message that describes it.
            payload: Its buffers; None: it has none.
            of: Session and epoch, whose key seals it.

        Raises:
            OSError: The connection is lost.
        """
        payload_bytes = 0 if payload is None else payload.nbytes
        head = self._sealer.head(packed, payload_bytes=payload_bytes, of=of)
        longest = min(max(payload_bytes, len(packed) - FIRST_BYTES, 0), RECORD_BYTES)
        buffer = self._pool.take(HEAD_BYTES + longest + TAG_BYTES).data
        buffer[:HEAD_BYTES] = head
        # Head and first record in one call: with TCP_NODELAY each call is a packet.
        filled = HEAD_BYTES
        for plain in _plain_records(packed, payload):
            end = filled + plain.nbytes + TAG_BYTES
            self._sealer.record(plain, buffer[filled:end])
            self._socket.sendall(buffer[:end])
            filled = 0
        # Nothing followed the head: a short message without payload.
        if filled:
            self._socket.sendall(buffer[:filled])


def _plain_records(packed: bytes, payload: memoryview | None) -> Iterator[memoryview]:
    for text in (memoryview(packed)[FIRST_BYTES:], payload):
        if text is not None:
            for start, end in records(text.nbytes):
                yield text[start:end]


class BatchReader:
    """The trainer's end of a connection for sealed batches; used by one thread.

    A message of more than `max_head_bytes` is refused before memory is allocated for it. Methods
    block; they raise OSError if the connection is lost, and ProtocolError if authentication fails.
    """

    def __init__(
        self,
        connection: socket.socket,
        unsealer: Unsealer,
        pool: BufferPool,
        *,
        max_head_bytes: int,
        receive_timeout_seconds: float = RECEIVE_TIMEOUT_SECONDS,
    ) -> None:
        self._socket = connection
        self._unsealer = unsealer
        self._pool = pool
        self._max_head_bytes = max_head_bytes
        self._receive_timeout_seconds = receive_timeout_seconds
        self._head = memoryview(bytearray(HEAD_BYTES))
        # Counts for each call: only a connection without a single byte for that long is lost.
        seconds, rest = divmod(receive_timeout_seconds, 1)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def head(self, *, is_awaited: bool = False) -> tuple[bytes, int]:
        """Returns the next batch's packed message and payload size; no limit if not awaited."""
        self._fill(self._head, may_wait=not is_awaited)
        head = self._unsealer.head(self._head)
        if not head.missing_bytes:
            return head.packed, head.payload_bytes
        if head.missing_bytes > self._max_head_bytes:
            raise ProtocolError(f"description of a batch with {head.missing_bytes} bytes")
        rest = bytearray(head.missing_bytes)
        self.read(memoryview(rest))
        return head.packed + rest, head.payload_bytes

    def read(self, memory: memoryview) -> None:
        # Recently used memory is still in the processor's cache.
        room = self._pool.take(min(memory.nbytes, RECORD_BYTES) + TAG_BYTES).data
        for start, end in records(memory.nbytes):
            sealed = room[: end - start + TAG_BYTES]
            self._fill(sealed)
            self._unsealer.record(sealed, memory[start:end])

    def _fill(self, view: memoryview, *, may_wait: bool = False) -> None:
        filled = 0
        while filled < view.nbytes:
            try:
                received = self._socket.recv_into(view[filled:], 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if may_wait and not filled:
                    # The next batch is not made yet; TCP's keepalive notices a vanished host.
                    continue
                raise TimeoutError(f"no byte for {self._receive_timeout_seconds:g} s") from None
            if not received:
                raise ConnectionResetError("connection closed by the data host")
            filled += received
