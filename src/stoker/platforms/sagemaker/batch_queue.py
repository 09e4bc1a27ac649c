"""A training job that waits in a queue of AWS Batch, as a service job.

Batch keeps the CreateTrainingJob request until the queue's service environment has room, and then
creates the training job under its own name (AWSBatch, ours, an attempt's number). A lack of
capacity puts the service job back into the queue, as often as needed; any other failure is final
here: SageMaker's RetryStrategy replaces broken hosts, so that Batch gets one attempt.

Names of service jobs are not unique. A submission has a token made of its name and content, of
which Batch accepts one; one whose answer is lost is found by name, and told by its tag.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.platforms.aws import Aws
from stoker.platforms.service_limits import input_shape, over_limits
from stoker.records import Json
from stoker.records.base import Document, mapping, mappings, text
from stoker.records.platforms import QueueSettings

KEY = "key sagemaker.queue"
RUN_TAG = "stoker:run"
SERVICE_JOB_TYPE = "SAGEMAKER_TRAINING"
# The training job exists, and may have hosts.
_WITH_HOSTS = ("STARTING", "RUNNING")
_FINAL = ("SUCCEEDED", "FAILED")
# The words with which Batch says that no wait helps.
_NEVER = "MISCONFIGURATION:"
# Service jobs of one name that are looked at, the newest ones.
_MAX_NAMESAKES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceJob:
    """A service job, as DescribeServiceJob describes it.

    Attributes:
        status: SUBMITTED, PENDING, RUNNABLE, SCHEDULED, STARTING, RUNNING, SUCCEEDED or FAILED.
        reason: Why it waits or failed; may be empty.
        is_terminated: Whether somebody has asked for its end.
        training_job: Name of its latest training job; empty: there was none.
    """

    id: str
    arn: str
    name: str
    status: str
    reason: str
    is_terminated: bool
    training_job: str
    tags: Mapping[str, str]

    @property
    def is_final(self) -> bool:
        return self.status in _FINAL

    @property
    def has_hosts(self) -> bool:
        return self.status in _WITH_HOSTS

    @property
    def is_usable(self) -> bool:
        return self.status != "FAILED" and not self.is_terminated

    @property
    def can_never_start(self) -> bool:
        """Whether its queue cannot hold a job of this size."""
        return _NEVER in self.reason


def service_job(answer: Document) -> ServiceJob:
    """Returns the service job in an answer of DescribeServiceJob."""
    latest = mapping(answer, "latestAttempt", "serviceResourceId")
    tags = {key: str(value) for key, value in mapping(answer, "tags").items()}
    return ServiceJob(
        id=text(answer, "jobId"),
        arn=text(answer, "jobArn"),
        name=text(answer, "jobName"),
        status=text(answer, "status"),
        reason=text(answer, "statusReason"),
        is_terminated=answer.get("isTerminated") is True,
        training_job=text(latest, "value").rpartition("/")[2],
        tags=tags,
    )


def queue_request(
    queue: QueueSettings, body: Document, *, has_checkpoints: bool
) -> dict[str, Json]:
    """Returns the SubmitServiceJob request for a CreateTrainingJob request, without a token.

    Tags are the service job's, as SageMaker's SDK passes them.

    Args:
        queue: The workload's queue.
        body: The CreateTrainingJob request.
        has_checkpoints: Whether a job that starts again continues; else it does not start again.

    Raises:
        UsageError: If Batch would refuse it, or it is not known to take it.
    """
    for problem in _queue_rules(queue, body):
        raise problem
    payload = {key: value for key, value in body.items() if key != "Tags"}
    name = str(body["TrainingJobName"])
    submission: dict[str, Json] = {
        "jobName": name,
        "jobQueue": queue.job_queue,
        "serviceJobType": SERVICE_JOB_TYPE,
        "serviceRequestPayload": json.dumps(payload, sort_keys=True),
        # Several attempts of Batch would multiply SageMaker's own.
        "retryStrategy": {"attempts": 1},
        "tags": {**tag_texts(body), RUN_TAG: name},
    }
    if queue.scheduling_priority is not None:
        submission["schedulingPriority"] = queue.scheduling_priority
    if queue.share_identifier:
        submission["shareIdentifier"] = queue.share_identifier
    if queue.quota_share_name:
        again = queue.preemption_retries if has_checkpoints else 0
        submission["quotaShareName"] = queue.quota_share_name
        # Left out, Batch starts it again without end.
        submission["preemptionConfiguration"] = {"preemptionRetriesBeforeTermination": again}
    _check_request(submission)
    return submission


def tag_texts(body: Document) -> dict[str, Json]:
    """Returns the tags of a CreateTrainingJob request by key, as Batch wants them."""
    return {str(tag.get("Key")): str(tag.get("Value", "")) for tag in mappings(body, "Tags")}


def _queue_rules(queue: QueueSettings, body: Document) -> Iterator[UsageError]:
    """Yields an error for what Batch refuses, or is not documented to take."""
    resources = mapping(body, "ResourceConfig")
    if queue.share_identifier and queue.quota_share_name:
        what = "share_identifier and quota_share_name are of different policies of a queue"
        yield UsageError(what, where=KEY, fix="leave one of them out")
    if resources.get("InstanceGroups"):
        what = "a queue of AWS Batch counts a job's hosts by InstanceCount: it takes no data group"
        fix = "set constraints.max_data_hosts: 0, or leave sagemaker.queue out"
        yield UsageError(what, where=KEY, fix=fix)
    if resources.get("InstancePreferences"):
        what = "several types for one job of a queue of AWS Batch are not documented"
        fix = "leave sagemaker.further_types out, or sagemaker.queue"
        yield UsageError(what, where="key sagemaker.further_types", fix=fix)
    if resources.get("KeepAlivePeriodInSeconds"):
        what = "warm pools with a queue of AWS Batch are not documented"
        fix = "leave it out, or sagemaker.queue"
        where = "key sagemaker.request.ResourceConfig.KeepAlivePeriodInSeconds"
        yield UsageError(what, where=where, fix=fix)
    if body.get("EnableManagedSpotTraining"):
        what = "managed spot with a queue of AWS Batch is not documented"
        fix = "leave it out, or sagemaker.queue"
        yield UsageError(what, where="key sagemaker.request.EnableManagedSpotTraining", fix=fix)


def _check_request(submission: Document) -> None:
    """Raises UsageError for what the service's model says it would refuse."""
    from botocore.validate import ParamValidator

    shape = input_shape("batch", "SubmitServiceJob")
    wrong = ParamValidator().validate(submission, shape).generate_report().replace("\n", "; ")
    over = "; ".join(
        f"{problem.place} {problem.what}" for problem in over_limits(submission, shape)
    )
    if wrong or over:
        raise UsageError(
            f"SubmitServiceJob would refuse this: {wrong or over}",
            where=KEY,
            fix="see the API reference of SubmitServiceJob",
        )


