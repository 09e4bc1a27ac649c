"""However a script starts, its classes are those of its data hosts, whatever dies."""

import os
import textwrap
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.timeout(300)]


STARTUP = Path(stoker.__file__).parent / "startup"


FED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(STARTUP),
    "RUN_REPLACE_DATALOADER": "true",
}


# Starts the words that it is given in its place.
STARTER = """
import json, os, sys
given = json.loads(sys.argv[1])
os.chdir(os.path.dirname(os.path.abspath(__file__)))
if given.get("reads"):
    os.dup2(os.open(given["reads"], os.O_RDONLY), 0)
os.execv(sys.executable, [sys.executable, *given["words"], sys.argv[1]])
"""


SCRIPT = """
import dataclasses, json
import torch
from torch.utils.data import DataLoader, Dataset

def bonus():
    return 10

@dataclasses.dataclass
class Entry:
    number: int

    def value(self):
        return self.number + bonus()

class Entries(Dataset):
    def __init__(self):
        self.data = [Entry(number) for number in range(24)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        found = self.data[index]
        return type(found).__name__, found.value(), found

def read():
    loader = DataLoader(Entries(), batch_size=2, collate_fn=list, num_workers=1)
    for epoch in range(2):
        for batch in loader:
            assert all(type(entry) is Entry for _, _, entry in batch)
            print(json.dumps({"epoch": epoch, "batch": [each[:2] for each in batch]}), flush=True)
"""


GUARDED = f"{SCRIPT}\nif __name__ == '__main__':\n    read()\n"


BARE = f"{SCRIPT}\nread()\n"


IN_PACKAGE = GUARDED.replace(
    "def bonus():\n    return", "def bonus():\n    from .parts import more\n    return more +"
)


STARTS = {
    "a guarded script": (GUARDED, ["train.py"]),
    "a script without a guard": (BARE, ["train.py"]),
    "python -m package.module": (IN_PACKAGE, ["-m", "package.train"]),
    "standard input, as a notebook without a file": (BARE, ["-"]),
}


# What their entries add to their numbers, where that is not 10.
BONUSES = {"python -m package.module": 15}


def write(folder, text):
    (folder / "start.py").write_text(STARTER)
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    (folder / "package" / "parts.py").write_text("more = 5\n")
    for name in ("train.py", "package/train.py"):
        (folder / name).write_text(textwrap.dedent(text))


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2, workers=1) as made:
        made.wait_for_agents()
        yield made


def batches_of(bonus=10):
    """Returns what a script prints, and prints without stoker."""
    return [
        {"epoch": epoch, "batch": [["Entry", number + bonus], ["Entry", number + 1 + bonus]]}
        for epoch in range(2)
        for number in range(0, 24, 2)
    ]


@pytest.mark.parametrize("start", STARTS)
def test_a_script_is_itself_on_a_data_host(start, cluster, tmp_path):
    text, words = STARTS[start]
    write(tmp_path, text)
    given = {"words": words, "reads": str(tmp_path / "train.py") if words == ["-"] else ""}
    fed = cluster.train(script=str(tmp_path / "start.py"), env=FED, workers=0, **given)
    assert fed.finish() == batches_of(BONUSES.get(start, 10))
