"""What SageMaker needs of a job before its request is made: settings, places, channels."""

import re

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec, check_container, check_job
from stoker.platforms.sagemaker.places import check_places
from stoker.records import Channel, Json, SageMakerSettings

TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"
_FILE_SYSTEM = re.compile(r"(efs|fsx)://(fs-[0-9a-f]{8,17})(/.*)")


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
