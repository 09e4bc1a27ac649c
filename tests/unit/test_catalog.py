from collections.abc import Mapping
from datetime import date
from pathlib import Path

import pytest

from stoker.catalog import catalog_of, load_catalog, with_pools
from stoker.errors import UsageError
from stoker.records import Json, NodePool, Workload
from stoker.records.platforms import ObjectPatch
from support import builders


@pytest.fixture(scope="module")
def sagemaker():
    return load_catalog("sagemaker")


def _prices(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "prices.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_unknown_type_is_an_error_that_names_the_nearest(sagemaker):
    with pytest.raises(UsageError, match=r"did you mean ml\.c5\.9xlarge"):
        sagemaker.get("c5.9xlarg")


@pytest.mark.parametrize(
    ("platform", "usd_per_hour", "priced_on"),
    [("sagemaker", 25.2513, date(2026, 9, 27)), ("kubernetes", 21.957642, date(2026, 9, 24))],
)
def test_each_platform_pays_its_own_price_of_its_own_date(platform, usd_per_hour, priced_on):
    found = load_catalog(platform).get("p4d.24xlarge")
    assert (found.usd_per_hour, found.priced_on) == (usd_per_hour, priced_on)


def test_local_types_go_up_to_the_cores_of_the_machine():
    catalog = load_catalog("local", cores=3)
    assert [i.type for i in catalog.instances] == ["local.c1", "local.c2", "local.c3"]
    assert catalog.max_total_vcpus == 3
    assert catalog.purchase == "nominal"
    assert "nominal" in catalog.source
    assert "$" not in catalog.table()


def test_price_file_adds_types_of_other_clouds(tmp_path):
    text = (
        "instance_type,vcpus,gpus,gpu_model,coremark_per_vcpu,usd_per_hour,priced_on\n"
        "a2-highgpu-1g,12,1,A100,15000,3.67,2026-10-01\n"
    )
    found = load_catalog("kubernetes", _prices(tmp_path, text)).get("a2-highgpu-1g")
    assert (found.vcpus, found.accelerators, found.usd_per_hour) == (12, 1, 3.67)
    assert found.priced_on == date(2026, 10, 1)


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "has no column instance_type", ":1"),
        ("instance_type,vcpu\nx.y,4\n", "unknown column 'vcpu'", ":1"),
        ("instance_type,vcpus\nx.y,four\n", "Expected `int`", ":2"),
        ("instance_type,vcpus\nx.y,0\n", "`int` >= 1", ":2"),
        ("instance_type,vcpus\n\nx.y,4,1\n", "not as many cells", ":3"),
    ],
)
def test_wrong_price_file_names_line_and_column(tmp_path, text, what, where):
    file = _prices(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_catalog("sagemaker", file)
    assert what in caught.value.what
    assert where in caught.value.where
    assert str(file) in caught.value.where


def test_prices_are_stale_after_ninety_days_and_dated_by_the_oldest(sagemaker):
    used = builders.clusters("ml.p4d.24xlarge", "ml.c5.9xlarge")
    fresh = sagemaker.prices(used, today=date(2026, 12, 26))
    stale = sagemaker.prices(used, today=date(2026, 12, 27))
    assert (fresh.date, fresh.stale, fresh.region) == ("2026-09-27", False, "us-east-1")
    assert stale.stale


def test_blank_price_is_unknown_and_never_zero_and_so_is_the_cost_of_a_cluster(sagemaker):
    assert sagemaker.get("p5e.48xlarge").usd_per_hour is None
    assert all(i.usd_per_hour is None or i.usd_per_hour > 0 for i in sagemaker.instances)
    priced = builders.clusters("ml.p4d.24xlarge", "c5.18xlarge", 2)
    assert sagemaker.usd_per_hour(priced) == pytest.approx(25.2513 + 2 * 3.672)
    assert sagemaker.usd_per_hour(builders.clusters("ml.p4d.24xlarge", "p5e.48xlarge")) is None


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


def test_pods_get_what_their_pools_row_says():
    found = pools(with_pools(workload(pools_file=POOLS)))
    team = {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}
    spec = {"nodeSelector": {"pool": "gpu", "zone": "b"}, "tolerations": [team]}
    assert found["gpu"] == NodePool(pod=ObjectPatch(spec=spec), cpu=3, memory="12Gi", gpus=1)
    assert found["cpu"].memory == "26.5Gi"
    spot = {"key": "spot", "operator": "Exists", "effect": "NoExecute"}
    assert found["cpu"].pod.spec["tolerations"][0] == spot
    # Its name is a type: the plan selects nodes by it.
    assert found["c7i.2xlarge"] == NodePool(cpu=7, memory="12Gi", gpus=0)
