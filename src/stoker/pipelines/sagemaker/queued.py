"""The state of a job that went through a queue of AWS Batch, for `stoker status` and `stop`."""

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
    answer = find_job(aws, job.training_job) if job.training_job else None
    training = job_state(answer) if answer else None
    has_ended = job.is_final and (training is None or training.is_final)
    code = 0 if job.status == "SUCCEEDED" else 4
    steps = []
    if training is not None:
        name = f"job {training.name}"
        steps.append(RunStep(name=name, status=training.status, reason=training.reason))
    return RunState(
        run=arn,
        status=job.status,
        has_ended=has_ended,
        exit_code=code if has_ended else None,
        reason=job.reason,
        steps=tuple(steps),
    )
