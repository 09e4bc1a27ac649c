"""The example's trainer is killed in the middle of an epoch, and goes on elsewhere."""

import os
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch

from support.black_box import Verb, stoker, verbs
from support.few_digits import few_digits
from support.processes import ran, until

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train.py"
STEPS = 33
# Sums of floats depend on how many threads they are shared among.
ENV = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}

pytestmark = pytest.mark.timeout(400)


def words(folder: Path, *more: str) -> list[str]:
    return [
        *("python", str(SCRIPT), "--data", str(folder / "data")),
        *("--epochs", "2", "--samples", str(4 * STEPS), "--batch-size", "4", "--save-every", "3"),
        *("--loss-log", str(folder / "losses"), "--checkpoints", str(folder / "checkpoints")),
        *more,
    ]


def steps_saved(folder: Path) -> int:
    path = folder / "checkpoints" / "checkpoint.pt"
    return len(torch.load(path, weights_only=True)["losses"]) if path.exists() else 0


def kill_trainer(train: Verb) -> None:
    """Kills the script's process: the one that was started with its words alone."""
    for process in psutil.Process(train.process.pid).children(recursive=True):
        try:
            if process.cmdline()[1:2] == [str(SCRIPT)]:
                process.kill()
        except psutil.Error:
            continue


def test_a_killed_trainer_goes_on_without_data_hosts_on_the_same_losses(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    few_digits(whole / "data")
    done = ran(words(whole, "--workers", "0"), env=ENV, timeout=200)
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole / "data", tmp_path / "data")
    train = ("train", "--group", "dnn=1", "--group", "data=1:1", "--name")
    for number in range(5):
        with verbs(tmp_path, ENV) as begun:
            name = f"first-{number}"
            first = begun.start(*train, name, "--", *words(tmp_path, "--workers", "1"))
            until(lambda: steps_saved(tmp_path) >= 3, what="a checkpoint of three steps")
            kill_trainer(first)
            code = first.process.wait(150)
        saved = steps_saved(tmp_path)
        if code and saved % STEPS:
            break
        # It came to the end of an epoch before this process saw its checkpoint: once more.
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "losses").unlink(missing_ok=True)
    assert (code, (tmp_path / "losses").exists()) == (6, False), first.said
    again = words(tmp_path, "--workers", "0")
    stoker("train", "--group", "dnn=1", "--name", "again", "--", *again, cwd=tmp_path, env=ENV)
    assert len((whole / "losses").read_text().split()) == 2 * STEPS
    assert (tmp_path / "losses").read_text() == (whole / "losses").read_text()
