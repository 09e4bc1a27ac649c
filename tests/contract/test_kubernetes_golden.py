"""Whole manifests equal their files: a diff shows what a change does to a cluster's objects.

Write them anew with: PYTHONPATH=tests python tests/contract/test_kubernetes_golden.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

from stoker.platforms.kubernetes import KubernetesPlatform
from stoker.platforms.kubernetes.objects import network_policies
from stoker.platforms.kubernetes.request import manifest, plan_runtime
from stoker.platforms.kubernetes.submit import rbac
from stoker.records import Json, KubernetesSettings
from stoker.settings import workload_from
from support.command import stoker
from support.kubernetes_jobs import DNN, EVERYTHING, POOLS, job
from support.kubernetes_rules import rule_problems

FOLDER = Path(__file__).parent / "kubernetes_objects"
TRAINER = {"namespace": "team-a", "api": "trainer", "output": "pvc://outputs/runs"}
WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "command": ["python", "train.py"],
    "kubernetes": {"namespace": "team-a"},
}


def _planned(**how: object) -> str:
    platform = KubernetesPlatform()
    groups = how.pop("groups", ())
    return platform.manifest(platform.plan(job(*groups, **how)))  # type: ignore[misc, arg-type]


MANIFESTS: Mapping[str, Callable[[], str]] = {
    "jobset-heterogeneous": lambda: _planned(settings=EVERYTHING),
    "jobset-plain": lambda: _planned(),
    "jobset-homogeneous": lambda: _planned(groups=(msgspec.structs.replace(DNN, count=2),)),
    "jobset-profile": lambda: _planned(groups=(DNN,), profile=True),
    "trainer": lambda: _planned(settings=TRAINER),
    "runtime": lambda: manifest([plan_runtime(job(settings=TRAINER), name="stoker-mnist")]),
    "rbac": lambda: manifest(rbac(KubernetesSettings(namespace="team-a"))),
    "rbac-trainer": lambda: manifest(
        rbac(
            KubernetesSettings(namespace="team-a", api="trainer"), service_account="default-editor"
        )
    ),
    "network-policy": lambda: manifest(network_policies(workload_from(WORKLOAD))),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_is_as_it_was(name: str) -> None:
    assert MANIFESTS[name]() == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_golden_manifest_breaks_no_rule(name: str) -> None:
    objects = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    assert [found for document in objects for found in rule_problems(document, among=objects)] == []


@pytest.fixture
def project(tmp_path: Path) -> Path:
    workload = {
        "name": "mnist",
        "command": ["python", "train.py"],
        "image": "registry.example/mnist:1",
        "platform": "kubernetes",
        "cluster": {"dnn": {"instance_type": DNN.instance_type}},
        "kubernetes": {"pools": POOLS},
    }
    (tmp_path / "mnist.yaml").write_text(yaml.safe_dump(workload))
    return tmp_path


def test_a_dry_run_prints_yaml_documents_and_leaves_nothing_behind(project: Path) -> None:
    done = stoker("train", "--dry-run", "mnist.yaml", cwd=project)
    kinds = [document["kind"] for document in yaml.safe_load_all(done.stdout)]
    assert kinds == ["Secret", "ConfigMap", "PodDisruptionBudget", "JobSet"]
    assert [path.name for path in project.iterdir()] == ["mnist.yaml"]


def test_a_dry_run_for_machines_is_a_list_that_kubectl_takes(project: Path) -> None:
    done = stoker("train", "--dry-run", "--json", "mnist.yaml", cwd=project)
    document = msgspec.json.decode(done.stdout)
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    assert len(document["items"]) == 4


def test_render_rbac_prints_what_submitting_takes(project: Path) -> None:
    arguments = ("render", "rbac", "mnist.yaml", "--set", "kubernetes.namespace=team-a")
    kinds = [d["kind"] for d in yaml.safe_load_all(stoker(*arguments, cwd=project).stdout)]
    assert kinds == ["ServiceAccount", "Role", "RoleBinding"]
    done = stoker(*arguments, "--service-account", "pipeline-runner", cwd=project)
    role, binding = yaml.safe_load_all(done.stdout)
    assert role["kind"] == "Role"
    assert binding["subjects"][0]["name"] == "pipeline-runner"


def test_render_rbac_asks_for_the_namespace(project: Path) -> None:
    done = stoker("render", "rbac", "mnist.yaml", cwd=project)
    assert done.returncode == 2
    assert "key kubernetes.namespace" in done.stderr


def test_render_network_policy_prints_one_for_each_role(project: Path) -> None:
    done = stoker("render", "network-policy", "mnist.yaml", cwd=project)
    policies = list(yaml.safe_load_all(done.stdout))
    assert [p["kind"] for p in policies] == ["NetworkPolicy"] * 2
    assert [p["metadata"]["name"] for p in policies] == ["stoker-data", "stoker-dnn"]


def test_render_priority_gives_a_class_to_followers_of_one_namespace(project: Path) -> None:
    arguments = ("render", "priority", "mnist.yaml", "--set", "kubernetes.namespace=team-a")
    own, policy, binding = yaml.safe_load_all(stoker(*arguments, cwd=project).stdout)
    assert (own["kind"], own["preemptionPolicy"]) == ("PriorityClass", "Never")
    selector = policy["spec"]["matchConstraints"]["objectSelector"]
    assert selector == {"matchLabels": {"stoker/role": "follower"}}
    (mutation,) = policy["spec"]["mutations"]
    assert f"priority: {own['value']}" in mutation["applyConfiguration"]["expression"]
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    assert "team-a" in str(binding["spec"]["matchResources"])
    done = stoker("render", "priority", "mnist.yaml", cwd=project)
    assert (done.returncode, "key kubernetes.namespace" in done.stderr) == (2, True)


def test_a_run_fits_the_runtime_that_was_rendered_for_it(project: Path) -> None:
    groups = ("--group", "dnn=1", "--group", "data=c7i.4xlarge:3:15")
    done = stoker("render", "runtime", "mnist.yaml", *groups, cwd=project)
    (runtime,) = yaml.safe_load_all(done.stdout)
    assert (runtime["kind"], runtime["metadata"]["name"]) == ("TrainingRuntime", "stoker-mnist")
    sets = ("--set", "kubernetes.api=trainer", "--set", "kubernetes.runtime=stoker-mnist")
    done = stoker("train", "--dry-run", "mnist.yaml", *groups, *sets, cwd=project)
    *_, train_job = yaml.safe_load_all(done.stdout)
    assert train_job["spec"]["runtimeRef"]["name"] == "stoker-mnist"
    assert list(rule_problems(train_job, among=[runtime])) == []


def test_render_names_what_it_knows(project: Path) -> None:
    done = stoker("render", "rback", "mnist.yaml", cwd=project)
    assert done.returncode == 2
    assert "did you mean rbac?" in done.stderr


if __name__ == "__main__":
    for golden, make in MANIFESTS.items():
        (FOLDER / f"{golden}.yaml").write_text(make())
