"""A training job is started exactly once, however often it is tried.

A job's name is unique in its account and region, so that an attempt that finds its own job there
goes on with it. One that ended badly, or is somebody else's, is left alone: NAME-2, NAME-3 ... are
tried next, with outputs and a token of their own.

The token is written before the job is created, and deleted at its end; neither the request nor a
log holds it. Only jobs that do not exist get a token written; a token that is there already stays
as it is, for hosts may have read it. docs/threat-model.md says whom it keeps out.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from stoker.errors import PlatformError, StokerError
from stoker.logs import Log
from stoker.platforms.aws import EVENTUAL_SECONDS, Aws, AwsError
from stoker.platforms.packing import pack
from stoker.platforms.sagemaker.request import REQUEST_TAG, SageMakerRequest
from stoker.platforms.sagemaker.state import (
    console_url,
    job_state,
    lacks_capacity,
    no_capacity,
    no_quota,
)
from stoker.records import Json

# As long as the feed asks for; in the file they are hexadecimal digits.
TOKEN_BYTES = 32


def put_token(aws: Aws, uri: str, *, kms_key: str | None) -> None:
    """Makes the token unless there is one.

    One that is there already was left by an earlier attempt, or is another attempt's of this very
    moment: hosts of its job may have read it, so that it must stay as it is.

    Raises:
        AwsError: If it cannot be written.
    """
    content = secrets.token_bytes(TOKEN_BYTES).hex().encode("ascii")
    aws.create_object(uri, content, kms_key=kms_key)


def delete_token(aws: Aws, uri: str, *, log: Log) -> None:
    """Deletes the token; what hinders it is logged, for a job has ended by then."""
    try:
        aws.delete_object(uri)
    except StokerError as err:
        log.event("token_not_deleted", object=uri, why=err.what)


# NAME, NAME-2 ... NAME-5: who comes to more has another trouble than a name.
MAX_NAMES = 5
MAX_NAME_LENGTH = 63
# Between looks for a job that was just created.
LOOK_SECONDS = 2.0

_IN_USE = ("ResourceInUse", "ResourceInUseException", "ConflictException")
# Where the tags do not tell: what makes a job the one that was asked for.
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
class StartedTrainingJob:
    """A job that runs, or has run: `request` is the one that it was created with."""

    request: SageMakerRequest
    is_adopted: bool


def start(
    aws: Aws,
    request: SageMakerRequest,
    *,
    rename: Callable[[str], SageMakerRequest],
    log: Log,
) -> StartedTrainingJob:
    """Creates the job, or adopts the one that an earlier attempt created.

    Args:
        aws: The account.
        request: What to create.
        rename: The same request under another name.
        log: For what is worth telling.

    Raises:
        PlatformError: If the service refuses, or all names are taken.
    """
    packed = pack(request.code_folder) if request.code_folder else None
    for number in range(1, MAX_NAMES + 1):
        candidate = request if number == 1 else rename(numbered(request.job.name, number))
        name = candidate.job.name
        found = find(aws, name)
        if found is None:
            if _create(aws, candidate, packed=packed, log=log):
                return StartedTrainingJob(request=candidate, is_adopted=False)
            found = await_found(aws, name)
        state = job_state(found)
        is_ours = _is_ours(aws, found, candidate, packed=packed)
        if is_ours and state.status in ("InProgress", "Completed"):
            log.event("job_adopted", job=name, status=state.status, url=state.url)
            return StartedTrainingJob(request=candidate, is_adopted=True)
        why = f"it is {state.status}" if is_ours else "it is another job"
        log.event("name_is_taken", job=name, why=why)
        _forget_token(aws, found, candidate, log=log)
    last = numbered(request.job.name, MAX_NAMES)
    raise PlatformError(
        f"jobs called {request.job.name} to {last} exist already, and none can be gone on with",
        where="sagemaker:CreateTrainingJob",
        fix="look why they ended, then choose another --name",
    )


def numbered(name: str, number: int) -> str:
    """Returns NAME-2 and so on, cut to what the service allows."""
    end = f"-{number}"
    return name[: MAX_NAME_LENGTH - len(end)].rstrip("-") + end


def find(aws: Aws, name: str) -> Mapping[str, Json] | None:
    """Returns DescribeTrainingJob's answer, or None where there is no such job."""
    try:
        return aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
    except AwsError as err:
        if err.is_missing:
            return None
        raise


def await_found(aws: Aws, name: str) -> Mapping[str, Json]:
    """Returns that answer for a job that exists; the service may take EVENTUAL_SECONDS to show it.

    Raises:
        PlatformError: If it does not show it in time.
    """
    deadline = aws.clock() + EVENTUAL_SECONDS
    while (found := find(aws, name)) is None:
        if aws.clock() >= deadline:
            raise PlatformError(
                f"the job was created, and not to be found for {EVENTUAL_SECONDS:g} s",
                where=f"job {name}, sagemaker:DescribeTrainingJob",
                fix="check region and account",
            )
        aws.sleep(LOOK_SECONDS)
    return found


