"""A training job on SageMaker, followed to its end: its states, log and outputs."""

import tarfile
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import IO

from stoker import archive
from stoker.environment import pipeline_execution
from stoker.errors import NoCapacityError, PlatformError, ServiceError, StokerError
from stoker.logs import EventName, Log, now_utc
from stoker.platforms.aws import Aws
from stoker.platforms.base import InstanceSizes, JobEnd, leader_record
from stoker.platforms.follow import FollowedRun
from stoker.platforms.sagemaker.job_checks import settings_of
from stoker.platforms.sagemaker.lineage import kept_lineage
from stoker.platforms.sagemaker.load import (
    GroupLoad,
    group_loads,
    read_utilisation,
    utilisation_words,
)
from stoker.platforms.sagemaker.logs import JobLogs, Labels
from stoker.platforms.sagemaker.preferences import choices_of, groups_that_ran
from stoker.platforms.sagemaker.request import SageMakerRequest
from stoker.platforms.sagemaker.shortage import Shortage, shortage
from stoker.platforms.sagemaker.submit import (
    TrainingJobState,
    Transition,
    await_found,
    delete_token,
    is_cancelled,
    job_state,
    no_capacity,
    stop_command,
    stop_job,
)
from stoker.records.base import item_at
from stoker.records.training import EndState, Lineage
from stoker.repeat import ResultT, Suppressed, may_pass

FOLDER = "stoker"
# Limits of the whole archive, unpacked: the user's outputs are in it, too, and skipped.
MAX_ARCHIVE_BYTES = 64 << 30
MAX_MEMBERS = 500_000
# Limits of records, timelines and failures: a timeline has a few MiB.
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 512 << 20
MAX_FILES = 1000
# Between polls: short after news, then longer each time.
MIN_INTERVAL_SECONDS = 2.0
MAX_INTERVAL_SECONDS = 15.0
INTERVAL_GROWTH = 1.4
# Lines reach CloudWatch some seconds late: after the end the log is read until it is quiet for this
# time, and no longer than DRAIN_SECONDS.
QUIET_SECONDS = 6.0
DRAIN_SECONDS = 60.0
# Until a log that cannot be read is tried again.
LOGS_AGAIN_SECONDS = 60.0
# SIGTERM, 120 s until SIGKILL, and the service's own time.
STOP_SECONDS = 240.0
# Beyond the job's runtime: to start the hosts, and to upload the outputs.
MARGIN_SECONDS = 7200.0
# Host name of lines that come from the service.
SERVICE = "sagemaker"


def fetch_outputs(aws: Aws, uri: str, *, folder: Path, log: Log) -> Path | None:
    """Unpacks stoker/ of an output.tar.gz to `folder`; returns `folder`, or None without outputs.

    Only regular files are written, without those that are too large. A stream that breaks off is
    read again, for READ_AGAIN_SECONDS.

    Raises:
        PlatformError: If the archive cannot be read (ServiceError), or is none.
    """

    def read() -> int:
        with aws.open_object(uri) as content:
            return _unpack(content, folder, where=uri, log=log)

    def tell(err: ServiceError) -> None:
        log.event(EventName.CALL_REPEATED, action=err.action, why=err.what)

    with Suppressed("missing"):
        return folder if aws.repeated(read, tell=tell) else None
    return None


def _unpack(content: IO[bytes], folder: Path, *, where: str, log: Log) -> int:
    num_files = total = 0
    try:
        for packed, member in archive.members(
            content, max_bytes=MAX_ARCHIVE_BYTES, max_members=MAX_MEMBERS
        ):
            target = _target(member, folder)
            if target is None:
                continue
            is_too_large = member.size > min(MAX_FILE_BYTES, MAX_TOTAL_BYTES - total)
            if is_too_large or num_files == MAX_FILES:
                log.event(EventName.OUTPUT_SKIPPED, file=member.name, bytes=member.size)
                continue
            source = packed.extractfile(member)
            assert source is not None
            data = source.read()
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            num_files += 1
            total += member.size
    except (tarfile.TarError, OSError) as err:
        what = f"the job's outputs cannot be unpacked: {err}"
        # The record may be there; what comes after it is the user's.
        if not num_files or isinstance(err, OSError):
            raise PlatformError(what, where=where) from err
        log.event(EventName.OUTPUTS_READ_FAILED, object=where, why=what)
    return num_files


