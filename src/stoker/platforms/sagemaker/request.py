"""The CreateTrainingJob request of a job: a pure value, patched by the user and checked.

`plan_request` is the way through this file. The service checks instance groups minutes after it was
asked, or after a pipeline's first steps: the rules that nothing else tells in time are here.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import cast

from stoker.environment import RUN_FILE, RUN_VARIABLE, TOKEN_FILE, RunSettings
from stoker.errors import UsageError
from stoker.platforms.aws import service_model
from stoker.platforms.base import (
    MLFLOW_EXPERIMENT,
    MLFLOW_URI,
    NOT_COMPARED,
    JobSpec,
    check_container,
    check_job,
    groups_of_channel,
    run_settings,
)
from stoker.platforms.patch import patched
from stoker.records import Channel, Json, PlatformSettings, SageMakerSettings, nearest
from stoker.records.base import Document, item_at, mapping, mappings, text
from stoker.records.hyperparameters import encoded
from stoker.records.platforms import patch_document

TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"
# The service's folders in every container.
_INPUT = "/opt/ml/input/data"
_CHECKPOINTS = "/opt/ml/checkpoints"
# Of a profile. What the script saves in _CHECKPOINTS during it is not kept.
_PROFILE_FOLDER = "/opt/ml/profile"
# After its budget and this time, the service ends a profile. Downloads are included.
_PROFILE_ALLOWANCE_SECONDS = 7200
_DISK_GB = 100
# For a host that breaks, but not for a job that always breaks.
_MAX_RETRIES = 2
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")
_NUMBER = r"([0-9.]+(?:e[-+]?[0-9]+)?)"
# They read the rows of the launcher's log: interval row='{.."step_seconds":0.2,..}'.
PROGRESS_METRICS: Sequence[Mapping[str, str]] = tuple(
    {"Name": f"stoker:{key}", "Regex": rf' interval row=.*"{key}":{_NUMBER}'}
    for key in (
        *("step_seconds", "wait_seconds", "whole_step_seconds"),
        *("spent_usd", "gpu_utilization"),
    )
)

REQUEST_TAG = "stoker:request-sha256"
# Paths of the request that `sagemaker.request` cannot set, and what to do instead.
RESERVED = {
    "TrainingJobName": "use --name",
    "RoleArn": "use sagemaker.role",
    "AlgorithmSpecification TrainingImage": "use the workload's key image",
    "AlgorithmSpecification AlgorithmName": "use the workload's key image",
    "AlgorithmSpecification Container*": "use the workload's key command",
    "AlgorithmSpecification TrainingInputMode": "use mode of the workload's key channels",
    "ResourceConfig Instance[GTC]*": "the plan decides on the hosts",
    f"InputDataConfig {TOKEN_CHANNEL}": "",
    f"InputDataConfig {CODE_CHANNEL}": "use sagemaker.source",
    "InputDataConfig * DataSource": "use the workload's key channels",
    "InputDataConfig * InputMode": "use mode of the workload's key channels",
    "OutputDataConfig S3OutputPath": "use sagemaker.output_uri",
    "StoppingCondition MaxRuntimeInSeconds": "use sagemaker.max_run_seconds",
    "HyperParameters": "use the workload's key hyperparameters",
    "CheckpointConfig": "use sagemaker.checkpoint_uri",
    "MlflowConfig": "use the workload's key tracking",
    "Environment STOKER_*": "use the workload's keys instead of stoker's variables",
    "Tags stoker:*": "choose another key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """The call that creates a job, and the objects that are written before it.

    Attributes:
        body: CreateTrainingJob's, without secrets.
        token_uri: Address of the run's token, which is deleted at the end, with what is beside it.
        settings: Content of run.json, which is written beside it.
        code_uri: Address of the packed folder `code_folder`.
        code_folder: None if the code is in the image, or already packed.
    """

    job: JobSpec
    body: Document
    token_uri: str
    settings: RunSettings = field(default_factory=RunSettings)
    code_uri: str | None = None
    code_folder: Path | None = None


def plan_request(job: JobSpec) -> SageMakerRequest:
    """Returns the request for `job`, without a call; raises UsageError for one to be refused."""
    settings = _settings_of(job)
    folder = f"{settings.output_uri.rstrip('/')}/{job.name}"
    # A folder of a project is packed and uploaded; the channel is the whole folder: as a prefix,
    # an object's name could match other objects, too.
    is_local = bool(settings.source) and "://" not in str(settings.source)
    own = {TOKEN_CHANNEL: Channel(uri=f"{folder}/{TOKEN_CHANNEL}/")}
    code_uri = settings.source
    if is_local:
        code_uri = f"{folder}/{CODE_CHANNEL}/code.tar.gz"
        own[CODE_CHANNEL] = Channel(uri=f"{folder}/{CODE_CHANNEL}/")
    elif code_uri:
        own[CODE_CHANNEL] = Channel(uri=code_uri)
    planned = _training_job(job, settings, folder=folder, own=own)
    patch = patch_document(settings.request)
    body = patched(planned, patch, key="sagemaker.request", reserved=RESERVED)
    run = _settings_of_run(job, settings, code_uri=code_uri)
    body["Tags"] = [*mappings(body, "Tags"), {"Key": REQUEST_TAG, "Value": _digest(body, run)}]
    _check_secrets(job, mapping(body, "Environment"))
    check_body(body)
    return SageMakerRequest(
        job=job,
        body=body,
        token_uri=f"{folder}/{TOKEN_CHANNEL}/{TOKEN_FILE}",
        settings=run,
        code_uri=code_uri if is_local else None,
        code_folder=Path(str(settings.source)) if is_local else None,
    )


def sagemaker_of(settings: PlatformSettings) -> SageMakerSettings:
    """Returns a workload's settings for SageMaker; raises UsageError if it has none."""
    if settings.sagemaker is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where="key sagemaker",
            fix="add sagemaker: {role: arn:aws:iam::ACCOUNT:role/NAME, output_uri: s3://...}",
        )
    return settings.sagemaker


