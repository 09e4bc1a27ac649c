"""Scripts of all kinds are profiled as they are, in an empty folder, by the command line."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest

from stoker.profile.rank_results import read_ranks
from stoker.records import Profile, ProfiledLoader, read_json
from support.command import stoker

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

SUPPORT = Path(__file__).parents[1] / "support"
SCRIPT = str(SUPPORT / "profiled_script.py")
LIGHTNING = str(SUPPORT / "lightning_script.py")
# The least that is allowed: what is measured in it is not looked at here.
BUDGET = "5"


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


def run_profile(folder: Path, *command: str, budget: str = BUDGET) -> Profiled:
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        done = stoker("profile", "--budget", budget, "--", *command, cwd=folder)
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


def test_a_lightning_fit_ends_without_its_hooks(tmp_path):
    found = run_profile(tmp_path, sys.executable, LIGHTNING, "1")
    assert_measured(found)
    # Its own checkpoints, of epochs that ended, are its business; none of its ends came.
    assert found.files <= {"lightning_logs", "checkpoints"}


def test_ranks_that_a_script_starts_are_told_apart(tmp_path):
    found = run_profile(tmp_path, sys.executable, SCRIPT, "200", "1000", "fork")
    assert_measured(found, ranks=2)
    assert found.files <= {"train-0.log", "train-1.log", "meeting"}
    (file,) = tmp_path.glob("runs/**/profile-rank0.json")
    first, second = read_ranks(file.parent)
    # They change phase together.
    assert first.steps == second.steps


def test_a_script_that_ends_too_soon_says_what_it_had_and_what_was_observed(tmp_path):
    found = run_profile(tmp_path, sys.executable, SCRIPT, "3", "2")
    assert found.code == 2
    assert "ended too soon: after 6 batches of its main loader; about" in found.words
    # It came to its own end.
    assert {"last-checkpoint-0", "exit-handler-0"} <= found.files


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((sys.executable, "-c", "import json"), "no DataLoader of torch was read"),
        ((sys.executable, "-I", "-c", "import json"), "no Python process of the command could be"),
    ],
    ids=["no torch", "isolated"],
)
def test_a_command_without_a_loader_is_told_why(tmp_path, command, words):
    found = run_profile(tmp_path, *command)
    assert found.code == 2
    assert words in found.words


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
    for batch in DataLoader(Stream(), batch_size=4, num_workers=2):
        (weight * batch.mean()).sum().backward()
"""


def test_a_stream_is_told_with_its_shards(tmp_path):
    (tmp_path / "train.py").write_text(STREAM)
    found = run_profile(tmp_path, sys.executable, "train.py")
    assert_measured(found)
    assert found.record.loader == ProfiledLoader(
        class_name="torch.utils.data.dataloader.DataLoader",
        reach="torch",
        iterable=True,
        shards=2,
    )
    assert "over a stream of 2 shards" in " ".join(found.words.split())
