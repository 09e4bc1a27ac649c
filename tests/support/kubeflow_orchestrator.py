"""Compiles the product's pipeline for Kubeflow; makes tasks of its runs as the service would."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stoker.orchestrators.base import Uploaded
from stoker.orchestrators.kubeflow import KubeflowOrchestrator
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection
from stoker.orchestrators.kubeflow.compile import (
    CompiledSpec,
    compile_kubeflow,
    items,
    spec_of_text,
    tasks_of,
)
from stoker.orchestrators.kubeflow.runs import RunOptions
from stoker.orchestrators.sagemaker.compile import Compiled
from stoker.records import Json, Workload
from stoker.records.base import mapping
from stoker.settings import workload_from
from support.kfp_server import KfpServer
from support.kubeflow_backend import KubeflowRun

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


def tasks(
    spec: CompiledSpec | None = None, attempts: Mapping[str, int] | None = None, /, **states: str
) -> list[dict[str, Json]]:
    """Makes the nodes of a run's Workflow: `NAME=PHASE` or `NAME="PHASE message"`.

    As the stock Kubeflow 2.17 has them (dag.go of its compiler, operator.go and dag.go of Argo
    4.0): every template has the `retryStrategy` of `templateDefaults`, so that each node is a Retry
    called NAME, and its attempts are called NAME(0), NAME(1) ... A task has a driver and, where
    that ended well, a DAG with `executor` in it; a group has a driver and its tasks; the exit task
    is inside NAME.onExit. Loops are left out: a task in one is made as in a group.
    `DRIVER message` is a task whose driver failed.

    Args:
        spec: The compiled pipeline; absent: the one of `workload()`.
        attempts: Attempts of tasks that ran more than once.
    """
    spec = spec or spec_of_text(compiled().definition)
    told = {name.replace("_", "-"): words for name, words in states.items()}
    found = [*_retried(WORKFLOW, "entrypoint", "Running")]
    found += _retried(f"{WORKFLOW}(0).root-driver", "system-dag-driver", "Succeeded", type="Pod")
    found += _retried(f"{WORKFLOW}(0).root", "root", "Running")
    places = {"": f"{WORKFLOW}(0).root(0)"}
    for task in tasks_of(spec):
        place = places[task.around]
        if mapping(task.document, "triggerPolicy").get("strategy"):
            (awaited,) = items(task.document["dependentTasks"])
            if task.name in told:
                found += _retried(f"{place}.{awaited}.onExit", f"exit-hook-{task.name}", "Running")
            place = f"{place}.{awaited}.onExit(0)"
        name = f"{place}.{task.name}"
        places[task.name] = f"{name}(0)"
        is_group = any(inner.around == task.name and inner.name in told for inner in tasks_of(spec))
        words = "Running" if is_group else told.get(task.name, "")
        phase, _, message = words.partition(" ")
        phase = phase.capitalize()
        if not words:
            continue
        ran = "Failed" if phase == "Driver" else "Succeeded"
        kind = "system-dag-driver" if is_group else "system-container-driver"
        found += _retried(f"{name}-driver", kind, ran, message, type="Pod")
        if is_group:
            found += _retried(name, task.name, phase)
        elif phase == "Driver":
            found.append(_node(name, "Skipped", "system-container-executor", "Omitted"))
        elif phase in ("Skipped", "Omitted"):
            found.append(_node(name, "Skipped", "system-container-executor", phase))
        else:
            inner = "Running" if phase == "Pending" else phase
            found += _retried(name, "retry-system-container-executor", inner)
            found += _retried(
                f"{name}(0).executor",
                "retry-system-container-impl",
                phase,
                message,
                type="Pod",
                attempts=(attempts or {}).get(task.name, 1),
            )
    return found


def nodes_played(run: KubeflowRun) -> list[dict[str, Json]]:
    """Returns the nodes of a run of the strict double, as its Workflow has them."""
    clock = run.clock.text
    return [
        {
            "id": node.id,
            "name": node.name,
            "displayName": node.shown,
            "type": node.type,
            "templateName": node.template,
            "phase": node.phase,
            "startedAt": clock(node.began),
            "finishedAt": None if node.ended is None else clock(node.ended),
            "message": node.message,
            "children": list(node.children),
        }
        for node in run.nodes.values()
    ]


WORKFLOW = "mnist-x7k2p"


def _retried(
    name: str, template: str, phase: str, message: str = "", *, type: str = "DAG", attempts: int = 1
) -> Iterator[dict[str, Json]]:
    names = [f"{name}({number})" for number in range(attempts)]
    yield _node(name, "Retry", template, "Running" if phase == "Pending" else phase, message, names)
    for each in names:
        is_last = each == names[-1]
        yield _node(each, type, template, phase if is_last else "Error", message if is_last else "")


def _node(
    name: str,
    type: str,
    template: str,
    phase: str,
    message: str = "",
    children: Sequence[str] = (),
) -> dict[str, Json]:
    display = re.split(r"(?<=\))\.", name)[-1]
    return {
        "id": node_id(name),
        "name": name,
        "displayName": display,
        "type": type,
        "templateName": template,
        "phase": phase,
        "startedAt": None if phase == "Pending" else "2026-11-20T10:01:00Z",
        "finishedAt": "2026-11-20T10:03:00Z" if phase not in ("Running", "Pending") else None,
        "children": [node_id(child) for child in children],
        **({"message": message} if message else {}),
    }


def node_id(name: str) -> str:
    """Returns the id of a node, as Argo makes it: an FNV-1a hash of its name."""
    if name == WORKFLOW:
        return name
    hashed = 2166136261
    for byte in name.encode():
        hashed = (hashed ^ byte) * 16777619 % (1 << 32)
    return f"{WORKFLOW}-{hashed}"
