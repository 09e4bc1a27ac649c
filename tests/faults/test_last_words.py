"""The last words of `stoker train` name why a training was not fed, and what to do."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.command import stoker

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(300)]

HEAD = """
import os, shutil, signal, socket, sys, types
import torch
from torch.utils.data import DataLoader, Dataset

HERE = os.path.dirname(os.path.abspath(__file__))

class Base(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.rand(4)

class Rebuilt(Base):
    def __getstate__(self):
        return {"a": 1}

def in_memory(name, text):
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(text, vars(module))
    for value in vars(module).values():
        if isinstance(value, type):
            value.__module__ = name
    return module

def batches(dataset, **more):
    return DataLoader(dataset, **{"batch_size": 4, "num_workers": 1, **more})

def train(loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for batch in loader:
        model(getattr(batch, "x", batch)).sum().backward()
        optimizer.step()
"""
TENSORS = "(torch.rand(4) for _ in range(64))"
CASES: dict[str, tuple[str, Sequence[str]]] = {
    "a file": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        open('/no/such/index.bin')\ntrain(batches(D()))",
        ["FileNotFoundError", "/no/such/index.bin"],
    ),
    "a dataset process that is killed": (
        "class D(Rebuilt):\n    def __setstate__(self, state):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\ntrain(batches(D()))",
        ["the process that reads the dataset died", "memory"],
    ),
    "a dataset that cannot be pickled": (
        "import stoker\nclass D(Base):\n    def __init__(self): self.parts = (i for i in [1])\n"
        "train(stoker.DataLoader(D(), batch_size=4))",
        ["cannot send dataset.parts (builtins.generator)"],
    ),
    "no loader": (f"train{TENSORS}", ["no batch of a loader of torch or stoker was read"]),
}


def last_words(
    folder: Path,
    script: str,
    *settings: str,
    command: Sequence[str] = ("python", "script.py"),
    dnn: str = "local.c1:1",
    data: int = 1,
) -> list[str]:
    """Returns what `stoker train` printed, the words of the hosts' own logs left out."""
    (folder / "script.py").write_text(HEAD + script)
    groups = ["--group", f"dnn={dnn}", "--group", f"data=local.c1:{data}"]
    sets = [word for each in ("feed.local_workers=0", *settings) for word in ("--set", each)]
    # The verb runs here, its hosts as processes: they are what fails.
    done = stoker("train", *groups, *sets, "--", *command, cwd=folder)
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    return [line for line in lines if not line.startswith(("dnn/", "data/"))]


def end_of(lines: Sequence[str]) -> str:
    """Returns the line that says how the training ended."""
    ended = [line for line in lines if line.startswith("training ") or " steps of " in line]
    assert len(ended) == 1, "\n".join(lines)
    return ended[0]


@pytest.mark.parametrize("name", CASES)
def test_the_cause_and_the_remedy_are_in_the_last_words(name, tmp_path):
    script, words = CASES[name]
    lines = last_words(tmp_path, script)
    ended = end_of(lines)
    assert [word for word in words if word not in ended] == []
    # The same words in the record, so in the report and the webhook.
    (record,) = tmp_path.glob("runs/*/training.json")
    document = json.loads(record.read_text())
    told = str(document.get("failure")) + str(document.get("events"))
    assert [word for word in words if word not in told] == []
