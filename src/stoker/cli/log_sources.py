"""The log of a run is read from its folder, from a file or from standard input, until it ends."""

import itertools
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live

from stoker.cli.live_view import RunView, as_table, as_text, plain_line
from stoker.cli.workloads import RUNS
from stoker.errors import PlatformError, UsageError
from stoker.logs import parse_line
from stoker.platforms.follow import FileTail

POLL_SECONDS = 0.25
# After so long without a line the run or its log is gone: as long as hosts wait for each other.
SILENCE_SECONDS = 1800.0
_CHUNK_BYTES = 1 << 16
_LINES_LOOKED_AT = 100_000
_NAME_A_RUN = "name a folder runs/ID, its ID, or the log of a dnn host"


class LineSource(Protocol):
    """A source of log lines."""

    def read(self) -> Iterator[str]:
        """Yields the lines that are new."""
        ...

    def has_ended(self) -> bool:
        """Returns whether other signs than the log end the run: read once more, then stop."""
        ...

    def close(self) -> None:
        """Closes what is open; may be called twice."""
        ...


class RunFolder:
    """The logs of all hosts in `runs/ID/logs`, also of those that come later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, FileTail] = {}

    def read(self) -> Iterator[str]:
        """Yields the lines that are new, host by host."""
        for path in sorted((self._folder / "logs").glob("*.log")):
            self._tails.setdefault(path, FileTail(path))
        for tail in self._tails.values():
            yield from tail.read()

    def has_ended(self) -> bool:
        """Returns whether the run's record is there: it is written last."""
        return (self._folder / "training.json").is_file()

    def close(self) -> None:
        """Closes the logs."""
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


class LogFile:
    """One log that may still grow."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path)

    def read(self) -> Iterator[str]:
        """Yields the lines that are new."""
        yield from self._tail.read()

    def has_ended(self) -> bool:
        """Returns False: a log does not tell that it is complete."""
        return False

    def close(self) -> None:
        """Closes the log."""
        self._tail.close()


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


def source_of(run: str) -> LineSource:
    """Returns the source that `run` names.

    Raises:
        UsageError: If there is no such run.
    """
    if run == "-":
        return StandardInput()
    for path in (Path(run), Path("runs") / run):
        if path.is_dir():
            _refuse_other_folder(path)
            return RunFolder(path)
        if path.is_file():
            _refuse_other_file(path)
            return LogFile(path)
    raise UsageError(f"no run {run}", where=str(Path.cwd()), fix="ls runs, or name a log file")


def _refuse_other_folder(path: Path) -> None:
    """Refuses a folder that is not a run: it would be watched for ever."""
    names = {entry.name for entry in path.iterdir()}
    # A run in an empty folder, or in a folder of runs, may have just begun.
    has_begun = bool(names) and path.absolute().parent.name != RUNS.name
    if has_begun and not names & {"logs", "hosts", "workload.json", "training.json"}:
        raise UsageError(
            f"{path} is not a run: it has no logs",
            where=str(path.absolute()),
            fix=_NAME_A_RUN,
        )


def _refuse_other_file(path: Path) -> None:
    """Refuses a file without a line of a launcher: its end would never come."""
    tail = FileTail(path)
    try:
        is_empty = True
        # The launcher writes the first line of its log, but other programs may write before it.
        for line in itertools.islice(tail.read(is_last=True), _LINES_LOOKED_AT):
            is_empty = False
            if parse_line(line):
                return
    finally:
        tail.close()
    if not is_empty:
        raise UsageError(
            f"{path} is not the log of a run: stoker wrote no line of it",
            where=str(path.absolute()),
            fix=_NAME_A_RUN,
        )


def read_all(source: LineSource, view: RunView) -> None:
    """Reads what the source has now, or all of standard input."""
    deadline = time.monotonic() + SILENCE_SECONDS
    while True:
        lines = list(source.read())
        for line in lines:
            _take(view, line)
        is_stream = isinstance(source, StandardInput)
        if (not is_stream or source.has_ended()) or time.monotonic() > deadline:
            view.end_quietly(is_over=source.has_ended())
            _refuse_nothing(source, view)
            return


def _refuse_nothing(source: LineSource, view: RunView) -> None:
    """Refuses standard input without a line of a run's log."""
    if isinstance(source, StandardInput) and not view.run:
        raise UsageError(
            "no line of a run's log came in", where="stdin", fix="stoker logs ... | stoker watch -"
        )


def follow(source: LineSource, view: RunView, show: Callable[[RunView], None]) -> None:
    """Reads and shows the run until it ends.

    Raises:
        PlatformError: If it logs nothing for SILENCE_SECONDS.
    """
    heard_at = time.monotonic()
    while True:
        is_last = source.has_ended()
        is_new = False
        for line in source.read():
            heard_at = time.monotonic()
            # Every report of the feed is shown; between two of them, only the last state.
            if _take(view, line):
                is_new = True
                if view.is_complete:
                    show(view)
                    is_new = False
        if is_last:
            _refuse_nothing(source, view)
            view.end_quietly(is_over=True)
        if is_new or is_last:
            show(view)
        if view.status or is_last:
            return
        if time.monotonic() - heard_at > SILENCE_SECONDS:
            raise PlatformError(
                f"the run has logged nothing for {SILENCE_SECONDS:.0f} s",
                where="its log",
                fix="check whether it still runs: stoker status, or the tools of the platform",
            )
        if not isinstance(source, StandardInput):
            time.sleep(POLL_SECONDS)


def _take(view: RunView, line: str) -> bool:
    event = parse_line(line) if "stoker " in line else None
    return event is not None and view.take(event)


def print_once(view: RunView, *, as_json: bool) -> None:
    """Prints the view: as JSON, as a table on a terminal, or as lines."""
    if as_json:
        print(json.dumps(view.document()), flush=True)
        return
    console = Console()
    if console.is_terminal:
        console.print(as_table(view))
    else:
        print(as_text(view), flush=True)


def shower(stack: ExitStack, *, as_json: bool) -> Callable[[RunView], None]:
    """Returns a function that shows a view; on a terminal it redraws one table."""
    if as_json:
        return lambda view: print(json.dumps(view.document()), flush=True)
    console = Console()
    if not console.is_terminal:
        shown: list[str] = []

        def say(view: RunView) -> None:
            line = plain_line(view)
            if line not in shown[-1:]:
                shown[:] = [line]
                print(line, flush=True)

        return say
    # Hosts of the local platform are cores of this machine: a view must not use their time.
    live = stack.enter_context(Live(console=console, auto_refresh=False))
    return lambda view: live.update(as_table(view), refresh=True)
