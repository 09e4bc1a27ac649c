"""The trainer's steps: the clock that times them, the warm-up, and the steps as they are.

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
"""

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import NamedTuple

from stoker.feed.device_events import Device, DeviceEvent, FoundDevice, find_device
from stoker.profile.rank_results import HOST, Quartiles, StepTimes

# Steps of a block: whole cycles of 2, 4 and 8 accumulated gradients.
BLOCK_STEPS = 8
# Blocks of which a median and its quartiles are taken.
_MIN_BLOCKS = 3
# Steps that make a verdict.
USUAL_STEPS = 20
# Enough steps, from this share of the budget on.
_ENOUGH = ((120, 0.10), (USUAL_STEPS, 0.30), (2, 0.45))
# Two blocks of a steady training differ by less, waits apart.
_ALIKE = 0.2
# Steps that are not steady count after this share of the budget.
LONGEST_WARM_UP = 0.25
# Steps of a burst that never count.
LEFT_OUT_STEPS = 2
# Waits of a smaller share of a step come in no bursts.
_BURSTY = 0.05


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


# From asking for a batch to having it.
Wait = tuple[Mark, Mark]


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
        return self._found.device.name if self._found.device else HOST

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
            # The device may be lost.
            with contextlib.suppress(RuntimeError):
                # A device gives milliseconds.
                return max(0.0, first.event.elapsed_time(last.event) / 1e3)
        return last.host_seconds - first.host_seconds


class WarmUp:
    """The first steps, which compile, tune kernels and live on prefetched batches.

    It ends with the second of two blocks of steps whose means without waits are alike, once as many
    steps were so as batches may have been ready before.

    Args:
        prefetched: Batches that may be ready or under way: workers times prefetch factor.
        longest_seconds: After usual steps for this time it ends, though they are not steady.
    """

    def __init__(self, *, prefetched: int = 0, longest_seconds: float = math.inf) -> None:
        self.is_over = False
        self._prefetched = prefetched
        self._longest_seconds = longest_seconds
        self._block: list[float] = []
        self._before = 0.0
        self._seconds: list[float] = []
        self._steady_steps = 0

    def add(self, *, busy_seconds: float, seconds: float) -> None:
        """Records a step and its part without waits."""
        block = self._block
        block.append(busy_seconds)
        self._seconds.append(seconds)
        # By the median: without those that compile.
        usual_seconds = median(self._seconds) * len(self._seconds)
        if len(self._seconds) > 2 and usual_seconds >= self._longest_seconds:
            self.is_over = True
        if len(block) == BLOCK_STEPS:
            mean = fmean(block)
            is_alike = abs(mean - self._before) < _ALIKE * max(mean, self._before)
            self._before = mean
            self._block = []
            self._steady_steps = BLOCK_STEPS + self._steady_steps * is_alike
            self.is_over |= is_alike and self._steady_steps > self._prefetched


def is_enough(steps: int, *, elapsed_seconds: float, budget_seconds: float) -> bool:
    """Whether so many counted steps are enough after so many seconds."""
    share = elapsed_seconds / budget_seconds
    return any(steps >= needed and share >= least for needed, least in _ENOUGH)


class BurstStart:
    """The first steps of a burst: launched into an empty stream, while the device's clocks rise.

    Args:
        seconds: The steps of so much time do not count, and the first 2 nowhere.
    """

    def __init__(self, *, seconds: float) -> None:
        self.is_over = False
        self._seconds = seconds
        self._steps = 0

    def add(self, *, busy_seconds: float, seconds: float) -> None:
        """Records a step."""
        self._steps += 1
        self._seconds -= seconds
        self.is_over = self._steps >= LEFT_OUT_STEPS and self._seconds <= 0


class _Step(NamedTuple):
    """A step between two batches that the device may still have to reach, with its waits."""

    gave: Mark
    waits: Sequence[Wait]
    cpu: float


