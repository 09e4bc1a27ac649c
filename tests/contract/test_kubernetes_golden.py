"""Whole manifests equal their files: a diff shows what a change does to a cluster's objects.

Write them anew with: PYTHONPATH=tests python tests/contract/test_kubernetes_golden.py
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
import yaml

from stoker.platforms.kubernetes import KubernetesPlatform
from support.command import stoker
from support.kubernetes_jobs import DNN, EVERYTHING, WORKLOAD, job
from support.kubernetes_rules import rule_problems

FOLDER = Path(__file__).parent / "kubernetes_objects"
TRAINER = {"namespace": "team-a", "api": "trainer", "output": "pvc://outputs/runs"}


def _planned(**how: object) -> str:
    platform = KubernetesPlatform()
    groups = how.pop("groups", ())
    return platform.manifest(platform.plan(job(*groups, **how)))


MANIFESTS: Mapping[str, Callable[[], str]] = {
    "jobset-heterogeneous": lambda: _planned(settings=EVERYTHING),
    "jobset-plain": lambda: _planned(),
    "jobset-homogeneous": lambda: _planned(groups=(msgspec.structs.replace(DNN, count=2),)),
    "jobset-profile": lambda: _planned(groups=(DNN,), profile=True),
    "trainer": lambda: _planned(settings=TRAINER),
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifest_is_as_it_was(name):
    assert MANIFESTS[name]() == (FOLDER / f"{name}.yaml").read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_golden_manifest_breaks_no_rule(name):
    objects = list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))
    assert [found for document in objects for found in rule_problems(document, among=objects)] == []


@pytest.fixture
def project(tmp_path):
    (tmp_path / "mnist.yaml").write_text(yaml.safe_dump(dict(WORKLOAD)))
    return tmp_path


def test_a_dry_run_prints_yaml_documents_and_leaves_nothing_behind(project):
    done = stoker("train", "--dry-run", "mnist.yaml", cwd=project)
    kinds = [document["kind"] for document in yaml.safe_load_all(done.stdout)]
    assert kinds == ["Secret", "ConfigMap", "PodDisruptionBudget", "JobSet"]
    assert [path.name for path in project.iterdir()] == ["mnist.yaml"]


def test_a_dry_run_for_machines_is_a_list_that_kubectl_takes(project):
    done = stoker("train", "--dry-run", "--json", "mnist.yaml", cwd=project)
    document = msgspec.json.decode(done.stdout)
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    assert len(document["items"]) == 4


def test_a_run_fits_the_runtime_that_was_applied_for_it(project):
    groups = ("--group", "dnn=1", "--group", "data=c7i.4xlarge:3:15")
    trainer = ("train", "--dry-run", "mnist.yaml", *groups, "--set", "kubernetes.api=trainer")
    shown = yaml.safe_load_all(stoker(*trainer, "--name", "stoker-mnist", cwd=project).stdout)
    (runtime,) = (each for each in shown if each["kind"] == "TrainingRuntime")
    assert runtime["metadata"]["name"] == "stoker-mnist"
    done = stoker(*trainer, "--set", "kubernetes.runtime=stoker-mnist", cwd=project)
    *_, train_job = yaml.safe_load_all(done.stdout)
    assert train_job["spec"]["runtimeRef"]["name"] == "stoker-mnist"
    assert list(rule_problems(train_job, among=[runtime])) == []


if __name__ == "__main__":
    for golden, make in MANIFESTS.items():
        (FOLDER / f"{golden}.yaml").write_text(make())
