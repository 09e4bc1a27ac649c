"""The bad samples of a trainer process: counted, written to a file, and too many of them an error.

Only those of batches that the script gets are noted, so each is noted once, in order.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NotRequired, TypedDict

from stoker.errors import FeedError
from stoker.feed.wire.protocol import BadSample

# The leader joins those of the ranks of its host.
FILE = "bad_samples.csv"
FILE_OF_RANK = "bad_samples-rank{rank}.csv"
# How many a rank has had, if they are more than its rows.
_COUNT_OF_RANK = "bad_samples-rank{rank}.count"
COLUMNS = (
    "epoch",
    "batch_number",
    "rank",
    "loader",
    "place",
    "index",
    "error",
    "text",
    "replaced_by",
    "host",
    "worker",
)
# Further ones are only counted.
MAX_ROWS = 10_000
# A share of fewer samples says nothing of an epoch whose length is not known.
_MIN_SAMPLES = 100
_MAX_NAMED = 5


class BadSamplesState(TypedDict):
    """Bad samples in a loader's state: of all epochs, and of the one that it is in.

    `first` are the first ones of the epoch, in words; states of earlier versions have none.
    """

    total: int
    of_epoch: int
    samples: int
    first: NotRequired[list[str]]


@dataclass(slots=True)
class BadSamples:
    """Bad samples of one loader of this process.

    Attributes:
        total: Of all epochs.
        of_epoch: Of the current one.
        samples: That the script got, or lost, in the current epoch.
    """

    total: int = 0
    of_epoch: int = 0
    samples: int = 0
    # Before the last batch.
    _before: tuple[int, int, int] = (0, 0, 0)
    # The first ones of the epoch, in words, and how many of them were before the last batch.
    _first: list[str] = field(default_factory=list)
    _num_first_before: int = 0

    def begin(self) -> None:
        """Begins an epoch."""
        self.of_epoch = self.samples = self._num_first_before = 0
        self._first.clear()

    def state(self, *, is_held: bool) -> BadSamplesState:
        """Returns what `load` takes; `is_held`: without the last batch, which comes again."""
        now = (self.total, self.of_epoch, self.samples)
        total, of_epoch, samples = self._before if is_held else now
        first = self._first[: self._num_first_before] if is_held else self._first
        return BadSamplesState(total=total, of_epoch=of_epoch, samples=samples, first=[*first])

    def load(self, state: BadSamplesState) -> None:
        """Goes on from a saved state, in its epoch."""
        self.total = state["total"]
        self.of_epoch = state["of_epoch"]
        self.samples = state["samples"]
        self._first = [*state.get("first", ())]

    def count(self, bad: Sequence[BadSample], *, samples: int) -> None:
        """Counts a batch that had so many samples, with the bad ones."""
        self._before = (self.total, self.of_epoch, self.samples)
        self.samples += samples
        self.total += len(bad)
        self.of_epoch += len(bad)
        self._num_first_before = len(self._first)
        self._first += [_words_of(one) for one in bad[: _MAX_NAMED - len(self._first)]]

    def are_many(self, most: float) -> bool:
        """Returns whether there are more than `feed.max_errors` among the samples so far."""
        if most >= 1:
            return self.of_epoch > most
        return self.of_epoch > _allowed(most, self.samples)

    def error(self, most: float, *, where: str, whole: int | None) -> FeedError | None:
        """Returns the error of too many bad samples; None: there are not too many.

        Args:
            most: `feed.max_errors`: a number, or below 1 a share of the epoch's samples.
            where: The rank, and where the list of bad samples is.
            whole: Samples of the whole epoch, by which a share is judged: the first hundred may
                have more than theirs. None: not known.
        """
        if not self.are_many(most):
            return None
        limit = f"{most:.0f} samples" if most > 1 else "1 sample"
        if most < 1:
            is_enough = whole is not None or self.samples >= _MIN_SAMPLES
            judged = max(self.samples, whole or 0)
            if not is_enough or self.of_epoch <= _allowed(most, judged):
                return None
            limit = f"{most:g} of {judged}"
        return FeedError(
            f"{self.of_epoch} of {self.samples} samples of this epoch are bad, feed.max_errors is "
            f"{limit}: {'; '.join(self._first)}",
            where=where,
            fix="mend these samples or take them out of the dataset, or raise feed.max_errors",
        )


def _allowed(share: float, samples: int) -> float:
    # 0.29 of 100 are 28.999999999999996 as computers multiply.
    return round(share * samples, 6)


def _words_of(bad: BadSample) -> str:
    return f"{bad.index} ({bad.error}: {bad.text[:80]})"


class BadSampleFile:
    """The list of one rank's bad samples; a row each, written at once."""

    def __init__(self, path: Path, *, rank: int) -> None:
        self._path = path
        self._rank = rank
        self._num_bad = 0
        self._has_begun = False

    def add(self, bad: Iterable[BadSample], batch: "ListedBatch") -> None:
        """Appends the bad samples of a batch; raises OSError if the file cannot be written.

        Args:
            bad: In the order of their places.
            batch: Theirs.
        """
        worker = batch.worker if batch.worker >= 0 else ""
        self._begin()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            for one in bad:
                self._num_bad += 1
                if self._num_bad > MAX_ROWS:
                    continue
                where = (batch.epoch, batch.number, self._rank, batch.loader, one.place)
                what = (one.index, one.error, one.text, one.replaced_by)
                rows.writerow((*where, *what, batch.host, worker))
        if self._num_bad > MAX_ROWS:
            count = _COUNT_OF_RANK.format(rank=self._rank)
            self._path.with_name(count).write_text(str(self._num_bad), encoding="utf-8")

    def _begin(self) -> None:
        """Begins the file, or a new line in that of a process that may have been killed."""
        if self._has_begun:
            return
        self._has_begun = True
        is_new = not self._path.exists()
        with self._path.open("a", newline="", encoding="utf-8") as file:
            if is_new:
                csv.writer(file).writerow(COLUMNS)
            else:
                file.write("\r\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedBatch:
    """A batch with bad samples.

    Attributes:
        epoch, loader: As in the rank's timeline.
        host, worker: That made it; -1: it is not known.
    """

    epoch: int
    number: int
    loader: int
    host: str
    worker: int = -1


def join_files(output: Path) -> int:
    """Joins the lists of ranks into one file, in order, each sample once.

    A rank that was started again from a state may have listed a batch before. May be called again:
    the file's own rows stay.

    Returns:
        How many bad samples the ranks of this host had, also those that are not listed.
    """
    files = sorted(output.glob(FILE_OF_RANK.format(rank="*")))
    whole_list = output / FILE
    if not files and not whole_list.is_file():
        return 0
    unlisted = 0
    for path in output.glob(_COUNT_OF_RANK.format(rank="*")):
        unlisted += int(path.read_text(encoding="utf-8")) - MAX_ROWS
    earlier = [whole_list] if whole_list.is_file() else []
    num_listed = _join([*earlier, *files], into=whole_list)
    for path in files:
        path.unlink()
    return num_listed + unlisted


def join_lists_of_hosts(folders: Iterable[Path], file: Path) -> int:
    """Writes one list of those that hosts have left: the leader's, and ranks' of the others.

    Args:
        folders: Of hosts' outputs; some may have none. Hosts but the leader write to one within.
        file: The list; it is removed where there are no bad samples.

    Returns:
        How many samples are listed.

    Raises:
        ValueError: If a list is malformed.
        OSError: If a file cannot be read or written.
    """
    file.unlink(missing_ok=True)
    of_rank = FILE_OF_RANK.format(rank="*")
    lists: set[Path] = set()
    for folder in folders:
        lists.update(folder.glob(FILE), folder.glob(of_rank), folder.glob(f"*/{of_rank}"))
    return _join(sorted(lists), into=file) if lists else 0


def _join(lists: Sequence[Path], *, into: Path) -> int:
    """Writes the rows of lists into one file, in order, each sample once; returns how many."""
    rows: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path in lists:
        for row in _rows_of(path):
            numbers = tuple(map(int, row[:5]))
            # With the index: two processes that a script started may both be rank 0.
            index = row[5]
            rows[(numbers, index)] = row
    with into.open("w", newline="", encoding="utf-8") as file:
        written = csv.writer(file)
        written.writerow(COLUMNS)
        written.writerows(rows[key] for key in sorted(rows))
    return len(rows)


def _rows_of(path: Path) -> Iterator[list[str]]:
    """Yields a list's rows, without its head and a line that a killed process has not finished."""
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]:
                yield row
