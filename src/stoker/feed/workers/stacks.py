"""Stacks of data workers that are late, written by themselves even while native code runs.

A worker has faulthandler write the stacks of its threads to a file in memory when it gets
`STACKS_SIGNAL`: a handler in C, which needs neither the GIL nor the worker's attention. The process
that waits for a batch (an agent, a trainer) opens that file below /proc, and reads what comes.
"""

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import time

from stoker.feed.wire.imported_code import INSTALLED
from stoker.feed.wire.protocol import MAX_STACK_CHARACTERS

# A real-time signal: libraries use the others, and the watchdog SIGURG in a trainer's children.
STACKS_SIGNAL = signal.SIGRTMAX - 4
# To the first bytes of the stacks, and from the last ones: a stack takes less than a millisecond.
WRITE_SECONDS = 0.5
_QUIET_SECONDS = 0.01
_LOOK_SECONDS = 0.002
# Frames of the user's and of libraries below them that one line names.
_MAX_FRAMES = 4

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
_OF_STOKER = re.compile(r"[/\\]stoker[/\\]feed[/\\]|[/\\]torch[/\\]utils[/\\]data[/\\]_utils[/\\]")
# Files of stoker that call the user's code, in workers and in the process that unpickles.
_OUTERMOST = tuple(
    os.path.join(os.sep, "stoker", "feed", *file)
    for file in (("workers", "worker.py"), ("wire", "dataset.py"), ("agent", "forkserver.py"))
)
_STATES = {
    "D": "it waits in the kernel and takes no signal: its storage does not answer",
    "T": "it is stopped (SIGSTOP)",
    "t": "a debugger has stopped it",
    "Z": "it has ended",
}


def write_on_signal() -> int:
    """Has this process write its stacks on the signal; returns the file's descriptor, or -1."""
    with contextlib.suppress(OSError, ValueError, RuntimeError, AttributeError):
        descriptor = os.memfd_create(f"stoker-stacks-{os.getpid()}", os.MFD_CLOEXEC)
        faulthandler.register(STACKS_SIGNAL, file=descriptor, all_threads=True)
        return descriptor
    return -1


def stacks_of(pid: int, descriptor: int) -> str:
    """Returns the stacks of a worker's threads now, or in words why there are none.

    Blocks for some milliseconds; half a second if the worker cannot answer.

    Args:
        pid: Of a running worker on this host.
        descriptor: What `write_on_signal` returned there.
    """
    if descriptor < 0:
        return ""
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb", buffering=0) as file:
            # Stacks of earlier signals stay in the file: only what is added now is read.
            begin = os.fstat(file.fileno()).st_size
            os.kill(pid, STACKS_SIGNAL)
            end = _size_when_quiet(file.fileno(), begin)
            file.seek(begin)
            text = file.read(min(end - begin, MAX_STACK_CHARACTERS)).decode(errors="replace")
    except OSError:
        # Its process is gone, and with it the file below /proc.
        return _STATES["Z"]
    return text or _STATES.get(_state_of(pid), "")


def words_of(stacks: str) -> str:
    """Returns one line for stacks: the innermost frame of the user first, then what it calls."""
    # The innermost is first.
    frames = [*itertools.takewhile(_is_below_worker, _FRAME.finditer(_of_worker(stacks)))]
    if not frames:
        return stacks if stacks in _STATES.values() else ""
    users = [place for place, frame in enumerate(frames) if _is_users(frame["file"])]
    first = users[0] if users else 0
    calls = [_frame_words(frame) for frame in reversed(frames[: first + 1])]
    if len(calls) > _MAX_FRAMES:
        # Of a deep chain of calls: where it begins, and the function in which it is now.
        calls = [*calls[: _MAX_FRAMES - 1], calls[-1]]
    words = f"in {', calls '.join(calls)}"
    if len(users) > 1:
        caller = frames[users[1]]
        words += f"; called by {_frame_words(caller)}"
    return words


def _of_worker(stacks: str) -> str:
    """Returns the part of the thread that makes batches: faulthandler writes one a thread."""
    parts = stacks.split("\n\n")
    for part in parts:
        if any(f'{file}"' in part for file in _OUTERMOST):
            return part
    return parts[-1]


def _is_below_worker(frame: re.Match[str]) -> bool:
    return not frame["file"].endswith(_OUTERMOST)


def _is_users(file: str) -> bool:
    return not (INSTALLED.search(file) or _OF_STOKER.search(file) or file.startswith("<"))


def _frame_words(frame: re.Match[str]) -> str:
    file = frame["file"]
    shown = (
        os.sep.join(file.split(os.sep)[-2:]) if INSTALLED.search(file) else os.path.basename(file)
    )
    return f"{frame['name']} ({shown}:{frame['line']})"


def _size_when_quiet(descriptor: int, begin: int) -> int:
    """Waits until a file has grown from `begin` and grows no more; returns its size."""
    size = begin
    deadline = time.monotonic() + WRITE_SECONDS
    # In the future: before its first byte the file is not quiet yet.
    grown_at = deadline
    while (now := time.monotonic()) < deadline and now - grown_at < _QUIET_SECONDS:
        time.sleep(_LOOK_SECONDS)
        nbytes = os.fstat(descriptor).st_size
        if nbytes != size:
            size = nbytes
            grown_at = time.monotonic()
    return size


def _state_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            # Behind the program's name, in which there may be spaces and brackets.
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
