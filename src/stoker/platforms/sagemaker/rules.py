"""The service's rules for a CreateTrainingJob request, each with its reason.

Neither botocore nor SageMaker's own SDK nor moto knows those for instance groups: a wrong request
would be refused by the service, minutes later or after a pipeline's first steps were paid for.
"""

import json
import re
from collections.abc import Callable, Iterator

from stoker.errors import UsageError
from stoker.platforms.sagemaker import limits
from stoker.platforms.sagemaker.channel_rules import channel_rules, repeated
from stoker.platforms.sagemaker.request_parts import (
    Body,
    channels_of,
    groups_of,
    instance_types,
    mapping,
    mappings,
    mode_of,
    number,
    s3_source,
    text,
)
from stoker.records import nearest

# CreateTrainingJob's own words on MaxRuntimeInSeconds; the model does not say it.
MAX_RUN_SECONDS = 28 * 86400

# Types with disks of their own, which the hardware encrypts.
_OWN_DISKS = re.compile(
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
    """Checks a whole CreateTrainingJob request, whoever wrote it.

    Raises:
        UsageError: If the service would refuse it: the first rule that it breaks, with the reason.
    """
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Every rule that the request breaks; only what is missing or of a wrong type, if anything."""
    refused = limits.refusals(body)
    if refused:
        yield UsageError(
            "the request is not as the API's model says: " + "; ".join(refused),
            where="CreateTrainingJob",
            fix="compare it with what stoker train --dry-run prints",
        )
        return
    for rule in _RULES:
        yield from rule(body)
    for found in limits.violations(body):
        yield UsageError(
            f"{found.path} {found.what}",
            where=_place(body, found.path),
            fix=next(
                (fix for start, fix in _FIXES.items() if found.path.startswith(start)),
                "change it in the workload",
            ),
        )


def notes(body: Body) -> list[str]:
    """What nobody can check beforehand, for those who read the request."""
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
        found.append("without sagemaker.checkpoint_uri an interrupted job begins anew")
    return found


def _group_rules(body: Body) -> Iterator[UsageError]:
    resources = mapping(body.get("ResourceConfig"))
    groups = groups_of(body)
    if not groups:
        has_hosts = "InstanceType" in resources and resources.get("InstanceCount")
        if not has_hosts and "InstancePreferences" not in resources:
            yield UsageError(
                "the request names no hosts",
                where="ResourceConfig",
                fix="give it InstanceGroups, or InstanceType with InstanceCount",
            )
        return
    most = limits.maximum("InstanceGroups")
    if len(groups) > most:
        yield UsageError(
            f"a job has at most {most} instance groups, found {len(groups)}",
            where="ResourceConfig.InstanceGroups",
            fix=_GROUPS_FIX,
        )
    for other in (
        "InstanceType",
        "InstanceCount",
        "InstancePreferences",
        "InstancePlacementConfig",
    ):
        if other in resources:
            yield UsageError(
                f"instance groups and {other} exclude each other: groups say it themselves",
                where="ResourceConfig",
                fix=f"leave {other} out, or InstanceGroups",
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
    yield from repeated([text(g, "InstanceGroupName") for g in groups], "instance groups", "")
    for group in groups:
        if not group.get("InstanceCount"):
            yield UsageError(
                "a group without hosts",
                where=f"group {text(group, 'InstanceGroupName')}",
                fix="leave the group out",
            )


def _type_rules(body: Body) -> Iterator[UsageError]:
    known = limits.choices("TrainingInstanceType")
    for where, name in instance_types(body):
        if name in known:
            continue
        if name.removeprefix("ml.").startswith("local"):
            yield UsageError(
                f"{name} is a type of local mode, which runs no jobs of the service",
                where=where,
                fix="use --platform local, which has instance groups, too",
            )
            continue
        yield UsageError(
            f"SageMaker trains on no instance type {name}", where=where, fix=nearest(name, known)
        )


def _time_rules(body: Body) -> Iterator[UsageError]:
    stopping = mapping(body.get("StoppingCondition"))
    run, wait = number(stopping, "MaxRuntimeInSeconds"), number(stopping, "MaxWaitTimeInSeconds")
    is_spot = bool(body.get("EnableManagedSpotTraining"))
    if run and run > MAX_RUN_SECONDS:
        yield UsageError(
            f"a job may run for {MAX_RUN_SECONDS} s (28 days), not for {run} s",
            where="StoppingCondition.MaxRuntimeInSeconds",
            fix="lower sagemaker.max_run_seconds, and go on from a checkpoint",
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
            fix="set sagemaker.max_wait_seconds to max_run_seconds and the patience for capacity",
        )
    resources = mapping(body.get("ResourceConfig"))
    if is_spot and resources.get("KeepAlivePeriodInSeconds"):
        yield UsageError(
            "spot hosts are not kept in a warm pool",
            where="ResourceConfig.KeepAlivePeriodInSeconds",
            fix="set sagemaker.keep_alive_seconds to 0, or sagemaker.spot to false",
        )
    if is_spot and "InstancePreferences" in resources:
        yield UsageError(
            "InstancePreferences and managed spot exclude each other",
            where="ResourceConfig",
            fix="leave one of them out",
        )


def _image_rules(body: Body) -> Iterator[UsageError]:
    algorithm = mapping(body.get("AlgorithmSpecification"))
    if ("TrainingImage" in algorithm) == ("AlgorithmName" in algorithm):
        yield UsageError(
            "a job runs one image: TrainingImage, or AlgorithmName",
            where="AlgorithmSpecification",
            fix="set the workload's image",
        )
    image = mapping(algorithm.get("TrainingImageConfig"))
    if image.get("TrainingRepositoryAccessMode") == "Vpc" and not body.get("VpcConfig"):
        yield UsageError(
            "an image in a private registry is reached through a VPC only",
            where="AlgorithmSpecification.TrainingImageConfig",
            fix="add sagemaker.vpc",
        )


def _volume_rules(body: Body) -> Iterator[UsageError]:
    resources = mapping(body.get("ResourceConfig"))
    for where, name in instance_types(body):
        has_own = bool(_OWN_DISKS.match(name))
        if has_own and resources.get("VolumeKmsKeyId"):
            yield UsageError(
                f"{name} has disks of its own, which its hardware encrypts: no key can be named",
                where=where,
                fix="leave sagemaker.volume_kms_key out",
            )
        if not has_own and not resources.get("VolumeSizeInGB"):
            yield UsageError(
                f"{name} has no disks of its own: the volume's size is missing",
                where=where,
                fix="set sagemaker.volume_gb",
            )


def _distribution_rules(body: Body) -> Iterator[UsageError]:
    """What the SDK's estimators write; ours has its own launcher and no such key."""
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
            fix="name the dnn group alone: the others must not start training processes",
        )


def _tag_rules(body: Body) -> Iterator[UsageError]:
    keys = [text(tag, "Key") for tag in mappings(body.get("Tags"))]
    yield from repeated(keys, "tags", "Tags")
    for key in keys:
        if key.lower().startswith("aws:"):
            yield UsageError(f"tag {key}: aws: is AWS's own", where="Tags", fix="call it otherwise")


_RULES: tuple[Callable[[Body], Iterator[UsageError]], ...] = (
    _group_rules,
    _type_rules,
    channel_rules,
    _time_rules,
    _image_rules,
    _volume_rules,
    _distribution_rules,
    _tag_rules,
)


def _place(body: Body, path: str) -> str:
    found = re.match(r"InputDataConfig\[(\d+)\]", path)
    return f"channel {channels_of(body)[int(found.group(1))][0]}" if found else "CreateTrainingJob"
