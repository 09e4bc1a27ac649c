"""Measures the feed next to the alternatives: one JSON, and one table.

    python benchmarks/feed.py [--quick] [--only PART ...] [--markdown FILE] [--json FILE]

benchmarks/README.md says how to read each figure.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import feed_cpu
import feed_crowd
import feed_job
import feed_overhead
import feed_ranks
from measuring import HERE, Row, environment, markdown

PARTS = ("even", "exponential", "straggler", "cpu", "flat", "mnist", "ranks", "crowd")
RESULT = HERE / "results" / "feed.json"


def rows_of(part: str, arguments: argparse.Namespace) -> Iterator[Row]:
    repetitions = arguments.repetitions or (1 if arguments.quick else 5)
    if part == "cpu":
        return feed_cpu.rows(
            repetitions=repetitions, is_quick=arguments.quick, python=arguments.python
        )
    if part == "flat":
        return feed_cpu.flat_rows(repetitions=repetitions, is_quick=arguments.quick)
    if part == "mnist":
        return feed_job.rows(repetitions=repetitions, is_quick=arguments.quick)
    if part == "ranks":
        return feed_ranks.rows(repetitions=repetitions, is_quick=arguments.quick)
    if part == "crowd":
        return feed_crowd.rows(is_quick=arguments.quick)
    return feed_overhead.rows(
        part,
        repetitions=repetitions,
        is_quick=arguments.quick,
        ks=arguments.workers,
        one_worker_hosts=arguments.hosts,
    )


def heading(about: dict[str, object]) -> str:
    """Says where and when it was measured, in front of the table."""
    before, after = about["load_before"], about["load_after"]
    modified = " (modified)" if about["is_modified"] else ""
    return (
        f"{about['date']}, commit {about['commit']}{modified}; {about['cpu']}, {about['cores']} "
        f"cores, load {before} before and {after} after; torch {about['torch']}; "
        f"{about['minutes']} minutes; stoker's workers: {about['data_hosts']}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short look: one repetition")
    parser.add_argument(
        "--only",
        nargs="+",
        default=PARTS,
        choices=PARTS,
        metavar="PART",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {RESULT.name}")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="the table, to keep")
    parser.add_argument("--repetitions", type=int, help="default 5")
    parser.add_argument("--workers", type=int, nargs="+", default=(), metavar="K")
    parser.add_argument(
        "--hosts", action="store_true", help="overhead: k data hosts of 1 worker, not 1 of k"
    )
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has grpcio and ray"
    )
    arguments = parser.parse_args()
    load_before = round(os.getloadavg()[0], 1)
    started = time.monotonic()
    rows: list[Row] = []
    minutes: dict[str, float] = {}
    failures: dict[str, str] = {}
    for part in arguments.only:
        begun = time.monotonic()
        try:
            rows += list(rows_of(part, arguments))
        except (OSError, RuntimeError, subprocess.SubprocessError) as err:
            # The other parts are not lost for it; a part of which some is missing is not shown.
            failures[part] = f"{type(err).__name__}: {err}"
            print(f"error: part {part} failed: {failures[part]}", file=sys.stderr, flush=True)
        minutes[part] = round((time.monotonic() - begun) / 60, 1)
    about: dict[str, object] = {
        **environment(),
        "load_before": load_before,
        "load_after": round(os.getloadavg()[0], 1),
        "minutes": round((time.monotonic() - started) / 60, 1),
        "minutes_by_part": minutes,
        "failures": failures,
        "is_quick": arguments.quick,
        "data_hosts": "k hosts x 1 worker" if arguments.hosts else "1 host x k workers",
    }
    document = {"schema": "stoker.feed-benchmark/v1", **about, "rows": [r.as_dict() for r in rows]}
    text = f"{heading(about)}\n\n{markdown(rows)}\n"
    # A short look does not replace the result that is kept, unless it is told to.
    is_whole = not arguments.quick and set(arguments.only) == set(PARTS)
    target = arguments.json or (RESULT if is_whole else None)
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(document, indent=1) + "\n")
    if arguments.markdown is not None:
        arguments.markdown.write_text(text)
    print(text)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
