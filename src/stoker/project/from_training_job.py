"""A workload made from a SageMaker training job, in script mode or with an entry point."""

import re
import textwrap

import yaml

from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.patch import mapping_of, unreserved
from stoker.platforms.sagemaker.request import RESERVED
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, text
from stoker.records.hyperparameters import decoded, driver_decoded
from stoker.workload_file import FLOAT_TAG, SCALARS

# The times that the SDK appends to the names of jobs.
_STAMP = re.compile(r"-(\d{14}|\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3})$")
# Keys of a channel, and what they are called in DescribeTrainingJob.
_CHANNEL = {
    "data_type": "DataSource.S3DataSource.S3DataType",
    "distribution": "DataSource.S3DataSource.S3DataDistributionType",
    "mode": "InputMode",
    "attribute_names": "DataSource.S3DataSource.AttributeNames",
    "record_wrapper": "RecordWrapperType",
}
_DEFAULTS = ("S3Prefix", "FullyReplicated", "File", "None")
# Not taken: jobs with instance groups, which plans with data hosts have, cannot have them.
_NOT_FOR_GROUPS = (
    "EnableManagedSpotTraining",
    "StoppingCondition MaxWaitTimeInSeconds",
    "StoppingCondition MaxPendingTimeInSeconds",
    "ResourceConfig KeepAlivePeriodInSeconds",
)
_RESERVED = {**RESERVED, **dict.fromkeys(_NOT_FOR_GROUPS, "")}


class _WorkloadDumper(yaml.SafeDumper):
    """A dumper whose texts, such as 1e-4, are read as texts by `stoker.workload_file`."""


_WorkloadDumper.add_implicit_resolver(FLOAT_TAG, SCALARS["float"], list("-+.0123456789"))


def from_training_job(name: str, *, aws: Aws) -> tuple[str, str]:
    """Returns name and YAML text of a training job's workload, or raises UsageError."""
    try:
        job = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    except ServiceError as err:
        # ValidationException: DescribeTrainingJob's answer for a missing job.
        if err.kind == "missing" or err.code == "ValidationException":
            raise ServiceError(
                f"training job {name} not found in {aws.region}",
                where="sagemaker:DescribeTrainingJob",
                fix="correct its name, or its region: --region R",
            ) from err
        raise
    if not (image := _at(job, "AlgorithmSpecification.TrainingImage")):
        raise UsageError(
            f"training job {name} names an algorithm, not an image that stoker could run in",
            fix="name a job with an image, such as AWS's framework images",
        )
    notes = [
        f"Made from SageMaker's training job {name} ({text(job, 'TrainingJobStatus')}, created "
        f"{text(job, 'CreationTime')[:10]}, {aws.region}). All keys: stoker schema workload."
    ]
    words = mapping(job, "HyperParameters")
    value_of = driver_decoded if _is_of_driver(job) else decoded
    hyperparameters = {key: value_of(str(word)) for key, word in sorted(words.items())}
    command, source, processes = _start(job, hyperparameters, notes)
    dnn, roles = _hosts(job, notes)
    channels = _channels(job, roles, source, notes)
    settings: dict[str, Json] = {
        "role": job.get("RoleArn"),
        "output_uri": str(_at(job, "OutputDataConfig.S3OutputPath")).rstrip("/"),
        "region": aws.region,
        "source": source,
        "max_run_seconds": _at(job, "StoppingCondition.MaxRuntimeInSeconds"),
        "checkpoint_uri": _at(job, "CheckpointConfig.S3Uri"),
        "request": _request(job, aws, list(channels), notes),
    }
    short = re.sub(r"[^a-z0-9-]+", "-", _STAMP.sub("", name).lower())[:40].strip("-") or "training"
    document: dict[str, Json] = {
        "schema": "stoker.workload/v1",
        "name": short,
        "command": command,
        "image": image,
        "platform": "sagemaker",
        "cluster": {"dnn": dnn | ({"processes_per_host": processes} if processes else {})},
        "channels": channels,
        "hyperparameters": {k: v for k, v in hyperparameters.items() if k[:10] != "sagemaker_"},
        "sagemaker": {key: value for key, value in settings.items() if value},
    }
    metrics = mappings(job, "FinalMetricDataList")
    ended = ", ".join(f"{text(each, 'MetricName')} {each.get('Value')}" for each in metrics)
    notes.append(
        "The job does not say how good the model must be, nor how long it trains. Add gate: "
        "[{metric: accuracy, min: 0.94}] for what the script reports with stoker.log_metrics, and "
        "training: {epochs: 10, samples_per_epoch: 50000, global_batch_size: 256}."
        + (f" The job's metrics ended at {ended}." if ended else "")
    )
    head = ""
    for note in notes:
        head += textwrap.indent(textwrap.fill(note, 96, break_on_hyphens=False), "# ") + "\n"
    body = {key: value for key, value in document.items() if value}
    dumped = yaml.dump(body, Dumper=_WorkloadDumper, sort_keys=False, allow_unicode=True, width=96)
    return short, f"{head}{dumped}"


