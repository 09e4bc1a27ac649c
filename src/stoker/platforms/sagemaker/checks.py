"""Rules of a CreateTrainingJob request, of which botocore checks few before it is sent.

The service refuses wrong lengths and patterns when it is asked, after the uploads: its model has
them (`service_limits`). It checks instance groups minutes later, or after a pipeline's first steps.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from stoker.errors import UsageError
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker.job_checks import CODE_CHANNEL, TOKEN_CHANNEL
from stoker.platforms.sagemaker.pending import is_accelerated, types_of
from stoker.platforms.sagemaker.preferences import KEY
from stoker.platforms.service_limits import (
    OverLimit,
    RequestPath,
    input_shape,
    over_limits,
    path_text,
    service_model,
    tag_problems,
)
from stoker.records import SageMakerSettings, bare_type, nearest
from stoker.records.base import Document, item_at, mapping, mappings, text

Body = Document
# 28 days: CreateTrainingJob, StoppingCondition.
MAX_RUN_SECONDS = 28 * 86400
# Of a volume of EBS (gp2), as CreateProcessingJob says.
MAX_VOLUME_GB = 16384
# Of an InstancePreferenceList.
MAX_TYPES = 5
_PENDING = "key sagemaker.request.StoppingCondition.MaxPendingTimeInSeconds"
# Of an instance type: g5, c7i-flex, p4de, trn1n.
_FAMILY = re.compile(r"[a-z]+[0-9]+[a-z-]*")
_ECR = re.compile(r"[0-9]{12}\.dkr\.ecr[a-z-]*\.[a-z0-9-]+\.amazonaws\.com")

# Where the workload, or a command, says a part of the request.
_KEYS: Mapping[RequestPath, str] = {
    ("TrainingJobName",): "--name, or key name",
    ("RoleArn",): "key sagemaker.role",
    ("AlgorithmSpecification", "TrainingImage"): "key image",
    ("AlgorithmSpecification", "ContainerEntrypoint"): "key sagemaker.entrypoint",
    ("AlgorithmSpecification", "ContainerArguments"): "key command",
    ("ResourceConfig", "InstanceGroups"): "the plan's groups (--group)",
    ("ResourceConfig", "InstanceType"): "the plan's groups (--group)",
    ("ResourceConfig", "InstancePreferences"): "key sagemaker.further_types",
    ("ResourceConfig", "InstanceCount"): "the plan's groups (--group)",
    ("OutputDataConfig", "S3OutputPath"): "key sagemaker.output_uri",
    ("StoppingCondition", "MaxRuntimeInSeconds"): "key sagemaker.max_run_seconds",
    ("CheckpointConfig",): "key sagemaker.checkpoint_uri",
    ("MlflowConfig", "MlflowRunName"): "--name, or key name",
    ("MlflowConfig",): "key tracking",
    ("TensorBoardOutputConfig",): "key sagemaker.output_uri",
    ("HyperParameters",): "key hyperparameters",
    ("Environment",): "key environment",
}
_IN_CHANNEL = {
    "S3Uri": "uri",
    "DirectoryPath": "uri",
    "FileSystemId": "uri",
    "S3DataType": "data_type",
    "S3DataDistributionType": "distribution",
    "AttributeNames": "attribute_names",
    "InstanceGroupNames": "groups",
    "InputMode": "mode",
    "RecordWrapperType": "record_wrapper",
}


def groups_of(body: Body) -> list[Body]:
    """Returns the instance groups; a homogeneous job has none."""
    return mappings(body, "ResourceConfig", "InstanceGroups")


def instance_types(body: Body) -> list[tuple[str, str]]:
    """Returns (place, type) of all hosts."""
    resources = mapping(body, "ResourceConfig")
    alone = [("ResourceConfig", resources)] if "InstanceType" in resources else []
    groups = [(f"group {text(each, 'InstanceGroupName')}", each) for each in groups_of(body)]
    preferred = mappings(resources, "InstancePreferences")
    choices = [("sagemaker.further_types", each) for each in preferred]
    return [(place, text(each, "InstanceType")) for place, each in (*groups, *alone, *choices)]


def channels_of(body: Body) -> list[tuple[str, Body]]:
    return [(text(c, "ChannelName"), c) for c in mappings(body.get("InputDataConfig"))]


def s3_source(channel: Body) -> Body:
    return mapping(channel, "DataSource", "S3DataSource")


def mode_of(body: Body, channel: Body) -> str:
    """Returns the channel's mode; default: the job's."""
    default = item_at(body, "AlgorithmSpecification", "TrainingInputMode")
    return str(channel.get("InputMode") or default or "File")


def check_secrets(job: JobSpec, settings: SageMakerSettings, variables: Document) -> None:
    """Raises UsageError for secrets that hosts could not read, or that the request sets."""
    for name, source in job.secrets.items():
        where = f"key secrets.{name}"
        if source.arn is None:
            raise UsageError(
                f"on SageMaker the secret {name} needs an ARN",
                where=where,
                fix="add arn, of Secrets Manager or of a parameter in SSM",
            )
        if name in variables:
            raise UsageError(
                f"sagemaker.request.Environment sets the secret {name}",
                where=where,
                fix="leave it out there: it is plain text",
            )
        if settings.network_isolation:
            raise UsageError(
                f"with EnableNetworkIsolation hosts cannot read the secret {name}",
                where=where,
                fix="leave EnableNetworkIsolation out, or pass what it opens as a channel",
            )


def _channel_rules(body: Body) -> Iterator[UsageError]:
    for name, channel in channels_of(body):
        where = f"channel {name}"
        source = s3_source(channel)
        mode = mode_of(body, channel)
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


def check_body(body: Body) -> None:
    """Raises the first of `problems`."""
    for problem in problems(body):
        raise problem


def problems(body: Body) -> Iterator[UsageError]:
    """Yields an error for each broken rule; one alone if botocore refuses the request."""
    shape = input_shape("sagemaker", "CreateTrainingJob")
    from botocore.validate import ParamValidator

    if wrong := ParamValidator().validate(body, shape).generate_report():
        yield UsageError(
            "CreateTrainingJob would refuse this: " + wrong.replace("\n", "; "),
            where="key sagemaker.request",
            fix="see the API reference of CreateTrainingJob",
        )
        return
    for rule in _RULES:
        yield from rule(body)
    for problem in (*over_limits(body, shape), *tag_problems(body.get("Tags"))):
        # Instance types have a rule.
        if not problem.is_growing:
            yield _refused(problem, body)


def _refused(problem: OverLimit, body: Body) -> UsageError:
    """Returns the error for a value that is over a limit, at the workload's key."""
    return UsageError(
        f"CreateTrainingJob would refuse this: {problem.place} {problem.what}",
        where=key_of(problem.path, body),
        fix=problem.nearest or "see the API reference of CreateTrainingJob",
    )


