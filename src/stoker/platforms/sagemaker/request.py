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
    NOT_COMPARED,
    TENSORBOARD,
    JobSpec,
    groups_of_channel,
    run_environment,
)
from stoker.platforms.patch import check_patch, mapping_of
from stoker.platforms.sagemaker.batch_queue import queue_request
from stoker.platforms.sagemaker.checks import (
    CODE_CHANNEL,
    TOKEN_CHANNEL,
    check_body,
    check_secrets,
    file_system,
    settings_of,
    without_none,
)
from stoker.platforms.sagemaker.pending import pending_limit
from stoker.platforms.sagemaker.preferences import choices_of, preferred_hosts
from stoker.records import Channel, Json, SageMakerSettings, nearest
from stoker.records.base import Document, mapping, mappings
from stoker.records.hyperparameters import encoded
from stoker.records.platforms import patch_document
from stoker.records.secrets import fetch_variables

# The service's folders in every container.
_HOME = "/opt/ml"
CHECKPOINTS = "/opt/ml/checkpoints"
# Of a profile. What the script saves in CHECKPOINTS during it is not kept.
PROFILE_FOLDER = "/opt/ml/profile"
_INPUT = "/opt/ml/input/data"
REQUEST_TAG = "stoker:request-sha256"
WORKLOAD_TAG = "stoker:workload-sha256"
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
# Paths of the request that `sagemaker.request` cannot set, and what to do instead.
RESERVED = {
    "TrainingJobName": "use --name",
    "RoleArn": "use sagemaker.role",
    "AlgorithmSpecification TrainingImage": "use the workload's key image",
    "AlgorithmSpecification AlgorithmName": "use the workload's key image",
    "AlgorithmSpecification ContainerEntrypoint": "use sagemaker.entrypoint",
    "AlgorithmSpecification ContainerArguments": "use the workload's key command",
    "AlgorithmSpecification TrainingInputMode": "use mode of the workload's key channels",
    "ResourceConfig Instance*": "the plan decides on the hosts",
    "ResourceConfig SelectedInstance*": "the plan decides on the hosts",
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
    "Environment STOKER_*": "use the workload's keys instead of stoker's variables",
    "Tags stoker:*": "choose another key",
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
    """Returns the Environment of `job`: STOKER_* and the user's own."""
    environment = run_environment(job)
    code = Path(_INPUT, CODE_CHANNEL, PurePosixPath(code_uri).name) if code_uri else None
    # The service allows 100 variables: roles are left out if the launcher finds them by the names,
    # and so is the run's id, which is the job's name.
    by_name = ("data" if g.name.lower().startswith("data") else "dnn" for g in job.groups)
    are_known = len(job.groups) == 1 or [*by_name] == [group.role for group in job.groups]
    settings = job.platform_settings.sagemaker
    is_queued = settings is not None and settings.queue is not None
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
    return {**_managed_mlflow(job), **job.environment, **fetch_variables(job.secrets), **ours}


def _managed_mlflow(job: JobSpec) -> dict[str, str]:
    """Returns the variables with which `mlflow.log_metric` finds the managed MLflow."""
    variables = {MLFLOW_URI: job.tracking.mlflow, MLFLOW_EXPERIMENT: job.tracking.experiment}
    is_used = job.tracking.is_managed and not job.settings.profile
    return {name: value for name, value in variables.items() if value and is_used}


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """The call that creates a job, and the objects that are written before it.

    Attributes:
        body: CreateTrainingJob's, without secrets.
        queued: SubmitServiceJob's, which contains it; None: the job starts at once.
        token_uri: Address of the run's token, which is deleted at the end.
        code_uri: Address of the packed folder `code_folder`.
        code_folder: None if the code is in the image, or already packed.
    """

    job: JobSpec
    body: Document
    queued: Document | None = None
    token_uri: str
    code_uri: str | None = None
    code_folder: Path | None = None


def plan_request(job: JobSpec) -> SageMakerRequest:
    """Returns the request for `job`, without a call; raises UsageError for one to be refused."""
    settings = settings_of(job)
    folder = f"{settings.output_uri.rstrip('/')}/{job.name}"
    code_uri = code = settings.source
    code_folder = None
    if code_uri is not None and not code_uri.startswith("s3://"):
        code_folder = Path(code_uri)
        code_uri = f"{folder}/{CODE_CHANNEL}/code.tar.gz"
        # The whole folder: as a prefix, an object's name could match other objects, too.
        code = f"{folder}/{CODE_CHANNEL}/"
    planned = _training_job(job, settings, folder=folder, code=code, code_uri=code_uri)
    patch = patch_document(settings.request)
    check_patch(patch, planned, key="sagemaker.request", reserved=RESERVED)
    body = mapping_of(planned, patch)
    for channel in mappings(body, "InputDataConfig"):
        if "DataSource" not in channel:
            name = str(channel["ChannelName"])
            raise UsageError(
                f"unknown channel {name}",
                where=f"key sagemaker.request.InputDataConfig[{name}]",
                fix=nearest(name, list(job.channels)),
            )
    check_secrets(job, settings, mapping(body, "Environment"))
    body["Environment"] = dict(sorted(mapping(body, "Environment").items()))
    body["Tags"] = _tags(body, job)
    _add_pending_limit(body, job, settings)
    check_body(body)
    queued = None
    if settings.queue:
        queued = queue_request(
            settings.queue, body, has_checkpoints=bool(body.get("CheckpointConfig"))
        )
    return SageMakerRequest(
        job=job,
        body=body,
        queued=queued,
        token_uri=f"{folder}/{TOKEN_CHANNEL}/token",
        code_uri=code_uri if code_folder else None,
        code_folder=code_folder,
    )


def _training_job(
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
        "ResourceConfig": {**_hosts(job), "VolumeSizeInGB": DISK_GB},
        "InputDataConfig": input_channels(
            job, token_folder=f"{folder}/{TOKEN_CHANNEL}/", code=code
        ),
        "OutputDataConfig": {"S3OutputPath": output_uri},
        "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
        "Environment": environment_of(job, code_uri=code_uri),
        "EnableNetworkIsolation": False,
        "EnableInterContainerTrafficEncryption": False,
        "Tags": [],
        **_optional(job, settings, folder=folder),
        "RetryStrategy": {"MaximumRetryAttempts": MAX_RETRIES},
    }


def _tags(body: Document, job: JobSpec) -> list[Json]:
    """Returns the tags of a request, by their keys, with those by which it is found again."""
    tags: list[Json] = [*mappings(body, "Tags"), {"Key": REQUEST_TAG, "Value": body_digest(body)}]
    if job.settings.workload_sha256:
        tags.append({"Key": WORKLOAD_TAG, "Value": job.settings.workload_sha256})
    return sorted(tags, key=lambda tag: str(mapping(tag).get("Key")))


def _add_pending_limit(body: dict[str, Json], job: JobSpec, settings: SageMakerSettings) -> None:
    """Lets the service wait for hosts as long as stoker would; a queue and a profile do not."""
    if settings.queue or job.settings.profile:
        return
    wait_seconds = job.wait_seconds
    if wait_seconds is None:
        wait_seconds = 60.0 * job.platform_settings.on_no_capacity.wait_minutes
    limit = pending_limit(body, wait_seconds=wait_seconds)
    if limit is not None:
        stopping = mapping(body, "StoppingCondition")
        body["StoppingCondition"] = {**stopping, "MaxPendingTimeInSeconds": limit}


def body_digest(body: Document) -> str:
    """Returns a digest of the request without its tags, where the digest is kept."""
    content = {key: value for key, value in body.items() if key != "Tags"}
    variables = mapping(body, "Environment").items()
    content["Environment"] = {name: text for name, text in variables if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hosts(job: JobSpec) -> dict[str, Json]:
    choices = choices_of(job)
    if len(choices) > 1:
        return preferred_hosts(choices)
    groups: list[dict[str, Json]] = [
        {
            "InstanceGroupName": group.name,
            "InstanceType": f"ml.{group.instance_type.removeprefix('ml.')}",
            "InstanceCount": group.count,
        }
        for group in job.groups
    ]
    if len(groups) > 1:
        return {"InstanceGroups": groups}
    del groups[0]["InstanceGroupName"]
    return groups[0]


def checkpoints_of(settings: SageMakerSettings, *, run: str) -> str | None:
    """Returns the address of a run's checkpoints; None if they are not kept."""
    # A folder for each run: in another run's it would continue a training run that has ended.
    if settings.resume_from or not settings.checkpoint_uri:
        return settings.resume_from
    return f"{settings.checkpoint_uri.rstrip('/')}/{run}"


def _optional(job: JobSpec, settings: SageMakerSettings, *, folder: str) -> dict[str, Json]:
    checkpoints, place = checkpoints_of(settings, run=job.run_name), CHECKPOINTS
    tracking = job.tracking
    is_profile = job.settings.profile is not None
    if is_profile:
        # Not the training's checkpoints, which a profile must not touch.
        checkpoints, place = f"{folder}/profile", PROFILE_FOLDER
    managed: dict[str, Json] = {
        "MlflowResourceArn": tracking.mlflow,
        "MlflowExperimentName": tracking.experiment,
        # Shared by all attempts of the run.
        "MlflowRunName": job.run_name,
    }
    board = {"S3OutputPath": f"{folder}/tensorboard", "LocalPath": f"{_HOME}/{TENSORBOARD}"}
    return without_none(
        {
            "HyperParameters": encoded(job.hyperparameters) or None,
            "CheckpointConfig": checkpoints and {"S3Uri": checkpoints, "LocalPath": place},
            "MlflowConfig": without_none(managed)
            if tracking.is_managed and not is_profile
            else None,
            "TensorBoardOutputConfig": board if tracking.tensorboard and not is_profile else None,
        }
    )
