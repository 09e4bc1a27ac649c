"""The CreateTrainingJob request of a job: a pure value."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.platforms.base import NOT_COMPARED, JobSpec
from stoker.platforms.patch import check_patch, mapping_of
from stoker.platforms.sagemaker.batch_queue import queue_request
from stoker.platforms.sagemaker.checks import check_body, check_secrets
from stoker.platforms.sagemaker.job_checks import CODE_CHANNEL, TOKEN_CHANNEL, settings_of
from stoker.platforms.sagemaker.pending import pending_limit
from stoker.platforms.sagemaker.training_job import training_job
from stoker.records import Json, SageMakerSettings, nearest
from stoker.records.base import Document, item_at, mapping, mappings
from stoker.records.platforms import patch_document

REQUEST_TAG = "stoker:request-sha256"
WORKLOAD_TAG = "stoker:workload-sha256"
# Paths of the request that `sagemaker.request` cannot set, and what to do instead.
RESERVED = {
    "TrainingJobName": "use --name",
    "RoleArn": "use sagemaker.role",
    "AlgorithmSpecification TrainingImage": "use the workload's key image",
    "AlgorithmSpecification AlgorithmName": "use the workload's key image",
    "AlgorithmSpecification ContainerEntrypoint": "use sagemaker.entrypoint",
    "AlgorithmSpecification ContainerArguments": "use the workload's key command",
    "AlgorithmSpecification TrainingInputMode": "use mode of the workload's key channels",
    "ResourceConfig Instance*": "the plan decides on the hosts",
    "ResourceConfig SelectedInstance*": "the plan decides on the hosts",
    f"InputDataConfig {TOKEN_CHANNEL}": "",
    f"InputDataConfig {CODE_CHANNEL}": "use sagemaker.source",
    "InputDataConfig * DataSource": "use the workload's key channels",
    "InputDataConfig * InputMode": "use mode of the workload's key channels",
    "InputDataConfig * RecordWrapperType": "use record_wrapper of the workload's key channels",
    "OutputDataConfig S3OutputPath": "use sagemaker.output_uri",
    "StoppingCondition MaxRuntimeInSeconds": "use sagemaker.max_run_seconds",
    "HyperParameters": "use the workload's key hyperparameters",
    "CheckpointConfig": "use sagemaker.checkpoint_uri",
    "MlflowConfig": "use the workload's key tracking",
    "TensorBoardOutputConfig": "use the workload's key tracking",
    "Environment STOKER_*": "use the workload's keys instead of stoker's variables",
    "Tags stoker:*": "choose another key",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerRequest:
    """The call that creates a job, and the objects that are written before it.

    Attributes:
        body: CreateTrainingJob's, without secrets.
        queued: SubmitServiceJob's, which contains it; None: the job starts at once.
        token_uri: Address of the run's token, which is deleted at the end.
        code_uri: Address of the packed folder `code_folder`.
        code_folder: None if the code is in the image, or already packed.
    """

    job: JobSpec
    body: Document
    queued: Document | None = None
    token_uri: str
    code_uri: str | None = None
    code_folder: Path | None = None


def plan_request(job: JobSpec) -> SageMakerRequest:
    """Returns the request for `job`, without a call; raises UsageError for one to be refused."""
    settings = settings_of(job)
    folder = f"{settings.output_uri.rstrip('/')}/{job.name}"
    code_uri = code = settings.source
    code_folder = None
    if code_uri is not None and not code_uri.startswith("s3://"):
        code_folder = Path(code_uri)
        code_uri = f"{folder}/{CODE_CHANNEL}/code.tar.gz"
        # The whole folder: as a prefix, an object's name could match other objects, too.
        code = f"{folder}/{CODE_CHANNEL}/"
    planned = training_job(job, settings, folder=folder, code=code, code_uri=code_uri)
    patch = patch_document(settings.request)
    check_patch(patch, planned, key="sagemaker.request", reserved=RESERVED)
    body = mapping_of(planned, patch)
    for channel in mappings(body, "InputDataConfig"):
        if "DataSource" not in channel:
            name = str(channel["ChannelName"])
            raise UsageError(
                f"unknown channel {name}",
                where=f"key sagemaker.request.InputDataConfig[{name}]",
                fix=nearest(name, list(job.channels)),
            )
    body["Environment"] = dict(sorted(mapping(body, "Environment").items()))
    body["Tags"] = _tags(body, job)
    _add_pending_limit(body, job, settings)
    check_secrets(job, settings, mapping(body, "Environment"))
    check_body(body)
    queued = None
    if settings.queue:
        queued = queue_request(
            settings.queue, body, has_checkpoints=bool(body.get("CheckpointConfig"))
        )
    return SageMakerRequest(
        job=job,
        body=body,
        queued=queued,
        token_uri=f"{folder}/{TOKEN_CHANNEL}/token",
        code_uri=code_uri if code_folder else None,
        code_folder=code_folder,
    )


def _tags(body: Document, job: JobSpec) -> list[Json]:
    """Returns the tags of a request, by their keys, with those by which it is found again."""
    tags: list[Json] = [*mappings(body, "Tags"), {"Key": REQUEST_TAG, "Value": body_digest(body)}]
    if job.settings.workload_sha256:
        tags.append({"Key": WORKLOAD_TAG, "Value": job.settings.workload_sha256})
    return sorted(tags, key=lambda tag: str(item_at(tag, "Key")))


def _add_pending_limit(body: dict[str, Json], job: JobSpec, settings: SageMakerSettings) -> None:
    """Lets the service wait for hosts as long as stoker would; a queue and a profile do not."""
    if settings.queue or job.settings.profile:
        return
    wait_seconds = job.wait_seconds
    if wait_seconds is None:
        wait_seconds = 60.0 * job.platform_settings.on_no_capacity.wait_minutes
    limit = pending_limit(body, wait_seconds=wait_seconds)
    if limit is not None:
        stopping = mapping(body, "StoppingCondition")
        body["StoppingCondition"] = {**stopping, "MaxPendingTimeInSeconds": limit}


def body_digest(body: Document) -> str:
    """Returns a digest of the request without its tags, where the digest is kept."""
    content = {key: value for key, value in body.items() if key != "Tags"}
    variables = mapping(body, "Environment").items()
    content["Environment"] = {name: text for name, text in variables if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