def _settings_of(job: JobSpec) -> SageMakerSettings:
    """Returns the settings for SageMaker of a job; raises UsageError if it cannot run there."""
    settings = sagemaker_of(job.platform_settings)
    check_container(job, platform="SageMaker")
    check_job(job)
    for name, channel in job.channels.items():
        if not channel.uri.startswith("s3://") and file_system(channel.uri) is None:
            raise UsageError(
                f"SageMaker reads S3, EFS and FSx for Lustre, not {channel.uri}",
                where=f"key channels.{name}.uri",
                fix="copy the data there: aws s3 sync FOLDER s3://BUCKET/FOLDER, or name a file "
                "system: efs://fs-0123456789abcdef0/FOLDER, fsx://fs-0123456789abcdef0/MOUNT",
            )
    source = settings.source or ""
    if "://" in source and not re.fullmatch(r"s3://.+\.tar\.gz", source):
        raise UsageError(
            f"code comes from a folder or a .tar.gz in S3, not from {source}",
            where="key sagemaker.source",
            fix="name a folder: stoker packs and uploads it",
        )
    return settings


def _training_job(
    job: JobSpec, settings: SageMakerSettings, *, folder: str, own: Mapping[str, Channel]
) -> dict[str, Json]:
    """Returns the body of CreateTrainingJob, before the user's patch.

    Args:
        job: The job.
        settings: Its settings for SageMaker.
        folder: Address of the job's folder for outputs.
        own: stoker's own channels.
    """
    profile = job.settings.profile
    tracking = job.tracking
    max_run_seconds = settings.max_run_seconds
    # A folder for each run: in another run's it would continue a training that has ended.
    checkpoints: Json = None
    if profile:
        allowed = int(profile.budget_seconds) + _PROFILE_ALLOWANCE_SECONDS
        max_run_seconds = min(max_run_seconds, allowed)
        # Not the training's checkpoints, which a profile must not touch, nor its figures.
        checkpoints = {"S3Uri": f"{folder}/profile", "LocalPath": _PROFILE_FOLDER}
    elif settings.checkpoint_uri:
        kept = f"{settings.checkpoint_uri.rstrip('/')}/{job.run_name}"
        checkpoints = {"S3Uri": kept, "LocalPath": _CHECKPOINTS}
    mlflow = {
        "MlflowResourceArn": tracking.mlflow,
        "MlflowExperimentName": tracking.experiment,
        # Shared by all attempts of the run.
        "MlflowRunName": job.run_name,
    }
    body = without_none(
        {
            "TrainingJobName": job.name,
            "RoleArn": settings.role,
            "AlgorithmSpecification": {
                "TrainingImage": job.image,
                # Required by the API; each channel has its own.
                "TrainingInputMode": "File",
                # In place of the image's ENTRYPOINT: the launcher has to come first.
                "ContainerEntrypoint": ["stoker", "launch", "--"],
                "ContainerArguments": list(job.command),
                "MetricDefinitions": list(PROGRESS_METRICS),
            },
            "ResourceConfig": {**_hosts(job), "VolumeSizeInGB": _DISK_GB},
            "InputDataConfig": _channels(job, {**dict(sorted(job.channels.items())), **own}),
            "OutputDataConfig": {"S3OutputPath": settings.output_uri.rstrip("/")},
            "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
            "Environment": _environment(job),
            "EnableNetworkIsolation": False,
            "EnableInterContainerTrafficEncryption": False,
            "Tags": [],
            "RetryStrategy": {"MaximumRetryAttempts": _MAX_RETRIES},
            "HyperParameters": encoded(job.hyperparameters) or None,
            "CheckpointConfig": checkpoints,
            "MlflowConfig": mlflow if _logs_to_managed_mlflow(job) else None,
        }
    )
    return cast("dict[str, Json]", body)


