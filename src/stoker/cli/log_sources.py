"""The log of a run is read from its folder, from a file or from standard input, until it ends."""

import itertools
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

from stoker.cli.live_view import RunView
from stoker.cli.workloads import RUNS
from stoker.errors import PlatformError, UsageError
from stoker.logs import parse_line
from stoker.platforms.follow import FileTail

POLL_SECONDS = 0.25
# After so long without a line the run or its log is gone: as long as hosts wait for each other.
SILENCE_SECONDS = 1800.0
_CHUNK_BYTES = 1 << 16
_LINES_LOOKED_AT = 100_000


class LogOfRun:
    """A log that may still grow, or those of all hosts in `RUN/logs`, also of later ones.

    Args:
        path: The log, or the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tails: dict[Path, FileTail] = {}

    def read(self) -> Iterator[str]:
        """Yields the lines that are new, host by host."""
        is_folder = self._path.is_dir()
        for path in sorted(self._path.glob("logs/*.log")) if is_folder else [self._path]:
            self._tails.setdefault(path, FileTail(path))
        for tail in self._tails.values():
            yield from tail.read()

    def has_ended(self) -> bool:
        """Returns whether the run's record is there: it is written last. A log alone has none."""
        return (self._path / "training.json").is_file()

    def close(self) -> None:
        """Closes the logs."""
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


class StandardInput:
    """A log that another command writes: `stoker logs kubeflow RUN | stoker watch -`."""

    def __init__(self) -> None:
        self._rest = b""
        self._is_over = False

    def read(self) -> Iterator[str]:
        """Yields the lines that are there, after POLL_SECONDS at most."""
        descriptor = sys.stdin.fileno()
        if self._is_over or not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            return
        # Not through Python's buffer, which `select` does not see.
        chunk = os.read(descriptor, _CHUNK_BYTES)
        self._is_over = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if self._is_over and self._rest:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            yield line.decode(errors="replace")

    def has_ended(self) -> bool:
        """Returns whether the other command has ended."""
        return self._is_over

    def close(self) -> None:
        """Leaves standard input open."""


LogSource = LogOfRun | StandardInput


def source_of(run: str) -> LogSource:
    """Returns the source that `run` names.

    Raises:
        UsageError: If there is no such run.
    """
    if run == "-":
        return StandardInput()
    for path in (Path(run), RUNS / run):
        if path.is_dir() or path.is_file():
            if words := _why_not_watched(path):
                raise UsageError(
                    words,
                    where=str(path.absolute()),
                    fix="name a folder runs/ID, its ID, or the log of a dnn host",
                )
            return LogOfRun(path)
    raise UsageError(f"no run {run}", where=str(Path.cwd()), fix="ls runs, or name a log file")


def _why_not_watched(path: Path) -> str:
    """Says why nothing would ever come of `path`; empty if it may be a run."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        # A run in an empty folder, or in a folder of runs, may have just begun.
        has_begun = bool(names) and path.absolute().parent.name != RUNS.name
        is_run = names & {"logs", "hosts", "workload.json", "training.json"}
        return f"{path} is not a run: it has no logs" if has_begun and not is_run else ""
    with closing(FileTail(path)) as tail:
        is_empty = True
        # The launcher writes the first line of its log, but other programs may write before it.
        for line in itertools.islice(tail.read(is_last=True), _LINES_LOOKED_AT):
            is_empty = False
            if parse_line(line):
                return ""
    return "" if is_empty else f"{path} is not the log of a run: stoker wrote no line of it"


def follow(source: LogSource, show: Callable[[RunView], None], *, once: bool) -> None:
    """Reads the run and shows it until it ends.

    Args:
        source: Of the log.
        show: Draws or prints the state of the run.
        once: Whether to show only what the source has now; of standard input all that comes.

    Raises:
        UsageError: If standard input holds no line of a run's log.
        PlatformError: If the run logs nothing for SILENCE_SECONDS.
    """
    view = RunView()
    is_stream = isinstance(source, StandardInput)
    began = heard_at = time.monotonic()
    while True:
        has_ended = source.has_ended()
        is_enough = once and (not is_stream or time.monotonic() - began > SILENCE_SECONDS)
        is_new = False
        for line in source.read():
            heard_at = time.monotonic()
            event = parse_line(line) if "stoker " in line else None
            # Every report of the feed is shown; between two of them, only the last state.
            if event is not None and view.take(event) and not once:
                if view.is_complete:
                    show(view)
                is_new = not view.is_complete
        if has_ended or is_enough:
            if is_stream and not view.run:
                raise UsageError(
                    "no line of a run's log came in",
                    where="stdin",
                    fix="stoker logs ... | stoker watch -",
                )
            view.end_quietly(is_over=has_ended)
            show(view)
            return
        if is_new:
            show(view)
        if view.status and not once:
            return
        if time.monotonic() - heard_at > SILENCE_SECONDS and not once:
            raise PlatformError(
                f"the run has logged nothing for {SILENCE_SECONDS:.0f} s",
                where="its log",
                fix="check whether it still runs: stoker status, or the tools of the platform",
            )
        if not is_stream:
            time.sleep(POLL_SECONDS)
