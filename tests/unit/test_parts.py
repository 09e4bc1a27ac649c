"""One function names the limit, and no verdict contradicts the figures that it shows."""

import re
from datetime import date

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import decide
from stoker.profile.combine import combine
from stoker.profile.explain import explain
from stoker.profile.rank_results import (
    AcceleratorOnly,
    AsIs,
    BatchFacts,
    Drain,
    Evidence,
    LoaderFacts,
    Quartiles,
    RankResult,
    Reads,
)
from stoker.records import (
    Constraints,
    Decision,
    Profile,
    ProfileSettings,
    TodaysGroup,
    parts_of,
)
from stoker.records.parts import bottleneck_of, limit_words
from stoker.text import ms


def at(value: float) -> Quartiles:
    return Quartiles(mean=value, median=value, low=value, high=value, samples=60)


def drained(workers: int, *, cpu: float, idle: float, rate: float) -> Drain:
    return Drain(
        workers=workers,
        cpu_seconds=at(cpu),
        wall_seconds=at(cpu + idle),
        batches_per_second=rate,
    )


def rank_of(
    *,
    step: float,
    wait: float,
    accelerator: float,
    trainer: float,
    loader: float,
    drains: tuple[Drain, ...],
    workers: int,
    vcpus: int,
    others: float = 0.0,
    reads: Reads | None = None,
    stalls: float | None = None,
) -> RankResult:
    return RankResult(
        rank=0,
        world_size=1,
        host="algo-1",
        vcpus=vcpus,
        ranks_on_host=1,
        as_is=AsIs(
            step_seconds=at(step),
            wait_seconds=at(wait),
            trainer_cpu_seconds=trainer + (0.0 if workers else loader),
            children_cpu_seconds=loader if workers else 0.0,
            receive_seconds=0.0,
            others_vcpus=others,
        ),
        evidence=Evidence(seconds=100 * step, steps=100, storage_stall_seconds=stalls),
        accelerator=AcceleratorOnly(
            step_seconds=at(accelerator), trainer_cpu_seconds=at(trainer), cached_batches=8
        ),
        drains=drains,
        reads=reads,
        batch=BatchFacts(samples=8, num_bytes=1_000_000),
        loader=LoaderFacts(
            num_workers=workers, pin_memory=False, persistent_workers=True, dataset="d"
        ),
    )


def profile_of(rank: RankResult) -> Profile:
    return combine(
        [rank],
        group=TodaysGroup(instance_type=f"local.c{round(rank.vcpus)}"),
        settings=ProfileSettings(),
        workload_sha256=None,
        what={},
    )


def decided(profile: Profile) -> Decision:
    return decide(
        profile,
        catalog=load_catalog("local", cores=8),
        constraints=Constraints(objective="time"),
        today=date(2026, 11, 23),
    )


def words(text: str) -> str:
    return " ".join(text.split())


# Two workers on two cores, half of one used by others: 1.3 times as many batches as one worker.
DISTURBED = rank_of(
    step=0.268,
    wait=0.190,
    accelerator=0.060,
    trainer=0.060,
    loader=0.263,
    drains=(
        drained(2, cpu=0.264, idle=0.001, rate=5.0),
        drained(1, cpu=0.263, idle=0.0, rate=3.8),
    ),
    workers=1,
    vcpus=2,
    stalls=0.0,
)


def test_a_worker_that_computes_all_of_its_time_does_not_wait_for_storage():
    profile = profile_of(DISTURBED)
    assert "storage" not in {state.id for state in profile.states}
    assert "storage" not in words(explain(profile))
    assert "of 263 ms" not in words(explain(profile))
    decision = decided(profile)
    assert decision.bottleneck in ("cpu", "workers")
    assert "storage" not in {advice.id for advice in decision.advice}


