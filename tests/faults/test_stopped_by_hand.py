"""Checks what `stoker train` and `stoker run` keep and say when Ctrl-C or SIGTERM stops them."""

import os
import signal
import subprocess
import sys

import pytest

from stoker.records import Training, read_json
from support.local_job import assert_nothing_left, until

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


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        # cli/main.py catches both for all platforms: SIGTERM in test_sagemaker_train.
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak),
    ],
)
def test_a_stopped_training_keeps_a_record_and_says_how_to_go_on(tmp_path, number, code):
    (tmp_path / "script.py").write_text(SCRIPT)
    arguments = ["train", "--out", "t.json", "--set", "feed.credits=3", "--", "python", "script.py"]
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
        os.kill(train.pid, number)
        assert train.wait(60) == code
    finally:
        train.kill()
        train.wait()
    (run_dir,) = tmp_path.glob("runs/*")
    said = errors.read_text()
    for file in (run_dir / "training.json", tmp_path / "t.json"):
        record = read_json(file, Training)
        assert (record.status, record.failure) == ("stopped", None)
        assert record.measured.steps >= 20
    assert f"kept:  runs/{run_dir.name}/training.json, t.json (status: stopped)" in said
    assert "The training was stopped" in (run_dir / "report.html").read_text()
    assert "again: stoker train --out t.json --set feed.credits=3 -- python script.py" in said
    assert_nothing_left(run_dir, set())
