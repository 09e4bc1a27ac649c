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
from dataclasses import replace

from stoker.environment import RUN_FILE
from stoker.errors import (
    NoCapacityError,
    PlatformError,
    ServiceError,
    StokerError,
    TerminatedError,
)
from stoker.logs import EventName, Log
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobSpec
from stoker.platforms.packing import check_files, package_of
from stoker.platforms.sagemaker.request import (
    REQUEST_TAG,
    SageMakerRequest,
    plan_request,
    sagemaker_of,
)
from stoker.records import Json, bare_type
from stoker.records.base import Document, mappings, text
from stoker.repeat import may_pass

FINAL = ("Completed", "Failed", "Stopped")
CODE_TAG = "stoker:code-sha256"
IMAGE_TAG = "stoker:image-digest"

# As many bytes as the feed needs; the object has them as hexadecimal digits.
TOKEN_BYTES = 32
# NAME, NAME-2 ...: a job that gets no hosts is tried again for hours, each time under another name.
MAX_TRIES = 100
MAX_NAME_LENGTH = 63
_USABLE = ("InProgress", "Completed")

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


def no_hosts(message: str, job: JobSpec, *, where: str) -> NoCapacityError | None:
    """Returns the error for a job that gets no hosts, by the service's words; None: other words."""
    # After an unknown type follows the list of all others.
    message = message.partition("Member must satisfy")[0].rstrip(": ")
    quota = _QUOTA.search(message)
    is_never = bool(_NEVER.search(message))
    if not (quota or is_never or _NO_CAPACITY.search(message)):
        return None
    types = frozenset(_TYPE.findall(message))
    named = [g for g in job.groups if f"ml.{bare_type(g.instance_type)}" in types]
    hosts = [f"{g.count} x {g.instance_type} (group {g.name})" for g in named or job.groups]
    fix = "try later, or take another instance type or region"
    if quota:
        fix = "raise it in Service Quotas (SageMaker, training job usage)"
    what = f"SageMaker has no hosts for {', '.join(hosts)}: {message}"
    error = NoCapacityError(what, where=where, fix=fix)
    error.types = types
    # Other jobs use up the rest of a quota, and end; a request above all of it never fits.
    is_above = quota is not None and not 0 < float(quota[2]) >= float(quota[4] or 0)
    error.may_pass = not (is_never or is_above)
    return error


def delete_token(aws: Aws, uri: str) -> None:
    """Deletes token and run.json; the job has ended, and they are of no use to anybody."""
    with contextlib.suppress(StokerError):
        aws.delete_object(uri)
        aws.delete_object(_beside(uri))


def _beside(token_uri: str) -> str:
    return f"{token_uri.rpartition('/')[0]}/{RUN_FILE}"


def start(aws: Aws, request: SageMakerRequest, *, log: Log) -> SageMakerRequest:
    """Creates the job, or adopts the one that an earlier attempt created; returns its request.

    Raises:
        PlatformError: If the service refuses, or all names are taken.
    """
    # First, so that a folder that cannot be packed leaves nothing behind.
    packed = packed_code(request)
    placed, job = own_job(aws, request, code=sha256(packed))
    name = placed.job.name
    if job:
        url = page_of(text(job, "TrainingJobArn"))
        log.event(EventName.JOB_RESUMED, job=name, status=text(job, "TrainingJobStatus"), url=url)
    else:
        _create(aws, placed, packed=packed, log=log)
    return placed


def own_job(
    aws: Aws, request: SageMakerRequest, *, code: str
) -> tuple[SageMakerRequest, Document | None]:
    """Returns the request under the first name that is free (None), or has its own job.

    Args:
        aws: The account.
        request: Under its first name.
        code: Digest of the packed code.
    """
    name = request.job.name
    for number in range(1, MAX_TRIES + 1):
        if number > 1:
            end = f"-{number}"
            other = name[: MAX_NAME_LENGTH - len(end)].rstrip("-") + end
            # A new plan, as the addresses of token, code and outputs contain the name.
            request = plan_request(replace(request.job, name=other, run=request.job.run_name))
        job = find_job(aws, request.job.name)
        if job is None or _is_ours(aws, job, request, code=code):
            return request, job
    raise PlatformError(
        f"the jobs {name} to {request.job.name} exist already, and none can be continued",
        where="sagemaker:CreateTrainingJob",
        fix="check why they ended, then choose another --name",
    )


