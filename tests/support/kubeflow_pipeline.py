"""Makes a workload for Kubeflow, compiles its pipeline, and reads what is in it."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from stoker.orchestrators.kubeflow.compile import COMPONENTS, compile_kubeflow, component_files
from stoker.orchestrators.sagemaker.compile import Compiled
from stoker.records import Json, Workload
from stoker.settings import workload_from

ROOT = Path(__file__).resolve().parents[2]

DOCUMENT: Mapping[str, Json] = {
    "name": "digits",
    "command": ["python", "train.py", "--workers", "4"],
    "platform": "kubernetes",
    "image": "registry/stoker:digits",
    "cluster": {"dnn": {"instance_type": "g5.xlarge", "count": 1}},
    "channels": {"train": {"uri": "pvc://datasets/digits"}},
    "hyperparameters": {"epochs": 10},
    "constraints": {"objective": "cost", "max_usd_per_hour": 6, "max_data_hosts": 4},
    "gate": [{"metric": "accuracy", "min": 0.97}],
    "kubernetes": {
        "namespace": "team-a",
        "image_pull_secrets": ["registry"],
        "image_pull_policy": "IfNotPresent",
        "shm": "8Gi",
        "pools": {
            "g5.xlarge": {
                "node_selector": {"pool": "gpu"},
                "tolerations": [{"key": "reserved", "operator": "Equal", "value": "training"}],
                "cpu": "3500m",
                "memory": "14.5Gi",
                "gpus": 1,
            }
        },
        "dnn": {
            "environment": {"NCCL_DEBUG": "WARN"},
            "volumes": [
                {"name": "lookup", "mount_path": "/lookup", "claim": "tables", "sub_path": "a/b"},
                {"name": "scratch", "mount_path": "/scratch", "scratch": "50Gi"},
                {"name": "words", "mount_path": "/words", "config_map": "words"},
                {"name": "key", "mount_path": "/key", "secret": "key"},
            ],
        },
    },
}
WORKLOAD = workload_from(DOCUMENT)
LOCAL = workload_from(
    {
        "name": "mini",
        "command": ["python", "train.py"],
        "platform": "local",
        "image": "stoker:mini",
        "cluster": {"dnn": {"instance_type": "local.c1", "count": 1}},
    }
)
WORKLOADS = {"cluster": WORKLOAD, "local": LOCAL}


def with_labels() -> Workload:
    """Adds a pool of several node labels to the workload: the default of an object parameter."""
    settings = WORKLOAD.kubernetes
    assert settings is not None
    labels = {"pool": "gpu", "zone": "a", "disk": "fast", "team": "vision"}
    pools = {
        name: msgspec.structs.replace(pool, node_selector=labels)
        for name, pool in settings.pools.items()
    }
    return msgspec.structs.replace(
        WORKLOAD, kubernetes=msgspec.structs.replace(settings, pools=pools)
    )


@functools.cache
def compiled(kind: str = "cluster") -> Compiled:
    return compile_kubeflow(WORKLOADS[kind], folder=ROOT)


@functools.cache
def shared() -> Mapping[str, str]:
    return component_files()


@functools.cache
def components() -> Mapping[str, str]:
    """Compiles the package's components now: what the files to share must hold."""
    from stoker import kubeflow

    return {name: normalised(kubeflow.compiled(getattr(kubeflow, name))) for name in COMPONENTS}


def normalised(definition: str) -> str:
    """Returns the YAML without the line that another kfp writes otherwise."""
    return re.sub(r"(?m)^sdkVersion: .*$", "sdkVersion: kfp", definition)


def parsed(definition: str) -> list[Any]:
    """Returns its documents; by libyaml, which is ten times as fast as Python."""
    return list(yaml.load_all(definition, Loader=yaml.CSafeLoader))


def documents(kind: str = "cluster") -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the pipeline, and what Kubernetes is told of its pods; {} where that is nothing."""
    pipeline, *platforms = parsed(compiled(kind).definition)
    return pipeline, platforms[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if (
        platforms
    ) else {}


def groups(pipeline: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each group of tasks with its name: the pipeline itself, then those inside of it."""
    yield "root", pipeline["root"]
    for name, component in pipeline["components"].items():
        if "dag" in component:
            yield name, component


def tasks(pipeline: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Returns every task by its name, whatever group it is in."""
    return {
        name: task for _, group in groups(pipeline) for name, task in group["dag"]["tasks"].items()
    }


def executor(pipeline: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    """Returns the container of a task."""
    component = pipeline["components"][tasks(pipeline)[task]["componentRef"]["name"]]
    found: Mapping[str, Any] = pipeline["deploymentSpec"]["executors"][component["executorLabel"]]
    return found["container"]  # type: ignore[no-any-return]
