"""Machines with little: a limit of memory, a small /dev/shm."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.container_words import Container
from support.memory_limit import MemoryGroup, memory_limit

pytestmark = [pytest.mark.fault, pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(600)]


SCRIPT = Path(__file__).parents[1] / "support" / "limited_script.py"


MB = 1 << 20


DATA_WORKERS = 2


# Of the script, beside those of a data host.
LOCAL_WORKERS = 2


# More than the group has, as where a person sets it too high.
MAX_BYTES = 2000 * MB


class LimitedRun:
    """A run of `stoker train` whose hosts are all in one group.

    Args:
        folder: Is made, for its files.
        group: What it runs in.
        script: Arguments of the script.
        data_workers: Of the one data host.
        settings: Of the run, in words of `--set`.
        meanwhile: Is called in a thread while it runs.
    """

    def __init__(
        self,
        folder: Path,
        group: MemoryGroup,
        *script: object,
        data_workers: int = DATA_WORKERS,
        settings: Sequence[str] = (),
        meanwhile: Callable[[Path], None] | None = None,
    ) -> None:
        folder.mkdir()
        command = [sys.executable, "-m", "stoker.cli", "train", "--group", "dnn=local.c1:1"]
        command += ["--group", f"data=local.c1:1:{data_workers}"]
        for setting in (f"feed.max_bytes={MAX_BYTES}", *settings):
            command += ["--set", setting]
        command += ["--", "python", str(SCRIPT), *map(str, script)]
        with ThreadPoolExecutor() as pool:
            change = meanwhile and pool.submit(meanwhile, folder)
            done = self._ran(command, folder, group)
        if change:
            change.result()
        self.output = done.stdout + done.stderr
        self.logs = "".join(path.read_text(errors="replace") for path in folder.rglob("*.log"))
        print(self.output[-3000:], self.logs[-3000:])
        assert done.returncode == 0
        (file,) = folder.glob("runs/*/training.json")
        self.memory: list[dict[str, Any]] = json.loads(file.read_text())["memory"]

    @staticmethod
    def _ran(
        command: list[str], folder: Path, group: MemoryGroup
    ) -> "subprocess.CompletedProcess[str]":
        # The first process, as its container numbers them: all others are its descendants.
        join = f"echo 1 > {group.folder}/cgroup.procs"
        words = Container(mounts=join, folder=str(folder)).words(command)
        return subprocess.run(words, capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def usual_bytes(tmp_path_factory):
    """What a run takes in which next to nothing waits."""
    folder = tmp_path_factory.mktemp("usual") / "run"
    with memory_limit() as group:
        # On a busy machine the script's own workers would be ready before the data host is. Data
        # workers take their place, without which no batch is made.
        workers = DATA_WORKERS + LOCAL_WORKERS
        settings = ["feed.local_workers=0"]
        LimitedRun(folder, group, 4, 1, 0, data_workers=workers, settings=settings)
        return group.peak_bytes()


def test_a_worker_that_the_kernel_kills_is_named_and_counted(tmp_path, usual_bytes):
    with memory_limit(usual_bytes + 200 * MB) as group:
        run = LimitedRun(tmp_path / "run", group, 20, 1, 0.05, tmp_path / "greedy")
        num_kills = group.num_kills()
    # A batch that is late on a busy machine is made twice.
    assert num_kills >= 1
    assert "seen 80" in run.output
    assert "ended with signal 9 (SIGKILL)" in run.logs
    assert "since it started, the kernel has killed" in run.logs
    # Both hosts of this run are in the group.
    # Both hosts are in one group; what a host had to say is as old as its last word.
    assert max(host["kills"] for host in run.memory) == num_kills
    assert "the kernel killed" in run.output


_SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


# Batches of 24 MB: two of them fit.
_SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        return torch.full((1_500_000,), float(index))

    def __getitems__(self, indices):
        return [self[index] for index in indices]

if __name__ == "__main__":
    weight = torch.zeros(1, requires_grad=True)
    seen = 0
    for batch in DataLoader(Pictures(), batch_size=4, num_workers=2):
        (weight * batch[0, 0]).sum().backward()
        seen += 1
        if seen == 12:
            break
    print("seen", seen)
"""


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_SCRIPT)
    stoker = [sys.executable, "-m", "stoker.cli"]
    command = Container(mounts=_SMALL, folder=str(folder)).words([*stoker, *words])
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


def test_data_hosts_feed_the_same_script_there(tmp_path):
    groups = ["--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1"]
    ended = run(tmp_path, "train", *groups, "--", "python", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "seen 12" in ended.stdout + ended.stderr
