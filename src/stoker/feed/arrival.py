"""A pickled spec on its way to a data host: it comes in pieces, each of which is encrypted, sent,
decrypted and written while the others are on their way."""

import mmap
import os

from stoker.errors import ProtocolError
from stoker.feed.shipping import digest

# Smaller ones are more messages; with larger ones sender and receiver wait for each other. 6 MB,
# encrypted, on one busy machine: 29 ms from Need to the memory in one piece, its digest included;
# 12 ms in pieces of this size, the digest taken later, beside the holder's work.
PIECE_BYTES = 512 << 10


class Arrival:
    """The memory that the pieces are written to.

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
        """Whether all together are the spec; 0.8 ms a MB."""
        with mmap.mmap(self.descriptor, 0, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
            return digest(view) == self._name

    def close(self) -> None:
        """Frees the memory, unless another process has it; may be called twice."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
