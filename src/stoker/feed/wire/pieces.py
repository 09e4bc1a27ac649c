"""Pieces carry what is too long for one frame: pickled datasets, and long messages."""

import mmap
import os

from stoker.errors import ProtocolError
from stoker.feed.wire.dataset import digest

# As large as fits a frame (crypto.MAX_CONTROL_BYTES) next to its message. 6 MB, encrypted, on one
# busy machine, from Need to the memory: 29 ms in one piece, its digest included; 12 ms in pieces of
# 512 KiB, the digest taken while the spec is unpickled; 2 ms more in pieces of this size.
PIECE_BYTES = 240 << 10
# Long messages that are under way at a time.
_MAX_UNFINISHED = 64


class Arrival:
    """The memory that the pieces of a spec are written to.

    Args:
        name: The spec's: what `digest` says of all pieces together.
        nbytes: Of them together.

    Attributes:
        descriptor: Of the memory; closed by `close`.

    Raises:
        OSError: If there is no memory.
    """

    def __init__(self, name: str, *, nbytes: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._taken = 0
        self.descriptor = os.memfd_create(f"stoker-spec-{name}", os.MFD_CLOEXEC)

    def take(self, piece: bytes | memoryview, *, offset: int) -> bool:
        """Writes the next piece; True if it was the last one.

        Raises:
            ProtocolError: If it is not the next one.
            OSError: If there is no memory.
        """
        end = offset + len(piece)
        if offset != self._taken or end > self._nbytes or not len(piece):
            raise ProtocolError(f"a piece of a spec from {offset} to {end}, not {self._taken}")
        view = memoryview(piece)
        while view:
            view = view[os.write(self.descriptor, view) :]
        self._taken = end
        return end == self._nbytes

    def is_right(self) -> bool:
        """Tells whether all together are the spec; 0.8 ms a MB."""
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
            return digest(view) == self._name

    def close(self) -> None:
        """Frees the memory, unless another process has it; may be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Assembly:
    """Long messages of several peers, as far as their pieces have come.

    Args:
        max_bytes: Of one message.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._parts: dict[bytes, bytearray] = {}

    def take(self, peer: bytes, piece: bytes | memoryview, *, is_last: bool) -> bytearray | None:
        """Adds a piece; returns the message, if it was the last one.

        Raises:
            ProtocolError: If the message is too long; it is forgotten.
        """
        whole = self._parts.pop(peer, None) or bytearray()
        whole += piece
        if len(whole) > self._max_bytes:
            raise ProtocolError(f"a message of more than {self._max_bytes} bytes")
        if is_last:
            return whole
        self._parts[peer] = whole
        while len(self._parts) > _MAX_UNFINISHED:
            # Of a peer that is gone, for others send theirs without a pause.
            del self._parts[next(iter(self._parts))]
        return None
