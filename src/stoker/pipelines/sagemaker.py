"""Pipelines on SageMaker: what one is built from, and its runs and schedules, through boto3."""

import dataclasses
import json
import re
from collections.abc import Sequence
from datetime import datetime

from stoker.errors import GateError, PlatformError, ServiceError, UsageError, WorkloadError
from stoker.pipelines.base import (
    Compiled,
    PipelineClient,
    RunState,
    RunStep,
    Schedule,
    about,
    spelt,
    typed_values,
)
from stoker.platforms.aws import Aws, tag_list
from stoker.platforms.sagemaker.submit import stop_job
from stoker.records import Json, SageMakerSettings, Workload
from stoker.records.base import Document, item_at, mapping, mappings, text

_EXIT_CODE = re.compile(r"(?i)exit code:? (\d+)\b")
_SUMMARIES = "PipelineExecutionSummaries"
SCHEDULE_GROUP = "default"
# A start that is an hour late is left to the next one.
RETRY_POLICY = {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600}
# What GetSchedule tells, and UpdateSchedule does not take.
_TOLD_ALONE = ("Arn", "CreationDate", "LastModificationDate")


class SageMakerClient(PipelineClient):
    """The verbs of pipelines on one account and region; `run` may be an ARN, with its region."""

    target = "sagemaker"
    # A container has 120 s to end; then come the upload of its output and the steps after it.
    stop_seconds = 900.0

    def __init__(
        self, settings: SageMakerSettings | None, *, run: str = "", aws: Aws | None = None
    ) -> None:
        # An ARN names its own region.
        place = run.split(":")
        region = settings.region if settings else None
        self._aws = aws or Aws(region=place[3] if len(place) > 5 else region)
        self._settings = settings
        self.clock = self._aws.clock
        self.sleep = self._aws.sleep

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        described = self._find(compiled.name)
        wanted = self._request(compiled)
        there = {key: item_at(described, key) for key in wanted}
        for request in (wanted, there):
            request["PipelineDefinition"] = json.loads(text(request, "PipelineDefinition") or "{}")
        return there if described else None, wanted

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        settings = self._settings
        aws = self._aws
        request = self._request(compiled)
        assert settings
        # Before the definition: a run that a schedule starts in between finds them.
        for uri, content in compiled.uploads.items():
            aws.create_object(uri, content, kms_key=settings.output_kms_key)
        pipeline = self._find(compiled.name)
        action = "unchanged"
        if pipeline is None:
            action = "created"
            tags = tag_list(settings.tags)
            pipeline = aws.call("sagemaker", "CreatePipeline", **request, Tags=tags)
        elif is_changed:
            action = "updated"
            pipeline = aws.call("sagemaker", "UpdatePipeline", **request)
        return {"action": action, "id": pipeline["PipelineArn"]}

    def _request(self, compiled: Compiled) -> dict[str, Json]:
        return {
            "PipelineName": compiled.name,
            "PipelineDescription": about(compiled.name),
            "RoleArn": self._role,
            "PipelineDefinition": compiled.definition,
        }

    @property
    def _role(self) -> str:
        assert self._settings
        return self._settings.control.role or self._settings.role

    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        name = workload.name
        answer = self._aws.call(
            "sagemaker",
            "StartPipelineExecution",
            PipelineName=name,
            PipelineParameters=_values(parameters, workload, self._uploaded(workload)),
        )
        run = f"{name}/{text(answer, 'PipelineExecutionArn').rpartition('/')[2]}"
        return RunState(run=run, status="Starting", has_ended=False, exit_code=None)

    def put_schedule(self, workload: Workload, wanted: Schedule) -> Schedule:
        uploaded = self._uploaded(workload)
        there = self._schedule(wanted.name, pipeline=workload.name)
        # UpdateSchedule resets each field that is not sent, so what is not stoker's is sent back.
        target: dict[str, Json] = {
            "RetryPolicy": RETRY_POLICY,
            **mapping(there, "Target"),
            "Arn": uploaded["PipelineArn"],
            "RoleArn": self._role,
            "SageMakerPipelineParameters": {
                "PipelineParameterList": _values(wanted.parameters, workload, uploaded)
            },
        }
        request: dict[str, Json] = {
            "Description": "made by stoker",
            "State": "ENABLED",
            "FlexibleTimeWindow": {"Mode": "OFF"},
            **{name: value for name, value in mapping(there).items() if name not in _TOLD_ALONE},
            "Name": wanted.name,
            "GroupName": SCHEDULE_GROUP,
            "ScheduleExpression": wanted.expression,
            "ScheduleExpressionTimezone": wanted.time_zone,
            "Target": target,
        }
        self._aws.call(
            "scheduler", "CreateSchedule" if there is None else "UpdateSchedule", **request
        )
        return wanted.made(there, is_on=request["State"] == "ENABLED")

    def delete_schedule(self, workload: Workload, name: str) -> None:
        if self._schedule(name, pipeline=workload.name) is None:
            raise UsageError(f"there is no schedule {name}")
        self._aws.call("scheduler", "DeleteSchedule", Name=name, GroupName=SCHEDULE_GROUP)

    def _schedule(self, name: str, *, pipeline: str) -> Document | None:
        """Returns a schedule by its name; raises UsageError if it starts something else."""
        there = self._aws.find("scheduler", "GetSchedule", Name=name, GroupName=SCHEDULE_GROUP)
        starts = str(item_at(there, "Target", "Arn"))
        if there and not starts.endswith(f":pipeline/{pipeline}"):
            what = f"schedule {name} exists and starts something else"
            raise UsageError(what, where=starts, fix="choose another --name")
        return there

    def status(self, run: str) -> RunState:
        """Returns a run by its ARN or PIPELINE/ID, or the newest of a pipeline."""
        return self._state(self._arn(run))

    def _arn(self, run: str) -> str:
        """Returns a run's ARN; raises UsageError if its pipeline has not run."""
        path = run.rpartition(":pipeline/")[2].replace("/execution/", "/")
        name, _, id = path.partition("/")
        newest = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
        listed = self._aws.find("sagemaker", "ListPipelineExecutions", PipelineName=name, **newest)
        arns = [text(each, "PipelineExecutionArn") for each in mappings(listed, _SUMMARIES)]
        if not arns:
            raise UsageError(
                f"no run of a pipeline {name} found",
                where=f"region {self._aws.region}",
                fix="RUN is PIPELINE/EXECUTION_ID, a pipeline, or an ARN of these",
            )
        return f"{arns[0].rpartition('/')[0]}/{id}" if id else arns[0]

    def _state(self, arn: str) -> RunState:
        asked = {"PipelineExecutionArn": arn}
        answer = self._aws.call("sagemaker", "DescribePipelineExecution", **asked)
        asked |= {"items": "PipelineExecutionSteps", "SortOrder": "Ascending"}
        steps = [*self._aws.pages("sagemaker", "ListPipelineExecutionSteps", **asked)]
        status = text(answer, "PipelineExecutionStatus")
        has_ended = status not in ("Executing", "Stopping")
        failed = [step for step in steps if text(step, "StepStatus") == "Failed"]
        # A gate's, else the training's, which both say more than the service's.
        codes = {_code_of(step) for step in failed} & {GateError.exit_code, WorkloadError.exit_code}
        code = 0 if status == "Succeeded" else min(codes, default=PlatformError.exit_code)
        reasons = [f"{text(step, 'StepName')}: {_reason_of(step)}" for step in failed]
        return RunState(
            run=arn.partition(":pipeline/")[2].replace("/execution", ""),
            status=status,
            has_ended=has_ended,
            exit_code=code if has_ended else None,
            reason=text(answer, "FailureReason") or "".join(reasons[:1]),
            steps=tuple(map(_run_step, steps)),
            note="page: SageMaker Studio, Pipelines",
        )

    def stop(self, run: str) -> RunState:
        try:
            arn = self._arn(run)
            if not self._state(arn).has_ended:
                self._aws.call("sagemaker", "StopPipelineExecution", PipelineExecutionArn=arn)
            return self._await_end(lambda: self._stopped(arn), seconds=self.stop_seconds)
        except ServiceError as err:
            err.fix += f"; it may still run, and is billed: stoker stop sagemaker {run}"
            raise

    def _stopped(self, arn: str) -> RunState:
        """Returns a run that was asked to stop; it has ended when its jobs have, too."""
        state = self._state(arn)
        if not state.has_ended:
            return state
        # Only after the run: a step that is stopped stops its job, unless it is killed. The names
        # of a run's jobs, of all attempts, contain its id.
        asked = {"items": "TrainingJobSummaries", "NameContains": arn.rpartition("/")[2]}
        names = []
        for job in self._aws.pages("sagemaker", "ListTrainingJobs", **asked):
            name = text(job, "TrainingJobName")
            status = text(job, "TrainingJobStatus")
            if status == "InProgress":
                stop_job(self._aws, name)
            if status in ("InProgress", "Stopping"):
                names.append(name)
        note = f"{', '.join(names)} has not ended" if names else state.note
        return dataclasses.replace(state, has_ended=not names, note=note)

    def _uploaded(self, workload: Workload) -> Document:
        described = self._find(workload.name)
        if described is None:
            raise self._not_uploaded(workload.name)
        return described

    def _find(self, name: str) -> dict[str, Json] | None:
        return self._aws.find("sagemaker", "DescribePipeline", PipelineName=name)


