"""What other programs use of a run's hosts while it trains: by the kernel's counters.

Each launcher looks at the counters of its own host every few seconds; other hosts send theirs to
the leader with their heartbeats. The record has the busiest quarter of each host's time: programs
that come for the second half would be half as many in a mean over all of it.
"""

import time
from collections.abc import Callable, Sequence

from stoker.feed.wire.protocol import OthersCpu
from stoker.host.counters import others_cpu_seconds
from stoker.host.machine import vcpu_capacity
from stoker.records import OtherPrograms
from stoker.repeat import Clock

LOOK_SECONDS = 3.0
_QUARTERS = 4
# Shorter ones are the noise of starts.
_LEAST_SECONDS = 3.0
# Then every second look is dropped.
_MOST_LOOKS = 1024


class OthersWatch:
    """Looks at what other programs use of this host's vCPUs, at most every LOOK_SECONDS."""

    def __init__(
        self,
        *,
        used: Callable[[], float] = others_cpu_seconds,
        clock: Clock = time.monotonic,
    ) -> None:
        self._used = used
        self._clock = clock
        self._vcpus = vcpu_capacity()
        self._began, self._before = clock(), used()
        self._last = OthersCpu(seconds=0.0, cpu_seconds=0.0, vcpus=self._vcpus)

    def look(self, *, is_last: bool = False) -> OthersCpu:
        """Returns the counters since the start; takes milliseconds where it looks again."""
        seconds = self._clock() - self._began
        if is_last or seconds >= self._last.seconds + LOOK_SECONDS:
            # The kernel's counters are read one after the other: a difference of two may shrink.
            used = max(self._last.cpu_seconds, self._used() - self._before)
            self._last = OthersCpu(seconds=seconds, cpu_seconds=used, vcpus=self._vcpus)
        return self._last


class OthersLog:
    """Looks of all hosts; other threads may add some."""

    def __init__(self) -> None:
        self._looks: dict[str, list[OthersCpu]] = {}

    def add(self, host: str, look: OthersCpu) -> None:
        looks = self._looks.setdefault(host, [])
        if looks and look.seconds < looks[-1].seconds:
            # The host began again.
            looks.clear()
        if not looks or look.seconds > looks[-1].seconds:
            looks.append(look)
        if len(looks) > _MOST_LOOKS:
            del looks[1::2]

    def programs(self) -> tuple[OtherPrograms, ...]:
        """Returns what other programs used of each host, by its busiest quarter."""
        return tuple(
            OtherPrograms(host=host, vcpus=looks[-1].vcpus, others_vcpus=used)
            for host, looks in sorted(self._looks.items())
            if (used := busiest_quarter(tuple(looks))) is not None
        )


def busiest_quarter(looks: Sequence[OthersCpu]) -> float | None:
    """Returns the vCPUs that other programs used in the busiest quarter of the time.

    Of a run that is too short for quarters, in all of it; None: it is too short for that, too.
    """
    if not looks or looks[-1].seconds < _LEAST_SECONDS:
        return None
    least = max(looks[-1].seconds / _QUARTERS, _LEAST_SECONDS)
    stretches = []
    first = OthersCpu(seconds=0.0, cpu_seconds=0.0, vcpus=looks[-1].vcpus)
    for mark in looks:
        seconds = mark.seconds - first.seconds
        if seconds >= least:
            # Looks are some seconds apart: a stretch is a quarter of the time, or a little more.
            stretches.append((mark.cpu_seconds - first.cpu_seconds) / seconds)
            first = mark
    whole = looks[-1].cpu_seconds / looks[-1].seconds
    return max([*stretches, whole])
