"""Submission of a training job, exactly once, and its state.

A job's name is unique in its account and region. An attempt that finds its own job under the name
continues with it. A job that failed, or that is another one, is left alone: NAME-2, NAME-3 ... are
tried, each with its own outputs and token. A folder of code is always packed to the same bytes, so
that an attempt can also compare the code.

The token is written before the job is created, and deleted at its end. It is in no request and in
no log. An existing token is not replaced, as hosts may have read it (docs/threat-model.md).
"""

import contextlib
import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.environment import pipeline_execution
from stoker.errors import (
    NoCapacityError,
    PlatformError,
    ServiceError,
    StokerError,
    TerminatedError,
)
from stoker.logs import EventName, Log
from stoker.platforms.aws import EVENTUAL_SECONDS, Aws
from stoker.platforms.packing import check_program, check_requirements, package_of
from stoker.platforms.sagemaker.job_checks import settings_of
from stoker.platforms.sagemaker.lineage import made_of, tags_of
from stoker.platforms.sagemaker.preferences import selected_hosts
from stoker.platforms.sagemaker.request import REQUEST_TAG, SageMakerRequest
from stoker.records import Event, Group, Json, bare_type
from stoker.records.base import Document, mapping, mappings, text
from stoker.repeat import Suppressed, may_pass

FINAL = ("Completed", "Failed", "Stopped")

