"""The logs of a run: of the job of each step, and of the training job that a step started."""

from collections.abc import Iterator, Sequence

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.base import LogLine
from stoker.platforms.sagemaker.logs import LOG_GROUP, JobLogs, Labels
from stoker.platforms.sagemaker.state import job_state
from stoker.records import nearest
from stoker.targets.sagemaker.runs import Found, describe_job
from stoker.targets.sagemaker.status import state_of

PROCESSING_LOG_GROUP = "/aws/sagemaker/ProcessingJobs"


def lines_of(aws: Aws, found: Found, *, group: str | None) -> Iterator[LogLine]:
    """All lines that there are until now, step after step, hosts merged by time.

    Args:
        aws: The account.
        found: The run or job.
        group: Shows one only: an instance group, or a step by its name.

    Raises:
        UsageError: If nothing is called `group`.
        PlatformError: If the logs may not be read.
    """
    seen: set[str] = set()
    for label, log_group, job in _jobs(aws, found):
        for line in _job_lines(aws, label, log_group, job):
            seen.add(line.group)
            if group is None or line.group == group:
                yield line
    if group is not None and group not in seen:
        raise UsageError(
            f"no host of {found.run} is in a group {group}, and none of its steps is called so",
            where="the log until now",
            fix=nearest(group, sorted(seen)) if seen else "there is no log yet",
        )


def _jobs(aws: Aws, found: Found) -> Iterator[tuple[str, str, str]]:
    """Label, log group and name of each job."""
    if found.kind == "job":
        yield "", LOG_GROUP, found.id
        return
    for step in state_of(aws, found).steps:
        if step.job and "/processing-jobs/" in step.url:
            yield step.name, PROCESSING_LOG_GROUP, step.job
        elif step.job:
            is_launched = step.name == f"job {step.job}"
            yield "" if is_launched else step.name, LOG_GROUP, step.job


def _job_lines(aws: Aws, label: str, log_group: str, job: str) -> Iterator[LogLine]:
    groups: Sequence[str] = (label,)
    if log_group == LOG_GROUP:
        described = describe_job(aws, job)
        named = [name for name in job_state(described).groups if name] if described else []
        groups = named or (label or "dnn",)
    logs = JobLogs(aws, job_name=job, log_group=log_group)
    labels = Labels(groups)
    while True:
        yield from labels.label(logs.read(), now=aws.clock())
        if not logs.is_behind:
            break
    yield from labels.flush()


__all__ = ["lines_of"]
