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
from stoker.units import ms, numbered, percent

_POLL_SECONDS = 0.25


def watch_run(run: str, *, as_json: bool) -> None:
    """Shows the hosts, rates and waits of a run until it ends."""
    console = Console(markup=False, highlight=False)
    row = Interval(start_seconds=0.0, seconds=0.0)
    event = None
    with ExitStack() as stack:
        live = None
        if console.is_terminal and not as_json:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        for event in filter(None, map(parse_line, _lines(run))):
            is_end = event.event == EventName.TRAINING_ENDED
            found = interval_in(event)
            if found:
                # An interval in which no step ended has none.
                row = msgspec.structs.replace(found, steps=found.steps or row.steps)
            elif not is_end:
                continue
            status = event.values.get("status", "ended") if is_end else "running"
            head = shown(f"{event.run}: {status}")
            if as_json:
                view = {"run": event.run, "status": status, "interval": row}
                if row.ranks:
                    view["limit"] = feed_limit_of(row)
                print(msgspec.json.encode(view).decode(), flush=True)
            elif live:
                live.update("\n".join(_words(head, row)), refresh=True)
            else:
                print("; ".join(_words(head, row)), flush=True)
            if is_end:
                return
    if event is None:
        raise UsageError("no run wrote this log", where=run, fix="name runs/ID, or a log")


def _words(head: str, row: Interval) -> Iterator[str]:
    if step := row.steps:
        wait = step.wait_words("waiting for data")
        head += f", step {step.steps}, {ms(step.step_seconds)} each, {wait}"
    yield head
    for host in row.hosts:
        rates = f"{host.batches_per_second:.1f} batches/s, {host.bytes_per_second / 1e6:.1f} MB/s"
        workers = f"{numbered(host.workers, 'worker')}, {percent(host.busy_share)} busy"
        yield f"{shown(host.name)}, {rates}, {workers}"
    for rank in row.ranks:
        waits = f"{percent(rank.wait_share)} waiting, {rank.queue_depth or 0:.1f} ready"
        yield f"rank {rank.name}, {rank.batches_per_second:.1f} batches/s, {waits}"
    for gpu in row.gpus:
        yield f"{shown(gpu.host)} GPU {gpu.number}, {percent(gpu.utilization)} busy"
    # Ranks that ask for nothing are between epochs, or at the end: nothing limits them.
    if any(rank.window for rank in row.ranks):
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
            time.sleep(0 if is_last else _POLL_SECONDS)
