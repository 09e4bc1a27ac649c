"""Checks how `stoker train` ends when all data hosts are gone and nobody local makes batches."""

import contextlib
import os
import re
import signal

import pytest

from stoker.records import Training, read_json
from support.local_job import assert_nothing_left, marked_processes, until
from support.train_command import Verb

pytestmark = pytest.mark.fault

WORKLOAD = """\
name: lost
command: [python, script.py]
feed: {lease_seconds: 5.0, local_workers: 0}
"""
SCRIPT = """\
import pathlib, time
import torch
from stoker import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index
if __name__ == "__main__":
    for batch in DataLoader(Slow(), batch_size=2, num_workers=1):
        pathlib.Path("begun").touch()
"""


# How several hosts are named: see tests/unit/test_client_requests.py.
def test_train_ends_with_code_5_and_names_the_host_and_when_it_was_heard(tmp_path):
    (tmp_path / "w.yaml").write_text(WORKLOAD)
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["train", "w.yaml", "--out", "training.json", "--yes"]
    train = Verb(tmp_path, [*words, "--group", "dnn=1:0", "--group", "data=1:1"])
    try:
        until((tmp_path / "begun").exists, what="the first batch is there")
        (hosts,) = tmp_path.glob("runs/*/hosts")
        pids = marked_processes(hosts / "algo-1")
        assert pids
        # Suspended first: an agent that outlives its workers for a moment would say that they died.
        for end in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                # The end of one may end another one before its turn.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, end)
        assert train.ended_with() == 5
    finally:
        train.kill()
    failure = read_json(tmp_path / "training.json", Training).failure
    words = "training failed (exit code 5): rank 0 on algo-2: FeedLostError: lost all data workers"
    assert words in train.said
    for text in (train.said, failure or ""):
        assert re.search(r"algo-1 \((lost|left), last heard \d+\.\d s ago\)", text), text
    assert_nothing_left(hosts.parent, set())
