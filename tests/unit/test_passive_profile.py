"""A run that was not profiled says what its steps took: from usage and reports to the record."""

import time

import msgspec
import pytest
import torch

import stoker
from stoker.catalog import load_catalog
from stoker.feed import resource_usage
from stoker.feed.resource_usage import LoaderUsage, RankUsage, Usage, read_usage
from stoker.feed.timeline import MeasuredStep, Timeline
from stoker.feed.wire.protocol import FeedWork, HostWork, Progress
from stoker.figures.passive_profile import MIN_STEPS, measure, passive_profile
from stoker.host.processes import descendant_pids
from stoker.records import Decision, Job, Profile, ProfiledLoader, Training
from support import builders, decisions

BATCH_BYTES = 4096
CATALOG = load_catalog("sagemaker")
DNN, DATA = CATALOG.get("ml.g5.8xlarge"), CATALOG.get("ml.c7i.8xlarge")


def used(*, trainer=0.01, children=0.0, feed=0.0, inside=0.0, workers=0, read=0):
    steps = 100
    own = LoaderUsage(
        steps=steps,
        wall_seconds=0.05 * steps,
        trainer_cpu_seconds=trainer * steps,
        next_cpu_seconds=inside * steps,
        span_steps=steps,
        children_cpu_seconds=children * steps,
        feed_cpu_seconds=feed * steps,
        read_bytes=read if read is None else read * steps,
        sized_batches=2,
        batch_bytes=2 * BATCH_BYTES,
        num_workers=workers,
        spans=[(trainer, children, feed)] * 4,
    )
    return RankUsage(rank=0, loaders={0: own, 1: LoaderUsage(steps=1)})


def report(**cpu_seconds):
    hosts = tuple(
        HostWork(host=name.replace("_", "-"), batches=100, cpu_seconds=100 * seconds)
        for name, seconds in cpu_seconds.items()
    )
    feed = FeedWork(seconds=10.0, taken=100, hosts=hosts)
    done = {"steps": 100, "samples": 6400, "wait_seconds": 1.0, "compute_seconds": 1.0}
    return Progress(rank=0, feed=feed, **done)


def passive(*groups, usage=None, progress=None, count=60, processes=1, host_types=None):
    step = MeasuredStep(loader=0, epoch=0, wait_seconds=0.02, compute_seconds=0.03, samples=64)
    timelines = {0: [step] * count}
    dnn, *data = groups or (builders.group("dnn", "ml.g5.8xlarge"),)
    record = Training(
        status="succeeded",
        groups=(msgspec.structs.replace(dnn, processes_per_host=processes), *data),
        workload_sha256="0" * 64,
        measured=measure(timelines, {}),
        job=Job(platform="sagemaker", name="r"),
    )
    return passive_profile(
        record,
        timelines=timelines,
        usages=[usage] if usage else [],
        progress=progress or {},
        host_types=host_types or {},
        vcpus=32,
        catalog=CATALOG,
    )


def decided(found: Profile) -> Decision:
    return decisions.decided(found, max_data_hosts=4, allowed_instance_types=("ml.c7i.8xlarge",))


def test_loading_in_workers_is_what_the_children_used():
    found = passive(usage=used(children=0.08, workers=4, read=1_000_000), processes=2)
    step = found.timed_step
    assert step.step_seconds == pytest.approx(0.05)
    assert step.wait_seconds == pytest.approx(0.02)
    assert step.loader_cpu_seconds == pytest.approx(0.16)
    assert step.trainer_cpu_seconds == pytest.approx(0.02)
    assert step.num_workers == 8
    assert step.global_batch_size == 128
    assert step.batch_bytes == 2 * BATCH_BYTES
    assert step.read_bytes == pytest.approx(2_000_000)
    assert step.accelerator_step_seconds is None
    assert found.check is None
    assert found.spread["loader_cpu_seconds"].samples == 4
    assert "compute_seconds" not in found.spread
    assert found.observed.cpu_utilization == pytest.approx((0.01 + 0.08) / 0.05 / 32)


@pytest.mark.parametrize("read", [0, None])
def test_loading_in_the_trainer_is_what_it_used_while_it_asked_for_a_batch(read):
    step = passive(usage=used(trainer=0.03, inside=0.02, read=read)).timed_step
    assert step.loader_cpu_seconds == pytest.approx(0.02)
    assert step.trainer_cpu_seconds == pytest.approx(0.01)
    assert step.num_workers == 0
    # Nothing read from storage is no rate of zero.
    assert step.read_bytes is None


def test_the_shards_of_a_stream_are_those_of_all_ranks(tmp_path, monkeypatch):
    # Other tests of this process ask for it.
    monkeypatch.delattr(stoker, "DataLoader", raising=False)
    usage = used(children=0.08, workers=4)
    reading = Usage(tmp_path / "usage.json", rank=0)
    reading.reads(0, torch.utils.data.DataLoader, shards=4)
    reading.write()
    written = msgspec.json.decode((tmp_path / "usage.json").read_bytes(), type=RankUsage)
    main, facts = usage.loaders[0], written.loaders[0]
    main.class_name, main.reach, main.shards = facts.class_name, facts.reach, facts.shards
    found = passive(usage=usage, processes=2)
    assert found.loader == ProfiledLoader(
        class_name="torch.utils.data.dataloader.DataLoader", reach="torch", iterable=True, shards=8
    )