def stop_job(aws: Aws, name: str) -> None:
    """Asks the service to stop a job: SIGTERM to its hosts, SIGKILL 120 s later. Does not wait.

    A job that has ended, or that there never was, is no error.

    Raises:
        AwsError: If the service refuses, and the job runs.
    """
    try:
        aws.call("sagemaker", "StopTrainingJob", TrainingJobName=name)
    except AwsError as err:
        if err.is_denied or err.is_unreachable:
            raise
        found = find(aws, name)
        if found is not None and not job_state(found).is_ending:
            raise


def _create(aws: Aws, request: SageMakerRequest, *, packed: bytes | None, log: Log) -> bool:
    """Writes token and code and creates the job; False where the name was taken meanwhile."""
    kms_key = request.job.sagemaker.output_kms_key if request.job.sagemaker else None
    is_sent = False
    try:
        put_token(aws, request.token_uri, kms_key=kms_key)
        if packed is not None and request.code_uri:
            aws.write_object(request.code_uri, packed, kms_key=kms_key)
        is_sent = True
        answer = aws.call("sagemaker", "CreateTrainingJob", **request.body)
    except AwsError as err:
        if err.code in _IN_USE:
            return False
        _abandon(aws, request, is_sent=is_sent and err.is_unreachable, log=log)
        refusal = _quota_or_capacity(err, request)
        if refusal:
            raise refusal from err
        raise
    except BaseException:
        # Interrupted: the service may have got the request though its answer did not come back.
        _abandon(aws, request, is_sent=is_sent, log=log)
        raise
    url = console_url(str(answer.get("TrainingJobArn")))
    log.event("job_created", job=request.job.name, url=url)
    return True


def _abandon(aws: Aws, request: SageMakerRequest, *, is_sent: bool, log: Log) -> None:
    """Leaves nothing behind of a job that is not followed."""
    name = request.job.name
    try:
        if is_sent:
            await_found(aws, name)
            stop_job(aws, name)
    except StokerError as err:
        log.event("job_not_stopped", job=name, why=err.what)
    finally:
        delete_token(aws, request.token_uri, log=log)


def _forget_token(
    aws: Aws, found: Mapping[str, Json], request: SageMakerRequest, *, log: Log
) -> None:
    """Deletes a token at a place that the job which has the name does not read."""
    state = job_state(found)
    folder = request.token_uri.rpartition("/")[0]
    if state.is_final or folder not in json.dumps(found.get("InputDataConfig")):
        delete_token(aws, request.token_uri, log=log)


def _quota_or_capacity(err: AwsError, request: SageMakerRequest) -> PlatformError | None:
    job = request.job
    if err.code.startswith("ResourceLimitExceeded"):
        return no_quota(
            err.what, job.groups, where=f"job {job.name}, {err.action}", next_best=job.next_best
        )
    if lacks_capacity(err.what):
        return no_capacity(err.what, job.groups, job_name=job.name, next_best=job.next_best)
    return None


def _is_ours(
    aws: Aws, found: Mapping[str, Json], request: SageMakerRequest, *, packed: bytes | None
) -> bool:
    """Returns whether a job was created with this request and this code."""
    wanted = _tag(request.body.get("Tags"))
    tagged = _tag_of(aws, str(found.get("TrainingJobArn"))) if wanted else None
    if wanted and tagged:
        is_same = wanted == tagged
    else:
        is_same = all(is_within(request.body.get(key), found.get(key)) for key in _TELLING)
    return is_same and (packed is None or _has_code(aws, request, packed))


def _tag_of(aws: Aws, arn: str) -> str | None:
    try:
        return _tag(list(aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)))
    except AwsError:
        # Not everybody may read tags: what the job is tells, too.
        return None


def _tag(tags: Json) -> str | None:
    for tag in tags if isinstance(tags, list | tuple) else ():
        if isinstance(tag, Mapping) and tag.get("Key") == REQUEST_TAG:
            return str(tag.get("Value"))
    return None


def _has_code(aws: Aws, request: SageMakerRequest, packed: bytes) -> bool:
    try:
        return request.code_uri is None or aws.read_object(request.code_uri) == packed
    except AwsError as err:
        # Deleted after that: its hosts have it long ago.
        if err.is_missing:
            return True
        raise


def is_within(ours: Json, theirs: Json) -> bool:
    """Returns whether all of `ours` is said in `theirs`, too; the service adds its own defaults."""
    if isinstance(ours, Mapping):
        return (not ours or isinstance(theirs, Mapping)) and all(
            is_within(value, theirs.get(key) if isinstance(theirs, Mapping) else None)
            for key, value in ours.items()
        )
    if isinstance(ours, list | tuple):
        return (
            isinstance(theirs, list | tuple)
            and len(ours) == len(theirs)
            and all(is_within(one, other) for one, other in zip(ours, theirs, strict=True))
        )
    return ours is None or ours == theirs
