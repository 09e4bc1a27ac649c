"""The channels of a job: the workload's, the run's token, and the code."""

from collections.abc import Sequence

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.job_rules import CODE_CHANNEL, TOKEN_CHANNEL
from stoker.platforms.sagemaker.request_parts import without_none
from stoker.records import Channel, Group, Json, Role, nearest

_ROLES: tuple[Role, ...] = ("dnn", "data")


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
    groups = {name: _groups_of(name, channel, job.groups) for name, channel in channels.items()}
    if not any(groups.values()):
        return [_channel(name, channel, ()) for name, channel in channels.items()]
    # One channel with groups means all channels with groups.
    everyone = tuple(group.name for group in job.groups)
    return [_channel(name, channel, groups[name] or everyone) for name, channel in channels.items()]


def _groups_of(name: str, channel: Channel, groups: Sequence[Group]) -> tuple[str, ...]:
    """Names of the groups that get a channel; () for all of them.

    A channel names groups or roles. In a job of one group, who loads is the dnn group: it gets what
    the data group would.
    """
    names = [group.name for group in groups]
    for named in channel.groups or ():
        if named not in names and named not in _ROLES:
            raise UsageError(
                f"there is no instance group {named}",
                where=f"key channels.{name}.groups",
                fix=nearest(named, [*names, *_ROLES]),
            )
    if len(groups) == 1 or not channel.groups:
        return ()
    found = tuple(g.name for g in groups if g.name in channel.groups or g.role in channel.groups)
    return () if len(found) == len(groups) else found


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
