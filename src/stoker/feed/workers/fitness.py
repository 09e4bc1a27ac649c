"""Whether samples have left their process fit to make and send batches.

One may close the channel to the pool, or lower the limits of its process (ulimit) for good. A lower
limit is no harm as such: a dataset may guard its host's memory by one. It is where no file can be
opened any more, no memory mapped, no thread started.
"""

import _thread
import contextlib
import mmap
import os
import resource
import threading
import time
from typing import NoReturn

from stoker.feed.lost_samples import LostSample
from stoker.feed.workers.pipe import (
    CHANGED,
    DISCONNECTED,
    DOUBTED,
    LIMITED,
    LastWords,
    LeftChanged,
    Pipe,
    SampleFailed,
    pack,
)

_NAMES = (
    "RLIMIT_NOFILE",
    "RLIMIT_AS",
    "RLIMIT_DATA",
    "RLIMIT_FSIZE",
    "RLIMIT_NPROC",
    "RLIMIT_STACK",
    "RLIMIT_CPU",
)
_NUMBERS = tuple(getattr(resource, name) for name in _NAMES)
# What a worker has to be able to do: a few files at a time, and a batch's memory.
_NUM_FILES = 8
_NUM_BYTES = 16 << 20
# Below these a process ends at the next deep call, or soon.
_MIN_STACK_BYTES = 1 << 20
_MIN_CPU_SECONDS = 60
# For a thread to run.
_THREAD_SECONDS = 2.0

_Limits = tuple[float, ...]


class Fitness:
    """Whether this worker can go on; if it cannot, it ends, and another one takes its place."""

    def __init__(self, channel: Pipe) -> None:
        self._channel = channel
        self._known = _limits()

    def check(self) -> None:
        """Ends this process if it is not fit: which sample it was at stays where the pool reads it.

        Takes 3 us, and where a limit has changed a millisecond.
        """
        if not self._channel.is_connected():
            os._exit(DISCONNECTED)
        trouble = self._trouble()
        if trouble:
            self._end(LastWords(trouble), LIMITED)

    def end_changed(self, samples: list[LostSample], words: str) -> NoReturn:
        """Ends this process, as a bad sample has left it changed.

        Args:
            samples: The bad ones of this batch with their own errors, which count.
            words: What the last one has changed.
        """
        self._end(LeftChanged(samples, words), CHANGED)

    def note_failed(self, sample: LostSample) -> None:
        """Says that a sample of this batch is bad, should a later one end or block this process."""
        self._channel.send(pack(SampleFailed(sample)))

    def end_doubted(self, samples: list[LostSample], doubted: LostSample | None) -> NoReturn:
        """Ends this process, as samples that have failed in it may have spoilt it.

        Args:
            samples: The bad ones of this batch with their own errors, which count.
            doubted: The one behind them, which another process makes.
        """
        self._end(LeftChanged(samples, "", doubted), DOUBTED)

    def _end(self, message: LastWords | LeftChanged, code: int) -> NoReturn:
        # Without memory it ends without words.
        try:
            self._channel.send(pack(message))
        finally:
            os._exit(code)

    def _trouble(self) -> str:
        """Returns limits that were lowered, in words, if no batch can be made; else nothing."""
        now = _limits()
        if now == self._known:
            return ""
        lowered: list[str] = []
        for name, limit, before in zip(_NAMES, now, self._known, strict=True):
            if limit < before:
                lowered.append(f"{name} is {limit:.0f}")
        if lowered and not _can_work():
            return ", ".join(lowered)
        self._known = now
        return ""


def _limits() -> _Limits:
    limits: list[float] = []
    for number in _NUMBERS:
        soft, _ = resource.getrlimit(number)
        limits.append(float("inf") if soft == resource.RLIM_INFINITY else soft)
    return tuple(limits)


def _can_work() -> bool:
    """Tries what a worker does for each batch."""
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    seconds, _ = resource.getrlimit(resource.RLIMIT_CPU)
    if 0 <= stack < _MIN_STACK_BYTES:
        return False
    if 0 <= seconds < time.process_time() + _MIN_CPU_SECONDS:
        return False
    try:
        with contextlib.ExitStack() as files:
            for _ in range(_NUM_FILES):
                descriptor = os.memfd_create("stoker-limits", os.MFD_CLOEXEC)
                files.callback(os.close, descriptor)
            os.ftruncate(descriptor, _NUM_BYTES)
            mmap.mmap(descriptor, _NUM_BYTES).close()
        mmap.mmap(-1, _NUM_BYTES, flags=mmap.MAP_PRIVATE).close()
        has_run = threading.Lock()
        has_run.acquire()
        # Not Thread.start, which waits for ever for one that finds no memory.
        _thread.start_new_thread(has_run.release, ())
        return has_run.acquire(timeout=_THREAD_SECONDS)
    except (OSError, MemoryError, RuntimeError, ValueError):
        return False