# For example: AlgorithmError: what the launcher wrote, exit code: 7
_EXIT_CODE = re.compile(r"exit code:? (-?\d+)", re.IGNORECASE)
_NO_CAPACITY = re.compile(
    r"CapacityError|InsufficientCapacity|InsufficientInstanceCapacity|"
    r"INSUFFICIENT_INSTANCE_CAPACITY|"
    r"insufficient (instance )?capacity|unable to provision requested .*capacity",
    re.IGNORECASE,
)
_TYPE = re.compile(r"\bml\.[a-z0-9-]+\.[a-z0-9]+\b")
# The account-level service limit 'ml.p4d.24xlarge for training job usage' is 0 Instances, with
# current utilization of 0 Instances and a request delta of 1 Instances.
_QUOTA = re.compile(
    r"limit (for )?'?(?P<quota>[^']+?)'? is (?P<limit>[0-9.]+)"
    r"(.* request delta of (?P<asked>[0-9.]+))?"
)
# The requested resource training-job/ml.p2.xlarge is not available in this region; Unsupported
# instance type ml.p3dn.24xlarge; Value 'ml.x' at '...instanceType' failed to satisfy constraint.
_NEVER = re.compile(
    r"is not available in this region|unsupported instance type|"
    r"instance type \S+ is not supported|instanceType' failed to satisfy constraint",
    re.IGNORECASE,
)
# As many as the feed needs; the object has them as hexadecimal digits.
TOKEN_BYTES = 32
# NAME, NAME-2 ... NAME-5: if all are taken, the name is not the problem. A job that got no hosts is
# not counted: it is tried again for hours, each time under another name.
MAX_NAMES = 5
MAX_TRIES = 100
MAX_NAME_LENGTH = 63
MAX_TAGS = 50
# Between polls for a job that was just created.
POLL_SECONDS = 2.0
_USABLE = ("InProgress", "Completed")
_IN_USE = ("ResourceInUse", "ResourceInUseException", "ConflictException")
# Parts of a request that identify a job whose tags cannot be read.
_TELLING = (
    "AlgorithmSpecification",
    "RoleArn",
    "InputDataConfig",
    "OutputDataConfig",
    "ResourceConfig",
    "HyperParameters",
    "Environment",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """A transition of a job: its new status, and since when (UTC, ISO 8601)."""

    status: str
    since: str
    message: str

    @property
    def words(self) -> str:
        if self.message:
            return f"{self.status}: {self.message}"
        return self.status

    @property
    def event(self) -> Event:
        return Event(when=self.since, what=self.words)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingJobState:
    """A training job, as DescribeTrainingJob describes it.

    Attributes:
        status: InProgress, Completed, Failed, Stopping or Stopped.
        secondary: What it is doing, or why it stopped.
        reason: FailureReason; may be empty.
        groups: Name to type and count; a job without groups has one with an empty name.
        began_at: Start of the training itself: UTC, ISO 8601.
    """

    name: str
    arn: str
    status: str
    secondary: str
    reason: str
    transitions: tuple[Transition, ...]
    output_prefix: str
    model_uri: str | None
    groups: Mapping[str, tuple[str, int]]
    began_at: str | None
    ended_at: str | None
    mlflow_run_id: str | None = None
    billed_seconds: int | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL

    @property
    def exit_code(self) -> int | None:
        """The training command's exit code, if the reason contains it."""
        if self.status == "Completed":
            return 0
        match = _EXIT_CODE.search(self.reason)
        if match:
            return int(match.group(1))
        return None

    @property
    def url(self) -> str:
        return console_url(self.arn)


def job_state(answer: Document) -> TrainingJobState:
    """Returns the state in an answer of DescribeTrainingJob."""
    resources = mapping(answer.get("ResourceConfig"))
    listed = mappings(resources.get("InstanceGroups"))
    if not listed and resources.get("InstanceType"):
        # A homogeneous job describes its hosts in ResourceConfig itself.
        listed = [resources]
    if selected := selected_hosts(resources):
        listed = [selected]
    groups = {
        text(each, "InstanceGroupName"): (text(each, "InstanceType"), _count(each, "InstanceCount"))
        for each in listed
    }
    name = text(answer, "TrainingJobName")
    prefix = text(answer, "OutputDataConfig", "S3OutputPath").rstrip("/")
    return TrainingJobState(
        name=name,
        arn=text(answer, "TrainingJobArn"),
        status=text(answer, "TrainingJobStatus"),
        secondary=text(answer, "SecondaryStatus"),
        reason=text(answer, "FailureReason"),
        transitions=tuple(
            Transition(
                status=text(item, "Status"),
                since=text(item, "StartTime"),
                message=text(item, "StatusMessage"),
            )
            for item in mappings(answer.get("SecondaryStatusTransitions"))
        ),
        output_prefix=f"{prefix}/{name}/output",
        model_uri=text(answer, "ModelArtifacts", "S3ModelArtifacts") or None,
        groups=groups,
        began_at=text(answer, "TrainingStartTime") or None,
        ended_at=text(answer, "TrainingEndTime") or None,
        mlflow_run_id=text(answer, "MlflowDetails", "MlflowRunId") or None,
        billed_seconds=_count(answer, "BillableTimeInSeconds") or None,
    )


def console_url(arn: str) -> str:
    """Returns the address of a training job's page in the console."""
    parts = arn.split(":")
    if len(parts) < 6:
        return ""
    partition = parts[1]
    region = parts[3]
    name = arn.rpartition("/")[2]
    domain = {
        "aws-cn": "console.amazonaws.cn",
        "aws-us-gov": "console.amazonaws-us-gov.com",
    }.get(partition, f"{region}.console.aws.amazon.com")
    return f"https://{domain}/sagemaker/home?region={region}#/jobs/{name}"


def lacks_capacity(reason: str) -> bool:
    """Whether a job failed because the service has no hosts for it."""
    return bool(_NO_CAPACITY.search(reason))


def no_capacity(
    reason: str, groups: Sequence[Group], *, job_name: str, next_best: str
) -> NoCapacityError:
    """Returns the error for a job that got no hosts."""
    what = f"SageMaker has no capacity for {_asked(reason, groups)}: {reason}"
    where = f"job {job_name}: the limit is what the region has free now, not a quota"
    return _lacking(what, reason, where, "try later or in another region", next_best)


def no_quota(
    message: str, groups: Sequence[Group], *, where: str, next_best: str
) -> NoCapacityError:
    """Returns the error for a job above the account's quota."""
    match = _QUOTA.search(message)
    limit = f"the quota '{match['quota']}' is {match['limit']}" if match else "a quota is too small"
    what = f"{limit}, asked for: {_asked(message, groups)}: {message}"
    fix = "raise it in Service Quotas (SageMaker, training job usage)"
    error = _lacking(what, message, where, fix, next_best)
    # Other jobs use up the rest of a quota, and end; a request above all of it never fits.
    error.may_pass = match is None or 0 < float(match["limit"]) >= float(match["asked"] or 0)
    return error


def _no_such_type(
    message: str, groups: Sequence[Group], *, where: str, next_best: str
) -> NoCapacityError:
    """Returns the error for an instance type that the region or the account does not have."""
    # What follows is the list of all other types.
    named, _, _ = message.partition("Member must satisfy")
    what = f"SageMaker does not have {_asked(named, groups)} here: {named.rstrip(': ')}"
    fix = "take another instance type, or another region"
    error = _lacking(what, named, where, fix, next_best)
    error.may_pass = False
    return error


def _asked(message: str, groups: Sequence[Group]) -> str:
    """Returns the groups whose types a message names; all if it names none."""
    named = {bare_type(kind) for kind in _TYPE.findall(message)}
    meant = [g for g in groups if bare_type(g.instance_type) in named] or groups
    return ", ".join(f"{g.count} x {g.instance_type} (group {g.name})" for g in meant)


def _lacking(what: str, said: str, where: str, fix: str, next_best: str) -> NoCapacityError:
    best = f", or take the next best plan: {next_best}" if next_best else ""
    error = NoCapacityError(what, where=where, fix=f"{fix}{best}")
    error.types = frozenset(_TYPE.findall(said))
    return error


def _count(answer: Document, key: str) -> int:
    value = answer.get(key)
    return value if isinstance(value, int) else 0


def delete_token(aws: Aws, uri: str, *, log: Log) -> None:
    """Deletes the token; logs an error instead of raising it, as the job has ended."""
    try:
        aws.delete_object(uri)
    except StokerError as err:
        log.event(EventName.TOKEN_DELETE_FAILED, object=uri, why=err.what)


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
        PlatformError: If the service refuses, or all names are taken; if another step of the
            pipeline's run has a training run of this name, which would register this one's model.
    """
    # First, so that a folder that cannot be packed leaves nothing behind.
    packed = packed_code(request)
    num_taken = 0
    for candidate in named_requests(request, rename):
        name = candidate.job.name
        job = find_job(aws, name)
        if job is None:
            if _create(aws, candidate, packed=packed, log=log):
                return candidate
            job = await_found(aws, name)
        state = job_state(job)
        is_ours = _is_ours(aws, job, candidate, packed=packed)
        if is_ours and state.status in _USABLE:
            log.event(EventName.JOB_RESUMED, job=name, status=state.status, url=state.url)
            return candidate
        if pipeline_execution() and not is_ours and state.status in _USABLE:
            raise PlatformError(
                f"the job {name} is another training run of this pipeline's run",
                where="sagemaker:CreateTrainingJob",
                fix="make one of the two steps from run.branch('Second'), and upload the pipeline",
            )
        why = f"it is {state.status}" if is_ours else "it is another job"
        log.event(EventName.JOB_NAME_CONFLICT, job=name, why=why)
        _forget_token(aws, job, candidate, log=log)
        # Names of attempts that got no hosts do not count: on_no_capacity may repeat them often.
        num_taken += not lacks_capacity(state.reason)
        if num_taken == MAX_NAMES:
            break
    raise PlatformError(
        f"the jobs {request.job.name} to {name} exist already, and none can be continued",
        where="sagemaker:CreateTrainingJob",
        fix="check why they ended, then choose another --name",
    )


def packed_code(request: SageMakerRequest) -> bytes | None:
    """Returns the request's code, packed; None: it is in the image, or in S3."""
    if request.code_folder is None:
        return None
    package = package_of(request.code_folder)
    check_program(request.job.command, package)
    check_requirements(settings_of(request.job), package)
    return package.content


def find_own(
    aws: Aws, request: SageMakerRequest, *, rename: Callable[[str], SageMakerRequest]
) -> str | None:
    """Returns the name of this request's job if it runs or has completed, else None."""
    packed = packed_code(request)
    for candidate in named_requests(request, rename):
        job = find_job(aws, candidate.job.name)
        if job is None:
            return None
        is_usable = job_state(job).status in _USABLE
        if is_usable and _is_ours(aws, job, candidate, packed=packed):
            return candidate.job.name
    return None


def named_requests(
    request: SageMakerRequest, rename: Callable[[str], SageMakerRequest]
) -> Iterator[SageMakerRequest]:
    """Yields the request as NAME, NAME-2 and so on."""
    yield request
    for number in range(2, MAX_TRIES + 1):
        yield rename(numbered(request.job.name, number))


def numbered(name: str, number: int) -> str:
    """Returns NAME-2 and so on, within the service's limit."""
    end = f"-{number}"
    return name[: MAX_NAME_LENGTH - len(end)].rstrip("-") + end


def find_job(aws: Aws, name: str) -> Document | None:
    """Returns DescribeTrainingJob's answer, or None if the job does not exist."""
    return aws.find("sagemaker", "DescribeTrainingJob", TrainingJobName=name)


def await_found(aws: Aws, name: str) -> Document:
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
        if job is not None and job_state(job).status not in (*FINAL, "Stopping"):
            raise


def lineage_tags(aws: Aws, request: SageMakerRequest, *, packed: bytes | None) -> list[Json]:
    """Returns the tags that say of what a job is made; a profile makes no model, and has none."""
    if request.job.settings.profile:
        return []
    return tags_of(made_of(aws, request.job, packed=packed, code_uri=request.code_uri))


def write_inputs(aws: Aws, request: SageMakerRequest, *, packed: bytes | None) -> None:
    """Writes token and code, which the hosts download as channels when they start."""
    settings = request.job.platform_settings.sagemaker
    kms_key = settings.output_kms_key if settings else None
    token = secrets.token_hex(TOKEN_BYTES).encode("ascii")
    aws.create_object(request.token_uri, token, kms_key=kms_key)
    if packed is not None and request.code_uri:
        aws.write_object(request.code_uri, packed, kms_key=kms_key)


def _create(aws: Aws, request: SageMakerRequest, *, packed: bytes | None, log: Log) -> bool:
    """Writes token and code and creates the job; returns False if the name is taken."""
    facts = lineage_tags(aws, request, packed=packed)
    name = request.job.name
    is_sent = False
    try:
        write_inputs(aws, request, packed=packed)
        is_sent = True
        # The user's first: what exceeds the service's 50 is stoker's lineage.
        tags = [*mappings(request.body.get("Tags")), *facts][:MAX_TAGS]
        answer = aws.call("sagemaker", "CreateTrainingJob", **{**request.body, "Tags": tags})
    except ServiceError as err:
        # Another attempt's job may have this name, and read this token: it is not deleted.
        if err.code in _IN_USE:
            return False
        if may_pass(err):
            # The job may exist: the next look adopts it.
            if is_sent:
                again = f"the same command with --name {request.job.run_name} adopts it"
                err.fix = f"{err.fix}; the job {name} may exist: {again}"
            raise
        # An earlier call without an answer may have made it.
        with contextlib.suppress(ServiceError):
            if find_job(aws, name) is None:
                delete_token(aws, request.token_uri, log=log)
        refusal = _quota_or_capacity(err, request)
        if refusal:
            raise refusal from err
        raise
    except (KeyboardInterrupt, TerminatedError) as err:
        # The service may have received the request.
        words = f"the job {name} may exist, and is billed then; to stop it: {stop_command(name)}"
        if is_sent and isinstance(err, TerminatedError) and not is_cancelled(aws):
            words = f"{words}; the same command with --name {request.job.run_name} adopts it"
        elif not is_sent or _is_stopped(aws, name, log=log):
            delete_token(aws, request.token_uri, log=log)
            words = ""
        raise type(err)(words) from err
    log.event(EventName.JOB_CREATED, job=name, url=console_url(str(answer.get("TrainingJobArn"))))
    return True


def _is_stopped(aws: Aws, name: str, *, log: Log) -> bool:
    """Stops a job that may have been created; returns whether its hosts need no token."""
    try:
        await_found(aws, name)
        stop_job(aws, name)
    except PlatformError as err:
        # Another error: it did not appear.
        if isinstance(err, ServiceError):
            log.event(EventName.JOB_STOP_FAILED, job=name, why=err.what)
            return False
    return True


def _forget_token(aws: Aws, found: Document, request: SageMakerRequest, *, log: Log) -> None:
    """Deletes the token unless the existing job of the name reads it."""
    folder = request.token_uri.rpartition("/")[0]
    if job_state(found).is_final or folder not in json.dumps(found.get("InputDataConfig")):
        delete_token(aws, request.token_uri, log=log)


def _quota_or_capacity(err: ServiceError, request: SageMakerRequest) -> NoCapacityError | None:
    job = request.job
    where = f"job {request.job.name}, {err.action}"
    if _NEVER.search(err.what) and _TYPE.search(err.what):
        return _no_such_type(err.what, job.groups, where=where, next_best=job.next_best)
    if err.code.startswith("ResourceLimitExceeded"):
        return no_quota(err.what, job.groups, where=where, next_best=job.next_best)
    if lacks_capacity(err.what):
        return no_capacity(err.what, job.groups, job_name=job.name, next_best=job.next_best)
    return None


def _is_ours(aws: Aws, found: Document, request: SageMakerRequest, *, packed: bytes | None) -> bool:
    """Whether a job was created with this request and this code."""
    wanted = _tag(request.body.get("Tags"))
    tagged = _tag_of(aws, str(found.get("TrainingJobArn"))) if wanted else None
    is_same = wanted == tagged
    if not tagged:
        is_same = all(is_within(request.body.get(key), found.get(key)) for key in _TELLING)
    return is_same and (packed is None or has_code(aws, request, packed))


def _tag_of(aws: Aws, arn: str) -> str | None:
    try:
        return _tag(list(aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)))
    except ServiceError as err:
        # Without permission to read tags, the job itself is compared.
        if may_pass(err):
            raise
        return None


def _tag(tags: Json) -> str | None:
    values = (str(tag.get("Value")) for tag in mappings(tags) if tag.get("Key") == REQUEST_TAG)
    return next(values, None)


def has_code(aws: Aws, request: SageMakerRequest, packed: bytes) -> bool:
    with Suppressed("missing"):
        return request.code_uri is None or aws.read_object(request.code_uri) == packed
    # It was deleted after the hosts had read it.
    return True


def is_within(ours: Json, theirs: Json) -> bool:
    """Whether `theirs` contains all of `ours`; the service adds its defaults."""
    if isinstance(ours, Mapping):
        there = mapping(theirs)
        return (not ours or isinstance(theirs, Mapping)) and all(
            is_within(value, there.get(key)) for key, value in ours.items()
        )
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(is_within, ours, theirs))
    return ours is None or ours == theirs
