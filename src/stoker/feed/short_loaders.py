"""Loaders that live too short for a data host: its start costs more than its batches give.

A loader's start on a data host (a session, the dataset's pickle, a process that unpickles it, its
workers) is repaid batch by batch. A script that makes loaders again and again by one line, as for
federated clients, domains or folds, shows what they cost: the first is fed, and where its start is
much of its life, two are made here, and another is fed where that may pay. Then both paces are
known and kept, so a loader's number of batches alone decides, and loaders of one size never change
sides. All figures are times of this run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

MadeIn = Literal["fed", "here"]

# The first loader also waits for what a run does once: imports, connections. Of short loaders the
# second is fed only where that may pay.
NUM_FED = 2
# Of a loader on a data host that has served the run: 0.04 to 0.1 s on two shared cores.
LEAST_START_SECONDS = 0.04
# One may meet a busy moment.
NUM_HERE = 2
# Of a fed loader's life: a start that takes less is worth no trial.
MIN_START_SHARE = 0.1
# Loaders that are opened before any batch of their line is there are started here, beyond the first
# ones, where their epochs have no more batches: the next epoch decides again.
SHORT_BATCHES = 100


class Seconds(Protocol):
    """When an epoch began, had its first batch, and ended its last step (monotonic seconds)."""

    began: float
    first_got: float
    ended: float

    @property
    def num_done(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What loaders cost that are made in one place.

    Attributes:
        start_seconds: From iter() to the first batch.
        batch_seconds: Of each step.
        unhelped_share: Of the batches that data hosts should make, 0..1: made here during that
            time, as none of them was ready.
    """

    start_seconds: float
    batch_seconds: float
    unhelped_share: float = 0.0

    def life_seconds(self, batches: float) -> float:
        return self.start_seconds + batches * self.batch_seconds


class _Sums(NamedTuple):
    """A loader's start, and the sums over its steps."""

    start_seconds: float = 0.0
    batches: int = 0
    seconds: float = 0.0


_NO_SUMS = _Sums()


@dataclass(slots=True, eq=False)
class LoaderLife:
    """The epochs of one loader so far."""

    place: MadeIn = "fed"
    epochs: int = 0
    # Batches that were made here because no data host was ready.
    num_meanwhile: int = 0
    _before: _Sums = _NO_SUMS
    _last: Seconds | None = None

    def begins(self, epoch: Seconds) -> None:
        """Adds an epoch whose times are yet to come."""
        self._before = self._sums()
        self._last = epoch
        self.epochs += 1

    @property
    def batches(self) -> int:
        return self._sums().batches

    @property
    def pace(self) -> Pace | None:
        """The loader's pace; None: it has no step yet."""
        start, batches, seconds = self._sums()
        if not batches:
            return None
        # Later epochs wait for their first batches as well: a part of their steps.
        return Pace(
            start_seconds=start,
            batch_seconds=seconds / batches,
            unhelped_share=min(1.0, self.num_meanwhile / batches),
        )

    def _sums(self) -> _Sums:
        before = self._before
        last = self._last
        if last is None or not last.num_done:
            return before
        batches = before.batches + last.num_done
        if before.batches:
            seconds = before.seconds + last.ended - last.began
            return _Sums(before.start_seconds, batches, seconds)
        return _Sums(last.first_got - last.began, batches, last.ended - last.first_got)


def pays(*, batches: float, fed: Pace, here: Pace) -> bool:
    """Returns whether a loader ends sooner with data hosts than without.

    Args:
        batches: In the life of the loader.
        fed: What loaders cost with data hosts.
        here: What they cost without.
    """
    return fed.life_seconds(batches) <= here.life_seconds(batches)


def start_share(pace: Pace, *, batches: float) -> float:
    """Returns how much of a loader's life its start is, 0..1.

    A data host's start ends when it is ready, also where the loop did not wait for it.
    """
    life = pace.life_seconds(batches)
    start = pace.start_seconds + pace.unhelped_share * batches * pace.batch_seconds
    return start / life if life > 0 else 0.0


