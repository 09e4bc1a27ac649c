"""Checks states by their figures, and the evidence by real files of the kernel's form."""

from pathlib import Path

import pytest

from stoker.host.machine import group_cpu_seconds, group_quota
from stoker.host.usage import throttling
from stoker.profile.explain import explain
from stoker.profile.rank_results import Evidence, RankResult
from stoker.records import ProfileState
from support.profiled_ranks import changed, drained, profile_of, rank_of


def found(*ranks: RankResult) -> dict[str, ProfileState]:
    return {state.id: state for state in profile_of(*ranks).states}


def fixes_of(rank: RankResult) -> dict[str, str]:
    return {fix.id: fix.text for fix in profile_of(rank).fixes}


@pytest.mark.parametrize("changes", [{}, {"evidence": Evidence()}])
def test_with_data_at_hand_the_accelerator_sets_the_pace_and_nothing_else_is_named(changes):
    (state,) = found(rank_of(**changes)).values()
    assert (state.id, state.share) == ("accelerator", pytest.approx(0.98))


# A batch takes a worker 190 ms, of which it computes 5: two workers, a step of 100 ms.
WAITING = {"wait": 0.080, "accelerator": 0.020, "children_cpu": 0.005}
LATENT = rank_of(
    **WAITING, vcpus=4, drains=(drained(4, 0.005, wall=0.190), drained(1, 0.005, wall=0.190))
)
ALONE = drained(8, 0.110, rate=70.0), drained(1, 0.098, wall=0.100)
FEW = rank_of(**WAITING | {"workers": 1, "children_cpu": 0.100, "drains": ALONE})
LOADING = drained(8, 0.070, rate=110.0), drained(1, 0.070)
STARVED = {"held_looks": 150, "own_cpu_seconds": 2.0, "process_seconds": 10.0}
BUSY = {"wait": 0.060, "accelerator": 0.030, "trainer_cpu": 0.030, "children_cpu": 0.165}
SERIAL = {"wait": 0.070, "accelerator": 0.029, "trainer_cpu": 0.080, "children_cpu": 0.0}
ALONE_BUSY = rank_of(
    wait=0.060, accelerator=0.030, trainer_cpu=0.085, children_cpu=0.0, vcpus=1, workers=0
)
# A rank, the state that it is in, and the fix if there is one.
NAMED = {
    "busy": (rank_of(**BUSY, vcpus=2, drains=(drained(2, 0.165), drained(1, 0.150))), "cpu", None),
    "alone": (ALONE_BUSY, "cpu", None),
    "waiting": (LATENT, "workers", "num_workers"),
    "few": (FEW, "workers", "num_workers"),
    "none": (rank_of(**SERIAL, workers=0, drains=LOADING), "workers", "num_workers"),
    "starved": (rank_of(**STARVED), "gil", "gil"),
    "Python": (rank_of(held_looks=190, own_cpu_seconds=9.5, trainer_cpu=0.095), "gil", None),
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("busy", ["0.165 CPU-seconds of loader workers", "98% busy"]),
        ("alone", ["0.000 CPU-seconds of loader workers and 0.085 of trainers"]),
        ("waiting", ["takes a worker 190 ms, of which it computes 5.00 ms"]),
        ("waiting", ["it waits for its data, not for a CPU"]),
        ("few", ["1 worker for each rank, and the vCPUs are 14% busy"]),
        ("none", ["the main process loads the data itself (num_workers=0)"]),
        ("starved", ["lock at 150 of 200 looks", "another thread (0.8 vCPUs)"]),
        ("Python", ["Python code in the trainer's main thread"]),
    ],
)
def test_a_state_is_named_alone_with_its_figures_and_its_fix(name, words):
    rank, state, fix = NAMED[name]
    states = found(rank)
    assert set(states) == {state}
    assert [part for part in words if part not in states[state].text] == []
    assert fix is None or fix in fixes_of(rank)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, ("num_workers=11 instead of 2", "faster CPUs would not help")),
        # Ten would be busy; each costs memory, so four a vCPU are the most.
        ({"vcpus": 2}, ("num_workers=8 instead of 2",)),
        ({"iterable": True}, ("num_workers=11", "would repeat its samples")),
    ],
)
def test_workers_that_only_wait_may_outnumber_the_vcpus(fields, words):
    found = profile_of(changed(LATENT, **fields)).fixes
    (advised,) = [each for each in found if each.id == "num_workers"]
    assert [part for part in words if part not in advised.text] == []
    if "vcpus" in fields:
        assert advised.saves_seconds == pytest.approx(0.100 * (1 - 0.190 / 8 / 0.095), rel=0.02)
    assert advised.saves_seconds


