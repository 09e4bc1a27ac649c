"""What whole epochs have beyond their steps: a table of before and after, and its words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.record_words import epoch_words
from stoker.records import (
    EpochPause,
    EpochTimes,
    FeedSettings,
    Fix,
    Measured,
    Profile,
    Training,
)
from stoker.units import NBSP, NOT_KNOWN, TimeUnit, capital, digits, whole

_NOT_SEEN = "not seen"
_BETWEEN = "Between epochs: validation, checkpoints"


@dataclass(frozen=True, slots=True)
class EpochColumn:
    """A run whose epochs are known.

    Attributes:
        step_seconds: Within epochs.
        whole_step_seconds: Over whole epochs.
        is_first_shared: Whether all workers of a data host make an epoch's first batch.
    """

    name: str
    times: EpochTimes
    step_seconds: float
    whole_step_seconds: float
    is_first_shared: bool = False


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


def is_first_batch_shared(
    feed: FeedSettings, *, profile: Profile | None, training: Training | None
) -> bool:
    """Returns whether all workers of a data host make an epoch's first batch.

    Args:
        feed: Settings of the run.
        profile: Of its script. None: whether samples are made one by one is not known.
        training: What came of it.
    """
    if training is None or training.is_unfed:
        return False
    has_data_hosts = any(group.role == "data" for group in training.groups)
    loader = profile.loader if profile else None
    is_one_call = loader is not None and loader.splits is False
    return feed.splits and has_data_hosts and not is_one_call


def epoch_columns(
    *,
    profile: Profile | None,
    measured: Measured | None,
    is_profiled_here: bool,
    is_first_shared: bool,
) -> list[EpochColumn]:
    """Returns before and after, if their epochs are known.

    Args:
        measured: Of the run.
        is_profiled_here: Whether the profile is of hosts as the run's.
        is_first_shared: As `is_first_batch_shared` says of the run.
    """
    before = after = None
    if profile and is_profiled_here:
        before = _profiled(profile, measured)
    if measured and measured.epochs and measured.whole_step_seconds:
        after = EpochColumn(
            name="After" if before else "This run",
            times=measured.epochs,
            step_seconds=measured.step_seconds,
            whole_step_seconds=measured.whole_step_seconds,
            is_first_shared=is_first_shared,
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


def epoch_table(
    columns: list[EpochColumn], *, unit: TimeUnit, fixes: Sequence[Fix]
) -> EpochTable | None:
    """Returns the table; None where no epoch is known, nor any time beyond the steps.

    Args:
        fixes: Of the profile.
    """
    words = [
        epoch_words(run.times, step_seconds=run.step_seconds, is_first_shared=run.is_first_shared)
        for run in columns
    ]
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
    notes = _notes(words[-1], fixes)
    heads = tuple(run.name for run in columns)
    return EpochTable(heads, tuple(rows.items()), tuple(notes))


def _notes(words: list[str], fixes: Sequence[Fix]) -> list[str]:
    notes = [f"{capital(text)}." for text in words]
    if any("first batch" in text for text in words):
        sooner = "Sooner there: smaller batches, with gradients of several accumulated"
        sooner += "; longer epochs"
        # A profile has that fix where an epoch starts new workers, and it would help.
        if any(fix.id == "persistent_workers" for fix in fixes):
            sooner += "; persistent_workers=True"
        notes.append(f"{sooner}.")
    return notes


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