@dataclass(slots=True, eq=False)
class LoaderLine:
    """Loaders that one line of a script makes over one class of dataset, from first to last."""

    num_loaders: int = 0
    num_here: int = 0
    fed: list[LoaderLife] = field(default_factory=list)
    here: list[LoaderLife] = field(default_factory=list)
    # Both, once known: kept, so that no loader's noise changes the side of the next one.
    paces: tuple[Pace, Pace] | None = None
    has_said: bool = False

    def place_of(self, life: LoaderLife, *, length: int | None) -> MadeIn:
        """Returns where the next epoch of a loader is made.

        Args:
            life: Of the loader, a new one before its first epoch.
            length: Batches of an epoch; None: not known.
        """
        if life.epochs and life.place == "fed":
            return "fed"
        batches = self.expected_batches(life, length=length)
        if batches is None:
            # Nothing is known yet, as all are open at once: not forty starts for a batch each.
            is_short = length is not None and length <= SHORT_BATCHES
            return "here" if is_short and len(self.fed) >= NUM_FED else "fed"
        if self.paces is None:
            return self._trial(life, batches=batches)
        fed, here = self.paces
        return "fed" if pays(batches=batches, fed=fed, here=here) else "here"

    def expected_batches(self, life: LoaderLife, *, length: int | None) -> float | None:
        """Returns the batches in the life of a loader; None: no other one tells."""
        lives = [other for other in (*self.fed, *self.here) if other.batches and other is not life]
        if not lives:
            return None
        if length is None:
            return max(_mean([other.batches for other in lives]), 2.0 * life.batches)
        # One that has lived for an epoch will live for as many again.
        epochs = max(_mean([other.epochs for other in lives]), 2.0 * life.epochs)
        return length * epochs

    def opens(self, life: LoaderLife, *, place: MadeIn) -> None:
        """Notes where an epoch of a loader is made, before it begins."""
        if not life.epochs:
            self.num_loaders += 1
            self.num_here += place == "here"
            lives, most = (self.fed, NUM_FED) if place == "fed" else (self.here, NUM_HERE)
            if len(lives) < most:
                lives.append(life)
        elif life.place != place:
            # It lives longer than the others of its line.
            self.num_here -= 1
        life.place = place

    def why_here(self) -> str:
        """Returns why loaders of this line are made here, as half a sentence; needs `paces`."""
        assert self.paces is not None
        fed, here = self.paces
        batches = _mean([life.batches for life in (*self.fed, *self.here)])
        return (
            f"each lives {batches:.0f} batches, {fed.life_seconds(batches):.2g} s from data hosts "
            f"({fed.start_seconds:.2g} s of them its start) and {here.life_seconds(batches):.2g} s "
            "here"
        )

    def _trial(self, life: LoaderLife, *, batches: float) -> MadeIn:
        fed = _paces(self.fed)
        here = _paces(self.here)
        first = 1 if batches <= SHORT_BATCHES else NUM_FED
        if len(fed) < first:
            return "fed"
        quickest_fed = _quickest(fed, batches)
        if start_share(quickest_fed, batches=batches) < MIN_START_SHARE:
            return "fed"
        if len(self.here) < NUM_HERE:
            return "here"
        if len(here) < NUM_HERE or len(fed) < len(self.fed):
            # They are being read.
            return life.place
        quickest_here = _quickest(here, batches)
        gain = quickest_here.life_seconds(batches) - batches * quickest_fed.batch_seconds
        if len(self.fed) < NUM_FED and gain > LEAST_START_SECONDS:
            # The first start was the run's: a later one may be worth it.
            return "fed"
        self.paces = (quickest_fed, quickest_here)
        return "fed" if pays(batches=batches, fed=quickest_fed, here=quickest_here) else "here"


def _quickest(paces: Sequence[Pace], batches: float) -> Pace:
    return min(paces, key=lambda pace: pace.life_seconds(batches))


def made_here_words(lines: Iterable[LoaderLine]) -> str:
    """Returns how many of a run's loaders lived too short for data hosts; empty: none did."""
    read_lines = [line for line in lines if line.num_loaders]
    short = [line for line in read_lines if line.num_here and line.has_said]
    if not short:
        return ""
    num_here = sum(line.num_here for line in short)
    total = sum(line.num_loaders for line in read_lines)
    lives = [life.batches for line in short for life in line.here]
    return f"{num_here} of {total} loaders were made here: each lives {_mean(lives):.0f} batches"


def _paces(lives: Sequence[LoaderLife]) -> list[Pace]:
    return [pace for life in lives if (pace := life.pace) is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
