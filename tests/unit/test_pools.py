"""Plans are made of the node pools of a pools file."""

from collections.abc import Mapping
from decimal import Decimal

import pytest

from stoker.catalog import catalog_of, with_pools
from stoker.errors import UsageError
from stoker.records import Json, NodePool, Workload
from stoker.records.platforms import ObjectPatch, amount
from support import builders

POOLS = """\
instance_type,family,vcpus,memory_gib,gpus,gpu_model,usd_per_hour,priced_on,node_selector,taints
gpu,g5,3,12,1,A10G,1.1,2026-11-01,pool=gpu zone=b,team=vision:NoSchedule
cpu,c7i,15,26.5,0,,0.7,2026-11-01,pool=cpu,spot:NoExecute spot=true:NoSchedule
dear,c7i,30,52,0,,,,pool=dear,
c7i.2xlarge,,7,12,,,0.4,,,
"""


def workload(**kubernetes: Json) -> Workload:
    cluster: Json = {"dnn": {"instance_type": "gpu"}}
    return builders.workload(platform="kubernetes", cluster=cluster, kubernetes=kubernetes)


def pools(made: Workload) -> Mapping[str, NodePool]:
    return made.kubernetes.pools


def test_plans_are_made_of_the_pools_of_the_file_and_nothing_else():
    catalog = catalog_of(workload(pools_file=POOLS))
    assert [i.type for i in catalog.instances] == ["c7i.2xlarge", "cpu", "dear", "gpu"]
    gpu = catalog.get("gpu")
    assert (gpu.vcpus, gpu.accelerators, gpu.accelerator_model) == (3, 1, "A10G")
    assert (gpu.usd_per_hour, str(gpu.priced_on), gpu.family) == (1.1, "2026-11-01", "g5")
    # A pool without a price is never free.
    assert catalog.get("dear").usd_per_hour is None
    assert catalog.region is None
    with pytest.raises(UsageError, match=r"no instance type 'c5\.4xlarge'") as caught:
        catalog.get("c5.4xlarge")
    assert "kubernetes.pools_file" in caught.value.fix


def test_a_price_file_goes_before_the_pools_file(tmp_path):
    prices = tmp_path / "prices.csv"
    prices.write_text("instance_type,usd_per_hour\ncpu,0.2\nc5.4xlarge,0.1\n")
    catalog = catalog_of(workload(pools_file=POOLS), prices)
    assert catalog.get("cpu").usd_per_hour == 0.2
    assert (catalog.get("cpu").vcpus, catalog.get("gpu").usd_per_hour) == (15, 1.1)
    assert "c5.4xlarge" not in [i.type for i in catalog.instances]


def test_pools_named_in_the_workload_narrow_the_catalog_and_need_vcpus():
    known = {"ml.c7i.4xlarge": {"cpu": "15500m"}, "g5.xlarge": {}}
    catalog = catalog_of(workload(pools={**known, "gpu": {"cpu": 7, "gpus": 1}, "empty": {}}))
    assert [(i.type, i.vcpus, i.accelerators) for i in catalog.instances] == [
        ("c7i.4xlarge", 15, 0),
        ("g5.xlarge", 4, 1),
        ("gpu", 7, 1),
    ]
    assert catalog.get("c7i.4xlarge").usd_per_hour == 0.714
    assert catalog.get("gpu").usd_per_hour is None


def test_todays_type_can_be_named_though_it_is_no_pool():
    today: Json = {"dnn": {"instance_type": "ml.g5.xlarge"}}
    kubernetes: Json = {"pools": {"c7i.4xlarge": {}}}
    made = builders.workload(platform="kubernetes", cluster=today, kubernetes=kubernetes)
    assert catalog_of(made).get("g5.xlarge").accelerators == 1
    with pytest.raises(UsageError):
        catalog_of(workload(pools={"c7i.4xlarge": {}})).get("g5.xlarge")


def test_no_plan_has_data_hosts_of_arm64_without_an_image_for_them():
    size = {"cpu": 15, "memory": "28Gi"}
    pod = {"spec": {"nodeSelector": {"kubernetes.io/arch": "arm64"}}}
    settings: dict[str, Json] = {"pools": {"cpu": {**size, "pod": pod}, "c7g.4xlarge": size}}
    barred = [instance.barred for instance in catalog_of(workload(**settings)).instances]
    assert len(barred) == 2
    assert all("kubernetes.data.image" in why for why in barred)
    with_image = workload(**settings, data={"image": "registry.example/data:1"})
    assert [instance.barred for instance in catalog_of(with_image).instances] == ["", ""]


def test_pods_get_what_their_pools_row_says():
    found = pools(with_pools(workload(pools_file=POOLS)))
    assert found["gpu"] == NodePool(
        pod=ObjectPatch(
            spec={
                "nodeSelector": {"pool": "gpu", "zone": "b"},
                "tolerations": [
                    {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}
                ],
            }
        ),
        cpu=3,
        memory="12Gi",
        gpus=1,
    )
    assert found["cpu"].memory == "26.5Gi"
    spot = {"key": "spot", "operator": "Exists", "effect": "NoExecute"}
    assert found["cpu"].pod.spec["tolerations"][0] == spot
    # Its name is a type: the plan selects nodes by it.
    assert found["c7i.2xlarge"] == NodePool(cpu=7, memory="12Gi", gpus=0)


def test_what_the_workload_says_of_a_pool_goes_before_the_file():
    made = with_pools(workload(pools_file=POOLS, pools={"cpu": {"cpu": 14}, "own": {"cpu": 2}}))
    assert (pools(made)["cpu"].cpu, pools(made)["cpu"].memory) == (14, "26.5Gi")
    assert pools(made)["own"].cpu == 2
    assert catalog_of(made).get("cpu").vcpus == 14
    assert with_pools(made) == made


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pool=gpu zone=b", "pool", "expected KEY=VALUE, found 'pool'"),
        ("team=vision:NoSchedule", "team=vision", "expected KEY=VALUE:EFFECT"),
        ("team=vision:NoSchedule", "team:Never", "found 'team:Never'"),
        ("gpu,g5,3", "gpu,g5,three", "found 'three'"),
    ],
)
def test_a_wrong_pools_file_is_an_error_with_line_and_column(old, new, words):
    with pytest.raises(UsageError, match="expected") as caught:
        with_pools(workload(pools_file=POOLS.replace(old, new)))
    assert words in caught.value.what
    assert "kubernetes.pools_file:2, column" in caught.value.where


@pytest.mark.parametrize(
    ("text", "number"),
    [("15890m", "15.89"), ("29317Mi", str(29317 * 2**20)), ("2e3", "2000"), ("5u", "0.000005")],
)
def test_quantities_are_read_in_all_their_units(text, number):
    assert amount(text) == Decimal(number)
