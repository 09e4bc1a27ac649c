"""What happens beside timed steps: the interpreter lock, quotas, other programs."""

import threading
import time

import msgspec

from stoker.host.machine import groups_of
from stoker.host.usage import (
    children_cpu_seconds,
    machine_cpu_seconds,
    thread_seconds,
    throttling,
)
from stoker.profile.rank_results import Evidence

# 50 looks per second in a busy interpreter take 0.3% of a vCPU.
LOOK_SECONDS = 0.02
# Python code gives the lock up after 5 ms, if asked; torch's operations do not hold it as long.
HELD_SECONDS = 0.004


class StepWatch:
    """Observes the reading thread's steps, the process's threads and the machine, at little cost.

    While steps are watched, another thread looks: it sleeps, and measures how long it then waits
    for the interpreter lock. It does not exist when workers are forked.

    Attributes:
        is_reading: The reading thread is in next().
    """

    def __init__(self) -> None:
        self.is_reading = False
        self.result = Evidence()
        self._steps = self._looks = self._held_looks = 0
        self._began: Evidence | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def got(self, *, is_counted: bool) -> None:
        """Records that the reading thread has its batch; steps before `is_counted` are warm-up."""
        self.is_reading = False
        if self._began is not None:
            self._steps += 1
        elif is_counted:
            self._began = self._sums()
            self._is_over = threading.Event()
            self._thread = threading.Thread(target=self._look, name="stoker-watch", daemon=True)
            self._thread.start()

    def pause(self) -> None:
        """Blocks for a moment, until the looking thread has ended; may be called twice."""
        self.is_reading = False
        if self._thread is None or self._began is None:
            return
        self._is_over.set()
        self._thread.join()
        now = self._sums()
        sums = {
            name: getattr(self.result, name) + getattr(now, name) - getattr(self._began, name)
            for name in Evidence.__struct_fields__
        }
        self.result = msgspec.convert(sums, Evidence)
        self._began = self._thread = None

    def _sums(self) -> Evidence:
        """Returns all counters as they are now, in the reading thread."""
        # Groups are nested, and each may have a quota: the one that stopped it longest counts.
        stopped_seconds, stopped_periods, periods = max(
            (throttling(group) for group in groups_of("cpu")), default=(0.0, 0, 0)
        )
        return Evidence(
            seconds=time.monotonic(),
            steps=self._steps,
            own_cpu_seconds=time.thread_time(),
            process_seconds=time.process_time(),
            children_seconds=children_cpu_seconds(),
            looks=self._looks,
            held_looks=self._held_looks,
            busy_seconds=machine_cpu_seconds(),
            periods=periods,
            throttled_periods=stopped_periods,
            throttled_seconds=stopped_seconds,
        )

    def _look(self) -> None:
        while not self._is_over.is_set():
            _, queued = thread_seconds("/proc/thread-self")
            slept_at = time.monotonic()
            time.sleep(LOOK_SECONDS)
            late = time.monotonic() - slept_at - LOOK_SECONDS
            self._looks += 1
            if not self.is_reading:
                # Without the time in which it could run and others had the CPU.
                late -= thread_seconds("/proc/thread-self")[1] - queued
                self._held_looks += late >= HELD_SECONDS
