"""The logs of a run: of its steps' pods, while the cluster keeps them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.errors import PlatformError, StokerError, UsageError
from stoker.platforms.base import LogLine
from stoker.platforms.kubernetes.api import PODS, ApiError, Cluster
from stoker.records import Json, nearest
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import run_url
from stoker.targets.kubeflow.runs import Found
from stoker.targets.kubeflow.spec import items, mapping

# Kubeflow's own label of a run's pods, and the workflow engine's path of a step.
_OF_RUN = "pipeline/runid"
_STEP = "workflows.argoproj.io/node-name"
_MACHINERY = re.compile(r"executor(\(\d+\))?|root")
_CONTAINER = "main"
# The namespace of an installation by its manifests, where it has one user.
_NAMESPACE = "kubeflow"
READ_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pod:
    """A pod that runs a step."""

    name: str
    step: str
    began: str


def lines_of(
    kubeflow: Kubeflow,
    found: Found,
    *,
    group: str | None,
) -> Iterator[LogLine]:
    """All lines that there are until now, step after step.

    Args:
        kubeflow: The installation.
        found: The run.
        group: Shows one step only.

    Raises:
        UsageError: If no step is called `group`.
        PlatformError: If the pods cannot be reached, or are gone: the pages may still show logs.
    """
    namespace = kubeflow.namespace or kubeflow.connection.namespace or _NAMESPACE
    page = run_url(kubeflow, found.id)
    try:
        cluster = Cluster(context=kubeflow.connection.context, namespace=namespace)
        listed, _ = cluster.list(PODS, query={"labelSelector": f"{_OF_RUN}={found.id}"})
    except StokerError as err:
        raise PlatformError(
            f"logs are read from the pods, which are out of reach: {err.what}",
            where=err.where or f"namespace {namespace}",
            fix=f"the page shows them: {page}" if page else err.fix,
        ) from err
    pods = sorted(_pods(listed), key=lambda pod: pod.began)
    if not pods:
        raise PlatformError(
            f"no pod of run {found.id} is left, or none has begun",
            where=f"namespace {namespace}",
            fix=f"the page has what was kept: {page}" if page else "see the run's page",
        )
    steps = sorted({pod.step for pod in pods})
    if group is not None and group not in steps:
        raise UsageError(
            f"no step of {found.id} is called {group}, or it has no pod yet",
            fix=nearest(group, steps),
        )
    for pod in pods:
        if group in (None, pod.step):
            yield from _lines(cluster, pod)


def _pods(listed: list[Mapping[str, Json]]) -> Iterator[_Pod]:
    for document in listed:
        about = mapping(document.get("metadata"))
        path = str(mapping(about.get("annotations")).get(_STEP, ""))
        parts = [part for part in path.split(".")[1:] if not _MACHINERY.fullmatch(part)]
        step = parts[-1] if parts else ""
        containers = items(mapping(document.get("spec")).get("containers"))
        names = [mapping(container).get("name") for container in containers]
        status = mapping(document.get("status"))
        if not step or step.endswith("-driver") or _CONTAINER not in names:
            continue
        if status.get("phase") == "Pending":
            continue
        yield _Pod(
            name=str(about.get("name", "")), step=step, began=str(status.get("startTime") or "")
        )


def _lines(cluster: Cluster, pod: _Pod) -> Iterator[LogLine]:
    try:
        stream = cluster.open(
            PODS,
            pod.name,
            part="log",
            query={"container": _CONTAINER, "timestamps": "true"},
            read_seconds=READ_SECONDS,
        )
    except ApiError as err:
        # Its container has not begun yet, or it was deleted just now.
        if err.code in (400, 404):
            return
        raise
    try:
        for line, _ in stream.lines():
            yield LogLine(group=pod.step, host=pod.name, text=line.partition(" ")[2])
    finally:
        stream.release()


__all__ = ["lines_of"]