def _values(parameters: Sequence[str], workload: Workload, uploaded: Document) -> list[Json]:
    """Returns the values of NAME=VALUE texts as the service takes them, all as texts."""
    definition: Json = json.loads(str(uploaded["PipelineDefinition"]))
    declared = mappings(definition, "Parameters")
    types = {text(each, "Name"): text(each, "Type") for each in declared}
    values = typed_values(parameters, workload=workload, types=types)
    profile = str(values.get("reuse_profile") or "s3://")
    if not profile.startswith("s3://"):
        what = f"reuse_profile={profile}: expected the address of a folder with profile.json"
        raise UsageError(what, where="--param reuse_profile", fix="s3://BUCKET/FOLDER")
    return [{"Name": name, "Value": spelt(value)} for name, value in values.items()]


def _code_of(step: Document) -> int:
    """Returns the exit code that a failed step tells: 3 a gate, 6 the training, else 4."""
    reason = _reason_of(step)
    if item_at(step, "Metadata", "Fail"):
        # A Fail step is where a gate's condition leads, also after a training that crashed: only
        # the words tell the two apart.
        kinds = {"the training failed": WorkloadError, "the training was stopped": PlatformError}
        return next((k.exit_code for w, k in kinds.items() if w in reason), GateError.exit_code)
    match = _EXIT_CODE.search(reason)
    return int(match[1]) if match else PlatformError.exit_code


def _reason_of(step: Document) -> str:
    return text(step, "FailureReason") or text(step, "Metadata", "Fail", "ErrorMessage")


def _run_step(step: Document) -> RunStep:
    """Returns a step as `stoker status` shows it; `step` is ListPipelineExecutionSteps' own."""
    status = text(step, "StepStatus")
    seconds = None
    if step.get("StartTime") and step.get("EndTime"):
        began, ended = (
            datetime.fromisoformat(text(step, f"{key}Time")) for key in ("Start", "End")
        )
        seconds = (ended - began).total_seconds()
    reason = _reason_of(step) if status == "Failed" else ""
    return RunStep(name=text(step, "StepName"), status=status, reason=reason, seconds=seconds)
