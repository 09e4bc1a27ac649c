"""Checks which fact each field of a training's record is taken from."""

from dataclasses import replace

import msgspec
import pytest

from stoker.records import Event, Group, Job, Training, read_json
from stoker.records.training import TrainingFacts, copied_to, training_record, write_training
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


def led(**fields):
    return msgspec.structs.replace(LEADER, **fields)


def test_what_only_the_leader_sees_is_as_it_wrote_it():
    found = told()
    for field in ("hosts", "strategy", "engine", "metrics", "events"):
        assert getattr(found, field) == getattr(LEADER, field)


def test_what_was_asked_for_is_as_it_was_asked_for():
    found = told()
    for field in ("groups", "job", "workload_sha256", "decision_id", "model_uri"):
        assert getattr(found, field) == getattr(FACTS, field)


def test_without_the_leader_s_record_the_facts_of_the_platform_are_all_there_is():
    found = training_record(replace(NOTHING, failure="no image"))
    assert (found.strategy, found.engine, found.exit_code) == ("mpi", "ray", 1)
    assert (found.failure, found.hosts, found.measured) == ("no image", (), None)


def test_the_training_command_s_own_exit_code_counts_before_the_host_s():
    assert told(leader=led(exit_code=3)).exit_code == 3
    assert told(leader=led(exit_code=None)).exit_code == 1


def test_the_platform_s_end_counts_before_the_leader_s():
    assert told(leader=led(status="succeeded"), status="failed").status == "failed"


def test_a_training_that_nobody_fed_has_failed_though_its_hosts_ended_well():
    unfed = led(status="failed", exit_code=0, is_unfed=True, failure="no batch came")
    found = told(leader=unfed, exit_code=0)
    assert (found.status, found.exit_code, found.failure) == ("failed", 0, "no batch came")
    assert told(leader=unfed, is_interrupted=True).status == "stopped"


def test_the_leader_s_words_of_a_failure_count_before_the_platform_s():
    failed = led(status="failed", failure="its words")
    assert told(leader=failed, status="failed", failure="exit code 1").failure == "its words"
    assert told(status="failed", failure="exit code 1").failure == "exit code 1"


def test_where_not_even_the_launcher_worked_the_log_is_told():
    failed = replace(NOTHING, status="failed", failure="it ended", last_words=("no module", "x"))
    assert training_record(failed).failure == "it ended\nno module\nx"
    assert told(status="failed", failure="it ended", last_words=("x",)).failure == "it ended"
    assert training_record(replace(failed, status="succeeded", failure=None)).failure is None


def test_what_fails_in_a_run_that_the_user_stops_is_no_failure():
    failed = led(status="failed", failure="its words")
    found = told(leader=failed, status="failed", is_interrupted=True, last_words=("x",))
    assert (found.status, found.failure) == ("stopped", None)


def test_events_of_all_who_saw_some_are_in_the_order_of_time():
    early, late = (Event(when=f"{year}-01-01T00:00:00.000Z", what="seen") for year in (2020, 2099))
    assert told(events=(late, early)).events == (early, *LEADER.events, late)


def test_the_release_falls_back_to_what_the_coordinator_saw():
    assert told(release_seconds=7.5).data_group_release_seconds == 7.5
    seen = LEADER.data_group_release_seconds
    assert seen is not None
    assert told().data_group_release_seconds == seen


def test_a_step_costs_what_all_hosts_cost_while_it_lasts():
    found = told(usd_per_hour=7.2).measured
    assert found
    assert found.usd_per_1000_steps == pytest.approx(found.step_seconds * 2)
    unknown = told().measured
    assert unknown
    assert unknown.usd_per_1000_steps is None


def test_the_leader_writes_what_it_measured_as_it_is(tmp_path):
    measured = LEADER.measured
    own = replace(FACTS, leader=None, measured=measured, timeline_file=None)
    assert write_training(own, file=tmp_path / "t.json").measured == measured
    assert read_json(tmp_path / "t.json", Training).measured == measured


def test_a_record_written_elsewhere_takes_its_timeline_along(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "timeline.csv").write_text("loader,epoch\n")
    file = tmp_path / "output" / "training" / "training.json"
    found = copied_to(file, told(), run_dir=tmp_path / "run", model_uri="model")
    assert found.measured
    assert found.measured.timeline_file
    assert (file.parent / found.measured.timeline_file).read_text() == "loader,epoch\n"
    assert found.model_uri == "model"
    here = copied_to(tmp_path / "run" / "t.json", told(), run_dir=tmp_path / "run")
    assert here == told()
    assert len(list((tmp_path / "run").iterdir())) == 1
