"""Rules of a CreateTrainingJob request, of which botocore checks few before it is sent.

The service refuses wrong lengths and patterns when it is asked, after the uploads: its model has
them (`service_limits`). It checks instance groups minutes later, or after a pipeline's first steps.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec, check_container, check_job
from stoker.platforms.sagemaker.pending import pending_rules
from stoker.platforms.sagemaker.places import check_places
from stoker.platforms.sagemaker.preferences import preference_rules
from stoker.platforms.service_limits import (
    OverLimit,
    RequestPath,
    input_shape,
    over_limits,
    path_text,
    service_model,
    tag_problems,
)
from stoker.records import Channel, Json, SageMakerSettings, bare_type, nearest
from stoker.records.base import Document, mapping, mappings

Body = Document
TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"
# 28 days: CreateTrainingJob, StoppingCondition.
MAX_RUN_SECONDS = 28 * 86400
# Of a volume of EBS (gp2), as CreateProcessingJob says.
MAX_VOLUME_GB = 16384
# Of an instance type: g5, c7i-flex, p4de, trn1n.
_FAMILY = re.compile(r"[a-z]+[0-9]+[a-z-]*")
_ECR = re.compile(r"[0-9]{12}\.dkr\.ecr[a-z-]*\.[a-z0-9-]+\.amazonaws\.com")
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")

# Where the workload, or a command, says a part of the request.
_KEYS: Mapping[RequestPath, str] = {
    ("TrainingJobName",): "--name, or key name",
    ("RoleArn",): "key sagemaker.role",
    ("AlgorithmSpecification", "TrainingImage"): "key image",
    ("AlgorithmSpecification", "ContainerEntrypoint"): "key sagemaker.entrypoint",
    ("AlgorithmSpecification", "ContainerArguments"): "key command",
    ("ResourceConfig", "InstanceGroups"): "the plan's groups (--group)",
    ("ResourceConfig", "InstanceType"): "the plan's groups (--group)",
    ("ResourceConfig", "InstancePreferences"): "key sagemaker.further_types",
    ("ResourceConfig", "InstanceCount"): "the plan's groups (--group)",
    ("OutputDataConfig", "S3OutputPath"): "key sagemaker.output_uri",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "key sagemaker.max_run_seconds",
    ("CheckpointConfig",): "key sagemaker.checkpoint_uri",
    ("MlflowConfig", "MlflowRunName"): "--name, or key name",
    ("MlflowConfig",): "key tracking",
    ("TensorBoardOutputConfig",): "key sagemaker.output_uri",
    ("HyperParameters",): "key hyperparameters",
    ("Environment",): "key environment",
}
_IN_CHANNEL = {
    "S3Uri": "uri",
    "DirectoryPath": "uri",
    "FileSystemId": "uri",
    "S3DataType": "data_type",
    "S3DataDistributionType": "distribution",
    "AttributeNames": "attribute_names",
    "InstanceGroupNames": "groups",
    "InputMode": "mode",
    "RecordWrapperType": "record_wrapper",
}


def groups_of(body: Body) -> list[Body]:
    """Returns the instance groups; a homogeneous job has none."""
    return mappings(body, "ResourceConfig", "InstanceGroups")


def instance_types(body: Body) -> list[tuple[str, str]]:
    """Returns (place, type) of all hosts."""
    resources = mapping(body, "ResourceConfig")
    alone = [("ResourceConfig", resources)] if "InstanceType" in resources else []
    groups = [(f"group {text(each, 'InstanceGroupName')}", each) for each in groups_of(body)]
    preferred = mappings(resources, "InstancePreferences")
    choices = [("sagemaker.further_types", each) for each in preferred]
    return [(place, text(each, "InstanceType")) for place, each in (*groups, *alone, *choices)]


def channels_of(body: Body) -> list[tuple[str, Body]]:
    return [(text(c, "ChannelName"), c) for c in mappings(body.get("InputDataConfig"))]


def s3_source(channel: Body) -> Body:
    return mapping(channel, "DataSource", "S3DataSource")


def mode_of(body: Body, channel: Body) -> str:
    """Returns the channel's mode; default: the job's."""
    default = mapping(body, "AlgorithmSpecification").get("TrainingInputMode")
    return str(channel.get("InputMode") or default or "File")


def text(value: Body, key: str) -> str:
    """Returns the value of the key as text; empty if it is missing."""
    return str(value.get(key) or "")


def without_none(values: Document) -> dict[str, Json]:
    return {key: value for key, value in values.items() if value is not None}


def settings_of(job: JobSpec) -> SageMakerSettings:
    """Returns the settings for SageMaker of a job; raises UsageError if it cannot run there."""
    settings = job.platform_settings.sagemaker
    if settings is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"job {job.name}, key sagemaker",
            fix="add sagemaker: {role: arn:aws:iam::ACCOUNT:role/NAME, output_uri: s3://...}",
        )
    check_container(job, settings.entrypoint, platform="SageMaker", key="sagemaker")
    check_job(job)
    for name, channel in job.channels.items():
        _check_channel(name, channel)
        if file_system(channel.uri) and not settings.vpc:
            raise UsageError(
                f"channel {name} is a file system, which is reached through a VPC",
                where="key sagemaker.request.VpcConfig",
                fix="name Subnets and SecurityGroupIds that reach it (NFS: port 2049; Lustre: 988)",
            )
    check_places(job, settings)
    source = settings.source or ""
    if "://" in source and not (source.startswith("s3://") and source.endswith(".tar.gz")):
        raise UsageError(
            f"code comes from a folder or a .tar.gz in S3, not from {source}",
            where="key sagemaker.source",
            fix="name a folder: stoker packs and uploads it",
        )
    return settings


def check_secrets(job: JobSpec, settings: SageMakerSettings, variables: Document) -> None:
    """Raises UsageError for secrets that hosts could not read, or that the request sets."""
    for name, source in job.secrets.items():
        where = f"key secrets.{name}"
        if source.arn is None:
            raise UsageError(
                f"on SageMaker the secret {name} needs an ARN",
                where=where,
                fix="add arn, of Secrets Manager or of a parameter in SSM",
            )
        if name in variables:
            raise UsageError(
                f"sagemaker.request.Environment sets the secret {name}",
                where=where,
                fix="leave it out there: it is plain text",
            )
        if settings.network_isolation:
            raise UsageError(
                f"with EnableNetworkIsolation hosts cannot read the secret {name}",
                where=where,
                fix="leave EnableNetworkIsolation out, or pass what it opens as a channel",
            )


def _check_channel(name: str, channel: Channel) -> None:
    if name in (TOKEN_CHANNEL, CODE_CHANNEL):
        raise UsageError(
            f"channel name {name} is reserved",
            where=f"key channels.{name}",
            fix="rename the channel",
        )
    if file_system(channel.uri):
        if channel.mode != "File" or channel.data_type != "S3Prefix" or channel.groups:
            raise UsageError(
                f"channel {name} is a file system: mode, data_type and groups are for S3",
                where=f"key channels.{name}",
                fix="leave them out: all groups mount it",
            )
    elif not channel.uri.startswith("s3://"):
        raise UsageError(
            f"SageMaker reads S3, EFS and FSx for Lustre, not {channel.uri}",
            where=f"key channels.{name}.uri",
            fix="copy the data there: aws s3 sync FOLDER s3://BUCKET/FOLDER, or name a file "
            "system: efs://fs-0123456789abcdef0/FOLDER, fsx://fs-0123456789abcdef0/MOUNT/FOLDER",
        )


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


def _channel_rules(body: Body) -> Iterator[UsageError]:
    for name, channel in channels_of(body):
        where, source, mode = f"channel {name}", s3_source(channel), mode_of(body, channel)
        is_augmented = source.get("S3DataType") == "AugmentedManifestFile"
        if is_augmented and mode != "Pipe":
            what = f"an augmented manifest is streamed: it needs mode Pipe, not {mode}"
            fix = "set the channel's mode to Pipe, or its data_type to ManifestFile"
            yield UsageError(what, where=where, fix=fix)
        if is_augmented != bool(source.get("AttributeNames")):
            what = "attribute_names and data_type: AugmentedManifestFile need each other"
            fix = "data_type: AugmentedManifestFile, attribute_names: [source-ref, ...]"
            yield UsageError(what, where=where, fix=fix)
        wrapper = channel.get("RecordWrapperType", "None")
        if wrapper != "None" and mode != "Pipe":
            what = f"RecordWrapperType {wrapper} is for mode Pipe only, not for {mode}"
            fix = "leave record_wrapper out, or set the channel's mode to Pipe"
            yield UsageError(what, where=where, fix=fix)


def check_body(body: Body) -> None:
    """Raises the first of `problems`."""
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Yields an error for each broken rule; one alone if botocore refuses the request."""
    shape = input_shape("sagemaker", "CreateTrainingJob")
    from botocore.validate import ParamValidator

    if wrong := ParamValidator().validate(body, shape).generate_report():
        yield UsageError(
            "CreateTrainingJob would refuse this: " + wrong.replace("\n", "; "),
            where="key sagemaker.request",
            fix="see the API reference of CreateTrainingJob",
        )
        return
    for rule in _RULES:
        yield from rule(body)
    for problem in (*over_limits(body, shape), *tag_problems(body.get("Tags"))):
        # Instance types have a rule.
        if not problem.is_growing:
            yield _refused(problem, body)


