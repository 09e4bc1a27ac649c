"""A workload made from a SageMaker training job, in script mode or with an entry point."""

import re
import textwrap

from stoker.errors import ServiceError, UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.request import channels_of
from stoker.platforms.sagemaker.submit import find_job
from stoker.records import Json
from stoker.records.base import Document, item_at, mapping, mappings, text, texts
from stoker.records.hyperparameters import decoded
from stoker.records.secrets import is_secret
from stoker.workload_file import workload_yaml

# The times that the SDK appends to the names of jobs.
_STAMP = re.compile(r"-(\d{14}|\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3})$")
# What the patch of the request gets: the network, keys, disk and metrics.
_AS_IS = (
    ("VpcConfig",),
    ("RetryStrategy",),
    ("EnableNetworkIsolation",),
    ("EnableInterContainerTrafficEncryption",),
    ("AlgorithmSpecification", "MetricDefinitions"),
    ("OutputDataConfig", "KmsKeyId"),
    ("ResourceConfig", "VolumeSizeInGB"),
    ("ResourceConfig", "VolumeKmsKeyId"),
)
# A run's name also holds the pipeline run's id, a branch and a step, in 63 characters.
_MAX_NAME = 40


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
        "sagemaker.request: the job's network, keys, disk, metrics and variables. Spot, warm pools "
        "and other settings of the job are not taken; jobs with data hosts cannot have these two.",
        "cluster.dnn: of several groups the first; correct it if another one trains.",
    ]
    given = {key: decoded(str(v)) for key, v in mapping(job, "HyperParameters").items()}
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
    source = text(given, "sagemaker_submit_directory")
    name = re.sub(r"[^a-z0-9]+", "-", _STAMP.sub("", name).lower())[:_MAX_NAME].strip("-")
    document: dict[str, Json] = {
        "schema": "stoker.workload/v1",
        "name": name or "training",
        "command": _command(job, given, notes),
        "image": image,
        "platform": "sagemaker",
        "cluster": {"dnn": _hosts(job, given)},
        "channels": {key: _channel(channel, default_mode) for key, channel in channels_of(job)},
        "hyperparameters": plain,
        "secrets": {key: f"arn:aws:secretsmanager:REGION:ACCOUNT:secret:{key}" for key in secrets},
        "sagemaker": _known(
            {
                "role": job.get("RoleArn"),
                "output_uri": text(job, "OutputDataConfig", "S3OutputPath").rstrip("/"),
                "region": aws.region,
                "source": source if source.startswith("s3://") else "",
                "max_run_seconds": mapping(job, "StoppingCondition").get("MaxRuntimeInSeconds"),
                "checkpoint_uri": text(job, "CheckpointConfig", "S3Uri"),
                "request": _request(job, variables),
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


def _command(job: Document, given: Document, notes: list[str]) -> list[str]:
    algorithm = mapping(job, "AlgorithmSpecification")
    words = [*texts(algorithm, "ContainerEntrypoint"), *texts(algorithm, "ContainerArguments")]
    if words[:2] == ["stoker", "launch"]:
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} was started by stoker",
            fix="use the workload that it was started with",
        )
    if program := text(given, "sagemaker_program"):
        notes.append("sagemaker.source: a requirements.txt in it is installed on all hosts.")
        run = {".py": ["python"], ".sh": ["bash"]}.get(program[-3:], ["python", "-m"])
        return [*run, program]
    if not words:
        notes.append(
            "command: the job names no program. SageMaker ran the image's entry point (docker "
            "inspect shows it) with the argument `train`: write it here."
        )
    return words or ["train"]


def _hosts(job: Document, given: Document) -> dict[str, Json]:
    """Returns `cluster.dnn`: of several groups the first, as the job does not say which trains."""
    resources = mapping(job, "ResourceConfig")
    hosts = [*mappings(resources, "InstanceGroups"), resources][0]
    if not hosts.get("InstanceType"):
        raise UsageError(
            f"training job {text(job, 'TrainingJobName')} runs serverless, or has no hosts yet",
            fix="name a job that ran on instances",
        )
    dnn = {"instance_type": hosts.get("InstanceType"), "count": hosts.get("InstanceCount") or 1}
    is_distributed = any(key.endswith("_enabled") and v is True for key, v in given.items())
    if "sagemaker_program" in given and not is_distributed:
        # Script mode without `distribution` starts one process, whatever the GPUs.
        dnn["processes_per_host"] = 1
    return dnn


def _channel(channel: Document, default_mode: str) -> dict[str, Json]:
    """Returns a channel as workloads write it."""
    if disk := mapping(channel, "DataSource", "FileSystemDataSource"):
        # Mounted: never copied or streamed.
        scheme = "efs" if disk.get("FileSystemType") == "EFS" else "fsx"
        folder = text(disk, "DirectoryPath").lstrip("/")
        return {"uri": f"{scheme}://{text(disk, 'FileSystemId')}/{folder}"}
    source = mapping(channel, "DataSource", "S3DataSource")
    values = {
        "uri": text(source, "S3Uri"),
        "data_type": text(source, "S3DataType"),
        "distribution": text(source, "S3DataDistributionType"),
        "mode": text(channel, "InputMode") or default_mode,
    }
    defaults = ("S3Prefix", "FullyReplicated", "File", "")
    return {key: value for key, value in values.items() if value not in defaults}


def _request(job: Document, variables: Document) -> dict[str, Json]:
    """Returns the patch of the request: the job's own settings, in the service's names."""
    request: dict[str, Json] = {"Environment": variables}
    for path in _AS_IS:
        section, key = path[0], path[-1]
        if value := item_at(job, *path):
            request[section] = (
                value if key == section else {**mapping(request, section), key: value}
            )
    return _known(request)
