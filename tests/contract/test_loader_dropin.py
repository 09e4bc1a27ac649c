"""stoker.DataLoader keeps what torch's own promises: see support/dropin_claims.py.

With workers, and under a data group: faults/test_loader_dropin_fed.py.
"""

import functools
import json
import os
from pathlib import Path

import pytest

from stoker.launch.strategies.start import STARTUP_DIR
from support.cluster import run_script
from support.dropin_claims import CLAIMS, PINNED, VALUED, VALUES
from support.warm_python import run_code, run_warm

# Asked by test_loader_dropin_fed: torch's loader draws in this process here, PINNED have workers.
LEFT_OUT = {"own_random_state_of_the_trainer", *PINNED}
ASKED = [name for name in (*CLAIMS, *VALUED) if name not in LEFT_OUT]


@functools.cache
def found() -> dict[str, dict[str, object]]:
    given = {"workers": 0, "only": ASKED}
    kinds = ("torch", "stoker")
    running = [run_script({"kind": kind, **given}, script="dropin_claims.py") for kind in kinds]
    return {
        kind: {str(line["claim"]): line["found"] for line in trainer.finish()}
        for kind, trainer in zip(kinds, running, strict=True)
    }


@pytest.mark.parametrize("name", ASKED)
def test_what_torchs_loader_promises_holds(name):
    expected = found()["torch"][name]
    assert "Traceback (most recent call last):\n" not in str(expected)
    assert found()["stoker"][name] == expected


def test_each_kind_of_value_was_seen():
    values = found()["torch"]["values"]
    assert set(values) == set(VALUES)
    assert not [name for name, shown in values.items() if isinstance(shown, str)]


# Seeding: what a batch or a sample is made of, and what it is not.

SAMPLES = """
import json, torch, stoker
from support.dropin_claims import Each, content, draws, same

def samples(given):
    torch.manual_seed(11)
    dataset = Each(lambda i: (i, draws(i)), 99)
    if given.get("subset"):
        dataset = torch.utils.data.Subset(torch.utils.data.Subset(dataset, range(1, 99)), range(50))
    loader = stoker.DataLoader(dataset, collate_fn=same, **given.get("loader", {}))
    found = []
    for epoch in range(given.get("epochs", 1)):
        for number, batch in enumerate(loader):
            found += [[epoch, *sample] for sample in batch]
            if number == given.get("stop"):
                torch.save(loader.state_dict(), given["file"])
                break
    if given.get("resume"):
        again = stoker.DataLoader(
            Each(lambda i: (i, draws(i)), 99), collate_fn=same, **given["resume"]
        )
        again.load_state_dict(torch.load(given["file"], weights_only=True))
        found += [[0, *sample] for batch in again for sample in batch]
    return found
"""


def samples(seeding: str, *, rank: int = 0, world: int = 1, **given: object) -> list[list[object]]:
    """Returns epoch, index and draws of each sample, in order, as another process has them."""
    env = {"RANK": str(rank), "WORLD_SIZE": str(world)}
    env["STOKER_FEED"] = json.dumps({"seeding": seeding})
    code = f"{SAMPLES}\nprint(json.dumps(samples({given!r})))"
    found: list[list[object]] = json.loads(run_code(code, **env))
    return found


REPEATED = [3, 1, 3, 3, 1, 3, 2]


@pytest.mark.parametrize("is_subset", [False, True])
@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"batch_size": 7}, {"batch_size": 2, "num_workers": 2}], ids=str
)
def test_sample_seeding_survives_other_batches_and_workers(options, is_subset):
    given: dict[str, object] = {"subset": is_subset, "epochs": 2}
    alone = samples("sample", loader={"sampler": REPEATED}, **given)
    # Each time that an index comes it has other draws.
    assert len({str(draws) for _, _, draws in alone}) == 2 * len(REPEATED)
    assert samples("sample", loader={"sampler": REPEATED, **options}, **given) == alone


def test_sample_seeding_survives_another_world_size():
    whole = samples("sample", loader={"sampler": list(range(8)), "batch_size": 4})
    parts = [{"sampler": list(range(rank, 8, 2)), "batch_size": 2} for rank in range(2)]
    halves = [samples("sample", rank=rank, world=2, loader=part) for rank, part in enumerate(parts)]
    assert sorted(map(str, halves[0] + halves[1])) == sorted(map(str, whole))


