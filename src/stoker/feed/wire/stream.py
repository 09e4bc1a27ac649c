"""Batches cross a TCP connection, sealed, and land in memory that is used again.

A batch is sealed with AES-256-GCM, record by record, and unsealed to where it will live.

Both ends block, in threads of their own: one call of the kernel moves up to 4 MiB without the
interpreter's lock, and no loop of ours turns in between. A batch may take as long as the network
takes for it: while bytes come, or go, the connection is alive.

Fresh memory for each batch costs its page faults (0.02 to 0.08 CPU-s/GB), so blocks are used again
once their last view is gone. A tensor's end says nothing about its memory: `detach()`, `numpy()`
and slices outlive it. So the finalizer sits on the one array that exports the block's buffer; every
view, of torch or NumPy, holds that array.
"""

import mmap
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stoker.errors import ProtocolError
from stoker.feed.wire.crypto import derive

KEY_BYTES = 32
TAG_BYTES = 16
# Of plain text a record. A call for each, with the interpreter's lock to be had anew: larger ones
# are fewer calls; beyond 1 MiB there is no gain otherwise, see benchmarks/README.md.
RECORD_BYTES = 4 << 20
# What a head has at least: nearly all packed messages fit.
HEAD_BYTES = 1024
# RFC 8446, 5.5: AES-GCM keys are good for 24 million full-size TLS records, 388 GB.
REKEY_BYTES = 64 * 10**9

_PREFIX = struct.Struct(">IIQ")
_NONCE = struct.Struct(">IQ")
# Of the packed message, in the head.
FIRST_BYTES = HEAD_BYTES - _PREFIX.size - TAG_BYTES
_NEXT_KEY = b"stoker feed v1 next batch key"

SessionEpoch = tuple[str, int]


def records(nbytes: int) -> Iterator[tuple[int, int]]:
    """Returns the plain text of `nbytes` in records: start and end of each."""
    return ((at, min(at + RECORD_BYTES, nbytes)) for at in range(0, nbytes, RECORD_BYTES))


class _Key:
    """The current key of a connection, and the number of the next record."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.generation = 0
        self.number = 0
        self.cipher = AESGCM(key)

    def next(self) -> "_Key":
        """Returns the key after this one."""
        made = _Key(derive(self._key, info=_NEXT_KEY))
        made.generation, made.number = self.generation + 1, self.number
        return made

    def nonce(self) -> bytes:
        """Returns the nonce of the next record."""
        return _NONCE.pack(self.generation, self.number)


class Sealer:
    """The sender's end of one connection; used by one thread.

    Args:
        key: As told to the receiver.
        rekey_bytes: Plain text under one key, about.
    """

    def __init__(self, key: bytes, *, rekey_bytes: int = REKEY_BYTES) -> None:
        self._now = _Key(key)
        self._rekey_bytes = rekey_bytes
        self._sealed_bytes = 0
        self._epochs: dict[str, int] = {}

    def head(self, packed: bytes, *, payload_bytes: int, of: SessionEpoch) -> bytes:
        """Returns the head of a batch: prefix, first record, padding. `record` seals what is left.

        Args:
            packed: The message that describes the batch.
            of: Session and epoch of the batch; another epoch than the session's batch before has
                another key.
        """
        session, epoch = of
        if self._epochs.setdefault(session, epoch) != epoch or (
            self._sealed_bytes >= self._rekey_bytes
        ):
            self._now, self._sealed_bytes = self._now.next(), 0
            self._epochs[session] = epoch
        now = self._now
        prefix = _PREFIX.pack(now.generation, len(packed), payload_bytes)
        sealed = now.cipher.encrypt(now.nonce(), packed[:FIRST_BYTES], prefix)
        now.number += 1
        self._sealed_bytes += len(packed) + payload_bytes
        return (prefix + sealed).ljust(HEAD_BYTES, b"\0")

    def record(self, plain: memoryview, into: memoryview) -> None:
        """Seals the next record into `into`, which has TAG_BYTES more than `plain`."""
        now = self._now
        now.cipher.encrypt_into(now.nonce(), plain, None, into)
        now.number += 1


@dataclass(frozen=True, slots=True)
class Head:
    """The authenticated head of a batch.

    Attributes:
        packed: The message, or its first part.
        missing_bytes: Of the message, in records of their own.
        payload_bytes: Of the payload, in the records that follow.
    """

    packed: bytes
    missing_bytes: int
    payload_bytes: int


class Unsealer:
    """The receiver's end of one connection; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._now = _Key(key)

    def head(self, head: memoryview) -> Head:
        """Decrypts HEAD_BYTES.

        Raises:
            ProtocolError: If it is not what the sender sealed next.
        """
        generation, packed_bytes, payload_bytes = _PREFIX.unpack_from(head)
        now = self._now.next() if generation == self._now.generation + 1 else self._now
        first_bytes = min(packed_bytes, FIRST_BYTES)
        sealed = head[_PREFIX.size : _PREFIX.size + first_bytes + TAG_BYTES]
        try:
            packed = now.cipher.decrypt(now.nonce(), sealed, head[: _PREFIX.size])
        except InvalidTag:
            raise ProtocolError("a batch's head is not what was sealed next") from None
        now.number += 1
        self._now = now
        return Head(packed, packed_bytes - first_bytes, payload_bytes)

    def record(self, sealed: memoryview, into: memoryview) -> None:
        """Decrypts the next record into `into`.

        Raises:
            ProtocolError: If it is not what the sender sealed next; what `into` holds then is
                nothing.
        """
        now = self._now
        try:
            now.cipher.decrypt_into(now.nonce(), sealed, None, into)
        except InvalidTag:
            raise ProtocolError("a batch's payload is not what was sealed next") from None
        now.number += 1


