"""What a run tells beside its result: one list, in the same words everywhere."""

from datetime import UTC, date, datetime, timedelta

import msgspec
import pytest

from stoker.evaluate import evaluate
from stoker.records import (
    Evaluation,
    GroupSpending,
    Prices,
)
from stoker.records.outcome import IDLE_SHARE
from stoker.records.profile import MAX_PROFILE_DAYS
from support import sample_records

replace = msgspec.structs.replace
TODAY = date(2026, 11, 26)
MEASURED_ON = datetime(2026, 11, 25, 3, tzinfo=UTC)


def profiled(*, days=0):
    then = (MEASURED_ON - timedelta(days=days)).isoformat()
    return replace(sample_records.profile(), measured_at=then)


def decided(*, prices=None, **changes):
    billed = prices or Prices(date="2026-11-20", source="a price list")
    return replace(sample_records.decision(), prices=billed, **changes)


def trained(*, step_seconds=sample_records.MEASURED_SECONDS, **changes):
    record = sample_records.training()
    measured = replace(record.measured, step_seconds=step_seconds)
    return replace(record, measured=measured, **changes)


def judged(*, today=TODAY, **records) -> Evaluation:
    found = {"profile": profiled(), "decision": decided(), "training": trained()}
    return evaluate(
        workload=sample_records.workload(),
        **{**found, **records},
        today=today,
    )


@pytest.mark.parametrize(
    ("batches", "idle_share", "words"),
    [
        (0, 1.0, "the data group made 0 of 1,240 batches, $3.10"),
        (3, None, "the data group made 3 of 1,240 batches, $3.10"),
        (1200, 0.9, "the data group was idle 90% of its time, $2.79 of $3.10: fewer data hosts"),
        (1200, IDLE_SHARE, None),
        (1200, 0.2, None),
        (1200, None, None),
    ],
)
def test_a_data_group_that_is_paid_for_nothing_is_told(batches, idle_share, words):
    group = GroupSpending(
        group="data",
        usd=3.1,
        idle_share=idle_share,
        batches=batches,
        all_batches=1240,
    )
    training = trained(spending=(group,))
    measured = replace(training.measured, wait_seconds=0.05 * training.measured.step_seconds)
    record = judged(training=replace(training, measured=measured))
    assert len(record.warnings) == bool(words)
    assert not words or record.warnings[0].startswith(words)


@pytest.mark.parametrize(
    ("days", "is_told"),
    [(0, False), (MAX_PROFILE_DAYS - 1, False), (MAX_PROFILE_DAYS, True), (400, True)],
)
def test_an_old_profile_is_told_with_its_limit(days, is_told):
    record = judged(profile=profiled(days=days))
    assert len(record.warnings) == is_told
    if is_told:
        assert f"more than {MAX_PROFILE_DAYS}" in record.warnings[0]
