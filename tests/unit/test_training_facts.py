from dataclasses import replace

import msgspec
import pytest

from stoker.records import Event, Group, Job
from stoker.records.training import Budget, TrainingFacts, copied_to, training_record
from support.sample_records import training

LEADER = training()
FACTS = TrainingFacts(
    leader=LEADER,
    job=Job(platform="sagemaker", name="asked-2", url="https://job"),
    status="succeeded",
    exit_code=1,
    groups=(Group(name="dnn", role="dnn", instance_type="ml.g5.xlarge", count=1),),
    workload_sha256="a" * 64,
    decision_id="0123456789ab",
    model_uri="s3://models/1",
    timeline_file="timeline.csv",
)
NOTHING = replace(FACTS, leader=None, strategy="mpi", engine="ray", timeline_file=None)


def told(**facts):
    return training_record(replace(FACTS, **facts))


def test_each_field_is_as_the_leader_saw_it_or_as_it_was_asked_for():
    found = told()
    for field in ("hosts", "strategy", "engine", "metrics", "events", "data_group_release_seconds"):
        assert getattr(found, field) == getattr(LEADER, field)
    for field in ("groups", "job", "workload_sha256", "decision_id", "model_uri"):
        assert getattr(found, field) == getattr(FACTS, field)


def test_without_the_leader_s_record_the_facts_of_the_platform_are_all_there_is():
    found = training_record(replace(NOTHING, failure="no image"))
    assert (found.strategy, found.engine, found.exit_code) == ("mpi", "ray", 1)
    assert (found.failure, found.hosts, found.measured) == ("no image", (), None)


FAILED = {"status": "failed", "failure": "its words"}
UNFED = {"status": "failed", "exit_code": 0, "is_unfed": True, "failure": "no batch came"}


@pytest.mark.parametrize(
    ("leader", "facts", "expected"),
    [
        # The training command's exit code counts before the host's.
        ({"exit_code": 3}, {}, {"exit_code": 3}),
        ({"exit_code": None}, {}, {"exit_code": 1}),
        # The platform's end counts before the leader's, the leader's words before the platform's.
        ({"status": "succeeded"}, {"status": "failed"}, {"status": "failed"}),
        (FAILED, {"status": "failed", "failure": "exit code 1"}, {"failure": "its words"}),
        ({}, {"status": "failed", "failure": "exit code 1"}, {"failure": "exit code 1"}),
        # What fails in a run that the user stops is no failure.
        (FAILED, {"is_interrupted": True, "last_words": ("x",)}, {"status": "stopped"}),
        (FAILED, {"status": "failed", "is_interrupted": True}, {"failure": None}),
        # A training that nobody fed has failed, though its hosts ended well.
        (UNFED, {"exit_code": 0}, {k: UNFED[k] for k in ("status", "exit_code", "failure")}),
        (UNFED, {"is_interrupted": True}, {"status": "stopped"}),
        # So has one that its budget ended.
        ({**FAILED, "exit_code": 0}, {}, {"status": "failed"}),
        ({**FAILED, "exit_code": 9}, {}, {"status": "succeeded"}),
        ({}, {"release_seconds": 7.5}, {"data_group_release_seconds": 7.5}),
    ],
)
def test_who_is_believed_where_the_leader_and_the_platform_differ(leader, facts, expected):
    found = told(leader=msgspec.structs.replace(LEADER, **leader), **facts)
    assert {field: getattr(found, field) for field in expected} == expected


def test_where_not_even_the_launcher_worked_the_log_is_told():
    failed = replace(NOTHING, status="failed", failure="it ended", last_words=("no module", "x"))
    assert training_record(failed).failure == "it ended\nno module\nx"
    assert told(status="failed", failure="it ended", last_words=("x",)).failure == "it ended"
    assert training_record(replace(failed, status="succeeded", failure=None)).failure is None


def test_events_of_all_who_saw_some_are_in_the_order_of_time():
    early, late = (Event(when=f"{year}-01-01T00:00:00.000Z", what="seen") for year in (2020, 2099))
    assert told(events=(late, early)).events == (early, *LEADER.events, late)


def test_a_step_costs_what_all_hosts_cost_while_it_lasts():
    found = told(budget=Budget(usd_per_hour={"dnn": 7.2})).measured
    assert found.usd_per_1000_steps == pytest.approx(found.step_seconds * 2)
    assert told().measured.usd_per_1000_steps is None


def test_a_record_written_elsewhere_takes_its_timeline_along(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "timeline.csv").write_text("loader,epoch\n")
    file = tmp_path / "output" / "training" / "training.json"
    found = copied_to(file, told(), run_dir=tmp_path / "run", model_uri="model")
    assert (file.parent / found.measured.timeline_file).read_text() == "loader,epoch\n"
    assert found.model_uri == "model"
    assert copied_to(tmp_path / "run" / "t.json", told(), run_dir=tmp_path / "run") == told()
    assert len(list((tmp_path / "run").iterdir())) == 1
