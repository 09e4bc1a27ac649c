"""Stops a run or a job, and what a stopped run left running."""

import secrets

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.start import stop_job
from stoker.targets.base import RunState
from stoker.targets.sagemaker.runs import Found
from stoker.targets.sagemaker.status import state_of

# A container has 120 s to end; then come the upload of its output and the steps behind it.
STOP_SECONDS = 900.0
POLL_SECONDS = 5.0


def stop_run(aws: Aws, found: Found) -> RunState:
    """Asks the run or job to stop and waits until it has.

    The training job that a step of the run started is stopped as well: nobody else would.

    Raises:
        PlatformError: If it has not stopped after `STOP_SECONDS`; it goes on stopping.
    """
    state = state_of(aws, found)
    if not state.has_ended and found.kind == "run":
        aws.call(
            "sagemaker",
            "StopPipelineExecution",
            PipelineExecutionArn=found.id,
            ClientRequestToken=secrets.token_hex(16),
        )
    elif not state.has_ended:
        stop_job(aws, found.id)
    deadline = aws.clock() + STOP_SECONDS
    asked: set[str] = set()
    while True:
        state = state_of(aws, found)
        left = [
            step.job
            for step in state.steps
            if step.name == f"job {step.job}" and step.status in ("running", "stopping")
        ]
        if state.has_ended and not left:
            return state
        if state.has_ended:
            for job in (job for job in left if job not in asked):
                stop_job(aws, job)
                asked.add(job)
        if aws.clock() >= deadline:
            raise PlatformError(
                f"{state.run} is {state.status} after {STOP_SECONDS:.0f} s",
                where=state.url,
                fix=f"it was asked to stop; see later: stoker status sagemaker {state.run}",
            )
        aws.sleep(POLL_SECONDS)


__all__ = ["STOP_SECONDS", "stop_run"]
