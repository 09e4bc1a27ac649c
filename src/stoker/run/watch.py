"""`stoker watch`: the latest interval of a run until it ends, in a table or a line."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from stoker.errors import UsageError
from stoker.figures.intervals import Interval, interval_in
from stoker.figures.limit import FeedBottleneck, feed_limit_of
from stoker.figures.progress import StepProgress
from stoker.logs import EventName, LogEvent, parse_line, shown
from stoker.platforms.follow import FileTail
from stoker.run.folders import RUNS
from stoker.units import ms, numbered, percent

_POLL_SECONDS = 0.25


def watch_run(run: str, *, as_json: bool) -> None:
    """Shows the hosts, rates and waits of a run until it ends."""
    view = _View()
    console = Console(markup=False, highlight=False)
    is_live = console.is_terminal and not as_json
    with Live(console=console, auto_refresh=False) if is_live else nullcontext() as live:

        def show() -> None:
            if live:
                live.update("\n".join(view.lines()), refresh=True)
            elif as_json:
                print(msgspec.json.encode(view).decode(), flush=True)
            else:
                print("; ".join(view.lines()), flush=True)

        for event in filter(None, map(parse_line, _lines(run))):
            view.take(event)
            if event.event == EventName.INTERVAL:
                show()
            if event.event == EventName.TRAINING_ENDED:
                break
        if not view.run:
            raise UsageError("no run wrote this log", where=run, fix="name runs/ID, or a log")
        show()


class _View(msgspec.Struct):
    """What is shown of a run, from the events of its log; `--json` prints it."""

    run: str = ""
    status: str = "running"
    progress: StepProgress | None = None
    interval: Interval | None = None
    limit: FeedBottleneck | None = None

    def take(self, event: LogEvent) -> None:
        self.run = shown(event.run)
        if interval := interval_in(event):
            self.interval = interval
            self.progress = interval.steps or self.progress
            # Ranks that ask for nothing are between epochs, or at the end: nothing limits them.
            if any(rank.window for rank in interval.ranks):
                self.limit = feed_limit_of(interval)
        if event.event == EventName.TRAINING_ENDED:
            self.status = shown(event.values.get("status", "ended"))

    def lines(self) -> Iterator[str]:
        head = f"{self.run}: {self.status}"
        if step := self.progress:
            wait = step.wait_words("waiting for data")
            head += f", step {step.steps}, {ms(step.step_seconds)} each, {wait}"
        yield head
        for host in self.interval.hosts if self.interval else ():
            megabytes = host.bytes_per_second / 1e6
            rates = f"{host.batches_per_second:.1f} batches/s, {megabytes:.1f} MB/s"
            workers = f"{numbered(host.workers, 'worker')}, {percent(host.busy_share)} busy"
            yield f"{shown(host.name)}, {rates}, {workers}"
        for rank in self.interval.ranks if self.interval else ():
            waits = f"{percent(rank.wait_share)} waiting, {rank.queue_depth or 0:.1f} ready"
            yield f"rank {rank.name}, {rank.batches_per_second:.1f} batches/s, {waits}"
        for gpu in self.interval.gpus if self.interval else ():
            yield f"{shown(gpu.host)} GPU {gpu.number}, {percent(gpu.utilization)} busy"
        if self.limit:
            yield f"limit: {self.limit.words}; try {self.limit.advice}"


def _lines(run: str) -> Iterator[str]:
    """Yields the lines of a run's logs until it ends."""
    if run == "-":
        yield from (line.decode(errors="replace") for line in sys.stdin.buffer)
        return
    path = Path(run) if Path(run).exists() else RUNS / run
    if not path.is_file() and not (path / "workload.json").is_file():
        raise UsageError(f"no run {run}", where=str(Path.cwd()), fix="ls runs, or name a log file")
    tails: dict[Path, FileTail] = {}
    is_last = False
    try:
        while not is_last:
            # Before reading, so that lines written before the end are read; it is written last.
            is_last = (path / "training.json").is_file()
            for file in [path] if path.is_file() else path.glob("logs/dnn-*.log"):
                yield from tails.setdefault(file, FileTail(file)).read(is_last=is_last)
            time.sleep(0 if is_last else _POLL_SECONDS)
    finally:
        for tail in tails.values():
            tail.close()
