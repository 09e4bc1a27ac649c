"""The trainer's steps: the clock that times them, the warm-up, and a thread that watches them.

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
workers continue during them, so the next batches come from stock, as fast as they can be trained
on. The warm-up ends when steps are steady and what was prefetched is used up.

The thread samples the interpreter lock, the machine, and the CPU's own speed: a virtual machine
that shares its cores with others becomes slower and faster without any sign in /proc, with no steal
time and no other program. The measurement then holds for those seconds only.
"""

import contextlib
import ctypes
import hashlib
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, variance
from types import FrameType
from typing import NamedTuple

import msgspec

from stoker.feed.device_events import Device, DeviceEvent, FoundDevice, find_device
from stoker.host.counters import (
    OwnSchedule,
    Scheduled,
    StrayCpu,
    Throttling,
    elsewhere_cpu_seconds,
    machine_cpu_seconds,
    received_bytes,
    scheduled,
    storage_stall_seconds,
    threads_cpu_seconds,
    throttling,
)
from stoker.host.machine import cpu_groups, cpu_quota
from stoker.profile.rank_results import (
    HOST,
    MIN_BLOCKS,
    AcceleratorOnly,
    AsIs,
    Evidence,
    ProfiledEpoch,
    Quartiles,
    block_means,
    block_steps,
    cycle_of,
    quartiles,
)
from stoker.units import count

# Steps that are not counted at least: first kernels, first allocations, cold caches.
WARM_UP_STEPS = 10
# Steps of one training run differ by less; compiling and tuning takes ten to a thousand times a
# step.
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
WARM_UP_REPLAYS = 3

_MIN_STEPS = 5
_FEWEST_STEPS = 2
USUAL_STEPS = 20
# Waits of a smaller share of a step come in no bursts.
_BURSTY = 0.05
# A batch that is ready is handed over in less, with all but the shortest steps.
_LEAST_WAIT_SECONDS = 1e-3
# Steps that a device may be behind, whatever its stream holds.
_MAX_PENDING = 1024
# By how much steps have grown until their cycle is looked for again.
_GROWN = 1.25
# Share of the budget in which steps as is must be timed.
_LONGEST_SHARE = 0.6
# From this share on, steps that are alike show their pace. The next profile's may be longer.
_PACE_SHARE = 0.25
_MARGIN = 1.2
# After steps for as many times the prefetched batches, these are 5% of all.
_STOCKS = 20
NO_BATCH = "its loader gave no batch"
# The machine's lateness is known to this much.
TICK_SECONDS = 50e-6
_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000
# How often the CPU's speed is sampled: about 0.2 ms without the lock, 0.2% of a vCPU.
_SPEED_SAMPLE_SECONDS = 0.1
_ROUNDS = 500
# Looks are averaged over a second: what differs within it averages out anyway.
_LOOKS_OF_A_WINDOW = 10
_LEAST_WINDOWS = 4
# 50 knocks per second in a busy interpreter take 0.3% of a vCPU; its loop became no slower than it
# differs from one second to the next, by 0.5%.
KNOCK_SECONDS = 0.02
# Python code gives the lock up after 5 ms, if asked; between torch's operations, which do not hold
# it, a knock gets it within 0.7 to 1.5 ms. How late the machine woke the thread is left out.
HELD_SECONDS = 0.0005
# A collective is called a few frames above the lowest one; further up is the script.
_FRAMES = 8
_COLLECTIVES = (
    os.path.join("torch", "distributed") + os.sep,
    os.path.join("torch", "autograd", "graph.py"),
)


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
        self._has_times = True

    @property
    def name(self) -> str:
        """The device's name, as `cuda:0`, or HOST."""
        if self._found.device is None or not self._has_times:
            return HOST
        return self._found.device.name

    def look_again(self) -> None:
        """Looks for the device once more: a script may have moved to another one."""
        self._found.look_again()

    def mark(self) -> Mark:
        """Marks where host and stream are now; does not wait for the device."""
        device = self._found.look()
        now = self._now()
        if not self._has_times:
            return Mark(host_seconds=now)
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
            try:
                # A device gives milliseconds.
                return max(0.0, first.event.elapsed_time(last.event) / 1e3)
            except NotImplementedError:
                # An accelerator whose events have no times: the host's clock counts from now on.
                self._has_times = False
            except RuntimeError:
                # The device is lost.
                pass
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
        # What was prefetched during a slow step is used up by then.
        return self._waited_at > self._slow_at or not self._prefetched

    @property
    def more_steps(self) -> int:
        """Steps that it lasts at least, by what is known."""
        if self.is_over:
            return 0
        left = self._least_steps
        if not self.has_waited:
            left = max(left, self._stock)
        return max(1, left - self._steps_since_slow)

    @property
    def pace_seconds(self) -> float:
        """Seconds of a step since the last slow one, by those that count; 0: not known yet."""
        if not self.is_over and (self._steps_since_slow < _PACE_STEPS or not self._is_calm):
            return 0.0
        counted = [seconds for seconds in self._seconds[self._slow_at + 1 :] if seconds]
        return fmean(counted) if counted else 0.0

    @property
    def calm_seconds(self) -> float:
        """Seconds since the last slow step."""
        return sum(self._seconds[self._slow_at + 1 :])

    def end(self) -> None:
        """Ends it, whatever the steps were, for good; may be called twice."""
        self.is_over = True
        # So that no later slow step begins it again.
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
        if not self._prefetched:
            return 0
        # One is under way to the script.
        return self._prefetched + 1

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
            self._busy = [busy_seconds]
            self._seconds = [busy_seconds]
            self._slow_at = 0
            self._waited_at = -1
            self.is_over = False


