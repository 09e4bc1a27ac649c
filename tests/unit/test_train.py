"""Trainings on doubles of platforms: without hosts, stopped, tried again, and what they cost."""

import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from typer.testing import CliRunner

from stoker import train as body
from stoker.catalog import load_catalog
from stoker.cli.app import app_for
from stoker.errors import NoCapacityError, PlatformError, UsageError
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Platform, Run
from stoker.records import (
    Decision,
    Evaluation,
    Event,
    Group,
    Json,
    OnNoCapacity,
    Plan,
    PlatformSettings,
    Training,
    read_json,
    sha256_of,
    to_json,
    write_json,
)
from stoker.records.training import Budget, GroupSpending, Lineage, TrainingFacts, training_record
from stoker.run.command_lines import command_line
from stoker.run.training_run import FollowedTraining, train_and_keep
from stoker.train import train
from support import builders, sample_records
from support.command import stoker
from support.job_listener import JobListener
from support.sample_records import training, workload

DNN = builders.group("dnn", "g5.2xlarge")
DATA = builders.group("data", "c7i.4xlarge")
MORE = builders.group("data", "c7i.4xlarge", 3)
OTHER = builders.group("data", "m5.4xlarge")


@dataclass
class Ended(Run):
    name: str

    def lines(self) -> Iterator[LogLine]:
        return iter(())

    def wait(self) -> JobEnd:
        return JobEnd(status="succeeded")

    def stop(self) -> None:
        return


@dataclass
class Scarce(Platform[JobSpec]):
    lacks: dict[str, float]
    says_types: bool = False
    may_pass: bool = True
    name: str = "sagemaker"
    minute: float = 0.0
    begun: int = 0
    longest: int = 63
    asked: list[tuple[float, str]] = field(default_factory=list)

    def plan(self, job: JobSpec) -> JobSpec:
        if len(job.name) > self.longest:
            raise UsageError(f"{job.name} is too long")
        return job

    def describe(self, request: JobSpec) -> dict[str, Json]:
        return {"name": request.name}

    def submit(self, request: JobSpec) -> Ended:
        self.asked.append((self.minute, request.name))
        assert request.run_name == "mnist-1", "further tries share the run's name"
        types = {group.instance_type for group in request.groups}
        short = {kind for kind in types if self.minute < self.lacks.get(kind, 0.0)}
        if short:
            error = NoCapacityError("no capacity")
            error.types = frozenset(short) if self.says_types else frozenset()
            error.may_pass = self.may_pass
            raise error
        return Ended(request.name)

    def resumed(self, requests: Sequence[JobSpec]) -> int:
        return self.begun

    def sleep(self, seconds: float) -> None:
        self.minute += seconds / 60

    def clock(self) -> float:
        return self.minute * 60


@dataclass
class Interrupted(Ended):
    """Plays a job that loses its hosts after 100 minutes, and finds none again."""

    platform: "Restarting"
    left: PlatformError | None = None
    outlives_stoker: ClassVar[bool] = True

    def wait(self) -> JobEnd:
        self.platform.minute += 100
        error = NoCapacityError("a quota is used up")
        error.had_hosts = self.platform.begins
        raise error

    def remaining(self) -> PlatformError | None:
        return self.left


@dataclass
class Restarting(Scarce):
    begins: bool = True
    left: PlatformError | None = None
    interruptions: int = 1

    def submit(self, request: JobSpec) -> Ended:
        if self.interruptions:
            self.interruptions -= 1
            self.asked.append((self.minute, request.name))
            return Interrupted(request.name, self, self.left)
        return super().submit(request)


@dataclass
class Pending(Scarce):
    """A service that keeps a job without hosts for its limit, or for `gives_up` minutes."""

    gives_up: tuple[float, ...] = ()
    limits: list[float | None] = field(default_factory=list)

    def submit(self, request: JobSpec) -> Ended:
        waited, *left = (*self.gives_up, None)
        self.gives_up = tuple(each for each in left if each is not None)
        if request.name != "mnist-1":
            return super().submit(request)
        self.limits.append(request.wait_seconds)
        self.asked.append((self.minute, request.name))
        minutes = request.wait_seconds / 60 if request.wait_seconds is not None else 60
        minutes = minutes if waited is None else waited
        self.minute += minutes
        error = NoCapacityError("no capacity")
        error.waited_seconds = 60 * minutes
        raise error


def decision() -> Decision:
    plans = [
        Plan(action="heterogeneous", groups=groups, feasible=feasible)
        for groups, feasible in (
            ((DNN, DATA), True),
            ((DNN, MORE), True),
            ((DNN, OTHER), False),
            ((DNN,), True),
            ((DNN, OTHER), True),
        )
    ]
    return msgspec.structs.replace(sample_records.decision(), plan=plans[0], plans=tuple(plans))


