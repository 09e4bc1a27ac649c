"""The ranks' results become the record: sums, maxima, the self-check, the fixes, the words."""

import msgspec
import pytest
import torch

import stoker
from stoker.catalog import load_catalog
from stoker.errors import UsageError
from stoker.profile.batches import facts_of
from stoker.profile.explain import explain
from stoker.profile.rank_results import BatchFacts, Evidence, Quartiles, Receive
from stoker.records import Profile, ProfiledLoader
from stoker.step_model import Parts
from support import decisions
from support.profiled_ranks import at, changed, drained, profile_of, rank_of

LOCAL = load_catalog("local")
# One core: 40 ms to load, 22 ms to train.
TOOK = {"step": 0.063, "wait": 0.038, "accelerator": 0.022, "receive_seconds": 0.0005}
CPU = {"trainer_cpu": 0.0225, "trainer_alone_cpu": 0.022, "children_cpu": 0.0405}
ONE_CORE = rank_of(
    **{**TOOK, **CPU, "vcpus": 1, "epoch_batches": 125},
    drains=(drained(1, 0.040, rate=24.0), drained(2, 0.040, rate=24.0)),
    receive=Receive(thread_seconds=at(0.0002), cpu_seconds=at(0.0009)),
    batch=BatchFacts(samples=64, num_bytes=590336),
    persistent_workers=False,
    evidence=None,
)


def words_of(profile: Profile) -> str:
    return " ".join(explain(profile).split())


def test_on_one_core_loading_and_training_add_up():
    profile = profile_of(ONE_CORE)
    assert profile.check.predicted_step_seconds == pytest.approx(0.063)
    assert profile.check.explained
    assert profile.step.loader_cpu_seconds == pytest.approx(0.040)
    assert profile.step.trainer_cpu_seconds == pytest.approx(0.022)
    assert profile.step.num_workers == 2
    assert (profile.host.vcpus, profile.host.quota_vcpus) == (1, None)
    assert profile.fixes == ()
    assert "60% of a step is waiting for data" in explain(profile)
    assert "the limit is the CPU." in words_of(profile)


def test_a_machine_that_was_slower_while_one_worker_loaded_alone_has_no_waiting_loader():
    # Measured on a GPU host that shares its cores: 0.773 s alone, 0.648 s with all cores busy.
    rank = rank_of(
        step=0.209,
        wait=0.172,
        accelerator=0.0314,
        workers=4,
        vcpus=4,
        trainer_cpu=0.0515,
        children_cpu=0.662,
        drains=(
            drained(1, 0.773, rate=1.315),
            drained(2, 0.690, rate=2.927),
            drained(4, 0.648, rate=5.580),
        ),
    )
    profile = profile_of(rank, kind="local.c4")
    assert profile.step.loader_wall_seconds == pytest.approx(0.648)
    assert [state.id for state in profile.states][:1] == ["cpu"]
    assert "num_workers" not in [fix.id for fix in profile.fixes]
    assert "the limit is the CPU." in words_of(profile)


def test_a_lone_worker_that_waits_is_one_that_waits():
    rank = rank_of(drains=(drained(1, 0.010, wall=0.060, rate=16.0), drained(8, 0.010, rate=130.0)))
    assert profile_of(rank).step.loader_wall_seconds == pytest.approx(0.060)


def test_waiting_that_comes_in_bursts_counts_with_its_mean():
    # Measured on a line of 8 Mbit/s, whose queue gives some batches at once and others late.
    bursts = Quartiles(mean=0.0515, median=0.0436, low=0.030, high=0.0512, samples=24)
    lone = msgspec.structs.replace(drained(1, 0.0021, rate=19.4), wall_seconds=bursts)
    rank = rank_of(drains=(lone, drained(2, 0.0021, wall=0.102, rate=19.7)))
    assert profile_of(rank).step.loader_wall_seconds == pytest.approx(0.0515, rel=0.05)