def _steady_tail(busy: Sequence[float]) -> Sequence[float]:
    """Returns the last steps if they are alike, one by one or by cycles; else nothing."""
    tail = busy[-min(_TAIL, max(2, len(busy) // 2)) :]
    if len(busy) > 1 and max(tail) <= _ALIKE * min(tail):
        return tail
    # With gradient accumulation each n-th step is longer, and all of them are the training.
    # The fewest that show it: longer ago there may be slow ones.
    lengths = (cycle_of(busy[-steps:]) for steps in _CYCLE_STEPS if steps <= len(busy))
    # 1: no cycle was seen.
    length = next((length for length in lengths if length > 1), 1)
    if length == 1:
        return ()
    tail = busy[-3 * length :]
    # Whole cycles are compared: steps within one differ by design.
    sums = [sum(tail[at : at + length]) for at in range(0, len(tail), length)]
    if max(sums) > _ALIKE * min(sums):
        return ()
    return tail


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """Conditions under which a phase may end; times are shares of the budget.

    With `steps` the share `least` is enough, with 20 `usual`, with 5 `most`, with 2 `last`.
    """

    steps: int
    least: float
    usual: float
    most: float
    last: float

    @property
    def _rules(self) -> tuple[tuple[int, float], ...]:
        return (
            (self.steps, self.least),
            (USUAL_STEPS, self.usual),
            (_MIN_STEPS, self.most),
            (_FEWEST_STEPS, self.last),
        )

    def holds(
        self, *, steps: int, elapsed_seconds: float, budget_seconds: float, least: int = 0
    ) -> bool:
        """Whether `steps`, and `least` in any case, are enough after so many seconds."""
        passed = elapsed_seconds / budget_seconds
        is_enough = any(steps >= needed and passed >= share for needed, share in self._rules)
        return is_enough and steps >= least

    def more(
        self,
        *,
        steps: int,
        elapsed_seconds: float,
        step_seconds: float,
        budget_seconds: float,
        least: int = 0,
    ) -> int:
        """Returns how many more steps the phase needs until it `holds`, at this pace."""
        return min(
            max(
                max(needed, least) - steps,
                math.ceil((share * budget_seconds - elapsed_seconds) / step_seconds),
                0,
            )
            for needed, share in self._rules
        )


AS_IS_ENOUGH = Enough(steps=120, least=0.10, usual=0.30, most=0.45, last=0.50)
REPLAY_ENOUGH = Enough(steps=60, least=0.05, usual=0.20, most=0.25, last=0.30)


class _Begun(NamedTuple):
    """Clocks at the beginning of an epoch's counted steps."""

    now: float
    cpu: float
    children: float
    machine: float
    stray: StrayCpu


def _outside_seconds(stray: StrayCpu, *, before: StrayCpu, children: float, room: float) -> float:
    """Returns CPU-seconds that children used on vCPUs which this process may not use.

    Args:
        children: CPU-seconds of all children during that time.
        room: CPU-seconds of this process's vCPUs that it did not use itself.
    """
    # The two are read one after the other: a part may not be more than the whole.
    left = min(stray.seconds - before.seconds, children)
    # What those that stayed leave of the vCPUs is the most that the others can have used there.
    inside = min(stray.inside - before.inside, max(0.0, room - (children - left)))
    return max(0.0, left - inside)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TakenStep:
    """A step between two batches that the device may still have to reach.

    `others`: waits within it for other loaders, each from its first mark to its last.
    """

    gave: Mark
    asked: Mark
    got: Mark
    others: tuple[tuple[Mark, Mark], ...]
    cpu_seconds: float
    receive_seconds: float
    had_to_wait: bool
    is_clocked: bool


@dataclass(slots=True, kw_only=True)
class AsIsSteps:
    """Times of the user's own steps: from batch to batch, never over the end of an epoch.

    On an accelerator they are the device's: a step lasts from one batch to the next in its stream,
    and waits while the stream was empty. Steps are known when the device has passed them.

    Args:
        children_cpu: Of all processes below this one; called only at the beginning and end of an
            epoch, as it takes milliseconds.
        stray_cpu: Of those among them that may use other vCPUs than this process; likewise.
        prefetched: Batches that the loader may hold ready, see `WarmUp`.
        warm_up_seconds: The warm-up of slow steps ends after this time.
        longest_seconds: The warm-up of steps that are not steady, likewise.
        clock_batches: The clock begins with this batch. Ranks get their first ones seconds apart,
            the second ones together: where it is 2, their warm-ups end together, too.
    """

    workers: int
    children_cpu: Callable[[], float]
    machine_cpu: Callable[[], float]
    stray_cpu: Callable[[], StrayCpu] = StrayCpu
    clock: StepClock = field(default_factory=StepClock)
    batches: int = 0
    epoch_batches: int | None = None
    prefetched: int = 0
    warm_up_seconds: float = float("inf")
    longest_seconds: float = float("inf")
    clock_batches: int = 1
    counting_since: float | None = None
    warm_up: WarmUp = field(init=False)
    _pending: deque[_TakenStep] = field(default_factory=deque)
    _steps: list[float] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _host_waits: list[float] = field(default_factory=list)
    _receives: list[float] = field(default_factory=list)
    _cpu_seconds: list[float] = field(default_factory=list)
    _first_waits: list[float] = field(default_factory=list)
    _children_seconds: float = 0.0
    _outside_seconds: float = 0.0
    _others_seconds: float = 0.0
    _epochs_seconds: float = 0.0
    _begun: "_Begun | None" = None
    # Steps of the host since then, in all epochs.
    _window_steps: int = 0
    _gave: tuple[Mark, float] | None = None
    _is_first: bool = True
    # Batches that were ready when counting began; None: not known.
    _stock: int | None = None
    _ready: int | None = None
    _is_used_up: bool = False
    # Steps still to be passed that a warm-up which was ended had taken.
    _num_uncounted: int = 0
    _least: int = USUAL_STEPS
    _looked_at: int = 0

    def __post_init__(self) -> None:
        self.warm_up = WarmUp(
            prefetched=self.prefetched,
            soon_seconds=self.warm_up_seconds,
            longest_seconds=self.longest_seconds,
        )

    @property
    def count(self) -> int:
        return len(self._steps)

    @property
    def step_seconds(self) -> Sequence[float]:
        return self._steps

    @property
    def is_on_device(self) -> bool:
        return self.clock.name != HOST

    @property
    def block(self) -> int:
        """Steps of a block; bursts of workers count where steps wait for them."""
        workers = 1
        if sum(self._waits) >= _BURSTY * sum(self._steps):
            workers = self.workers
        return block_steps(workers=workers, cycle=self._cycle)

    @property
    def least(self) -> int:
        """Steps that must count: on a device of which the host knows little, three blocks."""
        if not self.is_on_device:
            return _FEWEST_STEPS
        # A look takes some milliseconds.
        if self.count >= _GROWN * self._looked_at and self.count >= USUAL_STEPS:
            self._looked_at = self.count
            self._least = max(USUAL_STEPS, MIN_BLOCKS * self.block)
        return self._least

    @property
    def is_supplied(self) -> bool:
        """Whether the steps show how fast the loader is, not how many batches it had in stock."""
        if self._is_used_up or self.count >= _STOCKS * self.prefetched:
            return True
        if self._stock is None or self._ready is None:
            return False
        # Half of a burst may be missing at any time.
        is_falling = self._stock - self._ready > min(self.count / _STOCKS, self.workers / 2)
        return not (is_falling or self._has_drifted)

    @property
    def _has_drifted(self) -> bool:
        """Whether the last steps differ from the first ones: workers rest while stock is full."""
        first = self._steps[:USUAL_STEPS]
        last = self._steps[-USUAL_STEPS:]
        return abs(fmean(last) - fmean(first)) > fmean(first) / _STOCKS

    @property
    def _cycle(self) -> int:
        busy = [step - wait for step, wait in zip(self._steps, self._waits, strict=True)]
        return cycle_of(busy)

    def got(
        self,
        *,
        asked: Mark,
        got: Mark,
        cpu: float,
        receive: float,
        others: tuple[tuple[Mark, Mark], ...] = (),
        ready: int | None = None,
    ) -> None:
        """Records that a batch is there.

        Args:
            asked: Where it was asked for.
            got: Where the script's thread had it.
            cpu: This process's CPU-seconds so far.
            receive: This thread's in next().
            others: Waits for other loaders since the batch before.
            ready: Batches that the loader had when it was asked; None: not known.
        """
        # All that came, counted or not: the clock begins with one of the first.
        self.batches += 1
        self._ready = ready
        had_to_wait = self._had_to_wait(asked, got, ready=ready)
        if self._is_first:
            self._first_waits.append(got.host_seconds - asked.host_seconds)
            self._is_first = False
        if self._gave is not None:
            self._pending.append(
                _TakenStep(
                    gave=self._gave[0],
                    asked=asked,
                    got=got,
                    others=others,
                    cpu_seconds=cpu - self._gave[1],
                    receive_seconds=receive,
                    had_to_wait=had_to_wait,
                    is_clocked=self.batches > self.clock_batches,
                )
            )
            self._window_steps += self._begun is not None
        self.look()
        if self.warm_up.is_over and self._begun is None:
            self._begin(now=got.host_seconds, cpu=cpu)
        self._gave = (got, cpu)

    def gave(self, *, mark: Mark, cpu: float) -> None:
        """Records that the script has its batch: the time since `got` is in no step."""
        if self._gave is not None:
            self._gave = (mark, cpu)

    def look(self) -> None:
        """Takes the times of the steps that the device has passed.

        It does not wait for it: a stream holds 1024 launches, of which a step has four or more.
        """
        if len(self._pending) > _MAX_PENDING:
            self.clock.wait_for(self._pending[0].got)
        while self._pending and self.clock.is_passed(self._pending[0].got):
            self._take(self._pending.popleft())

    def settle(self) -> None:
        """Waits until the device has passed all steps of a phase that ends, and takes their times.

        Steps that have counted do not start over any more.
        """
        if self.warm_up.is_over:
            self.warm_up.end()
            self._is_used_up = True
        while self._pending:
            step = self._pending.popleft()
            self.clock.wait_for(step.got)
            self._take(step)

    def end_warm_up(self) -> None:
        """Lets all steps from here on count, whatever they are; may be called twice."""
        if not self.warm_up.is_over:
            self._num_uncounted = len(self._pending)
        self.warm_up.end()
        self._is_used_up = True

    def _had_to_wait(self, asked: Mark, got: Mark, *, ready: int | None) -> bool:
        wait = got.host_seconds - asked.host_seconds
        since = asked.host_seconds
        if self._gave:
            since = self._gave[0].host_seconds
        is_long = wait >= max(_LEAST_WAIT_SECONDS, _BURSTY * (got.host_seconds - since))
        if ready is None:
            return is_long
        # Batches come in order: those of a burst are ready while its first one is waited for.
        return ready == 0 or (is_long and ready <= self.workers)

    def _times_of(self, step: _TakenStep) -> tuple[float, float]:
        """Returns the seconds of a step that the device has passed, and of its waits."""
        seconds = self.clock.seconds(step.gave, step.got)
        waits = [self.clock.seconds(*marks) for marks in (*step.others, (step.asked, step.got))]
        return seconds, min(sum(waits), seconds)

    def _take(self, step: _TakenStep) -> None:
        seconds, wait = self._times_of(step)
        was_over = self.warm_up.is_over and not self._num_uncounted
        self._num_uncounted = max(0, self._num_uncounted - 1)
        self.warm_up.add(
            busy_seconds=seconds - wait,
            seconds=seconds if step.is_clocked else 0.0,
            had_to_wait=step.had_to_wait,
            # A device is faster than its loader for as long as there is stock.
            may_be_full=not self.is_on_device,
        )
        # Until the first wait, steps lived on what was prefetched in the warm-up.
        lived_on_stock = was_over and step.had_to_wait and not self._is_used_up
        if lived_on_stock or not self.warm_up.is_over:
            self._start_over()
            self._is_used_up = lived_on_stock
        elif was_over:
            self._count(step, seconds, wait)
        else:
            self._is_used_up |= self.warm_up.has_waited

    def _count(self, step: _TakenStep, seconds: float, wait: float) -> None:
        self._steps.append(seconds)
        self._waits.append(wait)
        waits = (*step.others, (step.asked, step.got))
        self._host_waits.append(
            sum(last.host_seconds - first.host_seconds for first, last in waits)
        )
        self._receives.append(step.receive_seconds)
        self._cpu_seconds.append(step.cpu_seconds)

    def _start_over(self) -> None:
        counted = (self._steps, self._waits, self._host_waits, self._receives, self._cpu_seconds)
        for figures in counted:
            figures.clear()
        self._children_seconds = self._outside_seconds = 0.0
        self._others_seconds = self._epochs_seconds = 0.0
        self._begun = None
        self._window_steps = 0
        self.counting_since = None
        self._is_used_up = False
        self._least = USUAL_STEPS
        self._looked_at = 0

    def _begin(self, *, now: float, cpu: float) -> None:
        self._begun = _Begun(now, cpu, self.children_cpu(), self.machine_cpu(), self.stray_cpu())
        if self.counting_since is None:
            self.clock.look_again()
            self.counting_since = now
            self._stock = self._ready

    def epoch_ended(self) -> None:
        """Records that what follows is not part of a step; may be called twice."""
        if self._begun is not None and self._gave is not None:
            # The machine counts the time between steps, so these figures include it, too.
            begun = self._begun
            children = self.children_cpu() - begun.children
            machine = self.machine_cpu() - begun.machine
            trainer_seconds = self._gave[1] - begun.cpu
            outside = _outside_seconds(
                self.stray_cpu(),
                before=begun.stray,
                children=children,
                room=machine - trainer_seconds,
            )
            self._outside_seconds += outside
            self._children_seconds += children - outside
            self._others_seconds += machine - (children - outside) - trainer_seconds
            self._epochs_seconds += self._gave[0].host_seconds - begun.now
        self._begun = None
        self._gave = None
        self._is_first = True

    def pace(self, elapsed_seconds: float) -> tuple[float, float]:
        """Returns the seconds of a step and of its wait, roughly where none has counted."""
        if not self._steps:
            return max(1e-6, elapsed_seconds / max(1, self.batches)), 0.0
        step = fmean(self._steps)
        wait = fmean(self._waits)
        return max(1e-6, step), min(wait, 0.9 * step)

    def result(self) -> AsIs:
        """Returns the figures of at least one step; the children's are of the epochs that ended.

        Raises:
            ValueError: If no step has counted.
        """
        count = len(self._steps)
        if not count:
            raise ValueError(
                f"no step has counted: all of {self.batches} batches belong to the warm-up"
            )
        # The host's processes are looked at between its own steps, which may be ahead.
        in_window = max(1, self._window_steps)
        block = self.block
        first_wait_seconds = None
        if waits := self._first_waits[1:] or self._first_waits:
            first_wait_seconds = quartiles(waits).median
        host_wait_seconds = None
        if self.is_on_device:
            host_wait_seconds = median(block_means(self._host_waits, workers=block))
        return AsIs(
            step_seconds=quartiles(block_means(self._steps, workers=block), samples=count),
            wait_seconds=quartiles(block_means(self._waits, workers=block), samples=count),
            trainer_cpu_seconds=sum(self._cpu_seconds) / count,
            children_cpu_seconds=self._children_seconds / in_window,
            outside_cpu_seconds=self._outside_seconds / in_window,
            receive_seconds=sum(self._receives) / count,
            first_wait_seconds=first_wait_seconds,
            others_vcpus=max(0.0, self._others_seconds / (self._epochs_seconds or math.inf)),
            epoch_batches=self.epoch_batches,
            clock=self.clock.name,
            host_wait_seconds=host_wait_seconds,
        )


@dataclass(slots=True, kw_only=True)
class ReplaySteps:
    """Times of steps on cached batches; `given` batches were handed out.

    A step lasts from a batch to the request for the next one, in the stream of the device where
    there is one: what the cache costs is in none.
    """

    clock: StepClock = field(default_factory=StepClock)
    warm_up: int = WARM_UP_REPLAYS
    given: int = 0
    _steadiness: WarmUp = field(init=False)
    _pending: deque[tuple[Mark, Mark, float]] = field(default_factory=deque)
    _steps: list[float] = field(default_factory=list)
    _cpu_seconds: list[float] = field(default_factory=list)
    _gave: tuple[Mark, float] | None = None
    _least: int = USUAL_STEPS
    _looked_at: int = 0

    def __post_init__(self) -> None:
        self._steadiness = WarmUp(least_steps=self.warm_up)

    @property
    def count(self) -> int:
        return len(self._steps)

    @property
    def least(self) -> int:
        """Steps that must count, as of `AsIsSteps.least`."""
        if self.clock.name == HOST:
            return 1
        if self.count >= _GROWN * self._looked_at and self.count >= USUAL_STEPS:
            self._looked_at = self.count
            block = block_steps(workers=1, cycle=cycle_of(self._steps))
            self._least = max(USUAL_STEPS, MIN_BLOCKS * block)
        return self._least

    def asked(self, *, mark: Mark, cpu: float) -> None:
        """Records that the next batch is asked for: the step before has ended."""
        if self._gave is not None:
            self._pending.append((self._gave[0], mark, cpu - self._gave[1]))
            self._gave = None
        while self._pending and self.clock.is_passed(self._pending[0][1]):
            self._take(*self._pending.popleft())

    def gave(self, *, mark: Mark, cpu: float) -> None:
        self.given += 1
        self._gave = (mark, cpu)

    def settle(self) -> None:
        """Waits until the device has passed all steps, and takes their times."""
        for _, asked, _ in self._pending:
            self.clock.wait_for(asked)
        while self._pending:
            self._take(*self._pending.popleft())

    def _take(self, gave: Mark, asked: Mark, cpu_seconds: float) -> None:
        seconds = self.clock.seconds(gave, asked)
        if self._steadiness.is_over:
            self._steps.append(seconds)
            self._cpu_seconds.append(cpu_seconds)
            return
        self._steadiness.add(
            busy_seconds=seconds, seconds=seconds, had_to_wait=False, may_be_full=True
        )

    def result(self, *, cached_batches: int) -> AcceleratorOnly:
        block = block_steps(workers=1, cycle=cycle_of(self._steps))

        def spread(values: Sequence[float]) -> Quartiles:
            if len(values) >= MIN_BLOCKS * block:
                values = block_means(values, workers=block)
            return quartiles(values, samples=self.count)

        return AcceleratorOnly(
            step_seconds=spread(self._steps),
            trainer_cpu_seconds=spread(self._cpu_seconds),
            cached_batches=cached_batches,
        )


def missing_of(
    as_is: AsIsSteps | None,
    replay: ReplaySteps | None,
    *,
    elapsed_seconds: float,
    budget_seconds: float,
    is_read_out: bool,
) -> str:
    """Returns what the profile lacks where the script ended before it, in one figure.

    A loader that `is_read_out` until the script ends has a longer last epoch: few steps are enough.
    """
    if as_is is None:
        return "no DataLoader was read to train on"
    if not as_is.batches:
        return NO_BATCH
    if is_read_out:
        more = as_is.warm_up.more_steps + USUAL_STEPS - as_is.count
    else:
        # With cached batches, a step is faster by its wait for data, if at all.
        step, wait = as_is.pace(elapsed_seconds)
        more = WARM_UP_REPLAYS + REPLAY_ENOUGH.more(
            steps=replay.count if replay else 0,
            elapsed_seconds=0.0,
            step_seconds=step - wait,
            budget_seconds=budget_seconds,
        )
        if replay is None:
            more += as_is.warm_up.more_steps + AS_IS_ENOUGH.more(
                steps=as_is.count,
                elapsed_seconds=as_is.count * step,
                step_seconds=step,
                budget_seconds=budget_seconds,
                least=as_is.least,
            )
    more = max(1, more)
    needed = f"about {more} more are needed"
    if as_is.epoch_batches:
        epochs = count(math.ceil(more / as_is.epoch_batches), "more epoch")
        needed = f"an epoch has {as_is.epoch_batches}; about {more} more, or {epochs}, are needed"
    had = f"{as_is.batches} batches of its main loader"
    if replay:
        had = f"{replay.count} steps with cached batches"
    return f"the script ended after {had}; {needed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Why steps on a device cannot be timed within a budget, and the seconds that would do."""

    text: str
    needed_seconds: float


def lack_of(steps: AsIsSteps, *, budget_seconds: float) -> Lack | None:
    """Returns what steps on a device lack, where the rest of the budget is too short for them.

    None also as long as the pace is not known, and on hosts without a device, where two steps do.
    """
    warm_up = steps.warm_up
    least = steps.least
    if not steps.is_on_device or steps.count >= least or not warm_up.pace_seconds:
        return None
    calm_seconds = warm_up.calm_seconds + sum(steps.step_seconds)
    # While kernels are tuned, steps are slow and become fast.
    if not warm_up.is_over and calm_seconds < _PACE_SHARE * budget_seconds:
        return None
    pace = warm_up.pace_seconds
    if steps.count:
        pace = fmean(steps.step_seconds)
    if steps.count < USUAL_STEPS and warm_up.has_waited:
        least = max(least, MIN_BLOCKS * block_steps(workers=steps.workers))
    left = (warm_up.more_steps + least - steps.count) * pace
    if calm_seconds + left <= _LONGEST_SHARE * budget_seconds:
        return None
    needed = _MARGIN * (calm_seconds + left) / _LONGEST_SHARE
    return Lack(
        text=f"{steps.count} of the {least} steps needed were timed on the accelerator, and a step "
        f"takes {pace:.2g} s",
        needed_seconds=math.ceil(needed / 10) * 10.0,
    )


class _TimerSpec(ctypes.Structure):
    """The kernel's `struct itimerspec`: how often a timer expires, and when first."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


class Alarm:
    """A sleep that ends early when another thread calls `ring`; close it after use.

    A thread may be late because the machine wakes it late (a virtual machine whose vCPU was given
    away, a busy CPU, timer slack) or because it waits for the interpreter lock. So it sleeps in a
    read of a timer that ticks on: the kernel counts the ticks before the thread asks for the lock.
    """

    def __init__(self) -> None:
        self.is_rung = False
        self._timer: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            # PyDLL keeps the lock during a call: to give it up would be to wait for it again.
            libc = ctypes.PyDLL(None, use_errno=True)
            self._set = libc.timerfd_settime
            timer = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_CLOEXEC)
            if timer >= 0:
                self._timer = timer

    def sleep(self, seconds: float) -> float:
        """Returns after `seconds`, or at once when the alarm has been rung.

        The result is the seconds by which the machine woke this thread too late; 0 outside Linux.
        """
        if self._timer is None:
            if not self.is_rung:
                time.sleep(seconds)
            return 0.0
        self._expire_in(seconds)
        # After the timer is set: a later call of `ring` resets it.
        if self.is_rung:
            return 0.0
        # The kernel counts how often the timer expired until now: once in time, then each tick.
        ticks = int.from_bytes(os.read(self._timer, 8), "little")
        return (ticks - 1) * TICK_SECONDS

    def ring(self) -> None:
        self.is_rung = True
        if self._timer is not None:
            # A nanosecond: 0 would disarm the timer, and the thread would sleep on.
            self._expire_in(1 / _NANOSECONDS)

    def close(self) -> None:
        """Closes the timer; may be called twice, but not while a thread waits on it."""
        if self._timer is not None:
            os.close(self._timer)
            self._timer = None

    def _expire_in(self, seconds: float) -> None:
        whole, rest = divmod(max(1, round(seconds * _NANOSECONDS)), _NANOSECONDS)
        spec = _TimerSpec(0, round(TICK_SECONDS * _NANOSECONDS), whole, rest)
        self._set(self._timer, 0, ctypes.byref(spec), None)


def look() -> float:
    began = time.thread_time()
    hashlib.pbkdf2_hmac("sha256", b"stoker", b"stoker", _ROUNDS)
    return time.thread_time() - began


def speed_spread(looks: Sequence[float]) -> float | None:
    """Returns the CPU speed's standard deviation from second to second, as a share of its mean.

    Looks (CPU-seconds, one every _SPEED_SAMPLE_SECONDS) differ by chance as well, as by what runs
    on a core's other hyper-thread. The variance within seconds is subtracted from the variance
    between them, as in an analysis of variance. None where there are too few looks.
    """
    size = _LOOKS_OF_A_WINDOW
    windows = [looks[at : at + size] for at in range(0, len(looks) - size + 1, size)]
    if len(windows) < _LEAST_WINDOWS:
        return None
    mean = fmean(looks)
    between = variance([fmean(window) for window in windows])
    # A mean of n looks differs by chance by a variance of 1/n of theirs.
    by_chance = fmean([variance(window) for window in windows]) / size
    return float(max(0.0, between - by_chance) ** 0.5 / mean)


class StepWatch:
    """Observes the reading thread's steps, the process's threads and the machine, at little cost.

    While steps are watched, another thread knocks: it sleeps, and measures how long it then waits
    for the interpreter lock. It does not exist when workers are forked.
    """

    def __init__(self) -> None:
        self._evidence = Evidence()
        self._epochs: list[ProfiledEpoch] = []
        self._waits: list[float] = []
        self._pass_began = 0.0
        self._last = 0.0
        self._is_reading = False
        self._watched: _WatchedStretch | None = None

    def asked(self) -> None:
        self._is_reading = True

    def got(self, *, now: float, wait: float, receive: float, is_counted: bool) -> None:
        """Records that the reading thread has its batch; steps before `is_counted` are warm-up."""
        self._is_reading = False
        if not self._waits:
            self._pass_began = now
        self._waits.append(wait)
        self._last = now
        if self._watched is not None:
            self._watched.got(wait=wait, receive=receive)
        elif is_counted:
            self._watched = _WatchedStretch(is_reading=lambda: self._is_reading)

    def pause(self) -> None:
        """May be called twice."""
        if self._watched is not None:
            self._evidence = _sum(self._evidence, self._watched.end())
            self._watched = None

    def epoch_ended(self) -> None:
        """May be called twice."""
        self.pause()
        steps = len(self._waits) - 1
        if steps > 0:
            self._epochs.append(
                ProfiledEpoch(
                    batches=steps,
                    wait_seconds=sum(self._waits[1:]) / steps,
                    step_seconds=(self._last - self._pass_began) / steps,
                )
            )
        self._waits.clear()
        self._is_reading = False

    def result(self) -> Evidence:
        return msgspec.structs.replace(self._evidence, epochs=tuple(self._epochs))


class _WatchedStretch:
    def __init__(self, *, is_reading: Callable[[], bool]) -> None:
        self._thread_id = threading.get_native_id()
        self._task = f"/proc/self/task/{self._thread_id}"
        self._steps = 0
        self._wait = 0.0
        self._receive = 0.0
        self._groups = cpu_groups()
        self._throttled = [throttling(group) for group in self._groups]
        self._received = received_bytes()
        self._stall = storage_stall_seconds()
        self._machine = machine_cpu_seconds()
        self._elsewhere = elsewhere_cpu_seconds()
        self._thread = scheduled(self._task) or Scheduled(0.0, 0.0)
        self._process = time.process_time()
        self._own = threads_cpu_seconds({self._thread_id})
        self._began = time.monotonic()
        self._knocker = _Knocker(is_reading=is_reading)
        self._knocker.start()

    def got(self, *, wait: float, receive: float) -> None:
        self._steps += 1
        self._wait += wait
        self._receive += receive

    def end(self) -> Evidence:
        """Blocks for a moment, until the knocking thread has ended."""
        seconds = time.monotonic() - self._began
        thread_seconds = threads_cpu_seconds({self._thread_id}) - self._own
        others = time.process_time() - self._process - thread_seconds
        thread = scheduled(self._task) or self._thread
        machine = machine_cpu_seconds() - self._machine
        elsewhere = elsewhere_cpu_seconds() - self._elsewhere
        knocker = self._knocker
        knocker.stop()
        periods = [
            throttling(group).since(before)
            for group, before in zip(self._groups, self._throttled, strict=True)
        ]
        # Groups are nested, and each may have a quota: the one that stopped it longest counts.
        worst = max(periods, key=lambda each: each.throttled_seconds, default=Throttling())
        stall = storage_stall_seconds()
        stalled = None
        if stall is not None and self._stall is not None:
            stalled = stall - self._stall
        return Evidence(
            seconds=seconds,
            steps=self._steps,
            wait_seconds=self._wait,
            own_cpu_seconds=max(0.0, thread_seconds - self._receive),
            queued_seconds=max(0.0, thread.queued - self._thread.queued),
            other_threads_seconds=max(0.0, others),
            knocks=knocker.knocks,
            held_knocks=knocker.held_knocks,
            collective_knocks=knocker.collective_knocks,
            busy_vcpus=machine / seconds if seconds else 0.0,
            elsewhere_vcpus=elsewhere / seconds if seconds else 0.0,
            quota_vcpus=cpu_quota(),
            periods=worst.periods,
            throttled_periods=worst.throttled_periods,
            throttled_seconds=worst.throttled_seconds,
            received_bytes=max(0, received_bytes() - self._received),
            storage_stall_seconds=stalled,
            core_looks=tuple(knocker.core_looks),
        )


class _Knocker:
    """Thread that samples how often the interpreter lock is held, with its maker outside next()."""

    def __init__(self, *, is_reading: Callable[[], bool]) -> None:
        self.knocks = 0
        self.held_knocks = 0
        self.collective_knocks = 0
        self.core_looks: list[float] = []
        self._is_reading = is_reading
        self._reader = threading.get_ident()
        self._alarm = Alarm()
        self._thread = threading.Thread(target=self._knock, name="stoker-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._alarm.ring()
        self._thread.join()
        self._alarm.close()

    def _knock(self) -> None:
        schedule = OwnSchedule()
        speed_looked = time.monotonic()
        before = schedule.queued_seconds()
        slept_at = time.monotonic()
        while True:
            machine_late = self._alarm.sleep(KNOCK_SECONDS)
            if self._alarm.is_rung:
                break
            now = time.monotonic()
            # Read at once, before the lock is given up again.
            is_reading = self._is_reading()
            frame = sys._current_frames().get(self._reader)
            queued = schedule.queued_seconds()
            if not is_reading:
                # The machine's lateness includes most of the time in the run queue.
                late = now - slept_at - KNOCK_SECONDS
                self.knocks += 1
                self.held_knocks += late - max(machine_late, queued - before) >= HELD_SECONDS
                self.collective_knocks += _is_collective(frame)
            del frame
            if now - speed_looked >= _SPEED_SAMPLE_SECONDS:
                speed_looked = now
                self.core_looks.append(look())
                queued = schedule.queued_seconds()
            before = queued
            slept_at = time.monotonic()
        schedule.close()


def _is_collective(frame: FrameType | None) -> bool:
    for _ in range(_FRAMES):
        if frame is None:
            return False
        if any(place in frame.f_code.co_filename for place in _COLLECTIVES):
            return True
        frame = frame.f_back
    return False


def _sum(first: Evidence, second: Evidence) -> Evidence:
    unlike = ("busy_vcpus", "elsewhere_vcpus", "quota_vcpus", "storage_stall_seconds")
    names = [name for name in Evidence.__struct_fields__ if name not in unlike]
    sums = {name: getattr(first, name) + getattr(second, name) for name in names}
    for name in unlike[:2]:
        total = sum(getattr(part, name) * part.seconds for part in (first, second))
        sums[name] = total / max(sums["seconds"], 1e-9)
    if (stall := second.storage_stall_seconds) is not None:
        sums["storage_stall_seconds"] = stall + (first.storage_stall_seconds or 0.0)
    return Evidence(**sums, quota_vcpus=second.quota_vcpus)
