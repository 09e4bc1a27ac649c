"""Checks states by their figures, and the evidence by real files of the kernel's form."""

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.host.counters import (
    Throttling,
    children_cpu_seconds,
    machine_cpu_seconds,
    received_bytes,
    scheduled,
    storage_stall_seconds,
    throttling,
)
from stoker.host.machine import group_cpu_seconds, group_quota
from stoker.profile.explain import explain
from stoker.profile.rank_results import Evidence, ProfiledEpoch, RankResult, Reads
from stoker.profile.steps import StepWatch
from stoker.records import Place, Profile, ProfileState, convert, to_document
from support.profiled_ranks import at, changed, drained, profile_of, rank_of


def found(*ranks: RankResult) -> dict[str, ProfileState]:
    return {state.id: state for state in profile_of(*ranks).states}


def fixes_of(rank: RankResult) -> dict[str, str]:
    return {fix.id: fix.text for fix in profile_of(rank).fixes}


@pytest.mark.parametrize("changes", [{}, {"evidence": None}])
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
STARVED = {"held_knocks": 150, "own_cpu_seconds": 2.0, "other_threads_seconds": 8.0}
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
    "Python": (rank_of(held_knocks=190, own_cpu_seconds=9.5, trainer_cpu=0.095), "gil", None),
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("busy", ["0.165 CPU-seconds of loader workers", "98% busy"]),
        ("alone", ["uses 0.085 CPU-seconds of trainers, which load their batches themselves"]),
        ("waiting", ["takes a worker 190 ms, of which it computes 5.00 ms"]),
        ("waiting", ["it waits for its data, not for a CPU"]),
        ("few", ["1 worker loads, and the vCPUs are 14% busy"]),
        ("none", ["the main process loads the data itself (num_workers=0)"]),
        ("starved", ["held at 150 of 200 looks", "another thread of the trainer used 0.8 vCPUs"]),
        ("Python", ["94% of a step is Python code"]),
    ],
)
def test_a_state_is_named_alone_with_its_figures_and_its_fix(name, words):
    rank, state, fix = NAMED[name]
    states = found(rank)
    assert set(states) == {state}
    assert [part for part in words if part not in states[state].text] == []
    assert fix is None or fix in fixes_of(rank)


def test_one_worker_beside_busy_vcpus_is_not_too_few():
    # With 7 of 8 busy, one is left for a second worker.
    assert "workers" in found(changed(FEW, busy_vcpus=7.0, others_vcpus=5.9))
    assert "workers" not in found(changed(FEW, busy_vcpus=7.95, others_vcpus=6.85))


DIVIDED, UNDIVIDED = ({"iterable": True, "divides": divides} for divides in (True, False))
DIVIDE = "let the stream divide itself by get_worker_info()"


@pytest.mark.parametrize(
    ("fields", "fix", "words"),
    [
        ({}, "num_workers", ("num_workers=11 instead of 2", "faster CPUs would not help")),
        # Ten would be busy; each costs memory, so four a vCPU are the most.
        ({"vcpus": 2}, "num_workers", ("num_workers=8 instead of 2",)),
        (DIVIDED, "num_workers", ("num_workers=11", "a stream has as many shards")),
        (UNDIVIDED, "divide-stream", ("num_workers=11", DIVIDE)),
    ],
)
def test_workers_that_only_wait_may_outnumber_the_vcpus(fields, fix, words):
    found = profile_of(changed(LATENT, **fields)).fixes
    (advised,) = [each for each in found if each.id in ("num_workers", "divide-stream")]
    assert advised.id == fix
    assert [part for part in words if part not in advised.text] == []
    if "vcpus" in fields:
        assert advised.saves_seconds == pytest.approx(0.100 * (1 - 0.190 / 8 / 0.095), rel=0.02)
    assert advised.saves_seconds


