"""Containers without an engine: process trees with their own mounts and process numbers.

A container is made as a runtime makes it, by `unshare` and a shell, and its command is the first
process in there. forked_tree.py reads these words, and makes the same of a process that it forks.
"""

import ctypes
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

# With it the first process ends, and with that all others do.
_RUNTIME = ("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
_HEAD = (*_RUNTIME, "sh", "-ec", 'eval "$1"; cd "$2"; shift 2; exec "$@"', "sh")
# What `unshare --mount --mount-proc` does first.
_OWN_MOUNTS = "mount --make-rprivate /; mount -t proc proc /proc"
_CLONE = {"net": 0x40000000, "uts": 0x04000000, "mount": 0x00020000, "pid": 0x20000000}
_PR_SET_PDEATHSIG = 1


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


def read_words(words: Sequence[str]) -> tuple[Container | None, list[str]]:
    """Returns the container that words make, if they make one, and the command that it runs."""
    for start in range(len(words) - len(_HEAD) - 1):
        end = start + len(_HEAD)
        if tuple(words[start:end]) == _HEAD:
            mounts, folder, *command = words[end:]
            return Container(network=words[:start], mounts=mounts, folder=folder), command
    return None, [*words]


def enter(container: Container) -> None:
    """Makes a container, and returns as its first process; the one that called waits for it."""
    libc = ctypes.CDLL(None)
    # `nsenter --net=FILE`, or `unshare --net`.
    for word in container.network[1:]:
        kind, _, place = word.removeprefix("--").partition("=")
        if not place:
            assert libc.unshare(_CLONE[kind]) == 0, word
            continue
        with open(place) as file:
            assert libc.setns(file.fileno(), _CLONE[kind]) == 0, word
    assert libc.unshare(_CLONE["mount"] | _CLONE["pid"]) == 0, "no new namespaces"
    first = os.fork()
    if first:
        _end_as(first)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    script = f"{_OWN_MOUNTS}\n{container.mounts}"
    subprocess.run(["sh", "-ec", script], check=True, stdin=subprocess.DEVNULL)
    os.chdir(container.folder)


def _end_as(pid: int) -> NoReturn:
    """Ends when a process does, and as it did; until then only what kills it ends it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)
