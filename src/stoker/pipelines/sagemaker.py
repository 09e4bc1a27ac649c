"""Pipelines on SageMaker: what one is built from, and its runs and schedules, through boto3."""

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from stoker.catalog import with_short_prices
from stoker.errors import GateError, PlatformError, ServiceError, UsageError, WorkloadError
from stoker.parameters import Kind, Parameter, main_channel, parameters_of, run_values
from stoker.pipelines.base import (
    Compiled,
    Inputs,
    PipelineClient,
    RunState,
    RunStep,
    Schedule,
    checked,
    pack_inputs,
    sagemaker_of,
)
from stoker.platforms.aws import Aws, tag_list
from stoker.platforms.sagemaker.request import file_system
from stoker.platforms.sagemaker.submit import stop_job
from stoker.records import Json, SageMakerSettings, Workload
from stoker.records.base import Document, item_at, mapping, mappings, text
from stoker.records.outcome import exit_code_of_words

# An ARN of a pipeline or of its run, or its end alone.
_RUN = re.compile(r"(?:arn:.+:pipeline/)?([^/:]+)(?:(?:/execution)?/([^/]+))?")
_EXIT_CODE = re.compile(r"(?i)exit code:? (\d+)\b")
_CODES = (GateError.exit_code, WorkloadError.exit_code)
_KINDS: Mapping[str, Kind] = {
    "String": "string",
    "Integer": "integer",
    "Float": "number",
    "Boolean": "boolean",
}
SCHEDULE_GROUP = "default"
# A start that is an hour late is left to the next one.
RETRY_POLICY = {"MaximumRetryAttempts": 3, "MaximumEventAgeInSeconds": 3600}
# What GetSchedule tells, and UpdateSchedule does not take.
_TOLD_ALONE = ("Arn", "CreationDate", "LastModificationDate")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What a pipeline is built from: the inputs of its steps, and the parameters of a run."""

    inputs: Inputs
    parameters: tuple[Parameter, ...]

    @property
    def workload(self) -> Workload:
        """Workload as the first step reads it."""
        return self.inputs.workload


def pipeline_request(workload: Workload, *, folder: Path | None) -> PipelineRequest:
    """Returns what a pipeline of `workload` is built from; raises UsageError for wrong ones."""
    # Another schedule does not make another pipeline.
    settings = msgspec.structs.replace(sagemaker_of(workload), schedule=None)
    placed = checked(with_short_prices(workload), target="sagemaker")
    inputs = pack_inputs(msgspec.structs.replace(placed, sagemaker=settings), folder=folder)
    parameters = parameters_of(inputs.workload)
    main = main_channel(workload)
    if main and file_system(workload.channels[main].uri):
        # It has an id and a folder, and no address that one value could replace.
        parameters = tuple(each for each in parameters if each.name != "input_data")
    return PipelineRequest(inputs=inputs, parameters=parameters)


def upload_inputs(
    uploads: Mapping[str, bytes], settings: SageMakerSettings, *, aws: Aws
) -> list[str]:
    """Writes what the steps read, unless it is there; returns what was missing."""
    missing = [uri for uri in sorted(uploads) if not aws.has_object(uri)]
    for uri in missing:
        aws.write_object(uri, uploads[uri], kms_key=settings.output_kms_key)
    return missing


class SageMakerClient(PipelineClient):
    """The verbs of pipelines on one account and region; `run` may be an ARN, with its region."""

    target = "sagemaker"
    # A container has 120 s to end; then come the upload of its output and the steps after it.
    stop_seconds = 900.0

    def __init__(
        self, settings: SageMakerSettings | None, *, run: str = "", aws: Aws | None = None
    ) -> None:
        region = settings.region if settings else None
        # An ARN names its own region.
        if run.startswith("arn:") and run.count(":") > 4:
            region = run.split(":")[3] or region
        self._aws = aws or Aws(region=region)
        self._settings = settings
        self.clock = self._aws.clock
        self.sleep = self._aws.sleep

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        described = self._find(compiled.name)
        wanted = {**self._request(compiled), "PipelineDefinition": json.loads(compiled.definition)}
        if not described:
            return None, wanted
        there = {key: described.get(key) for key in wanted}
        there["PipelineDefinition"] = json.loads(str(described["PipelineDefinition"]))
        return there, wanted

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        settings = self._settings
        aws = self._aws
        request = self._request(compiled)
        assert settings
        # Before the definition: a run that a schedule starts in between finds them.
        missing = upload_inputs(compiled.uploads, settings, aws=aws)
        pipeline = self._find(compiled.name)
        action = "unchanged"
        version = ""
        tags = tag_list(settings.tags)
        if pipeline is None:
            action = "created"
            request |= {"Tags": tags, "ClientRequestToken": secrets.token_hex(16)}
            pipeline = aws.call("sagemaker", "CreatePipeline", **request)
        elif is_changed:
            action = "updated"
            version = text(aws.call("sagemaker", "UpdatePipeline", **request), "PipelineVersionId")
        if tags and action != "created":
            aws.call("sagemaker", "AddTags", ResourceArn=pipeline["PipelineArn"], Tags=tags)
        return {
            "action": action,
            "id": pipeline["PipelineArn"],
            "version": version,
            "url": "",
            "inputs": [*missing],
        }

    def _request(self, compiled: Compiled) -> dict[str, Json]:
        assert self._settings
        return {
            "PipelineName": compiled.name,
            "PipelineDescription": compiled.description,
            "RoleArn": self._settings.control.role or self._settings.role,
            "PipelineDefinition": compiled.definition,
        }

    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        name = workload.name
        uploaded = self._uploaded(workload)
        answer = self._aws.call(
            "sagemaker",
            "StartPipelineExecution",
            PipelineName=name,
            PipelineExecutionDisplayName=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"[:82],
            PipelineParameters=_values(parameters, workload, uploaded),
            ClientRequestToken=secrets.token_hex(16),
        )
        run = f"{name}/{str(answer['PipelineExecutionArn']).rpartition('/')[2]}"
        return RunState(run=run, status="Starting", has_ended=False, exit_code=None)

    def put_schedule(self, workload: Workload, wanted: Schedule) -> dict[str, Json]:
        assert self._settings
        uploaded = self._uploaded(workload)
        there = self._schedule(wanted.name, pipeline=workload.name)
        # UpdateSchedule resets each field that is not sent, so what is not stoker's is sent back.
        target: dict[str, Json] = {
            "RetryPolicy": RETRY_POLICY,
            **mapping(there, "Target"),
            "Arn": uploaded["PipelineArn"],
            "RoleArn": self._settings.control.role or self._settings.role,
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
            "ScheduleExpression": wanted.cron,
            "ScheduleExpressionTimezone": wanted.time_zone,
            "Target": target,
            "ClientToken": secrets.token_hex(16),
        }
        self._aws.call(
            "scheduler", "CreateSchedule" if there is None else "UpdateSchedule", **request
        )
        return wanted.made(is_new=there is None, is_on=request["State"] == "ENABLED")

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
        named = _RUN.fullmatch(run)
        name, id = named.groups() if named else (run, None)
        pipeline = self._find(name)
        if pipeline is None:
            raise UsageError(
                f"no pipeline {name} found",
                where=f"region {self._aws.region}",
                fix="RUN is PIPELINE/EXECUTION_ID, a pipeline, or an ARN of these",
            )
        if id is None:
            newest = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
            listed = self._aws.call(
                "sagemaker", "ListPipelineExecutions", PipelineName=name, **newest
            )
            runs = mappings(listed, "PipelineExecutionSummaries")
            if not runs:
                raise UsageError(f"pipeline {name} has not run", fix="stoker start sagemaker ...")
            id = text(runs[0], "PipelineExecutionArn").rpartition("/")[2]
        arn = f"{pipeline['PipelineArn']}/execution/{id}"
        answer = self._aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=arn)
        asked = {"PipelineExecutionArn": arn, "SortOrder": "Ascending"}
        key = "PipelineExecutionSteps"
        steps = [*self._aws.pages("sagemaker", "ListPipelineExecutionSteps", items=key, **asked)]
        status = text(answer, "PipelineExecutionStatus")
        has_ended = status not in ("Executing", "Stopping")
        failed = [step for step in steps if text(step, "StepStatus") == "Failed"]
        code = 0
        if status != "Succeeded":
            codes = {_code_of(step) for step in failed}
            code = next((code for code in _CODES if code in codes), PlatformError.exit_code)
        reasons = [f"{text(step, 'StepName')}: {_reason_of(step)}" for step in failed]
        return RunState(
            run=f"{name}/{id}",
            status=status,
            has_ended=has_ended,
            exit_code=code if has_ended else None,
            reason=text(answer, "FailureReason") or "".join(reasons[:1]),
            steps=tuple(map(_run_step, steps)),
            note="page: SageMaker Studio, Pipelines",
        )

    def stop(self, run: str) -> RunState:
        try:
            state = self.status(run)
            name, _, id = state.run.partition("/")
            if not state.has_ended:
                pipeline = self._find(name) or {}
                self._aws.call(
                    "sagemaker",
                    "StopPipelineExecution",
                    PipelineExecutionArn=f"{pipeline['PipelineArn']}/execution/{id}",
                    ClientRequestToken=secrets.token_hex(16),
                )
            return self._await_end(lambda: self._aws.repeated(lambda: self._stopped(state.run)))
        except ServiceError as err:
            err.fix += f"; it may still run, and is billed: stoker stop sagemaker {run}"
            raise

    def _stopped(self, run: str) -> RunState:
        """Returns a run that was asked to stop; it has ended when its jobs have, too."""
        state = self.status(run)
        if not state.has_ended:
            return state
        # Only after the run: a step that is stopped stops its job, unless it is killed. The names
        # of a run's jobs, of all attempts, contain its id.
        asked = {"items": "TrainingJobSummaries", "NameContains": run.rpartition("/")[2]}
        names = []
        for job in self._aws.pages("sagemaker", "ListTrainingJobs", **asked):
            if job["TrainingJobStatus"] in ("InProgress", "Stopping"):
                names.append(str(job["TrainingJobName"]))
            if job["TrainingJobStatus"] == "InProgress":
                stop_job(self._aws, names[-1])
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
    declared = {
        text(item, "Name"): _KINDS.get(text(item, "Type"), "string")
        for item in mappings(definition, "Parameters")
    }
    values = run_values(parameters, workload=workload, declared=declared)
    profile = str(values.get("reuse_profile") or "s3://")
    if not profile.startswith("s3://"):
        what = f"reuse_profile={profile}: expected the address of a folder with profile.json"
        raise UsageError(what, where="--param reuse_profile", fix="s3://BUCKET/FOLDER")
    listed: list[Json] = []
    for name, value in values.items():
        # As JSON spells it: true, not True.
        told = value if isinstance(value, str) else json.dumps(value)
        listed.append({"Name": name, "Value": told})
    return listed


def _code_of(step: Document) -> int:
    """Returns the exit code that a failed step tells: 3 a gate, 6 the training, else 4."""
    reason = _reason_of(step)
    if item_at(step, "Metadata", "Fail"):
        # A Fail step is where a gate's condition leads, also after a training that crashed: only
        # the words tell the two apart.
        return exit_code_of_words(reason, default=GateError.exit_code)
    match = _EXIT_CODE.search(reason)
    return int(match[1]) if match else PlatformError.exit_code


def _reason_of(step: Document) -> str:
    return text(step, "FailureReason") or text(step, "Metadata", "Fail", "ErrorMessage")


def _run_step(step: Document) -> RunStep:
    """Returns a step as `stoker status` shows it; `step` is ListPipelineExecutionSteps' own."""
    status = text(step, "StepStatus")
    times = [text(step, key) for key in ("StartTime", "EndTime")]
    seconds = None
    if all(times):
        began, ended = (datetime.fromisoformat(time) for time in times)
        seconds = (ended - began).total_seconds()
    return RunStep(
        name=text(step, "StepName"),
        status=status,
        reason=_reason_of(step) if status == "Failed" else "",
        seconds=seconds,
    )
