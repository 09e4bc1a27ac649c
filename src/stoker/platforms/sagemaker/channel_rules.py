"""The service's rules for a request's channels, each with its reason."""

from collections import Counter
from collections.abc import Iterator, Sequence

from stoker.errors import UsageError
from stoker.platforms.sagemaker.request_parts import (
    Body,
    channels_of,
    groups_of,
    mapping,
    mode_of,
    named_groups,
    s3_source,
    text,
)
from stoker.records import nearest


def channel_rules(body: Body) -> Iterator[UsageError]:
    """What the service would refuse of the channels."""
    channels = channels_of(body)
    yield from repeated([name for name, _ in channels], "channels", "InputDataConfig")
    known = [text(group, "InstanceGroupName") for group in groups_of(body)]
    with_groups = [name for name, channel in channels if named_groups(channel)]
    for name, channel in channels:
        where = f"channel {name}"
        source = s3_source(channel)
        unknown = [group for group in named_groups(channel) if group not in known]
        if unknown:
            yield UsageError(
                f"there is no instance group {unknown[0]}",
                where=where,
                fix=nearest(unknown[0], known) if known else "the job has no instance groups",
            )
        if with_groups and not named_groups(channel):
            yield UsageError(
                f"channel {name} names no instance groups, but {with_groups[0]} does: "
                "one channel with groups means all channels with groups",
                where=where,
                fix="name its groups, all of them if all are to have it",
            )
        if len(mapping(channel.get("DataSource"))) != 1:
            yield UsageError(
                "a channel has one source", where=where, fix="name S3 or a file system"
            )
        uri = source.get("S3Uri")
        if isinstance(uri, str) and not uri.startswith("s3://"):
            yield UsageError(
                f"{uri} is no s3:// address", where=where, fix="as in s3://bucket/folder"
            )
        yield from _mode_rules(body, channel, where)


def _mode_rules(body: Body, channel: Body, where: str) -> Iterator[UsageError]:
    source, mode = s3_source(channel), mode_of(body, channel)
    is_augmented = source.get("S3DataType") == "AugmentedManifestFile"
    if is_augmented and mode != "Pipe":
        yield UsageError(
            f"an augmented manifest is streamed: it needs mode Pipe, not {mode}",
            where=where,
            fix="set the channel's mode to Pipe, or its data_type to ManifestFile",
        )
    if is_augmented != bool(source.get("AttributeNames")):
        yield UsageError(
            "attribute names say what to stream of an augmented manifest: both, or none of them",
            where=where,
            fix="set data_type: AugmentedManifestFile with attribute_names: [source-ref, ...]",
        )
    for key, unset, word in (
        ("RecordWrapperType", "None", "record_wrapper"),
        ("CompressionType", "None", "CompressionType"),
    ):
        if channel.get(key, unset) != unset and mode != "Pipe":
            yield UsageError(
                f"{key} {channel[key]} is for mode Pipe only, not for {mode}",
                where=where,
                fix=f"leave {word} out, or set the channel's mode to Pipe",
            )
    if "FileSystemDataSource" in mapping(channel.get("DataSource")):
        if mode != "File":
            yield UsageError(
                f"a file system is read in mode File, not {mode}", where=where, fix="use File"
            )
        if not body.get("VpcConfig"):
            yield UsageError(
                "a file system is reached through a VPC only", where=where, fix="add VpcConfig"
            )


def repeated(names: Sequence[str], what: str, where: str) -> Iterator[UsageError]:
    """Names that stand there more than once."""
    for name, count in Counter(names).items():
        if count > 1:
            yield UsageError(
                f"{count} {what} are called {name}", where=where, fix="give each its own name"
            )
