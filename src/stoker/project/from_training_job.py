"""A workload made from a SageMaker training job, in script mode or with an entry point."""

import re
import textwrap

from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws, service_model
from stoker.platforms.patch import unreserved
from stoker.platforms.sagemaker.request import RESERVED, channels_of
from stoker.platforms.sagemaker.submit import find_job
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, text, texts
from stoker.records.hyperparameters import decoded
from stoker.records.secrets import is_secret
from stoker.workload_file import workload_yaml

# The times that the SDK appends to the names of jobs.
_STAMP = re.compile(r"-(\d{14}|\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3})$")
# Not taken: jobs with instance groups, which plans with data hosts have, cannot have them.
_NOT_FOR_GROUPS = (
    "EnableManagedSpotTraining",
    "StoppingCondition MaxWaitTimeInSeconds",
    "StoppingCondition MaxPendingTimeInSeconds",
    "ResourceConfig KeepAlivePeriodInSeconds",
)
# A run's name also holds the pipeline run's id, a branch and a step, in 63 characters.
_MAX_NAME = 40
_CODE = re.compile(r"s3://.*\.tar\.gz")


def from_training_job(name: str, *, aws: Aws) -> tuple[str, str]:
    """Returns name and YAML text of a training job's workload, or raises UsageError."""
    job = find_job(aws, name)
    if job is None:
        raise ServiceError(
            f"training job {name} not found in {aws.region}",
            where="sagemaker:DescribeTrainingJob",
            fix="correct its name, or its region: AWS_REGION",
        )
    image = text(job, "AlgorithmSpecification", "TrainingImage")
    if not image:
        raise UsageError(
            f"training job {name} names an algorithm, not an image that stoker could run in",
            fix="name a job with an image, such as AWS's framework images",
        )
    notes = [
        f"Made from SageMaker's training job {name} ({text(job, 'TrainingJobStatus')}, created "
        f"{text(job, 'CreationTime')[:10]}, {aws.region}). All keys: stoker schema workload.",
        "image: stoker must be in it. Build an image on top of it (containers/launcher), and put "
        "its address here.",
        "The job does not say how good the model must be, nor how long it trains: add gate and "
        "training.",
    ]
    given = {key: decoded(str(v)) for key, v in mapping(job, "HyperParameters").items()}
    command, source = _start(job, given, notes)
    dnn = _hosts(job, notes)
    is_distributed = any(key.endswith("_enabled") and v is True for key, v in given.items())
    if "sagemaker_program" in given and not is_distributed:
        # Script mode without `distribution` starts one process, whatever the GPUs.
        dnn["processes_per_host"] = 1
    # The others are for SageMaker's toolkit, which stoker's launcher replaces.
    options = {key: value for key, value in given.items() if not key.startswith("sagemaker_")}
    plain, hidden = _parted(options)
    notes += [f"hyperparameters.{key} is left out: it looks like a secret." for key in hidden]
    variables, secrets = _parted(mapping(job, "Environment"))
    notes += [
        f"secrets.{key}: keep its value in Secrets Manager, and put its ARN here."
        for key in secrets
    ]
    default_mode = text(job, "AlgorithmSpecification", "TrainingInputMode")
    channels = {
        key: _channel(channel, default_mode)
        for key, channel in channels_of(job)
        if _uri(channel) not in ("", source)
    }
    name = re.sub(r"[^a-z0-9]+", "-", _STAMP.sub("", name).lower())[:_MAX_NAME].strip("-")
    document: dict[str, Json] = {
        "schema": "stoker.workload/v1",
        "name": name or "training",
        "command": command,
        "image": image,
        "platform": "sagemaker",
        "cluster": {"dnn": dnn},
        "channels": channels,
        "hyperparameters": plain,
        "secrets": {key: f"arn:aws:secretsmanager:REGION:ACCOUNT:secret:{key}" for key in secrets},
        "sagemaker": _known(
            {
                "role": job.get("RoleArn"),
                "output_uri": text(job, "OutputDataConfig", "S3OutputPath").rstrip("/"),
                "region": aws.region,
                "source": source,
                "max_run_seconds": mapping(job, "StoppingCondition").get("MaxRuntimeInSeconds"),
                "checkpoint_uri": text(job, "CheckpointConfig", "S3Uri"),
                "request": _request({**job, "Environment": variables}, channels, notes),
            }
        ),
    }
    lines = (textwrap.fill(note, 96, break_on_hyphens=False) for note in notes)
    head = "".join(f"{textwrap.indent(line, '# ')}\n" for line in lines)
    return name or "training", head + workload_yaml(_known(document))