def key_of(path: RequestPath, body: Body) -> str:
    """Returns where a user wrote a part of the request: "key channels.train.uri"."""
    if path[:1] == ("InputDataConfig",) and len(path) > 1 and isinstance(path[1], int):
        name = channels_of(body)[path[1]][0]
        if name in (TOKEN_CHANNEL, CODE_CHANNEL):
            return "key sagemaker.output_uri"
        parts = [_IN_CHANNEL[part] for part in map(str, path[2:]) if part in _IN_CHANNEL]
        is_own = parts or path[2:] in ((), ("ChannelName",))
        if is_own:
            return ".".join(("key channels", name, *parts[:1]))
        return f"key sagemaker.request.InputDataConfig[{name}].{path_text(path[2:])}"
    for length in (2, 1):
        key = _KEYS.get(path[:length])
        if key is not None:
            is_map = length == 1 and path[0] in ("HyperParameters", "Environment")
            if is_map and len(path) > 1:
                return f"{key}.{path[1]}"
            return key
    return f"key sagemaker.request.{path_text(path)}"


def notes(body: Body) -> list[str]:
    """Returns conditions that cannot be checked in advance, as sentences for `--dry-run`."""
    lines = []
    if body.get("VpcConfig"):
        lines.append("the security groups must let the hosts reach each other by any TCP port")
        lines.append("the subnets need a route to S3, for example a gateway endpoint")
        if body.get("EnableInterContainerTrafficEncryption"):
            lines += ["for the encryption the hosts also need UDP port 500 and protocol 50 (ESP)"]
    if body.get("EnableNetworkIsolation"):
        lines.append("the containers reach only each other: all data comes through channels")
    for name, channel in channels_of(body):
        if s3_source(channel).get("S3DataDistributionType") == "ShardedByS3Key":
            lines.append(
                f"channel {name}: each host gets only a part of the objects; a sampler must not "
                "choose samples of other hosts"
            )
        if mode_of(body, channel) == "Pipe":
            lines.append(f"channel {name}: only one process can read a pipe, once per epoch")
    types = _known_types()
    for _, name in instance_types(body):
        if name not in types:
            lines.append(
                f"the installed botocore knows no training type {name}: perhaps it is newer "
                f"(pip install -U botocore); {nearest(name, types)}"
            )
    if body.get("EnableManagedSpotTraining") and not body.get("CheckpointConfig"):
        lines.append("without sagemaker.checkpoint_uri an interrupted job starts from scratch")
    return lines