def test_ranks_add_up_where_cpu_is_meant_and_the_slowest_counts_where_waiting_is():
    first = changed(ONE_CORE, world_size=2, ranks_on_host=2, vcpus=2)
    second = changed(first, rank=1, wait_seconds=at(0.050, 120), trainer_cpu_seconds=0.03)
    step = profile_of(first, second).step
    assert step.global_batch_size == 128
    assert step.batch_bytes == 2 * 590336
    assert step.loader_cpu_seconds == pytest.approx(0.080)
    assert step.trainer_cpu_seconds == pytest.approx(0.044)
    assert step.wait_seconds == pytest.approx(0.050)
    assert step.accelerator_step_seconds == pytest.approx(0.022)
    assert step.receive_cpu_seconds == pytest.approx(0.0009)
    assert step.num_workers == 4
    # Those of one host.
    assert profile_of(first, changed(second, host="algo-2"), count=2).step.num_workers == 2


TORCHS = "torch.utils.data.dataloader.DataLoader"


def test_a_streams_shards_are_those_of_all_ranks():
    first = changed(ONE_CORE, world_size=2, class_name=TORCHS, iterable=True, divides=True)
    profile = profile_of(first, changed(first, rank=1, num_workers=0))
    # A rank without workers makes one shard in its own process.
    assert profile.loader == ProfiledLoader(
        class_name=TORCHS, reach="torch", iterable=True, shards=3, divides=True
    )
    assert "over a stream of 3 shards, which 3 workers make at most" in words_of(profile)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"reach": "own", "class_name": "litdata.X"}, "litdata.X makes batches in its own way"),
        ({"reach": "left"}, "or use --replace-dataloader true"),
        ({}, f"loader: {TORCHS}; data hosts can make its batches, without a change"),
        ({"iterable": True, "divides": False}, "more workers would only repeat its samples"),
    ],
)
def test_one_line_says_how_far_data_hosts_can_help(given, words):
    assert words in words_of(profile_of(changed(ONE_CORE, **{"class_name": TORCHS} | given)))


def test_a_script_that_imports_stokers_class_is_not_fed_by_torchs(monkeypatch):
    monkeypatch.delattr(stoker, "DataLoader", raising=False)
    loader = torch.utils.data.DataLoader([1])
    assert facts_of(loader).reach == "torch"
    assert facts_of(stoker.DataLoader([1])).reach == "stoker"
    assert facts_of(loader).reach == "left"


def test_a_class_made_from_one_that_the_feed_cannot_reach_is_not_reached_either():
    class StreamingDataLoader(torch.utils.data.DataLoader[int]):
        __module__ = "litdata.streaming.dataloader"
        __qualname__ = "StreamingDataLoader"

    class Mine(StreamingDataLoader):
        pass

    for kind in (StreamingDataLoader, Mine):
        found = facts_of(kind([1]))
        assert found.reach == "own"
        assert found.class_name == "litdata.streaming.dataloader.StreamingDataLoader"


def test_whose_clock_the_steps_are_by_is_said():
    first = rank_of()
    assert "clock" not in profile_of(first).what
    timed = changed(first, as_is=msgspec.structs.replace(first.as_is, clock="cuda:0"))
    profile = profile_of(timed)
    assert profile.what["clock"] == "cuda:0"
    assert "steps and waits are times of cuda:0" in words_of(profile)


def test_loading_in_the_main_process_is_explained_though_a_device_hides_some_of_it():
    first = rank_of(
        step=0.070, wait=0.010, accelerator=0.060, workers=0, drains=(drained(1, 0.05),)
    )
    timed = msgspec.structs.replace(first.as_is, clock="cuda:0", host_wait_seconds=0.050)
    profile = profile_of(changed(first, as_is=timed))
    assert profile.step.hidden_load_seconds == pytest.approx(0.040)
    assert profile.check.error == pytest.approx(0.0, abs=0.01)
    # Of a host nothing is hidden.
    assert profile_of(first).step.hidden_load_seconds is None