def _at(document: Json, path: str) -> Json:
    *parents, last = re.split("[ .]", path)
    return mapping(document, *parents).get(last)


def _start(job: Document, given: Document, notes: list[str]) -> tuple[list[str], str | None, Json]:
    """Returns the command, the package of its code, and its processes on each host."""
    uris = {text(c, "ChannelName"): _uri(c) for c in mappings(job, "InputDataConfig")}
    algorithm = mapping(job, "AlgorithmSpecification")
    parts = (algorithm.get("ContainerEntrypoint"), algorithm.get("ContainerArguments"))
    words = [str(word) for part in parts if isinstance(part, list) for word in part]
    if words[:2] == ["stoker", "launch"]:
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} was started by stoker",
            fix="use the workload that it was started with",
        )
    addition = "Build an image on top of it (containers/launcher), and put its address here."
    notes.append(f"image: stoker must be in it. {addition}")
    program = str(given.get("sagemaker_program", ""))
    if not program and not words:
        notes.append(
            "command: the job names no program. SageMaker ran the image's entry point (docker "
            "inspect shows it) with the argument `train`: write it here."
        )
    if not program:
        return words or ["train"], None, 1
    packages = (str(given.get("sagemaker_submit_directory", "")), uris.get("code"))
    source = next((uri for uri in packages if uri and re.match(r"s3://.*\.tar\.gz$", uri)), None)
    notes.append(
        "sagemaker.source: a requirements.txt in it is installed on all hosts when the job starts."
        if source
        else "sagemaker.source: the job does not say where its code came from. Name a folder or a "
        "package (.tar.gz) in S3, unless the code is in the image."
    )
    run = {".py": ["python"], ".sh": ["bash"]}.get(program[-3:], ["python", "-m"])
    # Of `distribution`: MPI names its processes; torchrun starts one for each GPU, as stoker does.
    count = given.get("sagemaker_mpi_num_of_processes_per_host")
    if not (isinstance(count, int) and count > 0):
        is_distributed = any(k.endswith("_enabled") and v is True for k, v in given.items())
        count = None if is_distributed else 1
    return [*run, program], source, count


def _hosts(job: Document, notes: list[str]) -> tuple[dict[str, Json], dict[str, str]]:
    """Returns `cluster.dnn`, and each instance group's role."""
    resources = dict(mapping(job, "ResourceConfig"))
    # Of several types (InstancePreferences), the one that the job got.
    for key in ("InstanceType", "InstanceCount"):
        resources[key] = resources.get(f"Selected{key}") or resources.get(key)
    groups = mappings(resources, "InstanceGroups")
    if not groups and not resources.get("InstanceType"):
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} runs serverless, or has no hosts yet",
            fix="name a job that ran on instances",
        )
    trainers = [g for g in groups if not text(g, "InstanceGroupName").lower().startswith("data")]
    gpus = [g for g in trainers or groups if re.match(r"ml\.(p|g|trn)", text(g, "InstanceType"))]
    hosts = next(iter(gpus or trainers or groups), resources)
    if len(groups) > 1:
        rest = [(text(g, "InstanceGroupName"), g) for g in groups if g is not hosts]
        others = ", ".join(
            f"{name} ({g.get('InstanceCount')} x {g.get('InstanceType')})" for name, g in rest
        )
        notes.append(
            f"cluster.dnn: the job's group {text(hosts, 'InstanceGroupName')}; correct it if "
            f"another one trains. The rest, {others}, is left out: stoker decide picks data hosts."
        )
    dnn = {"instance_type": hosts.get("InstanceType"), "count": hosts.get("InstanceCount") or 1}
    return dnn, {text(g, "InstanceGroupName"): "dnn" if g is hosts else "data" for g in groups}


