"""An existing job's input channels."""

from collections.abc import Mapping

import msgspec

from stoker.records import Channel, Json, Role
from stoker.targets.adopt.answer import ChannelPart, JobAnswer, S3Source
from stoker.targets.adopt.command import Start
from stoker.targets.adopt.render import Entry

_TYPES = ("S3Prefix", "ManifestFile", "AugmentedManifestFile")


def channel_entries(job: JobAnswer, start: Start, roles: Mapping[str, Role]) -> list[Entry]:
    """The channels of `job` as a workload's, with the job's groups by their roles.

    Args:
        job: As the service describes it.
        start: Names the channels that carry no data.
        roles: Name of each instance group to its role.
    """
    taken: list[Entry] = []
    notes: list[str] = []
    for part in job.input_data_config:
        name = part.channel_name
        if name in start.channels:
            continue
        source = part.data_source.s3_data_source
        if source is None or not source.s3_uri.startswith("s3://"):
            notes.append(f"Channel {name} is not read from S3: stoker cannot hand it on; left out.")
            continue
        if source.s3_data_type not in _TYPES:
            notes.append(f"Channel {name} has the data type {source.s3_data_type}; left out.")
            continue
        notes += _lost(part)
        mode = part.input_mode or job.algorithm_specification.training_input_mode
        taken.append(Entry(name, _channel(part, source, mode, roles)))
    hidden = sorted(start.channels)
    if hidden:
        notes.append(f"Left out, for they carry code and no data: {', '.join(hidden)}.")
    if not taken and not notes:
        return []
    if not taken:
        return [Entry("", None, tuple(notes))]
    return [Entry("channels", None, tuple(notes), tuple(taken))]


def _channel(part: ChannelPart, source: S3Source, mode: str, roles: Mapping[str, Role]) -> Json:
    channel: dict[str, Json] = {"uri": source.s3_uri}
    groups = sorted({roles[name] for name in source.instance_group_names if name in roles})
    values: list[tuple[str, Json]] = [
        ("groups", groups or None),
        ("data_type", source.s3_data_type),
        ("distribution", source.s3_data_distribution_type),
        ("mode", mode),
        ("attribute_names", list(source.attribute_names) or None),
        ("record_wrapper", part.record_wrapper_type),
    ]
    defaults = msgspec.to_builtins(Channel(uri="s3://b"))
    channel.update({key: value for key, value in values if value != defaults[key]})
    return channel


def _lost(part: ChannelPart) -> list[str]:
    lost = {
        "ContentType": part.content_type,
        "CompressionType": None if part.compression_type == "None" else part.compression_type,
        "ShuffleConfig": part.shuffle_config,
    }
    words = ", ".join(f"{key} {value}" for key, value in lost.items() if value)
    return [f"Channel {part.channel_name}: not taken: {words}."] if words else []
