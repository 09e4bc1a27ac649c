"""tools/node_pools.py writes a pools file of a cluster's nodes, and plans are made of it."""

import csv
import io
import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml

import node_pools
from stoker.catalog import load_catalog
from stoker.records import Decision, read_json, write_json
from support import builders
from support.command import succeeds
from support.kubernetes_nodes import EKS, KARPENTER, node


def pools_file(*nodes: Mapping[str, Any], label: str = "") -> str:
    out = io.StringIO()
    given = io.StringIO(json.dumps({"items": nodes}))
    node_pools.main(["--pool-label", label] if label else [], nodes=given, out=out)
    return out.getvalue()


def rows(*nodes: Mapping[str, Any], label: str = "") -> dict[str, dict[str, str]]:
    table = csv.DictReader(io.StringIO(pools_file(*nodes, label=label)))
    return {row["instance_type"]: row for row in table}


def test_nodes_of_one_kind_are_one_pool_and_pods_get_what_the_smallest_has(capsys):
    found = rows(*EKS)
    assert list(found) == ["cpu-c7i.2xlarge", "cpu-c7i.4xlarge", "cpu-c7i.4xlarge-spot", "gpu"]
    cpu, known = found["cpu-c7i.4xlarge"], load_catalog("kubernetes").get("c7i.4xlarge")
    assert (cpu["vcpus"], cpu["memory_gib"], cpu["family"]) == ("15", "27", "c7i")
    assert float(cpu["coremark_per_vcpu"]) == known.coremark_per_vcpu
    assert (cpu[node_pools.PRICE], cpu["priced_on"]) == ("0.714", str(known.priced_on))
    assert cpu["node_selector"].split() == [
        f"{KARPENTER}=cpu",
        "node.kubernetes.io/instance-type=c7i.4xlarge",
        "karpenter.sh/capacity-type=on-demand",
    ]
    assert (found["gpu"]["gpus"], found["gpu"]["gpu_model"]) == ("1", "A10G")
    # Taints of GPUs and of a node's state are not the pool's.
    assert (found["gpu"]["taints"], cpu["taints"]) == ("team=vision:NoSchedule", "")
    spot = found["cpu-c7i.4xlarge-spot"]
    assert "karpenter.sh/capacity-type=spot" in spot["node_selector"]
    assert (spot["taints"], spot[node_pools.PRICE]) == ("spot=true:NoSchedule", "")
    said = capsys.readouterr().err
    assert "cpu-c7i.4xlarge-spot has no price" in said
    assert [line for line in said.splitlines() if "left out" in line] == [
        "note: node broken left out: not ready",
        "note: node cordoned left out: cordoned",
        "note: node stray left out: no label names its pool (--pool-label KEY)",
    ]


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
def test_pools_of_every_provider_are_known_by_their_labels(labels, kind, name, is_spot):
    found = rows(node("n", kind=kind, labels=labels))
    assert list(found) == [name]
    assert found[name]["source"].endswith("spot") == is_spot
    assert all(f"{key}={value}" in found[name]["node_selector"] for key, value in labels.items())


def test_another_label_can_name_the_pools():
    nodes = [node("a", labels={"team/pool": "big"}), node("b", kind="c5.large")]
    found = rows(*nodes, label="team/pool")
    assert {name: row["node_selector"] for name, row in found.items()} == {"big": "team/pool=big"}


def test_arm_shared_gpus_and_gpus_that_are_not_offered_are_named(capsys):
    shared = {"nvidia.com/gpu.product": "NVIDIA-A10G-SHARED", "kubernetes.io/arch": "arm64"}
    found = rows(node("n", labels=shared, gpus=4), node("m", kind="g5.xlarge", cpu="900m"))
    (row,) = found.values()
    assert "kubernetes.io/arch=arm64" in row["node_selector"]
    said = capsys.readouterr().err
    assert "shares its GPUs" in said
    assert "g5.xlarge offers no GPU" in said


def offered(capsys, resource: str, count: str = "4", **more: Any) -> tuple[dict[str, str], str]:
    """Returns the row of a pool whose nodes offer a resource, and what was said of it."""
    found = rows(
        node("n", kind="machine", offers={resource: count, **more.pop("also", {})}, **more)
    )
    return found["machine"], capsys.readouterr().err


