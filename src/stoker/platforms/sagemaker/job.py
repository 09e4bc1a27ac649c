"""A training job on SageMaker, followed to its end: its states, log and outputs."""

import contextlib
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from stoker.environment import pipeline_execution, poll_seconds
from stoker.errors import PlatformError, ServiceError, StokerError
from stoker.logs import EventName, parse_line
from stoker.platforms.aws import Aws
from stoker.platforms.base import JobEnd, LogLine, leader_record
from stoker.platforms.follow import FollowedRun
from stoker.platforms.sagemaker.request import SageMakerRequest
from stoker.platforms.sagemaker.submit import (
    FINAL,
    delete_token,
    lineage_of,
    no_hosts,
    page_of,
    stop_command,
    stop_job,
)
from stoker.records import Event
from stoker.records.base import Document, mappings, text
from stoker.records.training import EndState
from stoker.repeat import Suppressed

# Between looks at the job and its log.
POLL_SECONDS = 10.0
# Lines reach CloudWatch some seconds late: after the end the log is read until it has no new lines,
# and no longer than this.
DRAIN_SECONDS = 60.0
# SIGTERM, 120 s until SIGKILL, and the service's own time.
STOP_SECONDS = 240.0
# Beyond the job's runtime: to start the hosts, and to upload the outputs.
MARGIN_SECONDS = 7200.0
# Host name of lines that come from the service.
_SERVICE = "sagemaker"
LOG_GROUP = "/aws/sagemaker/TrainingJobs"
# Of lines before the launcher's that names its host's group.
UNKNOWN = "unknown"
# Hosts' clocks differ, and lines reach CloudWatch late: so much is read again.
LATE_MILLIS = 60_000
# For example: AlgorithmError: what the launcher wrote, exit code: 7
_EXIT_CODE = re.compile(r"exit code:? (-?\d+)", re.IGNORECASE)


def fetch_outputs(aws: Aws, uri: str, *, folder: Path) -> Path | None:
    """Unpacks stoker/ of an output.tar.gz to `folder`; returns `folder`, or None without outputs.

    A stream that breaks off is read again, for READ_AGAIN_SECONDS.

    Raises:
        PlatformError: If the archive cannot be read (ServiceError), or is none.
    """

    def read() -> Path:
        with aws.open_object(uri) as content, tarfile.open(fileobj=content, mode="r|*") as packed:
            for member in packed:
                # What else is there is the user's.
                if PurePosixPath(member.name).parts[:1] == ("stoker",) and member.isreg():
                    packed.extract(member, folder, filter="data")
        return folder

    try:
        with Suppressed("missing"):
            return aws.repeated(read)
    except tarfile.TarError as err:
        raise PlatformError(f"the job's outputs cannot be unpacked: {err}", where=uri) from err
    return None


def verdict_of(job: Document) -> tuple[EndState, int | None, str | None]:
    """Returns how a job ended, its command's exit code if it is known, and why it failed."""
    status = text(job, "TrainingJobStatus")
    if status == "Completed":
        return "succeeded", 0, None
    # MaxRuntimeExceeded, MaxWaitTimeExceeded.
    limit = text(job, "SecondaryStatus")
    if status == "Stopped" and not limit.startswith("Max"):
        return "stopped", None, None
    reason = text(job, "FailureReason") or "the service gave no reason"
    match = _EXIT_CODE.search(reason)
    if status == "Stopped":
        reason = (
            f"the service stopped the job: {limit}; raise sagemaker.max_run_seconds (with spot: "
            "MaxWaitTimeInSeconds in sagemaker.request); where sagemaker.checkpoint_uri is set, "
            "the next attempt continues from the last checkpoint"
        )
    return "failed", int(match[1]) if match else None, reason


