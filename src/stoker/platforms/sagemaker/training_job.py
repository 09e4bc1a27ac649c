"""The CreateTrainingJob request of a job, before the user's patch: a pure value."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from stoker.environment import RunEnvironment
from stoker.errors import UsageError
from stoker.platforms.base import (
    MLFLOW_EXPERIMENT,
    MLFLOW_URI,
    TENSORBOARD,
    JobSpec,
    groups_of_channel,
    run_environment,
)
from stoker.platforms.sagemaker.job_checks import CODE_CHANNEL, TOKEN_CHANNEL, file_system
from stoker.platforms.sagemaker.preferences import hosts_of
from stoker.records import Channel, Json, SageMakerSettings
from stoker.records.base import Document
from stoker.records.hyperparameters import encoded
from stoker.records.secrets import fetch_variables

# The service's folders in every container.
_HOME = "/opt/ml"
CHECKPOINTS = "/opt/ml/checkpoints"
# Of a profile. What the script saves in CHECKPOINTS during it is not kept.
PROFILE_FOLDER = "/opt/ml/profile"
_INPUT = "/opt/ml/input/data"
# After its budget and this time, the service ends a profile. Downloads are included.
PROFILE_ALLOWANCE_SECONDS = 7200
_NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
# They read the launcher's log lines: progress steps=.. step_seconds=.. wait_seconds=.. spent_usd=..
# and gpu_load count=.. gpu_utilization=..
PROGRESS_METRICS: Sequence[Mapping[str, str]] = tuple(
    {"Name": f"stoker:{key}", "Regex": rf" {line}=[0-9]+ {between}{key}={_NUMBER}"}
    for line, between, key in (
        ("progress steps", "", "step_seconds"),
        ("progress steps", ".*", "wait_seconds"),
        ("progress steps", ".*", "whole_step_seconds"),
        ("progress steps", ".*", "spent_usd"),
        ("gpu_load count", "", "gpu_utilization"),
    )
)
DISK_GB = 100
# For a host that breaks, but not for a job that always breaks.
MAX_RETRIES = 2


def training_job(
    job: JobSpec,
    settings: SageMakerSettings,
    *,
    folder: str,
    code: str | None,
    code_uri: str | None,
) -> dict[str, Json]:
    """Returns the body of CreateTrainingJob, before the user's patch.

    Args:
        job: The job.
        settings: Its settings for SageMaker.
        folder: Address of the job's folder for outputs.
        code: Address of the channel that brings the code.
        code_uri: Address of the code's package.
    """
    environment = run_environment(job)
    hyperparameters = encoded(job.hyperparameters)
    hosts = hosts_of(job)
    variables = environment_of(job, environment, code_uri=code_uri)
    # The service adds the training job's name, which Batch makes: the run's rights are on its own.
    output_uri = folder if settings.queue else settings.output_uri.rstrip("/")
    max_run_seconds = settings.max_run_seconds
    if job.settings.profile:
        allowed = int(job.settings.profile.budget_seconds) + PROFILE_ALLOWANCE_SECONDS
        max_run_seconds = min(max_run_seconds, allowed)
    return {
        "TrainingJobName": job.name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            # Required by the API; each channel has its own.
            "TrainingInputMode": "File",
            # In place of the image's ENTRYPOINT: the launcher has to come first.
            "ContainerEntrypoint": list(settings.entrypoint),
            "ContainerArguments": list(job.command),
            "MetricDefinitions": list(PROGRESS_METRICS),
        },
        "ResourceConfig": {**hosts, "VolumeSizeInGB": DISK_GB},
        "InputDataConfig": input_channels(
            job, token_folder=f"{folder}/{TOKEN_CHANNEL}/", code=code
        ),
        "OutputDataConfig": {"S3OutputPath": output_uri},
        "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
        "Environment": variables,
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
        "Tags": [],
        **_optional(job, settings, folder=folder),
        **({"HyperParameters": hyperparameters} if hyperparameters else {}),
        "RetryStrategy": {"MaximumRetryAttempts": MAX_RETRIES},
    }


def input_channels(job: JobSpec, *, token_folder: str, code: str | None) -> list[Json]:
    """Returns the InputDataConfig of `job`.

    Args:
        token_folder: Address of the folder with the object `token`.
        code: Address of the packed code, or of its folder; None: the code is in the image.
    """
    own = {TOKEN_CHANNEL: Channel(uri=token_folder)}
    if code:
        own[CODE_CHANNEL] = Channel(uri=code)
    channels = {**dict(sorted(job.channels.items())), **own}
    groups = {
        name: groups_of_channel(name, channel, job.groups) for name, channel in channels.items()
    }
    if not any(groups.values()):
        return [_channel(name, channel, ()) for name, channel in channels.items()]
    mounted = next((name for name, each in channels.items() if file_system(each.uri)), None)
    if mounted:
        named = next(name for name, found in groups.items() if found)
        raise UsageError(
            f"channel {mounted} is a file system, which all groups mount, but {named} names "
            "groups: on SageMaker, all channels name groups or none does",
            where=f"key channels.{named}.groups",
            fix="leave the groups out",
        )
    # If one channel names groups, all have to.
    everyone = tuple(group.name for group in job.groups)
    return [_channel(name, channel, groups[name] or everyone) for name, channel in channels.items()]


def _channel(name: str, channel: Channel, groups: Sequence[str]) -> dict[str, Json]:
    if disk := file_system(channel.uri):
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": disk}}
    wrapper = channel.record_wrapper
    if wrapper is None and channel.data_type == "AugmentedManifestFile":
        wrapper = "RecordIO"
    source: dict[str, Json] = {
        "S3DataType": channel.data_type,
        "S3Uri": channel.uri,
        "S3DataDistributionType": channel.distribution,
        "AttributeNames": list(channel.attribute_names or ()) or None,
        "InstanceGroupNames": list(groups) or None,
    }
    return without_none(
        {
            "ChannelName": name,
            "DataSource": {"S3DataSource": without_none(source)},
            "InputMode": channel.mode,
            "RecordWrapperType": wrapper,
        }
    )


def without_none(values: Document) -> dict[str, Json]:
    return {key: value for key, value in values.items() if value is not None}


def environment_of(
    job: JobSpec, environment: RunEnvironment, *, code_uri: str | None
) -> dict[str, Json]:
    """Returns the Environment of `job`: STOKER_* and the user's own.

    Args:
        environment: What all platforms tell its hosts.
        code_uri: Address of the code's package; None: the code is in the image.
    """
    code = Path(_INPUT, CODE_CHANNEL, PurePosixPath(code_uri).name) if code_uri else None
    # The service allows 100 variables: roles are left out if the launcher finds them by the names,
    # and so is the run's id, which is the job's name.
    by_name = ("data" if g.name.lower().startswith("data") else "dnn" for g in job.groups)
    are_known = len(job.groups) == 1 or [*by_name] == [group.role for group in job.groups]
    settings = job.platform_settings.sagemaker
    is_queued = settings is not None and settings.queue is not None
    mlflow = _managed_mlflow(job)
    ours = replace(
        environment,
        # Batch names the training job.
        run_id=job.name if is_queued else environment.run_id,
        requirements=settings.requirements if settings and code else "auto",
        token_file=Path(_INPUT, TOKEN_CHANNEL, "token"),
        code_file=code,
        profile_file=Path(PROFILE_FOLDER, "profile.json") if environment.profile else None,
        tensorboard=Path(_HOME, TENSORBOARD) if job.tracking.tensorboard else None,
        roles={} if are_known else environment.roles,
    ).to_environ()
    return {**mlflow, **job.environment, **fetch_variables(job.secrets), **ours}


def _managed_mlflow(job: JobSpec) -> dict[str, str]:
    """Returns the variables with which `mlflow.log_metric` finds the managed MLflow."""
    variables = {MLFLOW_URI: job.tracking.mlflow, MLFLOW_EXPERIMENT: job.tracking.experiment}
    is_used = job.tracking.is_managed and not job.settings.profile
    return {name: value for name, value in variables.items() if value and is_used}


def checkpoints_of(settings: SageMakerSettings, *, run: str) -> str | None:
    """Returns the address of a run's checkpoints; None if they are not kept."""
    # A folder for each run: in another run's it would continue a training run that has ended.
    if settings.resume_from or not settings.checkpoint_uri:
        return settings.resume_from
    return f"{settings.checkpoint_uri.rstrip('/')}/{run}"


def _optional(job: JobSpec, settings: SageMakerSettings, *, folder: str) -> dict[str, Json]:
    if job.settings.profile is not None:
        # Not the training's checkpoints, which a profile must not touch, nor its figures.
        return {"CheckpointConfig": {"S3Uri": f"{folder}/profile", "LocalPath": PROFILE_FOLDER}}
    tracking = job.tracking
    optional: dict[str, Json] = {}
    if checkpoints := checkpoints_of(settings, run=job.run_name):
        optional["CheckpointConfig"] = {"S3Uri": checkpoints, "LocalPath": CHECKPOINTS}
    if tracking.is_managed:
        managed: dict[str, Json] = {
            "MlflowResourceArn": tracking.mlflow,
            "MlflowExperimentName": tracking.experiment,
            # Shared by all attempts of the run.
            "MlflowRunName": job.run_name,
        }
        optional["MlflowConfig"] = without_none(managed)
    if tracking.tensorboard:
        optional["TensorBoardOutputConfig"] = {
            "S3OutputPath": f"{folder}/tensorboard",
            "LocalPath": f"{_HOME}/{TENSORBOARD}",
        }
    return optional
