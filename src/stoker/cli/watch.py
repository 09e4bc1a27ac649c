"""`stoker watch` shows a run until it ends: a table on a terminal, lines elsewhere.

Its log is read from its folder, from a file or from standard input.
"""

import dataclasses
import itertools
import json
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.cli.options import AsJson
from stoker.errors import PlatformError, UsageError
from stoker.figures.feed_intervals import (
    FeedInterval,
    HostRate,
    RankRate,
    feed_limit_of,
    interval_in,
)
from stoker.figures.gpu_log import GpuNow, GpusNow, gpus_in
from stoker.figures.memory_lines import HostMemoryNow, memories_in, nearest_words
from stoker.figures.step_progress import StepProgress, progress_in
from stoker.logs import EventName, LogEvent, parse_line
from stoker.platforms.log_files import FileTail, take_lines
from stoker.record_words import gpu_figures
from stoker.run.run_folders import RUNS
from stoker.units import numbered, usd

_HOSTS_IN_A_LINE = 6
_RANKS_SHOWN = 6
_GPUS_SHOWN = 8
_MEMORIES_SHOWN = 4
_FILE_WIDTH = 500
_EVENTS = 5
# Events of hosts and workers, as they are shown.
_HAPPENINGS: dict[str, str] = {
    EventName.BUDGET_NEARLY_SPENT: "has spent 80% of constraints.max_usd",
    EventName.BUDGET_SPENT: "ends",
    EventName.GPU_LOAD_UNREAD: "does not read its GPUs",
    EventName.GPU_LOST: "lost a GPU",
    EventName.HOST_JOINED: "joined",
    EventName.HOST_REJOINED: "joined again",
    EventName.HOST_LEFT: "left",
    EventName.HOST_LOST: "was lost",
    EventName.HOST_ABSENT: "did not join",
    EventName.AGENT_CONNECTION_LOST: "lost its connection to a trainer",
    EventName.BATCH_DROPPED: "dropped a batch",
    EventName.BATCH_HANGS: "waits for a batch",
    EventName.NO_PROGRESS: "makes no progress",
    EventName.LOCAL_WORKER_DIED: "lost a local worker",
    EventName.MEMORY_SHORT: "changed how many batches wait",
    EventName.DATA_WORKER_DIED: "lost a worker",
    EventName.TRAINING_FAILED: "training failed",
}
_COLUMNS = ("host", "batches/s", "MB/s", "workers", "worker/s", "busy", "asked", "moved")
POLL_SECONDS = 0.25
# Without a line for so long the run or its log is gone: as long as hosts wait for each other.
SILENCE_SECONDS = 1800.0
_OF_A_HOST = "kubectl logs -f DNN_POD -c dnn | stoker watch -"
# After lines of something else on standard input, such as a pipeline's step.
FOREIGN_SECONDS = 20.0
_CHUNK_BYTES = 1 << 16
_LINES_LOOKED_AT = 100_000


def watch_verb(
    run: str,
    *,
    once: bool = False,
    as_json: AsJson = False,
) -> None:
    """Show the hosts, rates and waits of a run while it trains.

    Also shows what limits the run. The command ends when the run ends.

    Args:
        run (ID): A run's ID or its folder runs/ID, a log file, or - for a log on stdin.
        once: Show the current state once, and end.

    Examples:
        stoker watch runs/ID
        kubectl logs -f DNN_POD -c dnn | stoker watch -
    """
    with closing(source_of(run)) as source, ExitStack() as stack:
        follow(source, shower(stack, as_json=as_json, once=once), once=once)


