"""Checks what users write into a CreateTrainingJob request; each rule has its reason.

Only rules that nothing else checks in time: botocore checks types and missing members, and the
service answers wrong lengths and patterns at once and free of charge. Nobody but the service knows
the rules for instance groups, and it refuses minutes later, or after a pipeline's first steps.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping

from stoker.errors import MissingExtraError, UsageError
from stoker.platforms.base import JobSpec, check_container, check_job
from stoker.records import (
    Channel,
    Framework,
    Group,
    Json,
    MetricDefinition,
    SageMakerSettings,
    bare_type,
    nearest,
)
from stoker.records.base import mapping, mappings

Body = Mapping[str, Json]
TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"
# Versions from which AWS's frameworks know instance groups.
_MINIMUM = {"pytorch": (1, 10), "tensorflow": (2, 6)}
_SHOWN = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")
_FILE_SYSTEM_TYPES = {"efs": "EFS", "fsx": "FSxLustre"}
# CreateTrainingJob's own words on MaxRuntimeInSeconds; the model does not say it.
MAX_RUN_SECONDS = 28 * 86400
# Types with disks of their own, which the hardware encrypts.
OWN_DISKS = re.compile(
    r"^ml\.(g4dn|g5|g6e?|g7e?|p3dn|p4de?|p5(e|en)?|p6e?-\w+|trn1n?|trn2|[cmr]\d[a-z]*d)\."
)
_GROUPS_FIX = "plan fewer groups: stoker decide proposes one data group"


def groups_of(body: Body) -> list[Body]:
    """Returns the instance groups; none of a homogeneous job."""
    return mappings(mapping(body.get("ResourceConfig")).get("InstanceGroups"))


def instance_types(body: Body) -> list[tuple[str, str]]:
    """Returns (place, type) of all hosts."""
    resources = mapping(body.get("ResourceConfig"))
    found = [
        (f"group {text(group, 'InstanceGroupName')}", text(group, "InstanceType"))
        for group in groups_of(body)
    ]
    if "InstanceType" in resources:
        found.append(("ResourceConfig", text(resources, "InstanceType")))
    return found


def channels_of(body: Body) -> list[tuple[str, Body]]:
    """Returns (name, channel) of all channels."""
    return [(text(c, "ChannelName"), c) for c in mappings(body.get("InputDataConfig"))]


def s3_source(channel: Body) -> Body:
    """Returns the S3 source of a channel."""
    return mapping(mapping(channel.get("DataSource")).get("S3DataSource"))


def mode_of(body: Body, channel: Body) -> str:
    """Returns the channel's own mode, else the job's."""
    algorithm = mapping(body.get("AlgorithmSpecification"))
    return str(channel.get("InputMode") or algorithm.get("TrainingInputMode") or "File")


def text(value: Body, key: str) -> str:
    """Returns the value under the key as text; empty where there is none."""
    return str(value.get(key) or "")


def number(value: Body, key: str) -> int | None:
    """Returns the whole number under the key."""
    found = value.get(key)
    return found if isinstance(found, int) else None


def without_none(values: Mapping[str, Json]) -> dict[str, Json]:
    """Returns the values without those that are None."""
    return {key: value for key, value in values.items() if value is not None}


def settings_of(job: JobSpec) -> SageMakerSettings:
    """Returns the job's settings for SageMaker, after checks of all that the request needs.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    settings = job.platform_settings.sagemaker
    if settings is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"job {job.name}, key sagemaker",
            fix="add sagemaker: {role: arn:aws:iam::ACCOUNT:role/NAME, output_uri: s3://...}",
        )
    check_container(job, settings.entrypoint, platform="SageMaker", key="sagemaker")
    check_job(job)
    _check_framework(job.groups, settings.framework)
    for name, channel in job.channels.items():
        _check_channel(name, channel)
        if file_system(channel.uri) and not settings.vpc:
            raise UsageError(
                f"channel {name} is a file system, which is reached through a VPC",
                where="key sagemaker.vpc",
                fix="name subnets and security groups that reach it (NFS: port 2049; Lustre: 988)",
            )
    _check_source(settings.source)
    for definition in settings.metric_definitions or ():
        _check_metric(definition)
    for key in settings.tags:
        if key.startswith("stoker:"):
            raise UsageError(
                f"tag {key}: stoker: is stoker's own", where="key sagemaker.tags", fix="rename it"
            )
    return settings


def _check_framework(groups: tuple[Group, ...], framework: Framework | None) -> None:
    if framework is None or len(groups) == 1:
        return
    minimum = _MINIMUM[framework.name]
    major, minor = re.findall(r"\d+", framework.version)[:2]
    if (int(major), int(minor)) < minimum:
        needed = f"{_SHOWN[framework.name]} {minimum[0]}.{minimum[1]}"
        raise UsageError(
            f"instance groups need {needed} or newer, the image has {framework.version}",
            where="key sagemaker.framework",
            fix="use a newer image, or a plan without a data group",
        )


