"""Checks on a GPU what stoker says and moves: advice followed for real, and figures beside torch's.

    python benchmarks/gpu.py [--only GROUP ...] [--case NAME ...] [--seconds N] [--out FILE]
    python benchmarks/gpu.py --resume --seconds 560   a part; repeated until all cases have run
    python benchmarks/gpu.py --plan                   only prints the cases and their seconds
    python benchmarks/gpu.py --device cpu --tiny      a dry run, on any machine
    python benchmarks/gpu.py --markdown               only prints FILE's tables

Groups: honesty, ingest, losses. One CUDA GPU, torchvision and eight cores or more; a case that
misses time is left out, and said. Each case runs in its own processes, with a time limit, and FILE
is written after each. Rows of earlier runs stay until they are measured again; benchmarks/README.md
says what each figure means.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import gpu_figures
import gpu_honesty
from gpu_figures import FIGURES, Figure, Maker
from gpu_honesty import CASES, Judged
from gpu_machine import Bench, NoTimeError, python_path
from measuring import environment, version_of

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu.json"
SCHEMA = "stoker.gpu-benchmark/v1"
MAKERS: dict[str, tuple[Maker, tuple[str, ...]]] = FIGURES
GROUPS = ("honesty", *MAKERS)
# Of a whole run.
SECONDS = 900.0
BUDGET_SECONDS, TINY_BUDGET_SECONDS = 30.0, 10.0
# A part goes on with the cases of the parts before, if they were run so lately.
RESUMED = timedelta(hours=12)
TRAIN_PICTURES, VALID_PICTURES = 5400, 600
TINY_PICTURES = 160

Row = Judged | Figure
# Machine and date of a measurement.
Place = dict[str, object]
Rows = Sequence[tuple[Row, Place]]


def cases_of(group: str) -> tuple[str, ...]:
    """Returns the names of a group's cases."""
    return tuple(case.name for case in CASES) if group == "honesty" else MAKERS[group][1]


