"""The trainer's steps are timed: as is, and with cached batches. Times are passed in."""

from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.profile.raw import AcceleratorOnly, AsIs, block_means, quartiles

# Steps that are not counted: first kernels, first allocations, cold caches.
WARM_UP_STEPS = 10
WARM_UP_REPLAYS = 3

_MIN_STEPS = 5
_FEWEST_STEPS = 2
USUAL_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Enough:
    """The conditions under which a phase knows enough, in shares of the budget.

    Attributes:
        steps: So many, and `least` of the budget, are plenty.
        usual: The share after which 20 steps do.
        most: The share after which 5 steps must do.
        last: The share after which 2 must: a step takes a large part of the budget.
    """

    steps: int
    least: float
    usual: float
    most: float
    last: float

    def holds(self, *, steps: int, elapsed_seconds: float, budget_seconds: float) -> bool:
        """Returns whether the phase may end."""
        share = elapsed_seconds / budget_seconds
        if steps >= self.steps and share >= self.least:
            return True
        if steps >= USUAL_STEPS and share >= self.usual:
            return True
        if steps >= _MIN_STEPS and share >= self.most:
            return True
        return steps >= _FEWEST_STEPS and share >= self.last


AS_IS_ENOUGH = Enough(steps=120, least=0.10, usual=0.30, most=0.45, last=0.50)
REPLAY_ENOUGH = Enough(steps=60, least=0.05, usual=0.20, most=0.25, last=0.30)


@dataclass(slots=True, kw_only=True)
class AsIsSteps:
    """The user's own steps: from one batch to the next, never over the end of an epoch.

    Args:
        workers: Loader workers of this rank.
        children_cpu: CPU-seconds so far of all processes below this one; asked for at the begin
            and end of an epoch only, for it takes milliseconds.
        machine_cpu: CPU-seconds so far of all processes of the machine, on the vCPUs of this one.
        warm_up_seconds: After so long the warm-up is over, however few steps it had.
        clock_batches: With this batch its clock begins. Ranks get their first ones seconds apart,
            the second ones together: where it is 2, their warm-ups end together, too.
    """

    workers: int
    children_cpu: Callable[[], float]
    machine_cpu: Callable[[], float]
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
    _others_seconds: float = 0.0
    _epochs_seconds: float = 0.0
    _begun: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    _last: tuple[float, float] | None = None
    _is_first: bool = True

    @property
    def count(self) -> int:
        """Steps that count."""
        return len(self._steps)

    def got(self, *, now: float, cpu: float, wait: float, receive: float) -> None:
        """Notes that a batch is there.

        Args:
            now: Monotonic seconds.
            cpu: CPU-seconds so far of this process.
            wait: Seconds in next().
            receive: CPU-seconds of this thread in next().
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
            self._begun = (now, cpu, self.children_cpu(), self.machine_cpu())
        self._last = (now, cpu) if self._is_warm(now) else None

    def goes_on(self, *, now: float, cpu: float) -> None:
        """Notes that the script has its batch: what was done after `got` is none of its step."""
        if self._last is not None:
            self._last = (now, cpu)

    def _is_warm(self, now: float) -> bool:
        if self.batches > WARM_UP_STEPS:
            return True
        return self._first is not None and 0 < self.warm_up_seconds <= now - self._first

    def epoch_ended(self) -> None:
        """Notes that what follows is not part of a step; may be called twice."""
        if self._last is not None:
            # What was done between steps is in what the machine counts, so it is in these, too.
            began, cpu, children, machine = self._begun
            children = self.children_cpu() - children
            own = self._last[1] - cpu
            self._children_seconds += children
            self._others_seconds += self.machine_cpu() - machine - children - own
            self._epochs_seconds += self._last[0] - began
        self._last = None
        self._is_first = True

    def result(self) -> AsIs:
        """Returns the numbers of at least one step; the children's are of the epochs that ended."""
        count = len(self._steps)
        waits = self._first_waits[1:] or self._first_waits
        return AsIs(
            step_seconds=quartiles(block_means(self._steps, workers=self.workers), samples=count),
            wait_seconds=quartiles(block_means(self._waits, workers=self.workers), samples=count),
            trainer_cpu_seconds=sum(self._cpu_seconds) / count,
            children_cpu_seconds=self._children_seconds / count,
            receive_seconds=sum(self._receives) / count,
            first_wait_seconds=quartiles(waits).median if waits else None,
            others_vcpus=max(0.0, self._others_seconds / self._epochs_seconds)
            if self._epochs_seconds
            else 0.0,
            epoch_batches=self.epoch_batches,
        )


@dataclass(slots=True, kw_only=True)
class ReplaySteps:
    """Steps on cached batches.

    Args:
        block: Steps that are timed together; more than one where the accelerator runs behind the
            host and is waited for at the end of each block.
        warm_up: Steps that are not counted.
    """

    block: int = 1
    warm_up: int = WARM_UP_REPLAYS
    _steps: list[float] = field(default_factory=list)
    _cpu_seconds: list[float] = field(default_factory=list)
    _given: int = 0
    _begin: tuple[float, float] | None = None
    _cpu_given: float = 0.0
    _cpu_in_block: float = 0.0

    @property
    def count(self) -> int:
        """Steps that count."""
        return len(self._steps) * self.block

    @property
    def given(self) -> int:
        """Batches that were handed out."""
        return self._given

    def is_block_end(self) -> bool:
        """Returns whether this step ends a block: wait for the accelerator, then call `asked`."""
        return self._given >= self.warm_up and (self._given - self.warm_up) % self.block == 0

    def asked(self, *, now: float, cpu: float) -> None:
        """Notes that the next batch is asked for: the step before has ended."""
        if self._given > self.warm_up:
            self._cpu_in_block += cpu - self._cpu_given
            if self.is_block_end() and self._begin is not None:
                self._steps.append((now - self._begin[0]) / self.block)
                self._cpu_seconds.append(self._cpu_in_block / self.block)
        if self.is_block_end():
            self._begin = None

    def gave(self, *, now: float, cpu: float) -> None:
        """Notes that a batch was handed out."""
        if self._begin is None and self._given >= self.warm_up:
            self._begin = (now, cpu)
            self._cpu_in_block = 0.0
        self._given += 1
        self._cpu_given = cpu

    def result(self, *, cached_batches: int) -> AcceleratorOnly:
        """Returns the numbers of at least one step."""
        return AcceleratorOnly(
            step_seconds=quartiles(self._steps, samples=self.count),
            trainer_cpu_seconds=quartiles(self._cpu_seconds, samples=self.count),
            cached_batches=cached_batches,
        )


def missing_of(as_is: AsIsSteps | None, replay: ReplaySteps | None) -> str:
    """Says what a script that ended by itself did not leave time for."""
    if replay is not None:
        return f"the script ended after {replay.count} steps with cached batches"
    if as_is is None:
        return "no DataLoader was read to train on"
    epoch = f"; an epoch has {as_is.epoch_batches}" if as_is.epoch_batches else ""
    return (
        f"the script ended after {as_is.batches} batches of its main loader{epoch}; "
        f"{WARM_UP_STEPS + USUAL_STEPS} are needed"
    )