Bytes = npt.NDArray[np.uint8]

# Below this, the allocator's own reuse is as good.
SMALL_BYTES = 64 << 10


class _Lent(weakref.ref["Bytes"]):
    """A block and the array that exports it: a third of what `weakref.finalize` costs."""

    __slots__ = ("block", "free")
    block: mmap.mmap
    free: deque[mmap.mmap]


class BufferPool:
    """Hands out writable byte arrays; safe to use from several threads.

    Args:
        max_idle_bytes: Free blocks are kept up to this size in all.
    """

    def __init__(self, *, max_idle_bytes: int = 256 << 20) -> None:
        self._max_idle_bytes = max_idle_bytes
        # Size class to free blocks. Only atomic operations: a finalizer may run in any thread, at
        # any allocation, also while this object's own methods are on the stack.
        self._free: dict[int, deque[mmap.mmap]] = {}
        self._lent: dict[int, _Lent] = {}

    def take(self, size: int) -> Bytes:
        """Returns an array of `size` bytes with arbitrary content; free with its last view."""
        if size < SMALL_BYTES:
            return np.empty(size, dtype=np.uint8)
        size_class = _size_class(size)
        free = self._free.setdefault(size_class, deque())
        try:
            block = free.pop()
        except IndexError:
            block = mmap.mmap(-1, size_class)
        array = np.frombuffer(block, dtype=np.uint8, count=size)
        lent = _Lent(array, self._give_back)
        lent.free, lent.block = free, block
        self._lent[id(lent)] = lent
        return array

    def idle_bytes(self) -> int:
        """Returns the bytes of the blocks that wait to be used again."""
        return sum(size * len(free) for size, free in list(self._free.items()))

    def _give_back(self, lent: "_Lent") -> None:
        del self._lent[id(lent)]
        if self.idle_bytes() + len(lent.block) <= self._max_idle_bytes:
            lent.free.append(lent.block)