def _check_channel(name: str, channel: Channel) -> None:
    if name in (TOKEN_CHANNEL, CODE_CHANNEL):
        raise UsageError(
            f"channel {name} is stoker's own", where=f"key channels.{name}", fix="rename it"
        )
    if file_system(channel.uri):
        if channel.mode != "File" or channel.data_type != "S3Prefix" or channel.groups:
            raise UsageError(
                f"channel {name} is a file system: mode, data_type and groups are S3's",
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
    """Returns the FileSystemDataSource of an efs:// or fsx:// address, read only; else None."""
    found = _FILE_SYSTEM.fullmatch(uri)
    if not found:
        return None
    return {
        "FileSystemId": found.group(2),
        "FileSystemAccessMode": "ro",
        "FileSystemType": _FILE_SYSTEM_TYPES[found.group(1)],
        "DirectoryPath": found.group(3),
    }


def _check_source(source: str | None) -> None:
    if source is None or "://" not in source:
        return
    if not (source.startswith("s3://") and source.endswith(".tar.gz")):
        raise UsageError(
            f"code comes from a folder or from a .tar.gz in S3, not from {source}",
            where="key sagemaker.source",
            fix="name a folder: stoker packs and uploads it",
        )


def _check_metric(definition: MetricDefinition) -> None:
    try:
        num_groups = re.compile(definition.regex).groups
    except re.error as err:
        raise UsageError(
            f"metric {definition.name}: {definition.regex} is not a regular expression: {err}",
            where="key sagemaker.metric_definitions",
        ) from None
    if num_groups != 1:
        raise UsageError(
            f"metric {definition.name}: {definition.regex} has {num_groups} groups; the one group "
            "is the value",
            where="key sagemaker.metric_definitions",
            fix="write (?:...) for groups that are not the value",
        )


def _channel_rules(body: Body) -> Iterator[UsageError]:
    for name, channel in channels_of(body):
        where, source, mode = f"channel {name}", s3_source(channel), mode_of(body, channel)
        is_augmented = source.get("S3DataType") == "AugmentedManifestFile"
        if is_augmented and mode != "Pipe":
            yield UsageError(
                f"an augmented manifest is streamed: it needs mode Pipe, not {mode}",
                where=where,
                fix="set the channel's mode to Pipe, or its data_type to ManifestFile",
            )
        if is_augmented != bool(source.get("AttributeNames")):
            yield UsageError(
                "attribute names say what to stream of an augmented manifest: both, or none of "
                "them",
                where=where,
                fix="set data_type: AugmentedManifestFile with attribute_names: [source-ref, ...]",
            )
        wrapper = channel.get("RecordWrapperType", "None")
        if wrapper != "None" and mode != "Pipe":
            yield UsageError(
                f"RecordWrapperType {wrapper} is for mode Pipe only, not for {mode}",
                where=where,
                fix="leave record_wrapper out, or set the channel's mode to Pipe",
            )


def choices(shape_name: str) -> tuple[str, ...]:
    """Returns all values of an enumeration of the model, such as `TrainingInstanceType`."""
    return tuple(getattr(_shape(shape_name), "enum"))  # noqa: B009


def maximum(shape_name: str) -> int:
    """Returns the largest number, length or count that the model allows, as of `InstanceGroups`."""
    return int(getattr(_shape(shape_name), "metadata")["max"])  # noqa: B009


@functools.cache
def _shape(name: str) -> object:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    # Without a client: that would need a region, and look for credentials in the network.
    model = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    shape: object = model.shape_for(name)
    return shape


def check_body(body: Body) -> None:
    """Checks what users wrote into a CreateTrainingJob request.

    Raises:
        UsageError: If the service would refuse it: the first rule that it breaks, with the reason.
    """
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Yields each rule that the request breaks."""
    for rule in _RULES:
        yield from rule(body)


def notes(body: Body) -> list[str]:
    """Returns what nobody can check beforehand, in sentences for those who read the request."""
    found = []
    if body.get("VpcConfig"):
        found.append("the security groups must let the hosts reach each other by any TCP port")
        found.append("the subnets need a way to S3, for example a gateway endpoint")
        if body.get("EnableInterContainerTrafficEncryption"):
            found.append(
                "for the encryption the hosts also need UDP port 500 and protocol 50 (ESP)"
            )
    if body.get("EnableNetworkIsolation"):
        found.append("the containers reach each other only: all data comes by channels")
    for name, channel in channels_of(body):
        source = s3_source(channel)
        if source.get("S3DataDistributionType") == "ShardedByS3Key":
            found.append(
                f"channel {name}: each host gets a part of the objects only; a dataset must not "
                "ask for samples by numbers that another host has"
            )
        if mode_of(body, channel) == "Pipe":
            found.append(f"channel {name}: a pipe is read by one process, and once an epoch")
    if body.get("EnableManagedSpotTraining") and not body.get("CheckpointConfig"):
        found.append("without sagemaker.checkpoint_uri an interrupted job starts anew")
    return found


def _group_rules(body: Body) -> Iterator[UsageError]:
    resources = mapping(body.get("ResourceConfig"))
    groups = groups_of(body)
    if not groups:
        return
    most = maximum("InstanceGroups")
    # botocore checks no upper limits: the service would refuse it when the job is created.
    if len(groups) > most:
        yield UsageError(
            f"a job has at most {most} instance groups, found {len(groups)}",
            where="ResourceConfig.InstanceGroups",
            fix=_GROUPS_FIX,
        )
    if resources.get("KeepAlivePeriodInSeconds"):
        yield UsageError(
            "there are no warm pools for instance groups",
            where="ResourceConfig.KeepAlivePeriodInSeconds",
            fix="set sagemaker.keep_alive_seconds to 0",
        )
    if body.get("EnableManagedSpotTraining"):
        yield UsageError(
            "managed spot with instance groups is not documented: a lost data host would not "
            "come back",
            where="EnableManagedSpotTraining",
            fix="set sagemaker.spot to false",
        )


def _type_rules(body: Body) -> Iterator[UsageError]:
    known = choices("TrainingInstanceType")
    for where, name in instance_types(body):
        if name in known:
            continue
        # SageMaker's SDK calls its local mode `local` and `local_gpu`.
        if bare_type(name).startswith("local"):
            yield UsageError(
                f"{name} is a type of local mode, which runs no jobs of the service",
                where=where,
                fix="use --platform local, which has instance groups, too",
            )
            continue
        yield UsageError(
            f"SageMaker has no instance type {name}", where=where, fix=nearest(name, known)
        )


def _time_rules(body: Body) -> Iterator[UsageError]:
    stopping = mapping(body.get("StoppingCondition"))
    run, wait = number(stopping, "MaxRuntimeInSeconds"), number(stopping, "MaxWaitTimeInSeconds")
    is_spot = bool(body.get("EnableManagedSpotTraining"))
    if run and run > MAX_RUN_SECONDS:
        yield UsageError(
            f"a job may run for {MAX_RUN_SECONDS} s (28 days), not for {run} s",
            where="StoppingCondition.MaxRuntimeInSeconds",
            fix="lower sagemaker.max_run_seconds, and continue from a checkpoint",
        )
    if not is_spot and wait is not None:
        yield UsageError(
            "MaxWaitTimeInSeconds is for managed spot only",
            where="StoppingCondition",
            fix="leave sagemaker.max_wait_seconds out, or set sagemaker.spot",
        )
    if is_spot and (wait is None or wait < (run or 1)):
        yield UsageError(
            f"managed spot needs a wait of at least the run: waits {wait} s, runs {run} s",
            where="StoppingCondition.MaxWaitTimeInSeconds",
            fix="set sagemaker.max_wait_seconds to max_run_seconds plus a wait for capacity",
        )
    resources = mapping(body.get("ResourceConfig"))
    if is_spot and resources.get("KeepAlivePeriodInSeconds"):
        yield UsageError(
            "spot hosts are not kept in a warm pool",
            where="ResourceConfig.KeepAlivePeriodInSeconds",
            fix="set sagemaker.keep_alive_seconds to 0, or sagemaker.spot to false",
        )


def _volume_rules(body: Body) -> Iterator[UsageError]:
    resources = mapping(body.get("ResourceConfig"))
    for where, name in instance_types(body):
        has_own = bool(OWN_DISKS.match(name))
        if has_own and resources.get("VolumeKmsKeyId"):
            yield UsageError(
                f"{name} has disks of its own, which its hardware encrypts: no key can be set",
                where=where,
                fix="leave sagemaker.volume_kms_key out",
            )


def _tag_rules(body: Body) -> Iterator[UsageError]:
    for key in (text(tag, "Key") for tag in mappings(body.get("Tags"))):
        if key.lower().startswith("aws:"):
            yield UsageError(f"tag {key}: aws: is AWS's own", where="Tags", fix="rename it")


_RULES: tuple[Callable[[Body], Iterator[UsageError]], ...] = (
    _group_rules,
    _type_rules,
    _channel_rules,
    _time_rules,
    _volume_rules,
    _tag_rules,
)
