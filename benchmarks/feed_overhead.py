"""What the feed costs a training step, beside a raw-socket loader and torch's own local loader.

    python benchmarks/feed_overhead.py [--quick] [--json] [--case even exponential straggler flat]

Every repetition runs every loader at every number of workers, in an order that rotates; a loader is
compared with the raw one of its own repetition. benchmarks/README.md says what each figure means.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from cases import Case
from stoker_hosts import run_under_stoker

HERE = Path(__file__).resolve().parent
LOADERS = ("raw", "stoker plain", "stoker encrypted", "torch local")
# Points over the raw loader, DESIGN section 8; flat out other figures count.
LIMITS = {
    "even": {"stoker plain": 2.0, "stoker encrypted": 3.0},
    "exponential": {"stoker plain": 3.0, "stoker encrypted": 3.0},
    "straggler": {"stoker plain": 3.0, "stoker encrypted": 3.0},
}
WORKERS = {"even": (1, 2, 3, 4, 6), "exponential": (3, 4, 6), "straggler": (4,), "flat": (2,)}
QUICK_WORKERS = {"even": (1, 4), "exponential": (4,), "straggler": (4,), "flat": (2,)}
STEPS = {"exponential": 200}
# A measurement that lasts longer than its steps and this has failed.
START_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One loader at one number of workers in one repetition."""

    loader: str
    workers: int
    repetition: int
    excess_percent: float
    step_seconds: float
    resident_step_seconds: float
    cpu_seconds_per_gb: float
    megabytes_per_second: float
    first_batch_seconds: float
    is_in_order: bool


def case_of(name: str, *, workers: int, steps: int) -> Case:
    even = Case(workers=workers, steps=steps)
    if name == "exponential":
        return replace(even, is_exponential=True)
    if name == "straggler":
        return replace(even, slow_factor=3.0, warmup=30)
    if name == "flat":
        return replace(even, cost_seconds=0.0, step_seconds=0.0)
    return even


