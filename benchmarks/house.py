"""Counts the house beside five others: figures, and what a batch and a decision cross on their way.

    python benchmarks/house.py [--source DIR] [--count DIR [--without NAME]] [--json] [--ways]
    python benchmarks/house.py --hold

`--source` is the folder that holds the package (default: this checkout's `src`); `--count` is
another project's package, counted by the same rules (tests/support/house_counts.py). `--ways`
walks for real: a training run of a few batches on one core with one data host, and a plan for each
platform, while every function that is called is noted (`sys.setprofile`). A plan's *stays* are
functions in a row of one module, in the order of their first calls within `Platform.plan`; a
*return* is a stay in a module that the plan had left. Properties are part of a value, and no call.
`--hold` lowers what tests/unit/test_house.py allows to what there is now, and raises nothing.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support.house_counts import (  # noqa: E402
    complex_functions,
    count_house,
    figures_of,
    files_of,
    heavy_functions,
)

Column = dict[str, float]

HELD = ROOT / "tests" / "data" / "house.json"
# What the house is on its way to, and five projects counted by the same rules, with their commits.
COMPARED = json.loads((ROOT / "benchmarks" / "results" / "house.json").read_text())
GOALS: Column = COMPARED["goal"]
ANCHORS: dict[str, Column] = COMPARED["anchors"]
ROWS = list(ANCHORS["httpx"])
# Notes each function of the package that is called, in the order of first calls, in all processes
# and threads. HOUSE_WITHIN names a function: only what it calls, then, and no properties.
WALKER = """
import inspect, os, sys, threading
_file, _root = os.environ["HOUSE_FILE"], os.environ["HOUSE_ROOT"]
_within = os.environ["HOUSE_WITHIN"]
_seen, _depth = {}, [0]
def _is_property(frame):
    owner = type(frame.f_locals.get("self"))
    member = inspect.getattr_static(owner, frame.f_code.co_name, None)
    return isinstance(member, property)
def _note(frame, event, argument):
    code = frame.f_code
    if code.co_qualname == _within and event in ("call", "return"):
        _depth[0] += 1 if event == "call" else -1
    elif event == "call" and code not in _seen:
        if _within and (not _depth[0] or _is_property(frame)):
            return
        _seen[code] = True
        if code.co_flags & 1 and code.co_filename.startswith(_root):  # a function
            descriptor = os.open(_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            line = f"{code.co_filename[len(_root) + 1:]} {code.co_qualname}\\n"
            os.write(descriptor, line.encode())
            os.close(descriptor)
sys.setprofile(_note)
threading.setprofile(_note)
"""
SCRIPT = """
import torch
from stoker import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((3,), float(index))

for batch in DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=1):
    pass
