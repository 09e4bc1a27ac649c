"""Scripts of all kinds are profiled as they are, in an empty folder, by the command line."""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch

from stoker.profile.rank_results import read_ranks
from stoker.records import Decision, Profile, ProfiledLoader, Shippable, read_json
from support.command import stoker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(SUPPORT / "profiled_script.py")
LIGHTNING = str(SUPPORT / "lightning_script.py")
# The least that is allowed: what is measured in it is not looked at here.
BUDGET = "5"
TORCHRUN = sys.executable, *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiled:
    code: int
    words: str
    folder: Path

    @property
    def record(self) -> Profile:
        return read_json(self.folder / "profile.json", Profile)

    @property
    def files(self) -> set[str]:
        return {path.name for path in self.folder.iterdir()} - {"runs", "profile.json"}

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.folder.glob("runs/*/logs/*.log"))


def run_profile(folder: Path, *command: str, copy: bool = False, budget: str = BUDGET) -> Profiled:
    options = ("--copy",) if copy else ()
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        done = stoker("profile", "--budget", budget, *options, "--", *command, cwd=folder)
    found = Profiled(code=done.returncode, words=done.stdout + done.stderr, folder=folder)
    assert processes_in(folder) == [], "processes are left"
    return found


def processes_in(folder: Path) -> list[Sequence[str]]:
    return [
        process.info["cmdline"]
        for process in psutil.process_iter(["cwd", "cmdline", "status"])
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def assert_measured(found: Profiled, *, ranks: int = 1) -> None:
    assert found.code == 0, found.words + found.log
    record = found.record
    assert record.step.accelerator_step_seconds is not None
    assert record.step.loader_cpu_seconds is not None
    assert record.what["ranks"] == ranks
    assert not [note for note in record.what["notes"] if "lockstep" in note or "ranks" in note]
    assert "of it waiting for data" in found.words
    assert "Traceback" not in found.log


def test_a_script_below_a_shell_script_is_cut_off_with_all_that_would_follow(tmp_path):
    (tmp_path / "train.sh").write_text(f"{sys.executable} {SCRIPT} 200 1000\ntouch uploaded\n")
    found = run_profile(tmp_path, "bash", "train.sh")
    assert_measured(found)
    # Neither `finally`, nor `except BaseException`, nor an exit handler, nor the shell went on.
    assert found.files == {"train.sh", "train-0.log"}
    # A bare command has what it has without stoker: the whole machine.
    assert found.record.host.vcpus == len(os.sched_getaffinity(0))


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "processes", [1, pytest.param(2, marks=pytest.mark.soak)], ids=["alone", "ddp"]
)
def test_a_lightning_fit_ends_without_its_hooks(tmp_path, processes):
    found = run_profile(tmp_path, sys.executable, LIGHTNING, str(processes))
    assert_measured(found, ranks=processes)
    # Its own checkpoints, of epochs that ended, are its business; none of its ends came.
    assert found.files <= {"lightning_logs", "checkpoints"}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_ranks_that_a_script_starts_are_told_apart(tmp_path, how):
    found = run_profile(tmp_path, sys.executable, SCRIPT, "200", "1000", how)
    assert_measured(found, ranks=2)
    assert found.files <= {"train-0.log", "train-1.log", "meeting"}
    (file,) = tmp_path.glob("runs/**/profile-rank0.json")
    first, second = read_ranks(file.parent)
    # They change phase together.
    assert first.steps == second.steps


@pytest.mark.usefixtures("forked")
def test_a_script_that_ends_too_soon_says_what_it_had_and_what_was_observed(tmp_path):
    found = run_profile(tmp_path, sys.executable, SCRIPT, "3", "2")
    assert found.code == 2
    assert "ended too soon: after 6 batches of its main loader; an epoch has 3" in found.words
    assert "CPU-seconds: " in found.words
    # It came to its own end.
    assert {"last-checkpoint-0", "exit-handler-0"} <= found.files
    observed = found.record.observed
    assert found.record.step is None
    assert 0 < (observed.cpu_utilization or 0) <= 1


NOTEBOOK_KERNEL = "import sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((sys.executable, "-c", "import json"), "the script never imported torch"),
        ((sys.executable, "-c", NOTEBOOK_KERNEL), "a notebook ran, in which no DataLoader"),
        ((sys.executable, "-I", "-c", "import json"), "no Python process of the command could be"),
    ],
    ids=["no torch", "notebook kernel, simulated", "isolated"],
)
def test_a_command_without_a_loader_is_told_why(tmp_path, command, words):
    found = run_profile(tmp_path, *command)
    assert found.code == 2
    assert words in found.words
    assert "what was observed: it ran" in found.words
    assert json.loads((tmp_path / "profile.json").read_text())["what"]["source"] == "process tree"