def run(platform, tmp_path, policy):
    told = JobListener()
    job = JobSpec(
        name="mnist-1",
        command=("python", "train.py"),
        groups=(DNN, DATA),
        run_dir=tmp_path,
        platform_settings=PlatformSettings(on_no_capacity=policy),
    )
    record = train(
        job,
        platform=platform,
        catalog=load_catalog("sagemaker"),
        decision=decision(),
        observer=told,
        sleep=platform.sleep,
        clock=platform.clock,
    )
    return record, told.texts


@pytest.mark.parametrize(
    ("platform", "wait_minutes", "asked", "next_plan_asked"),
    [
        (Scarce({"c7i.4xlarge": 12}), 60, [0, 5, 10, 15], []),
        # Three of the same hosts are as short as one; what is not feasible is no plan.
        (Scarce({"c7i.4xlarge": 1000}), 8, [0, 5, 8], [8]),
        # A quota of nothing is not waited for.
        (Scarce({"c7i.4xlarge": 1000}, may_pass=False), 60, [0], [0]),
        # A further attempt continues with the plan that got hosts.
        (Scarce({"c7i.4xlarge": 1000}, begun=1), 60, [], [0]),
        # The time in which the job had hosts is no part of its wait.
        (Restarting({"c7i.4xlarge": 205}, interruptions=2), 10, [0, 105, 210], []),
        # Kueue may have held it back for that long: the wait begins with the shortage.
        (Restarting({"c7i.4xlarge": 1000}, begins=False), 10, [0, 105, 110], [110]),
    ],
)
def test_a_job_without_hosts_is_tried_again_until_another_plan_has_its_turn(
    tmp_path, platform, wait_minutes, asked, next_plan_asked
):
    record, said = run(platform, tmp_path, OnNoCapacity(wait_minutes=wait_minutes))
    assert platform.asked == [
        *((minute, "mnist-1") for minute in asked),
        *((minute, "mnist-1-plan4") for minute in next_plan_asked),
    ]
    assert record.status == "succeeded"
    assert record.groups == ((DNN,) if next_plan_asked else (DNN, DATA))
    assert [event.what for event in record.events][: len(said)] == said


@pytest.mark.parametrize(
    ("platform", "asked", "limits"),
    [
        # The service has waited for all of it: the next plan's turn at once.
        (Pending({}), [0], [None]),
        # It gave up early: the rest is for further tries.
        (Pending({}, gives_up=(10,)), [0, 15], [None, 45 * 60]),
        (Pending({}, gives_up=(10, 20)), [0, 15, 40], [None, 45 * 60, 20 * 60]),
        # A job that was pending before an earlier attempt was lost.
        (Pending({}, gives_up=(200,)), [0], [None]),
    ],
)
def test_the_wait_of_the_service_is_part_of_the_wait(tmp_path, platform, asked, limits):
    record, _ = run(platform, tmp_path, OnNoCapacity(wait_minutes=60))
    tries = [(minute, name) for minute, name in platform.asked if name == "mnist-1"]
    assert tries == [(minute, "mnist-1") for minute in asked]
    assert platform.limits == limits
    assert record.groups == (DNN,)
    assert platform.minute == max(60, *platform.asked[-1][:1])


@pytest.mark.parametrize(
    ("platform", "policy", "asked"),
    [
        # Every other plan needs the type that is said to be short.
        (Scarce({"g5.2xlarge": 1000}, says_types=True), {"wait_minutes": 0}, [0]),
        (Scarce({"c7i.4xlarge": 1000}), {"wait_minutes": 5, "then": "fail"}, [0, 5]),
        # The job without hosts is still there.
        (Restarting({}, left=PlatformError("not deleted")), {"wait_minutes": 0}, [0]),
    ],
)
def test_no_other_plan_is_taken_where_it_cannot_help_or_may_not(tmp_path, platform, policy, asked):
    with pytest.raises(PlatformError, match=r"no capacity|not deleted"):
        run(platform, tmp_path, OnNoCapacity(**policy))
    assert platform.asked == [(minute, "mnist-1") for minute in asked]


def test_a_run_without_hosts_leaves_the_record_of_a_failed_training(tmp_path):
    platform = Scarce({"g5.2xlarge": 1000})
    with pytest.raises(NoCapacityError):
        run(platform, tmp_path, OnNoCapacity(wait_minutes=5))
    record = read_json(tmp_path / "training.json", Training)
    assert (record.status, record.failure) == ("failed", "no capacity")
    assert record.job.name == "mnist-1-plan5"
    told = [event.what for event in record.events]
    assert ["taking the next plan" in words for words in told] == [False, True] * 2 + [False] * 2
    assert [words for words in told if "retry in 5 min" in words] == told[0:5:2]
    left = "no hosts for dnn 1 x g5.2xlarge, data 1 x m5.4xlarge, and no other plan is left"
    assert told[-1] == left


