"""The bad samples of a trainer process: counted, written to a file, and too many of them an error.

Only those of batches that the script gets are noted, so each is noted once, in order.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.environment import ProcessSettings
from stoker.errors import FeedError
from stoker.feed.engine.messages import BadSample
from stoker.logs import EventName, Log

if TYPE_CHECKING:
    from stoker.feed.tolerance import ToleratedBatch

# The leader joins those of the ranks of its host.
FILE = "bad_samples.csv"
FILE_OF_RANK = "bad_samples-rank{rank}.csv"
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
# Of a rank: further ones are only counted.
MAX_ROWS = 10_000
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
    limit, allowed = f"{most:.0f} samples", most
    if most < 1:
        whole = max(samples, epoch_samples, _MIN_SAMPLES)
        # 0.29 of 100 are 28.999999999999996 as computers multiply.
        limit, allowed = f"{most:g} of {whole}", round(most * whole, 6)
    if len(bad) > allowed:
        named = [f"{one.index} ({one.error}: {one.text[:80]})" for one in bad[:_MAX_NAMED]]
        raise FeedError(
            f"{len(bad)} of {samples} samples of this epoch are bad, feed.max_errors is {limit}: "
            f"{'; '.join(named)}",
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

    def add(self, batch: "ToleratedBatch", *, epoch: int, number: int, loader: int) -> None:
        """Lists the bad samples of a batch, in the order of their places; says the first one.

        Args:
            batch: The batch.
            epoch: As in the rank's timeline.
            number: The batch's.
            loader: As in the rank's timeline.
        """
        settings = self._settings
        if not self.count:
            first = batch.bad[0]
            done = f"{first.replaced_by} is in its place" if first.replaced_by else "left out"
            text = f"sample {first.index} cannot be made ({first.error}: {first.text}): {done}; "
            text += f"further ones are in {FILE}"
            self._log.event(EventName.SAMPLE_BAD, rank=settings.rank, text=text)
        rows = batch.bad[: max(0, MAX_ROWS - self.count)]
        self.count += len(batch.bad)
        if settings.output is None:
            return
        of_batch = (epoch, number, settings.rank, loader)
        maker = (batch.host or settings.host, batch.worker if batch.worker >= 0 else "")
        path = settings.output / FILE_OF_RANK.format(rank=settings.rank)
        try:
            with path.open("a", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                if not file.tell():
                    writer.writerow(COLUMNS)
                for one in rows:
                    what = (one.place, one.index, one.error, one.text, one.replaced_by)
                    writer.writerow((*of_batch, *what, *maker))
        except OSError as err:
            text = f"bad samples cannot be listed: {err}"
            self._log.event(EventName.RECORD_WRITE_FAILED, text=text)


def join_files(output: Path) -> int:
    """Joins the lists of ranks into one file, in order, each sample once.

    A rank that was started again from a state may have listed a batch before. May be called again:
    the file's own rows stay.

    Returns:
        How many bad samples are listed.
    """
    num_listed = join_lists_of_hosts([output], output / FILE)
    for path in output.glob(FILE_OF_RANK.format(rank="*")):
        path.unlink()
    return num_listed


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
    of_rank = FILE_OF_RANK.format(rank="*")
    lists: set[Path] = set()
    for folder in folders:
        lists.update(folder.glob(FILE), folder.glob(of_rank), folder.glob(f"*/{of_rank}"))
    rows: dict[tuple[tuple[int, ...], str], list[str]] = {}
    for path in lists:
        with path.open(newline="", encoding="utf-8") as lines:
            for row in csv.reader(lines):
                # Not a head, nor a line that a killed process has not finished.
                if len(row) == len(COLUMNS) and row[0] != COLUMNS[0]:
                    # With the index: two processes that a script started may both be rank 0.
                    rows[tuple(map(int, row[:5])), row[5]] = row
    file.unlink(missing_ok=True)
    if rows:
        with file.open("w", newline="", encoding="utf-8") as joined:
            csv.writer(joined).writerows([COLUMNS, *(rows[key] for key in sorted(rows))])
    return len(rows)
