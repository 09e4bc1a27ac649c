"""The platform sagemaker: plans, describes and submits training jobs."""

from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec, Run
from stoker.platforms.sagemaker.request import SageMakerRequest
from stoker.records import Json


class SageMakerPlatform:
    """Runs jobs as SageMaker training jobs.

    Args:
        aws: The account; absent: what boto3 finds.
        region: Absent: what boto3 finds.
    """

    name = "sagemaker"

    def __init__(self, *, aws: Aws | None = None, region: str | None = None) -> None:
        self._aws = aws or Aws(region=region)

    def plan(self, job: JobSpec) -> SageMakerRequest:
        """The CreateTrainingJob request of `job`, every rule of the service checked."""
        raise NotImplementedError

    def describe(self, request: SageMakerRequest) -> dict[str, Json]:
        """The request as `--dry-run` prints it."""
        raise NotImplementedError

    def submit(self, request: SageMakerRequest) -> Run:
        """Uploads token and code and starts the job; adopts an earlier attempt's job."""
        raise NotImplementedError
