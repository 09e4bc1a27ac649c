"""Makes jobs for Kubernetes that tests plan."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from stoker.logs import Log
from stoker.platforms.base import JobSpec
from stoker.platforms.kubernetes.pod_log import log_files
from stoker.records import Group, Json, ProfileSettings
from stoker.workload_file import workload_from

GPU = "g5.2xlarge"
CPU = "c7i.4xlarge"

DNN = Group(name="dnn", role="dnn", instance_type=GPU, count=1, workers_per_host=4)
DATA = Group(name="data", role="data", instance_type=CPU, count=2, workers_per_host=15)

POOLS: Mapping[str, Json] = {
    GPU: {"cpu": 7, "memory": "28Gi", "gpus": 1},
    CPU: {"cpu": 15, "memory": "28Gi"},
}

# What a user has to write.
WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "platform": "kubernetes",
    "command": ["python", "train.py"],
    "image": "registry.example/mnist:1",
    "cluster": {"dnn": {"instance_type": GPU}},
    "kubernetes": {"pools": POOLS},
}
# Everything that a workload can say for Kubernetes.
EVERYTHING: Mapping[str, Json] = yaml.safe_load("""
namespace: team-a
output: pvc://outputs/runs
shm: 8Gi
max_restarts: 2
max_run_seconds: 86400
jobset:
  metadata: {labels: {team: vision, kueue.x-k8s.io/queue-name: training}}
  spec: {ttlSecondsAfterFinished: 3600}
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
      affinity:
        nodeAffinity:
          requiredDuringSchedulingIgnoredDuringExecution:
            nodeSelectorTerms:
            - matchExpressions: [{key: cpu-generation, operator: Gt, values: ["3"]}]
          preferredDuringSchedulingIgnoredDuringExecution:
          - weight: 10
            preference: {matchExpressions: [{key: disk, operator: Exists}]}
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


def everything(api: str) -> dict[str, Json]:
    """Returns EVERYTHING for a JobSet or a TrainJob, which has no TTL."""
    if api == "jobset":
        return dict(EVERYTHING)
    metadata: Any = EVERYTHING["jobset"]
    return {**EVERYTHING, "api": api, "jobset": {"metadata": metadata["metadata"]}}


def job(
    *groups, settings=None, profile=False, name="mnist-20261120-110000", workload="mnist", **keys
):
    described: dict[str, Any] = {
        "name": workload,
        "command": ["python", "/app/train.py", "--note", "costs $5 $(date)"],
        "image": "registry.example/mnist:1",
        "platform": "kubernetes",
        "channels": {
            "train": {"uri": "pvc://datasets/mnist/train"},
            "labels": {"uri": "pvc://datasets/mnist/labels", "groups": ["dnn"]},
        },
        "hyperparameters": {"epochs": 3, "answer": "yes"},
        "kubernetes": {"pools": POOLS, **(settings or {})},
        **keys,
    }
    return JobSpec.of(
        workload_from(described),
        groups=groups or (DNN, DATA),
        run_dir=Path("runs") / name,
        profile=ProfileSettings() if profile else None,
    )


def leader_lines(output: Path, *, run: str) -> list[str]:
    """Returns the lines by which the leader's launcher logs the files of its output folder."""
    said = io.StringIO()
    log_files(output, under="stoker", log=Log(run=run, host=f"{run}-dnn-0-0", stream=said))
    return said.getvalue().splitlines()