def _refused(problem: OverLimit, body: Body) -> UsageError:
    """Returns the error for a value that is over a limit, at the workload's key."""
    return UsageError(
        f"CreateTrainingJob would refuse this: {problem.place} {problem.what}",
        where=key_of(problem.path, body),
        fix=problem.nearest or "see the API reference of CreateTrainingJob",
    )


def key_of(path: RequestPath, body: Body) -> str:
    """Returns where a user wrote a part of the request: "key channels.train.uri"."""
    if path[:1] == ("InputDataConfig",) and len(path) > 1 and isinstance(path[1], int):
        name = channels_of(body)[path[1]][0]
        if name in (TOKEN_CHANNEL, CODE_CHANNEL):
            return "key sagemaker.output_uri"
        parts = [_IN_CHANNEL[part] for part in map(str, path[2:]) if part in _IN_CHANNEL]
        is_own = parts or path[2:] in ((), ("ChannelName",))
        if is_own:
            return ".".join(("key channels", name, *parts[:1]))
        return f"key sagemaker.request.InputDataConfig[{name}].{path_text(path[2:])}"
    for length in (2, 1):
        key = _KEYS.get(path[:length])
        if key is not None:
            is_map = length == 1 and path[0] in ("HyperParameters", "Environment")
            if is_map and len(path) > 1:
                return f"{key}.{path[1]}"
            return key
    return f"key sagemaker.request.{path_text(path)}"