def test_sample_seeding_survives_a_resume_with_repeated_indices(tmp_path):
    options: dict[str, object] = {"sampler": REPEATED, "batch_size": 2}
    then = {"file": str(tmp_path / "state"), "resume": options | {"num_workers": 1}}
    found = samples("sample", loader=options, stop=1, **then)
    assert found == samples("sample", loader={"sampler": REPEATED})


def test_batch_seeding_makes_replicas_differ_and_survives_other_workers():
    options: dict[str, object] = {"sampler": list(range(6)), "batch_size": 2}
    first = samples("batch", loader=options, epochs=2)
    assert samples("batch", loader=options | {"num_workers": 2}, epochs=2) == first
    other = samples("batch", rank=1, world=2, loader=options, epochs=2)
    assert not {str(one[2]) for one in first} & {str(one[2]) for one in other}


# --replace-dataloader: scripts that never heard of stoker.

# As its parent is forked with torch, stoker's sitecustomize has a say in the spawned child only; in
# a process that is launched: see test_sitecustomize.
LAUNCHED = """
import os
import torch.utils.data
if os.environ.pop("TEST_IS_PARENT", None):
    from stoker.feed.replace import install
    install(torch.utils.data.DataLoader)
"""
UNAWARE = """
import torch
import torch.utils.data.dataloader as module
from torch.utils.data import DataLoader

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return torch.rand(())

def kinds():
    loaders = DataLoader(Numbers()), module.DataLoader(Numbers(), num_workers=1)
    return [type(loader._get_iterator()).__module__ for loader in loaders]

def draws(workers):
    torch.manual_seed(5)
    return [batch.tolist() for batch in DataLoader(Numbers(), batch_size=2, num_workers=workers)]

def child(queue):
    queue.put([kinds(), draws(0)])

if __name__ == "__main__":
    context = torch.multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    found = queue.get(timeout=150)
    process.join(150)
    mine = kinds()
    print(sorted({*mine, *found[0]}), DataLoader is torch.utils.data.DataLoader, flush=True)
    assert found == [mine, draws(0)]
    assert draws(0) == draws(2)
"""


VARIABLES = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
VARIABLES |= {"PYTHONPATH": str(STARTUP_DIR), "STOKER_LAUNCHER_PID": str(os.getpid())}


def unaware(tmp_path: Path, text: str, **env: str) -> tuple[int, str]:
    script = tmp_path / "unaware.py"
    script.write_text(f"import warnings; warnings.simplefilter('error')\n{text}")
    return run_warm([str(script)], VARIABLES | env, timeout=100)


def test_a_script_that_never_heard_of_stoker_gets_its_loader_in_spawned_processes_too(tmp_path):
    env = {"STOKER_REPLACE_DATALOADER": "1", "TEST_IS_PARENT": "1"}
    code, said = unaware(tmp_path, LAUNCHED + UNAWARE, **env)
    script = [line for line in said.splitlines() if " batches_seeded " not in line]
    assert (code, script) == (0, ["['stoker.feed.iterators'] True"])


