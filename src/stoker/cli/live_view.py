"""The live view of a run is a table on a terminal, and lines elsewhere."""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping

from rich.console import Group
from rich.table import Table
from rich.text import Text

from stoker.launch.telemetry import FeedInterval, HostRate, bottleneck_of, of_event
from stoker.logs import LogEvent

_HOSTS_IN_A_LINE = 6
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
        steps: Steps of rank 0.
        step_seconds: Mean of the latest steps of rank 0.
        wait_seconds: Part of step_seconds that was spent waiting for data.
        interval: Latest report of the feed; None without a feed, as in a run of one host.
        happenings: The latest events, as `HH:MM:SS host what`.
        status: How the run ended; empty while it runs.
        is_complete: Whether the last event described the feed and all its hosts.
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
        """Takes one event; returns whether there is something new to show."""
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
        """Notes that no line will follow, whether or not the log told how the run ended."""
        if is_over and not self.status:
            self.status = "ended"

    def document(self) -> dict[str, object]:
        """Returns the whole state, for JSON."""
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
        step = f"{self.step_seconds * 1000:.1f} ms per step"
        return f"step {self.steps}, {step}, {wait:.0%} of it waiting"

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
            parts.append(f"{interval.queue_depth:.1f} batches ready")
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
    """Replaces control characters by blanks: anyone may write to a log, and this is a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
