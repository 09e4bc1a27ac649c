"""Checks what `stoker train` and `stoker run` keep and say when Ctrl-C or SIGTERM stops them."""

import contextlib
import os
import shlex
import signal

import pytest

from stoker.records import Training, read_json
from support.local_job import assert_nothing_left, marked_processes, shared_memory, until
from support.train_command import Verb

pytestmark = [pytest.mark.e2e, pytest.mark.fault]


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


@contextlib.contextmanager
def begun(folder, script, *words):
    (folder / "script.py").write_text(script)
    before = shared_memory()
    train = Verb(folder, [*words, "--", "python", "script.py"], start_new_session=True)
    try:
        until((folder / "begun").exists, what="the script has begun")
        (run_dir,) = folder.resolve().glob("runs/*")
        pids = marked_processes(run_dir)
        assert pids
        yield train, run_dir
    finally:
        train.kill()
    assert_nothing_left(run_dir, pids, before=before)


# cli/main.py catches both for all platforms: SIGTERM in keel/test_sagemaker_runs.
@pytest.mark.parametrize("group", [(), ("--group", "dnn=1", "--group", "data=1:1")])
def test_ctrl_c_leaves_a_record_and_nothing_running_and_says_how_to_go_on(tmp_path, group):
    arguments = ["train", *group, "--set", "feed.max_errors=3"]
    with begun(tmp_path, SCRIPT, *arguments) as (train, run_dir):
        # As a terminal does: the whole foreground group gets it.
        os.killpg(train.process.pid, signal.SIGINT)
        assert train.ended_with() == 130
        record = read_json(run_dir / "training.json", Training)
        assert (record.status, record.failure) == ("stopped", None)
        assert record.measured.steps >= 20
        kept = f"kept:  runs/{run_dir.name}/training.json, and what the script saved"
        assert kept in train.said
        assert "The training was stopped" in (run_dir / "report.html").read_text()
        again = shlex.join([*arguments, "--", "python", "script.py"])
        assert f"again: stoker {again}" in train.said


STUBBORN = """\
import pathlib, signal, time
signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("asked").touch())
pathlib.Path("begun").touch()
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("times", [2, 20])
def test_ctrl_c_again_ends_all_at_once_and_leaves_a_record_and_no_token(tmp_path, times):
    with begun(tmp_path, STUBBORN, "train") as (train, run_dir):
        assert (run_dir / "token").exists()
        os.killpg(train.process.pid, signal.SIGINT)
        until((tmp_path / "asked").exists, what="the script is asked to end")
        for _ in range(times - 1):
            os.killpg(train.process.pid, signal.SIGINT)
        # Long before the script's grace has passed.
        assert train.process.wait(80) == 130
        assert "Traceback" not in train.said
        assert read_json(run_dir / "training.json", Training).status == "stopped"
        assert not (run_dir / "token").exists()
