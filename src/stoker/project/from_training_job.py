"""A workload made from a SageMaker training job, in script mode or with an entry point."""

import re
import textwrap

import yaml

from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.patch import mapping_of, unreserved
from stoker.platforms.sagemaker.checks import channels_of, s3_source
from stoker.platforms.sagemaker.request import RESERVED
from stoker.platforms.sagemaker.submit import find_job
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings, text, texts
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
# A run's name also holds the pipeline run's id, a branch and a step, in 63 characters.
_MAX_NAME = 40


class _WorkloadDumper(yaml.SafeDumper):
    """A dumper whose texts, such as 1e-4, are read as texts by `stoker.workload_file`."""


_WorkloadDumper.add_implicit_resolver(FLOAT_TAG, SCALARS["float"], list("-+.0123456789"))


def from_training_job(name: str, *, aws: Aws) -> tuple[str, str]:
    """Returns name and YAML text of a training job's workload, or raises UsageError."""
    job = find_job(aws, name)
    if job is None:
        raise ServiceError(
            f"training job {name} not found in {aws.region}",
            where="sagemaker:DescribeTrainingJob",
            fix="correct its name, or its region: --region R",
        )
    image = _at(job, "AlgorithmSpecification.TrainingImage")
    if not image:
        raise UsageError(
            f"training job {name} names an algorithm, not an image that stoker could run in",
            fix="name a job with an image, such as AWS's framework images",
        )
    notes = [
        f"Made from SageMaker's training job {name} ({text(job, 'TrainingJobStatus')}, created "
        f"{text(job, 'CreationTime')[:10]}, {aws.region}). All keys: stoker schema workload."
    ]
    hyperparameters = _hyperparameters(job)
    command, source, processes = _start(job, hyperparameters, notes)
    dnn, roles = _hosts(job, notes)
    if processes:
        dnn["processes_per_host"] = processes
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
    notes.append(_missing_facts(job))
    # The others are for SageMaker's toolkit, which stoker's launcher replaces.
    scripts_own = {
        key: value for key, value in hyperparameters.items() if not key.startswith("sagemaker_")
    }
    workload_name = _workload_name(name)
    document: dict[str, Json] = {
        "schema": "stoker.workload/v1",
        "name": workload_name,
        "command": command,
        "image": image,
        "platform": "sagemaker",
        "cluster": {"dnn": dnn},
        "channels": channels,
        "hyperparameters": scripts_own,
        "sagemaker": {key: value for key, value in settings.items() if value},
    }
    return workload_name, _commented(document, notes)


def _hyperparameters(job: Document) -> dict[str, Json]:
    """Returns the job's hyperparameters with their types, SageMaker's own included."""
    # A ModelTrainer of SageMaker's SDK 3 starts the script with its own program, in a channel.
    value_of = driver_decoded if "sm_drivers" in dict(channels_of(job)) else decoded
    texts = mapping(job, "HyperParameters")
    return {key: value_of(str(value)) for key, value in sorted(texts.items())}


def _workload_name(job_name: str) -> str:
    words = re.sub(r"[^a-z0-9-]+", "-", _STAMP.sub("", job_name).lower())
    return words[:_MAX_NAME].strip("-") or "training"


def _missing_facts(job: Document) -> str:
    """Returns the note on what no job says, and its user has to add."""
    note = (
        "The job does not say how good the model must be, nor how long it trains. Add gate: "
        "[{metric: accuracy, min: 0.94}] for what the script reports with stoker.log_metrics, and "
        "training: {epochs: 10, samples_per_epoch: 50000, global_batch_size: 256}."
    )
    metrics = mappings(job, "FinalMetricDataList")
    if metrics:
        ends = ", ".join(
            f"{text(metric, 'MetricName')} {metric.get('Value')}" for metric in metrics
        )
        note += f" The job's metrics ended at {ends}."
    return note


def _commented(document: Document, notes: list[str]) -> str:
    """Returns a workload's YAML below its notes, without the keys that have no value."""
    head = ""
    for note in notes:
        head += textwrap.indent(textwrap.fill(note, 96, break_on_hyphens=False), "# ") + "\n"
    body = {key: value for key, value in document.items() if value}
    dumped = yaml.dump(body, Dumper=_WorkloadDumper, sort_keys=False, allow_unicode=True, width=96)
    return f"{head}{dumped}"


def _at(document: Json, path: str) -> Json:
    return item_at(document, *re.split("[ .]", path))


