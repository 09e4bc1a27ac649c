"""Node pools are read from a cluster's nodes, written as a table, and plans are made of them."""

from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path

import pytest

from stoker.catalog import Catalog, catalog_of, load_catalog, with_pools
from stoker.catalog.catalog import Table, parse_table
from stoker.catalog.pools import ClusterPool, daemon_requests, pools_of
from stoker.catalog.refresh import PoolsTable, pools_table
from stoker.errors import UsageError
from stoker.records import Json, NodePool, Toleration, Workload
from stoker.records.platforms import amount
from stoker.settings import workload_from
from support import builders
from support.kubernetes_nodes import EKS, KARPENTER, node, pod

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
    assert made.kubernetes is not None
    return made.kubernetes.pools


# Reading a pools file.


def test_plans_are_made_of_the_pools_of_the_file_and_nothing_else() -> None:
    catalog = catalog_of(workload(pools_file=POOLS))
    assert [i.type for i in catalog.instances] == ["c7i.2xlarge", "cpu", "dear", "gpu"]
    gpu = catalog.get("gpu")
    assert (gpu.vcpus, gpu.accelerators, gpu.accelerator_model) == (3, 1, "A10G")
    assert (gpu.usd_per_hour, str(gpu.priced_on), gpu.family) == (1.1, "2026-11-01", "g5")
    with pytest.raises(UsageError, match=r"no instance type 'c5\.4xlarge'") as caught:
        catalog.get("c5.4xlarge")
    assert "kubernetes.pools_file" in caught.value.fix


def test_a_pool_without_a_price_is_listed_and_never_free() -> None:
    assert catalog_of(workload(pools_file=POOLS)).get("dear").usd_per_hour is None


def test_plain_prices_are_of_no_region_and_those_of_the_catalog_are() -> None:
    assert catalog_of(workload(pools_file=POOLS)).region is None
    table = POOLS.replace("usd_per_hour", "ec2_usd_per_hour_eu_west_1")
    assert catalog_of(workload(pools_file=table)).region == "eu-west-1"


def test_a_price_file_goes_before_the_pools_file(tmp_path: Path) -> None:
    prices = tmp_path / "prices.csv"
    prices.write_text("instance_type,usd_per_hour\ncpu,0.2\nc5.4xlarge,0.1\n")
    catalog = catalog_of(workload(pools_file=POOLS), prices)
    assert catalog.get("cpu").usd_per_hour == 0.2
    assert (catalog.get("cpu").vcpus, catalog.get("gpu").usd_per_hour) == (15, 1.1)
    assert "c5.4xlarge" not in [i.type for i in catalog.instances]


def test_without_pools_the_whole_catalog_is_there() -> None:
    assert len(catalog_of(workload()).instances) == len(load_catalog("kubernetes").instances)


def test_pools_named_in_the_workload_narrow_the_catalog() -> None:
    catalog = catalog_of(workload(pools={"ml.c7i.4xlarge": {"cpu": "15500m"}, "g5.xlarge": {}}))
    assert [(i.type, i.vcpus) for i in catalog.instances] == [("c7i.4xlarge", 15), ("g5.xlarge", 4)]
    assert catalog.get("c7i.4xlarge").usd_per_hour == 0.714


def test_a_pool_that_only_the_workload_knows_has_no_price() -> None:
    catalog = catalog_of(workload(pools={"gpu": {"cpu": 7, "gpus": 1}, "empty": {}}))
    assert [(i.type, i.vcpus, i.accelerators) for i in catalog.instances] == [("gpu", 7, 1)]
    assert catalog.get("gpu").usd_per_hour is None


def test_todays_type_can_be_named_though_it_is_no_pool() -> None:
    made = workload(pools={"c7i.4xlarge": {}})
    today = workload_from(
        {
            "name": "x",
            "command": ["true"],
            "platform": "kubernetes",
            "cluster": {"dnn": {"instance_type": "ml.g5.xlarge"}},
            "kubernetes": {"pools": {"c7i.4xlarge": {}}},
        }
    )
    assert catalog_of(today).get("g5.xlarge").accelerators == 1
    with pytest.raises(UsageError):
        catalog_of(made).get("g5.xlarge")


