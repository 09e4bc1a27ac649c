"""Rules of a CreateTrainingJob request that the service checks late, or not at all.

The service refuses wrong lengths and patterns at once. It checks instance groups minutes later, or
after a pipeline's first steps.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stoker.errors import MissingExtraError, UsageError
from stoker.platforms.base import JobSpec, check_container, check_job
from stoker.records import Channel, Json, SageMakerSettings, bare_type, nearest
from stoker.records.base import mapping, mappings

if TYPE_CHECKING:
    from botocore.model import ServiceModel

Body = Mapping[str, Json]
TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")


def groups_of(body: Body) -> list[Body]:
    """Returns the instance groups; a homogeneous job has none."""
    return mappings(body, "ResourceConfig", "InstanceGroups")


def instance_types(body: Body) -> list[tuple[str, str]]:
    """Returns (place, type) of all hosts."""
    resources = mapping(body, "ResourceConfig")
    alone = [("ResourceConfig", resources)] if "InstanceType" in resources else []
    groups = [(f"group {text(each, 'InstanceGroupName')}", each) for each in groups_of(body)]
    return [(place, text(each, "InstanceType")) for place, each in (*groups, *alone)]


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


def without_none(values: Mapping[str, Json]) -> dict[str, Json]:
    return {key: value for key, value in values.items() if value is not None}


def settings_of(job: JobSpec) -> SageMakerSettings:
    """Returns the settings for SageMaker of a job; raises UsageError if it cannot run there."""
    settings = job.platform_settings.sagemaker
    if settings is None:
        what = "the workload has no settings for SageMaker"
        fix = "add sagemaker: {role: arn:aws:iam::ACCOUNT:role/NAME, output_uri: s3://...}"
        raise UsageError(what, where=f"job {job.name}, key sagemaker", fix=fix)
    check_container(job, settings.entrypoint, platform="SageMaker", key="sagemaker")
    check_job(job)
    for name, channel in job.channels.items():
        _check_channel(name, channel)
        if file_system(channel.uri) and not settings.vpc:
            what = f"channel {name} is a file system, which is reached through a VPC"
            fix = "name Subnets and SecurityGroupIds that reach it (NFS: port 2049; Lustre: 988)"
            raise UsageError(what, where="key sagemaker.request.VpcConfig", fix=fix)
    source = settings.source or ""
    if "://" in source and not (source.startswith("s3://") and source.endswith(".tar.gz")):
        what = f"code comes from a folder or a .tar.gz in S3, not from {source}"
        fix = "name a folder: stoker packs and uploads it"
        raise UsageError(what, where="key sagemaker.source", fix=fix)
    return settings


def _check_channel(name: str, channel: Channel) -> None:
    if name in (TOKEN_CHANNEL, CODE_CHANNEL):
        raise UsageError(
            f"channel name {name} is reserved", where=f"key channels.{name}", fix="rename yours"
        )
    if file_system(channel.uri):
        if channel.mode != "File" or channel.data_type != "S3Prefix" or channel.groups:
            what = f"channel {name} is a file system: mode, data_type and groups are for S3"
            fix = "leave them out: all groups mount it"
            raise UsageError(what, where=f"key channels.{name}", fix=fix)
    elif not channel.uri.startswith("s3://"):
        raise UsageError(
            f"SageMaker reads S3, EFS and FSx for Lustre, not {channel.uri}",
            where=f"key channels.{name}.uri",
            fix="copy the data there: aws s3 sync FOLDER s3://BUCKET/FOLDER, or name a file "
            "system: efs://fs-0123456789abcdef0/FOLDER, fsx://fs-0123456789abcdef0/MOUNT/FOLDER",
        )


def file_system(uri: str) -> dict[str, Json] | None:
    """Returns a read-only FileSystemDataSource for an efs:// or fsx:// address, else None."""
    found = _FILE_SYSTEM.fullmatch(uri)
    if not found:
        return None
    return {
        "FileSystemId": found.group(2),
        "FileSystemAccessMode": "ro",
        "FileSystemType": "EFS" if found.group(1) == "efs" else "FSxLustre",
        "DirectoryPath": found.group(3),
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


@functools.cache
def _model() -> "ServiceModel":
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    # Not from a client, which would need a region, and look for credentials on the network.
    return ServiceModel(Loader().load_service_model("sagemaker", "service-2"))


def check_body(body: Body) -> None:
    """Raises the first of `problems`."""
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Yields an error for each broken rule; one alone if botocore refuses the request."""
    model = _model()
    from botocore.validate import ParamValidator

    shape = model.operation_model("CreateTrainingJob").input_shape
    if wrong := ParamValidator().validate(body, shape).generate_report():
        yield UsageError(
            "CreateTrainingJob would refuse this: " + wrong.replace("\n", "; "),
            where="key sagemaker.request",
            fix="see the API reference of CreateTrainingJob",
        )
        return
    for rule in _RULES:
        yield from rule(body)


def notes(body: Body) -> list[str]:
    """Returns conditions that cannot be checked in advance, as sentences for `--dry-run`."""
    found = []
    if body.get("VpcConfig"):
        found.append("the security groups must let the hosts reach each other by any TCP port")
        found.append("the subnets need a route to S3, for example a gateway endpoint")
        if body.get("EnableInterContainerTrafficEncryption"):
            found += ["for the encryption the hosts also need UDP port 500 and protocol 50 (ESP)"]
    if body.get("EnableNetworkIsolation"):
        found.append("the containers reach only each other: all data comes through channels")
    for name, channel in channels_of(body):
        if s3_source(channel).get("S3DataDistributionType") == "ShardedByS3Key":
            found.append(
                f"channel {name}: each host gets only a part of the objects; a sampler must not "
                "choose samples of other hosts"
            )
        if mode_of(body, channel) == "Pipe":
            found.append(f"channel {name}: only one process can read a pipe, once per epoch")
    if body.get("EnableManagedSpotTraining") and not body.get("CheckpointConfig"):
        found.append("without sagemaker.checkpoint_uri an interrupted job starts from scratch")
    return found


def _group_rules(body: Body) -> Iterator[UsageError]:
    groups = groups_of(body)
    if not groups:
        return
    # botocore checks no upper limits.
    most = int(_model().shape_for("InstanceGroups").metadata["max"])
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
    if body.get(spot):
        what = "managed spot with instance groups is not documented: no lost data host is replaced"
        yield UsageError(what, where=spot, fix=fix)


def _type_rules(body: Body) -> Iterator[UsageError]:
    known = tuple(_model().shape_for("TrainingInstanceType").enum)
    for where, name in instance_types(body):
        if name in known:
            continue
        what = f"SageMaker has no instance type {name}"
        fix = nearest(name, known)
        # In SageMaker's SDK, `local` and `local_gpu` are the types of local mode.
        if bare_type(name).startswith("local"):
            what = f"{name} is a type of local mode, not of training jobs"
            fix = "use --platform local, which has instance groups, too"
        yield UsageError(what, where=where, fix=fix)


_RULES = (_group_rules, _type_rules, _channel_rules)