def test_a_python_that_has_no_stoker_is_named_as_the_reason(tmp_path):
    # A torch that is none, in a Python whose stoker cannot be imported.
    code = tmp_path / "code"
    for package in ("stoker", "torch", "torch/utils", "torch/utils/data"):
        (code / package).mkdir(parents=True)
        (code / package / "__init__.py").write_text("class DataLoader: pass\n")
    (code / "train.py").write_text("import torch.utils.data\n")
    found = run_profile(tmp_path, sys.executable, "code/train.py")
    assert found.code == 2
    assert "could not be put into the script: ModuleNotFoundError" in found.words


TWO_LOADERS = """
import time, torch
from torch.utils.data import DataLoader
class Slow:
    def __len__(self): return 100000
    def __getitem__(self, index): time.sleep(0.02); return torch.zeros(4)
weight = torch.zeros(1, requires_grad=True)
fast = DataLoader(torch.zeros(100000, 4), batch_size=4)
slow = DataLoader(Slow(), batch_size=1, num_workers=1)
for one, other in zip(fast, slow):
    (weight * one.mean() * other.mean()).sum().backward()
"""

STREAM = """
import time, torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        while info is None or info.num_workers:
            time.sleep(0.002)
            yield torch.rand(64, 64).sort().values
if __name__ == "__main__":
    weight = torch.zeros(1, requires_grad=True)
    for batch in DataLoader(Stream(), batch_size=4, num_workers=2, multiprocessing_context="HOW"):
        (weight * batch.mean()).sum().backward()
"""

SLOW_STEPS = """
import time, torch
from torch.utils.data import DataLoader
weight = torch.zeros(1, requires_grad=True)
for batch in DataLoader(torch.zeros(1000, 4), batch_size=4):
    (weight * batch.mean()).sum().backward()
    time.sleep(1.5)
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_a_stream_is_told_with_its_shards_and_that_it_divides_itself(tmp_path, how):
    (tmp_path / "train.py").write_text(STREAM.replace("HOW", how))
    found = run_profile(tmp_path, sys.executable, "train.py")
    assert_measured(found)
    assert found.record.loader == ProfiledLoader(
        class_name="torch.utils.data.dataloader.DataLoader",
        reach="torch",
        iterable=True,
        shards=2,
        divides=True,
        shippable=Shippable(ok=True),
        splits=False,
    )
    assert "over a stream of 2 shards" in " ".join(found.words.split())


@pytest.mark.soak
@pytest.mark.alone
def test_a_second_loader_of_the_steps_is_waited_for_and_replayed_too(tmp_path):
    (tmp_path / "train.py").write_text(TWO_LOADERS)
    found = run_profile(tmp_path, sys.executable, "train.py")
    assert_measured(found)
    step = found.record.timed_step
    # All of a step is the second loader's: neither compute as is, nor there in the replay.
    assert step.wait_seconds > 0.8 * step.step_seconds
    assert step.accelerator_step_seconds < 0.2 * step.step_seconds
    assert "more than one loader" in found.words


@pytest.mark.soak
@pytest.mark.alone
def test_steps_of_a_large_part_of_the_budget_are_measured_within_it(tmp_path):
    (tmp_path / "train.py").write_text(SLOW_STEPS)
    found = run_profile(tmp_path, sys.executable, "train.py")
    assert_measured(found)
    assert found.record.timed_step.step_seconds > 1.4
    assert (found.record.timed_step.accelerator_step_seconds or 0.0) > 1.4


def test_a_script_that_lacks_a_module_is_told_what_to_install(tmp_path):
    (tmp_path / "train.py").write_text("import a_module_that_nobody_has.part")
    (tmp_path / "requirements.txt").write_text("it")
    found = run_profile(tmp_path, "python", "train.py")
    assert found.code == 6
    assert "No module named 'a_module_that_nobody_has'" in found.words
    assert "-m pip install -r requirements.txt" in found.words


def with_checkpoints(folder: Path, every: str) -> tuple[str, ...]:
    """Returns the command of a script whose checkpoints of an earlier training are there."""
    (folder / "ckpt").mkdir()
    for name in ("epoch.pt", "last.pt"):
        torch.save([0], folder / "ckpt" / name)
    return sys.executable, str(SUPPORT / "saving_script.py"), every


def saved(folder: Path, name: str) -> list[int]:
    """Returns the batches that a checkpoint was trained on, none of them twice."""
    seen = list(torch.load(folder / "ckpt" / name))
    assert len(seen) == len(set(seen)), "it was trained on repeated batches"
    return seen


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("every", "name"),
    # The replay begins after the script has saved, and has all steps until it saves again.
    [("0", "epoch.pt"), pytest.param("8", "last.pt", marks=pytest.mark.soak)],
)
def test_a_file_that_was_there_is_never_written_with_repeated_batches(tmp_path, every, name):
    # After 0.6 of it the replay waits for no save: a machine that stands still may take seconds.
    found = run_profile(tmp_path, *with_checkpoints(tmp_path, every), budget="20")
    assert saved(tmp_path, name)
    assert f"the script is about to overwrite ckpt/{name}" in " ".join(found.words.split())
    assert_measured(found)
    assert f"the script was about to overwrite ckpt/{name}: the profile ended there" in str(
        found.record.what["notes"]
    )


@pytest.mark.soak
def test_all_ranks_end_before_one_of_them_overwrites_a_file(tmp_path):
    (_, *script) = with_checkpoints(tmp_path, "0")
    found = run_profile(tmp_path, *TORCHRUN, *script)
    assert "the script is about to overwrite ckpt/epoch.pt" in " ".join(found.words.split())
    assert_measured(found, ranks=2)
    assert saved(tmp_path, "epoch.pt")


@pytest.mark.usefixtures("forked")
def test_a_script_that_saves_at_each_step_is_told_to_run_in_a_copy(tmp_path):
    found = run_profile(tmp_path, *with_checkpoints(tmp_path, "1"))
    assert found.code == 2
    assert "the script was about to overwrite ckpt/last.pt in step 1 on batches" in found.words
    assert "stoker profile --copy" in found.words
    assert saved(tmp_path, "last.pt")


@pytest.mark.usefixtures("forked")
def test_in_a_copy_of_its_folder_a_script_writes_what_it_likes(tmp_path):
    found = run_profile(tmp_path, *with_checkpoints(tmp_path, "1"), copy=True)
    assert_measured(found)
    assert saved(tmp_path, "last.pt") == [0]
    assert found.files == {"ckpt"}
    assert list(tmp_path.glob("runs/*/copy")) == []


ENDS_ITSELF = """
import atexit, time, torch
from torch.utils.data import DataLoader

