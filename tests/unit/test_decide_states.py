"""States of a training that no host mends keep money from being spent on them."""

from datetime import date

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.decide import decide
from stoker.records import (
    Check,
    Constraints,
    Decision,
    Fix,
    Profile,
    ProfiledHost,
    ProfileState,
    StepTerms,
)

AWS = load_catalog("sagemaker")
# CPU-bound: a data group saves much more than its band.
STARVED = Profile(
    host=ProfiledHost(instance_type="ml.g5.8xlarge"),
    step=StepTerms(
        step_seconds=0.20,
        accelerator_step_seconds=0.08,
        loader_cpu_seconds=6.1,
        trainer_cpu_seconds=0.3,
        num_workers=32,
        batch_bytes=20e6,
        receive_cpu_seconds=0.01,
        global_batch_size=256,
    ),
    check=Check(predicted_step_seconds=0.20, error=0.0, explained=True),
)


def decided(*states: tuple[str, float], fixes: tuple[Fix, ...] = ()) -> Decision:
    named = tuple(
        ProfileState(id=name, text=f"{name}: figures", share=share) for name, share in states
    )
    return decide(
        msgspec.structs.replace(STARVED, states=named, fixes=fixes),
        catalog=AWS,
        constraints=Constraints(),
        today=date(2026, 11, 1),
    )


def test_without_such_a_state_the_change_is_advised() -> None:
    assert decided().action == "heterogeneous"
    assert decided(("cpu", 0.6), ("oversubscribed", 0.3)).action == "heterogeneous"


@pytest.mark.parametrize("name", ["throttled", "straggler", "network", "storage"])
def test_what_no_host_mends_is_to_be_mended_before_money_is_spent(name: str) -> None:
    decision = decided((name, 0.5))
    assert decision.action == "keep"
    assert "mend that before money is spent" in decision.plan.reason
    (advice,) = [own for own in decision.advice if own.id == name]
    assert advice.when == "before any money is spent"
    assert "more-accelerators" not in {own.id for own in decision.advice}
    # The plans are priced and shown all the same.
    assert "heterogeneous" in {plan.action for plan in decision.plans}


def test_a_state_that_is_little_of_a_step_is_advice_only() -> None:
    decision = decided(("throttled", 0.1))
    assert decision.action == "heterogeneous"
    assert "throttled" in {own.id for own in decision.advice}


def test_waiting_workers_are_bought_nothing_while_more_of_them_are_free() -> None:
    fix = Fix(id="num_workers", text="num_workers=64 instead of 32", saves_seconds=0.1)
    assert decided(("latency", 0.5), fixes=(fix,)).action == "keep"
    assert decided(("latency", 0.5)).action == "heterogeneous"


def test_a_storage_of_known_rate_is_a_term_of_the_model() -> None:
    assert STARVED.step is not None
    step = msgspec.structs.replace(STARVED.step, read_bytes=1e6, storage_bytes_per_second=2e9)
    known = msgspec.structs.replace(
        STARVED, step=step, states=(ProfileState(id="storage", text="figures", share=0.5),)
    )
    decision = decide(known, catalog=AWS, constraints=Constraints(), today=date(2026, 11, 1))
    assert decision.action == "heterogeneous"


@pytest.mark.parametrize("name", ["gil", "first-epoch"])
def test_what_a_plan_does_not_answer_stands_beside_it(name: str) -> None:
    assert name in {own.id for own in decided((name, 0.4)).advice}