def wanted(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns group and case of all that is to run, in order."""
    cases: list[tuple[str, str]] = []
    for group in options.only:
        cases += [
            (group, case) for case in cases_of(group) if not options.case or case in options.case
        ]
    return cases


def expected_seconds(group: str, name: str) -> float:
    """Returns how long a case takes with one H100 and 16 cores, about."""
    if group == "honesty":
        return next(case.seconds for case in CASES if case.name == name)
    return gpu_figures.SECONDS[group]


def has_run(group: str, name: str, rows: Rows, *, here: Place) -> bool:
    """Returns whether an earlier part of this run has rows of the case.

    Args:
        group: Of the case.
        name: Of the case.
        rows: Of the file, each with where and when it was measured.
        here: The machine of this part, with date and commit.
    """
    for _, place in rows:
        is_this = place.get("by") == f"{group}: {name}"
        is_same = all(place.get(key) == here[key] for key in ("device", "commit"))
        if not is_this or not is_same:
            continue
        age = datetime.fromisoformat(str(here["date"])) - datetime.fromisoformat(str(place["date"]))
        if age <= RESUMED:
            return True
    return False


def plan_text(cases: Sequence[tuple[str, str]]) -> str:
    """Returns a line for each case with its seconds, and their sum."""
    lines = [f"{expected_seconds(*case):5.0f} s  {case[0]}: {case[1]}" for case in cases]
    total = sum(expected_seconds(*case) for case in cases)
    return "\n".join([*lines, f"{total:5.0f} s  in all, about, with one H100 and 16 cores"])


def rows_of(group: str, name: str, bench: Bench) -> Iterator[Row]:
    """Yields the rows of one case."""
    if group == "honesty":
        case = next(case for case in CASES if case.name == name)
        yield gpu_honesty.judge(case, bench)
        return
    yield from MAKERS[group][0](bench, name)


def said(row: Row) -> str:
    """Says the row in one line."""
    if isinstance(row, Judged):
        return gpu_honesty.text(row)
    values = [
        f"{who} {value:.4g}"
        for who, value in (("stoker", row.stoker), ("torch", row.torch))
        if value is not None
    ]
    words = f"{row.group}: {row.case}: {row.figure}: {', '.join(values)}"
    return "; ".join(part for part in (words, row.note, f"{row.seconds:.0f} s") if part)


def machine(device: str) -> dict[str, object]:
    """Says what this was measured on."""
    return {
        **environment(),
        "device": device_name(device),
        "torchvision": version_of("torchvision"),
        "host": platform.machine(),
    }


def device_name(device: str) -> str:
    """Returns the name of the GPU; asked of the driver, so that this process uses no GPU."""
    if device == "cpu":
        return "cpu"
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return device


def key(row: Row) -> tuple[str, str, str]:
    """Returns what a row is about: a later one replaces it."""
    if isinstance(row, Judged):
        return "honesty", row.case, ""
    return row.group, row.case, row.figure


def read(file: Path) -> list[tuple[Row, Place]]:
    """Returns rows, each with the machine and date of its measurement."""
    if not file.is_file():
        return []
    found = []
    for entry in json.loads(file.read_text())["rows"]:
        kind = Judged if entry["row"].get("verdict") is not None else Figure
        known = {each.name for each in fields(kind)}
        values = {name: value for name, value in entry["row"].items() if name in known}
        if kind is Judged:
            values["states"] = tuple(values["states"])
        found.append((kind(**values), entry["measured"]))
    return found


def write(file: Path, rows: Rows) -> None:
    """Writes all rows, by way of another file: a run that is killed leaves whole ones."""
    entries = [{"row": asdict(row), "measured": where} for row, where in rows]
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_suffix(".part")
    beside.write_text(json.dumps({"schema": SCHEMA, "rows": entries}, indent=1) + "\n")
    beside.replace(file)


def markdown(rows: Rows) -> str:
    """Returns the two tables of benchmarks/README.md."""
    judged = [(row, where) for row, where in rows if isinstance(row, Judged)]
    figures = [(row, where) for row, where in rows if isinstance(row, Figure)]
    lines = [
        "| training | verdict | advice | promised (band) | whole epochs | right | inside |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, _ in judged:
        advised = "-" if row.advised_ms is None else f"{row.advised_ms:.0f}"
        lines.append(
            f"| {row.case}: {row.about} | {row.verdict} | {row.action} {row.plan} "
            f"| {row.promised:.2f} ({row.low:.2f} to {row.high:.2f}) "
            f"| {row.measured:.2f} ({row.today_ms:.0f} to {advised} ms) "
            f"| {_yes(row.is_right)} | {_yes(row.is_inside)} |"
        )
    lines += [
        "",
        "| case | figure | stoker | torch | measured |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row, where in figures:
        carried = ", carried over" if row.is_carried_over else ""
        note = f" ({row.note})" if row.note else ""
        lines.append(
            f"| {row.group}: {row.case} | {row.figure}{note} | {_value(row.stoker)} "
            f"| {_value(row.torch)} | {str(where['date'])[:10]}{carried} |"
        )
    return "\n".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "**no**"


def _value(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def prepare(folder: Path, options: argparse.Namespace) -> Bench:
    """Makes the pictures, and returns what all cases share."""
    train, valid = (
        (TINY_PICTURES, TINY_PICTURES // 4) if options.tiny else (TRAIN_PICTURES, VALID_PICTURES)
    )
    budget = options.budget or (TINY_BUDGET_SECONDS if options.tiny else BUDGET_SECONDS)
    bench = Bench(
        folder=folder,
        device=options.device,
        is_tiny=options.tiny,
        cores=tuple(sorted(os.sched_getaffinity(0))),
        deadline=time.monotonic() + options.seconds,
        budget_seconds=budget,
        keep=options.keep.absolute() if options.keep else None,
    )
    words = ["--train", str(train), "--valid", str(valid), *(["--tiny"] if options.tiny else [])]
    script = str(HERE / "gpu_pictures.py")
    began = time.monotonic()
    size = bench.run([sys.executable, script, str(bench.pictures), *words], seconds=120).strip()
    tell(f"{train + valid} pictures of {size} bytes in {time.monotonic() - began:.0f} s")
    return bench


def tell(text: str) -> None:
    """Prints a line at once."""
    print(f"# {datetime.now().strftime('%H:%M:%S')} {text}", flush=True)


def run(options: argparse.Namespace, file: Path) -> int:
    """Runs the cases, writing each one's rows as soon as they are there; returns the failures."""
    where = machine(options.device)
    tell(f"{where['device']}, {where['cores']} cores, {where['cpu']}, torch {where['torch']}")
    if importlib.util.find_spec("torchvision") is None:
        tell("torchvision is not installed: PIL's transforms and tiny networks stand in for it")
    cases = wanted(options)
    if options.resume:
        rows = read(file)
        cases = [case for case in cases if not has_run(*case, rows, here=where)]
    if not cases:
        tell("all of it has run")
        return 0
    failed = 0
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) and not options.tiny else None
    with tempfile.TemporaryDirectory(prefix="stoker-gpu-", dir=parent) as name:
        bench = prepare(Path(name), options)
        for group, case in cases:
            failed += not has_succeeded(group, case, bench, file=file, where=where)
    print(f"rows: {file}")
    return failed


