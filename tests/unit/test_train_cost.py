"""Checks what a training cost per step, where the platform that ran it knows no prices."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.platforms.base import JobEnd, JobSpec, LogLine
from stoker.records import Decision, Group, Json, Training, write_json
from stoker.train import train
from support import sample_records


@dataclass
class _Run:
    output_dir: Path
    name: str = "job"

    def lines(self) -> Iterator[LogLine]:
        return iter(())

    def wait(self) -> JobEnd:
        return JobEnd(
            status="succeeded",
            exit_code=0,
            failure=None,
            output_dir=self.output_dir,
            data_group_release_seconds=None,
        )

    def stop(self) -> None:
        """It has ended."""


@dataclass
class _Pod:
    """Plays the pod of a pipeline's step, as `local` is there."""

    output_dir: Path
    name: str = "local"

    def plan(self, job: JobSpec) -> JobSpec:
        return job

    def describe(self, request: JobSpec) -> dict[str, Json]:
        return {}

    def submit(self, request: JobSpec) -> _Run:
        return _Run(self.output_dir)


def trained(folder: Path, groups: tuple[Group, ...], decision: Decision) -> Training:
    record = sample_records.training()
    assert record.measured
    measured = msgspec.structs.replace(record.measured, usd_per_1000_steps=None, timeline_file=None)
    record = msgspec.structs.replace(record, measured=measured)
    write_json(folder / "stoker" / "training.json", record)
    job = JobSpec(name="job", command=("true",), groups=groups, run_dir=folder)
    return train(job, platform=_Pod(folder), catalog=load_catalog("local"), decision=decision)


def test_a_host_of_the_decisions_plan_costs_what_the_decision_says(tmp_path: Path) -> None:
    gpu = Group(name="dnn", role="dnn", instance_type="g5.xlarge", count=1)
    decision = sample_records.decision()
    plan = msgspec.structs.replace(decision.plan, groups=(gpu,))
    prices = msgspec.structs.replace(decision.prices, purchase="on-demand")
    decision = msgspec.structs.replace(decision, plan=plan, prices=prices)
    record = trained(tmp_path, (gpu,), decision)
    assert record.measured
    assert plan.predicted
    usd = record.measured.step_seconds * plan.predicted.usd_per_hour / 3.6
    assert record.measured.usd_per_1000_steps == pytest.approx(usd)


def test_the_price_of_another_cluster_than_the_decisions_is_not_guessed(tmp_path: Path) -> None:
    gpu = Group(name="dnn", role="dnn", instance_type="g5.xlarge", count=1)
    record = trained(tmp_path, (gpu,), sample_records.decision())
    assert record.measured
    assert record.measured.usd_per_1000_steps is None


def test_where_nobody_is_billed_a_run_has_no_dollars(tmp_path: Path) -> None:
    decision = sample_records.decision()
    record = trained(tmp_path, decision.plan.groups, decision)
    assert record.measured
    assert record.measured.usd_per_1000_steps is None
