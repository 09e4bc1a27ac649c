"""Counts the house: files, lines, names, and what a batch and a decision cross on their way.

    python benchmarks/house.py [--source DIR] [--static]

`DIR` is the folder that holds the package (default: this checkout's `src`); another checkout's
`src` can be counted by the same script. The ways are walked for real: a training of a few batches
on one core with one data host, and a plan for each platform, while every function that is called
is noted (`sys.setprofile`).
"""

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef

# Notes each (file, class) of the package whose function is called, in all processes and threads.
WALKER = """
import os, sys, threading
_file, _root = os.environ["HOUSE_FILE"], os.environ["HOUSE_ROOT"]
_seen = {}
def _note(frame, event, argument):
    code = frame.f_code
    if event == "call" and code not in _seen:
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


def lines_of(text: str) -> Counter[str]:
    """Counts lines of code, of docstrings, of comments alone, and empty ones."""
    tree = ast.parse(text)
    documents: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            documents |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
    }
    kinds: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        if number in documents:
            kinds["docstrings"] += 1
        elif number in comments:
            kinds["comments"] += 1
        else:
            kinds["code" if line.strip() else "empty"] += 1
    return kinds


def counted(package: Path) -> dict[str, object]:
    """Counts what needs no walk."""
    files = sorted(package.rglob("*.py"))
    lines: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    names: Counter[str] = Counter()
    private: list[str] = []
    documented = 0
    for file in files:
        text = file.read_text()
        lines += lines_of(text)
        tree = ast.parse(text)
        calls = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] += 1
            if isinstance(node, FUNCTIONS) and re.match("_[^_]", node.name):
                private.append("once" if calls[node.name] == 1 else "more")
            documented += bool(isinstance(node, DOCUMENTED) and ast.get_docstring(node))
        if file.name not in {"__init__.py", "__main__.py"}:
            names[file.name] += 1
    lengths = sorted(len(file.read_text().splitlines()) for file in files)
    return {
        "files": len(files),
        "lines": sum(lengths),
        **{f"lines of {kind}": lines[kind] for kind in ("code", "docstrings", "comments")},
        "median file, longest": [lengths[len(lengths) // 2], lengths[-1]],
        "classes": sum(classes.values()),
        "class names that occur twice": sum(count > 1 for count in classes.values()),
        "file names that occur twice": sum(count > 1 for count in names.values()),
        "private functions": len(private),
        "private functions used once": private.count("once"),
        "docstrings": documented,
    }


def walked(source: Path, *arguments: str, folder: Path) -> list[tuple[str, str]]:
    """Runs `stoker ARGUMENTS`; returns file and name of each of its functions that was called."""
    site, notes = folder / "site", folder / "notes"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(WALKER)
    notes.unlink(missing_ok=True)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), str(source)]),
        "HOUSE_FILE": str(notes),
        "HOUSE_ROOT": str(source),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "stoker.cli", *arguments]
    done = subprocess.run(
        command, env=environ, cwd=source.parent, capture_output=True, text=True, timeout=300
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stderr}")
    return sorted({tuple(line.split(" ", 1)) for line in notes.read_text().splitlines()})  # type: ignore[misc]


def ways(source: Path) -> dict[str, object]:
    """Counts the modules and classes on the way of a batch, and the modules of a decision."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        groups = ("--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1")
        out = ("--out", str(folder / "run"))
        script = (sys.executable, str(folder / "train.py"))
        calls = walked(source, "train", *groups, *out, "--", *script, folder=folder)
        feed = [(file, name.split(".")[0]) for file, name in calls if "/feed/" in f"/{file}"]
        found["modules of feed on a batch's way"] = len({file for file, _ in feed})
        classes = {(file, name) for file, name in feed if name.lstrip("_")[:1].isupper()}
        found["classes of feed on a batch's way"] = len(classes)
        for platform, plan in PLANS.items():
            plan_out = ("--out", str(folder / platform))
            calls = walked(source, "train", *plan, "--dry-run", *plan_out, folder=folder)
            found[f"modules of a plan: {platform}"] = len({module for module, _ in calls})
    return found


def main() -> None:
    """Prints the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="folder of the package")
    parser.add_argument("--static", action="store_true", help="count only, walk no way")
    asked = parser.parse_args()
    source = asked.source.resolve()
    found = counted(source / "stoker")
    if not asked.static:
        found |= ways(source)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
