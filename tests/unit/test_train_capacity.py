from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from stoker.catalog import load_catalog
from stoker.cli.app import app_for
from stoker.errors import NoCapacityError, PlatformError, UsageError
from stoker.platforms.base import JobEnd, JobSpec, LogLine
from stoker.records import Decision, Json, OnNoCapacity, Plan, PlatformSettings, Training, read_json
from stoker.train import train
from support import builders, sample_records

DNN = builders.group("dnn", "g5.2xlarge")
DATA = builders.group("data", "c7i.4xlarge")
MORE = builders.group("data", "c7i.4xlarge", 3)
OTHER = builders.group("data", "m5.4xlarge")


@dataclass
class Ended:
    name: str

    def lines(self) -> Iterator[LogLine]:
        return iter(())

    def wait(self) -> JobEnd:
        return JobEnd(status="succeeded")

    def stop(self) -> None:
        return


@dataclass
class Scarce:
    lacks: dict[str, float]
    says_types: bool = False
    may_pass: bool = True
    name: str = "sagemaker"
    minute: float = 0.0
    begun: int = 0
    asked: list[tuple[float, str]] = field(default_factory=list)

    def plan(self, job: JobSpec) -> JobSpec:
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

    def wait(self) -> JobEnd:
        self.platform.minute += 100
        error = NoCapacityError("a quota is used up")
        error.had_hosts = self.platform.begins
        raise error

    def leave(self) -> str:
        return ""

    def clean_up(self) -> None:
        return

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
    said: list[str] = []
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
        on_line=lambda line: said.append(line.text),
        sleep=platform.sleep,
        clock=platform.clock,
    )
    return record, said


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
    assert (
        told[-1]
        == "no hosts for dnn 1 x g5.2xlarge, data 1 x m5.4xlarge, and no other plan is left"
    )


@dataclass
class Empty(Scarce):
    def submit(self, request: JobSpec) -> Ended:
        raise NoCapacityError("no capacity")


@pytest.mark.parametrize(("flags", "code"), [(["--always"], 0), ([], 4)])
def test_a_pipelines_step_without_hosts_is_not_tried_again_by_the_pipeline(
    tmp_path, monkeypatch, flags, code
):
    monkeypatch.chdir(tmp_path)
    Path("workload.yaml").write_text(
        "name: mnist\ncommand: [python, -c, pass]\nplatform: local\n"
        "on_no_capacity: {wait_minutes: 0}\n"
    )
    platform = Empty({}, name="local")
    monkeypatch.setattr("stoker.platforms.platform_named", lambda *_, **__: platform)
    monkeypatch.setattr("stoker.cli.kept_training.git_state", lambda _: {})
    words = ["train", "workload.yaml", "--name", "mnist-1", "--yes"]
    done = CliRunner().invoke(app_for("train"), [*words, "--out", "out.json", *flags])
    found = done.exception.exit_code if isinstance(done.exception, NoCapacityError) else None
    assert (found or done.exit_code) == code
    record = read_json(Path("out.json"), Training)
    assert (record.status, record.failure) == ("failed", "no capacity")


@dataclass
class Narrow(Scarce):
    def plan(self, job: JobSpec) -> JobSpec:
        if job.run:
            raise UsageError(f"{job.name} is too long")
        return job


def test_plans_that_the_platform_would_not_take_are_said_once(tmp_path):
    platform = Narrow({"c7i.4xlarge": 6})
    _, said = run(platform, tmp_path, OnNoCapacity(wait_minutes=10))
    unfit = [words for words in said if "is too long" in words]
    assert unfit == [
        "dnn 1 x g5.2xlarge cannot replace it: mnist-1-plan4 is too long",
        "dnn 1 x g5.2xlarge, data 1 x m5.4xlarge cannot replace it: mnist-1-plan5 is too long",
    ]
    assert said[:2] == unfit
