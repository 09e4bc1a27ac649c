"""These functions read a CreateTrainingJob request: what is not there is empty."""

from collections.abc import Mapping

from stoker.records import Json

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


def mapping(value: Json) -> Body:
    """Returns the value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def mappings(value: Json) -> list[Body]:
    """Returns the mappings in the value, if it is a list."""
    items = value if isinstance(value, list | tuple) else ()
    return [item for item in items if isinstance(item, Mapping)]


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