def _logs_to_managed_mlflow(job: JobSpec) -> bool:
    return job.tracking.is_managed and not job.settings.profile


def _hosts(job: JobSpec) -> dict[str, Json]:
    """Returns the hosts of a job as the request's ResourceConfig names them."""
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


def _channels(job: JobSpec, channels: Mapping[str, Channel]) -> list[Json]:
    """Returns the request's InputDataConfig."""
    groups = {
        name: groups_of_channel(name, channel, job.groups) for name, channel in channels.items()
    }
    # If one channel names groups, all have to.
    is_split = any(len(names) < len(job.groups) for names in groups.values())
    disks = [name for name, channel in channels.items() if file_system(channel.uri)]
    if is_split and disks:
        raise UsageError(
            f"all groups mount {disks[0]}, a file system: on SageMaker, all channels name groups "
            "or none does",
            where="key channels",
            fix="leave the groups out",
        )
    return [
        _channel(name, channel, groups[name] if is_split else ())
        for name, channel in channels.items()
    ]


def _channel(name: str, channel: Channel, groups: Sequence[str]) -> dict[str, Json]:
    if disk := file_system(channel.uri):
        return {"ChannelName": name, "DataSource": {"FileSystemDataSource": disk}}
    is_augmented = channel.data_type == "AugmentedManifestFile"
    source: dict[str, Json] = {
        "S3DataType": channel.data_type,
        "S3Uri": channel.uri,
        "S3DataDistributionType": channel.distribution,
        "AttributeNames": list(channel.attribute_names or ()) or None,
        "InstanceGroupNames": list(groups) or None,
    }
    return {
        "ChannelName": name,
        "DataSource": {"S3DataSource": source},
        "InputMode": channel.mode,
        "RecordWrapperType": "RecordIO" if is_augmented else None,
    }


def file_system(uri: str) -> dict[str, Json] | None:
    """Returns a read-only FileSystemDataSource for an efs:// or fsx:// address, else None."""
    match = _FILE_SYSTEM.fullmatch(uri)
    if not match:
        return None
    return {
        "FileSystemId": match.group(2),
        "FileSystemAccessMode": "ro",
        "FileSystemType": "EFS" if match.group(1) == "efs" else "FSxLustre",
        "DirectoryPath": match.group(3),
    }


