"""A training on a platform that bills nobody."""

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.platforms.base import JobEnd, JobSpec
from stoker.records import Decision, Group, Training, sha256_of, write_json
from stoker.records.training import Budget, GroupSpending, Lineage, TrainingFacts, training_record
from stoker.train import train
from support import sample_records


def here(output_dir: Path) -> SimpleNamespace:
    """Returns a double of the local platform, whose job has ended."""
    end = JobEnd(status="succeeded", exit_code=0, output_dir=output_dir)
    run = SimpleNamespace(
        name="job", output_dir=output_dir, lines=lambda: iter(()), wait=lambda: end, stop=list
    )
    return SimpleNamespace(
        name="local", plan=lambda job: job, describe=lambda _: {}, submit=lambda _: run
    )


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
    return train(job, platform=here(folder), catalog=load_catalog("local"), decision=decision)


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
    assert training_record(replace(facts, budget=None, **hours)).spent_usd is None
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
    with pytest.raises(UsageError, match="the training succeeded, but its record is lost"):
        trained(tmp_path, decision)
