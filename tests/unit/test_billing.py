import io
import sys
from functools import partial

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.records import (
    Cluster,
    Constraints,
    Decision,
    Group,
    TodaysGroup,
    TrainingSize,
    Workload,
)
from stoker.records.base import Place, convert
from stoker.run.billing import bill, confirm, confirm_run, limit_words, say_unused_types
from support import builders, decisions, sample_records

CATALOG = load_catalog("sagemaker")
WORKLOAD = Workload(name="job", command=("true",), platform="sagemaker")


def dnn(instance_type, count=1):
    return [Group(name="dnn", role="dnn", instance_type=instance_type, count=count)]


def start(workload, groups, *, yes=True, quiet=True, is_profile=False):
    told = {"assume_yes": yes, "quiet": quiet, "is_profile": is_profile}
    confirm(workload, groups, catalog=CATALOG, decision=None, **told)


def decision() -> Decision:
    profile = builders.profile(
        "ml.p4d.24xlarge",
        step_seconds=0.192,
        accelerator_step_seconds=0.08,
        loader_cpu_seconds=16.0,
        global_batch_size=1024,
    )
    size = TrainingSize(steps=100_000)
    return decisions.decided(profile, training=size, allowed_instance_types=("ml.c5.18xlarge",))


def test_the_bill_names_price_promise_start_up_and_break_even():
    made = decision()
    assert made.action == "heterogeneous"
    lines = bill(WORKLOAD, made.plan.groups, catalog=CATALOG, decision=made)
    usd = CATALOG.usd_per_hour(made.plan.groups)
    assert f"${usd:.2f} per hour" in lines[0]
    assert lines[1].startswith("predicted: ")
    assert "the whole training" in lines[1]
    assert f"${usd * 300 / 3600:.2f} (an estimate)" in lines[2]
    # It is paid back where both clusters have cost the same.
    steps = float(lines[3].split("is paid back after ")[1].split(" steps")[0].replace(",", ""))
    keep = next(p.predicted for p in made.plans if p.action == "keep")
    cost = [
        each.usd_per_hour * 300 / 3600 + steps / 1000 * each.usd_per_1000_steps
        for each in (keep, made.plan.predicted)
    ]
    assert cost[0] == pytest.approx(cost[1], rel=0.01)
    # Groups of no plan get their price only.
    assert len(bill(WORKLOAD, dnn("ml.g5.xlarge"), catalog=CATALOG, decision=made)) == 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "goes_on"), [("y\n", True), ("\n", False), ("n\n", False)])