class RunView:
    """What `stoker watch` shows of a run, collected from log lines.

    Attributes:
        progress: Of the rank that waits longest.
        interval: Latest report of the feed; None without a feed, as in a run of one host.
        gpus: Latest load of the GPUs; None: there is none, or it is not read.
        memories: Memory of the hosts now, the nearest to its limit first; empty: not known.
        happenings: The latest events, as `HH:MM:SS host what`.
        status: How the run ended; empty while it runs.
        is_complete: Whether the last event described the feed and all its hosts.
    """

    def __init__(self) -> None:
        self.run = ""
        self.progress: StepProgress | None = None
        self.interval: FeedInterval | None = None
        self.gpus: GpusNow | None = None
        self.memories: tuple[HostMemoryNow, ...] = ()
        self.happenings: deque[str] = deque(maxlen=_EVENTS)
        self.status = ""
        self.is_complete = False

    def take(self, event: LogEvent) -> bool:
        """Takes one event; returns whether there is something new to show."""
        # Another run begins with its launcher's first event; else it is text that a script prints.
        if self.run and _clean(event.run) != self.run and event.event != EventName.HOST_ROLE:
            return False
        self.run = _clean(event.run)
        self.is_complete = False
        if progress := progress_in(event):
            self.progress = progress
        elif interval := interval_in(event):
            self.interval = interval
            self.is_complete = True
        elif gpus := gpus_in(event):
            # Shown with the next figures of steps or feed, which come as often.
            self.gpus = gpus
            return False
        elif memories := memories_in(event):
            self.memories = memories
            return False
        elif event.event == EventName.TRAINING_ENDED:
            self.status = _clean(event.values.get("status", "")) or "ended"
        elif event.event in _HAPPENINGS:
            host = event.values.get("about") or event.values.get("agent") or event.host
            reason = event.values.get("reason") or event.values.get("text", "")
            words = _HAPPENINGS[event.event]
            if reason:
                words += f": {reason}"
            # HH:MM:SS of ISO 8601.
            self.happenings.append(_clean(f"{event.when[11:19]} {host} {words}")[:200])
        else:
            return False
        return True

    def document(self) -> dict[str, object]:
        progress = self.progress or StepProgress(steps=0, step_seconds=0.0, wait_seconds=0.0)
        document: dict[str, object] = {
            "run": self.run,
            "status": self.status or "running",
            **dataclasses.asdict(progress),
            "feed": None,
            "bottleneck": None,
            "gpus": None,
            "memory": [msgspec.structs.asdict(memory) for memory in self.memories],
            "happenings": list(self.happenings),
        }
        if self.interval:
            document["feed"] = dataclasses.asdict(self.interval)
            document["bottleneck"] = dataclasses.asdict(feed_limit_of(self.interval))
        if self.gpus:
            document["gpus"] = dataclasses.asdict(self.gpus)
        return document

    def head(self) -> str:
        """Returns steps, waits, GPUs and cost in one line."""
        progress = self.progress
        parts = ["no step yet"]
        if progress:
            parts = [f"step {progress.steps}", progress.words]
        if self.gpus and self.gpus.words:
            parts.append(self.gpus.words)
        if short := nearest_words(self.memories):
            parts.append(_clean(short))
        if progress and progress.spent_usd is not None:
            parts.append(f"{usd(progress.spent_usd, is_estimate=progress.is_estimate)} spent")
        return ", ".join(parts)


def shower(stack: ExitStack, *, as_json: bool, once: bool) -> Callable[[RunView], None]:
    """Returns a function that shows a view: as JSON, as a table that is redrawn, or in one line."""
    if as_json:
        return lambda view: print(json.dumps(view.document()), flush=True)
    console = Console()
    if once:
        if not console.is_terminal:
            # Wide, so that `grep` finds whole lines.
            console = Console(width=_FILE_WIDTH)
        return lambda view: console.print(as_table(view, max_ranks=None))
    if console.is_terminal:
        # Hosts of the local platform are cores of this machine, whose time a view must not use.
        live = stack.enter_context(Live(console=console, auto_refresh=False))
        return lambda view: live.update(as_table(view, max_ranks=_RANKS_SHOWN), refresh=True)
    shown: list[str] = []

    def say(view: RunView) -> None:
        line = plain_line(view)
        # An unchanged state is not repeated in a log.
        if line not in shown[-1:]:
            shown[:] = [line]
            print(line, flush=True)

    return say


def plain_line(view: RunView) -> str:
    """Returns the view in one line: waits, rates of the hosts, what limits the run."""
    parts = [view.head()]
    interval = view.interval
    if interval:
        if interval.queue_depth is not None:
            parts.append(f"{interval.queue_depth:.1f} batches ready")
        hosts = [_brief(host) for host in interval.hosts[:_HOSTS_IN_A_LINE]]
        words = ", ".join(hosts)
        if more := len(interval.hosts) - len(hosts):
            words += f" and {numbered(more, 'more host')}"
        parts.append(words)
        parts.append(f"limit: {feed_limit_of(interval).limit}")
    if view.status == "ended":
        parts.append("the run has ended")
    else:
        parts.append(view.status)
    return "; ".join(part for part in parts if part)


