import os
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.environment import RunEnvironment, RunGroup, from_environment
from stoker.errors import PlatformError, UsageError
from stoker.launch import launch, launcher
from stoker.launch.restarts import check_restarts
from stoker.logs import Log

USER = 1000


@contextmanager
def as_a_pods_user():
    if os.geteuid():
        yield
        return
    os.setegid(USER)
    os.seteuid(USER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def base_dir():
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        for name in ("model", "checkpoints", "output"):
            (folder / name).mkdir()
            (folder / name).chmod(0o777)
        yield folder
        for name in ("model", "checkpoints", "output"):
            (folder / name).chmod(0o777)


def environ(base_dir):
    group = RunGroup(name="dnn", instance_type="gpu", count=1, hosts="mini-dnn-0-{index}.mini")
    told = RunEnvironment(group="dnn", pod_groups=(group,)).to_environ()
    return {**told, "STOKER_BASE_DIR": str(base_dir), "JOB_COMPLETION_INDEX": "0"}


@pytest.mark.parametrize("name", ["model", "checkpoints", "output"])
def test_a_folder_of_a_claim_that_cannot_be_written_ends_the_launcher_at_once(base_dir, name):
    (base_dir / name).chmod(0o555)
    who = "cannot write" if os.geteuid() else f"user {USER} cannot write to {base_dir / name}"
    with as_a_pods_user(), pytest.raises(UsageError, match=who) as caught:
        launch(["touch", str(base_dir / "began")], environ(base_dir))
    assert "access point" in caught.value.fix
    assert "NFS" in caught.value.fix
    assert not (base_dir / "began").exists()


def test_folders_that_can_be_written_are_left_as_they_were(base_dir):
    (base_dir / "checkpoints").rmdir()
    with as_a_pods_user():
        launcher.check_kept_folders(base_dir)
    assert [path for path in base_dir.rglob("*") if path.is_file()] == []
    assert not (base_dir / "checkpoints").exists()
    (base_dir / "checkpoints").mkdir()


AGAIN = {"STOKER_RESTARTS": "4", "STOKER_MAX_FRESH_STARTS": "3"}


@pytest.mark.parametrize(
    "stokers", ["checkpoints/.stoker-a1b2", "model/.nfs0001", "output/data/stoker/training.json"]
)
def test_a_run_that_saves_nothing_does_not_begin_anew_for_ever(base_dir, stokers):
    # What stoker and its volumes write is nothing saved.
    (base_dir / stokers).parent.mkdir(parents=True, exist_ok=True)
    (base_dir / stokers).touch()
    with pytest.raises(PlatformError, match="restarted 4 times") as caught:
        launch(["touch", str(base_dir / "began")], {**environ(base_dir), **AGAIN})
    assert "save checkpoints" in caught.value.fix
    assert "max_fresh_starts" in caught.value.fix
    assert not (base_dir / "began").exists()
    # For the pod's status, where whoever follows the job reads it.
    assert "without progress" in (base_dir / "output" / "failure").read_text()


@pytest.mark.parametrize(
    ("told", "saved"),
    [
        ({**AGAIN, "STOKER_RESTARTS": "3"}, ""),
        (AGAIN, "checkpoints/last.pt"),
        (AGAIN, "model/model.pt"),
        (AGAIN, "output/data/last.ckpt"),
        (AGAIN, "checkpoints/.snapshot"),
        # Older ones of JobSet say nothing; no output, no bound.
        ({**AGAIN, "STOKER_RESTARTS": ""}, ""),
        ({"STOKER_RESTARTS": "9"}, ""),
    ],
)
def test_a_run_that_goes_on_from_what_it_saved_may_be_started_again(base_dir, told, saved):
    if saved:
        (base_dir / saved).parent.mkdir(parents=True, exist_ok=True)
        (base_dir / saved).touch()
    restart(base_dir, **told)


def restart(base_dir, **told):
    """Begins as the leader does."""
    output = base_dir / "output" / "data" / "stoker"
    settings = from_environment({**environ(base_dir), **told})
    check_restarts(settings, output=output, log=Log(run="r", host="leader"))


def saves(base_dir, name, at):
    path = base_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.utime(path, (at, at))


def steps(base_dir, number):
    path = base_dir / "output" / "data" / "stoker" / "timeline-rank0.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("# by rank 0\nloader,epoch\n" + "0,0\n" * number)


@pytest.mark.parametrize(
    ("saved", "num_steps", "advances"),
    [
        # One old file does not lift the limit for ever.
        ("", 5, False),
        ("checkpoints/last.pt", 5, True),
        # Saved at each start, without a step.
        ("checkpoints/last.pt", 0, False),
        # The checkpoints are elsewhere: these are logs.
        ("output/data/events.log", 5, False),
    ],
)
def test_a_crash_loop_is_bounded_by_progress(base_dir, saved, num_steps, advances):
    restart(base_dir)
    saves(base_dir, "checkpoints/first.pt", at=1000)
    steps(base_dir, 5)
    restart(base_dir, **AGAIN | {"STOKER_RESTARTS": "1"})
    for number in range(2, 4):
        if saved:
            saves(base_dir, saved, at=1000 + number)
        steps(base_dir, num_steps)
        restart(base_dir, **AGAIN | {"STOKER_RESTARTS": str(number)})
    for number in range(4, 12):
        if saved:
            saves(base_dir, saved, at=1000 + number)
        told = AGAIN | {"STOKER_RESTARTS": str(number)}
        if advances or number == 4:
            restart(base_dir, **told)
        else:
            with pytest.raises(PlatformError, match=f"restarted {number - 1} times without"):
                restart(base_dir, **told)
            break


def test_progress_starts_the_count_again(base_dir):
    restart(base_dir)
    for number in range(1, 4):
        restart(base_dir, **AGAIN | {"STOKER_RESTARTS": str(number)})
    saves(base_dir, "checkpoints/last.pt", at=1000)
    for number in range(4, 8):
        restart(base_dir, **AGAIN | {"STOKER_RESTARTS": str(number)})
    with pytest.raises(PlatformError, match="restarted 4 times without progress"):
        restart(base_dir, **AGAIN | {"STOKER_RESTARTS": "8"})
