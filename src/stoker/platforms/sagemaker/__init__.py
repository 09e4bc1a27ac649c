"""The SageMaker platform: a job with a data group is a training job with instance groups.

A plan is made by `job_checks`, `training_job`, `request` and `checks`; none of them asks AWS.
`submit` sends it, or `queued_submit` to a queue of AWS Batch; `job` or `queued_job` follow it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from stoker.environment import pipeline_execution
from stoker.errors import ServiceError
from stoker.logs import EventName, Log
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec, Platform
from stoker.platforms.sagemaker.batch_queue import namesakes
from stoker.platforms.sagemaker.checks import notes
from stoker.platforms.sagemaker.job import SageMakerRun, fetch_outputs
from stoker.platforms.sagemaker.job_checks import settings_of
from stoker.platforms.sagemaker.places import check_caller
from stoker.platforms.sagemaker.preferences import choices_of
from stoker.platforms.sagemaker.project import PROJECT
from stoker.platforms.sagemaker.queued_job import QueuedRun
from stoker.platforms.sagemaker.queued_submit import find_own_queued, queue_of, start_queued
from stoker.platforms.sagemaker.request import SageMakerRequest, plan_request
from stoker.platforms.sagemaker.submit import find_job, find_own, start
from stoker.records import Group, Json, PlatformSettings
from stoker.repeat import READ_AGAIN_SECONDS, ResultT, may_pass

__all__ = ["SageMakerPlatform", "SageMakerRequest"]


class SageMakerPlatform(Platform[SageMakerRequest]):
    """SageMaker as a platform: a job is a training job.

    Args:
        aws: The account; default: what boto3 finds.
        region: Default: what boto3 finds.
    """

    name = "sagemaker"
    project = PROJECT

    def __init__(self, *, aws: Aws | None = None, region: str | None = None) -> None:
        self._aws = aws or Aws(region=region)

    @classmethod
    def of(cls, settings: PlatformSettings | None) -> Self:
        if settings is None:
            return cls()
        return cls(region=settings.sagemaker_region)

    def plan(self, job: JobSpec) -> SageMakerRequest:
        """Returns the CreateTrainingJob request of `job`, without network or files."""
        return plan_request(job)

    def choices(self, job: JobSpec) -> tuple[tuple[Group, ...], ...]:
        return choices_of(job)

    def describe(self, request: SageMakerRequest) -> dict[str, Json]:
        folder = request.code_folder
        queued = {"SubmitServiceJob": request.queued} if request.queued else {}
        return {
            "platform": self.name,
            "CreateTrainingJob": request.body,
            **queued,
            "token_uri": request.token_uri,
            "code_uri": request.code_uri,
            "code_folder": str(folder) if folder else None,
            "notes": notes(request.body),
        }

    def submit(self, request: SageMakerRequest) -> SageMakerRun:
        """Uploads token and code and starts the job, or adopts an earlier attempt's job.

        If the name belongs to a failed or different job, the run is called NAME-2 and so on. Raises
        UsageError if the login is not in the account of the workload's role.
        """
        # In a step the pipeline's own account calls, perhaps in a network without STS.
        if not pipeline_execution():
            check_caller(self._aws.caller(), settings_of(request.job))
        log = Log(run=request.job.name, host="sagemaker")
        aws = self._aws
        job = request.job
        rename = self._renamed(request)
        if request.queued:
            started, entry = self._patiently(
                lambda: start_queued(aws, request, rename=rename, log=log), job=job, log=log
            )
            return QueuedRun(aws, request=started, asked_name=job.run_name, service_job=entry)
        started = self._patiently(
            lambda: start(aws, request, rename=rename, log=log), job=job, log=log
        )
        return SageMakerRun(aws, request=started, asked_name=job.run_name)

    def fetched(self, address: str, *, folder: Path) -> Path | None:
        """Unpacks the part of stoker in an output.tar.gz; repeated for READ_AGAIN_SECONDS."""
        return fetch_outputs(
            self._aws, address, folder=folder, log=Log(run=folder.name, host="sagemaker")
        )

    def resumed(self, requests: Sequence[SageMakerRequest]) -> int:
        first = requests[0]
        job = requests[0].job

        def find() -> int:
            there = [*enumerate(requests)][1:] if self._has_begun(first) else []
            for index, request in reversed(there):
                if self._has_own(request):
                    return index
            return 0

        return self._patiently(find, job=job, log=Log(run=job.name, host="sagemaker"))

    def _has_begun(self, request: SageMakerRequest) -> bool:
        """Whether there is a job of the request's name."""
        name = request.job.name
        if request.queued:
            return bool(namesakes(self._aws, queue_of(request), name))
        return find_job(self._aws, name) is not None

    def _has_own(self, request: SageMakerRequest) -> bool:
        """Whether the request's own job runs, waits in its queue, or has completed."""
        rename = self._renamed(request)
        if request.queued:
            return find_own_queued(self._aws, request, rename=rename) is not None
        return find_own(self._aws, request, rename=rename) is not None

    def _patiently(self, call: Callable[[], ResultT], *, job: JobSpec, log: Log) -> ResultT:
        """Repeats a call before the job is followed, which finds what earlier calls have made."""
        is_step = bool(pipeline_execution())
        minutes = job.platform_settings.on_no_capacity.wait_minutes
        seconds = max(READ_AGAIN_SECONDS, 60.0 * minutes) if is_step else READ_AGAIN_SECONDS

        def is_passing(err: ServiceError) -> bool:
            # In a terminal the user may not have logged in yet.
            return may_pass(err) and (is_step or err.code != "NoCredentialsError")

        def tell(err: ServiceError) -> None:
            log.event(EventName.CALL_REPEATED, action=err.action, why=err.what, fix=err.fix)

        return self._aws.repeated(call, seconds=seconds, is_passing=is_passing, tell=tell)

    def _renamed(self, request: SageMakerRequest) -> Callable[[str], SageMakerRequest]:
        # A new plan, as the addresses of token, code and outputs contain the name.
        job = dataclasses.replace(request.job, run=request.job.run_name)
        return lambda name: self.plan(dataclasses.replace(job, name=name))