def _uri(channel: Document) -> str:
    """Returns the address of a channel's data as workloads write it; empty for another source."""
    if disk := mapping(channel, "DataSource", "FileSystemDataSource"):
        scheme = "efs" if disk.get("FileSystemType") == "EFS" else "fsx"
        return f"{scheme}://{text(disk, 'FileSystemId')}/{text(disk, 'DirectoryPath').lstrip('/')}"
    return text(channel, "DataSource", "S3DataSource", "S3Uri")


def _channels(job: Document, roles: dict[str, str], source: Json, notes: list[str]) -> Document:
    channels: dict[str, Json] = {}
    default = _at(job, "AlgorithmSpecification.TrainingInputMode")
    for channel in mappings(job, "InputDataConfig"):
        name, uri = text(channel, "ChannelName"), _uri(channel)
        if not uri:
            notes.append(f"channels.{name} is left out: it is not read from S3 or a file system.")
        if not uri or uri == source:
            continue
        groups = mapping(channel, "DataSource", "S3DataSource").get("InstanceGroupNames")
        named = {roles[g] for g in groups if g in roles} if isinstance(groups, list) else set()
        values: dict[str, Json] = {key: _at(channel, path) for key, path in _CHANNEL.items()}
        values["mode"] = None if uri[:3] in ("efs", "fsx") else values["mode"] or default
        values["groups"] = sorted(named)
        kept = {key: value for key, value in values.items() if value and value not in _DEFAULTS}
        channels[name] = {"uri": uri, **kept}
    return channels


def _request(job: Document, aws: Aws, channels: list[str], notes: list[str]) -> dict[str, Json]:
    """Returns the rest of the request, as it is."""
    model = getattr(aws.client("sagemaker"), "meta").service_model  # noqa: B009
    settable = model.operation_model("CreateTrainingJob").input_shape.members
    settings = {key: value for key, value in job.items() if key in settable}
    request = mapping_of({}, mapping(unreserved(settings, _RESERVED)))
    configs = mappings(request, "InputDataConfig")
    others = [c for c in configs if text(c, "ChannelName") in channels and len(c) > 1]
    try:
        arn = text(job, "TrainingJobArn")
        listed = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
        # Only AWS may set its own.
        tags = [dict(tag) for tag in listed if not text(tag, "Key").startswith("aws:")]
    except ServiceError as err:
        why, tags = err.code or err.what, []
        notes.append(f"sagemaker.request.Tags: the job's tags could not be read ({why}).")
    request |= {"InputDataConfig": others, "Tags": tags}
    if left := [path.replace(" ", ".") for path in _NOT_FOR_GROUPS if _at(job, path)]:
        notes.append(
            f"Not taken, as jobs with data hosts cannot have it: {', '.join(left)}. Add it under "
            "sagemaker.request for a job without them."
        )
    if left := sorted({"MlflowConfig", "TensorBoardOutputConfig"} & settings.keys()):
        notes.append(f"Not taken: {', '.join(left)}. The key tracking has it.")
    return {key: value for key, value in request.items() if value}


def _is_of_driver(job: Document) -> bool:
    """Whether a ModelTrainer of SageMaker's SDK 3 made the job, with its own start program."""
    channels = (text(each, "ChannelName") for each in mappings(job, "InputDataConfig"))
    return "sm_drivers" in channels
