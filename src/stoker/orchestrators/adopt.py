"""A training job that exists becomes a workload: `stoker init DIR --from-training-job NAME`.

Four ways are known: a job of stoker's own; script mode of the SDK's version 2 (the program is a
hyperparameter that the image's toolkit reads); ModelTrainer of version 3 (a script in the channel
`sm_drivers`); and an image with an entry point of its own.
"""

import json
import math
import posixpath
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import yaml

from stoker.catalog import Catalog
from stoker.errors import PlatformError, UsageError
from stoker.platforms.aws import Aws, AwsError
from stoker.platforms.base import MLFLOW_RUN
from stoker.records import Channel, Json, Role, Scalar


class _Part(msgspec.Struct, kw_only=True, rename="pascal"):
    """All parts of the answer ignore keys that they do not name."""


class S3Source(_Part):
    """A channel brings these objects of S3."""

    s3_data_type: str = "S3Prefix"
    s3_uri: str = ""
    s3_data_distribution_type: str = "FullyReplicated"
    attribute_names: tuple[str, ...] = ()
    instance_group_names: tuple[str, ...] = ()


class FileSystemSource(_Part):
    """Names a folder of EFS or FSx for Lustre that a channel mounts."""

    file_system_id: str
    file_system_type: str
    directory_path: str

    @property
    def uri(self) -> str:
        """Returns the folder as workloads name it."""
        scheme = "efs" if self.file_system_type == "EFS" else "fsx"
        return f"{scheme}://{self.file_system_id}/{self.directory_path.lstrip('/')}"


class JobSource(_Part):
    """Tells where a channel's data is; neither for a data set of the hub."""

    s3_data_source: S3Source | None = None
    file_system_data_source: FileSystemSource | None = None


class ChannelPart(_Part):
    """Describes one input channel."""

    channel_name: str
    data_source: JobSource = msgspec.field(default_factory=JobSource)
    content_type: str | None = None
    compression_type: str | None = None
    record_wrapper_type: str | None = None
    input_mode: str | None = None
    shuffle_config: dict[str, int] | None = None


class MetricPart(_Part):
    """The service reads a metric from the log with this regular expression."""

    name: str
    regex: str


class Algorithm(_Part):
    """Names image, entry point and arguments."""

    training_image: str | None = None
    algorithm_name: str | None = None
    training_input_mode: str = "File"
    metric_definitions: tuple[MetricPart, ...] = ()
    container_entrypoint: tuple[str, ...] = ()
    container_arguments: tuple[str, ...] = ()


class GroupPart(_Part):
    """Describes one instance group."""

    instance_group_name: str
    instance_type: str
    instance_count: int = 1


class Resources(_Part):
    """Describes the hosts."""

    instance_type: str | None = None
    instance_count: int | None = None
    instance_groups: tuple[GroupPart, ...] = ()
    selected_instance_type: str | None = None
    selected_instance_count: int | None = None
    # `rename` would make VolumeSizeInGb of it.
    volume_size_in_gb: int | None = msgspec.field(default=None, name="VolumeSizeInGB")
    volume_kms_key_id: str | None = None
    keep_alive_period_in_seconds: int | None = None
    training_plan_arn: str | None = None


class Output(_Part):
    """Tells where the outputs go."""

    s3_output_path: str = ""
    kms_key_id: str | None = None
    compression_type: str | None = None


class Stopping(_Part):
    """Tells how long the job may take."""

    max_runtime_in_seconds: int | None = None
    max_wait_time_in_seconds: int | None = None


class VpcPart(_Part):
    """Names the network that hosts join."""

    security_group_ids: tuple[str, ...] = ()
    subnets: tuple[str, ...] = ()


class Checkpoints(_Part):
    """SageMaker keeps this folder in step with S3."""

    s3_uri: str = ""
    local_path: str | None = None


class FinalMetric(_Part):
    """Holds a metric's last value."""

    metric_name: str
    value: float


