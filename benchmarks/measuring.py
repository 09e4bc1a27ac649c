"""Runs one trainer over one loader, in processes of its own; and what every measurement needs."""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from cases import Case
from stoker_hosts import run_under_stoker

HERE = Path(__file__).resolve().parent
# A measurement that lasts longer than its steps and this has failed.
START_SECONDS = 120.0
END_SECONDS = 10.0

Spread = dict[str, object]


def trained(
    loader: str, case: Case, *, hosts: int = 1, python: str = sys.executable
) -> dict[str, float]:
    """Returns what `feed_trainer.py` saw of `loader`.

    Args:
        loader: raw, stoker encrypted, torch local, torch unordered, grpc raw,
            grpc protobuf, ray, ray data or tf.data service.
        hosts: Data hosts among which stoker's workers are shared.
        python: Interpreter of gRPC's, Ray's and TensorFlow's processes.

    Raises:
        RuntimeError: If the trainer failed, with the end of what it wrote.
    """
    is_foreign = loader.startswith(("grpc", "ray", "tf."))
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        (folder / "slots").mkdir()
        case = replace(case, slots=str(folder / "slots"))
        result = folder / "result.json"
        seconds = START_SECONDS + 5 * (case.warmup + case.steps) * max(case.bound_seconds(), 0.1)
        command = [python if is_foreign else sys.executable, str(HERE / "feed_trainer.py")]
        command += [loader, case.to_json(), str(result)]
        if loader.startswith("stoker"):
            (folder / "hosts").mkdir()
            run_under_stoker(
                command,
                folder=folder / "hosts",
                hosts=hosts,
                workers_each=case.workers // hosts,
                seconds=seconds,
            )
        elif loader == "raw":
            with _server("raw_socket_loader.py", case, sys.executable) as ports:
                run([*command, *map(str, ports)], seconds)
        elif loader.startswith("grpc"):
            with _server("grpc_loader.py", case, python) as ports:
                run([*command, *map(str, ports)], seconds)
        else:
            run(command, seconds)
        seen: dict[str, float] = json.loads(result.read_text())
    return seen


def seen_by_trainer(
    script: str,
    loader: str,
    arguments: Sequence[str],
    *,
    workers_each: int,
    seconds: float,
    hosts: int = 1,
    feed: Mapping[str, object] | None = None,
) -> Any:
    """Returns the JSON that a trainer of this folder writes: of torch's loader, or stoker's.

    Args:
        script: Called with the loader's first word, `arguments`, and the file for its result.
        loader: torch local, or one that begins with stoker, which data hosts feed.
        workers_each: Of each data host.
        seconds: The whole may last so long.
        feed: Settings of the workload's `feed`; the others are the defaults.

    Raises:
        RuntimeError: If the trainer or a data host failed, with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as name:
        folder = Path(name)
        result = folder / "result.json"
        command = [sys.executable, str(HERE / script), loader.split()[0], *arguments, str(result)]
        if loader == "torch local":
            run(command, seconds)
        else:
            (folder / "hosts").mkdir()
            run_under_stoker(
                command,
                folder=folder / "hosts",
                hosts=hosts,
                workers_each=workers_each,
                seconds=seconds,
                feed=feed,
            )
        return json.loads(result.read_text())


@contextmanager
def _server(script: str, case: Case, python: str) -> Iterator[list[int]]:
    command = [python, str(HERE / script), case.to_json()]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    with server:
        try:
            assert server.stdout is not None
            yield json.loads(server.stdout.readline())
            # Its trainer hung up.
            server.wait(END_SECONDS)
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)


def run(command: Sequence[str], seconds: float, *, environ: dict[str, str] | None = None) -> None:
    """Runs a process to its end.

    Raises:
        RuntimeError: If it failed, with the end of what it wrote.
    """
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        env=environ,
    )
    if done.returncode != 0:
        said = f"{done.stdout[-1500:]}{done.stderr[-3000:]}"
        raise RuntimeError(f"{command[1]} ended with {done.returncode}:\n{said}")


def can_import(module: str, python: str) -> bool:
    """Returns whether that interpreter has the module."""
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode == 0


def rotated(values: Sequence[str], turn: int) -> tuple[str, ...]:
    """Returns the same in another order each turn, so that no one always comes first."""
    first = turn % len(values)
    return (*values[first:], *values[:first])


def say(text: str) -> None:
    """Prints one line about what was just measured, for whoever waits."""
    now = datetime.now().strftime("%H:%M:%S")
    print(f"# {now} {text}, load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> Spread:
    """Returns median, range, and all of them."""
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "values": [round(value, 4) for value in values],
    }


def environment() -> dict[str, object]:
    """Says where this was measured."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=HERE, capture_output=True, text=True
        ).stdout.strip()

    cpu = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "commit": git("rev-parse", "--short", "HEAD"),
        "is_modified": bool(git("status", "--porcelain", "--", "../src", "*.py")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        # Where the kernel shares the cores among sessions: the priority of this one.
        "autogroup": _text("/proc/self/autogroup"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("torch", "pyzmq", "msgspec", "stoker")},
    }