def without_none(value: object) -> object:
    """Returns a document without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return value


def _environment(job: JobSpec) -> dict[str, Json]:
    """Returns the Environment of `job`: the user's variables, and stoker's."""
    variables: dict[str, Json] = {}
    if _logs_to_managed_mlflow(job):
        # With these `mlflow.log_metric` finds the managed MLflow.
        named = {MLFLOW_URI: job.tracking.mlflow, MLFLOW_EXPERIMENT: job.tracking.experiment}
        variables = {name: value for name, value in named.items() if value}
    variables |= job.environment
    variables[RUN_VARIABLE] = f"{_INPUT}/{TOKEN_CHANNEL}/{RUN_FILE}"
    return dict(sorted(variables.items()))


def _settings_of_run(
    job: JobSpec, settings: SageMakerSettings, *, code_uri: str | None
) -> RunSettings:
    """Returns the content of the job's run.json; `code_uri` is the address of its code."""
    code = Path(_INPUT, CODE_CHANNEL, PurePosixPath(code_uri).name) if code_uri else None
    common = run_settings(job)
    return replace(
        common,
        # The service names the only group itself.
        roles=common.roles if len(job.groups) > 1 else {},
        requirements=settings.requirements if code else "auto",
        code_file=code,
        profile_file=Path(_PROFILE_FOLDER, "profile.json") if job.settings.profile else None,
    )


def _digest(body: Document, settings: RunSettings) -> str:
    """Returns a digest of the request and its run.json, without the tags, where it is kept."""
    content = {key: value for key, value in body.items() if key != "Tags"}
    variables = mapping(body, "Environment").items()
    content["run"] = settings.to_compare()
    content["Environment"] = {name: text for name, text in variables if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def channels_of(body: Document) -> list[tuple[str, Document]]:
    """Returns name and description of each channel of a request or a described job."""
    return [(text(c, "ChannelName"), c) for c in mappings(body.get("InputDataConfig"))]


def _check_secrets(job: JobSpec, variables: Document) -> None:
    """Refuses secrets that hosts could not read, or that the request sets in plain text."""
    for name, source in job.secrets.items():
        if source.arn is None:
            raise UsageError(
                f"on SageMaker the secret {name} needs an ARN",
                where=f"key secrets.{name}",
                fix="add arn, of Secrets Manager or of a parameter in SSM",
            )
        if name in variables:
            what = f"sagemaker.request.Environment sets the secret {name}"
            where = f"key secrets.{name}"
            raise UsageError(what, where=where, fix="leave it out there: it is plain text")


def check_body(body: Document) -> None:
    """Refuses a request by the API's model, its types, and the rules of instance groups."""
    from botocore.validate import ParamValidator

    model = service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    where = "key sagemaker.request"
    if wrong := ParamValidator().validate(body, shape).generate_report():
        raise UsageError(
            "CreateTrainingJob would refuse this: " + wrong.replace("\n", "; "),
            where=where,
            fix="see the API reference of CreateTrainingJob",
        )
    resources = mapping(body, "ResourceConfig")
    groups = mappings(resources, "InstanceGroups")
    # botocore checks neither upper limits nor enumerations.
    types = tuple(model.shape_for("TrainingInstanceType").enum)
    for hosts in groups or [resources]:
        name = text(hosts, "InstanceType")
        if name and name not in types:
            fix = f"{nearest(name, types)}; if it is newer: pip install -U botocore"
            group = text(hosts, "InstanceGroupName")
            raise UsageError(
                f"SageMaker has no instance type {name}",
                where=f"group {group}" if group else where,
                fix=fix,
            )
    most = int(model.shape_for("InstanceGroups").metadata["max"])
    if len(groups) > most:
        raise UsageError(
            f"a job has at most {most} instance groups, found {len(groups)}",
            where="the plan's groups",
            fix="plan fewer groups: stoker decide proposes one data group",
        )
    is_warm = item_at(resources, "KeepAlivePeriodInSeconds")
    if groups and (is_warm or body.get("EnableManagedSpotTraining")):
        raise UsageError(
            "managed spot and warm pools do not go with instance groups",
            where=where,
            fix="leave EnableManagedSpotTraining and KeepAlivePeriodInSeconds out",
        )