def test_no_plan_has_data_hosts_of_arm64_without_an_image_for_them() -> None:
    arm = {"node_selector": {"kubernetes.io/arch": "arm64"}, "cpu": 15, "memory": "28Gi"}
    settings: dict[str, Json] = {
        "pools": {"cpu": arm, "c7g.4xlarge": arm | {"node_selector": None}}
    }
    barred = [instance.barred for instance in catalog_of(workload(**settings)).instances]
    assert len(barred) == 2
    assert all("kubernetes.data.image" in why for why in barred)
    with_image = workload(**settings, data={"image": "registry.example/data:1"})
    assert [instance.barred for instance in catalog_of(with_image).instances] == ["", ""]


def test_pods_get_what_their_pools_row_says() -> None:
    found = pools(with_pools(workload(pools_file=POOLS)))
    assert found["gpu"] == NodePool(
        node_selector={"pool": "gpu", "zone": "b"},
        tolerations=(
            Toleration(key="team", operator="Equal", value="vision", effect="NoSchedule"),
        ),
        cpu=3,
        memory="12Gi",
        gpus=1,
    )
    assert found["cpu"].memory == "26.5Gi"
    assert found["cpu"].tolerations[0] == Toleration(key="spot", effect="NoExecute")
    # Its name is a type: the plan selects nodes by it.
    assert found["c7i.2xlarge"] == NodePool(cpu=7, memory="12Gi", gpus=0)


def test_what_the_workload_says_of_a_pool_goes_before_the_file() -> None:
    made = with_pools(workload(pools_file=POOLS, pools={"cpu": {"cpu": 14}, "own": {"cpu": 2}}))
    assert (pools(made)["cpu"].cpu, pools(made)["cpu"].memory) == (14, "26.5Gi")
    assert pools(made)["own"].cpu == 2
    assert catalog_of(made).get("cpu").vcpus == 14
    assert with_pools(made) == made


def test_a_row_that_only_has_a_price_does_not_say_what_pods_get() -> None:
    found = pools(with_pools(workload(pools_file="instance_type,usd_per_hour\nc7i.4xlarge,0.5\n")))
    assert found["c7i.4xlarge"] == NodePool()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("pool=gpu zone=b", "pool", "expected KEY=VALUE, found 'pool'"),
        ("team=vision:NoSchedule", "team=vision", "expected KEY=VALUE:EFFECT"),
        ("team=vision:NoSchedule", "team:Never", "found 'team:Never'"),
        ("gpu,g5,3", "gpu,g5,three", "found 'three'"),
    ],
)
def test_a_wrong_pools_file_is_an_error_with_line_and_column(
    old: str, new: str, words: str
) -> None:
    with pytest.raises(UsageError, match="expected") as caught:
        with_pools(workload(pools_file=POOLS.replace(old, new)))
    assert words in caught.value.what
    assert "kubernetes.pools_file:2, column" in caught.value.where


# Reading a cluster.


def by_name(*nodes: Mapping[str, Json], pool_label: str | None = None) -> dict[str, ClusterPool]:
    found, _ = pools_of(nodes, pool_label=pool_label)
    return {pool.name: pool for pool in found}


def test_nodes_of_one_kind_are_one_pool_and_pods_get_what_the_smallest_has() -> None:
    found = by_name(*EKS)
    assert sorted(found) == ["cpu-c7i.2xlarge", "cpu-c7i.4xlarge", "cpu-c7i.4xlarge-spot", "gpu"]
    cpu = found["cpu-c7i.4xlarge"]
    assert (cpu.nodes, cpu.cpu, cpu.zones) == (
        ("cpu-1", "cpu-2"),
        Decimal("15.8"),
        ("us-east-1a", "us-east-1b"),
    )
    assert cpu.node_selector == {
        KARPENTER: "cpu",
        "node.kubernetes.io/instance-type": "c7i.4xlarge",
        "karpenter.sh/capacity-type": "on-demand",
    }
    assert (found["gpu"].gpus, found["gpu"].memory) == (1, 14400 * 2**20)


def test_spot_nodes_are_a_pool_of_their_own_with_their_taints() -> None:
    spot = by_name(*EKS)["cpu-c7i.4xlarge-spot"]
    assert spot.is_spot
    assert spot.node_selector["karpenter.sh/capacity-type"] == "spot"
    assert spot.taints == ("spot=true:NoSchedule",)


def test_taints_of_gpus_and_of_a_nodes_state_are_not_the_pools() -> None:
    found = by_name(*EKS)
    assert found["gpu"].taints == ("team=vision:NoSchedule",)
    assert found["cpu-c7i.4xlarge"].taints == ()


