"""The channels of a job: the workload's, the run's token, and the code."""

from collections.abc import Sequence

from stoker.platforms.base import JobSpec, groups_of_channel
from stoker.platforms.sagemaker.job_rules import CODE_CHANNEL, TOKEN_CHANNEL
from stoker.platforms.sagemaker.request_parts import without_none
from stoker.records import Channel, Json


def input_channels(job: JobSpec, *, token_folder: str, code: str | None) -> list[Json]:
    """InputDataConfig of `job`.

    Args:
        job: The job.
        token_folder: Address of the folder with the object `token`.
        code: Address of the packed code, or of its folder, where there is one.

    Raises:
        UsageError: If a channel names a group that is none of the job's.
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
    # One channel with groups means all channels with groups.
    everyone = tuple(group.name for group in job.groups)
    return [_channel(name, channel, groups[name] or everyone) for name, channel in channels.items()]


def _channel(name: str, channel: Channel, groups: Sequence[str]) -> dict[str, Json]:
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