atexit.register(lambda: open("last.txt", "w").write("spoiled"))
weight, seen, again = torch.zeros(1, requires_grad=True), set(), 0
for batch in DataLoader(range(1_000_000), 4):
    again += int(batch[0]) in seen
    seen.add(int(batch[0]))
    (weight * batch.float().mean()).sum().backward()
    time.sleep(0.005)
    if again == 12:
        break
"""


@pytest.mark.soak
def test_not_even_an_exit_handler_overwrites_a_file_with_repeated_batches(tmp_path):
    (tmp_path / "last.txt").write_text("good")
    found = run_profile(tmp_path, sys.executable, "-c", ENDS_ITSELF)
    assert_measured(found)
    assert (tmp_path / "last.txt").read_text() == "good"


REPLAY = """
import sys, time, torch
from torch.utils.data import DataLoader, Dataset

class Replay(Dataset):
    def __init__(self):
        self.items = [torch.ones(8)]
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.002)
        return self.items[index % len(self.items)]

dataset, model = Replay(), torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(100):
    for batch in DataLoader(dataset, batch_size=4):
        model(batch).sum().backward()
        optimizer.step()
        if sys.argv[1] == "changing":
            dataset.items.append(batch[0])
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("loop", ["changing", "frozen"])
def test_no_hosts_or_workers_are_advised_where_the_loop_changes_its_dataset(tmp_path, loop):
    (tmp_path / "train.py").write_text(REPLAY)
    found = run_profile(tmp_path, sys.executable, "train.py", loop)
    assert_measured(found)
    profile = found.record
    said = "dataset.items changed between two batches, and num_workers=0 means"
    groups = "--group", "dnn=local.c2:1", "--group", "data=local.c1:1"
    done = stoker("decide", "profile.json", *groups, "--out", "decision.json", cwd=tmp_path)
    decision = read_json(tmp_path / "decision.json", Decision)
    (asked,) = [plan for plan in decision.plans if plan.action == "heterogeneous"]
    if loop == "frozen":
        assert profile.loader.in_step is None
        assert "no help" not in asked.reason
        return
    assert profile.loader.in_step.startswith(said)
    assert f"gets no help from data hosts: {said}" in " ".join(found.words.split())
    assert f"gets no help from data hosts: {said}" in asked.reason
    assert not [fix for fix in profile.fixes if fix.id == "num_workers"]
    words = " ".join(done.stdout.split())
    assert "Change it between epochs, or set num_workers in the script" in words
