"""The CreateTrainingJob request of a job: a pure value."""

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
from stoker.platforms.patch import check_patch, mapping_of
from stoker.platforms.sagemaker.checks import (
    CODE_CHANNEL,
    TOKEN_CHANNEL,
    check_body,
    file_system,
    settings_of,
    without_none,
)
from stoker.records import Channel, Json, Role, SageMakerSettings, nearest
from stoker.records.base import mapping, mappings
from stoker.records.platforms import patch_document

# The service's folders in every container.
_HOME = "/opt/ml"
CHECKPOINTS = "/opt/ml/checkpoints"
# A profile's own: what the script saves meanwhile is not kept.
PROFILE_FOLDER = "/opt/ml/profile"
_INPUT = "/opt/ml/input/data"
REQUEST_TAG = "stoker:request-sha256"
WORKLOAD_TAG = "stoker:workload-sha256"
# If a profile does not end in time, the service ends it. Downloads count, too.
PROFILE_ALLOWANCE_SECONDS = 7200
_NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
# Of the launcher's line, by stoker.logs: progress steps=.. step_seconds=.. wait_seconds=..
PROGRESS_METRICS: Sequence[Mapping[str, str]] = (
    {
        "Name": "stoker:step_seconds",
        "Regex": rf" progress steps=[0-9]+ step_seconds={_NUMBER}",
    },
    {
        "Name": "stoker:wait_seconds",
        "Regex": rf" progress steps=[0-9]+ .*wait_seconds={_NUMBER}",
    },
)
DISK_GB = 100
# Survives a host that breaks, and ends what always breaks.
MAX_RETRIES = 2
# Paths of the request that `sagemaker.request` cannot set, and what to do instead.
RESERVED = {
    "TrainingJobName": "use --name",
    "RoleArn": "use sagemaker.role",
    "AlgorithmSpecification TrainingImage": "use the workload's key image",
    "AlgorithmSpecification AlgorithmName": "use the workload's key image",
    "AlgorithmSpecification ContainerEntrypoint": "use sagemaker.entrypoint",
    "AlgorithmSpecification ContainerArguments": "use the workload's key command",
    "AlgorithmSpecification TrainingInputMode": "use mode of the workload's key channels",
    "ResourceConfig Instance*": "hosts come from the plan",
    "ResourceConfig SelectedInstance*": "hosts come from the plan",
    f"InputDataConfig {TOKEN_CHANNEL}": "",
    f"InputDataConfig {CODE_CHANNEL}": "use sagemaker.source",
    "InputDataConfig * DataSource": "use the workload's key channels",
    "InputDataConfig * InputMode": "use mode of the workload's key channels",
    "InputDataConfig * RecordWrapperType": "use record_wrapper of the workload's key channels",
    "OutputDataConfig S3OutputPath": "use sagemaker.output_uri",
    "StoppingCondition MaxRuntimeInSeconds": "use sagemaker.max_run_seconds",
    "HyperParameters": "use the workload's key hyperparameters",
    "CheckpointConfig": "use sagemaker.checkpoint_uri",
    "MlflowConfig": "use the workload's key tracking",
    "TensorBoardOutputConfig": "use the workload's key tracking",
    "Environment STOKER_*": "use the workload's keys in place of variables of stoker",
    "Tags stoker:*": "choose another key",
}


def input_channels(job: JobSpec, *, token_folder: str, code: str | None) -> list[Json]:
    """Returns InputDataConfig of `job`.

    Args:
        token_folder: Address of the folder with the object `token`.
        code: Address of the packed code, or of its folder; None: it is in the image.

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


def environment_of(job: JobSpec, *, code_uri: str | None) -> dict[str, Json]:
    """Returns Environment of `job`: STOKER_* and the user's own."""
    told = run_environment(job)
    code = Path(_INPUT, CODE_CHANNEL, PurePosixPath(code_uri).name) if code_uri else None
    # What the launcher finds out takes no variable: the service allows 100.
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
    return {**_managed_mlflow(job), **job.environment, **ours}


def _managed_mlflow(job: JobSpec) -> dict[str, str]:
    """Returns the variables by which a script's `mlflow.log_metric` finds the managed MLflow."""
    if not job.tracking.is_managed or job.settings.profile:
        return {}
    told = {MLFLOW_URI: job.tracking.mlflow, MLFLOW_EXPERIMENT: job.tracking.experiment}
    return {name: value for name, value in told.items() if value}


