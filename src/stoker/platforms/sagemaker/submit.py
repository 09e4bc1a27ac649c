"""Submission of a training job, exactly once, and its state.

A job's name is unique in its account and region. An attempt that finds its own job under the name
(by the tags of the request's and the code's digest) continues with it. A job that failed, or that
is another one, is left alone: NAME-2, NAME-3 ... are tried, each with its own outputs and token.

The token is written before the job is created, and deleted at its end. It is in no request and in
no log. An existing token is not replaced, as hosts may have read it (docs/threat-model.md).
"""

import contextlib
import hashlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stoker.environment import RUN_FILE, pipeline_execution
from stoker.errors import (
    NoCapacityError,
    PlatformError,
    ServiceError,
    StokerError,
    TerminatedError,
)
from stoker.logs import EventName, Log
from stoker.platforms.aws import EVENTUAL_SECONDS, Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.packing import check_program, check_requirements, package_of
from stoker.platforms.sagemaker.request import REQUEST_TAG, SageMakerRequest
from stoker.records import Event, Group, SageMakerSettings, bare_type
from stoker.records.base import Document, mapping, mappings, text
from stoker.repeat import may_pass

FINAL = ("Completed", "Failed", "Stopped")
CODE_TAG = "stoker:code-sha256"
IMAGE_TAG = "stoker:image-digest"

# As many bytes as the feed needs; the object has them as hexadecimal digits.
TOKEN_BYTES = 32
# NAME, NAME-2 ...: a job that gets no hosts is tried again for hours, each time under another name.
MAX_TRIES = 100
MAX_NAME_LENGTH = 63
# Between polls for a job that was just created.
POLL_SECONDS = 2.0
_USABLE = ("InProgress", "Completed")
_IN_USE = ("ResourceInUse", "ResourceInUseException", "ConflictException")

# For example: AlgorithmError: what the launcher wrote, exit code: 7
_EXIT_CODE = re.compile(r"exit code:? (-?\d+)", re.IGNORECASE)
_NO_CAPACITY = re.compile(
    r"CapacityError|Insufficient_?(Instance_?)?Capacity|insufficient (instance )?capacity"
    r"|unable to provision requested .*capacity",
    re.IGNORECASE,
)
# The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances, with
# current utilization of 0 Instances and a request delta of 1 Instances.
_QUOTA = re.compile(r"limit (for )?'?[^']+?'? is ([0-9.]+)(.* request delta of ([0-9.]+))?")
# The requested resource training-job/ml.p2.xlarge is not available in this region; Unsupported
# instance type ml.p3dn.24xlarge; Value 'ml.x' at '...instanceType' failed to satisfy constraint.
_NEVER = re.compile(
    r"is not available in this region|unsupported instance type"
    r"|instanceType' failed to satisfy constraint",
    re.IGNORECASE,
)
_TYPE = re.compile(r"\bml\.[a-z0-9-]+\.[a-z0-9]+\b")
_ECR = re.compile(
    r"(?P<account>\d{12})\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/"
    r"(?P<repository>[^:@]+)(?::(?P<tag>[^@]+))?"
)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A training job, as DescribeTrainingJob describes it: times are UTC, ISO 8601."""

    described: Document

    @property
    def name(self) -> str:
        return text(self.described, "TrainingJobName")

    @property
    def arn(self) -> str:
        return text(self.described, "TrainingJobArn")

    @property
    def status(self) -> str:
        """InProgress, Completed, Failed, Stopping or Stopped."""
        return text(self.described, "TrainingJobStatus")

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def reason(self) -> str:
        """FailureReason; may be empty."""
        return text(self.described, "FailureReason")

    @property
    def exit_code(self) -> int | None:
        """The training command's exit code, if the reason contains it."""
        match = _EXIT_CODE.search(self.reason)
        if self.status == "Completed":
            return 0
        return int(match.group(1)) if match else None

    @property
    def events(self) -> tuple[Event, ...]:
        """Its transitions so far, with their messages."""
        steps = mappings(self.described, "SecondaryStatusTransitions")
        return tuple(
            Event(
                when=text(step, "StartTime"),
                what=f"{text(step, 'Status')}: {text(step, 'StatusMessage')}".removesuffix(": "),
            )
            for step in steps
        )

    @property
    def groups(self) -> dict[str, tuple[str, int]]:
        """Name to type and count; a job without groups has one with an empty name."""
        resources = mapping(self.described, "ResourceConfig")
        return {
            text(each, "InstanceGroupName"): (
                text(each, "InstanceType"),
                int(str(each.get("InstanceCount") or 0)),
            )
            for each in mappings(resources, "InstanceGroups") or [resources]
        }

    @property
    def url(self) -> str:
        """Its page in the console."""
        region, _, name = self.arn.partition(":sagemaker:")[2].partition(":")
        home = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}"
        return f"{home}#/jobs/{name.rpartition('/')[2]}"


def lacks_capacity(reason: str) -> bool:
    """Whether a job failed because the service has no hosts for it."""
    return bool(_NO_CAPACITY.search(reason))


