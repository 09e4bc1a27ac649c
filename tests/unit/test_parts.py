"""One function names the limit, and no verdict contradicts the figures that it shows."""

import re

import pytest
from hypothesis import given

from stoker.catalog import load_catalog
from stoker.profile.explain import explain
from stoker.records import Decision, Profile
from stoker.step_model import bottleneck_of, limit_words, parts_of
from stoker.units import ms
from support import decisions
from support.drawn_ranks import ranks
from support.profiled_ranks import changed, drained, profile_of, rank_of


def decided(profile: Profile) -> Decision:
    return decisions.decided(profile, catalog=load_catalog("local", cores=8), objective="time")


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_worker_that_computes_all_of_its_time_does_not_wait_for_storage():
    # Two workers on two cores, half of one used by others: 1.3 times as many batches as one worker.
    took = {"step": 0.268, "wait": 0.190, "accelerator": 0.060, "trainer_cpu": 0.060}
    drains = drained(2, 0.264, wall=0.265, rate=5.0), drained(1, 0.263)
    loading = {"children_cpu": 0.263, "drains": drains, "storage_stall_seconds": 0.0}
    profile = profile_of(rank_of(**took, **loading, workers=1, vcpus=2), kind="local.c2")
    assert "storage" not in {state.id for state in profile.states}
    assert "storage" not in words(explain(profile))
    assert "of 263 ms" not in words(explain(profile))
    decision = decided(profile)
    assert decision.bottleneck in ("cpu", "workers")
    assert "storage" not in {advice.id for advice in decision.advice}


# Two terms are not below the measured 229 ms: correcting the larger one alone would leave the other
# as the limit.
@pytest.mark.parametrize("accelerator", [0.235, 0.229])
def test_the_limit_stays_the_profiles_where_the_step_is_shorter_than_its_parts(accelerator):
    took = {"step": 0.229, "wait": 0.190, "trainer_cpu": 0.020, "children_cpu": 0.190}
    drains = drained(2, 0.190, wall=0.490), drained(1, 0.190, wall=0.262)
    rank = rank_of(**took, accelerator=accelerator, drains=drains, workers=1, vcpus=1)
    profile = profile_of(rank)
    parts = parts_of(profile)
    assert parts.terms["accelerator"] >= 0.229
    assert parts.limit == "storage"
    decision = decided(profile)
    assert decision.bottleneck == "storage"
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert keep.predicted.limit == "storage"


def test_ranks_that_the_command_starts_are_ranks_to_decide_as_well():
    # `-- torchrun --nproc_per_node=2 train.py`: no workload says how many ranks there are.
    took = {"step": 0.055, "wait": 0.040, "accelerator": 0.015, "drains": (drained(1, 0.040),)}
    cpu = {"trainer_cpu": 0.055, "trainer_alone_cpu": 0.015, "children_cpu": 0.0}
    first = rank_of(**took, **cpu, workers=0, vcpus=2, world_size=2)
    profile = profile_of(first, changed(first, rank=1), kind="local.c2")
    given = f"they give {ms(profile.check.predicted_step_seconds)}, measured 55.0 ms"
    decision = decided(profile)
    assert given in decision.path[0].because
    assert decision.bottleneck == parts_of(profile).bottleneck


@given(ranks())
def test_a_verdict_on_the_storage_shows_workers_that_wait(rank):
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}")
    has_waited = rank.reads is not None or any(drain.idle_seconds > 0 for drain in rank.drains)
    if parts_of(profile).bottleneck == "storage":
        assert has_waited
    for state in profile.states:
        assert " 0.0 s" not in state.text
        if state.id == "storage":
            assert has_waited
            assert state.share > 0
            shown = re.search(r"a worker (\S+ m?s).*?(?:computes|and) (\S+ m?s)", state.text)
            assert shown[1] != shown[2], "the worker waits for none of its time"
        if state.id == "cpu":
            assert "busy" in state.text


@given(ranks())
def test_profile_and_decide_name_the_same_limit(rank):
    profile = profile_of(rank, kind=f"local.c{rank.vcpus}")
    parts = parts_of(profile)
    decision = decided(profile)
    if decision.bottleneck == "unexplained":
        assert "the limit is the storage" not in words(explain(profile))
        return
    assert decision.bottleneck == parts.bottleneck
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"][:1]
    named = bottleneck_of(
        keep.predicted.limit,
        waits=decision.bottleneck == "latency",
        workers=profile.timed_step.num_workers,
    )
    assert named == decision.bottleneck
    said = words(explain(profile))
    if "the limit is " in said and "loading in the trainer itself" not in said:
        assert f"the limit is {limit_words(decision.bottleneck)}." in said
