"""One answer to what limits a step: verdict, states, fixes, path and plans follow it."""

import html
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide.explain import explain as explain_decision
from stoker.decide.model import limit_words, more_workers
from stoker.decide.work import parts_of
from stoker.profile.explain import explain
from stoker.profile.explain import explain as explain_profile
from support import decisions
from support.builders import gpu_load
from support.drawn_ranks import hosts
from support.profiled_ranks import changed, drained, profile_of, rank_of
from support.property_tests import examples
from support.sample_records import write_page


def words(text: str) -> str:
    return " ".join(text.split())


def decided(profile, *, cores: int = 16):
    catalog = load_catalog("local", cores=cores)
    return decisions.decided(profile, catalog=catalog, objective="time")


def answers(decision) -> dict[str, tuple[str, str]]:
    return {each.question: (each.answer, each.because) for each in decision.path}


# One GPU on 4 of 16 cores, ResNet-50 (2026-11-26): the loader's 4 workers have all 4 cores.
ON_A_GPU = {
    "step": 0.1596,
    "wait": 0.1216,
    "accelerator": 0.0452,
    "trainer_cpu": 0.0591,
    "children_cpu": 0.5394,
    "workers": 4,
    "vcpus": 4,
    "others_vcpus": 0.017,
}
RATES = (
    drained(4, 0.6025, rate=5.712),
    drained(2, 0.6025, rate=2.804),
    drained(1, 0.6034, rate=1.615),
)
GPU = rank_of(**ON_A_GPU, drains=RATES)
# Other hosts whose cores are 83 to 100% busy with today's workers.
BUSY = {
    "the GPU's host": GPU,
    # The CPU's term is 0.9 of a worker's own.
    "terms apart by noise": changed(
        GPU, drains=(drained(4, 0.6025, rate=5.7), drained(1, 0.655, rate=1.5))
    ),
    "more workers than cores": changed(GPU, num_workers=6),
    "one core": rank_of(
        step=0.66, wait=0.60, accelerator=0.03, trainer_cpu=0.05, children_cpu=0.60, workers=1,
        vcpus=1, drains=(drained(1, 0.61, wall=0.66),),
    ),
    "no workers on one core": rank_of(
        step=0.65, wait=0.60, accelerator=0.05, trainer_cpu=0.64, trainer_alone_cpu=0.04,
        children_cpu=0.0, workers=0, vcpus=1, drains=(drained(1, 0.61),),
    ),
    "a step shorter than its parts": rank_of(
        step=0.172, wait=0.13, accelerator=0.04, trainer_cpu=0.04, children_cpu=0.645, workers=3,
        vcpus=4, drains=(drained(4, 0.60, rate=6.6), drained(3, 0.58, rate=5.1), drained(1, 0.58)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BUSY))
def test_workers_that_have_all_cores_are_not_too_few(name):
    profile = profile_of(BUSY[name], kind=f"local.c{int(BUSY[name].vcpus)}")
    decision = decided(profile)
    assert profile.check.explained
    assert decision.bottleneck == parts_of(profile).bottleneck == "cpu"
    assert [state.id for state in profile.states] == ["cpu"]
    assert "the limit is the CPU." in words(explain(profile))
    path = answers(decision)
    assert path["Is the CPU the limit?"][0] == "yes"
    reply, because = path["Is there a free fix?"]
    assert (reply, "would not help" in because) == ("no", True)
    assert "too few" not in words(explain(profile)) + str(path)
    assert not [plan for plan in decision.plans if plan.action == "tune"]
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert keep.predicted.limit == "cpu"
    assert not [fix for fix in profile.fixes if fix.id == "num_workers" and fix.saves_seconds]


# Hosts on which more workers load more, with the number that is advised.
IDLE = {
    "three of four cores": (
        rank_of(
            step=0.205, wait=0.16, accelerator=0.04, trainer_cpu=0.04, children_cpu=0.60,
            workers=3, vcpus=4,
            drains=(drained(4, 0.60, rate=6.6), drained(3, 0.60, rate=5.0), drained(1, 0.60)),
        ),
        4,
    ),
    # Two workers share a core of two hyper-threads: with all of them busy, loading takes more CPU.
    "hyper-threads": (
        rank_of(
            step=0.31, wait=0.27, accelerator=0.04, trainer_cpu=0.04, children_cpu=0.61, workers=2,
            vcpus=8, drains=(drained(8, 1.0, rate=8.0), drained(2, 0.61), drained(1, 0.60)),
        ),
        8,
    ),
    "a loader that waits": (
        rank_of(
            step=0.30, wait=0.26, accelerator=0.04, trainer_cpu=0.04, children_cpu=0.10, workers=2,
            vcpus=2, drains=(drained(2, 0.10, wall=0.60), drained(1, 0.10, wall=0.60)),
        ),
        8,
    ),
    "no workers": (
        rank_of(
            step=0.64, wait=0.595, accelerator=0.045, trainer_cpu=0.66, trainer_alone_cpu=0.059,
            children_cpu=0.0, workers=0, vcpus=4, drains=RATES,
        ),
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(IDLE))
def test_more_workers_are_the_free_plan_where_cores_or_workers_are_idle(name):
    rank, workers = IDLE[name]
    profile = profile_of(rank, kind=f"local.c{int(rank.vcpus)}")
    decision = decided(profile)
    parts = parts_of(profile)
    assert more_workers(parts).dnn.workers == workers
    assert decision.bottleneck == parts.bottleneck == ("latency" if parts.waits else "workers")
    assert [state.id for state in profile.states] == ["workers"]
    (fix,) = [fix for fix in profile.fixes if fix.id == "num_workers"]
    assert f"num_workers={workers} instead of" in fix.text
    path = answers(decision)
    assert path["Is the CPU the limit?"][0] == "no"
    assert path["Is there a free fix?"][0] == "yes"
    (tune,) = [plan for plan in decision.plans if plan.action == "tune"]
    assert tune.groups[0].workers_per_host == workers
    assert f"today + num_workers={workers} " in explain_decision(decision)
    saved = tune.predicted.step_seconds / profile.step.step_seconds
    assert 1 - fix.saves_seconds / profile.step.step_seconds == pytest.approx(saved, rel=0.1)


# The states that a bottleneck may be told with.
STATES = {
    "cpu": {"cpu"},
    "workers": {"workers"},
    "latency": {"workers"},
    "accelerator": {"accelerator"},
    "none": {"accelerator"},
    "storage": {"storage"},
}
OF_LIMITS = {"cpu", "workers", "accelerator", "storage"}


@given(hosts())
@settings(max_examples=examples(15))
def test_verdict_states_fixes_path_and_plans_of_a_host_never_contradict_each_other(rank):
    refuse_contradictions(rank)


def refuse_contradictions(rank):
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}")
    decision = decided(profile)
    parts = parts_of(profile)
    better = more_workers(parts)
    bottleneck = parts.bottleneck
    is_shared = parts.shared_seconds > parts.parallel_seconds / max(1, parts.workers)
    # The states: none of another limit.
    states = {state.id for state in profile.states}
    named = states & OF_LIMITS
    # Workers that were seen to wait are evidence of their own, beside what the parts say.
    evidence = {"storage"} if is_shared else set()
    assert named <= STATES[bottleneck] | evidence, bottleneck
    # Too few workers: where more are faster, and nowhere else.
    assert (bottleneck == "workers") <= (better is not None)
    # Of what they share, more workers may still get a little more.
    helped = ("workers", "latency", *(("storage",) if is_shared else ()))
    assert (better is not None) <= (bottleneck in helped)
    # The fix is the free plan's.
    fixes = [fix.text for fix in profile.fixes if fix.id == "num_workers"]
    expected = f"num_workers={better.dnn.workers} instead of {parts.workers}" if better else None
    assert [expected in text for text in fixes] == ([True] if better else [])
    # The profile's own words.
    said = words(explain(profile))
    if "the limit is " in said and "loading in the trainer itself" not in said:
        # Of the accelerator it says what slows it: copies, or workers on the same cores.
        assert re.search(rf"the limit is {re.escape(limit_words(bottleneck))}[.,]", said)
    if "loading in the trainer itself" in said:
        assert (parts.workers, bottleneck) == (0, "workers")
    if "the accelerator sets the pace" in said:
        assert bottleneck in ("accelerator", "none")
    if decision.bottleneck == "unexplained":
        return
    # The decision: its limit, today's row, its plans and its path.
    assert decision.bottleneck == bottleneck
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert keep.predicted.limit == ("latency" if bottleneck == "workers" else bottleneck)
    tunes = [plan for plan in decision.plans if plan.action == "tune"]
    assert len(tunes) == (better is not None)
    for tune in tunes:
        assert tune.groups[0].workers_per_host == better.dnn.workers
        assert tune.predicted.speedup > 1.04
    path = answers(decision)
    assert path["Is the CPU the limit?"][0] == ("yes" if bottleneck == "cpu" else "no")
    reply, because = path.get("Is there a free fix?", ("", ""))
    if reply:
        assert ("would not help" in because) <= (better is None)
        assert (better is not None) <= (reply == "yes")


# One function names the limit, and no verdict contradicts the figures that it shows.


# The report's page says what profile and decision say, whatever was measured.


def page_words(text: str) -> str:
    return " ".join(html.unescape(text).split())


@given(
    hosts(),
    st.none() | st.floats(0, 1),
    st.sampled_from(["cost", "time"]),
)
@settings(max_examples=examples(5), deadline=None)
def test_page_profile_and_decision_agree(rank, busy, objective):
    gpus = () if busy is None else (gpu_load(busy),)
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}", gpus=gpus)
    catalog = load_catalog("local", cores=24)
    decision = decisions.decided(profile, catalog=catalog, objective=objective)
    records = {"profile": profile, "decision": decision, "training": None, "evaluation": None}
    with tempfile.TemporaryDirectory() as folder:
        page = page_words(write_page(Path(folder), **records))
    assert f"The limit today: {limit_words(decision.bottleneck)}." in page
    said = page_words(explain_decision(decision))
    for text in (page, said):
        assert ("stoker does not help here" in text) <= (decision.verdict == "none")
        assert ("Probably worth it" in text) == (decision.verdict == "probable")
    assert ("the accelerator sets the pace" in page_words(explain_profile(profile))) <= (
        decision.verdict in ("none", "unknown") or decision.bottleneck in ("accelerator", "none")
    )
    # Each fix that costs nothing and saves something is on the page too, or its plan is.
    for fix in profile.fixes:
        if fix.id == "num_workers" and fix.saves_seconds and decision.bottleneck != "unexplained":
            assert "num_workers=" in page