# A lone worker takes 95 ms, and two take as long together: 94 ms a step, where 100 were measured.
SHARED = rank_of(
    **WAITING,
    drains=(
        drained(4, 0.005, wall=0.380, rate=10.6),
        drained(2, 0.005, wall=0.190, rate=10.5),
        drained(1, 0.005, wall=0.095, rate=10.4),
    ),
)


def test_what_all_workers_share_is_one_of_the_parts_and_named():
    profile = profile_of(SHARED)
    (state,) = profile.states
    assert state.id == "storage"
    assert "more workers get hardly more" in state.text
    assert "num_workers" not in fixes_of(SHARED)
    assert profile.check.error == pytest.approx(-0.056, abs=0.01)
    assert profile.check.explained
    words = "the limit is the storage or network, which all workers share"
    assert words in " ".join(explain(profile).split())


def test_the_rank_that_waits_longer_for_its_data_than_the_others_is_named():
    first = rank_of(world_size=2)
    assert "straggler" not in found(first, rank_of(rank=1, world_size=2))
    late = rank_of(rank=1, world_size=2, wait=0.075, accelerator=0.020)
    state = found(first, late)["straggler"]
    assert "rank 1 (host algo-1) waits 75.0 ms of a step for its data" in state.text
    assert state.share == pytest.approx(0.74)


THROTTLED = {"periods": 100, "throttled_periods": 80, "throttled_seconds": 6.0}


def test_a_simulated_quota_that_stops_the_group_is_named_and_counts_as_its_vcpus():
    took = {"wait": 0.060, "accelerator": 0.030, "children_cpu": 0.140}
    drains = (drained(1, 0.140, rate=8.0),)
    stopped = rank_of(**took, vcpus=1.5, drains=drains, held_looks=180, **THROTTLED)
    states = found(stopped)
    # Neither the interpreter lock nor reads: threads of a group that is stopped just stop.
    assert set(states) == {"cpu", "throttled"}
    assert "in 80 of 100 periods, 6.0 s in 10.0 s" in states["throttled"].text
    assert states["throttled"].share == pytest.approx(0.6)
    assert "on 1.5 vCPUs, 100% busy" in states["cpu"].text
    assert "throttled" not in found(changed(stopped, throttled_periods=9))


def group(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


V1 = "nr_periods 10\nnr_throttled 7\nthrottled_time 356000000\n"
V2 = "usage_usec 2500000\nnr_periods 10\nnr_throttled 7\nthrottled_usec 356000\n"


def test_both_versions_of_control_groups_say_the_same(tmp_path):
    first = group(
        tmp_path / "1",
        cpu__stat=V1,
        cpuacct__usage="2500000000\n",
        cpu__cfs_quota_us="150000",
        cpu__cfs_period_us="100000",
    )
    second = group(tmp_path / "2", cpu__stat=V2, cpu__max="150000 100000")
    assert throttling(first) == throttling(second) == (0.356, 7, 10)
    assert group_quota(first) == group_quota(second) == 1.5
    assert group_cpu_seconds(first) == group_cpu_seconds(second) == 2.5
    free = group(tmp_path / "3", cpu__max="max 100000", cpu__cfs_quota_us="-1")
    assert group_quota(free) is None
    assert throttling(free) == (0.0, 0, 0)
    # Version 1 may count in another folder.
    assert group_cpu_seconds(group(tmp_path / "4", cpu__stat=V1)) is None
