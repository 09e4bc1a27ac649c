"""What the driver says of the GPUs is held against the profile's step: one answer, not two."""

import html

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide.explain import explain as explain_decision
from stoker.profile.explain import explain
from stoker.profile.rank_results import ReplayVariants
from stoker.record_words import plan_reason
from stoker.step_model import parts_of
from support.builders import gpu_load
from support.decisions import decided
from support.drawn_ranks import hosts
from support.profiled_ranks import at, changed, drained, profile_of, rank_of
from support.property_tests import examples
from support.sample_records import write_page

LOCAL = load_catalog("local", cores=16)
# A small model whose loss is read in each step: 12 ms of kernels in 40 ms, and data in plenty.
ASKING = rank_of(
    step=0.040,
    wait=0.0003,
    accelerator=0.0395,
    workers=4,
    vcpus=16,
    trainer_cpu=0.036,
    children_cpu=0.04,
    drains=(drained(16, 0.04), drained(4, 0.04), drained(1, 0.04)),
    uses_cuda=True,
    clock="cuda:0",
    variants=ReplayVariants(on_device=at(0.0385), beside_workers=at(0.0395)),
)
WAITING = changed(
    ASKING,
    step_seconds=at(0.160),
    wait_seconds=at(0.122),
    children_cpu_seconds=0.60,
    drains=(drained(16, 0.6), drained(4, 0.6, rate=6.2), drained(1, 0.6)),
)


def states(profile):
    return {state.id: state for state in profile.states}


def words(text):
    return " ".join(text.split())


def notes(profile):
    return " ".join(map(str, profile.what["notes"]))


def test_a_gpu_that_idles_in_steps_that_wait_for_nothing_does_not_set_the_pace():
    profile = profile_of(ASKING, gpus=(gpu_load(0.30),), kind="local.c16")
    found = states(profile)
    assert list(found) == ["launch"]
    assert found["launch"].share == pytest.approx(1 - 0.30 - 0.025 - 0.0075)
    assert "kernels run on the GPU for 30% of a step" in found["launch"].text
    said = words(explain(profile))
    assert "stoker does not help here; the script's own thread sets the pace" in said
    assert "the accelerator sets the pace" not in said
    assert "CUDA graphs" in said
    decision = decided(profile, catalog=LOCAL)
    assert (decision.action, decision.verdict) == ("keep", "none")
    (advice,) = [each for each in decision.advice if each.id == "launch"]
    assert ".item()" in advice.text


def test_no_page_of_a_decision_calls_a_gpu_the_limit_that_idles(tmp_path):
    profile = profile_of(ASKING, gpus=(gpu_load(0.30),), kind="local.c16")
    decision = decided(profile, catalog=LOCAL)
    assert decision.bottleneck == "launch"
    assert "GPU is the limit" not in plan_reason(decision)
    said = words(explain_decision(decision))
    records = {"profile": profile, "decision": decision, "training": None, "evaluation": None}
    page = words(html.unescape(write_page(tmp_path, **records, is_planned=True)))
    path = " ".join(answer.because for answer in decision.path)
    for text in (said, page, path):
        assert "launches the GPU's work" in text
        assert "bottleneck is the accelerator" not in text
        assert "limit is the accelerator" not in text
        assert "bottleneck: accelerator" not in text
    today = decision.today.predicted
    assert (today.limit, today.accelerator_utilization) == ("launch", pytest.approx(0.3, abs=0.04))
    assert all(
        "accelerator" not in (p.predicted.limit, p.predicted.second_limit)
        for p in decision.plans
        if p.predicted
    )


@pytest.mark.parametrize(
    "gpus",
    [
        (gpu_load(0.95),),
        (),
        (gpu_load(None),),
        # The figures of a start-up, or of one look.
        (gpu_load(0.30, during="command"),),
        (gpu_load(0.30, samples=2),),
        # Stages of a pipeline take turns: the one that is busy counts.
        (gpu_load(0.30), gpu_load(0.85, index=1)),
        (gpu_load(0.0, index=1), gpu_load(0.9)),
    ],
    ids=["busy", "no GPU", "a slice", "start-up", "two looks", "two stages", "one unused"],
)
def test_where_the_gpu_is_busy_or_its_load_not_known_the_accelerator_sets_it(gpus):
    profile = profile_of(ASKING, gpus=gpus, kind="local.c16")
    assert list(states(profile)) == ["accelerator"]
    assert "the accelerator sets the pace" in words(explain(profile))