def no_hosts(message: str, job: JobSpec, *, where: str) -> NoCapacityError | None:
    """Returns the error for a job that gets no hosts, by the service's words; None: other words."""
    # After an unknown type follows the list of all others.
    message, _, _ = message.partition("Member must satisfy")
    quota = _QUOTA.search(message)
    is_never = bool(_NEVER.search(message))
    if not (quota or is_never or lacks_capacity(message)):
        return None
    fix = "try later, or take another instance type or region"
    if quota:
        fix = "raise it in Service Quotas (SageMaker, training job usage)"
    what = f"SageMaker has no hosts for {_asked(message, job.groups)}: {message.rstrip(': ')}"
    error = NoCapacityError(what, where=where, fix=fix)
    error.types = frozenset(_TYPE.findall(message))
    # Other jobs use up the rest of a quota, and end; a request above all of it never fits.
    is_above = quota is not None and not 0 < float(quota[2]) >= float(quota[4] or 0)
    error.may_pass = not (is_never or is_above)
    return error


def _asked(message: str, groups: Sequence[Group]) -> str:
    """Returns the groups whose types a message names; all if it names none."""
    named = {bare_type(kind) for kind in _TYPE.findall(message)}
    meant = [g for g in groups if bare_type(g.instance_type) in named] or groups
    return ", ".join(f"{g.count} x {g.instance_type} (group {g.name})" for g in meant)


def delete_token(aws: Aws, uri: str) -> None:
    """Deletes token and run.json; the job has ended, and they are of no use to anybody."""
    with contextlib.suppress(StokerError):
        aws.delete_object(uri)
        aws.delete_object(_beside(uri))


def _beside(token_uri: str) -> str:
    return f"{token_uri.rpartition('/')[0]}/{RUN_FILE}"


def start(
    aws: Aws,
    request: SageMakerRequest,
    *,
    rename: Callable[[str], SageMakerRequest],
    log: Log,
) -> SageMakerRequest:
    """Creates the job, or adopts the one that an earlier attempt created; returns its request.

    `rename` returns the same request under another name.

    Raises:
        PlatformError: If the service refuses, or all names are taken.
    """
    # First, so that a folder that cannot be packed leaves nothing behind.
    packed = _packed_code(request)
    for candidate in _named_requests(request, rename):
        name = candidate.job.name
        job = find_job(aws, name)
        if job is None:
            if _create(aws, candidate, packed=packed, log=log):
                return candidate
            job = await_found(aws, name)
        if job.status in _USABLE and _is_ours(aws, job, candidate, packed=packed):
            log.event(EventName.JOB_RESUMED, job=name, status=job.status, url=job.url)
            return candidate
    raise PlatformError(
        f"the jobs {request.job.name} to {name} exist already, and none can be continued",
        where="sagemaker:CreateTrainingJob",
        fix="check why they ended, then choose another --name",
    )


def find_own(
    aws: Aws, request: SageMakerRequest, *, rename: Callable[[str], SageMakerRequest]
) -> str | None:
    """Returns the name of this request's job if it runs or has completed, else None."""
    packed = _packed_code(request)
    for candidate in _named_requests(request, rename):
        job = find_job(aws, candidate.job.name)
        if job is None:
            return None
        if job.status in _USABLE and _is_ours(aws, job, candidate, packed=packed):
            return candidate.job.name
    return None


def _packed_code(request: SageMakerRequest) -> bytes | None:
    """Returns the request's code, packed; None: it is in the image, or in S3."""
    settings = request.job.platform_settings.sagemaker
    if request.code_folder is None or settings is None:
        return None
    package = package_of(request.code_folder)
    check_program(request.job.command, package)
    check_requirements(settings, package)
    return package.content


def _named_requests(
    request: SageMakerRequest, rename: Callable[[str], SageMakerRequest]
) -> Iterator[SageMakerRequest]:
    """Yields the request as NAME, NAME-2 and so on, within the service's limit."""
    yield request
    for number in range(2, MAX_TRIES + 1):
        end = f"-{number}"
        yield rename(request.job.name[: MAX_NAME_LENGTH - len(end)].rstrip("-") + end)


def find_job(aws: Aws, name: str) -> TrainingJob | None:
    """Returns a job as described, or None if it does not exist."""
    described = aws.find("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    return TrainingJob(described) if described else None


def await_found(aws: Aws, name: str) -> TrainingJob:
    """Returns a new job as described; raises PlatformError after EVENTUAL_SECONDS."""
    deadline = aws.clock() + EVENTUAL_SECONDS
    while (job := find_job(aws, name)) is None:
        if aws.clock() >= deadline:
            raise PlatformError(
                f"the job was created, but the service did not show it for {EVENTUAL_SECONDS:g} s",
                where=f"job {name}, sagemaker:DescribeTrainingJob",
                fix="check region and account",
            )
        aws.sleep(POLL_SECONDS)
    return job


def is_cancelled(aws: Aws) -> bool:
    """Whether this process is a step of a pipeline's run that is being stopped."""
    run = pipeline_execution()
    if not run:
        return False
    try:
        answer = aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=run)
    except StokerError:
        # A job that is stopped by mistake costs the training.
        return False
    return answer.get("PipelineExecutionStatus") in ("Stopping", "Stopped")


