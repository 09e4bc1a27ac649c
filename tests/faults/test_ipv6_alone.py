"""A machine that has IPv6 alone: a network namespace whose only address is ::1."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.container_words import Container
from support.forked_tree import forking

pytestmark = [pytest.mark.fault, pytest.mark.root, pytest.mark.timeout(300)]

_ALONE = """
ip addr flush dev lo
ip addr add ::1/128 dev lo nodad
ip link set lo up
ip -4 addr del 127.0.0.1/8 dev lo
"""
_SCRIPT = """
import torch
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((8,), float(index))

print("sum", sum(float(batch.sum()) for batch in DataLoader(Numbers(), batch_size=4)))
"""
_GROUPS = {
    "alone": ["--group", "dnn=local.c1:1"],
    "one data host": ["--group", "dnn=local.c1:1", "--group", "data=local.c1:1:1"],
    "two data hosts": ["--group", "dnn=local.c1:1", "--group", "data=local.c1:2:1"],
}


def _run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    if not Path("/proc/sys/net/ipv6").exists():
        pytest.skip("this kernel has no IPv6")
    machine = Container(network=("unshare", "--net"), mounts=_ALONE, folder=str(folder))
    # The processes in there, too, are forked of a Python that has torch.
    with forking():
        command = machine.words(words)
        return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(_SCRIPT)
    return tmp_path


@pytest.mark.parametrize("groups", _GROUPS.values(), ids=_GROUPS)
def test_a_machine_with_ipv6_alone_trains(folder: Path, groups: list[str]) -> None:
    stoker = [sys.executable, "-m", "stoker.cli"]
    ended = _run(folder, *stoker, "train", "--yes", *groups, "--", sys.executable, "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (record,) = folder.glob("runs/*/training.json")
    assert json.loads(record.read_text())["status"] == "succeeded"
    assert "sum 9024.0" in ended.stdout + ended.stderr


def test_a_profile_is_measured_where_there_is_ipv6_alone(folder: Path) -> None:
    stoker = [sys.executable, "-m", "stoker.cli"]
    script = (folder / "train.py").read_text().replace("return 48", "return 100_000")
    (folder / "train.py").write_text(script)
    ended = _run(folder, *stoker, "profile", "--budget", "5", "--", sys.executable, "train.py")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    record = json.loads((folder / "profile.json").read_text())
    # Over a connection of this machine.
    assert record["step"]["receive_seconds"] is not None
