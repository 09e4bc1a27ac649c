"""The live view of a run is a table on a terminal, and lines elsewhere."""

import dataclasses
import json
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from stoker.launch.telemetry import (
    FeedInterval,
    HostRate,
    StepProgress,
    bottleneck_of,
    interval_in,
    progress_in,
)
from stoker.logs import LogEvent

_HOSTS_IN_A_LINE = 6
_RANKS_SHOWN = 6
_FILE_WIDTH = 500
_EVENTS = 5
# Events of hosts and workers, in words for people.
_HAPPENINGS = {
    "host_joined": "joined",
    "host_rejoined": "joined again",
    "host_left": "left",
    "host_lost": "was lost",
    "host_absent": "did not join",
    "agent_connection_lost": "lost its connection to a trainer",
    "batch_dropped": "dropped a batch",
    "local_worker_died": "lost a local worker",
    "worker_died": "lost a worker",
    "training_failed": "training failed",
}


class RunView:
    """The state of a run, as far as it is known.

    Attributes:
        run: Run id; empty until the first line.
        progress: Of rank 0; None until a step is logged.
        interval: Latest report of the feed; None without a feed, as in a run of one host.
        happenings: The latest events, as `HH:MM:SS host what`.
        status: How the run ended; empty while it runs.
        is_complete: Whether the last event described the feed and all its hosts.
    """

    def __init__(self) -> None:
        self.run = ""
        self.progress: StepProgress | None = None
        self.interval: FeedInterval | None = None
        self.happenings: deque[str] = deque(maxlen=_EVENTS)
        self.status = ""
        self.is_complete = False

    def take(self, event: LogEvent) -> bool:
        """Takes one event; returns whether there is something new to show."""
        self.run = _clean(event.run)
        self.is_complete = False
        if progress := progress_in(event):
            self.progress = progress
        elif interval := interval_in(event):
            self.interval = interval
            self.is_complete = True
        elif event.event == "training_ended":
            self.status = _clean(event.values.get("status", "")) or "ended"
        elif event.event in _HAPPENINGS:
            host = event.values.get("about") or event.values.get("agent") or event.host
            reason = event.values.get("reason", "")
            words = _HAPPENINGS[event.event] + (f": {reason}" if reason else "")
            self.happenings.append(_clean(f"{event.when[11:19]} {host} {words}")[:200])
        else:
            return False
        return True

    def end_quietly(self, *, is_over: bool) -> None:
        """Notes that no line will follow, whether or not the log told how the run ended."""
        if is_over and not self.status:
            self.status = "ended"

    def document(self) -> dict[str, object]:
        """Returns the whole state, for JSON."""
        progress = self.progress or StepProgress(steps=0, step_seconds=0.0, wait_seconds=0.0)
        limit = bottleneck_of(self.interval) if self.interval else None
        return {
            "run": self.run,
            "status": self.status or "running",
            **dataclasses.asdict(progress),
            "feed": dataclasses.asdict(self.interval) if self.interval else None,
            "bottleneck": dataclasses.asdict(limit) if limit else None,
            "happenings": list(self.happenings),
        }

    def head(self) -> str:
        """Says in one line where the training is."""
        progress = self.progress
        return f"step {progress.steps}, {progress.words}" if progress else "no step yet"


def shower(stack: ExitStack, *, as_json: bool, once: bool) -> Callable[[RunView], None]:
    """Returns a function that shows a view: as JSON, in one line, or as a table.

    A table is what a terminal shows, which redraws it, and whoever asks only once.
    """
    if as_json:
        return lambda view: print(json.dumps(view.document()), flush=True)
    console = Console()
    if once:
        if not console.is_terminal:
            # No line is broken that somebody may search for.
            console = Console(width=_FILE_WIDTH)
        return lambda view: console.print(as_table(view, max_ranks=None))
    if console.is_terminal:
        # Hosts of the local platform are cores of this machine: a view must not use their time.
        live = stack.enter_context(Live(console=console, auto_refresh=False))
        return lambda view: live.update(as_table(view, max_ranks=_RANKS_SHOWN), refresh=True)
    shown: list[str] = []

    def say(view: RunView) -> None:
        line = plain_line(view)
        if line not in shown[-1:]:
            shown[:] = [line]
            print(line, flush=True)

    return say


def plain_line(view: RunView) -> str:
    """Returns the view in one line, for a log: waits, rates of the hosts, what limits the run."""
    parts = [view.head()]
    interval = view.interval
    if interval:
        if interval.queue_depth is not None:
            parts.append(f"{interval.queue_depth:.1f} batches ready")
        hosts = [_brief(host) for host in interval.hosts[:_HOSTS_IN_A_LINE]]
        more = len(interval.hosts) - len(hosts)
        parts.append(", ".join(hosts) + (f" and {more} more hosts" if more else ""))
        parts.append(f"limit: {bottleneck_of(interval).limit}")
    if view.status:
        parts.append(f"the run has {view.status}" if view.status == "ended" else view.status)
    return "; ".join(part for part in parts if part)


def as_table(view: RunView, *, max_ranks: int | None) -> Group:
    """Returns the view as lines and a table of hosts; what is in bold is also in words."""
    lines: list[Text | Table] = [
        Text(f"{view.run or 'run'}: {view.status or 'running'}", style="bold"),
        Text(view.head()),
    ]
    interval = view.interval
    if interval:
        lines += [
            Text(
                f"rank {rank.name}: {rank.batches_per_second:.1f} batches/s, "
                f"{_share(rank.wait_share)} waiting, {_figure(rank.queue_depth)} ready of a window "
                f"of {rank.window}"
            )
            for rank in interval.ranks[:max_ranks]
        ]
        table = Table(box=None, pad_edge=False, expand=False)
        for column in _COLUMNS:
            table.add_column(column, justify="left" if column == "host" else "right", no_wrap=True)
        for host in interval.hosts:
            table.add_row(*(Text(cell) for cell in _cells(host)))
        limit = bottleneck_of(interval)
        lines += [
            table,
            Text(f"limit: {limit.words}", style="bold"),
            Text(f"try:   {limit.advice}"),
        ]
    return Group(*lines, *map(Text, view.happenings))


_COLUMNS = ("host", "batches/s", "MB/s", "workers", "worker/s", "busy", "asked", "moved")


def _cells(host: HostRate) -> tuple[str, ...]:
    slow, fast = host.slowest_worker, host.fastest_worker
    return (
        _name(host),
        f"{host.batches_per_second:.1f}",
        f"{host.bytes_per_second / 1e6:.1f}",
        str(host.workers),
        "-" if slow is None or fast is None else f"{slow:.1f} to {fast:.1f}",
        _share(host.busy_share),
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
    """Replaces control characters by blanks: anyone may write to a log, and this is a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