def test_copies_and_waits_for_data_are_no_idleness_of_the_scripts_own():
    copying = changed(ASKING, variants=ReplayVariants(on_device=at(0.014), copied_bytes=10**8))
    assert "launch" not in states(profile_of(copying, gpus=(gpu_load(0.30),)))
    assert "launch" not in states(profile_of(WAITING, gpus=(gpu_load(0.22),), kind="local.c4"))
    untimed = changed(ASKING, variants=None)
    text = states(profile_of(untimed, gpus=(gpu_load(0.30),)))["launch"].text
    assert text.endswith("or waits for their results (or for copies, which were not timed)")


@pytest.mark.parametrize(
    ("gpus", "is_strange"),
    [
        ((gpu_load(0.95),), True),
        ((gpu_load(0.26),), False),
        # Of two GPUs one is another training's.
        ((gpu_load(0.25), gpu_load(0.97, index=1)), False),
        ((), False),
    ],
    ids=["shared", "its own", "a neighbour's", "not known"],
)
def test_a_gpu_that_is_busier_than_the_steps_explain_is_told(gpus, is_strange):
    profile = profile_of(WAITING, gpus=gpus, kind="local.c4")
    assert ("another program uses it as well" in notes(profile)) == is_strange
    if is_strange:
        assert "busy for 95% of the time, and the steps need it for 25%" in notes(profile)


MINE, OTHERS = gpu_load(0.25, uuid="MIG-1a"), gpu_load(0.97, index=1, uuid="GPU-2b")


@pytest.mark.parametrize(
    ("uuids", "busy"),
    [(("1a",), 0.25), (("2b",), 0.97), (("1a", "2b"), 0.61), ((), 0.61), (("else",), 0.61)],
    ids=["its own", "the other", "both", "not known", "none of them"],
)
def test_only_gpus_that_a_script_trains_on_count_where_others_use_the_rest(uuids, busy):
    rank = changed(WAITING, gpu_uuids=uuids)
    profile = profile_of(rank, gpus=(MINE, OTHERS), kind="local.c4")
    assert profile.observed.gpu_utilization == pytest.approx(busy)


@given(hosts(), st.floats(0, 1))
@settings(max_examples=examples(60))
def test_verdict_and_load_of_a_gpu_never_contradict_each_other(rank, busy):
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}", gpus=(gpu_load(busy),))
    parts = parts_of(profile)
    found = states(profile)
    said = words(explain(profile))
    assert not {"launch", "accelerator"} <= found.keys()
    if "launch" in found:
        assert busy <= 0.7
        assert parts.bottleneck in ("accelerator", "none")
        assert "the accelerator sets the pace" not in said
        assert "launch" in {fix.id for fix in profile.fixes}
        decision = decided(profile, catalog=LOCAL)
        assert "launch" in {each.id for each in decision.advice}
        assert decision.bottleneck in ("launch", "unexplained")
        for plan in decision.plans:
            assert "accelerator" not in (plan.predicted.limit, plan.predicted.second_limit)
    is_said = "the accelerator sets the pace" in said
    if is_said and not {"transfer", "gil"} & found.keys():
        # Steps that wait, within noise, and what copying takes.
        assert busy > 0.5 or (profile.step.transfer_seconds or 0.0) > 0
    if "another program uses it as well" in notes(profile):
        assert busy >= 0.3
        assert "launch" not in found


def test_too_many_workers_beside_a_gpu_have_one_answer():
    """32 workers on 16 cores: half as many are as fast, and their load is what slows the step."""
    assert ASKING.accelerator is not None
    rank = changed(
        ASKING,
        step_seconds=at(0.060),
        wait_seconds=at(0.0005),
        accelerator=msgspec.structs.replace(ASKING.accelerator, step_seconds=at(0.045)),
        children_cpu_seconds=0.5,
        num_workers=32,
        drains=(
            drained(32, 0.50, rate=24.0),
            drained(16, 0.48, rate=31.0),
            drained(4, 0.45, rate=8.7),
            drained(1, 0.45, rate=2.2),
        ),
        variants=ReplayVariants(on_device=at(0.0445), beside_workers=at(0.058)),
    )
    profile = profile_of(rank, gpus=(gpu_load(0.72),), kind="local.c16")
    assert list(states(profile)) == ["neighbour"]
    fixes = {fix.id: fix.text for fix in profile.fixes}
    assert fixes["num_workers"].startswith("num_workers=16 instead of 32: as fast on 16 vCPUs")
    said = words(explain(profile))
    assert "the limit is the accelerator, slowed by its own host's loading" in said
    decision = decided(profile, catalog=LOCAL)
    assert (decision.action, decision.bottleneck) == ("keep", "accelerator")
    assert fixes["num_workers"] in words(explain_decision(decision))