@pytest.mark.parametrize(("flags", "code"), [(["--always"], 0), ([], 4)])
def test_a_pipelines_step_without_hosts_is_not_tried_again_by_the_pipeline(
    tmp_path, monkeypatch, flags, code
):
    monkeypatch.chdir(tmp_path)
    Path("workload.yaml").write_text(
        "name: mnist\ncommand: [python, -c, pass]\nplatform: local\n"
        "cluster: {dnn: {instance_type: local.c1}}\non_no_capacity: {wait_minutes: 0}\n"
    )
    platform = Scarce({"local.c1": 1000}, name="local")
    monkeypatch.setattr("stoker.run.training_order.platform_named", lambda *_, **__: platform)
    monkeypatch.setattr("stoker.run.training_run.git_state", lambda _: {})
    words = ["step train", "workload.yaml", "--name", "mnist-1", "--yes"]
    done = CliRunner().invoke(app_for("step train"), [*words, "--out", "out.json", *flags])
    found = done.exception.exit_code if isinstance(done.exception, NoCapacityError) else None
    assert (found or done.exit_code) == code
    record = read_json(Path("out.json"), Training)
    assert (record.status, record.failure) == ("failed", "no capacity")


def test_plans_that_the_platform_would_not_take_are_said_once(tmp_path):
    platform = Scarce({"c7i.4xlarge": 6}, longest=len("mnist-1"))
    _, said = run(platform, tmp_path, OnNoCapacity(wait_minutes=10))
    unfit = [words for words in said if "is too long" in words]
    assert unfit == [
        "dnn 1 x g5.2xlarge cannot replace it: mnist-1-plan4 is too long",
        "dnn 1 x g5.2xlarge, data 1 x m5.4xlarge cannot replace it: mnist-1-plan5 is too long",
    ]
    assert said[:2] == unfit


@dataclass
class Played(Ended):
    """A job whose log and end a test plays."""

    ending: Callable[[], JobEnd]
    log: Callable[[], Iterator[LogLine]]

    def lines(self) -> Iterator[LogLine]:
        return self.log()

    def wait(self) -> JobEnd:
        return self.ending()


@dataclass
class Here(Platform[JobSpec]):
    ending: Callable[[], JobEnd]
    log: Callable[[], Iterator[LogLine]] = lambda: iter(())
    name: str = "local"

    def plan(self, job: JobSpec) -> JobSpec:
        return job

    def describe(self, request: JobSpec) -> dict[str, Json]:
        return {}

    def submit(self, request: JobSpec) -> Played:
        return Played("job", self.ending, self.log)


def interrupted() -> Iterator[LogLine]:
    yield LogLine(group="dnn", host="algo-1", text="epoch 1")
    raise KeyboardInterrupt


def stopped(run_dir: Path, wait: Callable[[], JobEnd]) -> Training:
    told = JobListener()
    groups = (builders.group("dnn"),)
    with pytest.raises(KeyboardInterrupt):
        train(
            JobSpec(name="run", command=("true",), groups=groups, run_dir=run_dir),
            platform=Here(wait, interrupted),
            catalog=load_catalog("local"),
            observer=told,
        )
    assert told.submissions == 1
    (record,) = told.records
    assert (record.status, record.failure) == ("stopped", None)
    assert read_json(run_dir / "training.json", Training) == record
    return record


def test_a_stopped_training_has_a_record_of_its_own(tmp_path):
    end = JobEnd(status="stopped", exit_code=143)
    assert stopped(tmp_path, lambda: end).exit_code == 143


def test_a_job_that_leaves_no_record_is_said_so(tmp_path):
    def wait() -> JobEnd:
        raise PlatformError("no disk")

    (event,) = stopped(tmp_path, wait).events
    assert event.what == "no record was left: no disk"


def test_a_job_that_cannot_be_stopped_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(body, "STOPPED_SECONDS", 0.05)
    (event,) = stopped(tmp_path, threading.Event().wait).events
    assert event.what == "no record was left: the job has not ended yet"


