"""The product's pipeline for Kubeflow, and the client of its runs on the played server."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import yaml

from stoker.kubeflow import compile_kubeflow
from stoker.pipelines.base import Compiled
from stoker.pipelines.kubeflow import KubeflowClient
from stoker.records import Json, Workload
from stoker.workload_file import workload_from
from support.aws_answers import Clock
from support.kfp_server import KfpServer

ROOT = Path(__file__).resolve().parents[2]

WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "platform": "kubernetes",
    "command": ["python", "train.py"],
    "image": "registry.example/stoker:1",
    "cluster": {"dnn": {"instance_type": "g5.xlarge", "count": 1}},
    "hyperparameters": {"epochs": 10},
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "kubernetes": {"pools": {"g5.xlarge": {"cpu": 3, "memory": "12Gi", "gpus": 1}}},
}


def workload(*overrides: str) -> Workload:
    return workload_from(WORKLOAD, overrides=overrides)


@cache
def compiled(*overrides: str) -> Compiled:
    return compile_kubeflow(workload(*overrides), folder=ROOT)


def client_at(server, *overrides, namespace=None, token_file=None) -> KubeflowClient:
    """Returns the client, for which time passes at once."""
    keys = {"host": server.url, "namespace": namespace, "token_file": token_file}
    reach = [f"kubernetes.kubeflow.{key}={value}" for key, value in keys.items() if value]
    client = KubeflowClient(workload(*overrides, *reach))
    client.clock = clock = Clock()
    client.sleep = clock.sleep
    return client


def upload(server: KfpServer, *overrides: str) -> dict[str, Json]:
    client = client_at(server)
    there, wanted = client.compared(compiled(*overrides))
    return client.upload(compiled(*overrides), is_changed=there != wanted)


def write_project(folder: Path, *, host: str) -> None:
    """Makes a folder one with the project's pipelines, and w.yaml for the server at `host`."""
    (folder / "pipelines").symlink_to(ROOT / "pipelines")
    kubernetes = {**WORKLOAD["kubernetes"], "kubeflow": {"host": host}}
    (folder / "w.yaml").write_text(yaml.safe_dump({**WORKLOAD, "kubernetes": kubernetes}))
