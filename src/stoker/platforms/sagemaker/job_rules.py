"""What must hold of a job before a request can be made of it, each with its reason."""

import re

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.containers import check_container
from stoker.platforms.strategies import check_strategy
from stoker.records import Channel, Framework, Group, MetricDefinition, SageMakerSettings

TOKEN_CHANNEL = "stoker_token"
CODE_CHANNEL = "stoker_code"

# Versions from which AWS's frameworks know instance groups.
_MINIMUM = {"pytorch": (1, 10), "tensorflow": (2, 6)}
_SHOWN = {"pytorch": "PyTorch", "tensorflow": "TensorFlow"}


def settings_of(job: JobSpec) -> SageMakerSettings:
    """The job's settings for SageMaker, with all that the request needs beside them checked.

    Raises:
        UsageError: Naming the key of the workload and the reason.
    """
    settings = job.sagemaker
    if settings is None:
        raise UsageError(
            "the workload has no settings for SageMaker",
            where=f"job {job.name}, key sagemaker",
            fix="add sagemaker: {role: arn:aws:iam::ACCOUNT:role/NAME, output_uri: s3://...}",
        )
    check_container(job, settings.entrypoint, platform="SageMaker", key="sagemaker")
    _check_groups(job.groups, settings.framework)
    check_strategy(job.strategy, job.groups)
    for name, channel in job.channels.items():
        _check_channel(name, channel)
    _check_source(settings.source)
    for definition in settings.metric_definitions or ():
        _check_metric(definition)
    for key in settings.tags:
        if key.startswith("stoker:"):
            raise UsageError(
                f"tag {key}: stoker: is stoker's own", where="key sagemaker.tags", fix="rename it"
            )
    return settings


def _check_groups(groups: tuple[Group, ...], framework: Framework | None) -> None:
    trainers = [group.name for group in groups if group.role == "dnn"]
    if len(trainers) != 1 or groups[0].role != "dnn":
        raise UsageError(
            "a job trains on exactly one dnn group, and it comes first: one distribution, of one "
            f"group; found {', '.join(f'{group.name} ({group.role})' for group in groups)}",
            where="the plan's groups",
            fix="for example --group dnn=ml.g5.2xlarge:1 --group data=ml.c7i.4xlarge:2",
        )
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
            f"channel {name} is stoker's own", where=f"key channels.{name}", fix="call it otherwise"
        )
    if not channel.uri.startswith("s3://"):
        raise UsageError(
            f"SageMaker reads S3, not {channel.uri}",
            where=f"key channels.{name}.uri",
            fix="copy the data there: aws s3 sync FOLDER s3://BUCKET/FOLDER",
        )


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
            f"metric {definition.name}: {definition.regex} is no regular expression: {err}",
            where="key sagemaker.metric_definitions",
        ) from None
    if num_groups != 1:
        raise UsageError(
            f"metric {definition.name}: {definition.regex} has {num_groups} groups; the one group "
            "is the value",
            where="key sagemaker.metric_definitions",
            fix="write (?:...) where a group is no value",
        )
