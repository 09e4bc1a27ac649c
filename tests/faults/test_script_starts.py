"""However a script starts, its classes are those of its data hosts, whatever dies."""

import os
import textwrap
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STARTUP = Path(stoker.__file__).parent / "startup"
FED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(STARTUP),
    "STOKER_REPLACE_DATALOADER": "auto",
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
import dataclasses, json, os, pickle, sys, time
import torch
from torch.utils.data import DataLoader, Dataset

given = json.loads(sys.argv[-1])
RANK = int(os.environ.get("RANK", 0))
NOTES = ["x" * 1000] * RANK
SLEEP = given.get("sleep", 0)

def bonus():
    return 10

@dataclasses.dataclass
class Entry:
    number: int

    def value(self):
        return self.number + bonus()

def train():
    return RANK, NOTES

class Entries(Dataset):
    def __init__(self):
        self.data = [pickle.dumps(Entry(number)) for number in range(24)]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        time.sleep(SLEEP)
        found = pickle.loads(self.data[index])
        return type(found).__name__, found.value(), found

def read():
    loader = DataLoader(Entries(), batch_size=2, collate_fn=list, num_workers=1, **given["loader"])
    for epoch in range(2):
        for number, batch in enumerate(loader):
            assert all(type(entry) is Entry for _, _, entry in batch)
            print(json.dumps({"epoch": epoch, "batch": [each[:2] for each in batch]}), flush=True)
            if given.get("pauses") and epoch == 0 and number == 3:
                print(json.dumps({"pause": number}), flush=True)
                sys.stdin.readline()
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
    "runpy": (GUARDED, ["-c", "import runpy; runpy.run_path('train.py', run_name='__main__')"]),
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


def started(folder, words, **given):
    reads = str(folder / "train.py") if words == ["-"] else ""
    return {"words": words, "reads": reads, "loader": {}, **given}


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


# Others than the one that has more to import: `make soak`.
@pytest.mark.parametrize(
    "start",
    [pytest.param(start, marks=[pytest.mark.soak] * (start not in BONUSES)) for start in STARTS],
)
def test_a_script_prints_so_without_stoker(start, tmp_path):
    text, words = STARTS[start]
    write(tmp_path, text)
    given, script = started(tmp_path, words), str(tmp_path / "start.py")
    alone = run_script(given, script=script, env={"PYTHONPATH": ""})
    assert alone.finish() == batches_of(BONUSES.get(start, 10))


@pytest.mark.parametrize("start", STARTS)
def test_a_script_is_itself_on_a_data_host(start, cluster, tmp_path):
    text, words = STARTS[start]
    write(tmp_path, text)
    given, script = started(tmp_path, words), str(tmp_path / "start.py")
    fed = cluster.train(script=script, env=FED, workers=0, **given)
    assert fed.finish() == batches_of(BONUSES.get(start, 10))


LOADERS = {
    "fork": {},
    "spawn": {"multiprocessing_context": "spawn"},
    "persistent": {"persistent_workers": True},
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("workers", [0, 1], ids=["no local worker", "a local worker"])
def test_a_worker_that_is_killed_leaves_the_epoch_as_it_is(loader, workers, cluster, tmp_path):
    write(tmp_path, GUARDED)
    given = started(tmp_path, ["train.py"], loader=LOADERS[loader], sleep=0.02)
    script = str(tmp_path / "start.py")
    trainer = cluster.train(script=script, env=FED, workers=workers, pauses=True, **given)
    trainer.until("pause")
    cluster.kill_worker(0)
    cluster.kill_worker(1)
    trainer.go_on()
    assert trainer.finish() == batches_of()


def test_ranks_with_other_constants_share_a_dataset_and_any_of_them_may_send_it(tmp_path):
    write(tmp_path, GUARDED)
    script = str(tmp_path / "start.py")
    with Cluster(agents=1, workers=1) as cluster:
        cluster.wait_for_agents()
        ranks = [
            cluster.train(script=script, env=FED, workers=0, rank=rank, world=2, **given)
            for rank in range(2)
            for given in [started(tmp_path, ["train.py"])]
        ]
        found = [rank.finish() for rank in ranks]
        log = cluster.log_of(0).read_text()
    assert found[0] == found[1]
    assert len(found[0]) == 24
    assert log.count("spec_received") == 1, log