def _group_rules(body: Body) -> Iterator[UsageError]:
    groups = groups_of(body)
    if not groups:
        return
    # botocore checks no upper limits.
    most = int(service_model("sagemaker").shape_for("InstanceGroups").metadata["max"])
    if len(groups) > most:
        yield UsageError(
            f"a job has at most {most} instance groups, found {len(groups)}",
            where="ResourceConfig.InstanceGroups",
            fix="plan fewer groups: stoker decide proposes one data group",
        )
    fix = "remove it from sagemaker.request"
    warm = "KeepAlivePeriodInSeconds"
    spot = "EnableManagedSpotTraining"
    if item_at(body, "ResourceConfig", warm):
        what = "instance groups have no warm pools"
        yield UsageError(what, where=f"ResourceConfig.{warm}", fix=fix)
    if item_at(body, "ResourceConfig", "TrainingPlanArn"):
        what = "a data group on a training plan is not documented"
        where = "key sagemaker.request.ResourceConfig.TrainingPlanArn"
        leave = "train without a data group, or leave the plan out"
        yield UsageError(what, where=where, fix=leave)
    if body.get(spot):
        what = "managed spot with instance groups is not documented: no lost data host is replaced"
        yield UsageError(what, where=spot, fix=fix)


def _registry_rules(body: Body) -> Iterator[UsageError]:
    """Checks a private registry: the hosts pull from it through the job's VPC."""
    config = mapping(body, "AlgorithmSpecification", "TrainingImageConfig")
    key = "key sagemaker.request.AlgorithmSpecification.TrainingImageConfig"
    is_private = config.get("TrainingRepositoryAccessMode") == "Vpc"
    if is_private and not body.get("VpcConfig"):
        what = "a private registry is reached through a VPC"
        fix = "add sagemaker.request.VpcConfig: {Subnets: [...], SecurityGroupIds: [...]}"
        yield UsageError(what, where=key, fix=fix)
    if config.get("TrainingRepositoryAuthConfig") and not is_private:
        what = "TrainingRepositoryAuthConfig is for a private registry"
        yield UsageError(what, where=key, fix="add TrainingRepositoryAccessMode: Vpc")
    if is_private and _ECR.match(text(body, "AlgorithmSpecification", "TrainingImage")):
        what = "an image in ECR is pulled by the job's role, not from a private registry"
        yield UsageError(what, where=key, fix="leave TrainingImageConfig out")


def _time_rules(body: Body) -> Iterator[UsageError]:
    """Checks times and volumes whose limits are in the API's reference, but in no model."""
    stopping = mapping(body, "StoppingCondition")
    key = "key sagemaker.max_run_seconds"
    seconds = stopping.get("MaxRuntimeInSeconds")
    waited = stopping.get("MaxWaitTimeInSeconds")
    if isinstance(seconds, int) and seconds > MAX_RUN_SECONDS:
        what = f"a training job may run for 28 days ({MAX_RUN_SECONDS} s), not {seconds} s"
        yield UsageError(what, where=key, fix="set fewer seconds, and continue from a checkpoint")
    if isinstance(seconds, int) and isinstance(waited, int) and waited < seconds:
        what = f"MaxWaitTimeInSeconds ({waited}) is less than MaxRuntimeInSeconds ({seconds})"
        where = "key sagemaker.request.StoppingCondition.MaxWaitTimeInSeconds"
        yield UsageError(what, where=where, fix="it contains the time of the run: set more")
    volume = item_at(body, "ResourceConfig", "VolumeSizeInGB")
    if isinstance(volume, int) and volume > MAX_VOLUME_GB:
        what = f"a host's volume has at most {MAX_VOLUME_GB} GB, not {volume}"
        where = "key sagemaker.request.ResourceConfig.VolumeSizeInGB"
        yield UsageError(what, where=where, fix="read the data from S3 (mode FastFile) or FSx")


