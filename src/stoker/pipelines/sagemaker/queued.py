"""The state of a job that went through a queue of AWS Batch, for `stoker status` and `stop`."""

from stoker.errors import PlatformError
from stoker.pipelines.base import RunState, RunStep
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.batch_queue import describe
from stoker.platforms.sagemaker.submit import find_job, job_state


def is_service_job(run: str) -> bool:
    """Whether a run is named by the ARN of a service job."""
    return run.startswith("arn:") and ":service-job/" in run


def queued_state(aws: Aws, arn: str) -> RunState:
    """Returns a service job, with its latest training job as a step.

    Raises:
        ServiceError: If AWS does not tell it.
    """
    job = describe(aws, arn)
    has_ended = job.is_final
    steps = []
    if job.training_job and (answer := find_job(aws, job.training_job)):
        training = job_state(answer)
        has_ended = has_ended and training.is_final
        name = f"job {training.name}"
        steps.append(RunStep(name=name, status=training.status, reason=training.reason))
    exit_code = None
    if has_ended:
        exit_code = 0 if job.status == "SUCCEEDED" else PlatformError.exit_code
    return RunState(
        run=arn,
        status=job.status,
        has_ended=has_ended,
        exit_code=exit_code,
        reason=job.reason,
        steps=tuple(steps),
    )
