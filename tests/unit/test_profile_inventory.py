import pytest

from stoker.host.machine import usable_vcpus, vcpu_capacity
from stoker.profile.combine import host_of
from stoker.profile.rank_results import Inventory, RankResult
from stoker.records import ProfileSettings, TodaysGroup


@pytest.mark.parametrize(
    ("asked", "quota_vcpus", "capacity", "workers"),
    [
        ("", 1.5, 1.5, 2),
        ("", 0.4, 0.4, 1),
        ("", 9.0, 4.0, 4),
        ("1500", None, 1.5, 2),
        ("1500", 1.0, 1.0, 1),
        *((asked, None, 4.0, 4) for asked in ("64000", "0", "", "a lot")),
    ],
)
def test_a_host_counts_on_its_quota_or_what_its_pod_asks_for_and_not_on_its_node(
    monkeypatch, asked, quota_vcpus, capacity, workers
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr("stoker.host.machine.cpu_quota", lambda: quota_vcpus)
    monkeypatch.setenv("STOKER_CPU_REQUEST_MILLI", asked)
    assert vcpu_capacity() == capacity
    assert usable_vcpus() == workers


G5 = Inventory(accelerators=1, accelerator_model="NVIDIA A10G", instance_type="g5.8xlarge")
RANK = RankResult(rank=0, world_size=1, host="h", vcpus=32, inventory=G5)


@pytest.mark.parametrize(
    ("today", "given", "name"),
    [
        ("ml.g4dn.xlarge", None, "ml.g4dn.xlarge"),
        ("local.c2", None, "g5.8xlarge"),
        ("ml.g4dn.xlarge", "auto", "g5.8xlarge"),
        ("local.c2", "g6.8xlarge", "g6.8xlarge"),
    ],
)
def test_the_profiled_host_has_the_name_that_says_most(today, given, name):
    group = TodaysGroup(instance_type=today)
    found = host_of(RANK, group=group, settings=ProfileSettings(instance_type=given))
    assert (found.instance_type, found.vcpus, found.accelerators) == (name, 32, 1)
