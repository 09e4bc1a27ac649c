"""How the feed does, as the leader leaves it: rows of `feed.csv`, and lines of its log."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.feed.messages import Progress
from stoker.launch.feed_interval import COLUMNS, EVENT, csv_text, log_values
from stoker.launch.feed_rates import interval_between
from stoker.logs import Log

# Ranks report once a second.
INTERVAL_SECONDS = 2.0
# Intervals grow with the run, 2 s up to a quarter of an hour, so that a day leaves some 2 000 of
# them; the log is also for people who watch now, and gets a line at least every minute.
_SHARE_OF_RUN = 1 / 480
_MAX_INTERVAL_SECONDS = 60.0


class FeedLog:
    """Looks at the ranks' reports now and then, and writes down what went on in between.

    Args:
        path: The CSV file; made with the first interval.
        log: Of the leader.
        progress: Last report of each rank.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        path: Path,
        log: Log,
        *,
        progress: Callable[[], Mapping[int, Progress]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._log = log
        self._progress = progress
        self._clock = clock
        self._began = self._looked_at = clock()
        self._before: Mapping[int, Progress] = {}
        self._is_broken = False

    def tick(self) -> None:
        """Looks, if the last look is long enough ago."""
        now = self._clock()
        due = min((now - self._began) * _SHARE_OF_RUN, _MAX_INTERVAL_SECONDS)
        if now - self._looked_at >= max(INTERVAL_SECONDS, due):
            self._look(now)

    def close(self) -> None:
        """Writes what is left; may be called twice."""
        self._look(self._clock())

    def _look(self, now: float) -> None:
        after = self._progress()
        interval = interval_between(
            self._before,
            after,
            start_seconds=self._looked_at - self._began,
            seconds=now - self._looked_at,
        )
        if interval is None or interval.seconds <= 0:
            return
        self._before, self._looked_at = after, now
        self._log.event(EVENT, **log_values(interval))
        self._write(csv_text(interval))

    def _write(self, rows: str) -> None:
        if self._is_broken:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                if file.tell() == 0:
                    file.write(",".join(COLUMNS) + "\n")
                file.write(rows)
        except OSError as err:
            # A full disk ends the picture, not the training.
            self._is_broken = True
            self._log.event("feed_not_written", file=str(self._path), reason=err.strerror)
