"""Runs the examples of docs/engines.md with and without a data group: one JSON, and one table.

    python benchmarks/engines.py [--quick] [--only PART ...] [--markdown FILE] [--json FILE]

Each job runs by `stoker train` on the local platform, all of its variants by turns, in an order
that rotates. Needs a core for each host, two in all, that nothing else uses. benchmarks/README.md
says how to read each figure.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from engines_cases import REPO, Job, Variant, jobs
from measuring import HERE, Spread, can_import, environment, rotated, say, spread

PARTS = ("rl", "spoken", "tf", "ray")
RESULT = HERE / "results" / "engines.json"
ROUNDS = 3
# A run that lasts longer has failed.
RUN_SECONDS = 300.0
STOP_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One run reached these figures.

    Attributes:
        rate: Samples a second of the steps, but for the first of each epoch.
        waiting: Of these steps, the share that waits for data.
        first: Seconds until an epoch's first batch is there; median of the epochs.
        seconds: From the command to its end.
    """

    rate: float
    waiting: float
    first: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row shows one variant of a job.

    Attributes:
        rate_times: Its rate over the first variant's of the same round; seconds_less: the first
            variant's seconds over its own.
        note: Why something is not there.
    """

    job: str
    unit: str
    variant: str
    groups: tuple[str, ...] = ()
    rate: Spread | None = None
    waiting: Spread | None = None
    first: Spread | None = None
    seconds: Spread | None = None
    rate_times: Spread | None = None
    seconds_less: Spread | None = None
    note: str = ""


@dataclass(slots=True)
class Runs:
    """Keeps the runs of one variant, by round."""

    seen: dict[int, Seen] = field(default_factory=dict)
    failure: str = ""


def run(variant: Variant, *, python: str) -> Seen:
    """Runs one variant once.

    Raises:
        RuntimeError: If it failed or lasted too long, with the end of what it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        record = Path(folder) / "training.json"
        command = [python, "-P", "-m", "stoker.cli", "train"]
        command += [str(REPO / "configs" / variant.workload), "--yes", "--out", str(record)]
        command += ["--set", f"command={json.dumps(variant.command)}"]
        if variant.data_command:
            command += ["--set", f"engine.data.command={json.dumps(variant.data_command)}"]
        for group in variant.groups:
            command += ["--group", group]
        began = time.monotonic()
        code, said = _ended(command, folder)
        seconds = time.monotonic() - began
        if code != 0:
            raise RuntimeError(f"ended with {code}: {said[-2000:]}")
        measured = json.loads(record.read_text())["measured"]
        if not measured:
            raise RuntimeError(f"there is no step in its record: {said[-2000:]}")
        return Seen(
            rate=measured["samples_per_second"],
            waiting=measured["wait_seconds"] / measured["step_seconds"],
            first=_first_wait(record.with_name(measured["timeline_file"])),
            seconds=seconds,
        )


def _first_wait(timeline: Path) -> float:
    with timeline.open(newline="") as file:
        steps = list(csv.DictReader(file))
    loaders = [step["loader"] for step in steps]
    # The others validate.
    main = max(set(loaders), key=loaders.count)
    waits = [s["wait_seconds"] for s in steps if s["loader"] == main and s["batch"] == "0"]
    return statistics.median(map(float, waits))


def _ended(command: Sequence[str], folder: str) -> tuple[int, str]:
    """Returns exit code and output; nothing of the run is left, whatever happens."""
    # The environments of the engines have what stoker needs, not stoker.
    environ = {**os.environ, "PYTHONPATH": str(REPO / "src")}
    with (
        (Path(folder) / "said").open("w+") as said,
        subprocess.Popen(
            command, cwd=folder, env=environ, stdin=subprocess.DEVNULL, stdout=said, stderr=said
        ) as process,
    ):
        try:
            process.wait(RUN_SECONDS)
        except subprocess.TimeoutExpired:
            said.write(f"\nit lasted longer than {RUN_SECONDS:g} s\n")
        finally:
            if process.poll() is None:
                # It ends its hosts.
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
        said.flush()
        said.seek(0)
        return process.wait(), said.read()


def rows_of(job: Job, *, python: str, rounds: int) -> list[Row]:
    """Runs all variants, by turns; one that fails is not tried again, the others go on."""
    if not can_import(job.module, python):
        note = f"{python} has no {job.module}: {job.install}"
        return [Row(job=job.about, unit=job.unit, variant=job.variants[0].name, note=note)]
    runs = {variant.name: Runs() for variant in job.variants}
    for turn in range(rounds):
        for name in rotated(tuple(runs), turn):
            if runs[name].failure:
                continue
            (variant,) = (each for each in job.variants if each.name == name)
            try:
                seen = run(variant, python=python)
            except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as err:
                runs[name].failure = str(err)
                say(f"{job.about}, {name}: failed, {err}")
                continue
            runs[name].seen[turn] = seen
            say(f"{job.about}, {name}: {seen.rate:.0f} {job.unit}/s, {seen.seconds:.1f} s")
    return [_row(job, variant, runs) for variant in job.variants]


