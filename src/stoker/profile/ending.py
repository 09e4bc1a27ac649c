"""A profiled process ends at once: without the script's exit handlers, and with nothing left."""

import contextlib
import os
import signal
import sys
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import NoReturn

import psutil

from stoker.host.counters import descendants
from stoker.settings import PROFILE_ENDED_FILE

_GRACE_SECONDS = 2.0
# torchrun does nothing of the user's behind its ranks, and says itself how they ended.
_SPARED = ("torch.distributed.run", "torchrun", "stoker.launch.strategies.elastic")


def end_process(*, folder: Path, launcher_pid: int | None) -> NoReturn:
    """Kills the processes below this one, and those above it up to the launcher; ends it with 0.

    Neither the script's own exit handlers (a last checkpoint, an upload) nor what a shell script, a
    notebook or a parent would do behind it may run: the training was cut off. Multiprocessing's
    tracker is spared: it cleans up and ends by itself.

    Args:
        folder: STOKER_OUTPUT, where the launcher finds that this end is none of the command's.
        launcher_pid: None where nobody above this process is to be ended.
    """
    try:
        # Torch's handler would raise in the script, for a worker that was killed here.
        is_main = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT) if is_main else ():
            signal.signal(number, signal.SIG_DFL if number == signal.SIGCHLD else signal.SIG_IGN)
        with contextlib.suppress(OSError):
            (folder / PROFILE_ENDED_FILE).touch()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        doomed = [*_above(launcher_pid), *_below()]
        for process in doomed:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        if is_main:
            psutil.wait_procs(doomed, timeout=_GRACE_SECONDS)
    finally:
        os._exit(0)


def _below() -> list[psutil.Process]:
    tracker: object = getattr(resource_tracker, "_resource_tracker", None)
    spared = getattr(tracker, "_pid", None)
    return [child for child in descendants() if child.pid != spared]


def _above(launcher_pid: int | None) -> list[psutil.Process]:
    """Returns the processes between the launcher and this one, the uppermost first."""
    try:
        above = psutil.Process().parents()
    except psutil.Error:
        return []
    pids = [process.pid for process in above]
    if launcher_pid not in pids:
        return []
    between = above[: pids.index(launcher_pid)]
    return [process for process in reversed(between) if not _is_torchrun(process)]


def _is_torchrun(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()[:4]
    except psutil.Error:
        return False
    return any(word.endswith(_SPARED) for word in words)