def _known_types() -> tuple[str, ...]:
    return tuple(service_model("sagemaker").shape_for("TrainingInstanceType").enum)


def _may_be_newer(name: str, known: Sequence[str]) -> bool:
    """Returns whether a type may be newer than botocore's model: its size is another one's."""
    # An older botocore must not refuse what the service has added since.
    family, _, size = bare_type(name).partition(".")
    sizes = {each.rpartition(".")[2] for each in known}
    return bool(_FAMILY.fullmatch(family)) and size in sizes


def _type_rules(body: Body) -> Iterator[UsageError]:
    types = _known_types()
    for where, name in instance_types(body):
        if name in types or _may_be_newer(name, types):
            continue
        what = f"SageMaker has no instance type {name}"
        fix = nearest(name, types)
        # In SageMaker's SDK, `local` and `local_gpu` are the types of local mode.
        if bare_type(name).startswith("local"):
            what = f"{name} is a type of local mode, not of training jobs"
            fix = "use --platform local, which has instance groups, too"
        yield UsageError(what, where=where, fix=fix)


def _preference_rules(body: Document) -> Iterator[UsageError]:
    """Yields an error for each rule on preferences that a CreateTrainingJob request breaks."""
    resources = mapping(body, "ResourceConfig")
    types = [str(each["InstanceType"]) for each in mappings(resources, "InstancePreferences")]
    if not types:
        return
    if len(types) > MAX_TYPES:
        what = f"a job may prefer {MAX_TYPES} types, the plan's among them, not {len(types)}"
        yield UsageError(what, where=KEY, fix="leave the last ones out")
    if body.get("EnableManagedSpotTraining"):
        what = "managed spot training takes one type alone"
        fix = f"leave {KEY.removeprefix('key ')} out, or EnableManagedSpotTraining"
        yield UsageError(what, where=KEY, fix=fix)
    excluded = {
        "KeepAlivePeriodInSeconds": "a warm pool keeps hosts of one type",
        "TrainingPlanArn": "a training plan has only hosts of its type",
    }
    for name, what in excluded.items():
        if resources.get(name):
            fix = f"leave it out, or {name} of sagemaker.request"
            yield UsageError(what, where=KEY, fix=fix)


def _pending_rules(body: Document) -> Iterator[UsageError]:
    """Yields what is wrong with the request's limit of pending time, if it has one."""
    seconds = item_at(body, "StoppingCondition", "MaxPendingTimeInSeconds")
    if not isinstance(seconds, int):
        return
    # From the model of the botocore that is installed, which is updated with the service.
    limits = service_model("sagemaker").shape_for("MaxPendingTimeInSeconds").metadata
    least = int(limits["min"])
    most = int(limits["max"])
    if not least <= seconds <= most:
        what = f"a job may be pending for {least} to {most} s, not {seconds} s"
        yield UsageError(
            what, where=_PENDING, fix=f"set {min(max(seconds, least), most)}, or remove it"
        )
    if body.get("EnableManagedSpotTraining"):
        what = "managed spot waits for capacity within MaxWaitTimeInSeconds"
        fix = "remove MaxPendingTimeInSeconds, or do without spot"
        yield UsageError(what, where=_PENDING, fix=fix)
    if mappings(body, "ResourceConfig", "InstanceGroups"):
        what = "a pending limit with instance groups is not documented"
        fix = "remove it: on_no_capacity.wait_minutes repeats the plan"
        yield UsageError(what, where=_PENDING, fix=fix)
    elif not any(is_accelerated(name) for name in types_of(body)):
        what = "a pending limit has no effect on hosts without accelerators"
        fix = "remove it: on_no_capacity.wait_minutes repeats the plan"
        yield UsageError(what, where=_PENDING, fix=fix)


_RULES = (
    _group_rules,
    _preference_rules,
    _type_rules,
    _channel_rules,
    _time_rules,
    _pending_rules,
    _registry_rules,
)
