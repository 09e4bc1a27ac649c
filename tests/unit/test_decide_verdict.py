"""A verdict is one of four kinds, and an uncertain gain is no "no"."""

import shlex

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.decide import TakeAs, explain, followed
from stoker.decide.ranking import error_band, ranking_of
from stoker.record_words import decision_words
from stoker.records import Decision, Observed, Place, convert, to_document
from support import builders, decisions
from support.gpu_profiles import H100, STEADY, changed, here, names, words

FILE = Place("decision.json")
THERE = TakeAs(instance_type="ml.g6e.xlarge", accelerator_step_seconds=0.1)
# Slower steps that wait less: more cores gain, by less than the machine's own speed varied.
UNCERTAIN = changed(
    H100, step_seconds=0.16, accelerator_step_seconds=0.12, loader_cpu_seconds=0.56, num_workers=4
)


def taken(**constraints):
    return decisions.decided(H100, take_as=THERE, objective="time", **constraints)


def test_a_gain_within_its_band_is_probable_and_how_to_make_sure_is_said():
    decision = taken()
    assert (decision.verdict, decision.action) == ("probable", "keep")
    assert names(decision.probable) == ["1 ml.g6e.2xlarge"]
    assert decision.probable.predicted.speedup == pytest.approx(1.6, abs=0.02)
    text = words(decision)
    assert text.startswith("Probably worth it: take a larger type: dnn 1 x ml.g6e.2xlarge.")
    assert "33% cheaper" in text
    assert "within the error band of 5" in text
    assert "help here" not in text
    # Eight minutes, with the host's start, at 2.80 dollars an hour.
    trial = decision.trial
    assert (trial.minutes, trial.usd) == (8.0, pytest.approx(2.80 * 8 / 60, abs=0.01))
    assert trial.condition.startswith("on a host of type ml.g6e.2xlarge, with 7 loader workers")
    assert f"To make sure: {trial.command}" in text
    assert f"${trial.usd:.3f}" in text
    (worth,) = [answer for answer in decision.path if "worth more" in answer.question]
    assert worth.answer == "unknown"


def test_the_workload_says_whether_a_probable_plan_is_followed():
    kept, followed = taken(follow="sure"), taken(follow="probable")
    assert kept.plan == taken().plan
    assert kept.action == "keep"
    assert "constraints.follow: probable would follow the plan" in words(kept)
    assert followed.plan == followed.probable
    assert (followed.action, followed.verdict) == ("scale_up", "probable")
    assert "It is followed, as constraints.follow says." in words(followed)
    assert decision_words(kept).endswith("not tried: constraints.follow is not probable")
    assert decision_words(followed).endswith("tried")


def test_a_try_is_free_on_this_machine_and_followed_unless_it_is_forbidden():
    decision = here(UNCERTAIN)
    assert (decision.verdict, decision.action) == ("probable", "heterogeneous")
    assert "A try costs nothing here" in words(decision)
    assert decision.trial.usd is None
    assert decision.trial.command.startswith("stoker train --group dnn=local.c4:1")
    assert here(UNCERTAIN, follow="sure").action == "keep"


def test_after_a_sure_plan_comes_the_probable_one():
    # More workers are free and enough for the most part; a data host may gain the rest.
    one = changed(
        H100,
        step_seconds=0.62,
        wait_seconds=0.53,
        used_cpu_seconds=None,
        accelerator_step_seconds=0.11,
        num_workers=1,
        loader_cpu_seconds=0.2,
        loader_wall_seconds=0.6,
        trainer_cpu_seconds=0.27,
    )
    decision = here(msgspec.structs.replace(one, loader_rates=(), observed=STEADY))
    assert (decision.verdict, decision.action) == ("sure", "tune")
    assert decision.probable is not None
    assert words(decision).index("Tune the loader") < words(decision).index("Then probably: ")