def _start(job: Document, given: Document, notes: list[str]) -> tuple[list[str], str | None, Json]:
    """Returns the command, the package of its code, and its processes on each host."""
    algorithm = mapping(job, "AlgorithmSpecification")
    words = [*texts(algorithm, "ContainerEntrypoint"), *texts(algorithm, "ContainerArguments")]
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
    # Script mode names the package of its code in a hyperparameter, ModelTrainer in a channel.
    code_channel = dict(channels_of(job)).get("code")
    packages = (text(given, "sagemaker_submit_directory"), _uri(code_channel))
    source = next((uri for uri in packages if re.match(r"s3://.*\.tar\.gz$", uri)), None)
    if source:
        note = "a requirements.txt in it is installed on all hosts when the job starts."
    else:
        note = "the job does not say where its code came from. Name a folder or a package "
        note += "(.tar.gz) in S3, unless the code is in the image."
    notes.append(f"sagemaker.source: {note}")
    run = {".py": ["python"], ".sh": ["bash"]}.get(program[-3:], ["python", "-m"])
    return [*run, program], source, _processes(given)


def _processes(given: Document) -> Json:
    """Returns the processes on each host, as the SDK's `distribution` set them."""
    count = given.get("sagemaker_mpi_num_of_processes_per_host")
    if isinstance(count, int) and count > 0:
        return count
    # torchrun starts one for each GPU, as stoker does without a number.
    if any(key.endswith("_enabled") and value is True for key, value in given.items()):
        return None
    return 1


def _hosts(job: Document, notes: list[str]) -> tuple[dict[str, Json], dict[str, str]]:
    """Returns `cluster.dnn`, and each instance group's role."""
    resources = dict(mapping(job, "ResourceConfig"))
    # Of several types (InstancePreferences), the one that the job got.
    for key in ("InstanceType", "InstanceCount"):
        resources[key] = resources.get(f"Selected{key}") or resources.get(key)
    groups = {text(g, "InstanceGroupName"): g for g in mappings(resources, "InstanceGroups")}
    if not groups and not resources.get("InstanceType"):
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} runs serverless, or has no hosts yet",
            fix="name a job that ran on instances",
        )
    # The job does not say which of its groups trains: rather one with accelerators.
    trainers = [g for name, g in groups.items() if not name.lower().startswith("data")]
    candidates = trainers or list(groups.values())
    gpus = [g for g in candidates if re.match(r"ml\.(p|g|trn)", text(g, "InstanceType"))]
    hosts = next(iter(gpus or candidates), resources)
    if len(groups) > 1:
        others = ", ".join(
            f"{name} ({g.get('InstanceCount')} x {g.get('InstanceType')})"
            for name, g in groups.items()
            if g is not hosts
        )
        notes.append(
            f"cluster.dnn: the job's group {text(hosts, 'InstanceGroupName')}; correct it if "
            f"another one trains. The rest, {others}, is left out: stoker decide picks data hosts."
        )
    dnn = {"instance_type": hosts.get("InstanceType"), "count": hosts.get("InstanceCount") or 1}
    return dnn, {name: "dnn" if g is hosts else "data" for name, g in groups.items()}


def _uri(channel: Json) -> str:
    """Returns the address of a channel's data as workloads write it; empty for another source."""
    if disk := mapping(channel, "DataSource", "FileSystemDataSource"):
        scheme = "efs" if disk.get("FileSystemType") == "EFS" else "fsx"
        return f"{scheme}://{text(disk, 'FileSystemId')}/{text(disk, 'DirectoryPath').lstrip('/')}"
    return text(channel, "DataSource", "S3DataSource", "S3Uri")


def _channels(job: Document, roles: dict[str, str], source: Json, notes: list[str]) -> Document:
    channels: dict[str, Json] = {}
    default = _at(job, "AlgorithmSpecification.TrainingInputMode")
    for name, channel in channels_of(job):
        uri = _uri(channel)
        if not uri:
            notes.append(f"channels.{name} is left out: it is not read from S3 or a file system.")
        if not uri or uri == source:
            continue
        groups = s3_source(channel).get("InstanceGroupNames")
        values: dict[str, Json] = {key: _at(channel, path) for key, path in _CHANNEL.items()}
        values["mode"] = values["mode"] or default
        if uri.startswith(("efs:", "fsx:")):
            # A file system is mounted: it is never copied or streamed.
            del values["mode"]
        if isinstance(groups, list):
            values["groups"] = sorted({roles[group] for group in groups if group in roles})
        kept = {key: value for key, value in values.items() if value and value not in _DEFAULTS}
        channels[name] = {"uri": uri, **kept}
    return channels


def _request(job: Document, aws: Aws, channels: list[str], notes: list[str]) -> dict[str, Json]:
    """Returns the rest of the request, as it is."""
    model = getattr(aws.client("sagemaker"), "meta").service_model  # noqa: B009
    settable = model.operation_model("CreateTrainingJob").input_shape.members
    settings = {key: value for key, value in job.items() if key in settable}
    request = mapping_of({}, mapping(unreserved(settings, _RESERVED)))
    # What a channel has beyond its name: the workload has no key for it.
    others = [
        channel for name, channel in channels_of(request) if name in channels and len(channel) > 1
    ]
    try:
        arn = text(job, "TrainingJobArn")
        listed = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
        # Only AWS may set its own.
        tags = [dict(tag) for tag in listed if not text(tag, "Key").startswith("aws:")]
    except ServiceError as err:
        why = err.code or err.what
        tags = []
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