def _row(job: Job, variant: Variant, runs: Mapping[str, Runs]) -> Row:
    mine, first = runs[variant.name], runs[job.variants[0].name]
    note = f"failed: {mine.failure.strip().rpartition(chr(10))[2]}" if mine.failure else ""
    row = Row(job=job.about, unit=job.unit, variant=variant.name, groups=variant.groups, note=note)
    if not mine.seen:
        return row
    every = list(mine.seen.values())
    pairs = [(mine.seen[turn], first.seen[turn]) for turn in mine.seen if turn in first.seen]
    return Row(
        job=row.job,
        unit=row.unit,
        variant=row.variant,
        groups=row.groups,
        rate=spread([each.rate for each in every]),
        waiting=spread([each.waiting for each in every]),
        first=spread([each.first for each in every]),
        seconds=spread([each.seconds for each in every]),
        rate_times=spread([a.rate / b.rate for a, b in pairs]) if pairs else None,
        seconds_less=spread([b.seconds / a.seconds for a, b in pairs]) if pairs else None,
        note=note,
    )


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Returns one table of all rows."""
    lines = [
        "| job | cluster | n | samples/s | x the first | waiting, % | an epoch's first batch, s "
        "| whole run, s | x the first |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        if row["rate"] is None:
            cells = [str(row["job"]), str(row["variant"]), "0", str(row["note"]), *[""] * 5]
        else:
            cells = [f"{row['job']} ({row['unit']})", str(row["variant"])]
            cells += [str(len(_values(row["rate"]))), _text(row["rate"])]
            cells += [_text(row["rate_times"], digits=2), _text(row["waiting"], scale=100)]
            cells += [_text(row["first"], digits=2)]
            cells += [_text(row["seconds"], digits=1), _text(row["seconds_less"], digits=2)]
            cells[-1] += f" {row['note']}" if row["note"] else ""
        lines.append("| " + " | ".join(" ".join(cell.split()) for cell in cells) + " |")
    return "\n".join(lines)


def _values(value: object) -> list[float]:
    assert isinstance(value, dict)
    return [float(each) for each in value["values"]]


def _text(value: object, *, digits: int = 0, scale: float = 1.0) -> str:
    if value is None:
        return ""
    assert isinstance(value, dict)
    median, low, high = (f"{value[key] * scale:.{digits}f}" for key in ("median", "min", "max"))
    return f"{median} ({low}..{high})"


def headings(parts: Mapping[str, dict[str, object]]) -> str:
    """Says where and when it was measured, a line for all parts that agree."""
    lines: dict[str, list[str]] = {}
    for name, part in parts.items():
        modified = " (modified)" if part["is_modified"] else ""
        line = f"commit {part['commit']}{modified}; {part['cpu']}, {part['cores']} cores"
        loads = f"{name}: {str(part['date'])[:10]}, load {part['load_before']} before, "
        loads += f"{part['load_after']} after, {part['minutes']} minutes"
        lines.setdefault(line, []).append(loads)
    return "\n".join(f"{line}; {'; '.join(loads)}" for line, loads in lines.items())


def main() -> int:
    """Measures, prints the table, and keeps all values; 1 where a run failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short look: one round")
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS, metavar="PART")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {RESULT.name}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table, to keep")
    parser.add_argument("--rounds", type=int, help=f"default {ROUNDS}")
    parser.add_argument(
        "--python", help="interpreter for all parts, in place of .venv, .venv-tf and .venv-ray"
    )
    options = parser.parse_args()
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    # A short look does not replace the result that is kept, unless it is told to.
    target = options.json or (None if options.quick else RESULT)
    parts: dict[str, dict[str, object]] = {}
    if target is not None and target.exists():
        # What is measured anew replaces its part only.
        parts = json.loads(target.read_text())["parts"]
    has_failed = False
    for name in options.only:
        rows: list[dict[str, object]] = []
        load, began = round(os.getloadavg()[0], 1), time.monotonic()
        for job in jobs(is_quick=options.quick):
            if job.part == name:
                python = options.python or job.python()
                rows += [asdict(row) for row in rows_of(job, python=python, rounds=rounds)]
        has_failed |= any(str(row["note"]).startswith("failed") for row in rows)
        parts[name] = {
            **environment(),
            "is_quick": options.quick,
            "load_before": load,
            "load_after": round(os.getloadavg()[0], 1),
            "minutes": round((time.monotonic() - began) / 60, 1),
            "rows": rows,
        }
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            document = {"schema": "stoker.engines-benchmark/v1", "parts": parts}
            target.write_text(json.dumps(document, indent=1) + "\n")
    shown = {name: parts[name] for name in PARTS if name in parts}
    tables = [row for part in shown.values() for row in part["rows"]]  # type: ignore[attr-defined]
    text = f"{headings(shown)}\n\n{markdown(tables)}\n"
    if options.markdown is not None:
        options.markdown.write_text(text)
    print(text)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
