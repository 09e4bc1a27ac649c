"""Checks what users write into a CreateTrainingJob request; each rule has its reason.

What stoker alone writes is held against the service's rules by its tests. Many rules are read from
the model that botocore brings, without a client, a region or a network, so that they are those of
the installed version. botocore itself checks only a part of them.

Neither botocore nor SageMaker's own SDK nor moto knows the rules for instance groups: the service
would refuse a wrong request, minutes later or after a pipeline's first steps were paid for.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

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


TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"

# Versions from which AWS's frameworks know instance groups.
_MINIMUM = {"pytorch": (1, 10), "tensorflow": (2, 6)}
_SHOWN = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}


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


_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")
_FILE_SYSTEM_TYPES = {"efs": "EFS", "fsx": "FSxLustre"}


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


# Classes of characters as Java writes them, for use inside brackets.
_JAVA_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\d",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\p{Alnum}": "a-zA-Z0-9",
}


class ServiceShape(Protocol):
    """Describes a part of the model, as botocore does."""

    name: str
    type_name: str
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A violation names a value of the request that the API's model does not allow.

    Attributes:
        path: Path as in `InputDataConfig[0].ChannelName`.
        what: What is wrong, with the value and the limit.
    """

    path: str
    what: str


def choices(shape_name: str) -> tuple[str, ...]:
    """Returns all values of an enumeration of the model, such as `TrainingInstanceType`."""
    return tuple(getattr(_shape(shape_name), "enum"))  # noqa: B009


def maximum(shape_name: str) -> int:
    """Returns the largest number, length or count that the model allows, as of `InstanceGroups`."""
    return int(str(_shape(shape_name).metadata["max"]))


def violations(body: Mapping[str, Json]) -> Iterator[Violation]:
    """Yields what botocore would send although the model does not allow it.

    Args:
        body: A CreateTrainingJob request that botocore would send.
    """
    yield from _walk(body, _request_shape(), "")


def _walk(value: Json, shape: ServiceShape, path: str) -> Iterator[Violation]:
    if isinstance(value, str):
        yield from _check_text(value, shape, path)
    # Before the numbers: in Python a bool is an int.
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield from _check_bounds(int(value), shape, path, "is", str(value))
    elif isinstance(value, Mapping):
        yield from _walk_mapping(value, shape, path)
    elif isinstance(value, list | tuple):
        yield from _check_bounds(len(value), shape, path, "has", f"{len(value)} entries")
        member: ServiceShape = getattr(shape, "member")  # noqa: B009
        for index, item in enumerate(value):
            yield from _walk(item, member, f"{path}[{index}]")


def _walk_mapping(value: Mapping[str, Json], shape: ServiceShape, path: str) -> Iterator[Violation]:
    # A structure has a rule for each member; a map (Environment) one for names, one for values.
    if shape.type_name == "structure":
        members: Mapping[str, ServiceShape] = getattr(shape, "members")  # noqa: B009
        for key, item in value.items():
            yield from _walk(item, members[key], f"{path}.{key}" if path else key)
        return
    yield from _check_bounds(len(value), shape, path, "has", f"{len(value)} entries")
    key_shape: ServiceShape = getattr(shape, "key")  # noqa: B009
    value_shape: ServiceShape = getattr(shape, "value")  # noqa: B009
    for key, item in value.items():
        yield from _walk(key, key_shape, f"{path} (a name)")
        yield from _walk(item, value_shape, f"{path}.{key}")


def _check_text(text: str, shape: ServiceShape, path: str) -> Iterator[Violation]:
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    length = f"{len(text)} characters ({shown})"
    yield from _check_bounds(len(text), shape, path, "has", length)
    allowed = tuple(getattr(shape, "enum", ()))
    if allowed and text not in allowed:
        listed = ", ".join(allowed) if len(allowed) < 12 else f"one of {len(allowed)} values"
        yield Violation(path=path, what=f"is {shown}, the service allows {listed}")
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(str(pattern)).fullmatch(text):
        # `.` matches all but a line break.
        problem = "has a line break" if pattern == ".*" else f"does not match {pattern}"
        yield Violation(path=path, what=f"{problem}: {shown}")


def _check_bounds(
    number: int, shape: ServiceShape, path: str, verb: str, shown: str
) -> Iterator[Violation]:
    for limit, is_wrong in (("max", int.__gt__), ("min", int.__lt__)):
        bound = shape.metadata.get(limit)
        if isinstance(bound, int) and is_wrong(number, bound):
            word = "most" if limit == "max" else "least"
            yield Violation(path=path, what=f"{verb} {shown}, the service allows at {word} {bound}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _JAVA_CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)


def _request_shape() -> ServiceShape:
    return _shape("CreateTrainingJobRequest")


@functools.cache
def _shape(name: str) -> ServiceShape:
    shape: ServiceShape = getattr(_model(), "shape_for")(name)  # noqa: B009
    return shape


@functools.cache
def _model() -> object:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    # Without a client: that would need a region, and look for credentials in the network.
    model: object = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    return model


# CreateTrainingJob's own words on MaxRuntimeInSeconds; the model does not say it.
MAX_RUN_SECONDS = 28 * 86400

# Types with disks of their own, which the hardware encrypts.
OWN_DISKS = re.compile(
    r"^ml\.(g4dn|g5|g6e?|g7e?|p3dn|p4de?|p5(e|en)?|p6e?-\w+|trn1n?|trn2|[cmr]\d[a-z]*d)\."
)
# What to do about a limit of the model, by the beginning of the path.
_FIXES = {
    "TrainingJobName": "choose another --name: letters, digits and dashes",
    "AlgorithmSpecification.ContainerArguments": "put the command into a script, and call that",
    "AlgorithmSpecification.MetricDefinitions": "change sagemaker.metric_definitions",
    "Environment": "shorten it, or hand it over as a file of a channel",
    "HyperParameters": "shorten it, or hand it over as a file of a channel",
    "InputDataConfig": "change the workload's channels",
    "Tags": "change sagemaker.tags",
    "VpcConfig": "change sagemaker.vpc",
}
_GROUPS_FIX = "plan fewer groups: stoker decide proposes one data group"


def check_body(body: Body) -> None:
    """Checks what users wrote into a CreateTrainingJob request.

    Raises:
        UsageError: If the service would refuse it: the first rule that it breaks, with the reason.
    """
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Yields each rule that the request breaks."""
    # Before the model's limits: the reasons of these rules say more.
    for rule in _RULES:
        yield from rule(body)
    for found in violations(body):
        yield UsageError(
            f"{found.path} {found.what}",
            where=_place(body, found.path),
            fix=next(
                (fix for start, fix in _FIXES.items() if found.path.startswith(start)),
                "change it in the workload",
            ),
        )


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


def _place(body: Body, path: str) -> str:
    found = re.match(r"InputDataConfig\[(\d+)\]", path)
    return f"channel {channels_of(body)[int(found.group(1))][0]}" if found else "CreateTrainingJob"