def _size_class(size: int) -> int:
    """Returns `size` rounded up: four classes to each doubling, at most 25 % is unused."""
    step = max(mmap.PAGESIZE, 1 << ((size - 1).bit_length() - 3))
    return -(-size // step) * step


# No byte for so long in the middle of a batch: the connection is lost.
SILENT_SECONDS = 30.0
# Where nothing is under way, a peer whose host is gone is noticed within 25 s, else within 30 s.
_TCP_OPTIONS = {
    socket.TCP_NODELAY: 1,
    socket.TCP_KEEPIDLE: 10,
    socket.TCP_KEEPINTVL: 5,
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 30_000,
}


def tune(connection: socket.socket) -> None:
    """Sets the options that both ends of a connection for batches want; it blocks from then on."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _TCP_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.settimeout(None)


class BatchWriter:
    """The data host's end of a connection; used by one thread.

    Args:
        pool: For the sealed records, one at a time.
    """

    def __init__(self, connection: socket.socket, sealer: Sealer, pool: BufferPool) -> None:
        self._socket = connection
        self._sealer = sealer
        self._pool = pool

    def write(self, packed: bytes, payload: memoryview | None, *, of: SessionEpoch) -> None:
        """Seals a batch and sends it; blocks until the kernel has taken all of it.

        Args:
            packed: The message that describes the batch.
            of: Its session and epoch.

        Raises:
            OSError: If the connection is lost.
        """
        payload_bytes = 0 if payload is None else payload.nbytes
        head = self._sealer.head(packed, payload_bytes=payload_bytes, of=of)
        longest = min(max(payload_bytes, len(packed) - FIRST_BYTES, 0), RECORD_BYTES)
        buffer = self._pool.take(HEAD_BYTES + longest + TAG_BYTES).data
        buffer[:HEAD_BYTES] = head
        # Head and first record go by one call.
        filled = HEAD_BYTES
        for plain in _plain_records(packed, payload):
            end = filled + plain.nbytes + TAG_BYTES
            self._sealer.record(plain, buffer[filled:end])
            self._socket.sendall(buffer[:end])
            filled = 0
        if filled:
            self._socket.sendall(buffer[:filled])


def _plain_records(packed: bytes, payload: memoryview | None) -> Iterator[memoryview]:
    for text in (memoryview(packed)[FIRST_BYTES:], payload):
        if text is not None:
            for start, end in records(text.nbytes):
                yield text[start:end]


class BatchReader:
    """The trainer's end of a connection; used by one thread.

    Args:
        pool: For the sealed records, one at a time.
        max_head_bytes: A longer message is refused before there is memory for it.
        silent_seconds: See SILENT_SECONDS.
    """

    def __init__(
        self,
        connection: socket.socket,
        unsealer: Unsealer,
        pool: BufferPool,
        *,
        max_head_bytes: int,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self._socket = connection
        self._unsealer = unsealer
        self._pool = pool
        self._max_head_bytes = max_head_bytes
        self._silent_seconds = silent_seconds
        self._head = memoryview(bytearray(HEAD_BYTES))
        # By the kernel. A call that has got some bytes by then returns these: that is progress.
        seconds, rest = divmod(silent_seconds, 1)
        timeout = struct.pack("ll", int(seconds), int(rest * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    def head(self, *, is_awaited: bool = False) -> tuple[bytes, int]:
        """Returns the packed message of the next batch, and the bytes of its payload; waits for it.

        Args:
            is_awaited: It must begin within `silent_seconds`; else it may come whenever it is made.

        Raises:
            OSError: If the connection is lost.
            ProtocolError: If it is not what was sealed next, or too large.
        """
        self._fill(self._head, may_wait=not is_awaited)
        head = self._unsealer.head(self._head)
        if not head.missing_bytes:
            return head.packed, head.payload_bytes
        if head.missing_bytes > self._max_head_bytes:
            raise ProtocolError(f"a batch whose description has {head.missing_bytes} bytes")
        rest = bytearray(head.missing_bytes)
        self.read(memoryview(rest))
        return head.packed + rest, head.payload_bytes

    def read(self, memory: memoryview) -> None:
        """Receives what `memory` has room for, and decrypts it into that.

        Raises:
            OSError: If the connection is lost.
            ProtocolError: If it is not what was sealed next.
        """
        # What was used a moment ago is still in the processor's cache; a batch's own memory is not.
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
                    continue
                raise TimeoutError(f"no byte for {self._silent_seconds:g} s") from None
            if not received:
                raise ConnectionResetError("the data host closed it")
            filled += received