def stop_command(name: str) -> str:
    return f"aws sagemaker stop-training-job --training-job-name {name}"


def stop_job(aws: Aws, name: str) -> None:
    """Asks the service to stop a job (SIGTERM, SIGKILL 120 s later); does not wait.

    Raises:
        ServiceError: If the service refuses, and the job still runs.
    """
    try:
        aws.call("sagemaker", "StopTrainingJob", TrainingJobName=name)
    except ServiceError as err:
        if err.kind in ("denied", "stale", "away"):
            raise
        # The job may have ended by now.
        job = find_job(aws, name)
        if job is not None and job.status not in (*FINAL, "Stopping"):
            raise


def _create(aws: Aws, request: SageMakerRequest, *, packed: bytes | None, log: Log) -> bool:
    """Writes token and code and creates the job; returns False if the name is taken."""
    name = request.job.name
    lineage = {IMAGE_TAG: _image_digest(aws, request.job.image or ""), CODE_TAG: _sha256(packed)}
    tags = [{"Key": key, "Value": value} for key, value in lineage.items() if value]
    body = {**request.body, "Tags": [*mappings(request.body, "Tags"), *tags]}
    try:
        _write_inputs(aws, request, packed=packed)
        answer = aws.call("sagemaker", "CreateTrainingJob", **body)
    except ServiceError as err:
        # Another attempt's job may have this name, and read this token: it is not deleted.
        if err.code in _IN_USE:
            return False
        if may_pass(err):
            # The job may exist: the next look adopts it.
            err.fix = f"{err.fix}; the job {name} may exist: {_way_back(request)} adopts it"
            raise
        delete_token(aws, request.token_uri)
        refusal = no_hosts(err.what, request.job, where=f"job {name}, {err.action}")
        raise refusal or err from err
    except (KeyboardInterrupt, TerminatedError) as err:
        # The service may have received the request.
        raise type(err)(
            f"the job {name} may exist, and is billed then: {_way_back(request)} adopts it; "
            f"to stop it: {stop_command(name)}"
        ) from err
    log.event(EventName.JOB_CREATED, job=name, url=TrainingJob(answer).url)
    return True


def _way_back(request: SageMakerRequest) -> str:
    return f"the same command with --name {request.job.run_name}"


def _write_inputs(aws: Aws, request: SageMakerRequest, *, packed: bytes | None) -> None:
    """Writes token and code, which the hosts download as channels when they start."""
    settings = request.job.platform_settings.sagemaker
    assert isinstance(settings, SageMakerSettings)
    kms_key = settings.output_kms_key
    content = request.settings.to_json().encode()
    aws.write_object(_beside(request.token_uri), content, kms_key=kms_key)
    token = secrets.token_hex(TOKEN_BYTES).encode("ascii")
    aws.create_object(request.token_uri, token, kms_key=kms_key)
    if packed is not None and request.code_uri:
        aws.write_object(request.code_uri, packed, kms_key=kms_key)


def _is_ours(
    aws: Aws, job: TrainingJob, request: SageMakerRequest, *, packed: bytes | None
) -> bool:
    """Whether a job was created with this request and this code."""
    tags = _tags(aws, job.arn)
    wanted = {text(tag, "Key"): text(tag, "Value") for tag in mappings(request.body, "Tags")}
    is_same = tags.get(REQUEST_TAG) == wanted[REQUEST_TAG]
    return is_same and tags.get(CODE_TAG, "") == _sha256(packed)


def _tags(aws: Aws, arn: str) -> dict[str, str]:
    listed = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
    return {text(tag, "Key"): text(tag, "Value") for tag in listed}


def _sha256(content: bytes | None) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}" if content else ""


def lineage_of(aws: Aws, job: JobSpec, arn: str) -> dict[str, str]:
    """Returns of what a job was made: the tags of its creation, and its channels in S3."""
    tags: dict[str, str] = {}
    # This account may not be able to read them.
    with contextlib.suppress(StokerError):
        tags = aws.repeated(lambda: _tags(aws, arn))
    settings = job.platform_settings.sagemaker
    source = str(settings.source if settings else "")
    lineage = {
        "job_id": arn,
        "image_digest": tags.get(IMAGE_TAG, ""),
        "code": tags.get(CODE_TAG) or (source if source.startswith("s3://") else ""),
    }
    return {name: fact for name, fact in lineage.items() if fact}


def _image_digest(aws: Aws, image: str) -> str:
    """Returns the digest of an image, as its name or ECR has it; empty: not known."""
    name, _, digest = image.partition("@")
    match = _ECR.fullmatch(name)
    if digest or not match:
        return digest
    try:
        (described,) = aws.pages(
            "ecr",
            "DescribeImages",
            items="imageDetails",
            registryId=match["account"],
            repositoryName=match["repository"],
            imageIds=[{"imageTag": match["tag"] or "latest"}],
        )
    except (StokerError, ValueError):
        return ""
    return text(described, "imageDigest")
