"""SageMaker runs a job from a CreateTrainingJob request, which is a pure value."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stoker.errors import UsageError
from stoker.platforms.base import (
    MLFLOW_EXPERIMENT,
    MLFLOW_URI,
    MLFLOW_VARIABLES,
    TENSORBOARD,
    JobSpec,
    groups_of_channel,
    hyperparameters,
    run_environment,
)
from stoker.platforms.sagemaker.checks import (
    CODE_CHANNEL,
    TOKEN_CHANNEL,
    check_body,
    file_system,
    settings_of,
    without_none,
)
from stoker.records import Channel, Json, MetricDefinition, Role, SageMakerSettings

# Folders of the service in every container.
_HOME = "/opt/ml"
CHECKPOINTS = "/opt/ml/checkpoints"
# Of a profile alone: what the script saves meanwhile goes nowhere.
PROFILE_FOLDER = "/opt/ml/profile"
_INPUT = "/opt/ml/input/data"
REQUEST_TAG = "stoker:request-sha256"
WORKLOAD_TAG = "stoker:workload-sha256"
# A profile ends on its own; if it does not, the service ends it. Downloads count, too.
PROFILE_ALLOWANCE_SECONDS = 7200
_NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
# Of the launcher's line, by stoker.logs: progress steps=.. step_seconds=.. wait_seconds=..
PROGRESS_METRICS = (
    MetricDefinition(
        name="stoker:step_seconds", regex=rf" progress steps=[0-9]+ step_seconds={_NUMBER}"
    ),
    MetricDefinition(
        name="stoker:wait_seconds", regex=rf" progress steps=[0-9]+ .*wait_seconds={_NUMBER}"
    ),
)


def input_channels(job: JobSpec, *, token_folder: str, code: str | None) -> list[Json]:
    """Returns InputDataConfig of `job`.

    Args:
        job: The job.
        token_folder: Address of the folder with the object `token`.
        code: Address of the packed code, or of its folder, where there is one.

    Raises:
        UsageError: If a channel names a group that the job does not have.
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
            "groups: SageMaker takes groups at all channels or at none",
            where=f"key channels.{named}.groups",
            fix="leave the groups out",
        )
    # One channel with groups means all channels with groups.
    everyone = tuple(group.name for group in job.groups)
    return [_channel(name, channel, groups[name] or everyone) for name, channel in channels.items()]


