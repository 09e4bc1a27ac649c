"""The live view follows a run by its log or folder: a table on a terminal, or plain lines."""

import dataclasses
import itertools
import json
import math
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.cli.workloads import RUNS
from stoker.errors import PlatformError, UsageError
from stoker.launch.telemetry import FeedInterval, HostRate, bottleneck_of, of_event
from stoker.logs import LogEvent, parse_line
from stoker.platforms.logs import FileTail

_HOSTS_IN_A_LINE = 6
_EVENTS = 5
# What happens to hosts and workers, in a person's words.
_HAPPENINGS = {
    "host_joined": "came",
    "host_rejoined": "came back",
    "host_left": "left",
    "host_lost": "was lost",
    "host_absent": "did not come",
    "agent_connection_lost": "lost its connection to a trainer",
    "batch_dropped": "dropped a batch",
    "local_worker_died": "lost a local worker",
    "worker_died": "lost a worker",
    "training_failed": "training failed",
}


class RunView:
    """The state of a run, as far as it is known.

    Attributes:
        run: Id; empty until the first line.
        steps: Of rank 0.
        step_seconds: Of its latest steps, mean.
        wait_seconds: Of them, waiting for data.
        interval: The last look at the feed; None without one (a run of one host has none).
        happenings: The last few, `HH:MM:SS host what`.
        status: How it ended; empty while it runs.
        is_complete: The last event told of the feed and all its hosts.
    """

    def __init__(self) -> None:
        self.run = ""
        self.steps = 0
        self.step_seconds = 0.0
        self.wait_seconds = 0.0
        self.interval: FeedInterval | None = None
        self.happenings: deque[str] = deque(maxlen=_EVENTS)
        self.status = ""
        self.is_complete = False

    def take(self, event: LogEvent) -> bool:
        """Takes one event; whether there is something new to show."""
        self.run = _clean(event.run)
        self.is_complete = False
        if event.event == "progress":
            return self._take_progress(event.values)
        if event.event == "training_ended":
            self.status = _clean(event.values.get("status", "")) or "ended"
            return True
        interval = of_event(event)
        if interval is not None:
            self.interval = interval
            self.is_complete = True
            return True
        if event.event not in _HAPPENINGS:
            return False
        host = event.values.get("about") or event.values.get("agent") or event.host
        reason = event.values.get("reason", "")
        words = _HAPPENINGS[event.event] + (f": {reason}" if reason else "")
        self.happenings.append(_clean(f"{event.when[11:19]} {host} {words}")[:200])
        return True

    def end_quietly(self, *, is_over: bool) -> None:
        """Notes that nothing more will come; the log may have kept the end to itself."""
        if is_over and not self.status:
            self.status = "ended"

    def document(self) -> dict[str, object]:
        """Returns all of it, for machines."""
        limit = bottleneck_of(self.interval) if self.interval else None
        return {
            "run": self.run,
            "status": self.status or "running",
            "steps": self.steps,
            "step_seconds": self.step_seconds,
            "wait_seconds": self.wait_seconds,
            "feed": dataclasses.asdict(self.interval) if self.interval else None,
            "bottleneck": dataclasses.asdict(limit) if limit else None,
            "happenings": list(self.happenings),
        }

    def head(self) -> str:
        """Says in one line where the training is."""
        if not self.steps:
            return "no step yet"
        wait = self.wait_seconds / self.step_seconds if self.step_seconds else 0.0
        return (
            f"step {self.steps}, {self.step_seconds * 1000:.1f} ms a step, {wait:.0%} of it waiting"
        )

    def _take_progress(self, values: Mapping[str, str]) -> bool:
        try:
            steps = int(values["steps"])
            step, wait = float(values["step_seconds"]), float(values["wait_seconds"])
        except (KeyError, ValueError):
            return False
        if not (math.isfinite(step) and math.isfinite(wait)):
            return False
        self.steps, self.step_seconds, self.wait_seconds = steps, step, wait
        return True