# replace_dataloader: auto, as `stoker train` has it unless somebody says otherwise.
AUTOMATIC = """
import torch
import torch.utils.data
from stoker.feed.replace import install
install(torch.utils.data.DataLoader, is_auto=True)
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


@pytest.mark.parametrize(
    ("imported", "expected"),
    [
        ("", "stoker.feed.iterators"),
        # What has no loader in it says nothing of loaders.
        ("import stoker; stoker.log_metrics(accuracy=1)", "stoker.feed.iterators"),
        ("import stoker.feed.loader", "stoker.feed.iterators"),
        ("from stoker import DataLoader as Fed", "torch.utils.data.dataloader"),
        ("import stoker; stoker.DataLoader([1])", "torch.utils.data.dataloader"),
    ],
)
def test_auto_leaves_torchs_loaders_to_a_script_that_imports_stokers(tmp_path, imported, expected):
    timed = "import stoker; list(stoker.timed(DataLoader([1, 2])))"
    script = f"{AUTOMATIC}{imported}\n{timed}\nprint(kinds())"
    code, said = unaware(tmp_path, script, STOKER_OUTPUT=str(tmp_path))
    assert (code, said.splitlines()[-1]) == (0, f"{{'{expected}'}}"), said
    # Once by the loader, or once by `timed` where the loader is left to torch.
    assert len((tmp_path / "timeline-rank0.csv").read_text().splitlines()[1:]) == 2


@pytest.mark.parametrize(
    ("imported", "expected"),
    [("", "stoker.feed.iterators"), ("from stoker import DataLoader as Fed", "torch.utils.data")],
)
def test_auto_has_no_say_in_loaders_of_a_worker(tmp_path, imported, expected):
    code, said = unaware(tmp_path, f"{AUTOMATIC}{imported}\n{IN_WORKERS}")
    last = said.splitlines()[-1]
    assert (code, last.split()[0].startswith(expected)) == (0, True), said
    torchs = ["torch.utils.data.dataloader"] * 2
    assert last.endswith(f" {[[torchs], [torchs]]}")


@pytest.mark.parametrize(
    ("loader", "env", "is_said"),
    [
        ("DataLoader([1, 2])", {}, True),
        ("DataLoader([1, 2])", {"RANK": "1", "WORLD_SIZE": "2"}, False),
        ("DataLoader([1, 2])", {"STOKER_FEED": '{"seeding": "torch"}'}, False),
        # Seeded as by torch in any case.
        ("DataLoader(Stream())", {}, False),
    ],
)
def test_what_changes_by_the_replacement_is_said_once(tmp_path, loader, env, is_said):
    env = {"STOKER_OUTPUT": str(tmp_path), **env}
    code, said = unaware(tmp_path, f"{AUTOMATIC}for _ in 1, 2: list({loader})", **env)
    assert code == 0, said
    assert said.count("each batch has its own seed") == int(is_said)


WORKERS_OF = """
loader = DataLoader(Sample(), num_workers=WORKERS)
with torch.set_grad_enabled(TRAINS):
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
    ("num_workers", "held", "trains", "expected"),
    [
        # A plan's two workers take the place of one, and of none where the loop trains.
        (1, "None", True, 2),
        (0, "None", True, 2),
        # Loops that validate, and what forked workers may not read: CUDA tensors, what runs.
        (0, "None", False, 0),
        (1, "None", False, 2),
        (0, "(i for i in ())", True, 0),
        (1, "(i for i in ())", True, 2),
        # A file whose position they would share is read as in the script.
        (0, "open(__file__, 'rb')", True, 0),
        (1, "open(__file__, 'rb')", True, 1),
        (0, "threading.Lock()", True, 2),
    ],
)
def test_a_plans_workers_join_an_unchanged_loader_where_that_is_safe(
    tmp_path, num_workers, held, trains, expected
):
    loop = WORKERS_OF.replace("WORKERS", str(num_workers)).replace("TRAINS", str(trains))
    script = AUTOMATIC + SAMPLE.replace("HELD", held) + loop
    env = {"STOKER_WORKERS": '{"dnn": 2}', "STOKER_REPLACE_DATALOADER": "auto"}
    code, said = unaware(tmp_path, script, **env)
    assert (code, said.splitlines()[-1]) == (0, str(expected)), said


MANY_WORKERS = """
import os, warnings, torch.utils.data
from stoker.feed.replace import install
install(torch.utils.data.DataLoader)
from torch.utils.data import DataLoader
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
warnings.simplefilter("error")
LOADER
print("made")
"""
FED = {
    "STOKER_REPLACE_DATALOADER": "1",
    "STOKER_HAS_DATA_GROUP": "1",
    "STOKER_COORDINATOR": "localhost:1",
}
PLANNED = {"STOKER_WORKERS": '{"dnn": 1}'}
MADE = [
    "DataLoader([1, 2], num_workers=4)",
    "DataLoader([1, 2], None, False, None, None, 4)",
    "type('Own', (DataLoader,), {})([1, 2], num_workers=4)",
    "import stoker; stoker.DataLoader([1, 2], num_workers=4)",
    "import copy; copy.deepcopy(DataLoader([1, 2], num_workers=4)).check_worker_number_rationality",
]


@pytest.mark.parametrize("loader", MADE)
@pytest.mark.parametrize("env", [FED, PLANNED])
def test_workers_that_nobody_starts_here_are_no_warning(tmp_path, loader, env):
    code, said = unaware(tmp_path, MANY_WORKERS.replace("LOADER", loader), **env)
    assert (code, said.splitlines()[-1]) == (0, "made"), said


@pytest.mark.parametrize("loader", MADE[:3])
def test_workers_that_torch_starts_here_are_judged_by_torch(tmp_path, loader):
    code, said = unaware(tmp_path, MANY_WORKERS.replace("LOADER", loader))
    assert code == 1
    assert "UserWarning: This DataLoader will create 4 worker processes" in said
