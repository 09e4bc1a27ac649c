"""What a job left in S3: the dnn leader's records, unpacked with care."""

import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import IO

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws, AwsError

FOLDER = "stoker"
# The archive may hold outputs of the user's own, too, which are read over: a bound on all of it.
MAX_ARCHIVE_BYTES = 16 << 30
# Records, timelines and failures: 64 MiB a file, for a day of steps in a timeline.
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 1000


def fetch_outputs(aws: Aws, uri: str, *, folder: Path) -> Path | None:
    """Unpacks stoker/ of an output.tar.gz to `folder`; gives `folder`, or None without outputs.

    Only regular files below stoker/ are written, whatever else the archive holds.

    Raises:
        AwsError: If the archive cannot be read.
        PlatformError: If it is no archive, or larger than can be meant.
    """
    try:
        with aws.open_object(uri) as content:
            num_files = _unpack(content, folder, where=uri)
    except AwsError as err:
        if err.is_missing:
            return None
        raise
    return folder if num_files else None


def _unpack(content: IO[bytes], folder: Path, *, where: str) -> int:
    num_files = total = 0
    try:
        with tarfile.open(fileobj=_Bounded(content, where=where), mode="r|gz") as archive:
            for member in archive:
                target = _target(member, folder)
                if target is None:
                    continue
                num_files += 1
                total += member.size
                if member.size > MAX_FILE_BYTES or total > MAX_TOTAL_BYTES or num_files > MAX_FILES:
                    raise _too_large(where, f"{member.name} of {member.size} bytes is too much")
                source = archive.extractfile(member)
                assert source is not None
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())
    except (tarfile.TarError, EOFError, zlib.error, OSError) as err:
        raise PlatformError(f"the job's outputs cannot be unpacked: {err}", where=where) from err
    return num_files


def _target(member: tarfile.TarInfo, folder: Path) -> Path | None:
    """Where a member belongs; None for what is not a regular file below stoker/."""
    path = PurePosixPath(member.name)
    if not member.isreg() or path.is_absolute() or ".." in path.parts:
        return None
    if len(path.parts) < 2 or path.parts[0] != FOLDER:
        return None
    return folder / path


def _too_large(where: str, what: str) -> PlatformError:
    return PlatformError(f"the job's outputs are larger than stoker's can be: {what}", where=where)


class _Bounded(io.RawIOBase):
    """A stream of which at most MAX_ARCHIVE_BYTES are read."""

    def __init__(self, content: IO[bytes], *, where: str) -> None:
        self._content = content
        self._where = where
        self._left = MAX_ARCHIVE_BYTES

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1) -> bytes:
        """The next bytes."""
        chunk = self._content.read(size)
        self._left -= len(chunk)
        if self._left < 0:
            raise _too_large(self._where, f"more than {MAX_ARCHIVE_BYTES} bytes")
        return chunk
