"""Kubeflow Pipelines is an orchestrator: its verbs work on one installation of it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime

from stoker.orchestrators.base import (
    Pipeline,
    RunState,
    RunSummary,
    Schedule,
    Started,
    Timing,
    Uploaded,
    UploadPlan,
    utc_now,
)
from stoker.orchestrators.kubeflow.api import Kubeflow, KubeflowConnection
from stoker.orchestrators.kubeflow.pipelines import plan_upload, send_upload
from stoker.orchestrators.kubeflow.runs import (
    RunOptions,
    find_run,
    runs_of,
    start_run,
    state_of,
    stop_run,
)
from stoker.orchestrators.kubeflow.schedules import (
    add_schedule,
    delete_schedule,
    list_schedules,
    schedules_of_others,
)
from stoker.records import Workload


class KubeflowOrchestrator:
    """Runs pipelines on Kubeflow Pipelines, whose recurring runs are the schedules.

    Args:
        connection: How it is reached; nothing is sent before the first verb.
        options: What runs and schedules are asked for besides their parameters.
        kubeflow: Takes the place of the connection's own, for tests.
        now: The time, in UTC.
    """

    name = "kubeflow"

    def __init__(
        self,
        connection: KubeflowConnection,
        *,
        options: RunOptions | None = None,
        kubeflow: Kubeflow | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._kubeflow = kubeflow or Kubeflow(connection)
        self._options = options or RunOptions()
        self._now = now

    def plan(self, pipeline: Pipeline) -> UploadPlan:
        """Compares a compiled pipeline with its latest version; sends nothing."""
        return plan_upload(self._kubeflow, pipeline)

    def upload(self, plan: UploadPlan) -> Uploaded:
        """Creates the pipeline, or adds a version to it; nothing where the plan found no change."""
        done = send_upload(self._kubeflow, plan)
        if done.action == "created":
            return done
        older = schedules_of_others(self._kubeflow, done.id, version_id=done.version_id)
        notes = (f"schedule {name} still starts an older version: make it again" for name in older)
        return replace(done, notes=tuple(notes))

    def start(self, workload: Workload, *, parameters: Sequence[str]) -> Started:
        """Starts a run of the uploaded pipeline; `parameters` are NAME=VALUE."""
        return start_run(self._kubeflow, workload, parameters=parameters, options=self._options)

    def schedule(
        self, workload: Workload, *, timing: Timing, parameters: Sequence[str], name: str | None
    ) -> Schedule:
        """Creates or replaces a recurring run."""
        return add_schedule(
            self._kubeflow,
            workload,
            timing=timing,
            parameters=parameters,
            name=name,
            options=self._options,
            now=self._now(),
        )

    def schedules(self, workload: Workload) -> tuple[Schedule, ...]:
        """Returns the recurring runs of the workload's pipeline, by name."""
        return list_schedules(self._kubeflow, workload, now=self._now())

    def unschedule(self, workload: Workload, *, name: str) -> str:
        """Deletes a recurring run and returns its full name."""
        return delete_schedule(self._kubeflow, workload, name=name)

    def status(self, run: str) -> RunState:
        """Returns the run that RUN names, as it is now."""
        return state_of(self._kubeflow, find_run(self._kubeflow, run))

    def runs(self, run: str) -> tuple[RunSummary, ...]:
        """Returns the newest runs of the pipeline that RUN names; () where it names a run."""
        found = find_run(self._kubeflow, run)
        return runs_of(self._kubeflow, found.pipeline_id) if found.pipeline_id else ()

    def stop(self, run: str) -> RunState:
        """Terminates the run, deletes its jobs, and waits until it has ended."""
        return stop_run(self._kubeflow, find_run(self._kubeflow, run))
