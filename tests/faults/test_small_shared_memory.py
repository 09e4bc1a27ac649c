"""A container whose /dev/shm has 64 MB, as Docker gives it: stoker's workers need none of it."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.container_words import Container
from support.forked_tree import forking

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(300)]

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
_CAUSE = "/dev/shm is full"
_FIX = "--shm-size=2g"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(_SCRIPT)
    stoker = [sys.executable, "-m", "stoker.cli"]
    with forking():
        command = Container(mounts=_SMALL, folder=str(folder)).words([*stoker, *words])
        return subprocess.run(command, capture_output=True, text=True, timeout=180)


# The words are those of a profile, of which a run's are made: unit/test_reasons.py.
@pytest.mark.soak
def test_a_script_whose_own_workers_have_no_room_there_is_told_so(tmp_path):
    ended = run(tmp_path, "train", "--group", "dnn=local.c1:1", "--", "python", "train.py")
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    assert _CAUSE in said
    assert _FIX in said


def test_a_profile_of_such_a_script_is_told_so(tmp_path):
    ended = run(tmp_path, "profile", "--budget", "5", "--", "python", "train.py")
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0
    (remedy,) = (line for line in said.splitlines() if line.startswith("try:"))
    assert _CAUSE in remedy
    assert _FIX in remedy


def test_data_hosts_feed_the_same_script_there(tmp_path):
    groups = ["--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1"]
    ended = run(tmp_path, "train", *groups, "--", "python", "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "seen 12" in ended.stdout + ended.stderr