def plain_line(view: RunView) -> str:
    """Returns the view in one line, for a log: waits, rates of the hosts, what limits the run."""
    parts = [view.head()]
    interval = view.interval
    if interval:
        if interval.queue_depth is not None:
            parts.append(f"{interval.queue_depth:.1f} ready")
        hosts = [_brief(host) for host in interval.hosts[:_HOSTS_IN_A_LINE]]
        more = len(interval.hosts) - len(hosts)
        parts.append(", ".join(hosts) + (f" and {more} more hosts" if more else ""))
        parts.append(f"limit: {bottleneck_of(interval).limit}")
    if view.status:
        parts.append(f"the run has {view.status}" if view.status == "ended" else view.status)
    return "; ".join(part for part in parts if part)


def as_text(view: RunView) -> str:
    """Returns the view in several plain lines: one a host."""
    lines = [f"run {view.run or 'not known'}: {view.status or 'running'}; {view.head()}"]
    interval = view.interval
    if interval:
        lines += [
            f"rank {rank.name}: {rank.batches_per_second:.1f} batches/s, "
            f"{_share(rank.wait_share)} waiting, {_figure(rank.queue_depth)} ready, "
            f"window {rank.window}"
            for rank in interval.ranks
        ]
        for host in interval.hosts:
            cells = dict(zip(_COLUMNS, _cells(host), strict=True))
            lines.append(
                f"{cells['host']}: {cells['batches/s']} batches/s, {cells['MB/s']} MB/s, "
                f"worker {cells['worker/s']}/s, busy {cells['busy']}, asked {cells['asked']}, "
                f"moved {cells['moved']}"
            )
        limit = bottleneck_of(interval)
        lines += [f"limit: {limit.words}", f"try:   {limit.advice}"]
    return "\n".join([*lines, *view.happenings])


_COLUMNS = ("host", "batches/s", "MB/s", "workers", "worker/s", "busy", "asked", "moved")


def as_table(view: RunView) -> Group:
    """Returns the view for a terminal; what is in bold is also in words."""
    table = Table(box=None, pad_edge=False, expand=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == "host" else "right", no_wrap=True)
    interval = view.interval
    for host in interval.hosts if interval else ():
        table.add_row(*(Text(cell) for cell in _cells(host)))
    lines: list[Text | Table] = [
        Text(f"{view.run or 'run'}: {view.status or 'running'}", style="bold"),
        Text(view.head()),
    ]
    if interval:
        lines += [
            Text(
                f"rank {rank.name}: {_share(rank.wait_share)} waiting, "
                f"{_figure(rank.queue_depth)} ready of a window of {rank.window}"
            )
            for rank in interval.ranks[:_HOSTS_IN_A_LINE]
        ]
        limit = bottleneck_of(interval)
        lines += [
            table,
            Text(f"limit: {limit.words}", style="bold"),
            Text(f"try:   {limit.advice}"),
        ]
    lines += [Text(each) for each in view.happenings]
    return Group(*lines)


def _cells(host: HostRate) -> tuple[str, ...]:
    slow, fast = host.slowest_worker, host.fastest_worker
    busy = host.busy_workers / host.workers if host.workers else None
    return (
        _name(host),
        f"{host.batches_per_second:.1f}",
        f"{host.bytes_per_second / 1e6:.1f}",
        str(host.workers),
        "-" if slow is None or fast is None else f"{slow:.1f} to {fast:.1f}",
        _share(None if busy is None else min(1.0, busy)),
        f"{host.in_flight} of {host.credits}" if host.credits else "gone",
        str(host.moved),
    )


def _brief(host: HostRate) -> str:
    if not host.credits:
        return f"{_name(host)} gone"
    return f"{_name(host)} {host.batches_per_second:.1f}/s {host.bytes_per_second / 1e6:.1f} MB/s"


