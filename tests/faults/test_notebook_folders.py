"""From a folder of a notebook and of names that others have, each start imports as its script."""

import importlib.util
import os
from pathlib import Path

import pytest

import stoker
from support.cluster import Cluster, run_script

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

FED = {
    "STOKER_LAUNCHER_PID": str(os.getpid()),
    "PYTHONPATH": str(Path(stoker.__file__).parent / "startup"),
    "STOKER_REPLACE_DATALOADER": "auto",
}
# Starts the words that it is given in its place, in its folder.
STARTER = """
import json, os, sys
given = json.loads(sys.argv[1])
os.chdir(os.path.dirname(os.path.abspath(__file__)))
os.execv(sys.executable, [sys.executable, *given["words"], sys.argv[1]])
"""
# Of the standard library, installed with torch or stoker, and usual in projects.
NAMES = ["statistics", "fractions", "sympy", "networkx", "datasets", "utils", "evaluate", "models"]
SCRIPT = f"""
import importlib, json, os, pickle, sys
import torch
import torch.multiprocessing as mp
from torch.utils.data import DataLoader, Dataset
import {", ".join(NAMES)}

class Entry:
    def __init__(self, number):
        self.number = number

class Marks(Dataset):
    def __init__(self):
        self.data = [pickle.dumps(Entry(number)) for number in range(8)]

    def __len__(self):
        return 8

    def __getitem__(self, index):
        import lazily
        entry = pickle.loads(self.data[index])
        # The names of the script's globals, and what an import there finds.
        held = [statistics.MARK, datasets.MARK, utils.MARK, lazily.MARK]
        found = [importlib.import_module(name).MARK for name in {NAMES}]
        return type(entry) is Entry, entry.number, held, found, os.path.basename(os.getcwd())

def main(rank=0):
    for batch in DataLoader(Marks(), 4, num_workers=1, collate_fn=list):
        print(json.dumps({{"batch": batch}}), flush=True)

if __name__ == "__main__":
    mp.spawn(main, nprocs=int(os.environ.get("RANKS", "1"))) if SPAWNS else main()
"""
RUN = ("-m", "torch.distributed.run", "--nproc-per-node", "1", "--master-port", "0")
ACCELERATE = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
STARTS = {
    "python -m": ("-m", "package.train"),
    "torchrun": (*RUN, "train.py"),
    "torchrun -m": (*RUN, "-m", "package.train"),
    "accelerate launch": (*ACCELERATE, "train.py"),
    "python -m and mp.spawn": ("-m", "package.spawning"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("notebooks")
    (made / "package").mkdir()
    (made / "package" / "__init__.py").touch()
    (made / "start.py").write_text(STARTER)
    (made / "train.ipynb").write_text('{"cells": [], "metadata": {}, "nbformat": 4}')
    for name in [*NAMES, "lazily"]:
        (made / f"{name}.py").write_text(f"MARK = 'own {name}'\n")
    for place in (made, made / "package"):
        for name, spawns in (("train", False), ("spawning", True)):
            (place / f"{name}.py").write_text(SCRIPT.replace("SPAWNS", str(spawns)))
    return made


@pytest.fixture(scope="module")
def cluster():
    with Cluster(agents=2, workers=1) as made:
        made.wait_for_agents()
        yield made


def batches_of(folder):
    """Returns what a rank prints where each import finds the folder's own file."""
    held = [f"own {name}" for name in ("statistics", "datasets", "utils", "lazily")]
    marks = [f"own {name}" for name in NAMES]
    samples = [[True, number, held, marks, folder.name] for number in range(8)]
    return [{"batch": samples[:4]}, {"batch": samples[4:]}]


def test_a_script_prints_so_alone(folder):
    given, script = {"words": ("train.py",)}, str(folder / "start.py")
    alone = run_script(given, script=script, env={"PYTHONPATH": ""})
    assert alone.finish() == batches_of(folder)


# Two ranks show the same of these.
OF_TWO = {"torchrun", "torchrun -m", "python -m and mp.spawn"}


@pytest.mark.parametrize(
    "start", [pytest.param(start, marks=[pytest.mark.soak] * (start in OF_TWO)) for start in STARTS]
)
def test_a_start_from_a_notebooks_folder_is_fed_what_its_script_imports(start, folder, cluster):
    if "accelerate" in start and importlib.util.find_spec("accelerate") is None:
        pytest.skip("no accelerate here: make test-libraries")
    given, script = {"words": STARTS[start]}, str(folder / "start.py")
    found = cluster.train(script=script, env=FED, workers=0, **given)
    assert found.finish() == batches_of(folder)
    assert "made_here" not in found.errors


TWO = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0")
OF_TWO_RANKS = {
    "torchrun": (*TWO, "train.py"),
    "torchrun -m": (*TWO, "-m", "package.train"),
    "mp.spawn": ("spawning.py",),
    "python -m and mp.spawn": ("-m", "package.spawning"),
}


def in_any_order(lines):
    return sorted(map(str, lines))


# As a module each start does what it does as a script, and has a package around it.
AS_MODULES = {"torchrun -m", "python -m and mp.spawn"}


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(start, marks=[pytest.mark.soak] * (start not in AS_MODULES))
        for start in OF_TWO_RANKS
    ],
)
def test_two_ranks_from_a_notebooks_folder_are_fed_what_their_script_imports(
    start, folder, cluster
):
    script, given = str(folder / "start.py"), {"words": OF_TWO_RANKS[start]}
    ranks = {"RANKS": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    # Both ranks have the same.
    expected = in_any_order(2 * batches_of(folder))
    before = sessions(cluster)
    trainer = cluster.train(script=script, env=ranks | FED, workers=0, **given)
    assert in_any_order(trainer.finish()) == expected
    assert "made_here" not in trainer.errors
    assert sessions(cluster) > before


def sessions(cluster):
    return sum(cluster.log_of(number).read_text().count("session_opened") for number in range(2))