def test_nodes_that_are_left_out_are_named_with_the_reason() -> None:
    _, notes = pools_of(EKS)
    assert [note.split(":")[0] for note in notes] == [
        "node broken left out",
        "node cordoned left out",
        "node stray left out",
    ]
    assert "--pool-label" in notes[-1]


@pytest.mark.parametrize(
    ("labels", "kind", "name", "is_spot"),
    [
        ({"cloud.google.com/gke-nodepool": "l4", "cloud.google.com/gke-spot": "true"},
         "g2-standard-8", "l4", True),
        ({"kubernetes.azure.com/agentpool": "np1",
          "kubernetes.azure.com/scalesetpriority": "spot"}, "Standard_D16s_v5", "np1", True),
        ({"alpha.eksctl.io/nodegroup-name": "ng"}, "c6i.4xlarge", "ng", False),
        ({"nvidia.com/gpu.product": "NVIDIA-L4"}, None, "NVIDIA-L4", False),
        ({}, "k3s", "k3s", False),
    ],
)  # fmt: skip
def test_pools_of_every_provider_are_known_by_their_labels(
    labels: Mapping[str, str], kind: str | None, name: str, is_spot: bool
) -> None:
    found = by_name(node("n", kind=kind, labels=labels))
    assert list(found) == [name]
    assert found[name].is_spot == is_spot
    assert labels.items() <= found[name].node_selector.items()


def test_a_label_of_ones_own_names_the_pools() -> None:
    nodes = [node("a", labels={"team/pool": "big"}), node("b", kind="c5.large")]
    found, notes = pools_of(nodes, pool_label="team/pool")
    assert [(p.name, p.node_selector) for p in found] == [("big", {"team/pool": "big"})]
    assert "node b left out" in notes[0]


def test_daemons_are_what_runs_on_every_node_sidecars_among_them() -> None:
    pods = [
        pod({"cpu": "100m", "memory": "128Mi"}, {"cpu": "50m"}),
        pod({"cpu": "100m"}, owner="Node", sidecar={"cpu": "20m", "memory": "64Mi"}),
        pod({"cpu": "8", "memory": "8Gi"}, owner="ReplicaSet"),
        pod({}),
    ]
    assert daemon_requests(pods) == (Decimal("0.27"), 192 * 2**20)


# Writing the file.


def table_of(
    *nodes: Mapping[str, Json], earlier: str = "", catalog: Catalog | None = None
) -> PoolsTable:
    found, _ = pools_of(nodes)
    return pools_table(
        found,
        daemons={pool.name: (Decimal("0.3"), Decimal(500 * 2**20)) for pool in found},
        catalog=catalog or load_catalog("kubernetes"),
        earlier=read(earlier) if earlier else None,
    )


def read(text: str) -> Table:
    return parse_table(text, platform="kubernetes", source="pools.csv")


def rows(table: PoolsTable) -> dict[str, Mapping[str, str]]:
    return {row["instance_type"]: row for row in table.rows}


PRICE = "ec2_usd_per_hour_us_east_1"


def test_prices_and_speeds_of_known_machines_come_from_the_catalog() -> None:
    cpu = rows(table_of(*EKS))["cpu-c7i.4xlarge"]
    known = load_catalog("kubernetes").get("c7i.4xlarge")
    assert (cpu["vcpus"], cpu["memory_gib"], cpu["family"]) == ("15", "28", "c7i")
    assert (cpu[PRICE], cpu["priced_on"]) == ("0.714", str(known.priced_on))
    assert float(cpu["coremark_per_vcpu"]) == known.coremark_per_vcpu


def test_the_file_is_read_as_it_was_meant() -> None:
    made = workload(pools_file=table_of(*EKS).csv())
    gpu = catalog_of(made).get("gpu")
    assert (gpu.vcpus, gpu.accelerators, gpu.accelerator_model) == (3, 1, "A10G")
    assert (gpu.usd_per_hour, gpu.family) == (1.006, "g5")
    assert catalog_of(made).region == "us-east-1"
    assert pools(with_pools(made))["gpu"].node_selector == by_name(*EKS)["gpu"].node_selector
    assert [t.key for t in pools(with_pools(made))["gpu"].tolerations] == ["team"]


def test_spot_has_no_price_and_that_is_said() -> None:
    table = table_of(*EKS)
    assert not rows(table)["cpu-c7i.4xlarge-spot"].get(PRICE)
    (note,) = [note for note in table.notes if "has no price" in note]
    assert "spot" in note
    assert "0.714" in note
    made = workload(pools_file=table.csv())
    assert catalog_of(made).get("cpu-c7i.4xlarge-spot").usd_per_hour is None


