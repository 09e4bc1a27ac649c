"""What a step costs over the bound: stoker's remote feed beside what others feed a training with.

    python benchmarks/peers.py [--quick] [--only CASE ...] [--python ENV/bin/python]

The cases are feed.py's with 4 workers. benchmarks/README.md says what each loader is, and how to
set up an interpreter that has them all.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from feed_overhead import case_of
from measuring import HERE, can_import, environment, rotated, say, spread, trained
from rows import Row, markdown, points

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


def rows_of(name: str, *, repetitions: int, is_quick: bool, python: str) -> list[Row]:
    """The rows of one case; in each repetition its loaders run in another order."""
    case = case_of(name, workers=WORKERS, is_quick=is_quick)
    if not is_quick:
        case = replace(case, warmup=WARMUP)
    excess: dict[str, list[float]] = {loader: [] for loader in LOADERS}
    is_in_order = dict.fromkeys(LOADERS, True)
    for turn in range(repetitions):
        for loader in rotated(tuple(LOADERS), turn):
            found = trained(LOADERS[loader], case, python=python)
            excess[loader].append(100 * (found["step_seconds"] / case.bound_seconds() - 1))
            is_in_order[loader] &= bool(found["is_in_order"])
            say(f"{name} {loader}: {excess[loader][-1]:+.1f} %")
    return [
        Row(
            part=name,
            case=f"{name}, k={WORKERS}",
            loader=loader,
            figure="% over the bound",
            value=spread(values),
            comparisons=()
            if loader == "stoker"
            else (points(values, excess["stoker"], beside="stoker"),),
            details={"order_kept": is_in_order[loader]},
            note="" if is_in_order[loader] else "order lost",
        )
        for loader, values in excess.items()
    ]


def chart_row(row: Row) -> dict[str, object]:
    """The row as results/peers.json has it."""
    assert row.value is not None
    return {
        "case": row.part,
        "workers": WORKERS,
        "loader": row.loader,
        "overhead_percent": row.value["values"],
        "median": row.value["median"],
        **row.details,
    }


def kept(target: Path, *, commit: object, without: list[str]) -> list[dict[str, object]]:
    """Rows of the file, of other cases that were measured at the same commit."""
    if not target.exists():
        return []
    before = json.loads(target.read_text())
    if before["commit"] != commit:
        return []
    return [row for row in before["rows"] if row["case"] not in without]


def versions(python: str) -> dict[str, str]:
    """Of the libraries beside stoker, in the interpreter that runs them."""
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
    parser.add_argument("--repetitions", type=int, help="default 3")
    parser.add_argument("--python", default=str(PYTHON), help="has TensorFlow, grpcio and Ray")
    arguments = parser.parse_args()
    missing = [each for each in MODULES if not can_import(each, arguments.python)]
    if missing:
        print(f"error: {arguments.python} has no {', '.join(missing)}", file=sys.stderr)
        print("try:   make .venv-peers/.installed", file=sys.stderr)
        return 2
    about = environment()
    target = arguments.json or (None if arguments.quick else RESULT)
    rows: list[Row] = []
    for name in arguments.only:
        rows += rows_of(
            name,
            repetitions=arguments.repetitions or (1 if arguments.quick else 3),
            is_quick=arguments.quick,
            python=arguments.python,
        )
    print(markdown(rows))
    if target is not None:
        old = kept(target, commit=about["commit"], without=arguments.only)
        found = [*old, *map(chart_row, rows)]
        document = {
            "schema": "stoker.peers-benchmark/v1",
            "machine": f"{about['cores']} cores of an {about['cpu']}, {about['system']}",
            "date": about["date"],
            "commit": about["commit"],
            "is_modified": about["is_modified"],
            "command": "python benchmarks/peers.py",
            "versions": versions(arguments.python),
            "rows": sorted(found, key=lambda row: CASES.index(str(row["case"]))),
        }
        target.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
