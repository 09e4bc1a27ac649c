"""The base classes of platforms and runs: plan a job as a pure value, submit, follow, stop it."""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Generic, Self, TypeVar

import msgspec

from stoker.environment import RunSettings
from stoker.errors import (
    JobStoppedError,
    PlatformError,
    StokerError,
    TerminatedError,
    UsageError,
)
from stoker.records import (
    Channel,
    Event,
    Group,
    Json,
    PlatformSettings,
    ProfileSettings,
    Role,
    SecretSource,
    TrackingSettings,
    Training,
    Workload,
    nearest,
    read_json,
)
from stoker.records.base import Document
from stoker.records.hyperparameters import values_of
from stoker.records.training import EndState

_ROLES: tuple[Role, ...] = ("dnn", "data")
# Variables by which `mlflow.log_metric` finds its run. They may differ between attempts of one job.
MLFLOW_URI = "MLFLOW_TRACKING_URI"
MLFLOW_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
MLFLOW_RUN = "MLFLOW_RUN_ID"
MLFLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
# A request that differs in these only is of the same job: MLflow may be unreachable in one attempt.
NOT_COMPARED = frozenset((MLFLOW_URI, MLFLOW_EXPERIMENT, MLFLOW_RUN, MLFLOW_FILES))
# A channel in inputdataconfig.json, where SageMaker does not write it.
PLAIN_CHANNEL: Document = {
    "TrainingInputMode": "File",
    "S3DistributionType": "FullyReplicated",
    "RecordWrapperType": "None",
}
# Of a job whose platform has no hosts, at most: the first one and its alternatives.
MAX_PLANS = 5
# These names become paths and object names.
_RUN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
# Not dots alone, such as `..`.
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A training job, the same for all platforms.

    Attributes:
        name: Run id: letters, digits and dashes.
        run: Name of the run that this job retries and whose checkpoints it resumes; absent: `name`.
        groups: The dnn group first.
        hyperparameters: Put after the command, in this order.
        environment: Further variables of the user's command.
        secrets: Where each of its secret variables is kept.
        settings: Settings of all processes of the run, except for what `groups` say.
        run_dir: Local folder for logs and outputs of the run.
        lineage: What is known of the run's origin before it starts.
    """

    name: str
    command: tuple[str, ...]
    groups: tuple[Group, ...]
    run_dir: Path
    channels: Mapping[str, Channel] = field(default_factory=dict)
    hyperparameters: Document = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, SecretSource] = field(default_factory=dict)
    settings: RunSettings = field(default_factory=RunSettings)
    image: str | None = None
    platform_settings: PlatformSettings = field(default_factory=PlatformSettings)
    run: str | None = None
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    lineage: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_name(self) -> str:
        """The name that all tries of the run share."""
        return self.run or self.name

    @classmethod
    def of(
        cls,
        workload: Workload,
        *,
        groups: Sequence[Group],
        run_dir: Path,
        name: str | None = None,
        profile: ProfileSettings | None = None,
    ) -> "JobSpec":
        """Returns the job that runs `workload` on `groups`; `name` is by default the folder's."""
        return cls(
            name=name or run_dir.name,
            command=workload.command,
            groups=tuple(groups),
            run_dir=run_dir,
            channels=workload.channels,
            hyperparameters=values_of(workload.hyperparameters),
            environment=workload.environment,
            secrets=workload.secret_sources,
            settings=RunSettings.of(workload, profile=profile),
            image=workload.image,
            platform_settings=workload,  # which inherits them
            tracking=tracking_of(workload),
        )


