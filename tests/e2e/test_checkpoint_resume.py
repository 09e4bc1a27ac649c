"""The example's trainer is killed in the middle of an epoch, and goes on elsewhere."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest
import torch

from support.few_digits import few_digits
from support.local_job import LocalJob, marked_processes, until
from support.warm_python import ends_well

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "mnist" / "train.py"
STEPS = 33

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return few_digits(tmp_path_factory.mktemp("digits") / "data")


def words(folder: Path, digits: Path, *more: str) -> list[str]:
    return [
        *("--data", str(digits)),
        *("--epochs", "2", "--samples", str(4 * STEPS), "--batch-size", "4"),
        *("--save-every", "3"),
        *("--loss-log", str(folder / "losses"), "--checkpoints", str(folder / "checkpoints")),
        *more,
    ]


def train(folder: Path, digits: Path, *more: str) -> None:
    ends_well(str(SCRIPT), *words(folder, digits, *more), timeout=200)


def steps_saved(folder: Path) -> int:
    path = folder / "checkpoints" / "checkpoint.pt"
    return len(torch.load(path, weights_only=True)["losses"]) if path.exists() else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory, digits):
    folder = tmp_path_factory.mktemp("whole")
    train(folder, digits, "--workers", "0")
    assert len((folder / "losses").read_text().split()) == 2 * STEPS
    return folder


def children_of_launcher(job: LocalJob) -> list[int]:
    """Returns the leader's processes that a launcher has started: its script, once it is there."""
    started = []
    for pid in marked_processes(job.base_dir(job.leader)):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.environ().get("STOKER_LAUNCHER_PID") == str(process.ppid()):
                started.append(pid)
    return started


def kill_in_an_epoch(job: LocalJob, folder: Path, *, after: int) -> None:
    trainers: list[int] = []

    def has_begun() -> bool:
        trainers[:] = children_of_launcher(job)
        return bool(trainers)

    # Looked for before: its steps are short.
    until(has_begun, what="the trainer")
    until(lambda: steps_saved(folder) >= after, what=f"a checkpoint of {after} steps")
    (trainer,) = trainers
    # On a busy machine it may have ended by now.
    with contextlib.suppress(ProcessLookupError):
        os.kill(trainer, signal.SIGKILL)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def test_killed_trainer_goes_on_with_other_hosts_and_workers_on_the_same_losses(
    tmp_path, whole, digits, monkeypatch
):
    # Sums of floats depend on how many threads they are shared among.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    command = ("python", str(SCRIPT), *words(tmp_path, digits, "--workers", "1"))
    for number in range(5):
        with LocalJob(made(tmp_path / f"first-{number}"), command, data=1) as job:
            kill_in_an_epoch(job, tmp_path, after=3)
            status = job.end().status
        saved = steps_saved(tmp_path)
        if status == "failed" and saved % STEPS:
            break
        # It came to the end of an epoch before this process saw its checkpoint: once more.
        print(f"begun again: {status}, {saved} steps saved")
        shutil.rmtree(tmp_path / "checkpoints")
        (tmp_path / "losses").unlink(missing_ok=True)
    assert status == "failed"
    assert saved % STEPS, "killed in the middle of an epoch"
    assert saved < 2 * STEPS
    assert not (tmp_path / "losses").exists()
    command = ("python", str(SCRIPT), *words(tmp_path, digits, "--workers", "0"))
    with LocalJob(made(tmp_path / "second"), command, data=0) as job:
        assert job.end().status == "succeeded"
    assert (tmp_path / "losses").read_text() == (whole / "losses").read_text()


def test_a_finished_run_has_nothing_left_to_do(whole, digits):
    before = (whole / "losses").read_text()
    train(whole, digits, "--workers", "1")
    assert (whole / "losses").read_text() == before
