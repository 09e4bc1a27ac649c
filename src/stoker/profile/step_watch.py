"""The trainer's steps, as they are and with cached batches, and a thread that watches them.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from types import FrameType
from typing import NamedTuple

import msgspec

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
    AcceleratorOnly,
    AsIs,
    Evidence,
    ProfiledEpoch,
    block_means,
    quartiles,
)
from stoker.text import count

# Steps that are not counted: first kernels, first allocations, cold caches.
WARM_UP_STEPS = 10
WARM_UP_REPLAYS = 3

_MIN_STEPS = 5
_FEWEST_STEPS = 2
USUAL_STEPS = 20
NO_BATCH = "its loader gave no batch"
# The machine's lateness is known to this much.
TICK_SECONDS = 50e-6
_CLOCK_MONOTONIC = 1
_NANOSECONDS = 1_000_000_000
# How often the CPU's speed is sampled: about 0.2 ms without the lock, 0.2 % of a vCPU.
_SPEED_SAMPLE_SECONDS = 0.1
_ROUNDS = 500
# Looks are averaged over a second: what differs within it averages out anyway.
_LOOKS_OF_A_WINDOW = 10
_LEAST_WINDOWS = 4
# 50 knocks per second in a busy interpreter take 0.3 % of a vCPU; its loop became no slower than it
# differs from one second to the next, by 0.5 %.
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

    def holds(self, *, steps: int, elapsed_seconds: float, budget_seconds: float) -> bool:
        passed = elapsed_seconds / budget_seconds
        return any(steps >= needed and passed >= share for needed, share in self._rules)

    def more(
        self, *, steps: int, elapsed_seconds: float, step_seconds: float, budget_seconds: float
    ) -> int:
        """Returns how many more steps the phase needs until it `holds`, at this pace."""
        return min(
            max(
                needed - steps,
                math.ceil((share * budget_seconds - elapsed_seconds) / step_seconds),
                0,
            )
            for needed, share in self._rules
        )


AS_IS_ENOUGH = Enough(steps=120, least=0.10, usual=0.30, most=0.45, last=0.50)
REPLAY_ENOUGH = Enough(steps=60, least=0.05, usual=0.20, most=0.25, last=0.30)


class _Begun(NamedTuple):
    """Clocks at the begin of an epoch's counted steps."""

    now: float
    cpu: float
    children: float
    machine: float
    stray: StrayCpu


def _outside_seconds(stray: StrayCpu, *, before: StrayCpu, children: float, room: float) -> float:
    """Returns CPU-seconds that children used on vCPUs which this process may not use.

    Args:
        children: CPU-seconds of all children meanwhile.
        room: CPU-seconds of this process's vCPUs that it did not use itself.
    """
    left = min(stray.seconds - before.seconds, children)
    # What those that stayed leave of the vCPUs is the most that the others can have used there.
    inside = min(stray.inside - before.inside, max(0.0, room - (children - left)))
    return max(0.0, left - inside)


@dataclass(slots=True, kw_only=True)
class AsIsSteps:
    """Times of the user's own steps: from batch to batch, never over the end of an epoch.

    Args:
        children_cpu: Of all processes below this one; called at the begin and end of an epoch only,
            as it takes milliseconds.
        stray_cpu: Of those among them that may use other vCPUs than this process; likewise.
        warm_up_seconds: The warm-up ends after this time, however few steps it had.
        clock_batches: The clock begins with this batch. Ranks get their first ones seconds apart,
            the second ones together: where it is 2, their warm-ups end together, too.
    """

    workers: int
    children_cpu: Callable[[], float]
    machine_cpu: Callable[[], float]
    stray_cpu: Callable[[], StrayCpu] = StrayCpu
    batches: int = 0
    epoch_batches: int | None = None
    warm_up_seconds: float = float("inf")
    clock_batches: int = 1
    _first: float | None = None
    _steps: list[float] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _receives: list[float] = field(default_factory=list)
    _cpu_seconds: list[float] = field(default_factory=list)
    _first_waits: list[float] = field(default_factory=list)
    _children_seconds: float = 0.0
    _outside_seconds: float = 0.0
    _others_seconds: float = 0.0
    _epochs_seconds: float = 0.0
    _begun: "_Begun" = field(default_factory=lambda: _Begun(0.0, 0.0, 0.0, 0.0, StrayCpu()))
    _last: tuple[float, float] | None = None
    _is_first: bool = True

    @property
    def count(self) -> int:
        return len(self._steps)

    def got(self, *, now: float, cpu: float, wait: float, receive: float) -> None:
        """Records that a batch is there, after `wait` seconds in next().

        `cpu` is this process's CPU time so far, `receive` this thread's in next().
        """
        self.batches += 1
        if self._first is None and self.batches >= self.clock_batches:
            self._first = now
        if self._is_first:
            self._first_waits.append(wait)
            self._is_first = False
        if self._last is not None:
            self._steps.append(now - self._last[0])
            self._cpu_seconds.append(cpu - self._last[1])
            self._waits.append(wait)
            self._receives.append(receive)
        elif self._is_warm(now):
            self._begun = _Begun(
                now, cpu, self.children_cpu(), self.machine_cpu(), self.stray_cpu()
            )
        self._last = (now, cpu) if self._is_warm(now) else None

    def gave(self, *, now: float, cpu: float) -> None:
        """Records that the script has its batch: the time since `got` is in no step."""
        if self._last is not None:
            self._last = (now, cpu)

    def _is_warm(self, now: float) -> bool:
        if self.batches > WARM_UP_STEPS:
            return True
        return self._first is not None and 0 < self.warm_up_seconds <= now - self._first

    def epoch_ended(self) -> None:
        """Records that what follows is not part of a step; may be called twice."""
        if self._last is not None:
            # The machine counts the time between steps, so these figures include it, too.
            begun = self._begun
            children = self.children_cpu() - begun.children
            machine = self.machine_cpu() - begun.machine
            own = self._last[1] - begun.cpu
            outside = _outside_seconds(
                self.stray_cpu(), before=begun.stray, children=children, room=machine - own
            )
            self._outside_seconds += outside
            self._children_seconds += children - outside
            self._others_seconds += machine - (children - outside) - own
            self._epochs_seconds += self._last[0] - begun.now
        self._last = None
        self._is_first = True

    def pace(self, elapsed_seconds: float) -> tuple[float, float]:
        """Returns the seconds of a step and of its wait, roughly where none has counted."""
        if not self._steps:
            return max(1e-6, elapsed_seconds / max(1, self.batches)), 0.0
        step, wait = fmean(self._steps), fmean(self._waits)
        return max(1e-6, step), min(wait, 0.9 * step)

    def result(self) -> AsIs:
        """Returns the figures of at least one step; the children's are of the epochs that ended."""
        count = len(self._steps)
        waits = self._first_waits[1:] or self._first_waits
        return AsIs(
            step_seconds=quartiles(block_means(self._steps, workers=self.workers), samples=count),
            wait_seconds=quartiles(block_means(self._waits, workers=self.workers), samples=count),
            trainer_cpu_seconds=sum(self._cpu_seconds) / count,
            children_cpu_seconds=self._children_seconds / count,
            outside_cpu_seconds=self._outside_seconds / count,
            receive_seconds=sum(self._receives) / count,
            first_wait_seconds=quartiles(waits).median if waits else None,
            others_vcpus=max(0.0, self._others_seconds / (self._epochs_seconds or math.inf)),
            epoch_batches=self.epoch_batches,
        )