def has_succeeded(group: str, case: str, bench: Bench, *, file: Path, where: Place) -> bool:
    """Runs a case and writes its rows; returns whether it did not fail: it may be left out.

    Args:
        group: Of the case.
        case: Its name.
        bench: What all cases share.
        file: Its rows replace earlier ones there.
        where: The machine.
    """
    began = time.monotonic()
    rows = {key(row): (row, place) for row, place in read(file)}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    is_fine = True
    try:
        for row in rows_of(group, case, bench):
            rows[key(row)] = row, {**where, "date": now, "by": f"{group}: {case}"}
            print(said(row), flush=True)
        write(file, [*rows.values()])
    except NoTimeError as err:
        tell(f"{group}, {case}: left out: {err}")
    except Exception as err:
        # The other cases are not lost for it.
        is_fine = False
        tell(f"{group}, {case}: FAILED: {type(err).__name__}: {err}")
    tell(f"{group}, {case}: {time.monotonic() - began:.0f} s, {bench.left():.0f} left")
    return is_fine


def parsed(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the options; words: of a command line, of this process if there are none."""
    names = [case for group in GROUPS for case in cases_of(group)]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a dry run: writes aside, not FILE")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="GROUP", help="these groups")
    parser.add_argument("--case", nargs="+", choices=names, metavar="NAME", help="only these")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the run, or this part")
    parser.add_argument("--resume", action="store_true", help="without what FILE has of this run")
    parser.add_argument("--plan", action="store_true", help="only prints the cases, with seconds")
    parser.add_argument("--budget", type=float, help="seconds of a profile")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {RESULTS.name}")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="profiles and decisions go there")
    parser.add_argument("--markdown", action="store_true", help="only prints FILE's tables")
    options = parser.parse_args(words)
    options.only = options.only or GROUPS
    return options


def main() -> int:
    options = parsed()
    if options.plan:
        print(plan_text(wanted(options)))
        return 0
    aside = Path(tempfile.gettempdir()) / "gpu-tiny.json"
    file: Path = (options.out or (aside if options.tiny else RESULTS)).absolute()
    if options.markdown:
        print(markdown(read(file)))
        return 0
    os.environ.update(python_path(os.environ))
    # Ends as by Ctrl-C, so that commands and pictures go with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return 1 if run(options, file) else 0


if __name__ == "__main__":
    sys.exit(main())
