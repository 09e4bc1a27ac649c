import json

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.cli.kept_training import train_and_keep
from stoker.cli.train import command_line
from stoker.errors import PlatformError
from stoker.platforms.base import JobSpec
from stoker.records import Evaluation, Event, Training, to_json, write_json
from support.command import stoker
from support.sample_records import training, workload


@pytest.mark.parametrize(
    ("arguments", "from_step", "expected"),
    [
        (["train", "--", "python", "my script.py"], None, "stoker train -- python 'my script.py'"),
        (["run", "w.yaml"], "train", "stoker run w.yaml --from train"),
        (["run", "w.yaml", "--from", "decide"], "train", "stoker run w.yaml --from train"),
        (["run", "--from=decide", "w.yaml"], "train", "stoker run w.yaml --from train"),
    ],
)
def test_the_command_that_goes_on_has_the_words_of_the_first(arguments, from_step, expected):
    assert command_line(arguments, from_step=from_step) == expected


def _begun(when: str, what: str = "agent joined") -> Training:
    events = (Event(when=when, what="training started"), Event(when=when, what=what))
    return msgspec.structs.replace(training(), events=events)


class Keeper:
    """Takes a platform's place that kept the record of an earlier attempt."""

    name = "local"

    def __init__(self, record: Training) -> None:
        self.record = record

    def plan(self, job: JobSpec) -> JobSpec:
        return job

    def kept(self, _: JobSpec) -> str:
        return to_json(self.record)

    def keep(self, _: JobSpec, record: str) -> None:
        self.record = msgspec.json.decode(record, type=Training)

    is_cancelled = has_failed = lost = adopting = submit = describe = plan


@pytest.mark.parametrize(
    ("status", "is_unfed", "is_taken"),
    [("succeeded", False, True), ("failed", True, True), ("failed", False, False)],
)
def test_a_step_that_is_tried_again_does_not_repeat_a_training_that_nobody_fed(
    tmp_path, monkeypatch, status, is_unfed, is_taken
):
    record = msgspec.structs.replace(training(), status=status, is_unfed=is_unfed)
    again: list[JobSpec] = []

    def train_again(job: JobSpec, **_: object) -> Training:
        again.append(job)
        return record

    monkeypatch.setattr("stoker.train.train", train_again)
    monkeypatch.setattr("stoker.cli.kept_training.git_state", lambda _: {})
    job = JobSpec(name="a-1", command=("true",), groups=(), run_dir=tmp_path, records={"step": "t"})
    found = train_and_keep(
        job,
        workload=workload(),
        platform=Keeper(record),  # type: ignore[arg-type]
        catalog=load_catalog("local"),
        decision=None,
        again="",
        quiet=True,
        echo=False,
    )
    assert (found, not again) == (record, is_taken)


MONDAY, TUESDAY = "2026-11-16T08:00:00.000Z", "2026-11-17T08:00:00.000Z"


@pytest.mark.parametrize(
    ("again", "stays"),
    [
        # Refused; the job that had ended is followed again, with other events; another job.
        (None, True),
        (_begun(MONDAY, "utilisation: cpu 40%"), True),
        (_begun(TUESDAY), False),
    ],
)
def test_the_evaluation_of_a_name_goes_with_the_training_that_it_judged(
    tmp_path, monkeypatch, again, stays
):
    folder = tmp_path / "runs" / "mnist-1"
    write_json(folder / "training.json", _begun(MONDAY))
    write_json(folder / "evaluation.json", Evaluation(passed=True))

    def train_again(job: JobSpec, **_: object) -> Training:
        if again is None:
            raise PlatformError("refused")
        write_json(job.run_dir / "training.json", again)
        return again

    monkeypatch.setattr("stoker.cli.kept_training.train_and_keep", train_again)
    workload = json.dumps({"name": "mnist", "command": ["true"]})
    stoker("train", workload, "--name", "mnist-1", cwd=tmp_path)
    assert (folder / "evaluation.json").exists() == stays
