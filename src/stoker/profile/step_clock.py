"""When steps count and how long they take: the clock that times them, and the end of the warm-up.

The clock is the device's where the script trains on one, else the host's. The host runs ahead of an
accelerator: it launches kernels and takes batches that the device reaches later, so times of the
host say how fast launches come and not how fast steps are. A mark puts an event into the script's
stream. The device passes it in its turn, behind the work launched before.

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

First steps compile, tune kernels and fill caches: they take up to thousands of times as long as
later ones, and some of that comes many steps later, with the first batch of another shape. Loader
workers go on meanwhile, so the next batches come from stock, as fast as they can be trained on. The
warm-up ends when steps are steady and what was prefetched is used up.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from stoker.feed.device_events import Device, DeviceEvent, FoundDevice, find_device
from stoker.profile.rank_results import cycle_of

HOST = "host"
# Steps that are not counted at least: first kernels, first allocations, cold caches.
WARM_UP_STEPS = 10
# Steps of one training differ by less; compiling and tuning takes ten to a thousand times a step.
_ALIKE = 3.0
# A later step that takes this many times the usual compiles for a new shape, or evaluates.
_RECOMPILED = 10.0
# Evaluations come again and again: they are part of the training then.
_MAX_RESTARTS = 2
# Once so many steps have counted, a slow one moves no median.
_WATCHED_STEPS = 20
# Shorter times differ by what else the host does.
_LEAST_SECONDS = 0.5e-3
# Steps that are compared with each other.
_TAIL = 5
# Steps in which a cycle is looked for.
_CYCLE_STEPS = (12, 24, 48, 96)
# Steps of which the pace is known.
_PACE_STEPS = 3
# Steps that never become steady, as with texts of any length, count after so many.
_PATIENCE_STEPS = 50


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


class WarmUp:
    """A warm-up, told of one step after the other.

    Args:
        prefetched: Batches that may be ready or under way: workers times prefetch factor.
        least_steps: Steps that it lasts at least, unless they are slow.
        soon_seconds: Slow steps: after this time fewer are enough.
        longest_seconds: After usual steps for this time they count, though they are not steady.
    """

    def __init__(
        self,
        *,
        prefetched: int = 0,
        least_steps: int = WARM_UP_STEPS,
        soon_seconds: float = float("inf"),
        longest_seconds: float = float("inf"),
    ) -> None:
        self.is_over = False
        self._prefetched = prefetched
        self._least_steps = least_steps
        self._soon_seconds = soon_seconds
        self._longest_seconds = longest_seconds
        self._restarts = 0
        self._watched = 0
        self._usual_seconds = float("inf")
        self._is_calm = False
        self._busy: list[float] = []
        self._seconds: list[float] = []
        # Of the last slow step, and of the last batch that was not ready; -1: none yet.
        self._slow_at = -1
        self._waited_at = -1

    @property
    def has_waited(self) -> bool:
        """Whether a batch was waited for since the last slow step: then there was no stock left."""
        return self._waited_at > self._slow_at or not self._prefetched

    @property
    def more_steps(self) -> int:
        """Steps that it lasts on at least, as far as is known."""
        if self.is_over:
            return 0
        left = self._least_steps - self._steps_since_slow
        return max(1, left, 0 if self.has_waited else self._stock - self._steps_since_slow)

    @property
    def pace_seconds(self) -> float:
        """Seconds of a step since the last slow one; 0: not known yet."""
        if not self.is_over and (self._steps_since_slow < _PACE_STEPS or not self._is_calm):
            return 0.0
        return self.calm_seconds / self._steps_since_slow

    @property
    def calm_seconds(self) -> float:
        """Seconds since the last slow step."""
        return sum(self._seconds[self._slow_at + 1 :])

    def end(self) -> None:
        """Ends it, whatever the steps were, for good; may be called twice."""
        self.is_over = True
        self._restarts = _MAX_RESTARTS

    def add(
        self, *, busy_seconds: float, seconds: float, had_to_wait: bool, may_be_full: bool
    ) -> None:
        """Records a step and the batch after it.

        Args:
            busy_seconds: The step without its wait for data.
            seconds: The whole step; 0 where its time is not to count.
            had_to_wait: Whether that batch was not ready when it was asked for.
            may_be_full: Whether steps may count though prefetched batches are left.
        """
        if self.is_over:
            self._watch(busy_seconds)
            return
        self._busy.append(max(busy_seconds, _LEAST_SECONDS))
        self._seconds.append(seconds)
        if had_to_wait:
            self._waited_at = len(self._busy) - 1
        is_steady = self._is_steady()
        # By the median: without those that compile.
        usual_seconds = median(self._seconds) * len(self._seconds)
        is_long = len(self._seconds) > 2 and usual_seconds >= self._longest_seconds
        if not is_steady and not is_long and len(self._busy) < self._patience_steps:
            return
        is_used_up = self.has_waited or self._steps_since_slow >= self._stock
        self.is_over = is_used_up or (is_long and may_be_full)

    @property
    def _stock(self) -> int:
        # One is under way to the script.
        return self._prefetched + 1 if self._prefetched else 0

    @property
    def _patience_steps(self) -> int:
        return _PATIENCE_STEPS + 3 * self._prefetched

    @property
    def _steps_since_slow(self) -> int:
        return len(self._busy) - 1 - self._slow_at

    def _is_steady(self) -> bool:
        if self._least_steps == 1:
            return True
        tail = _steady_tail(self._busy)
        self._is_calm = bool(tail)
        if not tail:
            return False
        before = len(self._busy) - len(tail)
        self._usual_seconds = max(tail)
        self._slow_at = max(
            (at for at in range(before) if self._busy[at] > _ALIKE * self._usual_seconds),
            default=-1,
        )
        is_enough = self._steps_since_slow >= self._least_steps
        return is_enough or (len(self._busy) > 1 and self.calm_seconds >= self._soon_seconds)

    def _watch(self, busy_seconds: float) -> None:
        self._watched += 1
        if self._watched > _WATCHED_STEPS or self._restarts >= _MAX_RESTARTS:
            return
        if busy_seconds > _RECOMPILED * self._usual_seconds:
            self._restarts += 1
            self._watched = 0
            self._busy, self._seconds = [busy_seconds], [busy_seconds]
            self._slow_at, self._waited_at = 0, -1
            self.is_over = False


def _steady_tail(busy: Sequence[float]) -> Sequence[float]:
    """Returns the last steps if they are alike, one by one or by cycles; else nothing."""
    tail = busy[-min(_TAIL, max(2, len(busy) // 2)) :]
    if len(busy) > 1 and max(tail) <= _ALIKE * min(tail):
        return tail
    # With gradient accumulation each n-th step is longer, and all of them are the training.
    # The fewest that show it: longer ago there may be slow ones.
    lengths = (cycle_of(busy[-steps:]) for steps in _CYCLE_STEPS if steps <= len(busy))
    length = next((length for length in lengths if length > 1), 1)
    if length == 1:
        return ()
    tail = busy[-3 * length :]
    sums = [sum(tail[at : at + length]) for at in range(0, len(tail), length)]
    return tail if max(sums) <= _ALIKE * min(sums) else ()
