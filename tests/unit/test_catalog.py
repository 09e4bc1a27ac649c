from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

from stoker.catalog import catalog_of, load_catalog, with_pools
from stoker.errors import UsageError
from stoker.records import Json, NodePool, Workload
from stoker.records.platforms import ObjectPatch, amount
from support import builders


@pytest.fixture(scope="module")
def sagemaker():
    return load_catalog("sagemaker")


def _prices(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "prices.csv"
    file.write_text(text, encoding="utf-8")
    return file


def test_both_spellings_name_the_same_type(sagemaker):
    assert sagemaker.get("c5.9xlarge") is sagemaker.get("ml.c5.9xlarge")
    assert sagemaker.get("c5.9xlarge").type == "ml.c5.9xlarge"
    assert load_catalog("kubernetes").get("ml.c5.9xlarge").type == "c5.9xlarge"


def test_unknown_type_or_platform_is_an_error_that_names_the_nearest(sagemaker):
    with pytest.raises(UsageError, match=r"did you mean ml\.c5\.9xlarge"):
        sagemaker.get("c5.9xlarg")
    with pytest.raises(UsageError, match="did you mean sagemaker"):
        load_catalog("sagemake")


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


def test_a_local_type_beyond_the_machine_can_still_be_named():
    named = load_catalog("local", cores=1).get("local.c16")
    assert (named.vcpus, named.usd_per_hour) == (16, 0.8)
    with pytest.raises(UsageError, match="no instance type"):
        load_catalog("local", cores=1).get("local.c0")


def test_price_file_adds_types_of_other_clouds(tmp_path):
    text = (
        "instance_type,vcpus,gpus,gpu_model,coremark_per_vcpu,usd_per_hour,priced_on\n"
        "a2-highgpu-1g,12,1,A100,15000,3.67,2026-10-01\n"
    )
    found = load_catalog("kubernetes", _prices(tmp_path, text)).get("a2-highgpu-1g")
    assert (found.vcpus, found.accelerators, found.usd_per_hour) == (12, 1, 3.67)
    assert found.priced_on == date(2026, 10, 1)


def test_price_of_another_platform_does_not_count(tmp_path):
    file = _prices(tmp_path, "instance_type,ec2_usd_per_hour_eu_west_1\nc5.9xlarge,0.5\n")
    assert load_catalog("sagemaker", file).get("c5.9xlarge").usd_per_hour == 1.836
    kubernetes = load_catalog("kubernetes", file)
    assert (kubernetes.region, kubernetes.get("c5.9xlarge").usd_per_hour) == ("eu-west-1", 0.5)


@pytest.mark.parametrize(
    ("text", "what", "where"),
    [
        ("", "has no column instance_type", ":1"),
        ("instance_type,vcpu\nx.y,4\n", "unknown column 'vcpu'", ":1"),
        ("instance_type,vcpus,vcpus\nx.y,4,4\n", "vcpus is there twice", ":1"),
        ("instance_type,vcpus\nx.y,4,5\n", "3 cells in a table of 2", ":2"),
        ("instance_type,vcpus\nx.y,four\n", "found 'four'", ":2, column vcpus"),
        ("instance_type,vcpus\nx.y,0\n", "found '0'", ":2, column vcpus"),
        ("instance_type,usd_per_hour\nx.y,1\n", "vCPUs are needed", ":2, column vcpus"),
        ("instance_type,usd_per_hour\nc5.xlarge,0\n", "found '0'", ":2, column usd_per_hour"),
        ("instance_type,usd_per_hour\nc5.xlarge,nan\n", "'nan'", ":2, column usd_per_hour"),
        ("instance_type,usd_per_hour,priced_on\nc5.xlarge,1,soon\n", "'soon'", ":2, column priced"),
        ("instance_type\nc5.xlarge\n\nml.c5.xlarge\n", "is in line 2, too", ":4, column"),
        ("instance_type,vcpus\n,4\n", "has no name", ":2, column instance_type"),
        ("instance_type,in_training_enum\nc5.xlarge,maybe\n", "yes or no", "in_training_enum"),
    ],
)
def test_wrong_price_file_names_line_and_column(tmp_path, text, what, where):
    file = _prices(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        load_catalog("sagemaker", file)
    assert what in caught.value.what
    assert where in caught.value.where
    assert str(file) in caught.value.where


def test_missing_price_file_or_another_separator_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_catalog("sagemaker", tmp_path / "none.csv")
    with pytest.raises(UsageError) as caught:
        load_catalog("sagemaker", _prices(tmp_path, "instance_type;usd_per_hour\nx.y;1\n"))
    assert caught.value.fix == "separate the columns by commas"


def test_prices_are_stale_after_ninety_days_and_dated_by_the_oldest(sagemaker):
    used = [sagemaker.get("c5.9xlarge"), sagemaker.get("p4d.24xlarge")]
    fresh = sagemaker.prices(used, today=date(2026, 12, 26))
    stale = sagemaker.prices(used, today=date(2026, 12, 27))
    assert (fresh.date, fresh.stale, fresh.region) == ("2026-09-27", False, "us-east-1")
    assert stale.stale


def test_price_file_replaces_the_price_alone_and_forgets_its_date(tmp_path):
    text = "instance_type,usd_per_hour\nml.c5.9xlarge,1.25\nc5.18xlarge,\n"
    catalog = load_catalog("sagemaker", _prices(tmp_path, text))
    found = catalog.get("c5.9xlarge")
    assert (found.usd_per_hour, found.vcpus, found.network_gbps) == (1.25, 36, 10.0)
    assert found.priced_on is None
    used = [found, catalog.get("p4d.24xlarge")]
    assert catalog.prices(used, today=date(2026, 10, 1)).date is None
    # A blank price takes the type out.
    assert catalog.get("c5.18xlarge").usd_per_hour is None


def test_burst_network_counts_with_its_baseline(sagemaker):
    burst = sagemaker.get("c5.xlarge")
    assert (burst.network_gbps, burst.sustained_gbps) == (10.0, 1.25)


def test_blank_price_is_unknown_and_never_zero_and_so_is_the_cost_of_a_cluster(sagemaker):
    assert sagemaker.get("p5e.48xlarge").usd_per_hour is None
    assert all(i.usd_per_hour is None or i.usd_per_hour > 0 for i in sagemaker.instances)
    priced = builders.clusters("ml.p4d.24xlarge", "c5.18xlarge", 2)
    assert sagemaker.usd_per_hour(priced) == pytest.approx(25.2513 + 2 * 3.672)
    assert sagemaker.usd_per_hour(builders.clusters("ml.p4d.24xlarge", "p5e.48xlarge")) is None


def test_table_is_narrow_and_says_what_is_not_known_and_the_document_has_null(sagemaker):
    lines = sagemaker.table().splitlines()
    assert max(map(len, lines)) <= 88
    assert "us-east-1" in lines[0]
    assert any("ml.p5e.48xlarge" in line and "unknown" in line for line in lines)
    (blank,) = [r for r in sagemaker.to_document()["instances"] if r["type"] == "ml.p5e.48xlarge"]
    assert (blank["usd_per_hour"], blank["accelerators"]) == (None, 8)


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
    prices = _prices(tmp_path, "instance_type,usd_per_hour\ncpu,0.2\nc5.4xlarge,0.1\n")
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
    team = {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}
    spec = {"nodeSelector": {"pool": "gpu", "zone": "b"}, "tolerations": [team]}
    assert found["gpu"] == NodePool(pod=ObjectPatch(spec=spec), cpu=3, memory="12Gi", gpus=1)
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