def packed_code(request: SageMakerRequest) -> bytes:
    """Returns the request's code, packed; empty: it is in the image, or in S3."""
    if request.code_folder is None:
        return b""
    settings = sagemaker_of(request.job.platform_settings)
    package = package_of(request.code_folder)
    check_files(package, command=request.job.command, settings=settings)
    return package.content


def find_job(aws: Aws, name: str) -> Document | None:
    """Returns a job as DescribeTrainingJob describes it, or None if it does not exist."""
    return aws.find("sagemaker", "DescribeTrainingJob", TrainingJobName=name)


def page_of(arn: str) -> str:
    """Returns the page of a job in the console."""
    region = arn.partition(":sagemaker:")[2].partition(":")[0]
    home = f"https://{region}.console.aws.amazon.com/sagemaker/home?region={region}"
    return f"{home}#/jobs/{arn.rpartition('/')[2]}"


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
        # The job may have ended by now.
        if err.kind in ("denied", "stale", "away") or (
            text(find_job(aws, name), "TrainingJobStatus") == "InProgress"
        ):
            raise


def _create(aws: Aws, request: SageMakerRequest, *, packed: bytes, log: Log) -> None:
    """Writes token and code and creates the job."""
    name = request.job.name
    lineage = {IMAGE_TAG: _image_digest(aws, request.job.image or ""), CODE_TAG: sha256(packed)}
    tags = [{"Key": key, "Value": value} for key, value in lineage.items() if value]
    body = {**request.body, "Tags": [*mappings(request.body, "Tags"), *tags]}
    # The service may have received the request.
    may_exist = (
        f"the job {name} may exist, and is billed then: the same command with "
        f"--name {request.job.run_name} adopts it; to stop it: {stop_command(name)}"
    )
    try:
        _write_inputs(aws, request, packed=packed)
        answer = aws.call("sagemaker", "CreateTrainingJob", **body)
    except ServiceError as err:
        # Another attempt's job has this name, and reads this token: the next look adopts it.
        if err.kind == "taken":
            err.kind = "away"
        if may_pass(err):
            err.fix = f"{err.fix}; {may_exist}"
            raise
        delete_token(aws, request.token_uri)
        refusal = no_hosts(err.what, request.job, where=f"job {name}, {err.action}")
        raise refusal or err from err
    except (KeyboardInterrupt, TerminatedError) as err:
        raise type(err)(may_exist) from err
    log.event(EventName.JOB_CREATED, job=name, url=page_of(text(answer, "TrainingJobArn")))


def _write_inputs(aws: Aws, request: SageMakerRequest, *, packed: bytes) -> None:
    """Writes token and code, which the hosts download as channels when they start."""
    kms_key = sagemaker_of(request.job.platform_settings).output_kms_key
    content = request.settings.to_json().encode()
    aws.write_object(_beside(request.token_uri), content, kms_key=kms_key)
    token = secrets.token_hex(TOKEN_BYTES).encode("ascii")
    aws.create_object(request.token_uri, token, kms_key=kms_key)
    if packed and request.code_uri:
        aws.write_object(request.code_uri, packed, kms_key=kms_key)


def _is_ours(aws: Aws, job: Document, request: SageMakerRequest, *, code: str) -> bool:
    """Whether a job that runs or has completed was created with this request and this code."""
    if text(job, "TrainingJobStatus") not in _USABLE:
        return False
    tags = _tags(aws, text(job, "TrainingJobArn"))
    wanted: dict[str, Json] = {"Key": REQUEST_TAG, "Value": tags.get(REQUEST_TAG, "")}
    return wanted in mappings(request.body, "Tags") and tags.get(CODE_TAG, "") == code


def _tags(aws: Aws, arn: str) -> dict[str, str]:
    listed = aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
    return {text(tag, "Key"): text(tag, "Value") for tag in listed}


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}" if content else ""


def lineage_of(aws: Aws, job: JobSpec, arn: str) -> dict[str, str]:
    """Returns of what a job was made: the tags of its creation, and its channels in S3."""
    tags: dict[str, str] = {}
    # This account may not be able to read them.
    with contextlib.suppress(StokerError):
        tags = aws.repeated(lambda: _tags(aws, arn))
    source = sagemaker_of(job.platform_settings).source or ""
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
        answer = aws.call(
            "ecr",
            "DescribeImages",
            registryId=match["account"],
            repositoryName=match["repository"],
            imageIds=[{"imageTag": match["tag"] or "latest"}],
        )
    except StokerError:
        return ""
    return next((text(each, "imageDigest") for each in mappings(answer, "imageDetails")), "")
