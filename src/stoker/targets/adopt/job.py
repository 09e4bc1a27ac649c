"""A workload from a training job that exists: `stoker init DIR --from-training-job NAME`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from stoker.catalog import Catalog
from stoker.errors import UsageError
from stoker.platforms.aws import Aws, AwsError
from stoker.records import Json
from stoker.targets.adopt.answer import JobAnswer, parse_answer
from stoker.targets.adopt.channels import channel_entries
from stoker.targets.adopt.cluster import hosts_of, hyperparameters_of
from stoker.targets.adopt.command import DRIVERS, Start, start_of
from stoker.targets.adopt.platform import platform_entries
from stoker.targets.adopt.render import Entry, render

_STAMP = re.compile(r"-(\d{14}|\d{4}-\d{2}-\d{2}-\d{2}-\d{2}-\d{2}-\d{3})$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A workload made of a training job.

    Attributes:
        name: Of the workload.
        text: Its YAML, with comments on what was taken and what could not be known.
    """

    name: str
    text: str


def adopt(name: str, *, aws: Aws, catalog: Catalog) -> Adopted:
    """Asks SageMaker for a training job and writes it down as a workload.

    Raises:
        PlatformError: If there is no such job, or it may not be looked at.
        UsageError: If it is a job that no workload can hold.
    """
    try:
        answer = aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    except AwsError as err:
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
    """The workload of a job.

    Args:
        job: As the service describes it.
        catalog: Of SageMaker's instance types, to tell accelerators.
        region: Where the job is.
        tags: Of the job.
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
        Entry("", None, (_head(job, region), "All keys: stoker schema workload.")),
        Entry("schema", "stoker.workload/v1"),
        Entry("name", name),
        Entry("command", start.command, start.notes),
        Entry("image", image, (_image_note(job, start),)),
        Entry("platform", "sagemaker"),
        Entry("cluster", {"dnn": dnn}, ("Today's cluster.", *hosts.notes)),
        *channel_entries(job, start, hosts.roles),
        *_hyperparameter_entries(job),
        Entry("", None, _gate_notes(job)),
        Entry("constraints", {"objective": "cost"}, _constraint_notes()),
        Entry(
            "sagemaker",
            None,
            children=platform_entries(job, start, region=region, tags=tags or {}, notes=tag_notes),
        ),
        *([Entry("", None, (_not_taken(job),))] if _not_taken(job) else []),
    ]
    return Adopted(name=name, text=render(entries) + "\n")


def workload_name(job_name: str) -> str:
    """A workload's name out of a job's: without the time that SDKs put behind it."""
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


def _image_note(job: JobAnswer, start: Start) -> str:
    if "stoker_token" in start.channels:
        return "The image of the job; stoker is in it."
    return (
        "The image of the job. stoker must be in it: build one on top of it "
        "(containers/launcher, --build-arg BASE_IMAGE=this) and put that one's address here."
    )


def _hyperparameter_entries(job: JobAnswer) -> list[Entry]:
    values = hyperparameters_of(job)
    hidden = sorted(name for name in job.hyper_parameters if name.startswith("sagemaker_"))
    notes = [f"Left out, for they are the toolkit's own: {', '.join(hidden)}."] if hidden else []
    if values:
        return [Entry("hyperparameters", values, ("Put behind the command.", *notes))]
    return [Entry("", None, tuple(notes))] if notes else []


def _gate_notes(job: JobAnswer) -> tuple[str, ...]:
    ended = ", ".join(f"{m.metric_name} {m.value:g}" for m in job.final_metric_data_list)
    return (
        "How good the model must be is not known of a job. A gate judges what the script reports "
        "with stoker.log_metrics(accuracy=0.97), or in the file $STOKER_METRICS:",
        "  gate: [{metric: accuracy, min: 0.94}]",
        *((f"The job's own metrics ended at: {ended}.",) if ended else ()),
        "How long it trains is not known, either. For hours and dollars of the whole training:",
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