def test_parts_that_miss_the_whole_are_unexplained():
    profile = profile_of(changed(ONE_CORE, step_seconds=at(0.090)))
    assert profile.check.error == pytest.approx(0.063 / 0.090 - 1)
    assert not profile.check.explained
    assert "unexplained" in explain(profile)
    # Nor do CPUs that idle explain a step.
    assert not profile_of(changed(ONE_CORE, vcpus=4, step_seconds=at(0.2))).check.explained


def test_what_others_took_of_the_cpus_is_accounted_for_and_said():
    # Half the core was somebody else's: everything took twice as long, and that is explained.
    profile = profile_of(changed(ONE_CORE, step_seconds=at(0.126), others_vcpus=0.5))
    assert profile.check.explained
    said = words_of(profile)
    assert said.count("not reliable: other programs were using 0.5 of the 1 vCPU") == 1
    assert "kept 0.5" not in said
    # Another rank of the training is no other program.
    first = changed(ONE_CORE, world_size=2, vcpus=2, others_vcpus=1.0)
    assert "other programs" not in explain(profile_of(first, changed(first, rank=1)))


def test_next_to_other_programs_profile_and_decide_name_one_measured_step():
    uneven = Quartiles(mean=0.126, median=0.110, low=0.1, high=0.2, samples=60)
    quiet = changed(ONE_CORE, step_seconds=uneven)
    assert profile_of(quiet).timed_step.step_seconds == 0.110
    profile = profile_of(changed(quiet, others_vcpus=0.3))
    assert profile.timed_step.step_seconds == 0.126
    assert "measured were 126 ms" in words_of(profile)
    decision = decisions.decided(profile, catalog=load_catalog("local", cores=4))
    assert "110 ms" not in f"{decision.path}{decision.warnings}"


def test_a_quota_of_one_and_a_half_is_divided_by_as_it_is():
    # 63 ms of CPU a step: 42 ms on 1.5 vCPUs, where two would give 32.
    profile = profile_of(changed(ONE_CORE, vcpus=1.5, step_seconds=at(0.0417)))
    assert profile.check.predicted_step_seconds == pytest.approx(0.063 / 1.5)
    assert profile.check.explained
    assert (profile.host.vcpus, profile.host.quota_vcpus) == (1, 1.5)
    assert "of 1.5 vCPUs" in explain(profile)


def test_a_loader_that_failed_alone_is_known_from_its_workers_beside_the_model():
    profile = profile_of(changed(ONE_CORE, drains=()))
    assert profile.step.loader_cpu_seconds == pytest.approx(0.0405)
    assert profile.step.loader_wall_seconds is None
    assert profile.check is None


def test_without_workers_the_loader_is_what_the_trainer_used_more():
    serial = changed(ONE_CORE, num_workers=0, trainer_cpu_seconds=0.062, children_cpu_seconds=0.0)
    step = profile_of(changed(serial, drains=())).step
    assert step.loader_cpu_seconds == pytest.approx(0.040)
    assert step.loader_wall_seconds == pytest.approx(0.038)
    # Its loading is charged once.
    profile = profile_of(serial)
    assert profile.step.used_cpu_seconds == pytest.approx(0.062)
    assert profile.check.predicted_step_seconds == pytest.approx(0.062)


@pytest.mark.parametrize(
    ("wait", "alone", "words"),
    [
        # Two threads of the main process wait for each other, on vCPUs that others keep busy.
        (0.136, 0.007, "threads of the main process wait for each other"),
        # Eight threads of it do together what a worker does with one.
        (0.010, 0.060, "a worker, which gives torch's operations one thread, takes 60.0 ms"),
    ],
)
def test_loading_by_the_main_process_explains_what_one_worker_alone_does_not(wait, alone, words):
    serial = changed(
        ONE_CORE,
        vcpus=8,
        drains=(drained(8, alone, rate=7 / alone), drained(1, alone)),
        num_workers=0,
        step_seconds=at(wait + 0.021),
        wait_seconds=at(wait),
    )
    profile = profile_of(serial)
    assert (profile.check.explained, profile.check.state) == (False, "workers")
    text = words_of(profile)
    assert words in text
    assert "unexplained" not in text
    assert "the limit is loading in the trainer itself" in text
    saved = [fix.saves_seconds for fix in profile.fixes if fix.id == "num_workers"]
    assert saved == [pytest.approx(wait - 0.001, abs=0.001)]
    # A step that is longer than loading and training in turn is not explained by that.
    check = profile_of(changed(serial, step_seconds=at(2 * (wait + 0.021)))).check
    assert (check.explained, check.state) == (False, None)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "never iterated a DataLoader"),
        ([changed(ONE_CORE, accelerator=None, missing="it ended after 7")], "ended after 7"),
        ([changed(ONE_CORE, world_size=2)], "only ranks 0 of 2"),
    ],
)
def test_what_is_missing_is_said(ranks, words):
    with pytest.raises(UsageError, match=words):
        profile_of(*ranks)