@dataclass(slots=True, kw_only=True)
class TimedSteps:
    """Times of steps from batch to batch, never over the end of an epoch.

    On an accelerator they are the device's: a step lasts from one batch to the next in its stream,
    and waits while the stream was empty. Steps are known when the device has passed them.

    Args:
        warm_up: The first steps, which do not count.

    Attributes:
        batches: That the script has had.
        counting_since: Host's monotonic seconds; None: no step counts yet.
    """

    warm_up: WarmUp | BurstStart
    clock: StepClock = field(default_factory=StepClock)
    batches: int = 0
    counting_since: float | None = None
    _pending: deque[_Step] = field(default_factory=deque)
    # Seconds of each step that counts: all, its waits, its CPU.
    _counted: list[tuple[float, float, float]] = field(default_factory=list)
    _gave: tuple[Mark, float] | None = None

    @property
    def count(self) -> int:
        return len(self._counted)

    @property
    def is_on_device(self) -> bool:
        return self.clock.name != HOST

    def got(self, waits: Sequence[Wait], *, cpu: float) -> None:
        """Records that a batch is there.

        Args:
            waits: For other loaders since the batch before; the last one for this batch.
            cpu: This process's CPU-seconds so far.
        """
        _, got = waits[-1]
        pending = self._pending
        self.batches += 1
        if self._gave:
            gave, before = self._gave
            pending.append(_Step(gave, waits, cpu - before))
        while pending and self.clock.is_passed(pending[0].waits[-1][1]):
            self._take(pending.popleft())
        if self.warm_up.is_over and self.counting_since is None:
            self.counting_since = got.host_seconds
        self._gave = got, cpu

    def gave(self, *, mark: Mark, cpu: float) -> None:
        """Records that the script has its batch: the time since `got` is in no step."""
        self._gave = mark, cpu

    def epoch_ended(self) -> None:
        """Records that what follows is not part of a step; may be called twice."""
        self._gave = None

    def settle(self) -> None:
        """Waits until the device has passed all steps, and takes their times."""
        while self._pending:
            step = self._pending.popleft()
            self.clock.wait_for(step.waits[-1][1])
            self._take(step)

    def _take(self, step: _Step) -> None:
        clock = self.clock
        seconds = clock.seconds(step.gave, step.waits[-1][1])
        wait = min(sum(clock.seconds(*marks) for marks in step.waits), seconds)
        if self.warm_up.is_over:
            self._counted.append((seconds, wait, step.cpu))
        else:
            self.warm_up.add(busy_seconds=seconds - wait, seconds=seconds)

    def result(self, *, workers: int = 1) -> StepTimes:
        """Returns the figures of at least one step.

        Args:
            workers: Of the loader: where steps wait for it, batches come in bursts of so many.
        """
        seconds, waits, cpu = zip(*self._counted, strict=True)
        size = workers if fmean(waits) >= _BURSTY * fmean(seconds) else 1
        computes = [each - wait for each, wait in zip(seconds, waits, strict=True)]
        return StepTimes(
            step_seconds=quartiles(seconds, workers=size),
            wait_seconds=quartiles(waits, workers=size),
            compute_seconds=quartiles(computes, workers=size),
            trainer_cpu_seconds=fmean(cpu),
            clock=self.clock.name,
        )


def quartiles(values: Sequence[float], *, workers: int) -> Quartiles:
    """Returns the statistics of steps, over the means of consecutive blocks of them.

    A median of single steps would miss the wait that ends a burst. Fewer than three blocks say
    nothing of the spread: one mean says what there is.

    Args:
        values: One for each step.
        workers: Of the loader; a block holds whole bursts.
    """
    size = math.lcm(BLOCK_STEPS, max(1, workers))
    if size > _MIN_BLOCKS * BLOCK_STEPS:
        size = workers * math.ceil(BLOCK_STEPS / workers)
    means = [fmean(values)]
    if len(values) >= _MIN_BLOCKS * size:
        starts = range(0, len(values) - size + 1, size)
        means = sorted(fmean(values[at : at + size]) for at in starts)
    last = len(means) - 1
    return Quartiles(
        mean=fmean(means),
        median=median(means),
        # Values that were measured, not interpolated: with five of them the second and the fourth.
        low=means[last // 4],
        high=means[last - last // 4],
        samples=len(values),
    )
