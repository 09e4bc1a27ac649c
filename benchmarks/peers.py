"""Measures what a step costs over the bound: stoker's remote feed next to other loaders.

    python benchmarks/peers.py [--quick] [--only CASE ...] [--python ENV/bin/python]

The cases are feed.py's with 4 workers. benchmarks/README.md says what each loader is, and how to
set up an interpreter that has them all.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from feed_overhead import case_of
from measuring import (
    HERE,
    Row,
    can_import,
    environment,
    markdown,
    points,
    rotated,
    say,
    spread,
    trained,
)

CASES = ("even", "exponential", "straggler")
# As the chart names them, and as feed_trainer.py does.
LOADERS = {
    "stoker": "stoker encrypted",
    "torch": "torch local",
    "grpc": "grpc protobuf",
    "tf.data service": "tf.data service",
    "ray data": "ray data",
}
MODULES = {"torch": "torch", "grpc": "grpcio", "tensorflow": "tensorflow_cpu", "ray": "ray"}
WORKERS = 4
# Ray's processes are still starting, and take both cores, when the first batches are there.
WARMUP = 100
RESULT = HERE / "results" / "peers.json"
PYTHON = HERE.parent / ".venv-peers" / "bin" / "python"


@dataclass(slots=True)
class Seen:
    """One loader reached this in one case, a value per repetition."""

    excess: list[float] = field(default_factory=list)
    is_in_order: bool = True


Found = dict[str, dict[str, Seen]]


def measure_once(name: str, seen: dict[str, Seen], *, is_quick: bool, python: str) -> None:
    """Runs one repetition of a case: all loaders, in an order that rotates."""
    case = case_of(name, workers=WORKERS, is_quick=is_quick)
    if not is_quick:
        case = replace(case, warmup=WARMUP)
    found = {}
    for loader in rotated(tuple(LOADERS), len(seen["stoker"].excess)):
        found[loader] = trained(LOADERS[loader], case, python=python)
        excess = 100 * (found[loader]["step_seconds"] / case.bound_seconds() - 1)
        found[loader]["excess"] = excess
        say(f"{name} {loader}: {excess:+.1f}%")
    for loader, figures in found.items():
        seen[loader].excess.append(round(figures["excess"], 2))
        seen[loader].is_in_order &= bool(figures["is_in_order"])


def as_json(found: Found) -> list[dict[str, object]]:
    return [
        {
            "case": name,
            "workers": WORKERS,
            "loader": loader,
            "overhead_percent": seen.excess,
            "median": round(statistics.median(seen.excess), 2),
            "order_kept": seen.is_in_order,
        }
        for name in CASES
        for loader, seen in found[name].items()
        if seen.excess
    ]


def table(found: Found) -> str:
    return markdown(
        [
            Row(
                part=name,
                case=f"{name}, k={WORKERS}",
                loader=loader,
                figure="% over the bound",
                value=spread(seen.excess),
                comparisons=()
                if loader == "stoker"
                else (points(seen.excess, loaders["stoker"].excess, beside="stoker"),),
                note="" if seen.is_in_order else "order lost",
            )
            for name, loaders in found.items()
            for loader, seen in loaders.items()
            if seen.excess
        ]
    )


def kept(target: Path | None, *, commit: object) -> Found:
    """Returns what the file has of this commit: a run that was cut off goes on there."""
    found: Found = {name: {loader: Seen() for loader in LOADERS} for name in CASES}
    if target is None or not target.exists():
        return found
    before = json.loads(target.read_text())
    for row in before["rows"] if before["commit"] == commit else ():
        found[row["case"]][row["loader"]] = Seen(row["overhead_percent"], row["order_kept"])
    return found


def versions(python: str) -> dict[str, str]:
    """Returns versions of the libraries next to stoker, in the interpreter that runs them."""
    code = "import json,sys;from importlib.metadata import version as v;"
    code += "print(json.dumps({n: v(n) for n in sys.argv[1:]}))"
    command = [python, "-c", code, *MODULES.values()]
    found: dict[str, str] = json.loads(subprocess.run(command, capture_output=True).stdout)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a short look: one repetition")
    parser.add_argument("--only", nargs="+", default=CASES, choices=CASES, metavar="CASE")
    parser.add_argument("--json", type=Path, metavar="FILE", help=f"default: {RESULT.name}")
    parser.add_argument("--repetitions", type=int, help="of each case in all, default 3")
    parser.add_argument("--python", default=str(PYTHON), help="has TensorFlow, grpcio and Ray")
    arguments = parser.parse_args()
    missing = [each for each in MODULES if not can_import(each, arguments.python)]
    if missing:
        print(f"error: {arguments.python} has no {', '.join(missing)}", file=sys.stderr)
        print("try:   make .venv-peers/.installed", file=sys.stderr)
        return 2
    about = environment()
    target = arguments.json or (None if arguments.quick else RESULT)
    found = kept(target, commit=about["commit"])
    for count in range(1, 1 + (arguments.repetitions or (1 if arguments.quick else 3))):
        for name in arguments.only:
            if len(found[name]["stoker"].excess) >= count:
                continue
            measure_once(name, found[name], is_quick=arguments.quick, python=arguments.python)
            if target is not None:
                document = {
                    "schema": "stoker.peers-benchmark/v1",
                    "machine": f"{about['cores']} cores of an {about['cpu']}, {about['system']}",
                    "date": about["date"],
                    "commit": about["commit"],
                    "is_modified": about["is_modified"],
                    "command": "python benchmarks/peers.py",
                    "versions": versions(arguments.python),
                    "rows": as_json(found),
                }
                target.write_text(json.dumps(document, indent=1) + "\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
