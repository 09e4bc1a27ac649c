"""Compiles the product's pipeline for Kubeflow; makes tasks of its runs as the service would."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from stoker.orchestrators.base import Uploaded
from stoker.orchestrators.kubeflow import KubeflowOrchestrator
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection
from stoker.orchestrators.kubeflow.compile import compile_kubeflow
from stoker.orchestrators.kubeflow.runs import RunOptions
from stoker.orchestrators.sagemaker.compile import Compiled
from stoker.records import Json, Workload
from stoker.settings import workload_from
from support.kfp_server import KfpServer
from support.kubernetes_api import KubernetesApi, PodLogFile

ROOT = Path(__file__).resolve().parents[2]
RUN = "5b1f6c3e-0000-4000-8000-00000000abcd"

WORKLOAD: Mapping[str, Json] = {
    "name": "mnist",
    "platform": "kubernetes",
    "command": ["python", "train.py"],
    "image": "registry.example/stoker:1",
    "cluster": {"dnn": {"instance_type": "g5.xlarge", "count": 1}},
    "gate": [{"metric": "accuracy", "min": 0.9}],
    "kubernetes": {"pools": {"g5.xlarge": {"cpu": 3, "memory": "12Gi", "gpus": 1}}},
}


def workload(*overrides: str) -> Workload:
    return workload_from(WORKLOAD, overrides=overrides)


@cache
def compiled(*overrides: str) -> Compiled:
    return compile_kubeflow(workload(*overrides), folder=ROOT)


@dataclass
class Clock:
    """Plays a clock on which time passes while somebody sleeps."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


def connection(server: KfpServer, *, namespace: str = "", **more: object) -> KubeflowConnection:
    return KubeflowConnection(host=server.url, ui=server.url, namespace=namespace, **more)  # type: ignore[arg-type]


def target_at(
    server: KfpServer, *, namespace: str = "", options: RunOptions | None = None
) -> KubeflowOrchestrator:
    """Returns the target, with time that passes at once."""
    clock = Clock()
    made = connection(server, namespace=namespace)
    kubeflow = Kubeflow(made, clock=clock, sleep=clock.sleep)
    return KubeflowOrchestrator(made, options=options, kubeflow=kubeflow)


def upload(server: KfpServer, *overrides: str, namespace: str = "") -> Uploaded:
    """Uploads the pipeline: what a test is about comes after it."""
    target = target_at(server, namespace=namespace)
    return target.upload(target.plan(compiled(*overrides)))


def tasks(**states: str) -> Iterator[Mapping[str, Json]]:
    """Makes a run's nodes as the workflow engine does: `NAME=STATE` or `NAME="STATE reason"`.

    A task has a node for its driver, one for itself and one that runs its container, and the node
    that comes behind a task is a child of what ran it.
    """
    yield _node("root", "RUNNING", child="root-driver")
    names = [name.replace("_", "-") for name in states]
    for index, (name, told) in enumerate(zip(names, states.values(), strict=True)):
        state, _, reason = told.partition(" ")
        follows = f"{names[index + 1]}-driver" if index + 1 < len(names) else ""
        yield _node(f"{name}-driver", "SUCCEEDED", child=name)
        yield _node(name, state, child=f"{name}.executor")
        yield {
            **_node("executor", state, child=follows, reason=reason),
            "task_id": f"{name}.executor",
            "pod_name": f"mnist-x-system-container-impl-{name}",
        }


def _node(name: str, state: str, *, child: str = "", reason: str = "") -> dict[str, Json]:
    return {
        "run_id": RUN,
        "task_id": name,
        "display_name": name,
        "create_time": "2026-11-20T10:00:10Z",
        "start_time": "2026-11-20T10:01:00Z",
        "end_time": "2026-11-20T10:03:00Z"
        if state in ("SUCCEEDED", "FAILED")
        else "1970-01-01T00:00:00Z",
        "state": state,
        **({"child_tasks": [{"task_id": child}]} if child else {}),
        **({"error": {"code": 2, "message": reason}} if reason else {}),
    }


def step_pod(run: str, path: str, *, phase: str = "Running", minute: int = 0) -> dict[str, Any]:
    """Makes the pod of a step of a run, as Argo does."""
    name = "mnist-x-" + path.replace(".", "-").replace("(", "").replace(")", "")
    state: dict[str, Any] = {"running": {}} if phase == "Running" else {"waiting": {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"pipeline/runid": run},
            "annotations": {"workflows.argoproj.io/node-name": f"mnist-x.{path}"},
        },
        "spec": {"containers": [{"name": "main"}, {"name": "wait"}]},
        "status": {
            "phase": phase,
            "startTime": f"2026-11-20T10:{minute:02d}:00Z",
            "containerStatuses": [{"name": "main", "state": state}],
        },
    }


def put_pod(api: KubernetesApi, document: dict[str, Any], *lines: str) -> None:
    """Puts a pod with its log into a cluster."""
    name = document["metadata"]["name"]
    api.put("pods", document)
    api._logs[name] = PodLogFile()
    api.say(name, *lines)