@pytest.mark.parametrize(
    "resource",
    [
        *("amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi"),
        *("aws.amazon.com/neuron", "aws.amazon.com/neuroncore", "google.com/tpu"),
        *("nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.40gb", "nvidia.com/gpu.shared"),
    ],
)
def test_accelerators_of_every_plugin_make_a_gpu_pool(capsys, resource):
    row, said = offered(capsys, resource, taints=[f"{resource}=present:NoSchedule"])
    assert row["gpus"] == "4"
    assert f"set kubernetes.gpu_resource: {resource}" in said
    # The dnn pods tolerate it once that is set.
    assert row["taints"] == ""
    assert ("parts of GPUs" in said) == resource.startswith("nvidia.com")


@pytest.mark.parametrize(
    ("also", "resource"),
    [
        # Whole GPUs before parts of them, and one name for the same device.
        ({"nvidia.com/gpu": "2", "nvidia.com/mig-1g.5gb": "7"}, "nvidia.com/gpu"),
        ({"nvidia.com/gpu": "0", "nvidia.com/mig-1g.5gb": "2"}, "nvidia.com/mig-1g.5gb"),
        ({"aws.amazon.com/neuron": "2", "aws.amazon.com/neuroncore": "4"}, "aws.amazon.com/neuron"),
        ({"gpu.intel.com/i915": "2", "gpu.intel.com/millicores": "900"}, "gpu.intel.com/i915"),
    ],
)
def test_one_resource_of_a_node_counts(capsys, also, resource):
    (row,) = rows(node("n", kind="machine", offers=also)).values()
    assert row["gpus"] == "2"
    said = capsys.readouterr().err
    assert ("kubernetes.gpu_resource" in said) == (resource != "nvidia.com/gpu")
    assert ("mig-1g.5gb, too, which is not counted" in said) == ("7" in also.values())


def test_a_taint_of_another_resource_stays(capsys):
    # As on nodes whose GPUs are divided: pods ask for the parts.
    row, _ = offered(capsys, "nvidia.com/mig-1g.5gb", taints=["nvidia.com/gpu=present:NoSchedule"])
    assert row["taints"] == "nvidia.com/gpu=present:NoSchedule"


@pytest.mark.parametrize(
    "resource", ["vendor.example/gpu", "gpu.example/a100", "huawei.com/npu-core"]
)
def test_a_plugin_that_is_not_known_is_named(capsys, resource):
    row, said = offered(capsys, resource)
    assert row["gpus"] == "0"
    assert f"machine offers {resource}, too, which is not counted" in said
    _, said = offered(capsys, "hugepages-2Mi", "1Gi", also={"vpc.amazonaws.com/pod-eni": "9"})
    assert "offers" not in said


def test_a_pool_of_which_some_nodes_lack_their_gpu_says_so(capsys):
    have, lack = node("a", kind="m", offers={"amd.com/gpu": "1"}), node("b", kind="m")
    assert rows(have, lack)["m"]["gpus"] == "0"
    assert "m: 1 of 2 nodes offer no amd.com/gpu" in capsys.readouterr().err


ONE, TWO = node("a", kind="c5.large"), node("b", kind="c6i.large")
TEXTS = {
    "a list": (json.dumps({"kind": "List", "items": [ONE, TWO]}), 2),
    "a list of nodes": (json.dumps({"kind": "NodeList", "items": [ONE, TWO]}), 2),
    "one node": (json.dumps(ONE), 1),
    "an array": (json.dumps([ONE, TWO]), 2),
    "nodes one after the other": (json.dumps(ONE, indent=2) + "\n" + json.dumps(TWO), 2),
    "a list in YAML": (yaml.safe_dump({"kind": "List", "items": [ONE, TWO]}), 2),
    "one node in YAML": (yaml.safe_dump(ONE), 1),
    "documents in YAML": ("---\n" + yaml.safe_dump_all([ONE, TWO]) + "---\n", 2),
    "after a byte order mark": ("\ufeff" + json.dumps(ONE), 1),
}