class JobAnswer(_Part):
    """DescribeTrainingJob answers with this; a workload is made of it.

    Attributes:
        others: Settings that are set, and that a workload cannot hold.
    """

    training_job_name: str
    training_job_arn: str = ""
    training_job_status: str = ""
    creation_time: str = ""
    algorithm_specification: Algorithm = msgspec.field(default_factory=Algorithm)
    hyper_parameters: dict[str, str] = msgspec.field(default_factory=dict)
    role_arn: str = ""
    input_data_config: tuple[ChannelPart, ...] = ()
    output_data_config: Output = msgspec.field(default_factory=Output)
    resource_config: Resources | None = None
    vpc_config: VpcPart | None = None
    stopping_condition: Stopping = msgspec.field(default_factory=Stopping)
    checkpoint_config: Checkpoints | None = None
    environment: dict[str, str] = msgspec.field(default_factory=dict)
    final_metric_data_list: tuple[FinalMetric, ...] = ()
    enable_network_isolation: bool = False
    enable_inter_container_traffic_encryption: bool = False
    enable_managed_spot_training: bool = False
    others: tuple[str, ...] = ()


# Settings for which a workload has no key: the file that is written names them.
_OTHERS = (
    "DebugHookConfig",
    "DebugRuleConfigurations",
    "TensorBoardOutputConfig",
    "ProfilerConfig",
    "ProfilerRuleConfigurations",
    "ExperimentConfig",
    "RetryStrategy",
    "RemoteDebugConfig",
    "InfraCheckConfig",
    "MlflowConfig",
    "ModelPackageConfig",
)


def parse_answer(answer: Mapping[str, Json]) -> JobAnswer:
    """Returns the answer of DescribeTrainingJob, typed.

    Raises:
        PlatformError: If it is not what the service's model says.
    """
    try:
        job = msgspec.convert(dict(answer), JobAnswer)
    except msgspec.ValidationError as err:
        raise PlatformError(
            f"the answer of SageMaker is not understood: {err}",
            where="sagemaker:DescribeTrainingJob",
        ) from None
    job.others = tuple(key for key in _OTHERS if _is_set(answer.get(key)))
    return job