# A lone worker takes 95 ms, and two take as long together: 94 ms a step, where 100 were measured.
SHARED = rank_of(
    **WAITING,
    received_bytes=100 * 900_000,
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
    assert "more workers get no more" in state.text
    # 900 kB a step of 100 ms.
    assert "72.0 Mbit/s are received" in state.text
    stalled = found(changed(SHARED, received_bytes=0, storage_stall_seconds=3.0))["storage"]
    assert "received" not in stalled.text
    assert "processes waited 3.0 s for storage" in stalled.text
    assert "num_workers" not in fixes_of(SHARED)
    assert profile.check.error == pytest.approx(-0.056, abs=0.01)
    assert (profile.check.explained, profile.check.state) == (True, None)
    words = "the limit is the storage or network, which all workers share"
    assert words in " ".join(explain(profile).split())


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (20e6, ["takes a worker 200 ms from storage and 10.0 ms from memory", "gives 20.0 MB/s"]),
        (None, []),
    ],
)
def test_cold_reads_are_named_though_the_loader_alone_found_its_files_in_memory(rate, words):
    reads = Reads(
        workers=2,
        batch_bytes=at(2e6),
        cold_seconds=at(0.200),
        warm_seconds=at(0.010),
        bytes_per_second=at(rate) if rate else None,
    )
    states = found(rank_of(wait=0.080, accelerator=0.020, reads=reads))
    assert set(states) == ({"storage"} if words else set())
    assert [part for part in words if part not in states["storage"].text] == []


def test_a_loader_that_is_fast_alone_is_not_what_steps_wait_for():
    quick = drained(2, 0.001, wall=0.010, rate=100.0), drained(1, 0.001, wall=0.005)
    assert not found(rank_of(wait=0.080, accelerator=0.020, drains=quick))


@pytest.mark.parametrize(
    "evidence",
    [
        {"held_knocks": 60},
        {"held_knocks": 110, "own_cpu_seconds": 5.0},
        {"other_threads_seconds": 0.5},
        {"own_cpu_seconds": 0.5, "queued_seconds": 8},
        {"held_knocks": 12, "knocks": 14},
    ],
    ids=["rarely held", "held by itself", "others sleep", "queued", "few looks"],
)
def test_a_main_thread_that_waits_for_its_accelerator_is_not_starved(evidence):
    assert set(found(rank_of(**STARVED | evidence))) == {"accelerator"}


def late(**fields: object) -> tuple[RankResult, RankResult]:
    """Makes two ranks: one is in collectives for 75 of its 99 ms, the other as `fields` say."""
    first = rank_of(world_size=2, collective_knocks=150)
    return first, rank_of(rank=1, world_size=2, **{"collective_knocks": 20, **fields})


def test_the_rank_that_all_others_wait_for_is_named_with_its_reason():
    loop = found(*late())["straggler"]
    assert "rank 1 (host algo-1) takes 90.1 ms" in loop.text
    assert "the others 25.7 ms" in loop.text
    assert "in its own loop, not because of data" in loop.text
    assert loop.share == pytest.approx(0.643, abs=0.01)
    data = found(*late(wait=0.075, accelerator=0.020))["straggler"]
    assert "it is slow because it waits for its data" in data.text


@pytest.mark.parametrize("knocks", [{"collective_knocks": 140}, {"knocks": 10}])
def test_ranks_that_differ_little_or_were_hardly_seen_do_not_straggle(knocks):
    assert "straggler" not in found(*late(**knocks))


THROTTLED = {"quota_vcpus": 1.5, "periods": 100, "throttled_periods": 80, "throttled_seconds": 6.0}
CROWD = drained(16, 0.8, rate=9.8), drained(8, 0.78, rate=10.0), drained(1, 0.6)
CROWDED = {"wait": 0.06, "accelerator": 0.03, "children_cpu": 0.78, "workers": 16, "drains": CROWD}


def test_fewer_workers_are_advised_where_they_loaded_as_much():
    crowd = rank_of(**CROWDED)
    assert set(found(crowd)) == {"cpu"}
    text = fixes_of(crowd)["num_workers"]
    assert "num_workers=8 instead of 16: as fast on 8 vCPUs" in text
    assert "10.0 batches per second instead of 9.8" in text


@pytest.mark.parametrize(
    ("cpu_of_fewer", "words"), [(0.80, "800 ms of CPU time instead of 800 ms"), (0.86, None)]
)
def test_under_a_used_up_quota_the_cpu_time_of_a_batch_says_what_is_as_fast(cpu_of_fewer, words):
    # Measured: bursts of a quota made the same loader 11% faster with more workers, by chance.
    drains = drained(16, 0.80, wall=1.2, rate=5.9), drained(8, cpu_of_fewer, rate=5.3)
    crowd = rank_of(**CROWDED | THROTTLED | {"drains": drains, "quota_vcpus": 4.0})
    assert "throttled" in found(crowd)
    text = fixes_of(crowd).get("num_workers")
    assert words in text if words else text is None


