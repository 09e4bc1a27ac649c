"""What can be seen of a training job of one group without running it: the load of its hosts."""

from dataclasses import dataclass
from datetime import datetime

from stoker.errors import PlatformError
from stoker.platforms.aws import Aws
from stoker.platforms.base import InstanceSizes
from stoker.platforms.sagemaker.load import (
    DAY_SECONDS,
    NAMESPACE,
    HostLoad,
    point_seconds,
    read_utilisation,
)
from stoker.platforms.sagemaker.submit import TrainingJobState, find_job, job_state

KEPT_DAYS = 455


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedJob:
    """A training job of one group, and the load of its hosts.

    Attributes:
        began_at: Start of the training: UTC, ISO 8601.
        minutes: Length of the training, until its end or until now.
        point_seconds: Period of CloudWatch's data points.
    """

    name: str
    instance_type: str
    loads: tuple[HostLoad, ...]
    began_at: str
    minutes: float
    point_seconds: int
    is_running: bool


def describe_job(aws: Aws, name: str) -> TrainingJobState:
    """Returns the state of a job that has begun to train; raises PlatformError if it has not."""
    answer = find_job(aws, name)
    if answer is None:
        raise PlatformError(
            f"training job {name} does not exist",
            where=f"region {aws.region}, sagemaker:DescribeTrainingJob",
            fix="check its name, and name its region with --region",
        )
    state = job_state(answer)
    if state.began_at is None or not state.groups:
        reason = f": {state.reason}" if state.reason else ""
        raise PlatformError(
            f"{name} has not trained: it is {state.secondary or state.status}{reason}",
            where="sagemaker:DescribeTrainingJob",
            fix="name a job that trained for some minutes",
        )
    return state


def observe_job(
    aws: Aws,
    state: TrainingJobState,
    *,
    sizes: InstanceSizes,
    now: datetime,
) -> ObservedJob:
    """Reads the load of a job's hosts.

    Args:
        aws: The account.
        state: The job, which has begun to train.
        sizes: Instance type to vCPUs and GPUs.
        now: Counts as the end of a running job.

    Raises:
        PlatformError: If the job has several groups, CloudWatch has no data points, or AWS refuses.
    """
    assert state.began_at is not None
    if len(state.groups) > 1:
        raise PlatformError(
            f"{state.name} has several groups: {', '.join(state.groups)}",
            where="CloudWatch does not say which host is in which group",
            fix="profile the training: stoker profile",
        )
    ((group, (kind, count)),) = state.groups.items()
    begin = datetime.fromisoformat(state.began_at)
    end = now
    if state.ended_at:
        end = datetime.fromisoformat(state.ended_at)
    age = (now - begin).total_seconds()
    seconds = (end - begin).total_seconds()
    loads = read_utilisation(
        aws,
        job_name=state.name,
        begin=begin,
        end=end,
        now=now,
        roster={f"algo-{number + 1}": group for number in range(count)},
        types={group: kind},
        sizes=sizes,
    )
    if all(load.cpu is None and load.gpu is None for load in loads):
        raise _no_points(state, age, seconds)
    return ObservedJob(
        name=state.name,
        instance_type=kind,
        loads=loads,
        began_at=state.began_at,
        minutes=seconds / 60,
        point_seconds=point_seconds(seconds, age_seconds=age),
        is_running=state.ended_at is None and not state.is_final,
    )


def _no_points(state: TrainingJobState, age_seconds: float, seconds: float) -> PlatformError:
    why = "it trained for less than two minutes" if seconds < 120 else "none were written"
    if age_seconds > KEPT_DAYS * DAY_SECONDS:
        why = f"it began {age_seconds / DAY_SECONDS:.0f} days ago, and they are kept {KEPT_DAYS}"
    return PlatformError(
        f"CloudWatch has no points for {state.name}'s training hosts: {why}",
        where=f"cloudwatch:GetMetricData, namespace {NAMESPACE}",
        fix="name a job that trained for some minutes, or profile the training: stoker profile",
    )
