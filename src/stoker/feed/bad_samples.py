"""The bad samples of a trainer process: counted, written to a file, and too many of them an error.

Only those of batches that the script gets are noted, so each is noted once, in order.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from stoker.environment import ProcessSettings
from stoker.errors import FeedError
from stoker.feed.engine.messages import BadSample
from stoker.logs import EventName, Log

# The leader joins those of the ranks of its host.
FILE = "bad_samples.csv"
FILE_OF_RANK = "bad_samples-rank{rank}.csv"
COLUMNS = ("epoch", "batch_number", "rank", "loader", "index", "error", "text", "replaced_by")
# A share of fewer samples says nothing of an epoch whose length is not known.
_MIN_SAMPLES = 100
_MAX_NAMED = 5


def check_limit(
    bad: Sequence[BadSample], *, samples: int, epoch_samples: int, most: float, where: str
) -> None:
    """Raises FeedError if an epoch of a loader has too many bad samples.

    Args:
        bad: These.
        samples: That the script got, or lost.
        epoch_samples: Of the whole epoch, as far as they are known.
        most: `feed.max_errors`: a number, or below 1 a share of the epoch's samples.
        where: The rank, and where the list of bad samples is.
    """
    allowed = most
    if most < 1:
        # 0.29 of 100 are 28.999999999999996 as computers multiply.
        allowed = round(most * max(samples, epoch_samples, _MIN_SAMPLES), 6)
    if len(bad) > allowed:
        named = [f"{one.index} ({one.error}: {one.text[:80]})" for one in bad[:_MAX_NAMED]]
        raise FeedError(
            f"{len(bad)} of {samples} samples of this epoch are bad, and feed.max_errors "
            f"({most:g}) allows {allowed:g}: {'; '.join(named)}",
            where=where,
            fix="mend these samples or take them out of the dataset, or raise feed.max_errors",
        )


class BadSampleList:
    """The bad samples of one rank: a row each in its file, written at once.

    Attributes:
        count: Of all loaders.
    """

    def __init__(self, settings: ProcessSettings, log: Log) -> None:
        self.count = 0
        self._settings = settings
        self._log = log

    @property
    def where(self) -> str:
        """The rank, and where its list is."""
        listed = "" if self._settings.output is None else f", listed in {FILE}"
        return f"rank {self._settings.rank}{listed}"

    def add(self, bad: Sequence[BadSample], *, epoch: int, number: int, loader: int) -> None:
        """Lists the bad samples of a batch; says the first one.

        Args:
            bad: In the order of their places.
            epoch: As in the rank's timeline.
            number: The batch's.
            loader: As in the rank's timeline.
        """
        settings = self._settings
        if not self.count:
            first = bad[0]
            done = f"{first.replaced_by} is in its place" if first.replaced_by else "left out"
            text = f"sample {first.index} cannot be made ({first.error}: {first.text}): {done}; "
            text += f"further ones are in {FILE}"
            self._log.event(EventName.SAMPLE_BAD, rank=settings.rank, text=text)
        self.count += len(bad)
        if settings.output is None:
            return
        of_batch = (epoch, number, settings.rank, loader)
        path = settings.output / FILE_OF_RANK.format(rank=settings.rank)
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                for one in bad:
                    writer.writerow((*of_batch, one.index, one.error, one.text, one.replaced_by))
        except OSError as err:
            text = f"bad samples cannot be listed: {err}"
            self._log.event(EventName.RECORD_WRITE_FAILED, text=text)


def join_lists(folders: Iterable[Path], file: Path) -> int:
    """Writes one list of those that ranks and earlier calls have left, each sample once.

    A rank that was started again from a state may have listed a batch before.

    Args:
        folders: Of hosts' outputs; some may have none.
        file: The list; it is removed where there are no bad samples.

    Returns:
        How many samples are listed.

    Raises:
        ValueError: If a list is malformed.
        OSError: If a file cannot be read or written.
    """
    rows: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for folder in folders:
        for path in folder.rglob("bad_samples*.csv"):
            with path.open(newline="", encoding="utf-8") as lines:
                for row in csv.reader(lines):
                    # Not a head, nor a line that a killed process has not finished.
                    if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]:
                        # With the index: two processes that a script started may both be rank 0.
                        rows[tuple(map(int, row[:4])), row[4]] = row
    file.unlink(missing_ok=True)
    if rows:
        with file.open("w", newline="", encoding="utf-8") as joined:
            csv.writer(joined).writerows([COLUMNS, *(rows[key] for key in sorted(rows))])
    return len(rows)
