"""Following a run by its log lines: whoever holds only the log still sees how far it is."""

from dataclasses import dataclass

from stoker.logs import parse_line
from stoker.platforms.base import LogLine


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the run is.

    Attributes:
        steps: Steps done.
        total_steps: Steps of the whole training, where known.
        step_seconds: Mean step since the last report.
        wait_seconds: Of it, waiting for data.
    """

    steps: int
    total_steps: int | None
    step_seconds: float
    wait_seconds: float


def progress_in(line: LogLine, *, total_steps: int | None) -> Progress | None:
    """The progress that rank 0 reports in `line`, or None."""
    event = parse_line(line.text) if "progress" in line.text else None
    if event is None or event.event != "progress":
        return None
    try:
        return Progress(
            steps=int(event.values["steps"]),
            total_steps=total_steps,
            step_seconds=float(event.values["step_seconds"]),
            wait_seconds=float(event.values["wait_seconds"]),
        )
    except (KeyError, ValueError):
        return None
