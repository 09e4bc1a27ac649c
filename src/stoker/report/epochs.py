"""What whole epochs have beyond their steps: a table of before and after, and its words."""

from collections.abc import Callable
from dataclasses import dataclass

from stoker.record_words import epoch_words
from stoker.records import EpochPause, EpochTimes, Measured, Profile
from stoker.units import NBSP, NOT_KNOWN, TimeUnit, capital, digits, whole

_NOT_SEEN = "not seen"
_BETWEEN = "Between epochs: validation, checkpoints"


@dataclass(frozen=True, slots=True)
class EpochColumn:
    """A run whose epochs are known; `step_seconds` within them, `whole_step_seconds` over them."""

    name: str
    times: EpochTimes
    step_seconds: float
    whole_step_seconds: float


@dataclass(frozen=True, slots=True)
class EpochTable:
    """Rows of the table: the part, and its cell in each column.

    Attributes:
        heads: Names of the columns.
        rows: The part, then its figure in each column.
        notes: What they mean, and what helps; of the last column.
    """

    heads: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    notes: tuple[str, ...]


def epoch_columns(
    *, profile: Profile | None, measured: Measured | None, is_profiled_here: bool
) -> list[EpochColumn]:
    """Returns before and after, if their epochs are known."""
    before = after = None
    if profile and is_profiled_here:
        before = _profiled(profile, measured)
    if measured and measured.epochs and measured.whole_step_seconds:
        after = EpochColumn(
            name="After" if before else "This run",
            times=measured.epochs,
            step_seconds=measured.step_seconds,
            whole_step_seconds=measured.whole_step_seconds,
        )
    return [column for column in (before, after) if column]


def _profiled(profile: Profile, measured: Measured | None) -> EpochColumn | None:
    times = profile.epochs
    if not profile.step or not times or not times.steps:
        return None
    step_seconds = profile.step.step_seconds
    compared = times
    if measured and measured.epochs:
        # As they are compared: a pause that was not seen is as in the run.
        compared = times.as_in(measured.epochs)
    return EpochColumn("Before", times, step_seconds, compared.whole_step_seconds(step_seconds))


def epoch_table(columns: list[EpochColumn], *, unit: TimeUnit) -> EpochTable | None:
    """Returns the table; None where no epoch is known, nor any time beyond the steps."""
    words = [epoch_words(run.times, step_seconds=run.step_seconds) for run in columns]
    if not any(words) or not any(run.times.steps for run in columns):
        return None
    parts: dict[str, Callable[[EpochColumn], str]] = {
        "A step, over whole epochs": lambda run: unit.show(run.whole_step_seconds),
        "A step, within epochs": lambda run: unit.show(run.step_seconds),
        "Steps of an epoch": lambda run: _steps(run.times.steps),
        "Start of an epoch: waiting for its first batch": lambda run: _pause(run.times.start),
        _BETWEEN: lambda run: _pause(run.times.between),
        "Validation, checkpoints and slow steps in mid-epoch, a step": lambda run: unit.show(
            run.times.inside_seconds
        ),
    }
    if not any(run.times.inside_seconds for run in columns):
        parts.popitem()
    rows = {name: tuple(map(cell, columns)) for name, cell in parts.items()}
    if columns[0].times.between is None and columns[-1].times.between is not None:
        rows[_BETWEEN] = (f"{_NOT_SEEN}, counted as after", *rows[_BETWEEN][1:])
    notes = [f"{capital(text)}." for text in words[-1]]
    if any("first batch" in text for text in words[-1]):
        notes.append(
            "Sooner there: smaller batches, with gradients of several accumulated; longer epochs; "
            "persistent_workers=True, where an epoch starts new workers."
        )
    heads = tuple(run.name for run in columns)
    return EpochTable(heads, tuple(rows.items()), tuple(notes))


def _steps(number: float | None) -> str:
    if number is None:
        return NOT_KNOWN
    return whole(round(number))


def _pause(pause: EpochPause | None) -> str:
    if pause is None:
        return _NOT_SEEN
    seconds = f"{digits(pause.seconds, 3, max_places=2)}{NBSP}s"
    if pause.count:
        return f"{seconds}, {pause.count} seen"
    return f"{seconds}, computed"
