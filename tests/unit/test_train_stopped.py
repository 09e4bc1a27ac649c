import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker import train as body
from stoker.catalog import load_catalog
from stoker.errors import PlatformError
from stoker.platforms.base import JobEnd, JobSpec, LogLine
from stoker.records import Json, Training, read_json
from stoker.train import train
from support import builders

STOPPED = JobEnd(status="stopped", exit_code=143)


class Interrupted:
    """Plays a platform and its run, which is interrupted while its lines are read."""

    name = "local"

    def __init__(self, ends: JobEnd | Exception | None) -> None:
        self._ends = ends

    def plan(self, job: JobSpec) -> JobSpec:
        return job

    def describe(self, request: JobSpec) -> dict[str, Json]:
        return {}

    def submit(self, request: JobSpec) -> "Interrupted":
        return self

    def lines(self) -> Iterator[LogLine]:
        yield LogLine(group="dnn", host="algo-1", text="epoch 1")
        raise KeyboardInterrupt

    def wait(self) -> JobEnd:
        if isinstance(self._ends, Exception):
            raise self._ends
        while self._ends is None:
            threading.Event().wait(60)
        return self._ends

    def stop(self) -> None:
        return


def stopped(run_dir: Path, ends: JobEnd | Exception | None) -> Training:
    kept: list[Training] = []
    told: list[str] = []
    groups = (builders.group("dnn"),)
    with pytest.raises(KeyboardInterrupt):
        train(
            JobSpec(name="run", command=("true",), groups=groups, run_dir=run_dir),
            platform=Interrupted(ends),
            catalog=load_catalog("local"),
            on_stop=kept.append,
            on_submit=lambda: told.append("submitted"),
        )
    assert told == ["submitted"]
    (record,) = kept
    assert (record.status, record.failure) == ("stopped", None)
    assert read_json(run_dir / "training.json", Training) == record
    return record


def test_a_stopped_training_has_a_record_of_its_own(tmp_path):
    assert stopped(tmp_path, STOPPED).exit_code == 143


def test_a_job_that_leaves_no_record_is_said_so(tmp_path):
    (event,) = stopped(tmp_path, PlatformError("no disk")).events
    assert event.what == "no record was left: no disk"


def test_a_job_that_cannot_be_stopped_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(body, "STOPPED_SECONDS", 0.05)
    (event,) = stopped(tmp_path, None).events
    assert event.what == "no record was left: the job has not ended yet"