def notes(body: Body) -> list[str]:
    """Returns conditions that cannot be checked in advance, as sentences for `--dry-run`."""
    lines = []
    if body.get("VpcConfig"):
        lines.append("the security groups must let the hosts reach each other by any TCP port")
        lines.append("the subnets need a route to S3, for example a gateway endpoint")
        if body.get("EnableInterContainerTrafficEncryption"):
            lines += ["for the encryption the hosts also need UDP port 500 and protocol 50 (ESP)"]
    if body.get("EnableNetworkIsolation"):
        lines.append("the containers reach only each other: all data comes through channels")
    for name, channel in channels_of(body):
        if s3_source(channel).get("S3DataDistributionType") == "ShardedByS3Key":
            lines.append(
                f"channel {name}: each host gets only a part of the objects; a sampler must not "
                "choose samples of other hosts"
            )
        if mode_of(body, channel) == "Pipe":
            lines.append(f"channel {name}: only one process can read a pipe, once per epoch")
    types = _known_types()
    for _, name in instance_types(body):
        if name not in types:
            lines.append(
                f"the installed botocore knows no training type {name}: perhaps it is newer "
                f"(pip install -U botocore); {nearest(name, types)}"
            )
    if body.get("EnableManagedSpotTraining") and not body.get("CheckpointConfig"):
        lines.append("without sagemaker.checkpoint_uri an interrupted job starts from scratch")
    return lines


def _group_rules(body: Body) -> Iterator[UsageError]:
    groups = groups_of(body)
    if not groups:
        return
    # botocore checks no upper limits.
    most = int(service_model("sagemaker").shape_for("InstanceGroups").metadata["max"])
    if len(groups) > most:
        yield UsageError(
            f"a job has at most {most} instance groups, found {len(groups)}",
            where="ResourceConfig.InstanceGroups",
            fix="plan fewer groups: stoker decide proposes one data group",
        )
    fix = "remove it from sagemaker.request"
    warm = "KeepAlivePeriodInSeconds"
    spot = "EnableManagedSpotTraining"
    if mapping(body, "ResourceConfig").get(warm):
        what = "instance groups have no warm pools"
        yield UsageError(what, where=f"ResourceConfig.{warm}", fix=fix)
    if mapping(body, "ResourceConfig").get("TrainingPlanArn"):
        what = "a data group on a training plan is not documented"
        where = "key sagemaker.request.ResourceConfig.TrainingPlanArn"
        leave = "train without a data group, or leave the plan out"
        yield UsageError(what, where=where, fix=leave)
    if body.get(spot):
        what = "managed spot with instance groups is not documented: no lost data host is replaced"
        yield UsageError(what, where=spot, fix=fix)