def test_the_limit_stays_the_profiles_where_the_measured_step_is_shorter_than_its_parts():
    # Two terms are above the measured 229 ms: correcting the larger one alone would leave the other
    # as the limit.
    profile = profile_of(
        rank_of(
            step=0.229,
            wait=0.190,
            accelerator=0.235,
            trainer=0.020,
            loader=0.190,
            drains=(
                drained(2, cpu=0.190, idle=0.300, rate=4.08),
                drained(1, cpu=0.190, idle=0.072, rate=3.82),
            ),
            workers=1,
            vcpus=1,
        )
    )
    parts = parts_of(profile)
    assert parts.terms["accelerator"] > 0.229
    assert parts.limit == "storage"
    decision = decided(profile)
    assert decision.bottleneck == "storage"
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert keep.predicted.limit == "storage"


def test_ranks_that_the_command_starts_are_ranks_to_decide_as_well():
    # `-- torchrun --nproc_per_node=2 train.py`: no workload says how many ranks there are.
    two = [
        msgspec.structs.replace(
            rank_of(
                step=0.055,
                wait=0.040,
                accelerator=0.015,
                trainer=0.015,
                loader=0.040,
                drains=(drained(1, cpu=0.040, idle=0.0, rate=25.0),),
                workers=0,
                vcpus=2,
            ),
            rank=rank,
            world_size=2,
            ranks_on_host=2,
        )
        for rank in range(2)
    ]
    profile = combine(
        two,
        group=TodaysGroup(instance_type="local.c2"),
        settings=ProfileSettings(),
        workload_sha256=None,
        what={},
    )
    given = f"they give {ms(profile.check.predicted_step_seconds)}, measured 55.0 ms"
    decision = decided(profile)
    assert given in decision.path[0].because
    parts = parts_of(profile)
    assert decision.bottleneck == parts.bottleneck


SECONDS = st.floats(0.001, 1.0)


@st.composite
def ranks(draw: st.DrawFn) -> RankResult:
    """Draws a rank whose figures need not fit each other: each of them may be wrong."""
    step = draw(SECONDS)
    cpu = draw(SECONDS)
    idle = draw(st.sampled_from([0.0, 0.0001, 0.01, 0.1, 1.0]))
    many = draw(st.integers(2, 8))
    vcpus = draw(st.integers(1, 8))
    cold = draw(st.sampled_from([None, 1.01, 1.3, 2.0, 20.0]))
    warm = cpu + idle
    return rank_of(
        step=step,
        wait=step * draw(st.floats(0, 1)),
        accelerator=step * draw(st.floats(0.01, 1)),
        trainer=draw(SECONDS),
        loader=cpu * draw(st.sampled_from([0.8, 1.0, 1.3])),
        drains=(
            drained(
                many,
                cpu=cpu * draw(st.sampled_from([0.99, 1.0, 1.5])),
                idle=idle * draw(st.sampled_from([0.0, 1.0, many])),
                rate=draw(st.floats(0.5, many)) / warm,
            ),
            drained(1, cpu=cpu, idle=idle, rate=1 / warm),
        ),
        workers=draw(st.integers(0, 4)),
        vcpus=vcpus,
        others=vcpus * draw(st.sampled_from([0.0, 0.2, 0.9])),
        reads=None
        if cold is None
        else Reads(
            workers=1,
            batch_bytes=at(1e7),
            cold_seconds=at(cold * warm),
            warm_seconds=at(warm),
            bytes_per_second=at(1e7 / ((cold - 1) * warm)),
        ),
        stalls=draw(st.sampled_from([None, 0.0, 0.01, 3.0])),
    )


@given(ranks())
def test_a_verdict_on_the_storage_shows_workers_that_wait(rank):
    profile = profile_of(rank)
    parts = parts_of(profile)
    has_waited = rank.reads is not None or any(drain.idle_seconds > 0 for drain in rank.drains)
    if parts.bottleneck == "storage":
        assert has_waited
    for state in profile.states:
        assert " 0.0 s" not in state.text
        if state.id == "storage":
            assert has_waited
            assert state.share is not None
            assert state.share > 0
            shown = re.search(r"a worker (\S+ m?s).*?(?:computes|and) (\S+ m?s)", state.text)
            assert shown, state.text
            assert shown[1] != shown[2], "the worker waits for none of its time"
        if state.id == "cpu":
            assert "busy" in state.text


@given(ranks())
def test_profile_and_decide_name_the_same_limit(rank):
    profile = profile_of(rank)
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
