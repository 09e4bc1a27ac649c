"""No plan counts on more workers than a stream has shards, nor on a loader that is not fed."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.catalog import load_catalog
from stoker.decide import explain, refuse_unfed
from stoker.decide.model import ClusterShape, Hosts, busy_workers, estimate
from stoker.decide.scaled_profile import TakeAs
from stoker.decide.step_work import measure
from stoker.errors import UsageError
from stoker.records import FeedSettings, ProfiledLoader, Shippable, Workload
from support import builders, decisions

AWS = load_catalog("sagemaker")
TORCHS = "torch.utils.data.dataloader.DataLoader"
STREAM = ProfiledLoader(class_name=TORCHS, reach="torch", iterable=True, shards=2, divides=True)


def profile_of(loader=STREAM, **changes):
    took = {"step_seconds": 0.4, "accelerator_step_seconds": 0.02, "trainer_cpu_seconds": 0.02}
    loading = {"loader_cpu_seconds": 0.8, "loader_wall_seconds": 0.8, "receive_cpu_seconds": 0.001}
    made = builders.starved(**took | loading | {"num_workers": 2, "batch_bytes": None} | changes)
    return msgspec.structs.replace(made, loader=loader, what={"ranks": 1})


def decided(profile, *groups, **more):
    extra = [groups] if groups else []
    given = {"catalog": decisions.FEW, "objective": "time", **more}
    return decisions.decided(profile, extra_clusters=extra, **given)


def promised(decision):
    """Returns the steps of the plans with data hosts that may be run."""
    return [
        plan.predicted.step_seconds
        for plan in decision.plans
        if plan.action == "heterogeneous" and plan.predicted and plan.feasible
    ]


MANY = (
    builders.group("dnn", "ml.g5.8xlarge"),
    builders.group("data", "ml.c7i.8xlarge", 2, workers_per_host=32),
)


def test_on_another_type_a_stream_has_as_many_shards_for_each_rank():
    elsewhere = TakeAs(instance_type="ml.g5.2xlarge", accelerator_step_seconds=0.002)
    profile = profile_of(kind="local.c2", step_seconds=0.42)
    groups = (msgspec.structs.replace(MANY[0], instance_type="ml.g5.2xlarge"), MANY[1])
    decision = decided(profile, *groups, take_as=elsewhere)
    # Two workers, on a CPU that is at most three times as fast.
    assert min(promised(decision)) > 0.8 / 2 / 3


def test_the_free_fix_comes_with_its_figure_before_any_money():
    decision = decided(profile_of())
    assert decision.action == "keep"
    (tuned,) = [plan for plan in decision.plans if plan.action == "tune"]
    assert not tuned.feasible
    assert "set num_workers=" in tuned.reason
    assert tuned.predicted.step_seconds < 0.1
    (advice,) = [own for own in decision.advice if own.id == "num-workers"]
    assert "or feed.shards:" in advice.text
    assert "fix that before money is spent" in decision.plan.reason
    assert "the stream has 2 shards" in " ".join(explain(decision).split())


def test_data_hosts_are_promised_no_more_than_the_shards_make():
    stream, sharded, items = (
        min(promised(decided(profile_of(loader), *MANY, feed=feed)))
        for loader, feed in (
            (STREAM, FeedSettings()),
            (STREAM, FeedSettings(shards=64)),
            (None, FeedSettings()),
        )
    )
    # 0.8 worker-seconds by two workers: 0.4 s, on a CPU that is a little faster there.
    assert stream > 0.25
    assert max(sharded, items) < 0.1


def test_a_stream_is_given_more_workers_only_where_it_may_divide_itself():
    unknown = decided(profile_of(msgspec.structs.replace(STREAM, divides=None)))
    (tuned,) = [plan for plan in unknown.plans if plan.action == "tune"]
    assert tuned.reason.endswith("if it divides itself by get_worker_info()")
    undivided = decided(profile_of(msgspec.structs.replace(STREAM, divides=False)))
    assert not [plan for plan in undivided.plans if plan.action == "tune"]
    (advice,) = [own for own in undivided.advice if own.id == "shards"]
    assert "divide itself by get_worker_info()" in advice.text


OWN = ProfiledLoader(class_name="litdata.streaming.dataloader.StreamingDataLoader", reach="own")
SHARED = ProfiledLoader(
    class_name=TORCHS, reach="torch", made_here="dataset.epoch is a tensor in shared memory"
)
# A replay buffer under a loader without workers.
IN_STEP = ProfiledLoader(
    class_name=TORCHS,
    reach="torch",
    in_step="dataset.items changed between two batches, and num_workers=0 means that no batch is "
    "made before it is asked for",
)
UNSENDABLE = ProfiledLoader(
    class_name=TORCHS,
    reach="torch",
    shippable=Shippable(ok=False, why="cannot send dataset.socket", fix="make it at first use"),
)
# Torch's class, in a script that imports stoker's.
LEFT = ProfiledLoader(class_name=TORCHS, reach="left")


@pytest.mark.parametrize(
    ("loader", "feed"),
    [
        (OWN, FeedSettings()),
        (ProfiledLoader(class_name=TORCHS, reach="torch"), FeedSettings(replace_dataloader=False)),
        (LEFT, FeedSettings()),
        (SHARED, FeedSettings()),
        (IN_STEP, FeedSettings()),
        (IN_STEP, FeedSettings(shared_memory="copy")),
        (UNSENDABLE, FeedSettings()),
    ],
)
def test_no_data_host_is_advised_for_a_loader_that_is_not_fed(loader, feed):
    decision = decided(profile_of(loader, num_workers=32, step_seconds=0.03), *MANY, feed=feed)
    assert not promised(decision)
    answer = next(own for own in decision.path if "data group" in own.question)
    assert answer.answer == "no"
    assert loader.class_name in answer.because
    (asked,) = [plan for plan in decision.plans if plan.action == "heterogeneous"]
    assert "data hosts" in asked.reason


def test_no_workers_are_advised_for_a_loader_whose_loop_changes_it():
    freed, kept = (
        decided(
            profile_of(loader, num_workers=0),
            builders.group("dnn", "ml.g5.2xlarge", 1, workers_per_host=4),
        )
        for loader in (None, IN_STEP)
    )
    assert {plan.action for plan in freed.plans} & {"tune", "heterogeneous"}
    # Only what was asked for, with the reason why not.
    assert {p.action for p in kept.plans if p.feasible} <= {"keep", "scale_up", "scale_out"}
    workers = {group.workers_per_host for plan in kept.plans for group in plan.groups}
    assert workers == {0, 4}
    (advice,) = [own for own in kept.advice if own.id == "unfed"]
    assert "dataset.items changed between two batches" in advice.text
    assert "Change it between epochs" in advice.text
    assert not [own for own in kept.advice if "num_workers" in own.id or "num-workers" in own.id]


@pytest.mark.parametrize("unshippable", [None, "error", "local"])
def test_what_to_do_about_a_dataset_that_cannot_be_sent_is_worth_doing(unshippable):
    profile = profile_of(UNSENDABLE, num_workers=32, step_seconds=0.03)
    feed = FeedSettings(unshippable=unshippable)
    decision = decided(profile, *MANY, feed=feed)
    assert not promised(decision)
    (advice,) = [own for own in decision.advice if own.id == "unfed"]
    assert UNSENDABLE.shippable.why in advice.text
    assert UNSENDABLE.shippable.fix in advice.text
    assert f"{advice.text} (data hosts are wanted)" in " ".join(explain(decision).split())
    # The training is not in need of a data group: it goes on without one.
    refuse_unfed(profile, workload(feed=feed))


def test_a_dataset_that_can_be_sent_gets_data_hosts():
    sent = msgspec.structs.replace(UNSENDABLE, shippable=Shippable(ok=True))
    decision = decided(profile_of(sent, num_workers=32, step_seconds=0.03), *MANY)
    assert promised(decision)
    assert not [own for own in decision.advice if own.id == "unfed"]


def workload(**keys):
    return Workload(name="own", command=("python", "train.py"), platform="local", **keys)


def test_a_chain_stops_before_a_training_that_the_feed_cannot_reach():
    profile = profile_of(OWN)
    with pytest.raises(UsageError, match="makes batches in its own way") as caught:
        refuse_unfed(profile, workload())
    assert "feed.replace_dataloader: false" in caught.value.fix
    refuse_unfed(profile, workload(feed=FeedSettings(replace_dataloader=False)))
    refuse_unfed(profile, workload(engine="ray"))
    with pytest.raises(UsageError, match="imports stoker's DataLoader") as caught:
        refuse_unfed(profile_of(LEFT), workload())
    assert "--replace-dataloader true" in caught.value.fix
    refuse_unfed(profile_of(LEFT), workload(feed=FeedSettings(replace_dataloader=True)))
    refuse_unfed(profile_of(STREAM), workload())
    with pytest.raises(UsageError, match=r"dataset\.epoch is a tensor in shared memory"):
        refuse_unfed(profile_of(SHARED), workload())
    refuse_unfed(profile_of(SHARED), workload(feed=FeedSettings(shared_memory="copy")))
    refuse_unfed(profile_of(None), workload())


@given(
    shards=st.integers(1, 40),
    local=st.integers(0, 64),
    hosts=st.integers(0, 6),
    workers=st.integers(1, 64),
    wall=st.floats(0.01, 10.0),
)
def test_no_cluster_is_faster_than_the_workers_of_its_shards(shards, local, hosts, workers, wall):
    instance = AWS.get("ml.c5.9xlarge")
    terms = dict.fromkeys(("step_seconds", "loader_cpu_seconds", "loader_wall_seconds"), wall)
    profile = builders.profile(instance.type, num_workers=shards, **terms)
    work = measure(profile, today=instance, processes=1)
    work = replace(work, shards=shards, corrected=(), accelerator_seconds=0.0)
    data = (Hosts(instance=instance, count=hosts, workers=workers),) if hosts else ()
    shape = ClusterShape(dnn=Hosts(instance=instance, count=1, workers=local), data=data)
    assert sum(busy_workers(work, shape)) <= shards
    assert estimate(work, shape).step_seconds >= wall / shards * (1 - 1e-9)
