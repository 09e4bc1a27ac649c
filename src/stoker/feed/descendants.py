"""The processes below this one, as the kernel tells them."""

import contextlib
import os


def descendant_pids() -> list[int] | None:
    """Their pids; None where the kernel does not tell each thread's children.

    One that begins or ends meanwhile may be left out. Only these processes are asked, not all of
    the machine: in a process whose threads fight for the interpreter lock, every file that is read
    may take 5 ms.
    """
    if not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return None
    found = _children("self")
    for pid in found:
        found += _children(str(pid))
    return found


def _children(pid: str) -> list[int]:
    pids: list[int] = []
    with contextlib.suppress(OSError, ValueError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb", buffering=0) as file:
                pids += map(int, file.read().split())
    return pids