def version_of(package: str) -> str:
    """Returns a package's version; of stoker from a checkout that is not installed: checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "checkout" if package == "stoker" else "not installed"


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Compares a figure with another loader's, repetition by repetition.

    Attributes:
        beside: The other loader; empty: the figure itself is what the target is about.
        how: points: this less that; times: this over that; alone: this itself.
        is_met: Whether the median keeps the target; None: there is no target.
        target: In words, empty without one.
    """

    beside: str
    how: Literal["points", "times", "alone"]
    value: Spread
    target: str = ""
    is_met: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row is one line of the table.

    Attributes:
        part: Of the benchmark: even, exponential, straggler, cpu, mnist or crowd.
        case: What was measured, in words.
        figure: Name and unit of `value`.
        value: None: not measured, `note` says why.
        details: Other figures of the same runs.
    """

    part: str
    case: str
    loader: str
    figure: str
    value: Spread | None
    comparisons: tuple[Comparison, ...] = ()
    details: dict[str, object] = field(default_factory=dict)
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def points(
    mine: Sequence[float],
    theirs: Sequence[float],
    *,
    beside: str,
    at_most: float | None = None,
    is_below: bool = False,
) -> Comparison:
    """Compares by the differences of the repetitions.

    Args:
        at_most: The target for their median.
        is_below: The target is to be below the other.
    """
    value = spread([a - b for a, b in zip(mine, theirs, strict=True)])
    if at_most is not None:
        return _judged(
            beside, "points", value, f"<= {at_most:+g}", is_met=_median(value) <= at_most
        )
    if is_below:
        return _judged(beside, "points", value, "< 0", is_met=_median(value) < 0)
    return Comparison(beside=beside, how="points", value=value)


def times(
    mine: Sequence[float],
    theirs: Sequence[float],
    *,
    beside: str,
    at_most: float | None = None,
    at_least: float | None = None,
) -> Comparison:
    """Compares by the quotients of the repetitions, with a target for their median."""
    value = spread([a / b for a, b in zip(mine, theirs, strict=True)])
    if at_most is not None:
        return _judged(beside, "times", value, f"<= {at_most:g}", is_met=_median(value) <= at_most)
    if at_least is not None:
        return _judged(
            beside, "times", value, f">= {at_least:g}", is_met=_median(value) >= at_least
        )
    return Comparison(beside=beside, how="times", value=value)


def alone(mine: Sequence[float], *, at_most: float) -> Comparison:
    """Sets a target for the figure itself."""
    value = spread(mine)
    return _judged("", "alone", value, f"<= {at_most:g}", is_met=_median(value) <= at_most)


def _judged(
    beside: str,
    how: Literal["points", "times", "alone"],
    value: Spread,
    target: str,
    *,
    is_met: bool,
) -> Comparison:
    return Comparison(beside=beside, how=how, value=value, target=target, is_met=is_met)


def _median(value: Spread) -> float:
    median = value["median"]
    assert isinstance(median, float | int)
    return median


def markdown(rows: Sequence[Row]) -> str:
    """Returns one table of all rows."""
    lines = [
        "| case | loader | figure | median (min..max) | n | beside, in the same run | target |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row.value is None:
            cells = [row.case, row.loader, row.figure, row.note, "", "", ""]
        else:
            values = row.value["values"]
            assert isinstance(values, list)
            beside = [_beside(each) for each in row.comparisons if each.beside]
            if row.note:
                beside.append(row.note)
            verdicts = [_verdict(each) for each in row.comparisons if each.target]
            cells = [row.case, row.loader, row.figure, _spread_text(row.value), str(len(values))]
            cells += ["; ".join(beside), "; ".join(verdicts)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _beside(each: Comparison) -> str:
    if each.how == "points":
        return f"{each.beside} {_spread_text(each.value, sign='+')}"
    return f"{_spread_text(each.value)} x {each.beside}"


def _verdict(each: Comparison) -> str:
    subject = f"{each.beside} {each.target}" if each.beside else each.target
    return f"{subject}: {'met' if each.is_met else '**not met**'}"


def _spread_text(value: Spread, *, sign: str = "") -> str:
    shown = [f"{value[key]:{sign}.{_digits(value)}f}" for key in ("median", "min", "max")]
    if shown[1] == shown[2]:
        return shown[0]
    return f"{shown[0]} ({shown[1]}..{shown[2]})"


def _digits(value: Spread) -> int:
    largest = max(abs(float(str(value[key]))) for key in ("median", "min", "max"))
    return 0 if largest >= 300 else 1 if largest >= 3 else 2