def _target(member: tarfile.TarInfo, folder: Path) -> Path | None:
    """Returns the path of a member, or None unless it is a regular file below stoker/."""
    path = PurePosixPath(member.name)
    is_below = len(path.parts) > 1 and path.parts[0] == FOLDER and ".." not in path.parts
    if member.isreg() and is_below:
        return folder / path
    return None


def _model_uri(aws: Aws, state: TrainingJobState) -> str | None:
    uri = state.model_uri or f"{state.output_prefix}/model.tar.gz"
    if state.status == "Completed":
        return uri
    try:
        has_model = aws.repeated(lambda: aws.has_object(uri))
    except ServiceError:
        return None
    return uri if has_model else None


def _copy_model(
    aws: Aws, uri: str, state: TrainingJobState, asked_name: str, *, is_step: bool, log: Log
) -> str | None:
    """Copies the model to where a pipeline's later step registers it: under `asked_name`.

    Returns:
        The copy's address; None: there is none.
    """
    asked_uri = f"{state.output_prefix}/model.tar.gz".replace(f"/{state.name}/", f"/{asked_name}/")
    try:
        aws.repeated(lambda: aws.copy_object(uri, asked_uri))
    except ServiceError as err:
        log.event(EventName.MODEL_COPY_FAILED, object=asked_uri, why=err.what)
        # A script may save no model.
        if is_step and err.kind != "missing":
            raise PlatformError(
                f"the model {uri} could not be copied to where it is registered: {err.what}",
                where=asked_uri,
                fix=f"aws s3 cp {uri} {asked_uri}, or the same command with --name {asked_name}",
            ) from err
        return None
    log.event(EventName.MODEL_COPIED, object=asked_uri)
    return asked_uri


def _verdict(state: TrainingJobState, *, has_checkpoints: bool) -> tuple[EndState, str | None]:
    if state.status == "Completed":
        return "succeeded", None
    if state.status != "Stopped":
        return "failed", state.reason or "the service gave no reason"
    # MaxRuntimeExceeded, MaxWaitTimeExceeded.
    if not state.secondary.startswith("Max"):
        return "stopped", None
    saved = "its progress is lost, as sagemaker.checkpoint_uri is not set"
    if has_checkpoints:
        saved = "the next attempt continues from the last checkpoint"
    return "failed", (
        f"the service stopped the job: {state.secondary}; {saved}; raise "
        "sagemaker.max_run_seconds (with spot: MaxWaitTimeInSeconds in sagemaker.request)"
    )


