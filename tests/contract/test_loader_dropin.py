"""What seeds stoker's loaders, and which are stoker's; the rest: keel/test_dropin_claims.py."""

import json
import os
from pathlib import Path

import pytest

from stoker.launch.job_environment import STARTUP_DIR
from support.run_file import in_run
from support.warm_python import run_code, run_warm

# Seeding: what a batch or a sample is made of, and what it is not.

SAMPLES = """
import json, torch, stoker
from support.dropin_claims import Each, content, draws, same

def samples(given):
    torch.manual_seed(11)
    dataset = Each(lambda i: (i, draws(i)), 99)
    loader = stoker.DataLoader(dataset, collate_fn=same, **given.get("loader", {}))
    found = []
    for epoch in range(given.get("epochs", 1)):
        for batch in loader:
            found += [[epoch, *sample] for sample in batch]
    return found
"""


def samples(seeding: str, *, rank: int = 0, world: int = 1, **given: object) -> list[list[object]]:
    """Returns epoch, index and draws of each sample, in order, as another process has them."""
    env = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    env["RUN_FEED"] = json.dumps({"seeding": seeding})
    code = f"{SAMPLES}\nprint(json.dumps(samples({given!r})))"
    found: list[list[object]] = json.loads(run_code(code, **env))
    return found


def test_batch_seeding_makes_replicas_differ_and_survives_other_workers():
    options: dict[str, object] = {"sampler": list(range(6)), "batch_size": 2}
    first = samples("batch", loader=options, epochs=2)
    assert samples("batch", loader=options | {"num_workers": 2}, epochs=2) == first
    other = samples("batch", rank=1, world=2, loader=options, epochs=2)
    assert not {str(one[2]) for one in first} & {str(one[2]) for one in other}


# --replace-dataloader: scripts that never heard of stoker.

VARIABLES = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
VARIABLES |= {"PYTHONPATH": str(STARTUP_DIR), "STOKER_LAUNCHER_PID": str(os.getpid())}


def unaware(tmp_path: Path, text: str, **env: str) -> tuple[int, str]:
    script = tmp_path / "unaware.py"
    script.write_text(f"import warnings; warnings.simplefilter('error')\n{text}")
    return run_warm([str(script)], in_run(VARIABLES | env), timeout=100)


# replace_dataloader: true, as `stoker train` has it unless somebody says otherwise.
AUTOMATIC = """
import torch
import torch.utils.data
from stoker.feed.replace import install
install(torch.utils.data.DataLoader)
from torch.utils.data import DataLoader

class Mine(DataLoader):
    pass

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        # A loader inside a worker is a part of the sample that it makes.
        return type(iter(DataLoader([1, 2]))).__module__

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([1, 2])

def kinds():
    return {type(iter(each)).__module__ for each in (DataLoader([1, 2]), Mine([1, 2]))}
"""
IN_WORKERS = """
if __name__ == "__main__":
    options = dict(num_workers=1, persistent_workers=True, timeout=60, worker_init_fn=print)
    options |= dict(batch_sampler=torch.utils.data.BatchSampler(range(2), 2, False))
    loader = DataLoader(Numbers(), collate_fn=list, **options)
    print(type(iter(loader)).__module__, [list(loader) for _ in range(2)])
"""


@pytest.mark.parametrize("imported", ["", "from stoker import DataLoader as Fed"])
def test_torchs_loaders_and_their_subclasses_are_stokers_and_timed_once(tmp_path, imported):
    timed = "import stoker; list(stoker.timed(DataLoader([1, 2])))"
    script = f"{AUTOMATIC}{imported}\n{timed}\nprint(kinds())"
    code, said = unaware(tmp_path, script, STOKER_OUTPUT=str(tmp_path))
    assert (code, said.splitlines()[-1]) == (0, "{'stoker.feed.iterators'}"), said
    # By the loader, not by `timed`, too.
    assert len((tmp_path / "timeline-rank0.csv").read_text().splitlines()[1:]) == 2


def test_loaders_of_a_worker_are_torchs(tmp_path):
    code, said = unaware(tmp_path, f"{AUTOMATIC}\n{IN_WORKERS}")
    last = said.splitlines()[-1]
    assert (code, last.split()[0]) == (0, "stoker.feed.iterators"), said
    torchs = ["torch.utils.data.dataloader"] * 2
    assert last.endswith(f" {[[torchs], [torchs]]}")


WORKED = "DataLoader([1, 2], num_workers=1)"


@pytest.mark.parametrize(
    ("loader", "env", "is_said"),
    [
        (WORKED, {}, True),
        (WORKED, {"RANK": "1", "WORLD_SIZE": "2"}, False),
        (WORKED, {"RUN_FEED": '{"seeding": "torch"}'}, False),
        # Seeded as by torch in any case.
        ("DataLoader([1, 2])", {}, False),
    ],
)
def test_what_changes_by_the_replacement_is_said_once(tmp_path, loader, env, is_said):
    env = {"STOKER_OUTPUT": str(tmp_path), **env}
    code, said = unaware(tmp_path, f"{AUTOMATIC}for _ in 1, 2: list({loader})", **env)
    assert code == 0, said
    assert said.count("each batch has its own seed") == int(is_said)


WORKERS_OF = """
loader = DataLoader(Sample(), num_workers=WORKERS)
print(getattr(iter(loader), "_num_workers", 0))
"""
SAMPLE = """
import threading
class Sample(torch.utils.data.Dataset):
    held = None
    def __init__(self):
        self.held = HELD
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return index
"""


@pytest.mark.parametrize(
    ("num_workers", "held", "key", "expected"),
    [
        # A plan's two workers take the place of one, and of none where the key says so.
        (1, "None", {}, 2),
        (0, "None", {}, 0),
        (0, "None", {"num_workers": 1}, 2),
        # What cloudpickle does not take whole is read as in the script.
        (0, "(i for i in ())", {"num_workers": 1}, 0),
        (1, "(i for i in ())", {}, 1),
        (0, "threading.Lock()", {"num_workers": 1}, 0),
    ],
)
def test_a_plans_workers_join_an_unchanged_loader_where_that_is_safe(
    tmp_path, num_workers, held, key, expected
):
    loop = WORKERS_OF.replace("WORKERS", str(num_workers))
    script = AUTOMATIC + SAMPLE.replace("HELD", held) + loop
    env = {"RUN_WORKERS": '{"dnn": 2}', "RUN_FEED": json.dumps(key)}
    code, said = unaware(tmp_path, script, **env)
    assert (code, said.splitlines()[-1]) == (0, str(expected)), said