"""
# Names for the placeholders of the example.
ROLE = "arn:aws:iam::123456789012:role/stoker"
NAMES = {
    "image": "123456789012.dkr.ecr.eu-west-1.amazonaws.com/stoker:mnist",
    "channels.training.uri": "s3://bucket/mnist/",
    "sagemaker.role": ROLE,
    "sagemaker.pipeline_role": ROLE,
    "sagemaker.schedule_role": ROLE,
    "sagemaker.output_uri": "s3://bucket/stoker",
    "sagemaker.control": f"{{instance_type: ml.t3.medium, role: '{ROLE}'}}",
}
PLANS = {
    "local": ["configs/mnist.yaml", "--group", "dnn=local.c1:1"],
    "sagemaker": [
        "configs/mnist-sagemaker.yaml",
        *(f"--set={key}={value}" for key, value in NAMES.items()),
        *("--group", "dnn=ml.g5.2xlarge:1", "--group", "data=ml.c6i.4xlarge:2"),
    ],
    "kubernetes": [
        *("configs/mnist-kubeflow.yaml", "--set", "image=registry.example/stoker:mnist"),
        *("--group", "dnn=gpu:1", "--group", "data=cpu:2"),
    ],
}
PLANNERS = {
    "local": "LocalPlatform",
    "sagemaker": "SageMakerPlatform",
    "kubernetes": "KubernetesPlatform",
}


def walked(source: Path, *arguments: str, folder: Path, within: str = "") -> list[tuple[str, str]]:
    """Runs `stoker ARGUMENTS`; returns file and name of the functions that were called, in order.

    Args:
        source: The folder that holds the package.
        arguments: Words of the command line.
        folder: For files of the walk.
        within: Name of a function: only what it calls counts, and no property.
    """
    site, notes = folder / "site", folder / "notes"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(WALKER)
    notes.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(source)]),
        "HOUSE_FILE": str(notes),
        "HOUSE_ROOT": str(source),
        "HOUSE_WITHIN": within,
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "stoker.cli", *arguments]
    done = subprocess.run(
        command, env=environ, cwd=source.parent, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    lines = [line.partition(" ") for line in notes.read_text().splitlines()]
    return [(file, name) for file, _, name in lines]


def returns_of(calls: list[tuple[str, str]]) -> int:
    """Counts the stays in modules that had been left."""
    # A comprehension is read with its function.
    modules = [module for module, name in calls if not name.endswith(">")]
    stays = [module for module, _ in itertools.groupby(modules)]
    return len(stays) - len(set(stays))


def ways(source: Path) -> Column:
    """Counts the modules and classes on the way of a batch, and the modules of a decision."""
    counts: Column = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        groups = ("--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1")
        out = ("--out", str(folder / "run"))
        script = (sys.executable, str(folder / "train.py"))
        calls = walked(source, "train", *groups, *out, "--", *script, folder=folder)
        feed = [(file, name.split(".")[0]) for file, name in calls if "/feed/" in f"/{file}"]
        counts["modules of feed on a batch's way"] = len({file for file, _ in feed})
        classes = {(file, name) for file, name in feed if name.lstrip("_")[:1].isupper()}
        counts["classes of feed on a batch's way"] = len(classes)
        for platform, plan in PLANS.items():
            plan_out = ("--out", str(folder / platform))
            arguments = ("train", *plan, "--dry-run", *plan_out)
            calls = walked(source, *arguments, folder=folder)
            counts[f"modules of a plan: {platform}"] = len({module for module, _ in calls})
            within = f"{PLANNERS[platform]}.plan"
            calls = walked(source, *arguments, folder=folder, within=within)
            counts[f"returns of a plan: {platform}"] = returns_of(calls)
    return counts


def measured(package: Path, *, without: list[str]) -> Column:
    """Counts a package, in a few seconds.

    Args:
        package: Its folder.
        without: Names of folders in it that are left out.
    """
    counts = count_house(files_of(package, without=without))
    lists = heavy_functions(counts) | complex_functions(package, counts.functions)
    return figures_of(counts) | {rule: len(names) for rule, names in lists.items()}


def hold(package: Path) -> None:
    """Lowers what tests/data/house.json allows to what the package has today; never raises it."""
    held = json.loads(HELD.read_text())
    counts = count_house(files_of(package))
    figures = figures_of(counts)
    for name, ceiling in held["at most"].items():
        held["at most"][name] = min(ceiling, figures[name])
    for name, floor in held["at least"].items():
        held["at least"][name] = max(floor, figures[name])
    lists = heavy_functions(counts) | complex_functions(package, counts.functions)
    for rule, allowed in held["functions"].items():
        still_breaking = Counter(allowed) & Counter(lists[rule])
        held["functions"][rule] = sorted(still_breaking.elements())
    HELD.write_text(json.dumps(held, indent=2) + "\n")


def table(columns: dict[str, Column]) -> str:
    """Returns the figures as a table: a row a figure, a column a package."""
    rows = ["figure", *ROWS]
    text = [f"{row:<42}" for row in rows]
    for title, column in columns.items():
        cells = [title, *(shown(column.get(row)) for row in ROWS)]
        width = max(map(len, cells))
        text = [f"{line}  {cell:>{width}}" for line, cell in zip(text, cells, strict=True)]
    return "\n".join(text)


def shown(figure: float | None) -> str:
    if figure is None:
        return "-"
    return f"{figure:,}"


def main() -> None:
    """Prints the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder of the package")
    parser.add_argument(
        "--count", type=Path, action="append", default=[], help="another package, to count beside"
    )
    parser.add_argument(
        "--without", action="append", default=[], help="a folder of it to leave out"
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--ways", action="store_true", help="walk a batch's and a decision's way")
    parser.add_argument("--hold", action="store_true", help="lower what the house test allows")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    if arguments.hold:
        hold(source / "stoker")
        return
    columns = {"stoker": measured(source / "stoker", without=[])}
    if arguments.ways:
        columns["stoker"] |= ways(source)
    for package in arguments.count:
        columns[package.name] = measured(package, without=arguments.without)
    if arguments.json:
        print(json.dumps(columns, indent=2))
        return
    print(table(columns | {"goal": GOALS} | ANCHORS))
    for name in [row for row in columns["stoker"] if row not in ROWS]:
        print(f"{name:<42}  {columns['stoker'][name]}")


if __name__ == "__main__":
    main()