def as_table(view: RunView, *, max_ranks: int | None) -> Group:
    """Returns the view as lines and a table of hosts. Bold text never stands alone for a fact."""
    lines: list[Text | Table] = [
        Text(f"{view.run or 'run'}: {view.status or 'running'}", style="bold"),
        Text(view.head()),
    ]
    interval = view.interval
    if view.gpus:
        several = len({gpu.host for gpu in view.gpus.gpus}) > 1
        shown = view.gpus.gpus
        if max_ranks:
            shown = shown[:_GPUS_SHOWN]
        lines += [Text(gpu_line(gpu, names_host=several)) for gpu in shown]
        if more := view.gpus.count - len(shown):
            lines.append(Text(f"and {more} more GPUs"))
    lines += memory_lines(view.memories, max_hosts=_MEMORIES_SHOWN if max_ranks else None)
    if interval:
        lines += [Text(_rank_line(rank)) for rank in interval.ranks[:max_ranks]]
        table = Table(box=None, pad_edge=False, expand=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "host" else "right", no_wrap=True)
        for host in interval.hosts:
            table.add_row(*(Text(cell) for cell in _cells(host)))
        limit = feed_limit_of(interval)
        lines += [
            table,
            Text(f"limit: {limit.words}", style="bold"),
            Text(f"try:   {limit.advice}"),
        ]
    return Group(*lines, *map(Text, view.happenings))


def _rank_line(rank: RankRate) -> str:
    line = (
        f"rank {rank.name}: {rank.batches_per_second:.1f} batches/s, "
        f"{_figure(rank.wait_share, '.0%')} waiting, {_figure(rank.queue_depth)} ready"
    )
    # It is 0 between two epochs.
    if rank.window:
        line += f" of a window of {rank.window}"
    return line


def gpu_line(gpu: GpuNow, *, names_host: bool) -> str:
    """Returns a GPU's load now, with the figures that are known."""
    parts = gpu_figures(
        utilization=gpu.utilization,
        memory_bytes=gpu.memory_bytes,
        power_watts=gpu.power_watts,
        sm_clock_mhz=gpu.sm_clock_mhz,
        pcie_received_bytes_per_second=gpu.pcie_received_bytes_per_second,
    )
    if gpu.throttled:
        parts.append(f"clocks lowered ({_clean(gpu.throttled)[:40]})")
    name = f"GPU {_clean(gpu.gpu)[:10]}"
    if names_host:
        name += f" of {_clean(gpu.host)[:40]}"
    return f"{name}: {', '.join(parts) or 'load not known'}"


def memory_lines(memories: Sequence[HostMemoryNow], *, max_hosts: int | None) -> Iterator[Text]:
    """Yields a line for the memory of each host, those nearest to their limits first.

    Args:
        memories: In this order.
        max_hosts: More of them are counted; None: all are shown.
    """
    shown = memories[:max_hosts]
    for memory in shown:
        yield Text(f"memory of {_clean(memory.host)[:40]}: {memory.words}")
    if more := len(memories) - len(shown):
        yield Text(f"and the memory of {more} more hosts")


def _cells(host: HostRate) -> tuple[str, ...]:
    slow = host.slowest_worker
    fast = host.fastest_worker
    workers = "-"
    if slow is not None and fast is not None:
        workers = f"{slow:.1f} to {fast:.1f}"
    # A host that was lost has no credits any more.
    in_flight = "gone"
    if host.credits:
        in_flight = f"{host.in_flight} of {host.credits}"
    return (
        _name(host),
        f"{host.batches_per_second:.1f}",
        f"{host.bytes_per_second / 1e6:.1f}",
        str(host.workers),
        workers,
        _figure(host.busy_share, ".0%"),
        in_flight,
        str(host.moved),
    )


def _brief(host: HostRate) -> str:
    if not host.credits:
        return f"{_name(host)} gone"
    return f"{_name(host)} {host.batches_per_second:.1f}/s {host.bytes_per_second / 1e6:.1f} MB/s"


def _name(host: HostRate) -> str:
    name = _clean(host.name)[:40]
    if host.kind == "local":
        return f"{name} (local)"
    return name


def _figure(value: float | None, form: str = ".1f") -> str:
    if value is None:
        return "-"
    return f"{value:{form}}"


def _clean(text: str) -> str:
    """Replaces control characters by blanks: any program may write to a log."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


class LogOfRun:
    """A log that may still grow, or all hosts' logs in `RUN/logs`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tails: dict[Path, FileTail] = {}

    def read(self) -> Iterator[str]:
        paths = [self._path]
        if self._path.is_dir():
            # Each time: hosts of a data group may join later.
            paths = sorted(self._path.glob("logs/*.log"))
        for path in paths:
            self._tails.setdefault(path, FileTail(path))
        for tail in self._tails.values():
            yield from tail.read()

    def has_ended(self) -> bool:
        # The run's record is written last.
        return (self._path / "training.json").is_file()

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()
        self._tails.clear()