def _registry_rules(body: Body) -> Iterator[UsageError]:
    """Checks a private registry: the hosts pull from it through the job's VPC."""
    config = mapping(body, "AlgorithmSpecification", "TrainingImageConfig")
    key = "key sagemaker.request.AlgorithmSpecification.TrainingImageConfig"
    is_private = config.get("TrainingRepositoryAccessMode") == "Vpc"
    if is_private and not body.get("VpcConfig"):
        what = "a private registry is reached through a VPC"
        fix = "add sagemaker.request.VpcConfig: {Subnets: [...], SecurityGroupIds: [...]}"
        yield UsageError(what, where=key, fix=fix)
    if config.get("TrainingRepositoryAuthConfig") and not is_private:
        what = "TrainingRepositoryAuthConfig is for a private registry"
        yield UsageError(what, where=key, fix="add TrainingRepositoryAccessMode: Vpc")
    if is_private and _ECR.match(text(mapping(body, "AlgorithmSpecification"), "TrainingImage")):
        what = "an image in ECR is pulled by the job's role, not from a private registry"
        yield UsageError(what, where=key, fix="leave TrainingImageConfig out")


def _time_rules(body: Body) -> Iterator[UsageError]:
    """Checks times and volumes whose limits are in the API's reference, but in no model."""
    stopping, key = mapping(body, "StoppingCondition"), "key sagemaker.max_run_seconds"
    seconds, waited = stopping.get("MaxRuntimeInSeconds"), stopping.get("MaxWaitTimeInSeconds")
    if isinstance(seconds, int) and seconds > MAX_RUN_SECONDS:
        what = f"a training job may run for 28 days ({MAX_RUN_SECONDS} s), not {seconds} s"
        yield UsageError(what, where=key, fix="set fewer seconds, and continue from a checkpoint")
    if isinstance(seconds, int) and isinstance(waited, int) and waited < seconds:
        what = f"MaxWaitTimeInSeconds ({waited}) is less than MaxRuntimeInSeconds ({seconds})"
        where = "key sagemaker.request.StoppingCondition.MaxWaitTimeInSeconds"
        yield UsageError(what, where=where, fix="it contains the time of the run: set more")
    volume = mapping(body, "ResourceConfig").get("VolumeSizeInGB")
    if isinstance(volume, int) and volume > MAX_VOLUME_GB:
        what = f"a host's volume has at most {MAX_VOLUME_GB} GB, not {volume}"
        where = "key sagemaker.request.ResourceConfig.VolumeSizeInGB"
        yield UsageError(what, where=where, fix="read the data from S3 (mode FastFile) or FSx")


def _known_types() -> tuple[str, ...]:
    return tuple(service_model("sagemaker").shape_for("TrainingInstanceType").enum)


def _may_be_newer(name: str, known: Sequence[str]) -> bool:
    """Returns whether a type may be newer than botocore's model: its size is another one's."""
    family, _, size = bare_type(name).partition(".")
    sizes = {each.rpartition(".")[2] for each in known}
    return bool(_FAMILY.fullmatch(family)) and size in sizes


def _type_rules(body: Body) -> Iterator[UsageError]:
    types = _known_types()
    for where, name in instance_types(body):
        if name in types or _may_be_newer(name, types):
            continue
        what = f"SageMaker has no instance type {name}"
        fix = nearest(name, types)
        # In SageMaker's SDK, `local` and `local_gpu` are the types of local mode.
        if bare_type(name).startswith("local"):
            what = f"{name} is a type of local mode, not of training jobs"
            fix = "use --platform local, which has instance groups, too"
        yield UsageError(what, where=where, fix=fix)


_RULES = (
    _group_rules,
    preference_rules,
    _type_rules,
    _channel_rules,
    _time_rules,
    pending_rules,
    _registry_rules,
)