def test_float_images_are_better_sent_as_bytes():
    images = {"num_bytes": 4_000_000, "float_image_bytes": 4_000_000}
    batch = BatchFacts(samples=64, is_uint8_like=True, **images)
    (fix,) = profile_of(changed(ONE_CORE, batch=batch)).fixes
    assert fix.id == "uint8"
    assert "4.00 MB per step become 1.00 MB (nothing is lost)" in fix.text


def test_workers_that_start_each_epoch_are_worth_keeping():
    (fix,) = profile_of(changed(ONE_CORE, first_wait_seconds=2.0, epoch_batches=10)).fixes
    assert fix.id == "persistent_workers"
    assert fix.saves_seconds == pytest.approx(0.196, abs=0.001)


def test_where_stoker_does_not_help_that_is_said_first():
    fed = changed(
        ONE_CORE,
        vcpus=8,
        step_seconds=at(0.0225),
        wait_seconds=at(0.0003),
        drains=(drained(8, 0.04), drained(1, 0.04)),
    )
    assert "stoker does not help here" in explain(profile_of(fed)).splitlines()[0]


@pytest.mark.parametrize(
    ("fields", "seconds", "name"),
    [
        ({}, 0.025, "cpu"),
        ({"vcpus": 8}, 0.021, "accelerator"),
        ({"vcpus": 8, "workers": 2}, 0.040, "latency"),
        ({"workers": 0}, 0.100, "latency"),
        ({"workers": 0, "vcpus": 1}, 0.100, "cpu"),
    ],
)
def test_the_slowest_of_what_overlaps_sets_the_step(fields, seconds, name):
    parts = Parts(
        accelerator_seconds=0.02,
        receive_seconds=0.001,
        loader_cpu_seconds=0.08,
        loader_wall_seconds=0.08,
        trainer_cpu_seconds=0.02,
        **{"vcpus": 4, "workers": 4} | fields,
    )
    assert parts.step_seconds == pytest.approx(seconds)
    assert parts.limit == name


# Pods of a cluster (Kubernetes 1.36, torch 2.6 on the CPU), whose trainer used a third less CPU on
# cached batches than next to its worker; `apart` is what both need alone, over the vCPUs.
@pytest.mark.parametrize(
    ("vcpus", "step", "workers_cpu", "trainer_cpu", "apart"),
    [
        (1, 0.458, 0.168, 0.286, 0.337),
        (1, 0.545, 0.187, 0.340, 0.400),
        (2, 0.245, 0.154, 0.285, 0.183),
    ],
    ids=["one core", "one core, a longer step", "two cores"],
)
def test_a_training_on_the_cpu_is_explained_by_what_its_steps_used(
    vcpus, step, workers_cpu, trainer_cpu, apart
):
    alone = apart * vcpus - workers_cpu
    took = {"step": step, "wait": 0.02 * step, "accelerator": alone / vcpus, "vcpus": vcpus}
    cpu = {"trainer_cpu": trainer_cpu, "trainer_alone_cpu": alone, "children_cpu": workers_cpu}
    drains = tuple(drained(workers, workers_cpu, rate=0.0) for workers in (1, 2))
    profile = profile_of(rank_of(**took, **cpu, workers=vcpus, drains=drains, evidence=None))
    used = (workers_cpu + trainer_cpu) / vcpus
    assert profile.check.predicted_step_seconds == pytest.approx(used)
    assert profile.check.explained
    assert [state.id for state in profile.states] == ["cpu"]


