"""How far the training is, as log lines: whoever holds only the log can follow the run.

Rank 0's timeline is the source, so that any loader that writes one is followed, with or without a
coordinator.
"""

import csv
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from stoker.launch.measure import Step, step_of
from stoker.logs import Log
from stoker.platforms.tail import Tail

REPORT_SECONDS = 2.0


class ProgressLog:
    """Logs `progress steps=... step_seconds=... wait_seconds=...` of the main loader.

    Args:
        timeline: CSV that rank 0 writes; need not be there yet.
        log: Of this host.
        clock: Monotonic seconds.
    """

    def __init__(
        self, timeline: Path, log: Log, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tail = Tail(timeline)
        self._log = log
        self._clock = clock
        self._columns: list[str] = []
        self._counts: Counter[int] = Counter()
        self._new: list[Step] = []
        self._reported_at = float("-inf")

    def tick(self) -> None:
        """Reads what is new, and logs a line if there are steps and the last line is old enough."""
        for line in self._tail.read():
            self._take(line)
        if self._new and self._clock() - self._reported_at >= REPORT_SECONDS:
            self._report()

    def close(self) -> None:
        """Logs what is left; may be called twice."""
        for line in self._tail.read(is_last=True):
            self._take(line)
        if self._new:
            self._report()
        self._tail.close()

    def _take(self, line: str) -> None:
        cells = next(csv.reader([line]), [])
        if not self._columns:
            self._columns = cells
            return
        step = step_of(dict(zip(self._columns, cells, strict=False)))
        if step is not None:
            self._counts[step.loader] += 1
            self._new.append(step)

    def _report(self) -> None:
        loader, steps = self._counts.most_common(1)[0]
        new = [step for step in self._new if step.loader == loader]
        self._new = []
        if not new:
            return
        self._reported_at = self._clock()
        self._log.event(
            "progress",
            steps=steps,
            step_seconds=sum(step.seconds for step in new) / len(new),
            wait_seconds=sum(step.wait_seconds for step in new) / len(new),
        )