def _name(host: HostRate) -> str:
    return _clean(host.name)[:40] + (" (local)" if host.kind == "local" else "")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _clean(text: str) -> str:
    """Replaces what would steer a terminal by blanks: a log is anybody's text."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


POLL_SECONDS = 0.25
# A run that says nothing for so long is gone, or its log is: as long as hosts wait for each other.
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
        """Returns False: a log does not say that it is whole."""
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
        # Not through Python's buffer: `select` does not see what lies there.
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
        """Stays open: it is not ours."""


def watch_command(run: str, *, once: bool, as_json: bool) -> None:
    """Shows the run until it ends.

    Args:
        run: Folder, id, log file or `-`.
        once: Shows what is known now, and returns.
        as_json: One JSON document a line, for each change.

    Raises:
        UsageError: If there is no such run.
        PlatformError: If it says nothing for SILENCE_SECONDS.
    """
    source = source_of(run)
    view = RunView()
    try:
        if once:
            _read_all(source, view)
            _print_once(view, as_json=as_json)
        else:
            with ExitStack() as stack:
                _follow(source, view, _shower(stack, as_json=as_json))
    finally:
        source.close()


def source_of(run: str) -> LineSource:
    """Returns the source that `run` names.

    Raises:
        UsageError: If that is nothing.
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
    """Refuses a folder that is no run: it would be watched for ever."""
    names = {entry.name for entry in path.iterdir()}
    # An empty one, and one among the runs, has perhaps just begun.
    has_begun = bool(names) and path.absolute().parent.name != RUNS.name
    if has_begun and not names & {"logs", "hosts", "workload.json", "training.json"}:
        raise UsageError(
            f"{path} is no run: no logs are in it",
            where=str(path.absolute()),
            fix=_NAME_A_RUN,
        )


def _refuse_other_file(path: Path) -> None:
    """Refuses a file in which no launcher says anything: its end would be waited for in vain."""
    tail = FileTail(path)
    try:
        is_empty = True
        # A launcher's first line is the first of its log; others' lines may stand before it.
        for line in itertools.islice(tail.read(is_last=True), _LINES_LOOKED_AT):
            is_empty = False
            if parse_line(line):
                return
    finally:
        tail.close()
    if not is_empty:
        raise UsageError(
            f"{path} is no log of a run: no line in it is stoker's",
            where=str(path.absolute()),
            fix=_NAME_A_RUN,
        )


def _read_all(source: LineSource, view: RunView) -> None:
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
    """Refuses what another command wrote, where none of it was a run's log."""
    if isinstance(source, StandardInput) and not view.run:
        raise UsageError(
            "no line of stoker's came", where="stdin", fix="stoker logs ... | stoker watch -"
        )


def _follow(source: LineSource, view: RunView, show: Callable[[RunView], None]) -> None:
    heard_at = time.monotonic()
    while True:
        is_last = source.has_ended()
        is_new = False
        for line in source.read():
            heard_at = time.monotonic()
            # Each look at the feed is shown; between two, the last word counts.
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
                f"the run says nothing for {SILENCE_SECONDS:.0f} s",
                where="its log",
                fix="see whether it still runs: stoker status, or the platform's own tools",
            )
        if not isinstance(source, StandardInput):
            time.sleep(POLL_SECONDS)


def _take(view: RunView, line: str) -> bool:
    event = parse_line(line) if "stoker " in line else None
    return event is not None and view.take(event)


def _print_once(view: RunView, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(view.document()), flush=True)
        return
    console = Console()
    if console.is_terminal:
        console.print(as_table(view))
    else:
        print(as_text(view), flush=True)


def _shower(stack: ExitStack, *, as_json: bool) -> Callable[[RunView], None]:
    """Returns what shows a view; on a terminal it redraws one table."""
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
    # Hosts of the local platform are cores of this machine: a view must not take their time.
    live = stack.enter_context(Live(console=console, auto_refresh=False))
    return lambda view: live.update(as_table(view), refresh=True)
