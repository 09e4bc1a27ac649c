"""No plan counts on more workers than a stream has shards, nor on a loader that is not fed."""

import msgspec
import pytest

from stoker.records import FeedSettings, ProfiledLoader
from stoker.run.train import prepare
from support import builders, decisions

TORCHS = "torch.utils.data.dataloader.DataLoader"
STREAM = ProfiledLoader(class_name=TORCHS, reach="torch", iterable=True, shards=2)


def profile_of(loader=STREAM, **changes):
    took = {"step_seconds": 0.4, "accelerator_step_seconds": 0.02, "trainer_cpu_seconds": 0.02}
    loading = {"loader_cpu_seconds": 0.8, "loader_wall_seconds": 0.8}
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


def test_data_hosts_are_promised_no_more_than_the_shards_make():
    stream, sharded, items = (
        min(promised(decided(profile_of(loader), *MANY)))
        for loader in (STREAM, msgspec.structs.replace(STREAM, shards=64), None)
    )
    # 0.8 worker-seconds by two workers: 0.4 s, on a CPU that is a little faster there.
    assert stream > 0.25
    assert max(sharded, items) < 0.1


OWN = ProfiledLoader(class_name="litdata.streaming.dataloader.StreamingDataLoader", reach="own")
UNSENDABLE = ProfiledLoader(
    class_name=TORCHS,
    reach="torch",
    unsendable="cannot send dataset.socket",
    unsendable_fix="make it at first use",
)


@pytest.mark.parametrize(
    ("loader", "feed"),
    [
        (OWN, FeedSettings()),
        (ProfiledLoader(class_name=TORCHS, reach="torch"), FeedSettings(replace_dataloader=False)),
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


def test_a_loader_without_workers_gets_those_of_the_plan_where_it_may_be_made_ahead(tmp_path):
    slow = {"num_workers": 0, "step_seconds": 0.85}
    ahead = ProfiledLoader(class_name=TORCHS, reach="torch", made_ahead_at="train.py:41")
    decision = decided(profile_of(ahead, **slow), *MANY)
    total = sum(g.count * (g.workers_per_host or 0) for g in decision.plan.groups)
    assert total > 1
    assert decision.loader_workers == {"train.py:41": total}
    given = {"workload": builders.workload(), "groups": decision.plan.groups}
    job = prepare(**given, run_dir=tmp_path, decision=decision)
    assert job.settings.loader_workers == {"train.py:41": total}
    # One that may not be made ahead keeps its 0.
    plain = ProfiledLoader(class_name=TORCHS, reach="torch")
    assert not decided(profile_of(plain, **slow), *MANY).loader_workers