def _channel(name: str, channel: Channel, groups: Sequence[str]) -> dict[str, Json]:
    disk = file_system(channel.uri)
    if disk:
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": disk}}
    wrapper = channel.record_wrapper
    if wrapper is None and channel.data_type == "AugmentedManifestFile":
        wrapper = "RecordIO"
    source: dict[str, Json] = {
        "S3DataType": channel.data_type,
        "S3Uri": channel.uri,
        "S3DataDistributionType": channel.distribution,
        "AttributeNames": list(channel.attribute_names) if channel.attribute_names else None,
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


def environment_of(
    job: JobSpec, settings: SageMakerSettings, *, code_uri: str | None
) -> dict[str, Json]:
    """Returns Environment of `job`: STOKER_* and the user's own.

    Raises:
        UsageError: If the user sets what stoker does.
    """
    told = run_environment(job)
    code = Path(_INPUT, CODE_CHANNEL, PurePosixPath(code_uri).name) if code_uri else None
    # What the launcher finds on its own takes no variable: the service allows 100.
    are_known = len(job.groups) == 1 or all(_role_by_name(g.name) == g.role for g in job.groups)
    # The run's id is the job's name, which the service tells each container.
    ours = replace(
        told,
        token_file=Path(_INPUT, TOKEN_CHANNEL, "token"),
        code_file=code,
        profile_file=Path(PROFILE_FOLDER, "profile.json") if told.profile else None,
        tensorboard=Path(_HOME, TENSORBOARD) if job.tracking.tensorboard else None,
        roles={} if are_known else told.roles,
    ).to_environ()
    theirs = {**_managed_mlflow(job), **job.environment, **settings.environment}
    taken = sorted(set(ours) & set(theirs))
    if taken:
        raise UsageError(
            f"{taken[0]} is set by stoker",
            where="key sagemaker.environment",
            fix="leave it out; the workload has keys for what it says",
        )
    return dict(sorted({**theirs, **ours}.items()))


def _managed_mlflow(job: JobSpec) -> dict[str, str]:
    """Returns where a script's own `mlflow.log_metric` writes to."""
    if not job.tracking.is_managed or job.settings.profile:
        return {}
    told = {MLFLOW_URI: job.tracking.mlflow, MLFLOW_EXPERIMENT: job.tracking.experiment}
    return {name: value for name, value in told.items() if value}


def _role_by_name(group: str) -> Role:
    """Returns the role by the group's name, as launch.topology does where nothing else is said."""
    return "data" if group.lower().startswith("data") else "dnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """A request holds the call that creates a job, and says where its token and code go first.

    Attributes:
        body: The whole CreateTrainingJob request; it holds nothing secret.
        token_uri: Object that submit() fills with the run's token, and that is deleted at the end.
        code_uri: Object that submit() fills with the packed folder `code_folder`.
        code_folder: Absent where the code is in the image, or packed already.
    """

    job: JobSpec
    body: Mapping[str, Json]
    token_uri: str
    code_uri: str | None = None
    code_folder: Path | None = None


def plan_request(job: JobSpec) -> SageMakerRequest:
    """Returns the request for `job`; reads only botocore's model, and calls no service.

    Raises:
        UsageError: If the service would refuse it, with the rule, the reason and a fix.
    """
    settings = settings_of(job)
    folder = f"{settings.output_uri.rstrip('/')}/{job.name}"
    code_uri, code_folder = _code(settings.source, folder)
    # A prefix would match other objects, too: where the folder is ours, it is the whole folder.
    code = f"{folder}/{CODE_CHANNEL}/" if code_folder else code_uri
    body: dict[str, Json] = {
        "TrainingJobName": job.name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": _algorithm(job, settings),
        "ResourceConfig": _resources(job, settings),
        "InputDataConfig": input_channels(
            job, token_folder=f"{folder}/{TOKEN_CHANNEL}/", code=code
        ),
        "OutputDataConfig": without_none(
            {"S3OutputPath": settings.output_uri.rstrip("/"), "KmsKeyId": settings.output_kms_key}
        ),
        "StoppingCondition": _stopping(job, settings),
        "Environment": environment_of(job, settings, code_uri=code_uri),
        "EnableNetworkIsolation": settings.network_isolation,
        "EnableInterContainerTrafficEncryption": settings.encrypt_traffic,
        **_optional(job, settings, folder=folder),
    }
    body["Tags"] = _tags(job, settings, body)
    check_body(body)
    return SageMakerRequest(
        job=job,
        body=body,
        token_uri=f"{folder}/{TOKEN_CHANNEL}/token",
        code_uri=code_uri if code_folder else None,
        code_folder=code_folder,
    )


def body_digest(body: Mapping[str, Json]) -> str:
    """Returns the tag `stoker:request-sha256`: a digest of the request without its tags."""
    # One of the tags is this digest.
    content = {key: value for key, value in body.items() if key != "Tags"}
    variables = content.get("Environment")
    if isinstance(variables, Mapping):
        known = {name: text for name, text in variables.items() if name not in MLFLOW_VARIABLES}
        content["Environment"] = known
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _algorithm(job: JobSpec, settings: SageMakerSettings) -> dict[str, Json]:
    metrics = settings.metric_definitions
    return {
        "TrainingImage": job.image,
        # The API wants one of the job; each channel has its own.
        "TrainingInputMode": "File",
        # Named, whatever the image's own ENTRYPOINT is: the launcher has to come first.
        "ContainerEntrypoint": list(settings.entrypoint),
        "ContainerArguments": list(job.command),
        "MetricDefinitions": [
            {"Name": metric.name, "Regex": metric.regex}
            for metric in (PROGRESS_METRICS if metrics is None else metrics)
        ],
    }


def _resources(job: JobSpec, settings: SageMakerSettings) -> dict[str, Json]:
    groups: list[Json] = [
        {
            "InstanceGroupName": group.name,
            "InstanceType": _service_type(group.instance_type),
            "InstanceCount": group.count,
        }
        for group in job.groups
    ]
    only = job.groups[0]
    hosts: dict[str, Json] = {"InstanceGroups": groups}
    if len(groups) == 1:
        hosts = {
            "InstanceType": _service_type(only.instance_type),
            "InstanceCount": only.count,
        }
    return without_none(
        {
            **hosts,
            "VolumeSizeInGB": settings.volume_gb,
            "VolumeKmsKeyId": settings.volume_kms_key,
            "KeepAlivePeriodInSeconds": settings.keep_alive_seconds or None,
        }
    )


def _service_type(name: str) -> str:
    return name if name.startswith("ml.") else f"ml.{name}"


def _code(source: str | None, folder: str) -> tuple[str | None, Path | None]:
    """Returns the address of the packed code, and the folder that is still to be packed."""
    if source is None:
        return None, None
    if source.startswith("s3://"):
        return source, None
    return f"{folder}/{CODE_CHANNEL}/code.tar.gz", Path(source)


def _stopping(job: JobSpec, settings: SageMakerSettings) -> dict[str, Json]:
    seconds = settings.max_run_seconds
    if job.settings.profile:
        seconds = min(seconds, int(job.settings.profile.budget_seconds) + PROFILE_ALLOWANCE_SECONDS)
    return without_none(
        {"MaxRuntimeInSeconds": seconds, "MaxWaitTimeInSeconds": settings.max_wait_seconds}
    )


def checkpoints_of(settings: SageMakerSettings, *, run: str) -> str | None:
    """Returns the address of a run's checkpoints; None where none are kept.

    A folder for each run: the service copies what is there to the hosts before the command starts,
    so that a run in another's folder would go on from a training that has ended.
    """
    if settings.resume_from or not settings.checkpoint_uri:
        return settings.resume_from
    return f"{settings.checkpoint_uri.rstrip('/')}/{run}"


def _optional(job: JobSpec, settings: SageMakerSettings, *, folder: str) -> dict[str, Json]:
    # A profile must not touch the training's checkpoints: it writes where it cannot harm.
    checkpoints, place = checkpoints_of(settings, run=job.run_name), CHECKPOINTS
    tracking: dict[str, Json] = {} if job.settings.profile else _tracking(job, folder=folder)
    if job.settings.profile:
        checkpoints, place = f"{folder}/profile", PROFILE_FOLDER
    network: dict[str, Json] | None = None
    if settings.vpc:
        network = {
            "SecurityGroupIds": list(settings.vpc.security_groups),
            "Subnets": list(settings.vpc.subnets),
        }
    return without_none(
        {
            "HyperParameters": hyperparameters(job.hyperparameters) or None,
            "VpcConfig": network,
            "CheckpointConfig": checkpoints and {"S3Uri": checkpoints, "LocalPath": place},
            **tracking,
            "EnableManagedSpotTraining": settings.spot or None,
            "RetryStrategy": {"MaximumRetryAttempts": settings.max_retries}
            if settings.max_retries
            else None,
        }
    )


def _tracking(job: JobSpec, *, folder: str) -> dict[str, Json]:
    told, place = job.tracking, f"{_HOME}/{TENSORBOARD}"
    managed: dict[str, Json] = {
        "MlflowResourceArn": told.mlflow,
        "MlflowExperimentName": told.experiment,
        # Of all tries of the run.
        "MlflowRunName": job.run_name,
    }
    return {
        "MlflowConfig": without_none(managed) if told.is_managed else None,
        "TensorBoardOutputConfig": {"S3OutputPath": f"{folder}/tensorboard", "LocalPath": place}
        if told.tensorboard
        else None,
    }


def _tags(job: JobSpec, settings: SageMakerSettings, body: Mapping[str, Json]) -> list[Json]:
    ours = {REQUEST_TAG: body_digest(body)}
    if job.settings.workload_sha256:
        ours[WORKLOAD_TAG] = job.settings.workload_sha256
    return [
        {"Key": key, "Value": value} for key, value in sorted({**settings.tags, **ours}.items())
    ]
