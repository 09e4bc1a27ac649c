"""Checks what `stoker train` and `stoker run` keep and say when Ctrl-C or SIGTERM stops them."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from stoker.records import Training, read_json
from support.local_job import assert_nothing_left, marked_processes, until

pytestmark = pytest.mark.fault

SCRIPT = """\
import pathlib, time
import torch
from stoker import DataLoader
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        time.sleep(0.005)
        return index
for number, batch in enumerate(DataLoader(Slow(), batch_size=2)):
    # The record holds what reached the disk, once a second.
    if number == 150:
        pathlib.Path("begun").touch()
"""


# cli/main.py catches both for all platforms: SIGTERM in test_sagemaker_train.
@pytest.mark.parametrize("group", [(), ("--group", "dnn=1", "--group", "data=1:1")])
def test_ctrl_c_leaves_a_record_and_nothing_running_and_says_how_to_go_on(tmp_path, group):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["train", "--out", "t.json", *group, "--set", "feed.credits=3"]
    arguments += ["--", "python", "script.py"]
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        train = subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", *arguments],
            cwd=tmp_path,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        until((tmp_path / "begun").exists, what="steps of a second are done")
        (run_dir,) = tmp_path.resolve().glob("runs/*")
        pids = marked_processes(run_dir)
        assert pids
        # As a terminal does: the whole foreground group gets it.
        os.killpg(train.pid, signal.SIGINT)
        assert train.wait(60) == 130
    finally:
        train.kill()
        train.wait()
    said = errors.read_text()
    for file in (run_dir / "training.json", tmp_path / "t.json"):
        record = read_json(file, Training)
        assert (record.status, record.failure) == ("stopped", None)
        assert record.measured.steps >= 20
    assert f"kept:  runs/{run_dir.name}/training.json, t.json (status: stopped)" in said
    assert "The training was stopped" in (run_dir / "report.html").read_text()
    assert f"again: stoker {shlex.join(arguments)}" in said
    assert_nothing_left(run_dir, pids)


STUBBORN = """\
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("begun").touch()
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("times", [2, 3, 20])
def test_ctrl_c_again_ends_all_at_once_and_leaves_a_record_and_no_token(tmp_path, times):
    (tmp_path / "script.py").write_text(STUBBORN)
    errors = tmp_path / "errors"
    with errors.open("w") as stream:
        train = subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", "train", "--", "python", "script.py"],
            cwd=tmp_path,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        until((tmp_path / "begun").exists, what="the script has begun")
        (run_dir,) = tmp_path.resolve().glob("runs/*")
        assert (run_dir / "token").exists()
        pids = marked_processes(run_dir)
        os.killpg(train.pid, signal.SIGINT)
        until((tmp_path / "asked").exists, what="the script is asked to end")
        for _ in range(times - 1):
            os.killpg(train.pid, signal.SIGINT)
        # Long before the script's grace has passed.
        assert train.wait(25) == 130
    finally:
        train.kill()
        train.wait()
    said = errors.read_text()
    assert "Traceback" not in said
    assert read_json(run_dir / "training.json", Training).status == "stopped"
    assert not (run_dir / "token").exists()
    assert_nothing_left(run_dir, pids)