def _known(settings: Document) -> dict[str, Json]:
    return {key: value for key, value in settings.items() if value}


def _parted(values: Document) -> tuple[dict[str, Json], list[str]]:
    """Returns the values that may be written, and the names of those that look like secrets."""
    hidden = [key for key, value in values.items() if is_secret(key, str(value))]
    return {key: value for key, value in values.items() if key not in hidden}, hidden


def _start(job: Document, given: Document, notes: list[str]) -> tuple[list[str], str]:
    """Returns the command, and the package of its code; empty: it has none."""
    algorithm = mapping(job, "AlgorithmSpecification")
    words = [*texts(algorithm, "ContainerEntrypoint"), *texts(algorithm, "ContainerArguments")]
    if words[:2] == ["stoker", "launch"]:
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} was started by stoker",
            fix="use the workload that it was started with",
        )
    program = text(given, "sagemaker_program")
    if not program and not words:
        notes.append(
            "command: the job names no program. SageMaker ran the image's entry point (docker "
            "inspect shows it) with the argument `train`: write it here."
        )
    if not program:
        return words or ["train"], ""
    # Script mode names the package of its code in a hyperparameter, ModelTrainer in a channel.
    packages = (text(given, "sagemaker_submit_directory"), _uri(dict(channels_of(job)).get("code")))
    source = next(filter(_CODE.fullmatch, packages), "")
    note = "a requirements.txt in it is installed on all hosts when the job starts."
    if not source:
        note = "the job does not say where its code came from: name a folder or a package."
    notes.append(f"sagemaker.source: {note}")
    run = {".py": ["python"], ".sh": ["bash"]}.get(program[-3:], ["python", "-m"])
    return [*run, program], source


def _hosts(job: Document, notes: list[str]) -> dict[str, Json]:
    """Returns `cluster.dnn`."""
    resources = mapping(job, "ResourceConfig")
    groups = mappings(resources, "InstanceGroups") or [resources]
    # The job does not say which of its groups trains: rather one with accelerators.
    gpus = [each for each in groups if re.match(r"ml\.(p|g|trn)", text(each, "InstanceType"))]
    hosts = next(iter(gpus or groups))
    if not hosts.get("InstanceType"):
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} runs serverless, or has no hosts yet",
            fix="name a job that ran on instances",
        )
    if len(groups) > 1:
        notes.append(
            f"cluster.dnn: the job's group {text(hosts, 'InstanceGroupName')}; correct it if "
            "another one trains. The rest is left out: stoker decide picks data hosts."
        )
    return {"instance_type": hosts.get("InstanceType"), "count": hosts.get("InstanceCount") or 1}


def _uri(channel: Json) -> str:
    """Returns the address of a channel's data as workloads write it; empty for another source."""
    if disk := mapping(channel, "DataSource", "FileSystemDataSource"):
        scheme = "efs" if disk.get("FileSystemType") == "EFS" else "fsx"
        return f"{scheme}://{text(disk, 'FileSystemId')}/{text(disk, 'DirectoryPath').lstrip('/')}"
    return text(channel, "DataSource", "S3DataSource", "S3Uri")


def _channel(channel: Json, default_mode: str) -> dict[str, Json]:
    # A file system is mounted: never copied or streamed.
    source = mapping(channel, "DataSource", "S3DataSource")
    values = {
        "data_type": text(source, "S3DataType"),
        "distribution": text(source, "S3DataDistributionType"),
        "mode": (text(channel, "InputMode") or default_mode) if source else "",
    }
    defaults = ("S3Prefix", "FullyReplicated", "File", "")
    kept = {key: value for key, value in values.items() if value not in defaults}
    return {"uri": _uri(channel), **kept}


def _request(job: Document, channels: Document, notes: list[str]) -> dict[str, Json]:
    """Returns the rest of the request, as it is."""
    settable = service_model("sagemaker").operation_model("CreateTrainingJob").input_shape.members
    settings = {key: value for key, value in job.items() if key in settable}
    reserved = {**RESERVED, **dict.fromkeys(_NOT_FOR_GROUPS, "")}
    request = dict(mapping(unreserved(settings, reserved)))
    # What a channel has beyond its name: the workload has no key for it.
    request["InputDataConfig"] = [
        channel for key, channel in channels_of(request) if key in channels and len(channel) > 1
    ]
    left = [path.replace(" ", ".") for path in _NOT_FOR_GROUPS if text(job, *path.split())]
    if left:
        notes.append(f"Not taken, as jobs with data hosts cannot have it: {', '.join(left)}.")
    return _known(request)