@pytest.mark.parametrize(
    ("workers", "vcpus", "drains"),
    [
        (16, 8, (drained(16, 0.1, wall=0.8, rate=19.8), drained(8, 0.1, wall=0.8, rate=10.0))),
        (16, 8, (drained(8, 0.78, rate=10.0), drained(1, 0.6))),
        (9, 8, (drained(9, 0.8, rate=10.0), drained(8, 0.78, rate=10.0))),
        (11, 8, (drained(11, 0.8, rate=10.0), drained(8, 0.78, rate=10.0))),
        (2, 1, (drained(2, 0.8, rate=10.0), drained(1, 0.78, rate=10.0))),
    ],
    ids=["more load more", "today's number was not tried", "one more", "a few more", "two on one"],
)
def test_fewer_workers_are_not_advised_on_anything_else(workers, vcpus, drains):
    crowd = {"workers": workers, "vcpus": vcpus, "drains": drains, "children_cpu": 0.098 * vcpus}
    assert "num_workers" not in fixes_of(rank_of(**CROWDED | crowd))


@pytest.mark.parametrize(
    ("waits", "is_named"),
    [
        ((0.060, 0.010, 0.012), True),
        ((0.060, 0.050), False),
        ((0.008, 0.001), False),
        ((0.060,), False),
        ((0.010, 0.060), False),
    ],
)
def test_later_epochs_are_advised_where_the_first_one_waits_longer(waits, is_named):
    epochs = tuple(ProfiledEpoch(batches=20, wait_seconds=own, step_seconds=0.1) for own in waits)
    fixes = {fix.id: fix for fix in profile_of(rank_of(epochs=epochs)).fixes}
    assert ("first-epoch" in fixes) is is_named
    if is_named:
        assert "waits 60.0 ms, of the 2 later ones 11.0 ms" in fixes["first-epoch"].text


def test_a_late_rank_explains_the_step_of_all():
    usual = rank_of(world_size=2, accelerator=0.020, collective_knocks=160)
    drains = (drained(1, 0.005, wall=0.010, rate=90.0),)
    late = rank_of(rank=1, world_size=2, accelerator=0.020, wait=0.080, drains=drains)
    check = profile_of(usual, late).check
    assert (check.explained, check.state) == (False, "straggler")


def test_a_state_that_costs_less_than_the_misfit_does_not_explain_it():
    # The ceiling would give 50 ms: what the other 50 are, nobody knows.
    fast = tuple(drained(n, 0.005, wall=0.095 * n, rate=20.0) for n in (4, 2, 1))
    check = profile_of(changed(SHARED, drains=fast)).check
    assert (check.explained, check.state) == (False, None)


def test_a_simulated_quota_that_stops_the_group_is_named_and_counts_as_its_vcpus():
    took = {"wait": 0.060, "accelerator": 0.030, "children_cpu": 0.140}
    drains = (drained(1, 0.140, wall=0.250, rate=8.0),)
    stopped = rank_of(**took, drains=drains, held_knocks=180, **THROTTLED)
    states = found(stopped)
    # Neither the interpreter lock nor reads: threads of a group that is stopped just stop.
    assert set(states) == {"cpu", "throttled"}
    assert "in 80 of 100 periods, 6.0 s in 10.0 s" in states["throttled"].text
    assert states["throttled"].share == pytest.approx(0.6)
    assert "on 1.5 vCPUs, 100% busy" in states["cpu"].text
    assert "throttled" not in found(changed(stopped, throttled_periods=9))


def test_the_strongest_comes_first_in_the_record_and_in_words():
    profile = profile_of(rank_of(**CROWDED, **THROTTLED))
    shares = [state.share or 0.0 for state in profile.states]
    assert len(shares) >= 2
    assert shares == sorted(shares, reverse=True)
    text = explain(profile)
    assert f"found: {profile.states[0].text[:40]}" in text
    assert max(map(len, text.splitlines())) <= 88


def test_a_profile_of_earlier_names_is_read_and_told():
    document = to_document(profile_of(rank_of(wait=0.080, accelerator=0.020)))
    states = ("first-epoch", "oversubscribed", "latency", "serial", "network")
    document["states"] = [{"id": name, "text": f"it is {name}", "share": 0.5} for name in states]
    document["check"] |= {"explained": False, "state": "first-epoch"}
    document["transforms"] = [
        {"name": "collate", "cpu_seconds": 0.1, "share": 1.0, "samples": 9},
        {"name": "m.pad", "within": "collate", "cpu_seconds": 0.1, "share": 1.0, "samples": 40},
    ]
    profile = convert(document, Profile, Place("profile.json"))
    text = explain(profile)
    assert "it is in the state first-epoch" in text
    assert "found: it is oversubscribed" in text
    assert "m.pad" in text


