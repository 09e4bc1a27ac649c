"""Makes a workload for Kubeflow, compiles its pipeline, and reads what is in it."""

import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from stoker.kubeflow import compile_kubeflow
from stoker.pipelines.base import Compiled
from stoker.records import Json
from stoker.workload_file import workload_from

ROOT = Path(__file__).resolve().parents[2]
# Name to file of each component to share.
COMPONENTS = {
    "profile": "profile/component.yaml",
    "decide": "decide/component.yaml",
    "train": "train/component.yaml",
    "evaluate": "evaluate/component.yaml",
    "gate": "evaluate/gate.yaml",
    "finish": "train/finish.yaml",
}

RESERVED: Json = {"key": "reserved", "operator": "Equal", "value": "training"}
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
        "shm": "8Gi",
        "pools": {
            "g5.xlarge": {
                "pod": {"spec": {"nodeSelector": {"pool": "gpu"}, "tolerations": [RESERVED]}},
                "cpu": "3500m",
                "memory": "14.5Gi",
                "gpus": 1,
            }
        },
        "dnn": {
            "pod": {
                "spec": {
                    "imagePullSecrets": [{"name": "registry"}],
                    "containers": [
                        {
                            "imagePullPolicy": "IfNotPresent",
                            "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
                            "volumeMounts": [{"name": "key", "mountPath": "/key"}],
                        }
                    ],
                    "volumes": [{"name": "key", "secret": {"secretName": "key"}}],
                }
            }
        },
    },
}
WORKLOAD = workload_from(DOCUMENT)


@functools.cache
def compiled() -> Compiled:
    return compile_kubeflow(WORKLOAD, folder=ROOT)


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


def read(definition: str) -> tuple[dict[str, Any], dict[str, Any]]:
    pipeline, platforms = parsed(definition)
    return pipeline, platforms["platforms"]["kubernetes"]["deploymentSpec"]["executors"]


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    return read(compiled().definition)


def with_overrides(*overrides: str) -> tuple[dict[str, Any], dict[str, Any]]:
    workload = workload_from(DOCUMENT, overrides=overrides)
    return read(compile_kubeflow(workload, folder=ROOT).definition)


def groups(pipeline: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields each group of tasks with its name: the pipeline itself, then those inside of it."""
    yield "root", pipeline["root"]
    for name, component in pipeline["components"].items():
        if "dag" in component:
            yield name, component


def tasks(pipeline: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {
        name: task for _, group in groups(pipeline) for name, task in group["dag"]["tasks"].items()
    }


def executor(pipeline: Mapping[str, Any], task: str) -> Mapping[str, Any]:
    component = pipeline["components"][tasks(pipeline)[task]["componentRef"]["name"]]
    found: Mapping[str, Any] = pipeline["deploymentSpec"]["executors"][component["executorLabel"]]
    return found["container"]
