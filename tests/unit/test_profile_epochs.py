"""Whole epochs in a profile: seen, or known from its parts, or not known."""

import pytest

from stoker.profile.explain import explain
from stoker.record_words import profile_words
from stoker.records import EpochPause, EpochTimes
from support.profiled_ranks import changed, drained, profile_of, rank_of

# The H100 of 2026-11-26: four workers, each makes a batch in 0.6 s, an epoch has 42.
H100 = rank_of(
    step=0.1596,
    wait=0.1216,
    accelerator=0.0452,
    workers=4,
    vcpus=4,
    trainer_cpu=0.0591,
    children_cpu=0.5394,
    drains=(drained(4, 0.6025), drained(1, 0.6025, wall=0.6034)),
    epoch_times=EpochTimes(steps=42.0, inside_seconds=0.01),
)


def seen(seconds: float) -> EpochPause:
    return EpochPause(seconds=seconds, low_seconds=seconds, high_seconds=seconds, count=4)


def test_start_of_an_epoch_that_was_not_seen_is_one_workers_batch():
    times = profile_of(H100).epochs
    assert times.steps == 42
    assert times.start.seconds == pytest.approx(0.6034 - 0.1216)
    assert times.start.count == 0
    # Warming up is in the mean of a profile's steps.
    assert (times.between, times.inside_seconds) == (None, None)


def test_epochs_that_were_seen_count_as_they_were():
    epochs = EpochTimes(steps=8.0, start=seen(0.7), between=seen(1.5), inside_seconds=0.01)
    times = profile_of(changed(H100, epoch_times=epochs)).epochs
    assert (times.start, times.between) == (seen(0.7), seen(1.5))


def test_first_batch_of_a_script_without_workers_is_like_any_other():
    rank = rank_of(
        step=0.6, wait=0.55, accelerator=0.05, workers=0, epoch_times=EpochTimes(steps=42.0)
    )
    times = profile_of(rank).epochs
    assert (times.start.seconds, times.start.count) == (0.0, 0)


def test_nothing_is_said_of_epochs_that_an_earlier_version_did_not_see():
    assert profile_of(changed(H100, epoch_times=None)).epochs is None


def fixes_of(rank) -> dict:
    return {fix.id: fix for fix in profile_of(rank).fixes}


def test_persistent_workers_do_not_save_the_time_of_a_batch():
    waits = {"first_wait_seconds": 0.7, "epoch_batches": 8, "persistent_workers": False}
    # 0.7 s, of which one worker makes the batch in 0.6: 0.1 s for eight steps of 160 ms.
    fixes = fixes_of(changed(H100, epoch_times=EpochTimes(steps=8.0), **waits))
    assert fixes["persistent_workers"].saves_seconds == pytest.approx(0.0966 / 8, abs=1e-4)
    assert "0.70 s of waiting, 0.10 s of it for new workers" in fixes["persistent_workers"].text


def test_smaller_batches_are_named_where_an_epochs_first_batch_costs_much():
    short = fixes_of(changed(H100, epoch_times=EpochTimes(steps=8.0)))["smaller_batches"]
    assert short.saves_seconds == pytest.approx((0.6034 - 0.1216) / 2 / 8)
    assert "one worker makes its first batch" in short.text
    assert "smaller_batches" not in fixes_of(changed(H100, epoch_times=EpochTimes(steps=5000.0)))


def test_profile_says_what_an_epoch_begins_with():
    text = " ".join(explain(profile_of(H100)).split())
    assert "over whole epochs a step takes 171 ms, 78% of it waiting for data:" in text
    assert "an epoch of 42 steps begins with 0.48 s of waiting" in text
    assert "one worker makes its first batch" in text
    assert "what lies between epochs is not known" in text


def test_profile_of_long_epochs_has_no_word_of_their_start():
    epochs = EpochTimes(steps=50_000.0, start=seen(0.5), between=seen(20.0))
    text = " ".join(explain(profile_of(changed(H100, epoch_times=epochs))).split())
    assert "begins with" not in text
    assert "over whole epochs" not in text
    assert "20 s lie between two epochs (4 seen)" in text


def test_one_line_of_a_profile_is_of_whole_epochs():
    words = profile_words(profile_of(H100))
    assert words.startswith(
        "a step takes 171 ms over whole epochs, 78% of it waiting for data (160 ms within"
    )
