"""The kernel's books of what a process has read."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BytesRead:
    """So far, of one process.

    Attributes:
        asked: Through the system's read calls, whether or not the page cache had it.
        fetched: From storage.
    """

    asked: int
    fetched: int


def bytes_read(pid: int | None = None) -> BytesRead | None:
    """What process `pid`, else this one, has read; None where the kernel does not tell."""
    found = {}
    try:
        with open(f"/proc/{'self' if pid is None else pid}/io", encoding="ascii") as file:
            for line in file:
                name, _, value = line.partition(":")
                found[name] = int(value)
        return BytesRead(asked=found["rchar"], fetched=found["read_bytes"])
    except (OSError, ValueError, KeyError):
        return None
