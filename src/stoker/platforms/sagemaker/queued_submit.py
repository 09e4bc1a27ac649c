"""Submission of a job to a queue of AWS Batch, exactly once.

An attempt that finds its own service job under the name continues with it, as with jobs that start
at once (`submit`). Names are not unique to Batch: the token of the submission is, which tells two
attempts of one run; the second looks for the first one's job.
"""

from collections.abc import Callable, Sequence

from stoker.errors import PlatformError, ServiceError, TerminatedError, UsageError
from stoker.logs import EventName, Log
from stoker.platforms.aws import EVENTUAL_SECONDS, Aws
from stoker.platforms.sagemaker.batch_queue import (
    KEY,
    ServiceJob,
    describe,
    namesakes,
    submission_token,
    tag_texts,
    terminate,
    terminate_command,
)
from stoker.platforms.sagemaker.request import REQUEST_TAG, SageMakerRequest
from stoker.platforms.sagemaker.submit import (
    MAX_NAMES,
    MAX_TAGS,
    POLL_SECONDS,
    delete_token,
    has_code,
    lacks_capacity,
    lineage_tags,
    named_requests,
    packed_code,
    write_inputs,
)
from stoker.records import Json
from stoker.records.base import mapping
from stoker.records.platforms import QueueSettings
from stoker.repeat import may_pass

_WHERE = "batch:SubmitServiceJob"
Renamed = Callable[[str], SageMakerRequest]


def queue_of(request: SageMakerRequest) -> QueueSettings:
    settings = request.job.platform_settings.sagemaker
    assert settings is not None
    assert settings.queue is not None
    return settings.queue


def start_queued(
    aws: Aws, request: SageMakerRequest, *, rename: Renamed, log: Log
) -> tuple[SageMakerRequest, ServiceJob]:
    """Submits the job, or adopts the one of an earlier attempt; returns its request, and it.

    Args:
        aws: The account.
        request: Of a workload with a queue.
        rename: Returns the same request under another name.
        log: For what happens to names.

    Raises:
        PlatformError: If the service refuses, or all names are taken.
        UsageError: If there is no such queue.
    """
    packed = packed_code(request)
    num_taken = 0
    for candidate in named_requests(request, rename):
        earlier = _earlier(aws, candidate)
        adopted = _own_among(aws, earlier, candidate, packed=packed)
        if adopted is None and not earlier:
            return candidate, _submit(aws, candidate, packed=packed, log=log)
        if adopted is not None and adopted.is_usable:
            _tell_resumed(adopted, log=log)
            return candidate, adopted
        newest = adopted or earlier[0]
        why = f"it is {newest.status}" if adopted else "it is another job"
        log.event(EventName.JOB_NAME_CONFLICT, job=newest.name, why=why)
        if all(job.is_final for job in earlier):
            delete_token(aws, candidate.token_uri, log=log)
        num_taken += not lacks_capacity(newest.reason)
        if num_taken == MAX_NAMES:
            break
    raise PlatformError(
        f"the jobs {request.job.name} to {newest.name} exist already, and none can be continued",
        where=_WHERE,
        fix="check why they ended, then choose another --name",
    )


def _tell_resumed(job: ServiceJob, *, log: Log) -> None:
    log.event(EventName.JOB_RESUMED, job=job.name, status=job.status, url=job.arn)


def find_own_queued(aws: Aws, request: SageMakerRequest, *, rename: Renamed) -> ServiceJob | None:
    """Returns this request's service job if it waits, runs or has succeeded, else None."""
    packed = packed_code(request)
    for candidate in named_requests(request, rename):
        earlier = _earlier(aws, candidate)
        adopted = _own_among(aws, earlier, candidate, packed=packed)
        if adopted is not None and adopted.is_usable:
            return adopted
        if not earlier:
            return None
    return None


def _earlier(aws: Aws, request: SageMakerRequest) -> list[ServiceJob]:
    queue = queue_of(request)
    try:
        return namesakes(aws, queue, request.job.name)
    except ServiceError as err:
        if err.kind != "missing":
            raise
        raise UsageError(
            f"there is no queue {queue.job_queue} in {aws.region}: {err.what}",
            where=f"{KEY}.job_queue",
            fix="create it (type SAGEMAKER_TRAINING), or correct the key",
        ) from err