@pytest.mark.parametrize(
    ("subject", "command"),
    [
        ((), "stoker profile -- python train.py --lr 0.1"),
        (
            ("a.yaml",),
            "stoker profile a.yaml --set cluster.dnn.instance_type=ml.g6e.2xlarge",
        ),
    ],
    ids=["a command", "a workload"],
)
def test_the_command_that_measures_a_plan_names_the_training(subject, command):
    # As a profile writes it: word by word.
    typed = ["python", "train.py", "--lr", "0.1"]
    for known in (typed, "python train.py --lr 0.1"):
        profile = msgspec.structs.replace(H100, what={"command": known})
        decision = decisions.decided(profile, take_as=THERE, objective="time", subject=subject)
        assert decision.trial.command == command


def test_a_trial_with_data_hosts_ends_by_itself_where_it_is_billed():
    noisy = Observed(cpu_utilization=0.9, cpu_speed_spread=0.25)
    profile = msgspec.structs.replace(builders.starved("ml.g5.48xlarge"), observed=noisy)
    decision = decisions.decided(profile, subject=("a.yaml",), max_data_hosts=1, objective="time")
    assert decision.verdict in ("probable", "sure")
    if decision.trial and "data=" in decision.trial.command:
        typed = shlex.split(decision.trial.command)
        assert float(typed[typed.index("--max-usd") + 1]) >= decision.trial.usd


@given(
    step=st.floats(0.05, 1.0),
    accelerator=st.floats(0.01, 1.0),
    loading=st.floats(0.01, 3.0),
    spread=st.floats(0.0, 0.3),
    cores=st.integers(4, 32),
    accelerators=st.integers(0, 2),
    objective=st.sampled_from(["cost", "time"]),
)
def test_keep_is_said_only_where_no_plan_is_faster_by_more_than_its_band(
    step, accelerator, loading, spread, cores, accelerators, objective
):
    profile = changed(
        H100,
        host={"accelerators": accelerators},
        step_seconds=step,
        wait_seconds=step / 2,
        accelerator_step_seconds=min(accelerator, step),
        loader_cpu_seconds=loading,
        loader_wall_seconds=loading,
        used_cpu_seconds=None,
    )
    observed = msgspec.structs.replace(STEADY, cpu_speed_spread=spread)
    profile = msgspec.structs.replace(profile, observed=observed, loader_rates=())
    decision = here(profile, cores=cores, objective=objective)
    keep = next(plan.predicted for plan in decision.plans if plan.action == "keep")
    ranking = ranking_of(decision)
    gains = [
        (ranking.gain(plan.predicted, keep), error_band(plan.predicted))
        for plan in decision.plans
        if plan.feasible and plan.predicted
    ]
    sure = any(gain > band for gain, band in gains)
    assert (decision.verdict == "sure") == sure
    assert (decision.verdict in ("sure", "probable")) == any(gain > 0.05 for gain, _ in gains)
    # The text says the same.
    assert ("help here" in explain(decision)) <= (decision.verdict == "none")
    assert (decision.action == "keep") == (decision.verdict == "none")


def test_a_record_of_an_early_version_has_a_kind():
    sure = here(H100)
    document = to_document(sure)
    for name in ("verdict", "probable", "trial"):
        document.pop(name, None)
    assert convert(document, Decision, FILE).kind == "sure"
    keep = {**document, "action": "keep"}
    assert convert(keep, Decision, FILE).kind == "none"
    blind = {**keep, "bottleneck": "unexplained"}
    assert convert(blind, Decision, FILE).kind == "unknown"


def test_a_later_step_may_follow_a_probable_plan_or_not():
    decision = taken()
    asked = followed(decision, "probable")
    assert (asked.action, asked.plan) == ("scale_up", decision.probable)
    assert followed(asked, "sure").action == "keep"
    assert followed(decision, None) == decision
    # What is sure is followed in any case.
    assert followed(here(H100), "sure") == here(H100)
