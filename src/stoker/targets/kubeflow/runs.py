"""RUN on the command line: a run's id or page, or a pipeline for its newest run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.records import Json
from stoker.targets.base import RunSummary, State
from stoker.targets.kubeflow.client import Kubeflow
from stoker.targets.kubeflow.deployed import NEWEST_FIRST, find_pipeline, moment
from stoker.targets.kubeflow.errors import KubeflowError
from stoker.targets.kubeflow.spec import items, mapping

# A listing of runs shows so many at most: the newest, of the newest 300 of the namespace.
MAX_RUNS = 20
_MAX_PAGES = 3

_ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_RUN = re.compile(rf"(?:.*runs/details/|[^/]+/)?({_ID})(?:[/?].*)?", re.IGNORECASE)

_STATES: Mapping[str, State] = {
    "PENDING": "waiting",
    "PAUSED": "waiting",
    "RUNNING": "running",
    "SUCCEEDED": "succeeded",
    "SKIPPED": "not run",
    "FAILED": "failed",
    "CANCELING": "stopping",
    "CANCELED": "stopped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What RUN names: a run as the service shows it.

    Attributes:
        pipeline: Name of the pipeline that RUN named; empty: it named a run.
        pipeline_id: Of that pipeline.
    """

    id: str
    document: Mapping[str, Json]
    pipeline: str = ""
    pipeline_id: str = ""


def find_run(kubeflow: Kubeflow, run: str) -> Found:
    """The run that RUN names.

    Raises:
        UsageError: If there is none.
    """
    if named := _RUN.fullmatch(run.strip()):
        id = named.group(1).lower()
        try:
            return Found(id=id, document=kubeflow.call("run", "get_run", run_id=id))
        except KubeflowError as err:
            if not err.is_missing:
                raise
            raise UsageError(
                f"there is no run {id}", where=kubeflow.connection.place, fix=_HOW
            ) from None
    pipeline = find_pipeline(kubeflow, run)
    if pipeline is None:
        namespace = kubeflow.namespace
        raise UsageError(
            f"there is no pipeline and no run {run}",
            where=kubeflow.connection.place + (f", namespace {namespace}" if namespace else ""),
            fix=_HOW,
        )
    newest = next(_runs(kubeflow, pipeline.id), None)
    if newest is None:
        raise UsageError(f"pipeline {run} has not run yet", fix="stoker start kubeflow WORKLOAD")
    id = str(newest.get("run_id", ""))
    return Found(
        id=id,
        document=kubeflow.call("run", "get_run", run_id=id),
        pipeline=pipeline.name,
        pipeline_id=pipeline.id,
    )


def runs_of(kubeflow: Kubeflow, pipeline_id: str) -> tuple[RunSummary, ...]:
    """The newest runs of a pipeline, newest first."""
    found: list[RunSummary] = []
    for item in _runs(kubeflow, pipeline_id):
        found.append(
            RunSummary(
                run=str(item.get("run_id", "")),
                status=state_of_run(item),
                began=moment(item.get("created_at")),
                reason=reason_of(item),
            )
        )
        if len(found) == MAX_RUNS:
            break
    return tuple(found)


def state_named(name: Json) -> State:
    """The state of a task or run, by the service's word for it."""
    return _STATES.get(str(name), "waiting")


def state_of_run(document: Mapping[str, Json]) -> State:
    """The state of a run: one that failed because it was terminated was stopped."""
    state = state_named(document.get("state"))
    history = [mapping(item).get("state") for item in items(document.get("state_history"))]
    return "stopped" if state == "failed" and "CANCELING" in history else state


def reason_of(document: Mapping[str, Json]) -> str:
    """Why a task or run failed, where the service says it: now, or last in its history."""
    told = [document, *(mapping(item) for item in reversed(items(document.get("state_history"))))]
    words = (str(mapping(item.get("error")).get("message") or "") for item in told)
    return next((text for text in words if text), "")


def _runs(kubeflow: Kubeflow, pipeline_id: str) -> Iterator[Mapping[str, Json]]:
    """The newest runs of a pipeline: the service has no way to ask for them alone."""
    for item in kubeflow.pages(
        "run",
        "list_runs",
        items="runs",
        max_pages=_MAX_PAGES,
        namespace=kubeflow.namespace,
        sort_by=NEWEST_FIRST,
    ):
        if mapping(item.get("pipeline_version_reference")).get("pipeline_id") == pipeline_id:
            yield item


_HOW = "RUN is a run's id, the address of its page, or a pipeline's name for its newest run"

__all__ = ["Found", "find_run", "reason_of", "runs_of", "state_named", "state_of_run"]