def _role_by_name(group: str) -> Role:
    """Returns the role by the group's name, as launch.topology does by default."""
    return "data" if group.lower().startswith("data") else "dnn"


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """The call that creates a job, and the objects that are written before it.

    Attributes:
        body: The whole CreateTrainingJob request; it holds nothing secret.
        token_uri: Object for the run's token, deleted at the end.
        code_uri: Object for the packed folder `code_folder`.
        code_folder: None where the code is in the image, or packed already.
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
    made: dict[str, Json] = {
        "TrainingJobName": job.name,
        "RoleArn": settings.role,
        "AlgorithmSpecification": {
            "TrainingImage": job.image,
            # Required by the API; each channel has its own.
            "TrainingInputMode": "File",
            # Set, whatever the image's ENTRYPOINT is: the launcher has to come first.
            "ContainerEntrypoint": list(settings.entrypoint),
            "ContainerArguments": list(job.command),
            "MetricDefinitions": list(PROGRESS_METRICS),
        },
        "ResourceConfig": {**_hosts(job), "VolumeSizeInGB": DISK_GB},
        "InputDataConfig": input_channels(
            job, token_folder=f"{folder}/{TOKEN_CHANNEL}/", code=code
        ),
        "OutputDataConfig": {"S3OutputPath": settings.output_uri.rstrip("/")},
        "StoppingCondition": {"MaxRuntimeInSeconds": _max_run_seconds(job, settings)},
        "Environment": environment_of(job, code_uri=code_uri),
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
        "Tags": [],
        **_optional(job, settings, folder=folder),
        "RetryStrategy": {"MaximumRetryAttempts": MAX_RETRIES},
    }
    patch = patch_document(settings.request)
    check_patch(patch, made, key="sagemaker.request", reserved=RESERVED)
    body = mapping_of(made, patch)
    _check_channels(body, job)
    body["Environment"] = dict(sorted(mapping(body, "Environment").items()))
    tags: list[Json] = [*mappings(body, "Tags"), {"Key": REQUEST_TAG, "Value": body_digest(body)}]
    if job.settings.workload_sha256:
        tags.append({"Key": WORKLOAD_TAG, "Value": job.settings.workload_sha256})
    body["Tags"] = sorted(tags, key=lambda tag: str(mapping(tag).get("Key")))
    check_body(body)
    return SageMakerRequest(
        job=job,
        body=body,
        token_uri=f"{folder}/{TOKEN_CHANNEL}/token",
        code_uri=code_uri if code_folder else None,
        code_folder=code_folder,
    )


def _check_channels(body: Mapping[str, Json], job: JobSpec) -> None:
    for channel in mappings(body, "InputDataConfig"):
        name = str(channel["ChannelName"])
        if "DataSource" not in channel:
            raise UsageError(
                f"unknown channel {name}",
                where=f"key sagemaker.request.InputDataConfig[{name}]",
                fix=nearest(name, list(job.channels)),
            )


def body_digest(body: Mapping[str, Json]) -> str:
    """Returns a digest of the request without its tags, one of which it becomes."""
    content = {key: value for key, value in body.items() if key != "Tags"}
    variables = content.get("Environment")
    if isinstance(variables, Mapping):
        known = {name: text for name, text in variables.items() if name not in MLFLOW_VARIABLES}
        content["Environment"] = known
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hosts(job: JobSpec) -> dict[str, Json]:
    if len(job.groups) == 1:
        (only,) = job.groups
        return {"InstanceType": _service_type(only.instance_type), "InstanceCount": only.count}
    groups: list[Json] = [
        {
            "InstanceGroupName": group.name,
            "InstanceType": _service_type(group.instance_type),
            "InstanceCount": group.count,
        }
        for group in job.groups
    ]
    return {"InstanceGroups": groups}


def _service_type(name: str) -> str:
    return name if name.startswith("ml.") else f"ml.{name}"


def _code(source: str | None, folder: str) -> tuple[str | None, Path | None]:
    """Returns the address of the packed code, and the folder that is still to be packed."""
    if source is None:
        return None, None
    if source.startswith("s3://"):
        return source, None
    return f"{folder}/{CODE_CHANNEL}/code.tar.gz", Path(source)


def _max_run_seconds(job: JobSpec, settings: SageMakerSettings) -> int:
    seconds = settings.max_run_seconds
    if not job.settings.profile:
        return seconds
    return min(seconds, int(job.settings.profile.budget_seconds) + PROFILE_ALLOWANCE_SECONDS)


def checkpoints_of(settings: SageMakerSettings, *, run: str) -> str | None:
    """Returns the address of a run's checkpoints; None where none are kept.

    A folder for each run: the service copies its content to the hosts before the command starts,
    so that a run in another's folder would continue a training that has ended.
    """
    if settings.resume_from or not settings.checkpoint_uri:
        return settings.resume_from
    return f"{settings.checkpoint_uri.rstrip('/')}/{run}"


def _optional(job: JobSpec, settings: SageMakerSettings, *, folder: str) -> dict[str, Json]:
    checkpoints, place = checkpoints_of(settings, run=job.run_name), CHECKPOINTS
    if job.settings.profile:
        # Not the training's checkpoints, which a profile must not touch.
        checkpoints, place = f"{folder}/profile", PROFILE_FOLDER
    return without_none(
        {
            "HyperParameters": hyperparameters(job.hyperparameters) or None,
            "CheckpointConfig": checkpoints and {"S3Uri": checkpoints, "LocalPath": place},
            **({} if job.settings.profile else _tracking(job, folder=folder)),
        }
    )


def _tracking(job: JobSpec, *, folder: str) -> dict[str, Json]:
    told, place = job.tracking, f"{_HOME}/{TENSORBOARD}"
    managed: dict[str, Json] = {
        "MlflowResourceArn": told.mlflow,
        "MlflowExperimentName": told.experiment,
        # Shared by all attempts of the run.
        "MlflowRunName": job.run_name,
    }
    return {
        "MlflowConfig": without_none(managed) if told.is_managed else None,
        "TensorBoardOutputConfig": {"S3OutputPath": f"{folder}/tensorboard", "LocalPath": place}
        if told.tensorboard
        else None,
    }
