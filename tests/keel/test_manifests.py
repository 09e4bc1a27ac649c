"""The objects of a job on Kubernetes equal their files: `stoker train --dry-run` prints them."""

import json
from typing import Any

import pytest
import yaml

from support.black_box import stoker
from support.goldens import check_golden, shown
from support.kubernetes_rules import rule_problems
from support.workloads import ON_KUBERNETES, PATCH, changed, write

pytest.importorskip("kubernetes")

SERIOUS: dict[str, Any] = yaml.safe_load("""
namespace: team-a
output: pvc://outputs/runs
shm: 8Gi
max_restarts: 2
max_run_seconds: 86400
pools:
  g5.2xlarge:
    pod:
      spec:
        nodeSelector: {pool: gpu}
        tolerations: [{key: reserved, operator: Equal, value: training}]
    cpu: 7500m
    memory: 28Gi
    gpus: 1
  c7i.4xlarge:
    pod:
      spec:
        nodeSelector: {pool: cpu-spot}
        tolerations: [{key: spot, operator: Exists, effect: NoSchedule}]
    cpu: 15
    memory: 28Gi
dnn:
  pod:
    metadata: {annotations: {owner: vision}}
    spec:
      imagePullSecrets: [{name: registry}]
      containers:
      - name: dnn
        resources:
          requests: {vpc.amazonaws.com/efa: "1"}
          limits: {vpc.amazonaws.com/efa: "1"}
        imagePullPolicy: IfNotPresent
      serviceAccountName: trainer
      priorityClassName: high
data:
  pod:
    spec:
      imagePullSecrets: [{name: registry}]
      serviceAccountName: reader
      containers:
      - env:
        - {name: AWS_REGION, value: eu-west-1}
        - {name: PRICE, value: 5$$(x)}
        volumeMounts:
        - {name: cache, mountPath: /cache}
        - {name: ca, mountPath: /etc/ca, readOnly: true}
        imagePullPolicy: IfNotPresent
        envFrom: [{secretRef: {name: s3-reader}}]
      volumes:
      - {name: cache, emptyDir: {sizeLimit: 200Gi}}
      - {name: ca, configMap: {name: ca-bundle}}
""")
LABELS = {"labels": {"team": "vision", "kueue.x-k8s.io/queue-name": "training"}}
SERIOUS[PATCH["kubernetes"]] = {"metadata": LABELS, "spec": {"ttlSecondsAfterFinished": 3600}}
WORKLOAD = changed(
    ON_KUBERNETES,
    command=["python", "/app/train.py", "--note", "costs $5 $(date)"],
    channels={
        "train": {"uri": "pvc://datasets/mnist/train"},
        "labels": {"uri": "pvc://datasets/mnist/labels", "groups": ["dnn"]},
    },
    hyperparameters={"epochs": 3, "answer": "yes"},
)
BOTH = ("--group", "dnn=g5.2xlarge:1:4", "--group", "data=c7i.4xlarge:2:15")
TRAINER = {"namespace": "team-a", "api": "trainer", "output": "pvc://outputs/runs"}
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, BOTH),
    "homogeneous": ({}, ("--group", "dnn=g5.2xlarge:2:4")),
    "everything": (SERIOUS, BOTH),
    "trainer": (TRAINER, BOTH),
}


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """Prints the objects of each case once."""
    found: dict[str, list[dict[str, Any]]] = {}

    def of(name: str) -> list[dict[str, Any]]:
        if name not in found:
            folder = tmp_path_factory.mktemp(name)
            settings, groups = CASES[name]
            write(folder, changed(WORKLOAD, kubernetes=settings))
            words = ("train", "workload.yaml", "--dry-run", "--name", "mnist-1", *groups)
            found[name] = list(yaml.safe_load_all(stoker(*words, cwd=folder)))
            assert [path.name for path in folder.iterdir()] == ["workload.yaml"]
        return found[name]

    return of


@pytest.mark.parametrize("name", CASES)
def test_the_manifest_is_as_it_was(printed, name):
    text = yaml.safe_dump_all([shown(each) for each in printed(name)], sort_keys=False)
    check_golden(f"manifests/{name}.yaml", text)


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_takes_the_manifest(printed, name):
    objects = printed(name)
    assert [found for each in objects for found in rule_problems(each, among=objects)] == []


def test_no_token_is_printed(printed):
    (secret,) = [each for each in printed("plain") if each["kind"] == "Secret"]
    values = {**secret.get("stringData", {}), **secret.get("data", {})}
    del values["run.json"]
    assert not [value for value in values.values() if len(value) >= 32]


def test_for_machines_a_dry_run_is_a_list_that_kubectl_takes(tmp_path, printed):
    write(tmp_path, WORKLOAD)
    words = ("train", "workload.yaml", "--dry-run", "--json", "--name", "mnist-1", *BOTH)
    document = json.loads(stoker(*words, cwd=tmp_path))
    assert (document["apiVersion"], document["kind"]) == ("v1", "List")
    assert [shown(each) for each in document["items"]] == [shown(e) for e in printed("plain")]