def _is_set(value: Json) -> bool:
    if isinstance(value, Mapping):
        return any(_is_set(item) for item in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return any(_is_set(item) for item in value)
    # The service's answers hold defaults, too: what is empty or off is nobody's setting.
    return value not in (None, "", False)


_WIDTH = 96


@dataclass(frozen=True, slots=True)
class YamlEntry:
    """An entry writes a key with its value or its own entries; without a key, only comments.

    A note that begins with blanks is a line to copy: it is not wrapped.
    """

    key: str
    value: Json
    notes: tuple[str, ...] = ()
    children: "tuple[YamlEntry, ...]" = ()


def render(entries: Sequence[YamlEntry], *, indent: int = 0) -> str:
    """Returns the entries as YAML; at the outer level an empty line comes before each comment."""
    blocks: list[str] = []
    for entry in entries:
        if entry.notes and indent == 0 and blocks:
            blocks.append("")
        blocks += [line for note in entry.notes for line in _comment(note, indent)]
        if entry.key:
            blocks += _lines(entry, indent)
    return "\n".join(blocks)


def _lines(entry: YamlEntry, indent: int) -> list[str]:
    margin = " " * indent
    if entry.children:
        return [f"{margin}{entry.key}:", render(entry.children, indent=indent + 2)]
    value = _plain(entry.value)
    is_flat = isinstance(value, list) and not any(isinstance(i, list | dict) for i in value)
    # A list of words is on the line of the key, everything else below it.
    text = yaml.safe_dump(
        value if is_flat else {entry.key: value},
        sort_keys=False,
        allow_unicode=True,
        width=_WIDTH - indent - len(entry.key),
        default_flow_style=is_flat,
    )
    first, *rest = text.rstrip("\n").split("\n")
    if is_flat:
        return [f"{margin}{entry.key}: {first}", *(f"{margin}  {line}" for line in rest)]
    return [margin + line for line in (first, *rest)]


def _plain(value: object) -> object:
    """Turns tuples and mappings, which YAML's safe dumper does not know, into lists and dicts."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _comment(note: str, indent: int) -> list[str]:
    margin = " " * indent + "# "
    if note.startswith(" "):
        return [margin + note]
    words = " ".join(note.split())
    return textwrap.wrap(
        words,
        width=_WIDTH + 2,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )


def decoded(text: str) -> Scalar:
    """Returns the value that a hyperparameter's text means; the text itself where that is unclear.

    A value is used only if it would be written as the same text, or, for a quoted text, if its
    content does not read as another value: `1e-3`, `01` and `"true"` stay as they are.
    """
    _, value = _json(text)
    if isinstance(value, str):
        return text if not value or _json(value)[0] else value
    if isinstance(value, bool | int | float) and math.isfinite(value):
        # A run would hand another text to the script than the job did, such as 0.001 for 1e-3.
        return value if json.dumps(value) == text else text
    return text


def _json(text: str) -> tuple[bool, Json]:
    """Returns whether the text is JSON, and its value."""
    try:
        return True, json.loads(text)
    except ValueError:
        return False, None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedHosts:
    """Describes today's hosts.

    Attributes:
        instance_type: Instance type of the dnn group.
        count: Count of the dnn group.
        roles: Name of each instance group to its role; {} for a homogeneous job.
        notes: How the roles were found, and what else users should know.
    """

    instance_type: str
    count: int
    roles: Mapping[str, Role]
    notes: tuple[str, ...]


def hosts_of(job: JobAnswer, catalog: Catalog, *, name: str) -> AdoptedHosts:
    """Returns the hosts of `job`, the groups told apart; `name` is the workload's.

    Raises:
        UsageError: If it has no hosts that a workload could name.
    """
    resources = job.resource_config
    if resources is None:
        raise UsageError(
            f"training job {job.training_job_name} runs serverless: it has no hosts to feed",
            fix="name a job that runs on instances",
        )
    groups = resources.instance_groups
    if groups:
        return _of_groups(job, groups, catalog, name)
    # A job may name several types to choose from (InstancePreferences): the one that it got.
    instance_type = resources.selected_instance_type or resources.instance_type
    if not instance_type:
        raise UsageError(
            f"training job {job.training_job_name} does not say on which instance type it ran",
            fix="name a job that has been given its hosts",
        )
    count = resources.selected_instance_count or resources.instance_count or 1
    return AdoptedHosts(
        instance_type=instance_type,
        count=count,
        roles={},
        notes=_of_type(instance_type, catalog),
    )


def _of_groups(
    job: JobAnswer, groups: tuple[GroupPart, ...], catalog: Catalog, name: str
) -> AdoptedHosts:
    dnn, because = _dnn(job, groups, catalog)
    data = [group for group in groups if group is not dnn]
    notes = [
        f"The job's group {dnn.instance_group_name}, here dnn: {because}.",
        *_of_type(dnn.instance_type, catalog),
    ]
    if data:
        shown = ", ".join(f"{g.instance_group_name} ({_shown(g)})" for g in data)
        today = " ".join(
            f"--group {role}={g.instance_type}:{g.instance_count}"
            for role, g in [("dnn", dnn), ("data", data[0])]
        )
        notes += [
            f"Its other groups, here data: {shown}. They are no part of this key: which hosts feed "
            "it is the decision's to say. As it was:",
            f"  stoker train {today} configs/{name}.yaml",
        ]
    return AdoptedHosts(
        instance_type=dnn.instance_type,
        # The service's model allows a group of 0 hosts, a workload does not.
        count=max(1, dnn.instance_count),
        roles={g.instance_group_name: "dnn" if g is dnn else "data" for g in groups},
        notes=tuple(notes),
    )


def _dnn(job: JobAnswer, groups: tuple[GroupPart, ...], catalog: Catalog) -> tuple[GroupPart, str]:
    """Returns the group that trains, and how it was found."""
    if len(groups) == 1:
        return groups[0], "it is the only one"
    # From what the job says to what only suggests it. Version 2 of the SDK writes the group of
    # `distribution` here, as a list in JSON.
    text = job.hyper_parameters.get("sagemaker_distribution_instance_groups", "")
    named = [g for g in groups if f'"{g.instance_group_name}"' in text]
    if len(named) == 1:
        return named[0], "the job's distribution named it"
    # The launcher's own rule, where nothing else names the roles.
    others = [g for g in groups if not g.instance_group_name.lower().startswith("data")]
    if len(others) == 1:
        return others[0], "it alone is not called data"
    fast = [g for g in groups if _accelerators(g, catalog)]
    if len(fast) == 1:
        return fast[0], "it alone has accelerators"
    guess = (fast or list(groups))[0]
    return guess, "a guess: the job does not say which group trains; name the right one"


def _accelerators(group: GroupPart, catalog: Catalog) -> int:
    try:
        return catalog.get(group.instance_type).accelerators
    except UsageError:
        return 0


def _of_type(instance_type: str, catalog: Catalog) -> tuple[str, ...]:
    try:
        catalog.get(instance_type)
    except UsageError:
        return (
            f"The catalog does not know {instance_type}: give its vCPUs and price to stoker decide "
            "with --prices.",
        )
    return ()


def _shown(group: GroupPart) -> str:
    return f"{group.instance_count} x {group.instance_type}"


def hyperparameters_of(job: JobAnswer) -> dict[str, Json]:
    """Returns the script's hyperparameters; the toolkit's own (`sagemaker_...`) are left out."""
    return {
        name: decoded(value)
        for name, value in sorted(job.hyper_parameters.items())
        if not name.startswith("sagemaker_")
    }


DRIVERS = "sm_drivers"
_CODE = "code"
_CODE_FOLDER = "/opt/ml/input/data/code"
_OURS = "stoker_"
# The images' toolkit runs pip for a requirements.txt; stoker's launcher does not.
_NOT_INSTALLED = (
    "stoker installs nothing when the job starts: what requirements.txt names belongs in the image."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStart:
    """Tells how a job starts.

    Attributes:
        command: Command of the workload.
        notes: Sentences on where it comes from, and what to look at.
        source: Package of the training's code.
        channels: Names of channels that carry code or tokens, no data.
        processes_per_host: Where the job says it.
    """

    command: tuple[str, ...]
    notes: tuple[str, ...]
    source: str | None = None
    channels: frozenset[str] = field(default_factory=frozenset)
    processes_per_host: int | None = None


def start_of(job: JobAnswer, drivers: Mapping[str, Json] | None) -> TrainingStart:
    """Finds out how `job` starts.

    Args:
        job: Job as the service describes it.
        drivers: Content of the channel `sm_drivers`: sourcecode.json, and distributed.json under
            the key `distributed`; None where it could not be read, or there is none.
    """
    algorithm = job.algorithm_specification
    entrypoint, arguments = algorithm.container_entrypoint, algorithm.container_arguments
    channels = {channel.channel_name: channel for channel in job.input_data_config}
    # In this order: stoker's jobs and those of version 3 have an entry point, too.
    if tuple(entrypoint[:2]) == ("stoker", "launch"):
        return _of_stoker(job, (*entrypoint[2:], *arguments), channels)
    if DRIVERS in channels:
        return _of_version_3(channels, drivers)
    program = _toolkit(job, "program")
    if program:
        return _of_script_mode(job, program, channels)
    if entrypoint:
        return TrainingStart(
            command=(*entrypoint, *arguments),
            notes=("The job's entry point and its arguments.",),
        )
    if arguments:
        return TrainingStart(
            command=arguments,
            notes=(
                "The job's arguments. The image's own ENTRYPOINT came before them; SageMaker does "
                "not tell it: put its words in front (docker inspect shows them).",
            ),
        )
    return TrainingStart(
        command=("train",),
        notes=(
            "The job names no program: SageMaker ran the image with the one argument `train`. "
            "Where the image has an ENTRYPOINT, write its words here instead (docker inspect "
            "shows them).",
        ),
    )


def _of_stoker(
    job: JobAnswer, words: tuple[str, ...], channels: Mapping[str, ChannelPart]
) -> TrainingStart:
    command = words[words.index("--") + 1 :] if "--" in words else words
    uri = _uri(channels.get("stoker_code"))
    # Where stoker packed the code itself the channel is the folder around the package.
    name = posixpath.basename(job.environment.get("STOKER_CODE_FILE", "")) or "code.tar.gz"
    source = uri if not uri or uri.endswith(".tar.gz") else f"{uri.rstrip('/')}/{name}"
    return TrainingStart(
        command=command or ("train",),
        notes=("The job was started by stoker already; this is what its launcher was given.",),
        source=source,
        channels=frozenset(name for name in channels if name.startswith(_OURS)),
    )


def _of_script_mode(
    job: JobAnswer, program: str, channels: Mapping[str, ChannelPart]
) -> TrainingStart:
    notes = ["The program of script mode (hyperparameter sagemaker_program)."]
    directory = _toolkit(job, "submit_directory") or ""
    code = _uri(channels.get(_CODE)) or ""
    dropped: frozenset[str] = frozenset()
    source: str | None = None
    # Where the SDK uploaded the package. Under network isolation it comes by the channel `code`.
    if directory.startswith("s3://"):
        source = directory
    elif code.endswith(".tar.gz"):
        source, dropped = code, frozenset((_CODE,))
    if source:
        notes.append(_NOT_INSTALLED)
    else:
        notes.append(
            "Where its code came from could not be seen: set sagemaker.source to a folder or a "
            "package (.tar.gz) in S3, unless it is in the image."
        )
    processes = _processes(job)
    # Without a number stoker starts a process for each GPU, as most of these do.
    if processes is None and _is_distributed(job):
        notes.append("The job's `distribution` started the processes; here torchrun does.")
    elif processes is None:
        processes = 1
        notes.append(
            "The job had no `distribution`: one process a host, as processes_per_host says."
        )
    return TrainingStart(
        command=_run(program),
        notes=tuple(notes),
        source=source,
        channels=dropped,
        processes_per_host=processes,
    )


def _of_version_3(
    channels: Mapping[str, ChannelPart], drivers: Mapping[str, Json] | None
) -> TrainingStart:
    code = _uri(channels.get(_CODE)) or ""
    is_package = code.endswith(".tar.gz")
    # Code that is no package stays a channel of the job: the script is run from there.
    hidden = frozenset((DRIVERS, _CODE)) if is_package else frozenset((DRIVERS,))
    folder = "" if is_package else f"{_CODE_FOLDER}/"
    script = (drivers or {}).get("entry_script")
    words = (drivers or {}).get("command")
    where = (
        ()
        if is_package or not code
        else (
            f"The code stays in its channel, {_CODE_FOLDER}; it was the working folder there, and "
            "is not here.",
        )
    )
    source = code if is_package else None
    if isinstance(script, str) and script:
        return TrainingStart(
            command=_run(f"{folder}{script}"),
            notes=("The entry script of the SDK's ModelTrainer.", *where, _NOT_INSTALLED),
            source=source,
            channels=hidden,
            processes_per_host=_processes_of_version_3(drivers or {}),
        )
    if isinstance(words, str) and words:
        # `exec`: the shell would not pass SIGTERM on to the command.
        shell = words if is_package or not code else f"cd {_CODE_FOLDER} && exec {words}"
        return TrainingStart(
            command=("bash", "-c", shell),
            notes=("The command of the SDK's ModelTrainer, in a shell as there.", _NOT_INSTALLED),
            source=source,
            channels=hidden,
        )
    return TrainingStart(
        command=("python", f"{folder}train.py"),
        notes=(
            "The SDK's ModelTrainer keeps its script's name in an object (sourcecode.json of the "
            "channel sm_drivers) that could not be read: train.py is a guess, put the right one.",
            *where,
            _NOT_INSTALLED,
        ),
        source=source,
        channels=hidden,
    )


def _run(program: str) -> tuple[str, ...]:
    if program.endswith(".py"):
        return ("python", program)
    if program.endswith(".sh"):
        return ("bash", program)
    return ("python", "-m", program)


def _toolkit(job: JobAnswer, name: str) -> str | None:
    """Returns what the toolkit of script mode was told: a hyperparameter, else a variable."""
    value = decoded(job.hyper_parameters.get(f"sagemaker_{name}", ""))
    return str(value or "") or job.environment.get(f"SAGEMAKER_{name.upper()}") or None


def _processes(job: JobAnswer) -> int | None:
    # Of `distribution={"mpi": {"processes_per_host": N}}`.
    value: Scalar = decoded(job.hyper_parameters.get("sagemaker_mpi_num_of_processes_per_host", ""))
    return value if isinstance(value, int) and value > 0 else None


def _is_distributed(job: JobAnswer) -> bool:
    return any(
        # sagemaker_torch_distributed_enabled, sagemaker_mpi_enabled and others.
        name.startswith("sagemaker_") and name.endswith("_enabled") and decoded(value) is True
        for name, value in job.hyper_parameters.items()
    )


def _processes_of_version_3(drivers: Mapping[str, Json]) -> int | None:
    distributed = drivers.get("distributed")
    if not isinstance(distributed, Mapping) or not distributed:
        # Without `distributed` ModelTrainer starts the script once on each host.
        return 1
    count = distributed.get("process_count_per_node")
    return count if isinstance(count, int) and count > 0 else None


def _uri(channel: ChannelPart | None) -> str | None:
    source = channel.data_source.s3_data_source if channel else None
    return source.s3_uri if source else None


_TYPES = ("S3Prefix", "ManifestFile", "AugmentedManifestFile")


def channel_entries(
    job: JobAnswer, start: TrainingStart, roles: Mapping[str, Role]
) -> list[YamlEntry]:
    """Returns the channels of `job` as a workload's, with the job's groups by their roles.

    Args:
        job: Job as the service describes it.
        start: Names the channels that carry no data.
        roles: Name of each instance group to its role.
    """
    taken: list[YamlEntry] = []
    notes: list[str] = []
    for part in job.input_data_config:
        name = part.channel_name
        if name in start.channels:
            continue
        source = part.data_source.s3_data_source
        disk = part.data_source.file_system_data_source
        if disk is not None:
            taken.append(YamlEntry(name, {"uri": disk.uri}))
            continue
        if source is None or not source.s3_uri.startswith("s3://"):
            notes.append(f"Channel {name} is not read from S3: stoker cannot pass it on; left out.")
            continue
        if source.s3_data_type not in _TYPES:
            notes.append(f"Channel {name} has the data type {source.s3_data_type}; left out.")
            continue
        notes += _lost(part)
        mode = part.input_mode or job.algorithm_specification.training_input_mode
        taken.append(YamlEntry(name, _channel(part, source, mode, roles)))
    hidden = sorted(start.channels)
    if hidden:
        notes.append(f"Left out, as they carry code and not data: {', '.join(hidden)}.")
    if not taken and not notes:
        return []
    if not taken:
        return [YamlEntry("", None, tuple(notes))]
    return [YamlEntry("channels", None, tuple(notes), tuple(taken))]


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
    # People are to read the file: what is the default anyway is left out.
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


_FRAMEWORK = re.compile(r"/(pytorch|tensorflow)-training[^:]*:(\d+\.\d+(?:\.\d+)?)")
_CHECKPOINTS = "/opt/ml/checkpoints"


def platform_entries(
    job: JobAnswer,
    start: TrainingStart,
    *,
    region: str,
    tags: Mapping[str, str],
    notes: tuple[str, ...],
) -> tuple[YamlEntry, ...]:
    """Returns the workload's `sagemaker` settings, without SageMaker's defaults and unset ones.

    Args:
        job: Job as the service describes it.
        start: Names the package of the code.
        region: Where the job is.
        tags: Tags of the job.
        notes: Put after the settings.
    """
    resources, output, stopping = (
        job.resource_config,
        job.output_data_config,
        job.stopping_condition,
    )
    # AWS's images have framework and version in their address.
    framework = _FRAMEWORK.search(job.algorithm_specification.training_image or "")
    # Of a run by stoker: the next one gets its own.
    ours = sorted(n for n in job.environment if n.startswith("STOKER_") or n == MLFLOW_RUN)
    environment = {k: v for k, v in sorted(job.environment.items()) if k not in ours}
    plain: list[tuple[str, Json, tuple[str, ...]]] = [
        ("role", job.role_arn, ("configs/sagemaker/stoker.yaml has the rights that it needs.",)),
        ("output_uri", output.s3_output_path.rstrip("/"), ()),
        ("region", region, ()),
        ("source", start.source, ()),
        (
            "framework",
            {"name": framework[1], "version": framework[2]} if framework else None,
            (),
        ),
        ("volume_gb", resources.volume_size_in_gb if resources else None, ()),
        ("volume_kms_key", resources.volume_kms_key_id if resources else None, ()),
        ("output_kms_key", output.kms_key_id, ()),
        ("max_run_seconds", stopping.max_runtime_in_seconds, ()),
        (
            "vpc",
            {
                "subnets": list(job.vpc_config.subnets),
                "security_groups": list(job.vpc_config.security_group_ids),
            }
            if job.vpc_config
            else None,
            ("Its security groups must let the hosts reach each other by TCP.",),
        ),
        ("encrypt_traffic", job.enable_inter_container_traffic_encryption or None, ()),
        ("network_isolation", job.enable_network_isolation or None, ()),
        (
            "checkpoint_uri",
            job.checkpoint_config.s3_uri if job.checkpoint_config else None,
            _checkpoint_notes(job),
        ),
        (
            "environment",
            environment or None,
            ("See that nothing in it is secret: requests and logs show it.",),
        ),
        ("tags", dict(sorted(tags.items())) or None, ()),
        (
            "metric_definitions",
            [
                {"name": metric.name, "regex": metric.regex}
                for metric in job.algorithm_specification.metric_definitions
            ]
            or None,
            (),
        ),
    ]
    return (
        # What is 0, false or empty is the workload's default, too.
        *(YamlEntry(key, value, said) for key, value, said in plain if value),
        *(YamlEntry("", None, (note,)) for note in (*notes, *_homogeneous_only(job))),
    )


def _checkpoint_notes(job: JobAnswer) -> tuple[str, ...]:
    local = job.checkpoint_config.local_path if job.checkpoint_config else None
    if local in (None, "", _CHECKPOINTS):
        return ()
    return (f"The job kept them in {local}; here they are kept in {_CHECKPOINTS}.",)


def _homogeneous_only(job: JobAnswer) -> list[str]:
    resources = job.resource_config
    notes = []
    # Not taken: a plan may have two groups, and these exclude each other (see `checks`).
    if job.enable_managed_spot_training:
        wait = job.stopping_condition.max_wait_time_in_seconds
        notes.append(
            "The job used managed spot, which two groups cannot have. To plan for one group "
            f"only: spot: true, max_wait_seconds: {wait or 86400}, and max_data_hosts: 0."
        )
    if resources and resources.keep_alive_period_in_seconds:
        notes.append(
            "The job kept a warm pool, which two groups cannot have. To plan for one group "
            f"only: keep_alive_seconds: {resources.keep_alive_period_in_seconds}, and "
            "max_data_hosts: 0."
        )
    return notes


# The times that the SDK's two versions append to the names of jobs.
_STAMP = re.compile(r"-(\d{14}|\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Holds a workload made of a training job.

    Attributes:
        name: Name of the workload.
        text: Its YAML, with comments on what was taken and what could not be known.
    """

    name: str
    text: str


def adopt(name: str, *, aws: Aws, catalog: Catalog) -> Adopted:
    """Asks SageMaker for a training job and writes it down as a workload.

    Raises:
        PlatformError: If there is no such job, or it may not be looked at.
        UsageError: If a workload cannot describe the job.
    """
    try:
        answer = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    except AwsError as err:
        # DescribeTrainingJob answers so for a job that does not exist.
        if err.is_missing or err.code == "ValidationException":
            raise AwsError(
                f"there is no training job {name} in {aws.region}",
                where="sagemaker:DescribeTrainingJob",
                fix="look at its name and region: --region R",
            ) from err
        raise
    job = parse_answer(answer)
    tags, notes = _tags(job, aws)
    return workload_of(
        job,
        catalog=catalog,
        region=aws.region,
        tags=tags,
        tag_notes=notes,
        drivers=_drivers(job, aws),
    )


def workload_of(
    job: JobAnswer,
    *,
    catalog: Catalog,
    region: str,
    tags: Mapping[str, str] | None = None,
    tag_notes: tuple[str, ...] = (),
    drivers: Mapping[str, Json] | None = None,
) -> Adopted:
    """Returns the workload that a training job becomes.

    Args:
        job: Job as the service describes it.
        catalog: Catalog of SageMaker's instance types, to tell accelerators.
        region: Where the job is.
        tags: Tags of the job.
        tag_notes: What is to be said of them.
        drivers: What the SDK's ModelTrainer left in the channel `sm_drivers`, where it was read.

    Raises:
        UsageError: If no workload can hold it.
    """
    image = job.algorithm_specification.training_image
    if not image:
        raise UsageError(
            f"training job {job.training_job_name} runs the algorithm "
            f"{job.algorithm_specification.algorithm_name}: there is no image to run stoker in",
            fix="name a job with an image of its own, or with one of AWS's framework images",
        )
    name = workload_name(job.training_job_name)
    start = start_of(job, drivers)
    hosts = hosts_of(job, catalog, name=name)
    dnn: dict[str, Json] = {"instance_type": hosts.instance_type, "count": hosts.count}
    if start.processes_per_host:
        dnn["processes_per_host"] = start.processes_per_host
    entries = [
        YamlEntry("", None, (_head(job, region), "All keys: stoker schema workload.")),
        YamlEntry("schema", "stoker.workload/v1"),
        YamlEntry("name", name),
        YamlEntry("command", start.command, start.notes),
        YamlEntry("image", image, (_image_note(job, start),)),
        YamlEntry("platform", "sagemaker"),
        YamlEntry("cluster", {"dnn": dnn}, ("Today's cluster.", *hosts.notes)),
        *channel_entries(job, start, hosts.roles),
        *_hyperparameter_entries(job),
        YamlEntry("", None, _gate_notes(job)),
        YamlEntry("constraints", {"objective": "cost"}, _constraint_notes()),
        YamlEntry(
            "sagemaker",
            None,
            children=platform_entries(job, start, region=region, tags=tags or {}, notes=tag_notes),
        ),
        *([YamlEntry("", None, (_not_taken(job),))] if _not_taken(job) else []),
    ]
    return Adopted(name=name, text=render(entries) + "\n")


def workload_name(job_name: str) -> str:
    """Makes a workload's name from a job's, without the time that SDKs append."""
    name = re.sub(r"[^a-z0-9-]+", "-", _STAMP.sub("", job_name).lower())
    return name[:40].strip("-") or "training"


def _drivers(job: JobAnswer, aws: Aws) -> Mapping[str, Json] | None:
    sources = (
        channel.data_source.s3_data_source
        for channel in job.input_data_config
        if channel.channel_name == DRIVERS
    )
    uri = next((source.s3_uri.rstrip("/") for source in sources if source), "")
    if not uri.startswith("s3://"):
        return None
    try:
        found = msgspec.json.decode(
            aws.read_object(f"{uri}/sourcecode.json"), type=dict[str, object]
        )
        launch = msgspec.json.decode(aws.read_object(f"{uri}/distributed.json"))
    # Perhaps only the job's role may read that bucket: notes in the file say what is missing.
    except (AwsError, msgspec.DecodeError):
        return None
    texts: dict[str, Json] = {k: v for k, v in found.items() if isinstance(v, str)}
    return {**texts, "distributed": launch}


def _tags(job: JobAnswer, aws: Aws) -> tuple[dict[str, str], tuple[str, ...]]:
    if not job.training_job_arn:
        return {}, ()
    tags: dict[str, str] = {}
    try:
        for tag in aws.pages(
            "sagemaker", "ListTags", items="Tags", ResourceArn=job.training_job_arn
        ):
            key = str(tag.get("Key", ""))
            # AWS's own tags, which nobody else may set.
            if not key.startswith("aws:"):
                tags[key] = str(tag.get("Value", ""))
    except AwsError as err:
        return {}, (f"The job's tags could not be read ({err.code or err.what}).",)
    return tags, ()


def _head(job: JobAnswer, region: str) -> str:
    created = f", created {job.creation_time[:10]}" if job.creation_time else ""
    return (
        f"Taken from SageMaker's training job {job.training_job_name} "
        f"({job.training_job_status or 'status unknown'}{created}, {region})."
    )


def _image_note(job: JobAnswer, start: TrainingStart) -> str:
    if "stoker_token" in start.channels:
        return "The image of the job; stoker is in it."
    return (
        "The image of the job. stoker must be in it: build one on top of it "
        "(make image BASE_IMAGE=this, containers/launcher) and put that one's address here."
    )


def _hyperparameter_entries(job: JobAnswer) -> list[YamlEntry]:
    values = hyperparameters_of(job)
    hidden = sorted(name for name in job.hyper_parameters if name.startswith("sagemaker_"))
    notes = [f"Left out, as they are the toolkit's own: {', '.join(hidden)}."] if hidden else []
    if values:
        return [YamlEntry("hyperparameters", values, ("Added after the command.", *notes))]
    return [YamlEntry("", None, tuple(notes))] if notes else []


def _gate_notes(job: JobAnswer) -> tuple[str, ...]:
    ended = ", ".join(f"{m.metric_name} {m.value:g}" for m in job.final_metric_data_list)
    return (
        "A job does not say how good the model must be. A gate judges what the script reports "
        "with stoker.log_metrics(accuracy=0.97), or in the file $STOKER_METRICS:",
        "  gate: [{metric: accuracy, min: 0.94}]",
        *((f"The job's own metrics ended at: {ended}.",) if ended else ()),
        "Nor does it say how long it trains. For hours and dollars of the whole training:",
        "  training: {epochs: 10, samples_per_epoch: 50000, global_batch_size: 256}",
    )


def _constraint_notes() -> tuple[str, ...]:
    return (
        "What a plan may be: also max_usd_per_hour, deadline_hours, max_data_hosts, "
        "allowed_instance_types.",
    )


def _not_taken(job: JobAnswer) -> str:
    others = list(job.others)
    if job.output_data_config.compression_type == "NONE":
        others.append("OutputDataConfig.CompressionType NONE")
    if job.resource_config and job.resource_config.training_plan_arn:
        others.append("ResourceConfig.TrainingPlanArn")
    return f"Set in the job, and not taken: {', '.join(others)}." if others else ""
