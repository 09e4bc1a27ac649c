"""Containers without an engine: process trees with their own mounts and process numbers.

A container is made as a runtime makes it, by `unshare` and a shell, and its command is the first
process in there.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# With it the first process ends, and with that all others do.
_RUNTIME = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_HEAD = (*_RUNTIME, "sh", "-ec", 'eval "$1"; cd "$2"; shift 2; exec "$@"', "sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What a container's first process has when it begins.

    Attributes:
        network: Words before the command that enter a network, or make an empty one.
        mounts: A shell script that mounts what only this container sees.
        folder: Where its command begins, as it is called in there.
    """

    network: Sequence[str] = ()
    mounts: str
    folder: str

    def words(self, command: Sequence[str]) -> list[str]:
        """Returns the words that run a command in a new container of this kind."""
        return [*self.network, *_HEAD, self.mounts, self.folder, *command]


def bound(source: Path, place: str) -> str:
    """Returns the line of a script that shows a file or folder of this machine at a place."""
    return f"mount --bind {shlex.quote(str(source))} {shlex.quote(place)}\n"
