"""A sleep that tells how late the machine ended it; the interpreter lock is not in that."""

import contextlib
import ctypes
import os
import time

# The machine's lateness is known to this much.
TICK_SECONDS = 50e-6
_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000


class _TimerSpec(ctypes.Structure):
    """The kernel's `struct itimerspec`: after how long it expires first, and then how often."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Alarm:
    """Wakes one thread after a while, or when another thread calls `ring`; close it after use.

    A thread may be late because the machine wakes it late (a virtual machine whose vCPU was given
    away, a busy CPU, timer slack) or because it waits for the interpreter lock. To tell one from
    the other, it sleeps in a read of a timer that ticks on: the kernel counts the ticks when the
    thread runs again, before it asks for the lock.
    """

    def __init__(self) -> None:
        self._is_rung = False
        self._timer: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            # PyDLL keeps the lock during a call: to give it up would be to wait for it again.
            libc = ctypes.PyDLL(None, use_errno=True)
            self._set = libc.timerfd_settime
            timer = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
            self._timer = timer if timer >= 0 else None

    def sleep(self, seconds: float) -> float:
        """Returns after `seconds`, or at once when the alarm has been rung.

        Returns:
            Seconds by which the machine woke this thread too late; 0 where the kernel does not
            tell, as outside Linux.
        """
        if self._timer is None:
            if not self._is_rung:
                time.sleep(seconds)
            return 0.0
        self._expire_in(seconds)
        # After the timer is set: a call of `ring` from now on sets it anew.
        if self._is_rung:
            return 0.0
        ticks = int.from_bytes(os.read(self._timer, 8), "little")
        return (ticks - 1) * TICK_SECONDS

    def ring(self) -> None:
        """Ends the sleep, and all later ones at once."""
        self._is_rung = True
        if self._timer is not None:
            self._expire_in(1 / _NANOSECONDS)

    @property
    def is_rung(self) -> bool:
        """Whether `ring` was called."""
        return self._is_rung

    def close(self) -> None:
        """May be called twice, by nobody's sleep."""
        if self._timer is not None:
            os.close(self._timer)
            self._timer = None

    def _expire_in(self, seconds: float) -> None:
        whole, rest = divmod(max(1, round(seconds * _NANOSECONDS)), _NANOSECONDS)
        spec = _TimerSpec(0, round(TICK_SECONDS * _NANOSECONDS), whole, rest)
        self._set(self._timer, 0, ctypes.byref(spec), None)
