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


ONE, TWO = node("a", kind="c5.large"), node("b", kind="c6i.large")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no nodes on stdin"),
        ('{"kind": "List", "items": []}', "the list has no nodes"),
        ('{"kind": "Pod", "metadata": {"name": "p"}}', "expected nodes, found a Pod"),
        ('{"kind": "List", "items": [', "neither JSON nor YAML"),
    ],
)
def test_what_is_no_list_of_nodes_is_refused_in_one_line(text, why):
    with pytest.raises(SystemExit, match=f"error: {why}") as ended:
        node_pools.main([], nodes=io.StringIO(text), out=io.StringIO())
    assert "\n" not in str(ended.value)


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