def measure(loader: str, case: Case, *, hosts: int, repetition: int) -> Sample:
    """Runs one trainer over `loader`, with its workers, in processes of their own.

    Raises:
        RuntimeError: If the trainer failed, with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="feed-overhead-") as name:
        folder = Path(name)
        (folder / "slots").mkdir()
        case = replace(case, slots=str(folder / "slots"))
        result = folder / "result.json"
        seconds = START_SECONDS + 5 * (case.warmup + case.steps) * max(case.bound_seconds(), 0.1)
        kind = loader.split()[0]
        command = [sys.executable, str(HERE / "feed_trainer.py"), kind]
        command += [case.to_json(), str(result)]
        if kind == "stoker":
            (folder / "hosts").mkdir()
            run_under_stoker(
                command,
                folder=folder / "hosts",
                hosts=hosts,
                workers_each=case.workers // hosts,
                is_encrypted=loader == "stoker encrypted",
                seconds=seconds,
            )
        elif kind == "raw":
            with _raw_workers(case) as server:
                assert server.stdout is not None
                ports = json.loads(server.stdout.readline())
                _run([*command, *map(str, ports)], seconds)
                server.wait(seconds)
        else:
            _run(command, seconds)
        seen = json.loads(result.read_text())
    bound = case.bound_seconds()
    excess = 100 * (seen["step_seconds"] / bound - 1) if bound > 0 else 0.0
    return Sample(
        loader=loader,
        workers=case.workers,
        repetition=repetition,
        excess_percent=excess,
        **seen,
    )


def _raw_workers(case: Case) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE / "raw_socket_loader.py"), case.to_json()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)


def _run(command: Sequence[str], seconds: float) -> None:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[1]} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def measure_all(
    name: str,
    *,
    loaders: Sequence[str],
    ks: Sequence[int],
    steps: int,
    repetitions: int,
    one_worker_hosts: bool,
) -> Iterator[Sample]:
    turn = 0
    for repetition in range(repetitions):
        for k in ks:
            first = turn % len(loaders)
            turn += 1
            for loader in (*loaders[first:], *loaders[:first]):
                case = case_of(name, workers=k, steps=steps)
                hosts = k if one_worker_hosts else 1
                sample = measure(loader, case, hosts=hosts, repetition=repetition)
                print(
                    f"# {time.strftime('%H:%M:%S')} {loader} k={k}: "
                    f"{sample.excess_percent:+.1f} % {sample.cpu_seconds_per_gb:.2f} CPU-s/GB, "
                    f"load {os.getloadavg()[0]:.1f}",
                    file=sys.stderr,
                    flush=True,
                )
                yield sample


def summarize(samples: Sequence[Sample], name: str, *, steps: int) -> list[dict[str, object]]:
    """A row for each loader and number of workers."""
    floors = {(s.workers, s.repetition): s for s in samples if s.loader == "raw"}
    torches = {(s.workers, s.repetition): s for s in samples if s.loader == "torch local"}
    rows: list[dict[str, object]] = []
    for k in sorted({s.workers for s in samples}):
        for loader in LOADERS:
            mine = [s for s in samples if s.workers == k and s.loader == loader]
            if not mine:
                continue
            over_raw = _differences(mine, floors)
            row: dict[str, object] = {
                "case": name,
                "workers": k,
                "loader": loader,
                "steps": steps,
                "repetitions": len(mine),
                "excess_percent": _spread([s.excess_percent for s in mine]),
                "step_seconds": _spread([s.step_seconds for s in mine]),
                "resident_step_seconds": _spread([s.resident_step_seconds for s in mine]),
                "cpu_seconds_per_gb": _spread([s.cpu_seconds_per_gb for s in mine]),
                "megabytes_per_second": _spread([s.megabytes_per_second for s in mine]),
                "first_batch_seconds": _spread([s.first_batch_seconds for s in mine]),
                "is_in_order": all(s.is_in_order for s in mine),
            }
            if over_raw:
                row["points_over_raw"] = _spread(over_raw)
            limit = LIMITS.get(name, {}).get(loader)
            over_torch = _differences(mine, torches)
            if limit is not None and over_raw and over_torch:
                row["points_over_torch"] = _spread(over_torch)
                row["limit_points_over_raw"] = limit
                row["is_within_limit"] = statistics.median(over_raw) <= limit
                row["is_below_torch"] = statistics.median(over_torch) < 0
            rows.append(row)
    return rows


def _differences(mine: Sequence[Sample], others: dict[tuple[int, int], Sample]) -> list[float]:
    """Points over another loader in the same repetition, at the same number of workers."""
    return [
        sample.excess_percent - others[sample.workers, sample.repetition].excess_percent
        for sample in mine
        if (sample.workers, sample.repetition) in others
    ]


def _spread(values: Sequence[float]) -> dict[str, object]:
    return {
        "median": round(statistics.median(values), 4),
        "min": round(min(values), 4),
        "max": round(max(values), 4),
        "values": [round(value, 4) for value in values],
    }


def text_of(document: dict[str, object]) -> str:
    """A document of this benchmark for people, at most 88 columns."""
    rows = document["rows"]
    load = document["load_before"]
    assert isinstance(rows, list)
    assert isinstance(load, list)
    modified = " (modified)" if document["is_modified"] else ""
    resident = (
        statistics.median(
            each["resident_step_seconds"]["median"] for each in rows if each["case"] != "flat"
        )
        if any(each["case"] != "flat" for each in rows)
        else 0.0
    )
    parts = [
        f"{document['date']}, commit {document['commit']}{modified}, stoker's workers: "
        f"{document['data_hosts']}",
        f"{document['cpu']}, {document['cores']} cores, load {load[0]:.1f} before",
    ]
    if resident:
        parts.append(f"the step on a batch in memory: {1000 * resident:.1f} ms for 20.0 ms")
    for name in dict.fromkeys(each["case"] for each in rows):
        mine = [each for each in rows if each["case"] == name]
        parts += ["", f"{name}: {mine[0]['repetitions']} x {mine[0]['steps']} steps"]
        parts.append(_table(mine, name))
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, object]], name: str) -> str:
    title = "MB/s" if name == "flat" else "over the bound"
    lines = [
        f"{'k':>2} {'loader':<17}{title + ' (min..max)':>26}{'over raw':>10}"
        f"{'CPU-s/GB':>9}{'first s':>8} {'order':<6}{'target'}"
    ]
    for row in rows:
        main = _median(row, "megabytes_per_second" if name == "flat" else "excess_percent")
        if name == "flat":
            text = f"{main[0]:.0f} ({main[1]:.0f}..{main[2]:.0f})"
            points = ""
        else:
            text = f"{main[0]:+.1f} % ({main[1]:+.1f}..{main[2]:+.1f})"
            points = (
                f"{_median(row, 'points_over_raw')[0]:+.1f}" if "points_over_raw" in row else ""
            )
        verdict = ""
        if "is_within_limit" in row:
            verdict = "met" if row["is_below_torch"] else "torch no"
            verdict = verdict if row["is_within_limit"] else "raw no"
        order = "kept" if row["is_in_order"] else "LOST"
        lines.append(
            f"{row['workers']:>2} {row['loader']:<17}{text:>26}{points:>10}"
            f"{_median(row, 'cpu_seconds_per_gb')[0]:>9.2f}"
            f"{_median(row, 'first_batch_seconds')[0]:>8.2f} {order:<6}{verdict}".rstrip()
        )
    return "\n".join(lines)


def _median(row: dict[str, object], key: str) -> tuple[float, float, float]:
    spread = row[key]
    assert isinstance(spread, dict)
    return spread["median"], spread["min"], spread["max"]


def environment() -> dict[str, object]:
    """Where this was measured."""

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
        "is_modified": bool(git("status", "--porcelain", "--", "src", "benchmarks/*.py")),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        # Where the kernel shares the cores among sessions: the priority of this one.
        "autogroup": _text("/proc/self/autogroup"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "pyzmq", "msgspec", "stoker")},
    }


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="results as JSON on stdout")
    parser.add_argument("--quick", action="store_true", help="about a minute: one repetition")
    parser.add_argument("--case", nargs="+", default=["even"], choices=tuple(WORKERS), metavar="C")
    parser.add_argument(
        "--loaders", nargs="+", default=LOADERS, choices=LOADERS, metavar="L", help="among the four"
    )
    parser.add_argument("--workers", type=int, nargs="+", metavar="K", help="in place of 1 2 3 4 6")
    parser.add_argument("--steps", type=int, help="measured steps; default 100")
    parser.add_argument("--repetitions", type=int, help="default 5")
    parser.add_argument(
        "--hosts", action="store_true", help="stoker: k data hosts of 1 worker, not 1 of k"
    )
    arguments = parser.parse_args()
    load_before = os.getloadavg()
    started = time.monotonic()
    rows: list[dict[str, object]] = []
    for name in arguments.case:
        ks = arguments.workers or (QUICK_WORKERS if arguments.quick else WORKERS)[name]
        steps = arguments.steps or (50 if arguments.quick else STEPS.get(name, 100))
        samples = measure_all(
            name,
            loaders=arguments.loaders,
            ks=ks,
            steps=steps,
            repetitions=arguments.repetitions or (1 if arguments.quick else 5),
            one_worker_hosts=arguments.hosts,
        )
        rows += summarize(list(samples), name, steps=steps)
    about = {
        **environment(),
        "load_before": [round(each, 2) for each in load_before],
        "load_after": [round(each, 2) for each in os.getloadavg()],
        "minutes": round((time.monotonic() - started) / 60, 1),
        "data_hosts": "k hosts x 1 worker" if arguments.hosts else "1 host x k workers",
    }
    document = {"schema": "stoker.feed-overhead/v1", **about, "rows": rows}
    print(json.dumps(document, indent=1) if arguments.json else text_of(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
