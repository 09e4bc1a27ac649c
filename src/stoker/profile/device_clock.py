"""The clock by which steps are timed: the device's where the script trains on one, else the host's.

The host runs ahead of an accelerator: it launches kernels and takes batches that the device reaches
later, so times of the host say how fast launches come and not how fast steps are. A mark puts an
event into the script's stream. The device passes it in its turn, behind the work launched before.

    clock = StepClock()
    asked = clock.mark()
    batch = next(batches)
    taken = clock.mark()
    ...
    if clock.is_passed(taken):
        idle = clock.seconds(asked, taken)

`idle` is the time for which the device had nothing of this script to do: 0 where it was still busy
with steps before, however long the host waited in next(). A mark costs some microseconds of the
host and never waits; only `wait_for` does.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from stoker.feed.device_events import Device, DeviceEvent, FoundDevice, find_device

HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place in the script's loop.

    Attributes:
        host_seconds: Monotonic seconds at which the host was there.
        device: Name of the device whose stream holds `event`.
        event: None: the host's clock counts here.
    """

    host_seconds: float
    device: str = HOST
    event: DeviceEvent | None = None


class StepClock:
    """Marks in a loop and the seconds between them, by the device that this process trains on.

    The device is looked for until the process holds memory of one: scripts make their model before
    their first step, or in it.
    """

    def __init__(
        self,
        *,
        find: Callable[[], Device | None] = find_device,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found = FoundDevice(find)
        self._now = now

    @property
    def name(self) -> str:
        """The device's name, as `cuda:0`, or HOST."""
        device = self._found.device
        return device.name if device else HOST

    def look_again(self) -> None:
        """Looks for the device once more: a script may have moved to another one."""
        self._found.look_again()

    def mark(self) -> Mark:
        """Marks where host and stream are now; does not wait for the device."""
        device = self._found.look()
        now = self._now()
        # An error of the device is the script's: its next operation raises it.
        with contextlib.suppress(RuntimeError):
            if device is not None and not device.is_capturing():
                return Mark(host_seconds=now, device=device.name, event=device.record())
        return Mark(host_seconds=now)

    def is_passed(self, mark: Mark) -> bool:
        """Whether the device has reached the mark; does not wait.

        False while a graph is captured: a question would spoil it.
        """
        device = self._found.device
        if mark.event is None or device is None:
            return True
        try:
            return not device.is_capturing() and mark.event.query()
        except RuntimeError:
            # The device is lost: nothing passes any more.
            return True

    def wait_for(self, mark: Mark) -> None:
        """Blocks until the device has reached the mark: for the end of a phase."""
        if mark.event is not None:
            with contextlib.suppress(RuntimeError):
                mark.event.synchronize()

    def seconds(self, first: Mark, last: Mark) -> float:
        """Returns the seconds between two passed marks.

        The device's where both are in the stream of one device, else the host's.
        """
        if first.event is not None and last.event is not None and first.device == last.device:
            with contextlib.suppress(RuntimeError):
                return max(0.0, first.event.elapsed_time(last.event) / 1e3)
        return last.host_seconds - first.host_seconds