SEEN = {
    **dict.fromkeys(("seconds", "wait_seconds", "own_cpu_seconds"), st.floats(0, 1e6)),
    **dict.fromkeys(("queued_seconds", "throttled_seconds"), st.floats(0, 1e6)),
    **dict.fromkeys(("steps", "knocks", "held_knocks"), st.integers(0, 1000)),
    **dict.fromkeys(("periods", "throttled_periods"), st.integers(0, 1000)),
}


@given(st.fixed_dictionaries(SEEN))
def test_whatever_was_seen_the_shares_are_shares(seen):
    for state in found(rank_of(evidence=Evidence(**seen))).values():
        assert 0 <= state.share <= 1


def test_epochs_are_kept_apart_and_their_first_batch_is_left_out():
    watch = StepWatch()
    for waits in ((9.0, 1.0, 1.0), (9.0, 0.5, 0.5)):
        for number, wait in enumerate(waits):
            watch.asked()
            watch.got(now=2.0 * number, wait=wait, receive=0.0, is_counted=False)
        watch.epoch_ended()
        watch.epoch_ended()
    assert watch.result().epochs == (
        ProfiledEpoch(batches=2, wait_seconds=1.0, step_seconds=2.0),
        ProfiledEpoch(batches=2, wait_seconds=0.5, step_seconds=2.0),
    )


def test_there_is_no_gil_probe_where_a_loader_may_fork_its_workers():
    watch = StepWatch()
    for _ in range(2):
        watch.asked()
        watch.got(now=time.monotonic(), wait=0.0, receive=0.0, is_counted=True)
    assert "stoker-watch" in {thread.name for thread in threading.enumerate()}
    watch.pause()
    watch.pause()
    assert "stoker-watch" not in {thread.name for thread in threading.enumerate()}
    assert watch.result().steps == 1


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
    assert throttling(first) == throttling(second) == Throttling(10, 7, 0.356)
    assert group_quota(first) == group_quota(second) == 1.5
    assert group_cpu_seconds(first) == group_cpu_seconds(second) == 2.5
    free = group(tmp_path / "3", cpu__max="max 100000", cpu__cfs_quota_us="-1")
    assert group_quota(free) is None
    assert throttling(free) == Throttling()
    # Version 1 may count in another folder.
    assert group_cpu_seconds(group(tmp_path / "4", cpu__stat=V1)) is None


def test_neighbours_of_a_container_with_a_quota_are_none_of_its_others(tmp_path, monkeypatch):
    with_quota = group(tmp_path / "g", cpu__stat="usage_usec 7000000\n", cpu__max="50000 100000")
    monkeypatch.setattr("stoker.host.counters.limiting_group", lambda: with_quota)
    assert machine_cpu_seconds() == 7.0
    uncounted = group(tmp_path / "h", cpu__max="50000 100000")
    monkeypatch.setattr("stoker.host.counters.limiting_group", lambda: uncounted)
    own = machine_cpu_seconds()
    assert own == pytest.approx(time.process_time() + children_cpu_seconds(), rel=0.1)
    monkeypatch.setattr("stoker.host.counters.limiting_group", lambda: None)
    assert machine_cpu_seconds() >= 0.5 * own


def test_loopback_is_no_network(tmp_path):
    table = tmp_path / "dev"
    table.write_text("h\nh\n    lo: 99 1 0\n  eth0: 40 1 0\n  eth1:2 1 0\n")
    assert received_bytes(table) == 42
    assert received_bytes(tmp_path / "none") == 0


def test_pressure_is_read_where_the_kernel_has_it(tmp_path):
    pressure = tmp_path / "io"
    pressure.write_text("some avg10=0.00 avg300=0.00 total=2500000\nfull avg10=0 total=1\n")
    assert storage_stall_seconds(pressure) == 2.5
    assert storage_stall_seconds(tmp_path / "none") is None


def test_a_process_that_has_ended_was_not_scheduled():
    assert scheduled("/proc/self") is not None
    assert scheduled("/proc/0") is None
