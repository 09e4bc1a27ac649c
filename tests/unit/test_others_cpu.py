"""What other programs used while a run trained, and what is said of its times then."""

import msgspec
import pytest

from stoker.evaluate import evaluate
from stoker.feed.wire.protocol import OthersCpu
from stoker.launch.other_programs import OthersLog, OthersWatch, busiest_quarter
from stoker.record_words import evaluation_table, evaluation_words, training_words
from stoker.records import Event, OtherPrograms
from stoker.records.training import BUSY, NOT_COMPARABLE
from support import sample_records

replace = msgspec.structs.replace


def looks(*rates, seconds=120.0, vcpus=1.0):
    """Returns looks every 3 s at programs that use so many vCPUs in equal parts of the time."""
    made, used = [], 0.0
    for number in range(1, int(seconds / 3) + 1):
        used += 3.0 * rates[min(len(rates) - 1, int((number - 1) * 3 / seconds * len(rates)))]
        made.append(OthersCpu(seconds=3.0 * number, cpu_seconds=used, vcpus=vcpus))
    return tuple(made)


@pytest.mark.parametrize(
    ("rates", "busiest"),
    [
        ((0.0,), 0.0),
        ((0.9,), 0.9),
        # They came for the second half, for the last quarter, and for the first.
        ((0.0, 0.8), 0.8),
        ((0.0, 0.0, 0.0, 0.8), 0.8),
        ((0.8, 0.0, 0.0, 0.0), 0.8),
    ],
)
@pytest.mark.parametrize("seconds", [12.0, 120.0, 12000.0])
def test_the_busiest_quarter_counts(rates, busiest, seconds):
    assert busiest_quarter(looks(*rates, seconds=seconds)) == pytest.approx(busiest, abs=1e-6)


def test_a_run_too_short_for_a_look_is_not_judged():
    assert busiest_quarter(()) is None
    assert busiest_quarter((OthersCpu(seconds=1.0, cpu_seconds=1.0, vcpus=1.0),)) is None
    short = (OthersCpu(seconds=4.0, cpu_seconds=2.0, vcpus=1.0),)
    assert busiest_quarter(short) == 0.5


def test_looks_of_a_long_run_are_thinned_and_a_restarted_host_begins_again():
    log = OthersLog()
    for look in looks(0.0, 0.5, seconds=20000.0):
        log.add("algo-1", look)
    assert len(log._looks["algo-1"]) <= 1024
    (found,) = log.programs()
    assert found.others_vcpus == pytest.approx(0.5, abs=0.01)
    log.add("algo-1", OthersCpu(seconds=3.0, cpu_seconds=0.0, vcpus=1.0))
    (found,) = log.programs()
    assert found.others_vcpus == 0.0


def test_a_host_is_looked_at_every_few_seconds_at_most():
    now, used = [100.0], [7.0]
    watch = OthersWatch(used=lambda: used[0], clock=lambda: now[0])
    now[0], used[0] = 102.0, 8.0
    assert watch.look().seconds == 0.0
    now[0] = 104.0
    assert (watch.look().seconds, watch.look().cpu_seconds) == (4.0, 1.0)
    # Counters of the kernel are no exact difference: it never falls.
    now[0], used[0] = 110.0, 7.5
    assert watch.look().cpu_seconds == 1.0
    now[0], used[0] = 110.5, 9.0
    assert watch.look(is_last=True).cpu_seconds == 2.0


def busy(others, *, vcpus=1.0, **changes):
    programs = OtherPrograms(host="algo-1", vcpus=vcpus, others_vcpus=others)
    return replace(sample_records.training(), others=(programs,), **changes)


# The profile's rule: used over left vCPUs, 0.6.
@pytest.mark.parametrize(("others", "is_busy"), [(0.0, 0), (0.3, 0), (0.37, 0), (0.38, 1), (2, 1)])
@pytest.mark.parametrize("vcpus", [1.0, 8.0])
def test_times_do_not_count_beyond_the_profiles_bound(others, is_busy, vcpus):
    assert bool(busy(others * vcpus, vcpus=vcpus).busy) is bool(is_busy)


def test_hosts_that_share_cores_are_no_other_programs():
    event = Event(when="2026-11-26T00:00:00Z", what=f"{NOT_COMPARABLE}: hosts share cores")
    assert not busy(0.9, events=(event,)).busy


def test_evaluation_and_training_say_that_the_figures_do_not_count():
    training = busy(0.9)
    record = evaluate(
        workload=sample_records.workload(),
        profile=sample_records.profile(),
        decision=sample_records.decision(),
        training=training,
    )
    assert record.performance.busy == "other programs were using 0.9 of the 1 vCPU of algo-1"
    for words in (evaluation_words(record), evaluation_table(record), training_words(training)):
        assert BUSY in words
        assert "times as fast" not in words
        assert "OUTSIDE" not in words


def test_other_programs_of_two_hosts_are_one_sentence():
    hosts = ("algo-1", "algo-2")
    others = tuple(OtherPrograms(host=host, vcpus=1, others_vcpus=0.8) for host in hosts)
    record = msgspec.structs.replace(sample_records.training(), others=others)
    shares = "0.8 of the 1 vCPU of algo-1, 0.8 of the 1 vCPU of algo-2"
    assert record.busy == f"other programs were using {shares}"