class SageMakerRun(FollowedRun):
    """A submitted job, followed by polling; it may not have the name that was asked for."""

    def __init__(self, aws: Aws, *, request: SageMakerRequest, asked_name: str) -> None:
        job = request.job
        pending = item_at(request.body, "StoppingCondition", "MaxPendingTimeInSeconds")
        pending = pending if isinstance(pending, int) else None
        super().__init__(
            job.name,
            run=job.name,
            service=SERVICE,
            log_folder=job.run_dir / "logs",
            way_back=f"the same command with --name {job.run_name}",
            way_to_stop=stop_command(job.name),
            is_step=bool(pipeline_execution()),
            may_last_seconds=settings_of(job).may_last_seconds + MARGIN_SECONDS + (pending or 0),
        )
        self._aws = aws
        self._job = job
        self._asked_name = asked_name
        self._pending_seconds = pending
        self._token_uri: str | None = request.token_uri
        self._has_checkpoints = bool(request.body.get("CheckpointConfig"))
        self._logs = JobLogs(
            aws, job_name=job.name, num_hosts=sum(group.count for group in job.groups)
        )
        # When the log is read again after an error, and the errors since it was last read.
        self._logs_at = 0.0
        self._log_errors: set[str] = set()
        self._labels = Labels([group.name for group in job.groups])
        self._state: TrainingJobState | None = None
        self._told: dict[tuple[str, str], Transition] = {}
        self._interval = 0.0
        self._reached_at = aws.clock()
        # After the job's end: when its log is no longer read, at the latest and if it stays quiet.
        self._drain_until = self._quiet_at = 0.0
        # Why `stop` could not end the job.
        self._remains = ""

    @property
    def _has_ended(self) -> bool:
        return self._state is not None and self._state.is_final

    @property
    def _logged_job(self) -> str:
        """The name of the training job that CloudWatch knows."""
        return self.name

    def _ask_to_stop(self) -> None:
        """Asks for the end of the job, which may have ended by now; does not wait."""
        stop_job(self._aws, self.name)

    def _observe(self) -> bool:
        """Looks at the job once; returns whether there is news."""
        return self._take(job_state(await_found(self._aws, self.name)))

    def _lineage(self, state: TrainingJobState) -> Lineage:
        return kept_lineage(self._aws, state.arn)

    def _is_cancelled(self) -> bool:
        return is_cancelled(self._aws)

    def remaining(self) -> PlatformError | None:
        what = f"the job {self.name} is not stopped: {self._remains}"
        where = f"training job {self.name}"
        fix = f"stop it, it is billed: {self._way_to_stop}"
        if self._remains:
            return PlatformError(what, where=where, fix=fix)
        return None

    def stop(self) -> None:
        """Stops the job unless it has ended; blocks until its end, STOP_SECONDS at most.

        What keeps it from ending is in `remaining`; such a job keeps its token.
        """
        deadline = self._aws.clock() + STOP_SECONDS
        if not (self._is_left or self._has_ended or self._remains):
            self._stop(deadline=deadline)
        if not self._is_left and not self._remains:
            self._delete_token()
        self._close_files()

    def _stop(self, *, deadline: float) -> None:
        try:
            self._repeated(self._ask_to_stop, until=deadline)
        except StokerError as err:
            self._remains = err.what
            self._log.event(EventName.JOB_STOP_FAILED, job=self.name, why=err.what)
            return
        self._log.event(EventName.JOB_STOPPING, job=self.name, at_most_seconds=STOP_SECONDS)
        try:
            while self._aws.clock() < deadline:
                self._repeated(self._observe, until=deadline)
                if self._has_ended:
                    return
                self._aws.sleep(MIN_INTERVAL_SECONDS)
            self._remains = f"it was asked to stop, and has not ended after {STOP_SECONDS:g} s"
        except StokerError as err:
            self._remains = f"it was asked to stop, and cannot be seen: {err.what}"
        self._log.event(EventName.JOB_STILL_STOPPING, job=self.name, after_seconds=STOP_SECONDS)

    def _repeated(self, call: Callable[[], ResultT], *, until: float) -> ResultT:
        return self._aws.repeated(call, seconds=max(0.0, until - self._aws.clock()))

    def utilisation(self, sizes: InstanceSizes) -> tuple[GroupLoad, ...]:
        """Returns the average load of each group's hosts so far; () before the training begins."""
        state = self._state
        roster = self._labels.roster
        if state is None or state.began_at is None or not roster:
            return ()
        types = {
            group.name: group.instance_type for group in groups_that_ran(self._job, state.groups)
        }
        loads = read_utilisation(
            self._aws,
            job_name=self._logged_job,
            roster=roster,
            types=types,
            sizes=sizes,
            begin=datetime.fromisoformat(state.began_at),
            end=datetime.fromisoformat(state.ended_at or now_utc()),
        )
        return group_loads(loads, types=types)

    def load_words(self, sizes: InstanceSizes) -> Sequence[str]:
        try:
            return utilisation_words(self.utilisation(sizes)).splitlines()
        except StokerError as err:
            return [f"utilisation cannot be read: {err.what}"]

    def _conclude(self) -> JobEnd:
        assert self._state is not None
        self._delete_token()
        state = self._state
        job = self._job
        # The service looks for hosts after it has created the job.
        lack = shortage(state, limit_seconds=self._pending_seconds)
        if lack is not None:
            raise self._lacking(lack, job_name=state.name)
        outputs = f"{state.output_prefix}/output.tar.gz"
        output_dir = None
        unfetched = None
        folder = job.run_dir / "output"
        try:
            output_dir = fetch_outputs(self._aws, outputs, folder=folder, log=self._log)
        except PlatformError as err:
            self._log.event(EventName.OUTPUTS_READ_FAILED, object=outputs, why=err.what)
            # An archive that is broken stays so.
            if isinstance(err, ServiceError):
                unfetched = outputs
        training = leader_record(output_dir)
        status, failure = _verdict(state, has_checkpoints=self._has_checkpoints)
        exit_code = state.exit_code
        # The service has the launcher's code, which is 0 for a run that a rule ended.
        if training and training.exit_code is not None:
            exit_code = training.exit_code
        model_uri = _model_uri(self._aws, state)
        model_copy_uri = None
        if status == "succeeded" and model_uri and self._asked_name != state.name:
            name = self._asked_name
            log = self._log
            model_copy_uri = _copy_model(
                self._aws, model_uri, state, name, is_step=self._is_step, log=log
            )
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure,
            output_dir=output_dir,
            model_uri=model_uri,
            model_copy_uri=model_copy_uri,
            job_url=state.url,
            events=tuple(transition.event for transition in self._told.values()),
            mlflow_run_id=state.mlflow_run_id,
            host_seconds={
                group.name: group.count * state.billed_seconds
                for group in groups_that_ran(job, state.groups)
                if state.billed_seconds is not None
            },
            lineage=self._lineage(state),
            unfetched=unfetched,
            groups=groups_that_ran(job, state.groups),
        )

    def _lacking(self, lack: Shortage, *, job_name: str) -> NoCapacityError:
        job = self._job
        error = no_capacity(lack.reason, job.groups, job_name=job_name, next_best=job.next_best)
        error.waited_seconds = lack.waited_seconds
        if lack.is_for_all and not error.types:
            clusters = choices_of(job)
            error.types = frozenset(cluster[0].instance_type for cluster in clusters)
        return error

    def _look(self) -> None:
        """Waits, then polls the job's state and its new log lines."""
        if self._interval:
            self._aws.sleep(self._interval)
        has_news = self._look_at_state()
        has_new_lines = self._look_at_logs()
        is_behind = self._logs.is_behind
        if self._has_ended:
            now = self._aws.clock()
            self._drain_until = self._drain_until or now + DRAIN_SECONDS
            if has_new_lines or is_behind or not self._quiet_at:
                self._quiet_at = now + QUIET_SECONDS
            if now >= min(self._drain_until, self._quiet_at):
                self._emit(*self._labels.flush())
                self._is_drained = True
                self._close_files()
            self._interval = MIN_INTERVAL_SECONDS
        elif has_news or not self._interval:
            self._interval = MIN_INTERVAL_SECONDS
        else:
            self._interval = min(self._interval * INTERVAL_GROWTH, MAX_INTERVAL_SECONDS)
        # More of the log is available now.
        if is_behind:
            self._interval = 0.0

    def _look_at_state(self) -> bool:
        if self._has_ended:
            return False
        try:
            has_news = self._observe()
        except PlatformError as err:
            now = self._aws.clock()
            self._endure(err, now=now, failing_seconds=now - self._reached_at)
            if isinstance(err, ServiceError) and err.kind == "stale":
                self._aws.renew_login()
            return False
        self._reached_at = self._aws.clock()
        return has_news

    def _take(self, state: TrainingJobState) -> bool:
        """Reports what is new in a state; returns whether anything is."""
        if self._has_ended:
            # Another thread may have stopped the run since the request.
            return False
        self._state = state
        # A step's message may change: then it is reported again.
        new = [each for each in state.transitions if each not in self._told.values()]
        for transition in new:
            self._told[transition.status, transition.since] = transition
            self._say(transition.words)
        if state.is_final and state.reason:
            self._say(f"{state.status}: {state.reason}")
        return bool(new)

    def _look_at_logs(self) -> bool:
        """Emits the new lines; returns whether more may come: there were any, or no answer."""
        now = self._aws.clock()
        if now < self._logs_at and not self._has_ended:
            return False
        try:
            entries = self._logs.read()
        except ServiceError as err:
            # The training continues without its log. Others wait while it cannot be read.
            self._logs_at = now + LOGS_AGAIN_SECONDS
            if err.code not in self._log_errors:
                self._log_errors.add(err.code)
                self._log.event(EventName.LOGS_READ_FAILED, why=err.what)
                self._say(f"the log cannot be read: {err.what}; it is tried again")
            return may_pass(err)
        self._log_errors.clear()
        self._emit(*self._labels.label(entries, now=now))
        return bool(entries)

    def _delete_token(self) -> None:
        if self._token_uri:
            uri = self._token_uri
            self._token_uri = None
            delete_token(self._aws, uri, log=self._log)
