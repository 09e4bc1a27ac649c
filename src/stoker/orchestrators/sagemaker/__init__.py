"""SageMaker Pipelines is an orchestrator: its verbs work on one account and region."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from stoker.errors import UsageError
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
from stoker.orchestrators.sagemaker.pipelines import plan_upload, send_upload
from stoker.orchestrators.sagemaker.runs import (
    find_run,
    runs_of,
    start_run,
    state_of,
    stop_run,
    under_way_before,
)
from stoker.orchestrators.sagemaker.schedules import add_schedule, delete_schedule, list_schedules
from stoker.platforms.aws import Aws
from stoker.records import SageMakerSettings, Workload


class SageMakerOrchestrator:
    """Works with SageMaker Pipelines, and with EventBridge Scheduler for schedules.

    Args:
        settings: Settings of the workload; absent where only a run is asked about.
        aws: The account; absent: what boto3 finds.
        region: Absent: the settings', else what boto3 finds.
        folder: Project folder; absent: the current one.
        now: The time, in UTC.
    """

    name = "sagemaker"

    def __init__(
        self,
        *,
        settings: SageMakerSettings | None = None,
        aws: Aws | None = None,
        region: str | None = None,
        folder: Path | None = None,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self._folder = folder or Path.cwd()
        self._settings = settings
        self._aws = aws or Aws(region=region or (settings.region if settings else None))
        self._now = now

    def plan(self, pipeline: Pipeline) -> UploadPlan:
        """Compares a compiled pipeline with the uploaded one; sends nothing."""
        return plan_upload(self._aws, pipeline, settings=self._known())

    def upload(self, plan: UploadPlan) -> Uploaded:
        """Sends what the plan found to be missing or changed."""
        return send_upload(self._aws, plan, settings=self._known())

    def start(
        self, workload: Workload, *, parameters: Sequence[str], version: str | None = None
    ) -> Started:
        """Starts a run of the uploaded pipeline; `parameters` are NAME=VALUE."""
        return start_run(
            self._aws, workload, parameters=parameters, folder=self._folder, version=version
        )

    def schedule(
        self, workload: Workload, *, timing: Timing, parameters: Sequence[str], name: str | None
    ) -> Schedule:
        """Creates or updates a schedule."""
        return add_schedule(
            self._aws,
            workload,
            timing=timing,
            parameters=parameters,
            name=name,
            now=self._now(),
        )

    def schedules(self, workload: Workload) -> tuple[Schedule, ...]:
        """Returns the schedules that start the workload's pipeline, by name."""
        return list_schedules(self._aws, workload, now=self._now())

    def unschedule(self, workload: Workload, *, name: str) -> str:
        """Deletes a schedule and returns its full name."""
        return delete_schedule(self._aws, workload, name=name)

    def status(self, run: str) -> RunState:
        """Returns the run or job that RUN names, as it is now."""
        return state_of(self._aws, find_run(self._aws, run))

    def runs(self, run: str) -> tuple[RunSummary, ...]:
        """Returns the newest runs of the pipeline that RUN names; () if it names something else."""
        found = find_run(self._aws, run)
        return runs_of(self._aws, found.run.partition("/")[0]) if found.is_newest else ()

    def under_way_before(self, pipeline: str, execution: str) -> tuple[str, ...]:
        """Returns the runs under way that one of a pipeline's runs has to give way to."""
        return under_way_before(self._aws, pipeline, execution, now=self._now())

    def stop(self, run: str) -> RunState:
        """Asks the run or job to stop and waits until it has."""
        return stop_run(self._aws, find_run(self._aws, run))

    def _known(self) -> SageMakerSettings:
        if self._settings is None:
            raise UsageError(
                "the workload has no settings for SageMaker",
                where="key sagemaker",
                fix="add sagemaker: {role: ..., output_uri: s3://...}",
            )
        return self._settings