@pytest.mark.parametrize("form", TEXTS)
def test_nodes_are_read_in_every_form_that_kubectl_writes(form):
    text, count = TEXTS[form]
    out = io.StringIO()
    node_pools.main([], nodes=io.StringIO(text), out=out)
    assert [row["instance_type"] for row in csv.DictReader(io.StringIO(out.getvalue()))] == [
        "c5.large",
        "c6i.large",
    ][:count]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no nodes on stdin"),
        ("\n", "no nodes on stdin"),
        ('{"kind": "List", "items": []}', "the list has no nodes"),
        ('{"kind": "List", "items": null}', "the list has no nodes"),
        ("kind: List\nitems: []\n", "the list has no nodes"),
        ("[]", "the list has no nodes"),
        ('{"kind": "Pod", "metadata": {"name": "p"}}', "expected nodes, found a Pod"),
        ('{"kind": "List", "items": [{"kind": "Service"}]}', "expected nodes, found a Service"),
        ("NAME   STATUS   ROLES\nnode-1   Ready   <none>\n", "expected nodes, found a text"),
        ('{"kind": "List", "items": [', "neither JSON nor YAML"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused_in_one_line(text, why):
    with pytest.raises(SystemExit, match=f"error: {why}") as ended:
        node_pools.main([], nodes=io.StringIO(text), out=io.StringIO())
    assert "\n" not in str(ended.value)


@pytest.mark.parametrize("part", ["labels", "taints", "conditions", "allocatable", "spec", "name"])
def test_a_node_that_lacks_a_part_is_left_out_or_read(part, capsys):
    bare = node("bare", kind="c5.large")
    for holder in (bare["metadata"], bare["spec"], bare["status"], bare):
        if part in holder:
            holder[part] = None
    if part in ("taints", "spec", "name"):
        assert list(rows(bare)) == ["c5.large"]
        return
    assert list(rows(bare, node("a", kind="c6i.large"))) == ["c6i.large"]
    assert part == "allocatable" or "node bare left out" in capsys.readouterr().err


def test_without_a_usable_node_there_is_no_file():
    with pytest.raises(SystemExit, match="no node pool has room for a pod"):
        pools_file(node("n", kind="t3.small", cpu="1200m", memory="1400Mi"))


def test_a_decision_is_made_of_pools_and_its_pods_go_to_their_nodes(tmp_path):
    (tmp_path / "pools.csv").write_text(pools_file(*EKS))
    workload = {
        "name": "mnist",
        "command": ["python", "train.py"],
        "image": "registry.example/mnist:1",
        "platform": "kubernetes",
        "cluster": {"dnn": {"instance_type": "gpu"}},
        "kubernetes": {"pools_file": "pools.csv", "namespace": "team-a"},
    }
    (tmp_path / "mnist.yaml").write_text(yaml.safe_dump(workload))
    cpu = {"loader_cpu_seconds": 1.0, "trainer_cpu_seconds": 0.05, "num_workers": 3}
    write_json(tmp_path / "profile.json", builders.starved("gpu", step_seconds=0.4, **cpu))
    arguments = ("decide", "profile.json", "--workload", "mnist.yaml", "--out", "decision.json")
    done = succeeds(*arguments, cwd=tmp_path)
    decision = read_json(tmp_path / "decision.json", Decision)
    assert decision.action == "heterogeneous"
    types = {group.instance_type for plan in decision.plans for group in plan.groups}
    assert types == {"gpu", "cpu-c7i.2xlarge", "cpu-c7i.4xlarge"}
    done = succeeds("train", "--dry-run", "mnist.yaml", "--decision", "decision.json", cwd=tmp_path)
    *_, jobset = yaml.safe_load_all(done.stdout)
    jobs = jobset["spec"]["replicatedJobs"]
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in jobs}
    assert pods["dnn"]["nodeSelector"] == {
        "eks.amazonaws.com/nodegroup": "gpu",
        "node.kubernetes.io/instance-type": "g5.xlarge",
        "eks.amazonaws.com/capacityType": "ON_DEMAND",
    }
    assert {t["key"] for t in pods["dnn"]["tolerations"]} == {"team", "nvidia.com/gpu"}
    assert pods["dnn"]["containers"][0]["resources"] == {
        "requests": {"cpu": "3", "memory": "13Gi"},
        "limits": {"memory": "13Gi", "nvidia.com/gpu": "1"},
    }
    (data,) = [group for group in decision.plan.groups if group.role == "data"]
    selector = pods["data"]["nodeSelector"]
    assert selector["karpenter.sh/nodepool"] == "cpu"
    assert f"cpu-{selector['node.kubernetes.io/instance-type']}" == data.instance_type
    assert selector["karpenter.sh/capacity-type"] == "on-demand"