class SageMakerRun(FollowedRun):
    """A submitted job, followed by polling; it may not have the name that was asked for."""

    def __init__(self, aws: Aws, *, request: SageMakerRequest) -> None:
        job = request.job
        super().__init__(
            job.name,
            job=job,
            service=_SERVICE,
            way_to_stop=stop_command(job.name),
            is_step=bool(pipeline_execution()),
        )
        self._aws = aws
        self._request = request
        self._hosts_log = JobLog(aws, job_name=job.name, groups=[g.name for g in job.groups])
        # As DescribeTrainingJob describes it; empty before the first look.
        self._state: Document = {}
        self._events: list[Event] = []
        self._reached_at = aws.clock()
        self._has_looked = False

    @property
    def _has_ended(self) -> bool:
        return text(self._state, "TrainingJobStatus") in FINAL

    def _look(self) -> None:
        """Waits, except at first, and polls the job's state and its new log lines."""
        if self._has_looked:
            self._aws.sleep(poll_seconds(POLL_SECONDS))
        self._has_looked = True
        had_ended = self._has_ended
        if not had_ended:
            try:
                self._observe()
            except PlatformError as err:
                self._endure(err, failing_seconds=self._aws.clock() - self._reached_at)
        lines: list[LogLine] = []
        try:
            lines = self._hosts_log.read()
        except ServiceError as err:
            # The training continues without its log.
            self._tell_failure(err)
        self._emit(*lines)
        # Its last lines are late.
        is_late = self._aws.clock() >= self._reached_at + DRAIN_SECONDS
        if had_ended and (is_late or not lines):
            self._is_drained = True
            self._close()

    def _observe(self) -> None:
        """Looks at the job once, and tells what is new."""
        name = self.name
        self._state = self._aws.call("sagemaker", "DescribeTrainingJob", TrainingJobName=name)
        self._reached_at = self._aws.clock()
        # A step's message may change: then it is told again.
        for step in mappings(self._state, "SecondaryStatusTransitions"):
            what = f"{text(step, 'Status')}: {text(step, 'StatusMessage')}".removesuffix(": ")
            event = Event(when=text(step, "StartTime"), what=what)
            if event not in self._events:
                self._events.append(event)
                self._say(what)

    def _is_cancelled(self) -> bool:
        run = pipeline_execution()
        # A job that is stopped by mistake costs the training.
        with contextlib.suppress(StokerError):
            if run:
                asked = {"PipelineExecutionArn": run}
                answer = self._aws.call("sagemaker", "DescribePipelineExecution", **asked)
                return answer.get("PipelineExecutionStatus") in ("Stopping", "Stopped")
        return False

    def _stop(self) -> None:
        deadline = self._aws.clock() + STOP_SECONDS
        self._aws.repeated(lambda: stop_job(self._aws, self.name), seconds=STOP_SECONDS)
        self._log.event(EventName.JOB_STOPPING, job=self.name, at_most_seconds=STOP_SECONDS)
        while not self._has_ended:
            left = deadline - self._aws.clock()
            if left <= 0:
                raise PlatformError(f"it has not ended after {STOP_SECONDS:g} s")
            self._aws.sleep(poll_seconds(POLL_SECONDS))
            self._aws.repeated(self._observe, seconds=left)

    def _close(self) -> None:
        super()._close()
        # Hosts of a job that is left, or could not be stopped, may still read it.
        if self._has_ended:
            delete_token(self._aws, self._request.token_uri)

    def _conclude(self) -> JobEnd:
        state = self._state
        job = self._request.job
        status, exit_code, failure = verdict_of(state)
        # The service looks for hosts after it has created the job.
        refusal = no_hosts(failure or "", job, where=f"job {self.name}")
        if status == "failed" and refusal:
            raise refusal
        prefix = text(state, "OutputDataConfig", "S3OutputPath").rstrip("/")
        outputs = f"{prefix}/{self.name}/output/output.tar.gz"
        output_dir = unfetched = None
        try:
            output_dir = fetch_outputs(self._aws, outputs, folder=job.run_dir / "output")
        except PlatformError as err:
            self._log.event(EventName.OUTPUT_FAILED, object=outputs, why=err.what)
            unfetched = outputs
        training = leader_record(output_dir)
        # The service has the launcher's code, which is 0 for a run that a rule ended.
        if training and training.exit_code is not None:
            exit_code = training.exit_code
        billed = int(text(state, "BillableTimeInSeconds") or 0)
        arn = text(state, "TrainingJobArn")
        model = text(state, "ModelArtifacts", "S3ModelArtifacts")
        return JobEnd(
            status=status,
            exit_code=exit_code,
            failure=failure,
            output_dir=output_dir,
            model_uri=model if model and status == "succeeded" else None,
            job_url=page_of(arn),
            events=tuple(self._events),
            mlflow_run_id=text(state, "MlflowDetails", "MlflowRunId") or None,
            host_seconds={g.name: g.count * billed for g in job.groups} if billed else {},
            lineage=lineage_of(self._aws, job, arn),
            unfetched=unfetched,
        )


class JobLog:
    """Reader of a job's log: each line once, with its host's group.

    Attributes:
        roster: Host to group, as far as known: the launcher says it in one of its first lines.
    """

    def __init__(self, aws: Aws, *, job_name: str, groups: Sequence[str]) -> None:
        self.roster: dict[str, str] = {}
        self._aws = aws
        self._prefix = f"{job_name}/"
        self._group = groups[0] if len(groups) == 1 else UNKNOWN
        # Time by id of the events that the next look may show again.
        self._shown: dict[str, int] = {}

    def read(self) -> list[LogLine]:
        """Returns the new lines of all hosts, the earliest first; none while there is no log."""
        begin = max(self._shown.values(), default=0) - LATE_MILLIS
        asked = {"logStreamNamePrefix": self._prefix, "startTime": max(0, begin)}
        listed: list[Document] = []
        # An account's first job creates the log group.
        with Suppressed("missing"):
            listed += self._aws.pages(
                "logs", "FilterLogEvents", items="events", logGroupName=LOG_GROUP, **asked
            )
        times = {text(event, "eventId"): int(text(event, "timestamp")) for event in listed}
        new = [event for event in listed if text(event, "eventId") not in self._shown]
        self._shown = times or self._shown
        lines = []
        for event in sorted(new, key=lambda event: times[text(event, "eventId")]):
            # JOB/algo-1-1700000000
            stream = text(event, "logStreamName").removeprefix(self._prefix)
            host = "-".join(stream.split("-")[:2])
            for line in text(event, "message").rstrip("\r\n").split("\n"):
                self._take_role(host, line)
                lines.append((host, line.rstrip("\r")))
        return [LogLine(group=self.roster[host], host=host, text=line) for host, line in lines]

    def _take_role(self, host: str, line: str) -> None:
        self.roster.setdefault(host, self._group)
        event = parse_line(line) if line.startswith("stoker ") else None
        # A script may print another host's line.
        if event and event.event == EventName.HOST_ROLE and event.host == host:
            self.roster[host] = event.values.get("group") or self._group
