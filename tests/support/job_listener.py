"""An observer of a training job that keeps what it is told."""

from collections.abc import Callable

from stoker.platforms.base import LogLine
from stoker.records import Training
from stoker.train import JobObserver


class JobListener(JobObserver):
    """Keeps lines, submissions and records; `hear` may raise, as a terminal or a bug does."""

    def __init__(
        self, hear: Callable[[LogLine], object] | None = None, *, may_stop: bool = True
    ) -> None:
        self.lines: list[LogLine] = []
        self.records: list[Training] = []
        self.submissions = 0
        self._hear = hear
        self._may_stop = may_stop

    @property
    def texts(self) -> list[str]:
        return [line.text for line in self.lines]

    def submitted(self) -> None:
        self.submissions += 1

    def line(self, line: LogLine) -> None:
        self.lines.append(line)
        if self._hear:
            self._hear(line)

    def may_stop(self) -> bool:
        return self._may_stop

    def stopped(self, record: Training) -> None:
        self.records.append(record)
