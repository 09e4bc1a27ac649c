"""Applies SageMaker's rules to a whole CreateTrainingJob request of any origin.

By the API's model, and by what its reference says beside it.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from botocore.loaders import Loader
from botocore.model import ServiceModel
from botocore.validate import ParamValidator

from stoker.errors import UsageError
from support.documents import Document, Json, mapping, mappings, text

Body = Document
# Types with NVMe disks.
OWN_DISKS = re.compile(
    r"^ml\.(g4dn|g5|g6e?|g7e?|p3dn|p4de?|p5(e|en)?|p6e?-\w+|trn1n?|trn2|[cmr]\d[a-z]*d)\."
)
MODEL = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
SHAPE = MODEL.operation_model("CreateTrainingJob").input_shape


def rule_problems(body: Body) -> Iterator[UsageError]:
    """Yields each rule that the request breaks; if types are wrong or parts missing, only those."""
    if refused := ParamValidator().validate(body, SHAPE).generate_report():
        yield UsageError(f"the request is not as the API's model says: {refused}")
        return
    for rule in (_host_rules, _channel_rules, _image_rules, _distribution_rules):
        yield from rule(body)
    yield from _repeated([text(tag, "Key") for tag in mappings(body.get("Tags"))], "tags")
    for found in over_limits(body, SHAPE, "request"):
        yield UsageError(found)


def over_limits(value: Json, shape: object, path: str) -> list[str]:
    """Lists where a value has more than the model's maximum, or does not match its pattern."""
    found: list[str] = []
    most, kind = shape.metadata.get("max"), shape.type_name
    if most is not None and (
        (isinstance(value, str | list | dict) and len(value) > most)
        or (kind in ("integer", "long") and isinstance(value, int) and value > most)
    ):
        found.append(f"{path}: more than {most}")
    choices = getattr(shape, "enum", None)
    if isinstance(value, str) and choices and value not in choices:
        found.append(f"{path}: {value} is none of the choices")
    pattern = shape.metadata.get("pattern", "")
    # What Java calls \\p{L} is left to the rules of plan().
    can_match = isinstance(value, str) and pattern and "\\p" not in pattern
    if can_match and not re.fullmatch(pattern, value):
        found.append(f"{path}: {value} does not match {pattern}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            inner = shape.members[key] if kind == "structure" else shape.value
            found += over_limits(item, inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += over_limits(item, shape.member, f"{path}[{index}]")
    return found


def _host_rules(body: Body) -> Iterator[UsageError]:
    resources = mapping(body.get("ResourceConfig"))
    groups = groups_of(body)
    has_hosts = "InstanceType" in resources and resources.get("InstanceCount")
    if not groups and not has_hosts and "InstancePreferences" not in resources:
        yield UsageError("the request names no hosts")
    others = ("InstanceType", "InstanceCount", "InstancePreferences", "InstancePlacementConfig")
    for other in (key for key in others if groups and key in resources):
        yield UsageError(f"instance groups and {other} exclude each other")
    if body.get("EnableManagedSpotTraining") and "InstancePreferences" in resources:
        yield UsageError("InstancePreferences and managed spot exclude each other")
    if groups and resources.get("KeepAlivePeriodInSeconds"):
        yield UsageError("instance groups have no warm pools")
    yield from _repeated([text(group, "InstanceGroupName") for group in groups], "instance groups")
    for group in groups:
        if not group.get("InstanceCount"):
            where = f"group {text(group, 'InstanceGroupName')}"
            yield UsageError("a group without hosts", where=where)
    for where, name in instance_types(body):
        if not OWN_DISKS.match(name) and not resources.get("VolumeSizeInGB"):
            words = f"{name} has no disks of its own: the volume's size is missing"
            yield UsageError(words, where=where)


def groups_of(body: Body) -> list[Body]:
    return mappings(body, "ResourceConfig", "InstanceGroups")


def instance_types(body: Body) -> list[tuple[str, str]]:
    """Returns (place, type) of all hosts."""
    resources = mapping(body, "ResourceConfig")
    alone = [("ResourceConfig", resources)] if "InstanceType" in resources else []
    groups = [(f"group {text(each, 'InstanceGroupName')}", each) for each in groups_of(body)]
    preferred = mappings(resources, "InstancePreferences")
    choices = [("InstancePreferences", each) for each in preferred]
    return [(place, text(each, "InstanceType")) for place, each in (*groups, *alone, *choices)]


def channels_of(body: Body) -> list[tuple[str, Body]]:
    return [(text(c, "ChannelName"), c) for c in mappings(body.get("InputDataConfig"))]


def s3_source(channel: Body) -> Body:
    return mapping(channel, "DataSource", "S3DataSource")


def mode_of(body: Body, channel: Body) -> str:
    """Returns the channel's mode; default: the job's."""
    default = text(body, "AlgorithmSpecification", "TrainingInputMode")
    return text(channel, "InputMode") or default or "File"


def named_groups(channel: Body) -> list[str]:
    return [*(s3_source(channel).get("InstanceGroupNames") or ())]


def _channel_rules(body: Body) -> Iterator[UsageError]:
    channels = channels_of(body)
    known = [text(group, "InstanceGroupName") for group in groups_of(body)]
    with_groups = [name for name, channel in channels if named_groups(channel)]
    yield from _repeated([name for name, _ in channels], "channels")
    for name, channel in channels:
        where, mode, source = f"channel {name}", mode_of(body, channel), s3_source(channel)
        for unknown in (group for group in named_groups(channel) if group not in known):
            yield UsageError(f"there is no instance group {unknown}", where=where)
        if with_groups and not named_groups(channel):
            yield UsageError(
                f"channel {name} names no instance groups, but {with_groups[0]} does: "
                "one channel with groups means all channels with groups",
                where=where,
            )
        if len(mapping(channel.get("DataSource"))) != 1:
            yield UsageError("a channel has one source", where=where)
        uri = source.get("S3Uri")
        if isinstance(uri, str) and not uri.startswith("s3://"):
            yield UsageError(f"{uri} is not an s3:// address", where=where)
        is_augmented = source.get("S3DataType") == "AugmentedManifestFile"
        if is_augmented and (mode != "Pipe" or not source.get("AttributeNames")):
            yield UsageError("an augmented manifest needs mode Pipe and attributes", where=where)
        compression = channel.get("CompressionType", "None")
        if compression != "None" and mode != "Pipe":
            yield UsageError(f"{compression} is for mode Pipe only, not for {mode}", where=where)
        if "FileSystemDataSource" in mapping(channel.get("DataSource")):
            if mode != "File":
                yield UsageError(f"a file system is read in mode File, not {mode}", where=where)
            if not body.get("VpcConfig"):
                yield UsageError("a file system is reached through a VPC only", where=where)


def _image_rules(body: Body) -> Iterator[UsageError]:
    algorithm = mapping(body.get("AlgorithmSpecification"))
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield UsageError("a job runs one image: TrainingImage, or AlgorithmName")
    image = mapping(algorithm.get("TrainingImageConfig"))
    if image.get("TrainingRepositoryAccessMode") == "Vpc" and not body.get("VpcConfig"):
        yield UsageError("an image in a private registry is reached through a VPC only")


def _distribution_rules(body: Body) -> Iterator[UsageError]:
    """Checks the distribution that the SDK's estimators write; our own jobs have no such key."""
    named_text = mapping(body.get("HyperParameters")).get("sagemaker_distribution_instance_groups")
    if named_text is None:
        return
    try:
        named = json.loads(str(named_text))
    except ValueError:
        named = None
    known = [text(group, "InstanceGroupName") for group in groups_of(body)]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in known:
        yield UsageError(
            f"a job has one distribution, on one of its groups, found {named_text}",
            where="HyperParameters.sagemaker_distribution_instance_groups",
        )


def _repeated(names: list[str], what: str) -> Iterator[UsageError]:
    for name, count in Counter(names).items():
        if count > 1:
            yield UsageError(f"{count} {what} are called {name}")