def tracking_of(workload: Workload) -> TrackingSettings:
    """Returns a workload's tracking settings, with the name of its experiment."""
    tracking = workload.tracking
    return msgspec.structs.replace(tracking, experiment=tracking.experiment or workload.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job ended.

    Attributes:
        exit_code: Exit code of the training command, where known.
        output_dir: Local folder with the dnn leader's output/data.
        events: Events that only the platform saw; the leader's are in its record.
        mlflow_run_id: Run that the platform created in its own MLflow.
        host_seconds: Time of all hosts of each group, in seconds, where known.
        lineage: What the platform knows of the run's origin, such as the image's digest.
        unfetched: Address of the leader's outputs, where they could not be read.
    """

    status: EndState
    exit_code: int | None = None
    failure: str | None = None
    output_dir: Path | None = None
    model_uri: str | None = None
    job_url: str | None = None
    events: tuple[Event, ...] = ()
    mlflow_run_id: str | None = None
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    lineage: Mapping[str, str] = field(default_factory=dict)
    unfetched: str | None = None


def leader_record(output_dir: Path | None) -> Training | None:
    """Returns the record in the leader's outputs (`JobEnd.output_dir`), if readable."""
    if output_dir is None:
        return None
    try:
        return read_json(output_dir / "stoker" / "training.json", Training)
    except UsageError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a host's log, without its end."""

    group: str
    host: str
    text: str


RequestT = TypeVar("RequestT")


class Run(ABC):
    """A submitted job.

    Attributes:
        name: Name of the job on its platform.
        outlives_stoker: Whether it continues without this process, so that a later attempt can
            adopt it.
    """

    name: str
    outlives_stoker: ClassVar[bool] = False

    @abstractmethod
    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts as they come; ends when the job has ended."""

    @abstractmethod
    def wait(self) -> JobEnd:
        """Blocks until all hosts have ended."""

    @abstractmethod
    def stop(self) -> None:
        """Stops the job, by force where needed; may be called twice, never raises."""

    def leave(self) -> str:
        """Leaves the job running unless it is to be stopped; blocks for some seconds at most.

        Returns what happens to it, in one line; empty where it is to be stopped.
        """
        return ""

    def remaining(self) -> PlatformError | None:
        """The error for a job that `stop` could not end, or None."""
        return None


def leave_or_stop(
    run: Run, err: BaseException, *, may_stop: Callable[[], bool] = lambda: True
) -> None:
    """Decides what becomes of a job whose follower ends with `err`: the one place that does.

    A job that outlives this process is stopped only by a person (Ctrl-C, then asked by `may_stop`),
    a written rule (JobStoppedError), or its pipeline run's cancellation. Any other job is stopped.

    Raises:
        KeyboardInterrupt: After Ctrl-C, with words on a job that keeps running.
        TerminatedError: After SIGTERM, the same. Other errors get these words.
    """
    if not run.outlives_stoker:
        run.stop()
        return
    is_wanted = isinstance(err, JobStoppedError)
    if isinstance(err, KeyboardInterrupt):
        try:
            is_wanted = may_stop()
        except TerminatedError as later:
            err = later
    words = "" if is_wanted else run.leave()
    if not words:
        run.stop()
        left = run.remaining()
        if left is None or isinstance(err, Exception):
            return
        words = "; ".join(filter(None, (left.what, left.fix)))
    match err:
        case KeyboardInterrupt() | TerminatedError():
            raise type(err)(words) from err
        case StokerError():
            # A follower that lost sight of the job says so itself.
            if words not in err.fix:
                err.fix = "; ".join(filter(None, (err.fix, words)))
        case _:
            err.add_note(words)


class Platform(ABC, Generic[RequestT]):
    """A platform runs jobs: plan() is pure, submit() sends what plan() made.

    A new one defines the three abstract methods, and those of the others for which it can do more
    than the default. How it is added: `stoker.platforms`.

    Attributes:
        name: As in workloads.
    """

    name: str

    @classmethod
    def of(cls, settings: PlatformSettings | None) -> Self:
        """Returns the platform as a workload's settings describe it; None: of no workload."""
        return cls()

    @abstractmethod
    def plan(self, job: JobSpec) -> RequestT:
        """Returns the request for `job`; raises UsageError for a broken rule of the platform."""

    @abstractmethod
    def describe(self, request: RequestT) -> dict[str, Json]:
        """Returns the request as `--dry-run --json` prints it."""

    @abstractmethod
    def submit(self, request: RequestT) -> Run:
        """Starts the job; raises PlatformError if the platform refuses."""

    def manifest(self, request: RequestT) -> str:
        """Returns the request as `--dry-run` prints it, for the platform's own tool if any."""
        return json.dumps(self.describe(request), indent=2)

    # Jobs that outlive stoker.

    def resumed(self, requests: Sequence[RequestT]) -> int:
        """Returns the index of the request for which an earlier attempt got hosts; else 0."""
        return 0

    def clean_up(self, name: str, settings: PlatformSettings, *, run_id: str = "") -> str:
        """Deletes what is left of a run's jobs; returns what that was, empty without any.

        Args:
            name: Name of the run.
            settings: The workload, whose name identifies its profile's job.
            run_id: Id of the pipeline's run, whose profile may be a job, too.
        """
        return ""


def groups_of_channel(name: str, channel: Channel, groups: Sequence[Group]) -> tuple[str, ...]:
    """Returns the names of the groups that get a channel; raises UsageError for an unknown one."""
    names = [group.name for group in groups]
    for named in channel.groups or ():
        if named not in names and named not in _ROLES:
            raise UsageError(
                f"unknown instance group {named}",
                where=f"key channels.{name}.groups",
                fix=nearest(named, [*names, *_ROLES]),
            )
    # A single group loads the data too, and gets every channel.
    if len(groups) == 1 or not channel.groups:
        return tuple(names)
    return tuple(g.name for g in groups if g.name in channel.groups or g.role in channel.groups)


def channels_of_group(job: JobSpec, group: str) -> dict[str, Channel]:
    """Returns a group's channels, by name."""
    channels = sorted(job.channels.items())
    return {name: c for name, c in channels if group in groups_of_channel(name, c, job.groups)}


def check_container(job: JobSpec, *, platform: str) -> None:
    """Refuses a job that no container can run."""
    if not job.image:
        raise UsageError(
            f"no image: {platform} runs only images",
            where=f"job {job.name}, key image",
            fix="build one with make image, push it, and set image to its address",
        )


def check_run_name(name: str, *, most: int | None = None) -> None:
    """Raises a UsageError for an invalid run name, or one longer than `most` characters."""
    if not _RUN_NAME.fullmatch(name) or (most is not None and len(name) > most):
        raise UsageError(
            f"invalid run name {name!r}",
            where="option --name, or key name",
            fix="use letters, digits and dashes" + (f", {most} at most" if most else ""),
        )


def check_job(job: JobSpec) -> None:
    """Raises UsageError for a job that no platform runs: its names and its groups."""
    check_run_name(job.name)
    for name, channel in job.channels.items():
        _check_name(name, what="channel", where=f"key channels.{name}")
        groups_of_channel(name, channel, job.groups)
    where = "the plan's groups"
    # All platforms take the first group's first host for the leader.
    if [group.role for group in job.groups] != ["dnn", *["data"] * (len(job.groups) - 1)]:
        raise UsageError(
            "a job needs exactly one dnn group, as its first group",
            where=where,
            fix="for example --group dnn=1 --group data=2",
        )
    for group in job.groups:
        _check_name(group.name, what="group", where=where)


def _check_name(name: str, *, what: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"invalid {what} name {name!r}",
            where=where,
            fix="use letters, digits, dots, dashes and underscores",
        )


def run_settings(job: JobSpec) -> RunSettings:
    """Returns the launcher's settings of `job`; each platform adds paths."""
    return replace(
        job.settings,
        run_id=job.name,
        roles={group.name: group.role for group in job.groups},
        workers={g.role: g.workers_per_host for g in job.groups if g.workers_per_host is not None},
        processes_per_host=job.groups[0].processes_per_host,
    )
