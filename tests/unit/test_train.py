"""Trainings on doubles of platforms: without hosts, stopped, tried again, and what they cost."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.errors import NoCapacityError, PlatformError, UsageError
from stoker.platforms.base import JobEnd, JobSpec, LogLine, Platform, Run
from stoker.records import (
    Decision,
    Group,
    Json,
    OnNoCapacity,
    Plan,
    PlatformSettings,
    Training,
    read_json,
)
from stoker.records.training import Budget, GroupSpending, completed
from stoker.run.train import train
from support import builders, sample_records

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
    told: list[LogLine] = []
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
        on_line=told.append,
        sleep=platform.sleep,
        clock=platform.clock,
    )
    return record, [line.text for line in told]


@pytest.mark.parametrize(
    ("platform", "wait_minutes", "asked", "next_plan_asked"),
    [
        (Scarce({"c7i.4xlarge": 12}), 60, [0, 5, 10, 15], []),
        (Scarce({"c7i.4xlarge": 1000}), 8, [0, 5, 8], [8]),
        (Scarce({"c7i.4xlarge": 1000}, may_pass=False), 60, [0], [0]),
        (Scarce({"c7i.4xlarge": 1000}, begun=1), 60, [], [0]),
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
    ("platform", "policy", "asked"),
    [
        (Scarce({"g5.2xlarge": 1000}, says_types=True), {"wait_minutes": 0}, [0]),
        (Scarce({"c7i.4xlarge": 1000}), {"wait_minutes": 5, "then": "fail"}, [0, 5]),
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
    groups = (builders.group("dnn"),)
    with pytest.raises(KeyboardInterrupt):
        train(
            JobSpec(name="run", command=("true",), groups=groups, run_dir=run_dir),
            platform=Here(wait, interrupted),
            catalog=load_catalog("local"),
        )
    record = read_json(run_dir / "training.json", Training)
    assert (record.status, record.failure) == ("stopped", None)
    return record


def test_a_stopped_training_has_a_record_of_its_own(tmp_path):
    end = JobEnd(status="stopped", exit_code=143)
    assert stopped(tmp_path, lambda: end).exit_code == 143


def test_what_a_run_cost_is_the_time_that_is_billed_at_the_catalog_s_prices():
    record = sample_records.training()
    dnn, data = (
        Group(name=name, role=name, instance_type="t", count=count)
        for name, count in (("dnn", 1), ("data", 2))
    )
    budget = Budget(usd_per_hour={"dnn": 6.0, "data": 1.0}, predicted_usd=2.5)
    outside = Training(job=record.job, status="succeeded", groups=(dnn, data))
    hours = {"dnn": 1800.0, "data": 3600.0}
    assert completed(outside, None, budget=budget).spent_usd is None
    found = completed(outside, None, budget=budget, host_seconds=hours)
    assert (found.predicted_usd, found.spent_usd) == (2.5, 4.0)
    dear = completed(outside, None, budget=Budget(usd_per_hour={"dnn": 6.0}), host_seconds=hours)
    assert dear.spent_usd is None, "the price of data is not known"
    # The leader counts as well, from its start only; it alone knows when hosts had no work.
    counted = (
        GroupSpending(group="dnn", usd=2.0, idle_share=0.25),
        GroupSpending(group="data", usd=0.5, idle_share=0.5),
    )
    leader = msgspec.structs.replace(record, spending=counted)
    assert completed(outside, leader, budget=budget).spent_usd == 2.5
    found = completed(outside, leader, budget=budget, host_seconds=hours)
    assert [(each.usd, each.idle_usd) for each in found.spending] == [(3.0, 0.75), (1.0, 0.5)]
    assert found.dollars == {"predicted_usd": 2.5, "spent_usd": 4.0, "idle_usd": 1.25}