def submission_token(submission: Document) -> str:
    """Returns the token of a submission: of 64 characters, and the same for the same content."""
    # Facts that are looked up for each submission are in further tags.
    return hashlib.sha256(json.dumps(submission, sort_keys=True).encode()).hexdigest()


def describe(aws: Aws, job_id: str) -> ServiceJob:
    return service_job(aws.call("batch", "DescribeServiceJob", jobId=job_id))


def namesakes(aws: Aws, queue: QueueSettings, name: str) -> list[ServiceJob]:
    """Returns the service jobs of a name in a queue, the newest first.

    Raises:
        UsageError: If there is no such queue.
    """
    by_name = [{"name": "JOB_NAME", "values": [name]}]
    question = {"jobQueue": queue.job_queue, "filters": by_name}
    listed = list(aws.pages("batch", "ListServiceJobs", items="jobSummaryList", **question))
    # The service does not tell capital letters from small ones.
    of_name = [summary for summary in listed if summary.get("jobName") == name]
    newest = sorted(of_name, key=_created_at, reverse=True)[:_MAX_NAMESAKES]
    return [describe(aws, str(summary["jobId"])) for summary in newest]


def _created_at(summary: Document) -> int:
    created_at = summary.get("createdAt")
    return created_at if isinstance(created_at, int) else 0


def place_in_queue(aws: Aws, queue: QueueSettings, job: ServiceJob) -> int | None:
    """Returns 1 for the job that starts next; None: it is not among the first 100."""
    answer = aws.call("batch", "GetJobQueueSnapshot", jobQueue=queue.job_queue)
    arns = [str(first.get("jobArn")) for first in mappings(answer, "frontOfQueue", "jobs")]
    if job.arn in arns:
        return arns.index(job.arn) + 1
    return None


def terminate(aws: Aws, job_id: str) -> None:
    """Asks Batch to end a service job, and its training job with it; does not wait."""
    aws.call("batch", "TerminateServiceJob", jobId=job_id, reason="stopped by stoker")


def terminate_command(job_id: str) -> str:
    return f"aws batch terminate-service-job --job-id {job_id} --reason stopped"
