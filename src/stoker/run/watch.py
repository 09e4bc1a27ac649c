"""`stoker watch`: the latest interval of a run until it ends, in a table or a line."""

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live

from stoker.errors import UsageError
from stoker.figures.intervals import Interval, interval_in
from stoker.figures.limit import feed_limit_of
from stoker.logs import EventName, parse_line, shown
from stoker.platforms.follow import FileTail
from stoker.run.folders import RUNS
from stoker.run.progress import step_words
from stoker.units import numbered, percent

_POLL_SECONDS = 0.25


def watch_run(run: str, *, as_json: bool) -> None:
    """Shows the hosts, rates and waits of a run until it ends."""
    console = Console(markup=False, highlight=False)
    row = Interval(start_seconds=0.0, seconds=0.0)
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        for event in filter(None, map(parse_line, _lines(run))):
            status = "running"
            if found := interval_in(event):
                # An interval in which no step ended has none.
                row = msgspec.structs.replace(found, steps=found.steps or row.steps)
            elif event.event == EventName.TRAINING_ENDED:
                status = event.values.get("status", "ended")
            else:
                continue
            if as_json:
                view = {"run": event.run, "status": status, "interval": row}
                view["limit"] = feed_limit_of(row)
                print(msgspec.json.encode(view).decode(), flush=True)
            elif live:
                live.update("\n".join(_words(row, event.run, status)), refresh=True)
            else:
                print("; ".join(_words(row, event.run, status)), flush=True)
            if status != "running":
                return


def _words(row: Interval, run: str, status: str) -> Iterator[str]:
    yield shown(f"{run}: {status}, {step_words(row)}")
    for host in row.hosts:
        rates = f"{host.batches_per_second:.1f} batches/s, {host.bytes_per_second / 1e6:.1f} MB/s"
        workers = f"{numbered(host.workers, 'worker')}, {percent(host.busy_share)} busy"
        yield f"{shown(host.name)}, {rates}, {workers}"
    # Ranks that ask for nothing are between epochs, or at the end: nothing limits them.
    if any(rank.batches_per_second for rank in row.ranks):
        limit = feed_limit_of(row)
        yield f"limit: {limit.words}; try {limit.advice}"


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
    with ExitStack() as stack:
        while not is_last:
            # Before reading, so that lines written before the end are read; it is written last.
            is_last = (path / "training.json").is_file()
            for file in [path] if path.is_file() else path.glob("logs/dnn-*.log"):
                if file not in tails:
                    tails[file] = stack.enter_context(closing(FileTail(file)))
                yield from tails[file].read(is_last=is_last)
            time.sleep(_POLL_SECONDS)