def test_of_batches_that_no_loader_makes_the_parts_are_not_guessed_and_nothing_is_advised():
    usage = used(trainer=0.03, inside=0.001, children=0.02, workers=2)
    usage.loaders[0].is_elsewhere = True
    found = passive(usage=usage)
    step = found.timed_step
    assert (step.loader_cpu_seconds, step.trainer_cpu_seconds, step.num_workers) == (None,) * 3
    assert step.wait_seconds == pytest.approx(0.02)
    assert found.unmeasured == ("accelerator", "loader")
    # All of the script's CPU, its children's with it.
    assert found.observed.cpu_utilization == pytest.approx((0.03 + 0.02) / 0.05 / 32)
    decision = decided(found)
    assert (decision.action, decision.bottleneck) == ("keep", "unexplained")
    assert "accelerator and loader" in decision.plan.reason
    assert decision.path[0].answer == "unknown"
    assert [advice.id for advice in decision.advice] == ["compare"]


def heterogeneous(**cpu_seconds: float) -> Profile:
    return passive(
        builders.group("dnn", "ml.g5.8xlarge"),
        builders.group("data", "ml.c7i.8xlarge", 2, workers_per_host=32),
        usage=used(trainer=0.012, feed=0.002),
        progress={0: report(**cpu_seconds)},
        host_types={"algo-2": "ml.c7i.8xlarge", "algo-3": "ml.c7i.8xlarge"},
    )


def test_loading_on_data_hosts_is_counted_in_seconds_of_the_dnn_hosts_cpu():
    found = heterogeneous(algo_2=0.10, algo_3=0.14)
    speed = DATA.coremark_per_vcpu / DNN.coremark_per_vcpu
    assert found.timed_step.loader_cpu_seconds == pytest.approx(0.12 * speed)
    assert found.timed_step.receive_cpu_seconds == pytest.approx(0.002)
    assert found.timed_step.trainer_cpu_seconds == pytest.approx(0.010)
    (hosts,) = found.data
    assert (hosts.instance_type, hosts.count, hosts.workers_per_host) == ("ml.c7i.8xlarge", 2, 32)


def test_too_few_steps_give_no_profile():
    assert passive(usage=used(), count=MIN_STEPS - 1) is None


def test_without_usage_the_step_and_its_wait_are_all():
    found = passive()
    assert found.timed_step.loader_cpu_seconds is None
    assert found.timed_step.wait_seconds == pytest.approx(0.02)
    assert found.observed is None


def test_a_decision_on_it_keeps_the_whole_cluster_at_its_measured_step_and_price():
    decision = decided(heterogeneous(algo_2=1.2, algo_3=1.2))
    (keep,) = [plan for plan in decision.plans if plan.action == "keep"]
    assert [(each.role, each.instance_type, each.count) for each in keep.groups] == [
        ("dnn", "ml.g5.8xlarge", 1),
        ("data", "ml.c7i.8xlarge", 2),
    ]
    assert keep.predicted.step_seconds == pytest.approx(0.05)
    assert keep.predicted.usd_per_hour == pytest.approx(DNN.usd_per_hour + 2 * DATA.usd_per_hour)
    assert keep.predicted.speedup == pytest.approx(1.0)
    assert keep.predicted.cost_change == pytest.approx(0.0)
    others = {
        plan.groups[1].count: plan.predicted.step_seconds
        for plan in decision.plans
        if plan.action == "heterogeneous" and plan.predicted
    }
    # Today's cluster is there once; more and fewer data hosts of its type are next to it, and fewer
    # are never predicted to be faster.
    assert 2 not in others
    assert {1, 3} <= others.keys()
    times = [(others | {2: keep.predicted.step_seconds})[count] for count in sorted({*others, 2})]
    assert times == sorted(times, reverse=True)


def burn(seconds):
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_the_books_tell_loading_in_the_trainer_from_its_steps(tmp_path):
    # Workers that tests before have left in this process.
    left = len(descendant_pids())
    usage = Usage(tmp_path / "usage-rank3.json", rank=3)
    timeline = Timeline(tmp_path / "timeline-rank3.csv", usage=usage)
    for epoch in range(2):
        watched = timeline.epoch(loader=0, epoch=epoch)
        for _ in range(11):
            watched.ask()
            burn(0.002)
            watched.got(8)
            usage.count_batch({"images": torch.zeros(256), "label": 1})
            burn(0.001)
        watched.end()
    timeline.close()
    (tmp_path / "usage-rank4.json").write_text('{"rank": 4, "of a file that is cut')
    (found,) = read_usage(tmp_path)
    assert found.rank == 3
    own = found.loaders[0]
    # Ten of eleven: the first of an epoch, or its last, is nobody's step. Where others had the CPU
    # at the end of an epoch, the last ones before it are left out.
    assert 10 <= own.steps <= 20
    assert own.next_cpu_seconds / own.steps == pytest.approx(0.002, rel=0.3)
    assert own.trainer_cpu_seconds / own.steps == pytest.approx(0.003, rel=0.3)
    assert own.batch_bytes == own.sized_batches * 1024
    assert own.num_workers <= left


def test_an_epoch_that_was_dropped_is_not_counted_into_the_next(tmp_path, monkeypatch):
    # A machine that stands still between the last batch and the drop is not what this is about.
    monkeypatch.setattr(resource_usage, "_READ_SECONDS", 60.0)
    usage = Usage(tmp_path / "usage-rank0.json", rank=0)
    timeline = Timeline(tmp_path / "timeline-rank0.csv", usage=usage)
    for number in range(2):
        epoch = timeline.epoch(loader=0, epoch=number)
        for _ in range(3):
            epoch.ask()
            epoch.got(8)
        if number == 0:
            epoch.end_in_finalizer()
            burn(0.2)
    epoch.end()
    timeline.close()
    (found,) = read_usage(tmp_path)
    assert found.loaders[0].steps == 4
    assert found.loaders[0].trainer_cpu_seconds < 0.15
