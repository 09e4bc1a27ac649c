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
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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