def test_a_person_at_a_terminal_is_asked(answer, goes_on, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", Terminal())
    ask = partial(start, groups=dnn("ml.g5.xlarge"), quiet=False)
    if goes_on:
        ask(WORKLOAD, yes=False)
    else:
        with pytest.raises(UsageError, match="cancelled"):
            ask(WORKLOAD, yes=False)
    ask(WORKLOAD, yes=True)
    ask(sample_records.workload(), yes=False)


def test_a_run_of_a_pipeline_names_its_profile_and_its_limit(capsys):
    today = Cluster(dnn=TodaysGroup(instance_type="ml.g5.xlarge", count=2))
    workload = Workload(name="job", command=("true",), platform="sagemaker", cluster=today)
    confirm_run(workload, assume_yes=True, quiet=False)
    usd = CATALOG.usd_per_hour([Group.of_today(today.dnn)])
    said = capsys.readouterr().err
    assert f"profile on sagemaker: dnn 2 x ml.g5.xlarge, ${usd:.2f} per hour in total" in said
    assert "without a limit per hour: set constraints.max_usd_per_hour" in said


@pytest.mark.parametrize(
    ("settings", "constraints", "words"),
    [
        ({}, {}, "the run has no limit: set kubernetes.max_run_seconds or constraints.max_usd"),
        ({"max_run_seconds": 7200}, {}, ""),
        ({}, {"max_usd": 50.0}, "it is ended at $50.00 (max_usd)"),
    ],
)
def test_a_run_that_nothing_ends_says_so(capsys, settings, constraints, words):
    workload = limited(
        None, platform="kubernetes", kubernetes=settings, constraints=constraints, image="app:1"
    )
    known = {"catalog": CATALOG, "decision": None, "assume_yes": True}
    start = partial(confirm, workload, dnn("g5.xlarge"), **known)
    start(quiet=False)
    said = capsys.readouterr().err
    assert words in said
    assert ("has no limit" in said) == ("has no limit" in words)
    # A profile ends after its budget.
    start(quiet=False, is_profile=True)
    said = capsys.readouterr().err
    assert "has no limit" not in said
    assert "max_usd" not in said
    confirm_run(workload, assume_yes=True, quiet=False)
    assert ("has no limit" in capsys.readouterr().err) == ("has no limit" in words)


@pytest.mark.parametrize(
    ("instance_type", "count", "words"),
    [
        ("ml.foo", 1, "--platform sagemaker"),
        ("p5.48xlarge", 1, "--platform kubernetes"),
        # More hosts are refused: nothing of them runs on this machine.
        ("ml.foo", 2, ""),
        ("ml.local.c2", 1, ""),
        ("ml.here", 1, ""),
    ],
)
def test_a_type_that_is_not_started_on_this_machine_is_named_once(
    instance_type, count, words, capsys, monkeypatch
):
    monkeypatch.setenv("STOKER_INSTANCE_TYPE", "here")
    local = Workload(name="job", command=("true",))
    say_unused_types(local, dnn(instance_type, count), quiet=False)
    notes = capsys.readouterr().err.splitlines()
    assert len(notes) == bool(words)
    for note in notes:
        assert note.startswith(f"note: {instance_type} is not started: the platform is local")
        assert words in note


def limited(usd: float | None, *, platform: str = "sagemaker", **settings: object) -> Workload:
    document = {
        "name": "job",
        "command": ["true"],
        "platform": platform,
        "constraints": {} if usd is None else {"max_usd_per_run": usd},
        **settings,
    }
    return convert(document, Workload, Place("test"))


GROUPS = dnn("ml.g5.xlarge", 2)
TWO_HOURS = {
    "role": "arn:aws:iam::111122223333:role/stoker",
    "output_uri": "s3://bucket/runs",
    "max_run_seconds": 7200,
}


def test_a_run_that_may_cost_more_than_its_limit_is_not_started_and_a_profile_is():
    price = CATALOG.usd_per_hour(GROUPS)
    line = bill(limited(None, sagemaker=TWO_HOURS), GROUPS, catalog=CATALOG, decision=None)[0]
    assert line.endswith(f"at most ${2 * price:.2f} for this run (max_run_seconds 2 h 00 min)")
    start(limited(2 * price, sagemaker=TWO_HOURS), GROUPS)
    start(limited(price, sagemaker=TWO_HOURS), GROUPS, is_profile=True)
    with pytest.raises(UsageError, match="the run can cost") as caught:
        start(limited(2 * price - 0.01, sagemaker=TWO_HOURS), GROUPS)
    assert "sagemaker.max_run_seconds" in caught.value.fix


def test_a_limit_that_nothing_can_be_held_against_stops_the_run():
    cases = ((limited(1.0, platform="kubernetes"), GROUPS), (limited(1.0), dnn("ml.foo")))
    for workload, groups in cases:
        with pytest.raises(UsageError, match="unknown") as caught:
            start(workload, groups)
        assert "max_usd_per_run" in caught.value.where


def test_a_run_that_should_cost_more_than_max_usd_is_not_started():
    made = decision()
    groups, promise = made.plan.groups, made.plan.predicted
    run_usd = promise.total_usd + promise.usd_per_hour * 300 / 3600

    def begin(usd: float, *, made: Decision | None = made, groups=groups, steps: bool = True):
        workload = Workload(
            name="job",
            command=("true",),
            platform="sagemaker",
            constraints=Constraints(max_usd=usd),
        )
        confirm(workload, groups, catalog=CATALOG, decision=made, assume_yes=True, quiet=True)
        return limit_words(workload, groups, decision=made)

    with pytest.raises(UsageError, match="is predicted to cost") as caught:
        begin(run_usd - 0.01)
    assert "constraints.max_usd" in caught.value.where
    assert f"${run_usd:,.2f} predicted" in begin(run_usd)
    assert "not predicted: without a decision" in begin(1.0, made=None)
    unknown = msgspec.structs.replace(promise, total_usd=None)
    plan = msgspec.structs.replace(made.plan, predicted=unknown)
    told = begin(1.0, made=msgspec.structs.replace(made, plan=plan, plans=(plan,)))
    assert "the number of steps is not known (key training)" in told
    with pytest.raises(UsageError, match="a price is unknown"):
        begin(1.0, groups=dnn("ml.foo"))


def test_decide_counts_with_the_dollars_per_hour_that_a_run_leaves():
    assert limited(10.0, sagemaker=TWO_HOURS).known_constraints.max_usd_per_hour == 5.0
    assert limited(None, sagemaker=TWO_HOURS).known_constraints.max_usd_per_hour is None
    assert limited(10.0, platform="local").known_constraints.max_usd_per_hour is None