def test_machines_of_other_clouds_have_blank_prices_in_a_plain_column() -> None:
    labels = {"cloud.google.com/gke-nodepool": "cpu"}
    table = table_of(node("n", kind="n2-standard-16", labels=labels, zone="europe-west4-b"))
    assert "usd_per_hour" in table.columns
    assert rows(table)["cpu"].get("usd_per_hour", "") == ""
    assert "nothing is known of n2-standard-16" in table.notes[0]


def test_prices_filled_in_by_hand_are_kept() -> None:
    first = table_of(*EKS).csv()
    spot = next(line for line in first.splitlines() if line.startswith("cpu-c7i.4xlarge-spot"))
    assert ",,,karpenter" in spot
    filled = first.replace(spot, spot.replace(",,,karpenter", ",0.31,2026-11-19,karpenter"))
    again = table_of(*EKS, earlier=filled)
    kept = rows(again)["cpu-c7i.4xlarge-spot"]
    assert (kept[PRICE], kept["priced_on"]) == ("0.31", "2026-11-19")
    assert again.csv() == filled
    assert any("is kept, 0.31" in note for note in again.notes)


def test_a_pool_that_is_scaled_to_zero_keeps_its_row() -> None:
    first = table_of(*EKS)
    without = [n for n in EKS if n["metadata"]["name"] != "gpu-1"]
    again = table_of(*without, earlier=first.csv())
    assert rows(again)["gpu"] == {column: rows(first)["gpu"].get(column, "") for column in
                                  first.columns}  # fmt: skip
    assert "gpu has no node now: its row is kept as it was" in again.notes


def test_prices_of_another_region_are_named() -> None:
    labels = {"eks.amazonaws.com/nodegroup": "cpu"}
    table = table_of(node("n", kind="c7i.4xlarge", labels=labels, zone="eu-west-1a"))
    assert any("us-east-1" in note and "eu-west-1" in note for note in table.notes)
    renamed = table.csv().replace(PRICE, "ec2_usd_per_hour_eu_west_1").replace(",0.714,", ",,")
    again = table_of(node("n", kind="c7i.4xlarge", labels=labels), earlier=renamed)
    # A price of one region is not put into the column of another one.
    assert rows(again)["cpu"].get("ec2_usd_per_hour_eu_west_1", "") == ""
    assert any("cpu has no price" in note for note in again.notes)


def test_gpus_that_the_cluster_does_not_offer_are_named() -> None:
    table = table_of(node("n", kind="g5.xlarge", cpu="3920m"))
    assert rows(table)["g5.xlarge"]["gpus"] == "0"
    assert any("none of the 1 GPUs of a g5.xlarge" in note for note in table.notes)


def test_arm_and_shared_gpus_are_named() -> None:
    shared = {"nvidia.com/gpu.product": "NVIDIA-A10G-SHARED", "kubernetes.io/arch": "arm64"}
    table = table_of(node("n", labels=shared, gpus=4))
    assert any("is arm64" in note for note in table.notes)
    (row,) = table.rows
    assert "kubernetes.io/arch=arm64" in row["node_selector"]
    assert any("shares its GPUs" in note for note in table.notes)


@pytest.mark.parametrize(
    ("text", "number"),
    [("15890m", "15.89"), ("29317Mi", str(29317 * 2**20)), ("2e3", "2000"), ("5u", "0.000005"),
     ("1Ei", str(2**60)), ("7", "7")],
)  # fmt: skip
def test_quantities_are_read_in_all_their_units(text: str, number: str) -> None:
    assert amount(text) == Decimal(number)


def test_nodes_without_a_pools_label_are_named_where_there_are_no_others() -> None:
    bare = [node(f"n{index}", kind="") for index in range(5)]
    pools, notes = pools_of(bare)
    with pytest.raises(UsageError, match=r"n0, n1, n2 and 2 more left out.*--pool-label"):
        pools_table(pools, daemons={}, catalog=load_catalog("kubernetes"), left_out=notes)


def test_a_node_too_small_for_a_pod_is_no_pool() -> None:
    small = node("n", kind="t3.small", cpu="1200m", memory="1400Mi")
    with pytest.raises(UsageError, match=r"no node pool was found: t3\.small left out"):
        table_of(small)
