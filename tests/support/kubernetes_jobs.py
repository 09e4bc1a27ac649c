"""Makes jobs for Kubernetes that tests plan."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.platforms.base import JobSpec
from stoker.records import Group, Json, ProfileSettings
from stoker.settings import workload_from

GPU = "g5.2xlarge"
CPU = "c7i.4xlarge"

DNN = Group(name="dnn", role="dnn", instance_type=GPU, count=1, workers_per_host=4)
DATA = Group(name="data", role="data", instance_type=CPU, count=2, workers_per_host=15)

POOLS: Mapping[str, Json] = {
    GPU: {"cpu": 7, "memory": "28Gi", "gpus": 1},
    CPU: {"cpu": 15, "memory": "28Gi"},
}

# Everything that a workload can say for Kubernetes.
EVERYTHING: Mapping[str, Json] = {
    "namespace": "team-a",
    "queue": "training",
    "output": "pvc://outputs/runs",
    "service_account": "trainer",
    "image_pull_secrets": ["registry"],
    "image_pull_policy": "IfNotPresent",
    "zone": "require",
    "shm": "8Gi",
    "scratch": "100Gi",
    "max_restarts": 2,
    "max_run_seconds": 86400,
    "grace_seconds": 120,
    "keep_seconds": 3600,
    "labels": {"team": "vision"},
    "pools": {
        GPU: {
            "node_selector": {"pool": "gpu"},
            "tolerations": [{"key": "reserved", "operator": "Equal", "value": "training"}],
            "cpu": "7500m",
            "memory": "28Gi",
            "gpus": 1,
        },
        CPU: {
            "node_selector": {"pool": "cpu-spot"},
            "tolerations": [{"key": "spot", "effect": "NoSchedule"}],
            "cpu": 15,
            "memory": "28Gi",
        },
    },
    "dnn": {
        "priority_class": "high",
        "resources": {"vpc.amazonaws.com/efa": 1},
        "annotations": {"owner": "vision"},
    },
    "data": {
        "service_account": "reader",
        "env_from_secrets": ["s3-reader"],
        "environment": {"AWS_REGION": "eu-west-1", "PRICE": "5$(x)"},
        "node_rules": [
            {"key": "cpu-generation", "operator": "Gt", "values": ["3"]},
            {"key": "disk", "operator": "Exists", "weight": 10},
        ],
        "volumes": [
            {"name": "cache", "mount_path": "/cache", "scratch": "200Gi"},
            {"name": "ca", "mount_path": "/etc/ca", "config_map": "ca-bundle"},
        ],
    },
}


def job(
    *groups: Group,
    settings: Mapping[str, Json] | None = None,
    profile: bool = False,
    name: str = "mnist-20261120-110000",
    workload: str = "mnist",
    **keys: Any,
) -> JobSpec:
    """Makes a job on Kubernetes, heterogeneous unless groups are named."""
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
