"""States of a training that no host changes keep money from being spent on them."""

from datetime import date

import msgspec
import pytest

from stoker.catalog import load_catalog
from stoker.decide import decide
from stoker.records import Constraints, Fix, ProfileState
from support import builders

# CPU-bound: a data group saves much more than its band.
STARVED = builders.starved()


def decided(*states, found=STARVED, fixes=()):
    named = tuple(
        ProfileState(id=name, text=f"{name}: figures", share=share) for name, share in states
    )
    return decide(
        msgspec.structs.replace(found, states=named, fixes=fixes),
        catalog=load_catalog("sagemaker"),
        constraints=Constraints(),
        today=date(2026, 11, 1),
    )


@pytest.mark.parametrize(
    ("name", "called"),
    # Earlier profiles call it network.
    [("throttled", "throttled"), ("straggler", "straggler"), ("network", "storage")],
)
def test_what_no_host_changes_is_to_be_fixed_before_money_is_spent(name, called):
    decision = decided((name, 0.5))
    assert decision.action == "keep"
    assert "fix that before money is spent" in decision.plan.reason
    (advice,) = [own for own in decision.advice if own.id == called]
    assert advice.when == "before any money is spent"
    assert "more-accelerators" not in {own.id for own in decision.advice}
    # The plans are priced and shown all the same.
    assert "heterogeneous" in {plan.action for plan in decision.plans}


@pytest.mark.parametrize("name", ["workers", "latency"])
@pytest.mark.parametrize(
    ("wall", "is_free", "action"),
    [(8.0, True, "keep"), (8.0, False, "scale_up"), (6.1, True, "heterogeneous")],
    ids=["they wait", "more are not free", "they compute"],
)
def test_waiting_workers_are_bought_nothing_while_more_of_them_are_free(
    name, wall, is_free, action
):
    fix = Fix(id="num_workers", text="num_workers=64 instead of 32", saves_seconds=0.1)
    waiting = builders.starved(loader_wall_seconds=wall)
    decision = decided((name, 0.5), found=waiting, fixes=(fix,) if is_free else ())
    assert decision.action == action


def test_a_storage_of_known_rate_is_a_term_of_the_model():
    known = builders.starved(read_bytes=1e6, storage_bytes_per_second=2e9)
    assert decided(("storage", 0.5), found=known).action == "heterogeneous"


def test_other_states_and_a_small_one_do_not_hold_the_change_off():
    assert decided().action == "heterogeneous"
    assert decided(("cpu", 0.6), ("other-programs", 0.3)).action == "heterogeneous"
    small = decided(("throttled", 0.1), fixes=(Fix(id="throttled", text="raise the limit"),))
    assert small.action == "heterogeneous"
    # A state and its fix are one line of advice.
    assert [own.id for own in small.advice].count("throttled") == 1


def test_what_a_plan_does_not_answer_is_advised_next_to_it():
    assert "gil" in {own.id for own in decided(("gil", 0.4)).advice}
    later = Fix(id="first-epoch", text="profile later epochs")
    assert "first-epoch" in {own.id for own in decided(fixes=(later,)).advice}
