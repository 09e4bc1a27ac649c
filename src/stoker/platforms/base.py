"""Every platform can plan a job as a pure value, submit it, follow it and stop it."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from stoker.errors import PlatformError, TerminatedError, UsageError
from stoker.records import (
    Channel,
    Event,
    Group,
    Json,
    PlatformSettings,
    ProfileSettings,
    Role,
    Scalar,
    TrackingSettings,
    Training,
    Workload,
    nearest,
    read_json,
)
from stoker.records.base import Value
from stoker.settings import RunEnvironment

_ROLES: tuple[Role, ...] = ("dnn", "data")
# Variables of MLflow: who calls `mlflow.log_metric` writes into that run. They may differ from one
# attempt to the next (MLflow was away), and it is the same job.
MLFLOW_URI = "MLFLOW_TRACKING_URI"
MLFLOW_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
MLFLOW_RUN = "MLFLOW_RUN_ID"
MLFLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
MLFLOW_VARIABLES = frozenset((MLFLOW_URI, MLFLOW_EXPERIMENT, MLFLOW_RUN, MLFLOW_FILES))
# In SageMaker's layout of a host, and there its own default.
TENSORBOARD = "output/tensorboard"
# Folders, files and objects are called by these names: no name may lead out of a folder.
_RUN_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?")
# Not dots alone: `..` would be the folder above.
_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """Describes a training job, the same for all platforms.

    Attributes:
        name: Run id: letters, digits and dashes.
        run: Name of the run that the job is a further try of, whose checkpoints it goes on from;
            absent: its own.
        command: Program and arguments of the training.
        groups: The dnn group first.
        channels: Channels by name.
        hyperparameters: Put after the command.
        environment: More variables for the user's command.
        settings: What all processes of the run are told, except for what `groups` say.
        image: Image of all hosts, where the platform runs images.
        next_best: The decision's next plan in words, for whoever cannot get the chosen one.
        prices: Dollars an hour of one host by instance type, of those that are known.
        run_dir: Folder on this machine for logs and outputs of the run.
        tracking: Where the figures of the run are kept next to its records.
        records: Documents by name, from which another process can plan this job and follow it: a
            pipeline's last step, where the step that submitted it is lost. Empty: nobody does.
        what: Facts about what is run for its record, such as the commit of its code.
    """

    name: str
    command: tuple[str, ...]
    groups: tuple[Group, ...]
    run_dir: Path
    channels: Mapping[str, Channel] = field(default_factory=dict)
    hyperparameters: Mapping[str, Scalar] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: RunEnvironment = field(default_factory=RunEnvironment)
    image: str | None = None
    platform_settings: PlatformSettings = field(default_factory=PlatformSettings)
    next_best: str = ""
    prices: Mapping[str, float] = field(default_factory=dict)
    run: str | None = None
    tracking: TrackingSettings = field(default_factory=TrackingSettings)
    records: Mapping[str, str] = field(default_factory=dict)
    what: Mapping[str, Value] = field(default_factory=dict)

    @property
    def run_name(self) -> str:
        """Returns the name that all tries of the run share."""
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
        next_best: str = "",
    ) -> "JobSpec":
        """Returns the job that runs `workload` on `groups`; called `name`, else as `run_dir` is."""
        return cls(
            name=name or run_dir.name,
            command=workload.command,
            groups=tuple(groups),
            run_dir=run_dir,
            channels=workload.channels,
            hyperparameters=workload.hyperparameters,
            settings=RunEnvironment.of(workload, profile=profile),
            image=workload.image,
            platform_settings=workload,  # which inherits them
            next_best=next_best,
            tracking=tracking_of(workload),
        )


def tracking_of(workload: Workload) -> TrackingSettings:
    """Returns where a workload's figures are kept, with the name of its experiment."""
    told = workload.tracking
    return msgspec.structs.replace(told, experiment=told.experiment or workload.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """Tells how a job ended.

    Attributes:
        status: succeeded, failed or stopped.
        exit_code: The training command's own, where known.
        failure: The failure's words, where there are any.
        output_dir: Folder on this machine with the dnn leader's output/data, where it is known.
        model_uri: Where the model is, where that is known.
        job_url: The platform's own page of the job.
        data_group_release_seconds: From the end of the dnn leader to the end of the last data host,
            where the platform saw both.
        events: Only those that the platform saw; the leader's own are in its record.
        mlflow_run_id: Run that the platform has made in its own MLflow.
        billed_seconds: Seconds for which the platform bills each of the job's hosts; None where it
            does not say so.
        what: Facts for the record that the platform knows, such as the digest of the image.
    """

    status: Literal["succeeded", "failed", "stopped"]
    exit_code: int | None = None
    failure: str | None = None
    output_dir: Path | None = None
    data_group_release_seconds: float | None = None
    model_uri: str | None = None
    job_url: str | None = None
    events: tuple[Event, ...] = ()
    mlflow_run_id: str | None = None
    billed_seconds: float | None = None
    what: Mapping[str, Value] = field(default_factory=dict)


def leader_record(output_dir: Path | None) -> Training | None:
    """Returns the record that the leader's launcher left in its outputs; None if it cannot be read.

    Args:
        output_dir: Folder as in `JobEnd`.
    """
    if output_dir is None:
        return None
    try:
        return read_json(output_dir / "stoker" / "training.json", Training)
    except UsageError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A host's log comes line by line, without the line ends."""

    group: str
    host: str
    text: str


RequestT = TypeVar("RequestT")
_GivenT = TypeVar("_GivenT", contravariant=True)


class Run(Protocol):
    """A submitted job can be followed, waited for and stopped."""

    name: str

    def lines(self) -> Iterator[LogLine]:
        """Yields log lines of all hosts as they come; ends when the job has ended."""
        ...

    def wait(self) -> JobEnd:
        """Blocks until all hosts have ended."""
        ...

    def stop(self) -> None:
        """Asks the job to stop and ends what does not; may be called twice, never raises."""
        ...


@runtime_checkable
class ObservedRun(Protocol):
    """Some platforms measure how busy a run's hosts are; their runs can say so."""

    def load_words(self, sizes: Mapping[str, tuple[int, int]]) -> Sequence[str]:
        """Says how busy CPUs and GPUs were, one line a group, or why that cannot be read.

        Args:
            sizes: Instance type to its vCPUs and GPUs.
        """
        ...


@runtime_checkable
class ResumableRun(Protocol):
    """A job that goes on without this process can be left, for a later attempt to adopt it."""

    def leave(self) -> str:
        """Leaves the job as it is, unless it is to be stopped; blocks for some seconds at most.

        Returns:
            What becomes of the job, in a line; empty where it is to be stopped.
        """
        ...

    def remaining(self) -> PlatformError | None:
        """Returns the error for a job that `stop` could not end; None where it ended it."""
        ...

    def clean_up(self) -> None:
        """Deletes what the platform would keep for ever of a job that has ended; never raises."""
        ...


def leave_or_stop(run: Run, err: BaseException) -> None:
    """Stops a job whose follower ends with `err`; after a SIGTERM leaves one that may be adopted.

    Raises:
        TerminatedError: If the job was left, with words on what becomes of it.
    """
    if isinstance(err, TerminatedError) and isinstance(run, ResumableRun):
        words = run.leave()
        if words:
            raise TerminatedError(words) from err
    run.stop()


class Platform(Protocol[RequestT]):
    """A platform runs jobs: plan() is pure, submit() sends what plan() made."""

    name: str

    def plan(self, job: JobSpec) -> RequestT:
        """Returns the request for `job`, with every rule of the platform checked.

        Raises:
            UsageError: If the platform cannot run such a job, naming the rule.
        """
        ...

    def describe(self, request: RequestT) -> dict[str, Json]:
        """Returns the request as `--dry-run` prints it."""
        ...

    def submit(self, request: RequestT) -> Run:
        """Starts the job.

        Raises:
            PlatformError: If the platform refuses.
        """
        ...


@runtime_checkable
class ResumingPlatform(Protocol[_GivenT]):
    """A platform whose jobs outlive stoker can tell which plan an earlier attempt got hosts for."""

    def resumed(self, requests: Sequence[_GivenT]) -> int:
        """Returns which of a run's requests an earlier attempt has got hosts for; else 0.

        Raises:
            PlatformError: If the platform cannot be asked.
        """
        ...


@runtime_checkable
class RecoveringPlatform(Platform[RequestT], Protocol[RequestT]):
    """A platform that keeps what a run whose follower was lost is finished with."""

    def kept(self, request: RequestT) -> str:
        """Returns the record with which an earlier attempt ended; empty where there is none.

        Raises:
            PlatformError: If the platform cannot be asked.
        """
        ...

    def keep(self, request: RequestT, record: str) -> None:
        """Keeps the record of a job that has ended; empty: it left none. Never raises."""
        ...

    def is_cancelled(self, settings: PlatformSettings) -> bool:
        """Returns whether somebody has ended, or is ending, the run of the pipeline.

        Where nobody may ask, the run counts as one that nobody has ended: a job that is deleted in
        vain costs the training.

        Raises:
            PlatformError: If the platform cannot be asked.
        """
        ...

    def lost(
        self, name: str, settings: PlatformSettings, *, run_id: str
    ) -> Sequence[Mapping[str, str]]:
        """Returns the records (`JobSpec.records`) of jobs for which `keep` was not called.

        Raises:
            PlatformError: If the platform cannot be asked.
        """
        ...

    def adopting(self) -> "RecoveringPlatform[RequestT]":
        """Returns the platform for a last follower, which only adopts jobs, failed ones too."""
        ...


def groups_of_channel(name: str, channel: Channel, groups: Sequence[Group]) -> tuple[str, ...]:
    """Returns the names of the groups that get a channel; () for all of them.

    A channel names groups or roles.

    Raises:
        UsageError: If it names a group that the job does not have.
    """
    names = [group.name for group in groups]
    for named in channel.groups or ():
        if named not in names and named not in _ROLES:
            raise UsageError(
                f"there is no instance group {named}",
                where=f"key channels.{name}.groups",
                fix=nearest(named, [*names, *_ROLES]),
            )
    # In a job of one group the dnn group loads on its own, and gets what a data group would.
    if len(groups) == 1 or not channel.groups:
        return ()
    found = tuple(g.name for g in groups if g.name in channel.groups or g.role in channel.groups)
    # SageMaker takes groups at all channels or at none: a channel for everybody names none.
    return () if len(found) == len(groups) else found


def hyperparameters(values: Mapping[str, Scalar]) -> dict[str, str]:
    """Returns hyperparameters as SageMaker's API and hyperparameters.json hold them: texts only."""
    return {
        # SageMaker's toolkit, and stoker's launcher, decode each text as JSON again.
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in sorted(values.items())
    }


def check_container(job: JobSpec, entrypoint: Sequence[str], *, platform: str, key: str) -> None:
    """Refuses a job that no container can run.

    Args:
        entrypoint: Words before the job's command.
        platform: Its name, in errors.
        key: Key of its settings in the workload, in errors.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    if not job.image:
        raise UsageError(
            f"the job names no image, and {platform} runs only images",
            where=f"job {job.name}, key image",
            fix="build one with make image, push it, and set image to its address",
        )
    # Else the launcher would take options of the user's command for its own.
    if entrypoint[-1] != "--":
        raise UsageError(
            "the entry point must end with --, which the command follows: " + " ".join(entrypoint),
            where=f"key {key}.entrypoint",
            fix="let its last word be --",
        )


def check_run_name(name: str, *, most: int | None = None) -> None:
    """Refuses the name of a run that is not one, or has more characters than `most`.

    Raises:
        UsageError: Naming the option and what is allowed.
    """
    if not _RUN_NAME.fullmatch(name) or (most is not None and len(name) > most):
        raise UsageError(
            f"{name!r} is not a name for a run",
            where="option --name, or key name",
            fix="use letters, digits and dashes" + (f", {most} at most" if most else ""),
        )


def check_job(job: JobSpec) -> None:
    """Refuses a job that no platform runs.

    Raises:
        UsageError: If the name of the run, a group or a channel is not allowed, there is no
            command, the first group and no other is not the one that trains, two groups have one
            name, or the strategy cannot use the hosts of the dnn group.
    """
    check_run_name(job.name)
    if not job.command:
        raise UsageError(
            "no command to run",
            where=f"job {job.name}, key command",
            fix="name the command in the workload, or after --: -- python train.py",
        )
    _check_groups(job)
    for channel in job.channels:
        _check_name(channel, what="channel", where=f"key channels.{channel}")


def _check_groups(job: JobSpec) -> None:
    where = "the plan's groups"
    trainers = [group for group in job.groups if group.role == "dnn"]
    # Everybody takes the first group for the one that trains, and its first host for the leader.
    if len(trainers) != 1 or job.groups[0].role != "dnn":
        found = ", ".join(f"{group.name} ({group.role})" for group in job.groups)
        raise UsageError(
            f"a job trains on exactly one dnn group, and it comes first; found {found}",
            where=where,
            fix="for example --group dnn=1 --group data=2",
        )
    names = [group.name for group in job.groups]
    for name in names:
        _check_name(name, what="group", where=where)
        if names.count(name) > 1:
            raise UsageError(
                f"two groups have one name: {name}",
                where=where,
                fix="give each group a name of its own",
            )
    dnn = trainers[0]
    refusal = job.settings.strategy.refusal(
        instance_type=dnn.instance_type, processes_per_host=dnn.processes_per_host or 1
    )
    if refusal is not None:
        what, fix = refusal
        raise UsageError(what, where=f"key strategy, group {dnn.name}", fix=fix)


def _check_name(name: str, *, what: str, where: str) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a name for a {what}",
            where=where,
            fix="use letters, digits, dots, dashes and underscores",
        )


def run_environment(job: JobSpec) -> RunEnvironment:
    """Returns what a launcher of `job` is told on any platform; each adds paths and names."""
    return replace(
        job.settings,
        roles={group.name: group.role for group in job.groups},
        workers={
            group.role: group.workers_per_host
            for group in job.groups
            if group.workers_per_host is not None
        },
        processes_per_host=job.groups[0].processes_per_host,
    )