class StandardInput:
    """The log that another command pipes in: `kubectl logs -f DNN_POD -c dnn | stoker watch -`."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._is_over = False

    def read(self) -> Iterator[str]:
        """Yields the lines that are there; blocks for POLL_SECONDS at most."""
        descriptor = sys.stdin.fileno()
        if self._is_over or not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            return
        # Not through Python's buffer, which `select` does not see.
        chunk = os.read(descriptor, _CHUNK_BYTES)
        self._is_over = not chunk
        lines = take_lines(self._rest, chunk)
        if self._is_over and self._rest:
            lines.append(bytes(self._rest))
            self._rest.clear()
        for line in lines:
            yield line.decode(errors="replace")

    def has_ended(self) -> bool:
        return self._is_over

    def close(self) -> None:
        """Does nothing: standard input stays open."""


LogSource = LogOfRun | StandardInput


def source_of(run: str) -> LogSource:
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
    """Returns why `path` cannot be a run; empty if it may be one."""
    if path.is_dir():
        names = {entry.name for entry in path.iterdir()}
        # A run may have just begun in an empty folder, or in a folder of runs.
        has_begun = bool(names) and path.absolute().parent.name != RUNS.name
        is_run = names & {"logs", "hosts", "workload.json", "training.json"}
        if has_begun and not is_run:
            return f"{path} is not a run: it has no logs"
        return ""
    with closing(FileTail(path)) as tail:
        is_empty = True
        # Other programs may write before the launcher's first line. Not all of it is read: any
        # text file may be named here, of any size.
        for line in itertools.islice(tail.read(is_last=True), _LINES_LOOKED_AT):
            is_empty = False
            if parse_line(line):
                return ""
    if is_empty:
        return ""
    return f"{path} is not the log of a run: stoker wrote no line of it"


class ForeignLog:
    """A log on standard input in which a run's lines are awaited; says once that none came."""

    def __init__(self) -> None:
        self._until = time.monotonic() + FOREIGN_SECONDS
        self._is_told = False

    def tell_if_of_no_run(self, view: RunView) -> None:
        """Prints which log is needed, if FOREIGN_SECONDS have brought lines, and none of a run."""
        if view.run or self._is_told or time.monotonic() < self._until:
            return
        self._is_told = True
        what = "no line of a run has come yet: the log of a pipeline's step has none"
        print(f"{what}; try {_OF_A_HOST}", file=sys.stderr, flush=True)


def follow(source: LogSource, show: Callable[[RunView], None], *, once: bool) -> None:
    """Shows the run until it ends; `once`: what the source has now, or all of standard input.

    Raises PlatformError if the run logs nothing for SILENCE_SECONDS.
    """
    view = RunView()
    is_stream = isinstance(source, StandardInput)
    began = heard_at = time.monotonic()
    foreign = ForeignLog()
    while True:
        # Before reading, so that lines written before the end are read in this round.
        has_ended = source.has_ended()
        if is_stream and heard_at > began:
            foreign.tell_if_of_no_run(view)
        # A stream is read to its end with `once`, too: at first it may be empty.
        is_enough = once and (not is_stream or time.monotonic() - began > SILENCE_SECONDS)
        is_heard, is_new = _read(source, view, show, once=once)
        if is_heard:
            heard_at = time.monotonic()
        if is_stream and not view.run and (has_ended or is_enough):
            raise UsageError("stdin contained no log line of a run", where="stdin", fix=_OF_A_HOST)
        if has_ended or is_enough:
            end = "ended" if has_ended else ""
            view.status = view.status or end
            show(view)
            return
        if is_new:
            show(view)
        # Not with `once`: of several runs in a log the last one counts.
        if view.status and not once:
            return
        if time.monotonic() - heard_at > SILENCE_SECONDS and not once:
            raise PlatformError(
                f"the run has logged nothing for {SILENCE_SECONDS:.0f} s",
                where="its log",
                fix="check whether it still runs: stoker status, or the tools of the platform",
            )
        # Standard input has already waited, in `select`.
        if not is_stream:
            time.sleep(POLL_SECONDS)


def _read(
    source: LogSource, view: RunView, show: Callable[[RunView], None], *, once: bool
) -> tuple[bool, bool]:
    """Takes the lines that have come, and shows each report of the feed, unless `once`.

    Returns whether there were lines, and whether the view has changed since it was last shown.
    """
    is_heard = is_new = False
    for line in source.read():
        is_heard = True
        # The script's own lines are most of a log, and need no parser.
        if "stoker " not in line:
            continue
        event = parse_line(line)
        if event is None or not view.take(event) or once:
            continue
        # Between two reports only the last state is shown.
        if view.is_complete:
            show(view)
        is_new = not view.is_complete
    return is_heard, is_new