@dataclass(slots=True, kw_only=True)
class ReplaySteps:
    """Times of steps on cached batches, in blocks.

    A block of several steps is timed together where the accelerator runs behind the host, and is
    waited for at the end of each block. `given` batches were handed out.
    """

    block: int = 1
    warm_up: int = WARM_UP_REPLAYS
    _steps: list[float] = field(default_factory=list)
    _cpu_seconds: list[float] = field(default_factory=list)
    given: int = 0
    _begin: tuple[float, float] | None = None
    _cpu_given: float = 0.0
    _cpu_in_block: float = 0.0

    @property
    def count(self) -> int:
        return len(self._steps) * self.block

    def is_block_end(self) -> bool:
        """Whether this step ends a block: wait for the accelerator, then call `asked`."""
        return self.given >= self.warm_up and (self.given - self.warm_up) % self.block == 0

    def asked(self, *, now: float, cpu: float) -> None:
        """Records that the next batch is asked for: the step before has ended."""
        if self.given > self.warm_up:
            self._cpu_in_block += cpu - self._cpu_given
            if self.is_block_end() and self._begin is not None:
                self._steps.append((now - self._begin[0]) / self.block)
                self._cpu_seconds.append(self._cpu_in_block / self.block)
        if self.is_block_end():
            self._begin = None

    def gave(self, *, now: float, cpu: float) -> None:
        if self._begin is None and self.given >= self.warm_up:
            self._begin = (now, cpu)
            self._cpu_in_block = 0.0
        self.given += 1
        self._cpu_given = cpu

    def result(self, *, cached_batches: int) -> AcceleratorOnly:
        return AcceleratorOnly(
            step_seconds=quartiles(self._steps, samples=self.count),
            trainer_cpu_seconds=quartiles(self._cpu_seconds, samples=self.count),
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
        more = WARM_UP_STEPS + USUAL_STEPS - as_is.batches
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
            warming = max(0, WARM_UP_STEPS - as_is.batches) if not as_is.count else 0
            more += warming + AS_IS_ENOUGH.more(
                steps=as_is.count,
                elapsed_seconds=elapsed_seconds,
                step_seconds=step,
                budget_seconds=budget_seconds,
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
            self._timer = timer if timer >= 0 else None

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
        own = threads_cpu_seconds({self._thread_id}) - self._own
        others = time.process_time() - self._process - own
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
        return Evidence(
            seconds=seconds,
            steps=self._steps,
            wait_seconds=self._wait,
            own_cpu_seconds=max(0.0, own - self._receive),
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
            storage_stall_seconds=None
            if stall is None or self._stall is None
            else stall - self._stall,
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
        asked = time.monotonic()
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
                late = now - asked - KNOCK_SECONDS
                self.knocks += 1
                self.held_knocks += late - max(machine_late, queued - before) >= HELD_SECONDS
                self.collective_knocks += _is_collective(frame)
            del frame
            if now - speed_looked >= _SPEED_SAMPLE_SECONDS:
                speed_looked = now
                self.core_looks.append(look())
                queued = schedule.queued_seconds()
            before = queued
            asked = time.monotonic()
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
    found = {name: getattr(first, name) + getattr(second, name) for name in names}
    for name in unlike[:2]:
        total = sum(getattr(own, name) * own.seconds for own in (first, second))
        found[name] = total / max(found["seconds"], 1e-9)
    if (stall := second.storage_stall_seconds) is not None:
        found["storage_stall_seconds"] = stall + (first.storage_stall_seconds or 0.0)
    return Evidence(**found, quota_vcpus=second.quota_vcpus)
