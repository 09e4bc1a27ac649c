"""The SageMaker platform: a job with a data group is a training job with instance groups.

`request` plans without asking AWS, `submit` sends the plan, `job` follows the job.
"""

from collections.abc import Sequence
from typing import Self

from stoker.errors import ServiceError
from stoker.logs import EventName, Log
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec, Platform
from stoker.platforms.sagemaker.job import SageMakerRun
from stoker.platforms.sagemaker.request import SageMakerRequest, plan_request
from stoker.platforms.sagemaker.submit import (
    find_job,
    own_job,
    packed_code,
    sha256,
    start,
)
from stoker.records import Json, PlatformSettings

__all__ = ["SageMakerPlatform", "SageMakerRequest"]


class SageMakerPlatform(Platform[SageMakerRequest]):
    """SageMaker as a platform: a job is a training job.

    Args:
        aws: The account; default: what boto3 finds.
        region: Default: what boto3 finds.
    """

    name = "sagemaker"

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

    def describe(self, request: SageMakerRequest) -> dict[str, Json]:
        folder = request.code_folder
        return {
            "platform": self.name,
            "CreateTrainingJob": request.body,
            "token_uri": request.token_uri,
            "run": request.settings.to_document(),
            "code_uri": request.code_uri,
            "code_folder": str(folder) if folder else None,
        }

    def submit(self, request: SageMakerRequest) -> SageMakerRun:
        """Uploads token and code and starts the job, or adopts an earlier attempt's job.

        If the name belongs to a failed or different job, the run is called NAME-2 and so on.
        """
        log = Log(run=request.job.name, host="sagemaker")

        def tell(err: ServiceError) -> None:
            log.event(EventName.CALL_REPEATED, action=err.action, why=err.what, fix=err.fix)

        started = self._aws.repeated(lambda: start(self._aws, request, log=log), tell=tell)
        return SageMakerRun(self._aws, request=started)

    def resumed(self, requests: Sequence[SageMakerRequest]) -> int:
        def find() -> int:
            # Another plan was tried after the first one alone.
            if find_job(self._aws, requests[0].job.name) is None:
                return 0
            code = sha256(packed_code(requests[0]))
            for index in range(len(requests) - 1, 0, -1):
                request = requests[index]
                if own_job(self._aws, request, code=code)[1]:
                    return index
            return 0

        return self._aws.repeated(find)