def _own_among(
    aws: Aws, jobs: Sequence[ServiceJob], request: SageMakerRequest, *, packed: bytes | None
) -> ServiceJob | None:
    """Returns the best of the jobs that have this request and this code: one that can go on."""
    wanted = tag_texts(request.body).get(REQUEST_TAG)
    same = [job for job in jobs if job.tags.get(REQUEST_TAG) == wanted]
    if not same or (packed is not None and not has_code(aws, request, packed)):
        return None
    return next((job for job in same if job.is_usable), same[0])


def _submit(aws: Aws, request: SageMakerRequest, *, packed: bytes | None, log: Log) -> ServiceJob:
    """Writes token and code, and submits the job; an earlier submission's is returned instead."""
    submission = _with_facts(aws, request, packed=packed)
    name = request.job.name
    is_sent = False
    try:
        write_inputs(aws, request, packed=packed)
        is_sent = True
        answer = aws.call("batch", "SubmitServiceJob", **submission)
    except ServiceError as err:
        again = f"the same command with --name {request.job.run_name} adopts it"
        if may_pass(err):
            if is_sent:
                err.fix = f"{err.fix}; the job {name} may wait in the queue: {again}"
            raise
        # The second submission of a token is refused: after one whose answer was lost, perhaps
        # within this call. The first one's job may become visible later.
        earlier = None
        if is_sent and err.kind == "refused":
            earlier = _await_own(aws, request, packed=packed, seconds=EVENTUAL_SECONDS)
        if earlier is not None:
            _tell_resumed(earlier, log=log)
            return earlier
        delete_token(aws, request.token_uri, log=log)
        raise
    except (KeyboardInterrupt, TerminatedError) as err:
        words = _words_of_interrupt(aws, request, err, packed=packed, is_sent=is_sent, log=log)
        raise type(err)(words) from err
    job_id = str(answer["jobId"])
    log.event(EventName.JOB_CREATED, job=name, url=str(answer.get("jobArn") or job_id))
    return aws.repeated(lambda: describe(aws, job_id))


def _with_facts(aws: Aws, request: SageMakerRequest, *, packed: bytes | None) -> dict[str, Json]:
    """Returns the SubmitServiceJob request with its token, and with tags of the run's origin."""
    submission = dict(request.queued or {})
    facts = tag_texts({"Tags": lineage_tags(aws, request, packed=packed)})
    tags = {**mapping(submission, "tags"), **facts}
    kept = {key: tags[key] for key in list(tags)[:MAX_TAGS]}
    return {**submission, "tags": kept, "clientToken": submission_token(submission)}


def _await_own(
    aws: Aws, request: SageMakerRequest, *, packed: bytes | None, seconds: float
) -> ServiceJob | None:
    """Returns this request's service job once it is seen; None if it is not, for so long."""
    deadline = aws.clock() + seconds
    while True:
        adopted = _own_among(aws, _earlier(aws, request), request, packed=packed)
        if adopted is not None or aws.clock() >= deadline:
            return adopted
        aws.sleep(POLL_SECONDS)


def _words_of_interrupt(
    aws: Aws,
    request: SageMakerRequest,
    err: BaseException,
    *,
    packed: bytes | None,
    is_sent: bool,
    log: Log,
) -> str:
    """Returns what is left after an interrupted submission; after Ctrl-C nothing is."""
    name = request.job.name
    if not is_sent:
        delete_token(aws, request.token_uri, log=log)
        return ""
    again = f"the same command with --name {request.job.run_name} adopts it"
    if isinstance(err, TerminatedError):
        return f"the job {name} may wait in the queue {queue_of(request).name}; {again}"
    try:
        adopted = _await_own(aws, request, packed=packed, seconds=EVENTUAL_SECONDS)
        if adopted is None:
            return f"the job {name} may wait in the queue {queue_of(request).name}; {again}"
        terminate(aws, adopted.id)
    except (PlatformError, UsageError) as failure:
        log.event(EventName.JOB_STOP_FAILED, job=name, why=failure.what)
        stop = terminate_command("ID")
        return f"the job {name} may wait in the queue {queue_of(request).name}; to stop it: {stop}"
    delete_token(aws, request.token_uri, log=log)
    return ""
