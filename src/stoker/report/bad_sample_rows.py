"""The report's rows on samples that were skipped or replaced."""

import csv
from dataclasses import dataclass
from pathlib import Path

from stoker.feed.bad_samples import COLUMNS, MAX_ROWS
from stoker.records import Training
from stoker.units import numbered, percent, whole

# The list itself is beside the page.
_MAX_SHOWN = 8
_MAX_CHARACTERS = 120


@dataclass(frozen=True, slots=True)
class BadSampleRow:
    """A bad sample, as its row of bad_samples.csv says."""

    index: str
    error: str
    text: str
    replaced_by: str
    epoch: str
    host: str


@dataclass(frozen=True, slots=True)
class BadSampleStory:
    """The report's figures on bad samples.

    Attributes:
        total: Of all ranks and epochs.
        share: Of the run's samples; None: their number is not known.
        num_different: Different indices in the list.
        rows: The first of them, each index once.
    """

    total: int
    share: float | None
    num_different: int
    rows: tuple[BadSampleRow, ...]

    @property
    def line(self) -> str:
        """What a terminal says of them."""
        first = ""
        if self.rows:
            row = self.rows[0]
            first = f"; the first: sample {row.index} ({row.error}: {row.text}) on {row.host}"
        return f"{self.caption}{first}"

    @property
    def caption(self) -> str:
        """How many there were, in one sentence."""
        many = f"{whole(self.total)} times a sample could not be made"
        if self.total == 1:
            many = "Once a sample could not be made"
        share = "" if self.share is None else f", {percent(self.share)} of all"
        different = ""
        if self.rows:
            different = f": {numbered(self.num_different, 'sample', 'different samples')}"
        return f"{many}{share}{different}"


def bad_sample_story(training: Training | None, *, file: Path | None) -> BadSampleStory | None:
    """Returns what the report says of bad samples; None: there were none.

    Args:
        training: The run's record.
        file: Its bad_samples.csv, if it is there.
    """
    if training is None or not training.bad_samples:
        return None
    indices: set[str] = set()
    rows: list[BadSampleRow] = []
    for row in _listed(file) if file is not None else ():
        if row.index not in indices and len(rows) < _MAX_SHOWN:
            rows.append(row)
        indices.add(row.index)
    samples = _num_samples(training)
    return BadSampleStory(
        total=training.bad_samples,
        share=training.bad_samples / samples if samples else None,
        num_different=len(indices),
        rows=tuple(rows),
    )


def _num_samples(training: Training) -> float:
    """Returns about how many samples the run had; 0: that is not known."""
    measured = training.measured
    if measured is None or not training.steps:
        return 0.0
    return measured.samples_per_second * measured.counted_seconds * training.steps


def _listed(file: Path) -> list[BadSampleRow]:
    rows: list[BadSampleRow] = []
    try:
        with file.open(newline="", encoding="utf-8", errors="replace") as text:
            for row in csv.DictReader(text):
                # Not the last line of a list that was cut off.
                if None in row.values() or len(rows) == MAX_ROWS:
                    break
                rows.append(_row(row))
    except (OSError, csv.Error, KeyError):
        return rows
    return rows


def _row(row: dict[str, str]) -> BadSampleRow:
    values = {name: row[name][:_MAX_CHARACTERS] for name in COLUMNS}
    return BadSampleRow(
        index=values["index"],
        error=values["error"],
        text=values["text"],
        replaced_by=values["replaced_by"],
        epoch=values["epoch"],
        host=values["host"],
    )
