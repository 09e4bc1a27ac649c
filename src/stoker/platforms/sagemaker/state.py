"""SageMaker's answers on a training job are typed here, with failures that ask for another plan."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.errors import PlatformError
from stoker.platforms.sagemaker.reading import mapping, mappings
from stoker.records import Event, Group, Json, bare_type

FINAL = ("Completed", "Failed", "Stopped")

# AlgorithmError: what the launcher wrote, exit code: 7
_EXIT_CODE = re.compile(r"exit code:? (-?\d+)", re.IGNORECASE)
_NO_CAPACITY = re.compile(
    r"CapacityError|InsufficientCapacity|InsufficientInstanceCapacity|"
    r"insufficient (instance )?capacity|unable to provision requested .*capacity",
    re.IGNORECASE,
)
_TYPE = re.compile(r"\bml\.[a-z0-9-]+\.[a-z0-9]+\b")
# The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances, ...
_QUOTA = re.compile(r"limit '(?P<quota>[^']+)' is (?P<limit>[0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A step of a job's life, as the service tells it.

    Attributes:
        status: Such as Starting, Downloading, Training, Uploading.
        since: UTC, ISO 8601.
        message: Why, or what goes on; may change while the step lasts.
    """

    status: str
    since: str
    message: str

    @property
    def words(self) -> str:
        """Returns the transition in one line."""
        return f"{self.status}: {self.message}" if self.message else self.status

    @property
    def event(self) -> Event:
        """Returns the transition as an event of a record."""
        return Event(when=self.since, what=self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJobState:
    """A training job as DescribeTrainingJob tells it.

    Attributes:
        status: InProgress, Completed, Failed, Stopping or Stopped.
        secondary: What it is doing, or why it stopped.
        reason: FailureReason, or nothing.
        groups: Instance groups by name: their type and count.
        began_at: Of the training itself, where it began: UTC, ISO 8601.
    """

    name: str
    arn: str
    status: str
    secondary: str
    reason: str
    transitions: tuple[Transition, ...]
    output_prefix: str
    model_uri: str | None
    groups: Mapping[str, tuple[str, int]]
    began_at: str | None
    ended_at: str | None

    @property
    def is_final(self) -> bool:
        """Tells whether the job has ended."""
        return self.status in FINAL

    @property
    def is_ending(self) -> bool:
        """Tells whether the job has ended, or is about to."""
        return self.is_final or self.status == "Stopping"

    @property
    def exit_code(self) -> int | None:
        """Returns the training command's exit code, where the reason tells it."""
        if self.status == "Completed":
            return 0
        found = _EXIT_CODE.search(self.reason)
        return int(found.group(1)) if found else None

    @property
    def url(self) -> str:
        """Returns the address of the console's page of the job."""
        return console_url(self.arn)


def job_state(answer: Mapping[str, Json]) -> TrainingJobState:
    """Returns the state in an answer of DescribeTrainingJob."""
    resources = mapping(answer.get("ResourceConfig"))
    groups = {
        _text(group.get("InstanceGroupName")): (
            _text(group.get("InstanceType")),
            _count(group.get("InstanceCount")),
        )
        for group in mappings(resources.get("InstanceGroups"))
    }
    if not groups and resources.get("InstanceType"):
        kind, count = _text(resources["InstanceType"]), _count(resources.get("InstanceCount"))
        groups = {"": (kind, count)}
    name = _text(answer.get("TrainingJobName"))
    prefix = _text(mapping(answer.get("OutputDataConfig")).get("S3OutputPath")).rstrip("/")
    return TrainingJobState(
        name=name,
        arn=_text(answer.get("TrainingJobArn")),
        status=_text(answer.get("TrainingJobStatus")),
        secondary=_text(answer.get("SecondaryStatus")),
        reason=_text(answer.get("FailureReason")),
        transitions=tuple(
            Transition(
                status=_text(item.get("Status")),
                since=_text(item.get("StartTime")),
                message=_text(item.get("StatusMessage")),
            )
            for item in mappings(answer.get("SecondaryStatusTransitions"))
        ),
        output_prefix=f"{prefix}/{name}/output",
        model_uri=_text(mapping(answer.get("ModelArtifacts")).get("S3ModelArtifacts")) or None,
        groups=groups,
        began_at=_text(answer.get("TrainingStartTime")) or None,
        ended_at=_text(answer.get("TrainingEndTime")) or None,
    )


def console_url(arn: str) -> str:
    """Returns the address of the console's page of a training job."""
    parts = arn.split(":")
    if len(parts) < 6:
        return ""
    partition, region, name = parts[1], parts[3], arn.rpartition("/")[2]
    domain = {
        "aws-cn": "console.amazonaws.cn",
        "aws-us-gov": "console.amazonaws-us-gov.com",
    }.get(partition, f"{region}.console.aws.amazon.com")
    return f"https://{domain}/sagemaker/home?region={region}#/jobs/{name}"


def lacks_capacity(reason: str) -> bool:
    """Returns whether a job failed because the service does not have the hosts."""
    return bool(_NO_CAPACITY.search(reason))


def no_capacity(
    reason: str, groups: Sequence[Group], *, job_name: str, next_best: str
) -> PlatformError:
    """Returns the error for a job that got no hosts: type, group, limit, what to take instead."""
    return PlatformError(
        f"SageMaker has no capacity for {_asked(reason, groups)}: {reason}",
        where=f"job {job_name}: the limit is what the region has free now, not a quota",
        fix=_instead("try later or in another region", next_best),
    )


def no_quota(message: str, groups: Sequence[Group], *, where: str, next_best: str) -> PlatformError:
    """Returns the error for a job above the account's quota: type, group, limit, another plan."""
    found = _QUOTA.search(message)
    limit = f"the quota '{found['quota']}' is {found['limit']}" if found else "a quota is too small"
    return PlatformError(
        f"{limit}, asked for: {_asked(message, groups)}: {message}",
        where=where,
        fix=_instead("raise it in Service Quotas (SageMaker, training job usage)", next_best),
    )


def _asked(message: str, groups: Sequence[Group]) -> str:
    """Returns the groups that a message is about: those of the type that it names, else all."""
    named = {bare_type(kind) for kind in _TYPE.findall(message)}
    meant = [g for g in groups if bare_type(g.instance_type) in named] or groups
    return ", ".join(f"{g.count} x {g.instance_type} (group {g.name})" for g in meant)


def _instead(advice: str, next_best: str) -> str:
    return f"{advice}, or take the next best plan: {next_best}" if next_best else advice


def _text(value: Json) -> str:
    return value if isinstance(value, str) else ""


def _count(value: Json) -> int:
    return value if isinstance(value, int) else 0