def test_a_pod_that_used_idle_cpus_of_its_node_is_explained_with_those_that_it_had():
    profile = profile_of(
        changed(
            ONE_CORE,
            step_seconds=at(0.030),
            trainer_cpu_seconds=0.030,
            children_cpu_seconds=0.045,
            drains=(drained(1, 0.040), drained(2, 0.040)),
            cpu_limit="pod",
        )
    )
    assert profile.host.capacity == pytest.approx(2.5)
    assert profile.check.explained
    (note,) = profile.what["notes"]
    assert "used 2.5 vCPUs of host algo-1, and its pod asks for 1" in note


@pytest.mark.parametrize("limit", ["affinity", "quota", "machine"])
@pytest.mark.parametrize("outside", [0.0, 0.045])
def test_what_a_helper_uses_beyond_the_vcpus_of_a_host_is_neither_its_step_nor_its_vcpus(
    limit, outside
):
    # 1.2 vCPUs of one, or 1.5 more on others: the same step, with a helper on another vCPU.
    quiet = profile_of(changed(ONE_CORE, cpu_limit=limit))
    profile = profile_of(
        changed(
            ONE_CORE,
            children_cpu_seconds=0.0405 + 0.0135,
            outside_cpu_seconds=outside,
            cpu_limit=limit,
        )
    )
    assert profile.host.capacity == 1
    assert profile.check.explained
    assert profile.step.used_cpu_seconds == pytest.approx(quiet.step.used_cpu_seconds, rel=0.05)
    (note,) = profile.what["notes"]
    assert "helper processes of the script" in note
    assert (f"CPU {limit}" if limit == "quota" else "CPU affinity") in note


def test_a_helper_elsewhere_is_no_other_program_of_the_machine():
    busy = Evidence(seconds=6.3, steps=100, elsewhere_vcpus=1.5)
    alone = changed(ONE_CORE, evidence=busy)
    assert profile_of(alone).observed.elsewhere_vcpus == pytest.approx(1.5)
    with_helper = changed(ONE_CORE, evidence=busy, outside_cpu_seconds=1.4 * 0.063)
    assert profile_of(with_helper).observed.elsewhere_vcpus == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("limit", "is_pod"), [("machine", False), ("affinity", False), ("quota", False), ("pod", True)]
)
def test_where_no_pod_is_no_word_is_of_pods(limit, is_pod):
    throttled = Evidence(seconds=9.0, steps=90, quota_vcpus=1.0, periods=90, throttled_periods=80)
    rank = changed(
        ONE_CORE,
        evidence=msgspec.structs.replace(throttled, throttled_seconds=6.0),
        children_cpu_seconds=0.09,
        cpu_limit=limit,
        is_pod=is_pod,
    )
    profile = profile_of(rank)
    words = [*profile.what["notes"], *(fix.text for fix in profile.fixes)]
    words += [own.text for own in decisions.decided(profile, catalog=LOCAL).advice]
    text = " ".join(words).lower()
    assert "throttled" in {fix.id for fix in profile.fixes}
    assert "cpu limit" in text
    for word in ("pod", "kubernetes", "node"):
        assert (word in text) == is_pod, word


class Many(list[int]):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self):
        return iter([1, 2])


@pytest.mark.parametrize(
    ("dataset", "batch_size", "splits"),
    [([1, 2], 2, True), ([1, 2], None, False), (Many([1, 2]), 2, False), (Stream(), 2, False)],
)
def test_it_is_known_whether_samples_of_a_batch_are_made_one_by_one(dataset, batch_size, splits):
    loader = torch.utils.data.DataLoader(dataset, batch_size=batch_size)
    assert facts_of(loader).splits is splits
    rank = changed(rank_of(), loader=facts_of(loader))
    assert profile_of(rank).loader.splits is splits
