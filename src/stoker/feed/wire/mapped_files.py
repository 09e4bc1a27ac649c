"""Parts of files that are mapped into this process's memory."""

import os
import re
from collections.abc import Iterator
from typing import NamedTuple

# Addresses, rights, offset, device, inode, path: see proc_pid_maps(5).
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) ([0-9a-f]+) \S+ \d+ +(/.*)")
_ESCAPED = re.compile(r"\\([0-7]{3})")


class MappedPart(NamedTuple):
    """Bytes of a file that this process reads through its memory.

    Attributes:
        path: Absolute.
        offset: Of the part in the file, in bytes.
        file_bytes: Size of the file.
        is_writable: Changes are possible, and private to the process.
    """

    path: str
    offset: int
    nbytes: int
    file_bytes: int
    is_writable: bool


def mapped_part(address: int, nbytes: int) -> MappedPart | None:
    """Returns what of which file is at an address; None if it is no file's, or differs from it.

    Memory that changes a file, a file that was removed, and private memory that was written to
    are none.

    Args:
        address: First byte in memory.
        nbytes: Their number.
    """
    for begin, end, rights, offset, path in _mappings():
        if not begin <= address < end:
            continue
        is_writable = "w" in rights
        if address + nbytes > end or (is_writable and (rights[3] != "p" or _is_changed(begin))):
            return None
        try:
            file_bytes = os.stat(path).st_size
        except OSError:
            # Removed: the path ends with " (deleted)".
            return None
        start = offset + address - begin
        if start + nbytes > file_bytes:
            return None
        return MappedPart(path, start, nbytes, file_bytes, is_writable)
    return None


def _mappings() -> Iterator[tuple[int, int, str, int, str]]:
    """Yields first and last address, rights, offset and path of mapped files."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mapping = _MAPPING.match(line)
            if mapping is not None:
                begin, end, rights, offset, path = mapping.groups()
                plain = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), path)
                yield int(begin, 16), int(end, 16), rights, int(offset, 16), plain


def _is_changed(address: int) -> bool:
    """Returns whether a private mapping has pages that differ from its file."""
    head = f"{address:08x}-"
    is_there = False
    with open("/proc/self/smaps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            is_there = is_there or line.startswith(head)
            if is_there and line.startswith("Anonymous:"):
                return int(line.split()[1]) > 0
    return True
