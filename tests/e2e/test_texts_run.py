"""Texts and NaN through a whole training: two ranks, two data hosts, workers that are killed."""

import json
import sys

import pytest

from stoker.records import Training, read_json
from support.command import process
from support.local_job import assert_nothing_left

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

HYPERPARAMETERS = {
    "version": "1.10",
    "flag": "true",
    "spec": '{"a": [1]}',
    "zip": "007",
    "none": "null",
    "lines": "a\nb",
    "blank": " x ",
    "snow": "\N{SNOWMAN}\N{SNOWBOARDER}",
    "empty": "",
    "k": 3,
    "lr": 1e-4,
    "amp": True,
    "sizes": [1, "a"],
    "big": 10**20,
    "batch-size": 8,
}
# Sorted by name.
ARGUMENTS = [
    *("--amp", "--batch-size", "8", "--big", "100000000000000000000", "--blank", " x "),
    *("--clip", "inf", "--empty", "", "--flag", "true", "-k", "3", "--lines", "a\nb"),
    *("--lr", "0.0001", "--none", "null", "--sizes", "1", "a"),
    *("--snow", "\N{SNOWMAN}\N{SNOWBOARDER}", "--spec", '{"a": [1]}'),
    *("--version", "1.10", "--zip", "007"),
]
SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset

HERE = pathlib.Path(__file__).parent

class Words(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        lost = HERE / "lost"
        if index == 20 and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return json.dumps(sys.argv[1:])

if __name__ == "__main__":
    rank = os.environ.get("RANK", "0")
    loader = DataLoader(
        Words(), batch_size=4, num_workers=1, collate_fn=list, persistent_workers=True,
    )
    seen = {word for epoch in range(2) for batch in loader for word in batch}
    import stoker
    stoker.log_metrics(loss=torch.tensor(float("nan")), norm=1e400, accuracy=0.5)
    found = {"argv": sys.argv[1:], "hps": os.environ["SM_HPS"], "seen": [*map(json.loads, seen)]}
    (HERE / f"rank{rank}.json").write_text(json.dumps(found))
"""
WORKLOAD = {
    "name": "texts",
    "command": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "train.py"],
}


def test_ranks_and_data_hosts_have_the_texts_and_nan_ends_nothing(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    # YAML: JSON has no infinity.
    given = json.dumps(HYPERPARAMETERS, ensure_ascii=False)[:-1] + ', "clip": .inf}'
    document = json.dumps(WORKLOAD)[:-1] + f', "hyperparameters": {given}}}'
    (tmp_path / "w.yaml").write_text(document)
    done = process(
        *("train", "w.yaml", "--group", "dnn=local.c1:1", "--group", "data=local.c1:2"),
        *("--set", "feed.local_workers=0", "--out", "training.json"),
        cwd=tmp_path,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["argv"] == ARGUMENTS
        assert found["seen"] == [ARGUMENTS]
        values = json.loads(found["hps"])
        assert values == {**HYPERPARAMETERS, "clip": float("inf")}
    assert (tmp_path / "lost").exists()
    text = (tmp_path / "training.json").read_text()
    kept = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert kept["metrics"] == {"accuracy": 0.5, "loss": "NaN", "norm": "Infinity"}
    record = read_json(tmp_path / "training.json", Training)
    assert record.hyperparameters == {**HYPERPARAMETERS, "clip": "Infinity"}
    assert record.metrics["norm"] == "Infinity"
    assert "loss not a number (NaN)" in " ".join((done.stdout + done.stderr).split())
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert_nothing_left(run_dir, set())
