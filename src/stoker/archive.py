"""Archives from elsewhere, read in bounded memory and time."""

import io
import itertools
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

# Files of a code package: what packs it and what unpacks it agree.
MAX_CODE_FILES = 50_000
# Limit of a member's headers: its name, the name of a link, attributes.
MAX_HEADER_BYTES = 64 << 10
_BUFFER_BYTES = 64 << 10


class _Unzipped(io.RawIOBase):
    """The content of a .gz; reading beyond `limit` is an error."""

    def __init__(self, packed: IO[bytes], *, limit: int) -> None:
        self._packed = packed
        self._rest = b""
        # gzip.GzipFile would read a long name in a header byte by byte.
        self._unzip = zlib.decompressobj(wbits=31)
        self._num_read = 0
        self.limit = limit

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        chunk = b""
        while not chunk:
            packed = self._rest or self._packed.read(_BUFFER_BYTES)
            if not packed:
                if self._unzip.eof:
                    return b""
                raise tarfile.ReadError("it breaks off")
            if self._unzip.eof:
                self._unzip = zlib.decompressobj(wbits=31)
            chunk = self._unzip.decompress(packed, size if size > 0 else _BUFFER_BYTES)
            self._rest = self._unzip.unconsumed_tail or self._unzip.unused_data
        self._num_read += len(chunk)
        if self._num_read > self.limit:
            raise tarfile.ReadError(f"too large: a header or the archive, at byte {self._num_read}")
        return chunk


def members(
    packed: IO[bytes], *, max_bytes: int, max_members: int
) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yields the members of a .tar.gz, each with the archive to extract it from at once.

    Raises tarfile.TarError if it is not an archive, or has more than `max_bytes` unpacked.
    """
    # tarfile reads a header whole, whatever its size: this ends before that.
    margin = MAX_HEADER_BYTES + _BUFFER_BYTES
    content = _Unzipped(packed, limit=margin)
    try:
        with tarfile.open(fileobj=content, mode="r|", bufsize=_BUFFER_BYTES) as archive:
            for number in itertools.count(1):
                member = archive.next()
                if member is None:
                    return
                if number > max_members:
                    raise tarfile.ReadError(f"too large: more than {max_members} members")
                # The offset of the next header. tarfile does not stop at the end of a stream.
                if archive.offset > max_bytes:
                    raise tarfile.ReadError(f"too large: more than {max_bytes} bytes")
                content.limit = archive.offset + margin
                yield archive, member
                # It would keep them all.
                getattr(archive, "members").clear()  # noqa: B009
    except zlib.error as err:
        raise tarfile.ReadError(str(err)) from err