def trained(folder: Path, decision: Decision) -> Training:
    record = sample_records.training()
    measured = msgspec.structs.replace(record.measured, usd_per_1000_steps=None, timeline_file=None)
    record = msgspec.structs.replace(record, measured=measured)
    write_json(folder / "stoker" / "training.json", record)
    job = JobSpec(
        name="job",
        command=("true",),
        groups=decision.plan.groups,
        run_dir=folder,
        image="registry/job@sha256:12",
        lineage=Lineage(git="ab"),
    )
    end = JobEnd(status="succeeded", exit_code=0, output_dir=folder)
    return train(job, platform=Here(lambda: end), catalog=load_catalog("local"), decision=decision)


def test_what_a_run_cost_is_the_time_that_is_billed_at_the_catalog_s_prices():
    record = sample_records.training()
    dnn, data = (
        Group(name=name, role=name, instance_type="t", count=count)
        for name, count in (("dnn", 1), ("data", 2))
    )
    budget = Budget(usd_per_hour={"dnn": 6.0, "data": 1.0}, predicted_usd=2.5)
    facts = TrainingFacts(job=record.job, status="succeeded", groups=(dnn, data), budget=budget)
    hours = {"host_seconds": {"dnn": 1800.0, "data": 3600.0}}
    assert training_record(facts).spent_usd is None
    found = training_record(replace(facts, **hours))
    assert (found.predicted_usd, found.spent_usd) == (2.5, 4.0)
    assert training_record(replace(facts, budget=Budget(), **hours)).spent_usd is None
    dear = replace(facts, budget=Budget(usd_per_hour={"dnn": 6.0}), **hours)
    assert training_record(dear).spent_usd is None, "the price of data is not known"
    # The leader counts as well, from its start only; it alone knows when hosts had no work.
    counted = (
        GroupSpending(group="dnn", usd=2.0, idle_share=0.25),
        GroupSpending(group="data", usd=0.5, idle_share=0.5),
    )
    leader = msgspec.structs.replace(record, spending=counted)
    assert training_record(replace(facts, leader=leader)).spent_usd == 2.5
    found = training_record(replace(facts, leader=leader, **hours))
    assert [(each.usd, each.idle_usd) for each in found.spending] == [(3.0, 0.75), (1.0, 0.5)]
    assert found.dollars == {"predicted_usd": 2.5, "spent_usd": 4.0, "idle_usd": 1.25}


def test_a_disk_without_space_for_a_picture_does_not_end_a_training(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    decision = sample_records.decision()
    (tmp_path / "stoker").mkdir()
    (tmp_path / "stoker" / "feed.csv").touch()
    monkeypatch.setattr(shutil, "copyfile", full)
    record = trained(tmp_path, decision)
    assert record.status == "succeeded"
    # Nobody is billed here.
    assert record.measured.usd_per_1000_steps is None
    assert record.lineage == Lineage(
        git="ab",
        image="registry/job@sha256:12",
        image_digest="sha256:12",
        decision_sha256=sha256_of(decision),
    )
    assert "a file was not kept: [Errno 28] No space left" in record.events[-1].what


def test_the_end_of_a_training_is_told_where_its_record_cannot_be_written(tmp_path):
    (tmp_path / "training.json").mkdir()
    decision = sample_records.decision()
    with pytest.raises(
        UsageError, match="the training run succeeded, but its record could not be written"
    ):
        trained(tmp_path, decision)


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


class Keeper(Platform[JobSpec]):
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

    def describe(self, request: JobSpec) -> dict[str, Json]:
        return {}

    def submit(self, request: JobSpec) -> Ended:
        return Ended(request.name)


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

    monkeypatch.setattr("stoker.run.training_run.train", train_again)
    monkeypatch.setattr("stoker.run.training_run.git_state", lambda _: {})
    job = JobSpec(name="a-1", command=("true",), groups=(), run_dir=tmp_path, records={"step": "t"})
    run = FollowedTraining(
        job=job,
        workload=workload(),
        platform=Keeper(record),  # type: ignore[arg-type]
        catalog=load_catalog("local"),
        decision=None,
        quiet=True,
        echo=False,
    )
    found = train_and_keep(run)
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
def test_an_evaluation_goes_with_the_training_that_it_judged(tmp_path, monkeypatch, again, stays):
    folder = tmp_path / "runs" / "mnist-1"
    write_json(folder / "training.json", _begun(MONDAY))
    write_json(folder / "evaluation.json", Evaluation(passed=True))

    def train_again(run: FollowedTraining) -> Training:
        if again is None:
            raise PlatformError("refused")
        write_json(run.record_file, again)
        return again

    monkeypatch.setattr("stoker.run.training_run.train_and_keep", train_again)
    workload = json.dumps({"name": "mnist", "command": ["true"]})
    stoker("train", workload, "--name", "mnist-1", cwd=tmp_path)
    assert (folder / "evaluation.json").exists() == stays
