"""Pipelines, runs and schedules of SageMaker, through boto3."""

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence

from stoker.errors import ServiceError, UsageError
from stoker.pipelines.base import (
    Compiled,
    RunState,
    RunStep,
    sagemaker_of,
    schedule_name,
    told_parameters,
    wait_until_stopped,
)
from stoker.pipelines.sagemaker.compile import MAX_ARGUMENT, argument_of
from stoker.pipelines.sagemaker.overlap import ACTIVE, steps_of
from stoker.platforms.aws import Aws
from stoker.platforms.sagemaker.registry import tag_group
from stoker.platforms.sagemaker.submit import find_job, stop_job
from stoker.records import Json, SageMakerSettings, Workload
from stoker.records.base import mapping, mappings

# The scheduler retries a start: a run that is an hour late is better left to the next one.
RETRIES = 3
MAX_AGE_SECONDS = 3600
SCHEDULE_GROUP = "default"
# A container has 120 s to end; then come the upload of its output and the steps after it.
STOP_SECONDS = 900.0
POLL_SECONDS = 5.0
_EXPRESSION = re.compile(r"cron\(\S+( \S+){5}\)|rate\(\d+ [a-z]+\)|at\(\S+\)")
# An ARN of a pipeline, of its run or of a job, or its end alone.
_RUN = re.compile(r"(?:arn:.+:(?:pipeline|training-job)/)?([^/:]+)(?:(?:/execution)?/([^/]+))?")
_JOB = "job "


class SageMakerClient:
    """The verbs of pipelines on one account and region; `run` may be an ARN, with its region."""

    def __init__(
        self, settings: SageMakerSettings | None, *, run: str = "", aws: Aws | None = None
    ) -> None:
        region = run.split(":")[3] if run.startswith("arn:") and run.count(":") > 4 else None
        self._aws = aws or Aws(region=region or (settings.region if settings else None))
        self._settings = settings

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        """Returns the uploaded pipeline, None if there is none, and the compiled one."""
        found, settings = self._find(compiled.name), self._settings
        assert settings
        wanted: dict[str, Json] = {
            "definition": json.loads(compiled.definition),
            "description": compiled.description,
            "role": settings.pipeline_role or settings.role,
            "tags": settings.tags,
        }
        if not found:
            return None, wanted
        tags: dict[str, Json] = {}
        if settings.tags:
            arn = found["PipelineArn"]
            listed = self._aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)
            # Those of others stay.
            tags = {str(t["Key"]): t.get("Value") for t in listed if t.get("Key") in settings.tags}
        return {
            "definition": json.loads(str(found.get("PipelineDefinition"))),
            "description": found.get("PipelineDescription"),
            "role": found.get("RoleArn"),
            "tags": tags,
        }, wanted

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        """Writes the inputs that are missing, and creates or updates the pipeline."""
        settings, aws = self._settings, self._aws
        assert settings
        missing = [uri for uri in sorted(compiled.uploads) if not aws.has_object(uri)]
        # Before the definition: a run that a schedule starts in between finds them.
        for uri in missing:
            aws.write_object(uri, compiled.uploads[uri], kms_key=settings.output_kms_key)
        if settings.tags:
            tag_group(aws, settings.model.group or compiled.name, settings.tags)
        found = self._find(compiled.name)
        tags = [{"Key": key, "Value": value} for key, value in sorted(settings.tags.items())]
        request: dict[str, object] = {
            "PipelineName": compiled.name,
            "PipelineDescription": compiled.description,
            "RoleArn": settings.pipeline_role or settings.role,
            "PipelineDefinition": compiled.definition,
        }
        action, version = "unchanged" if found else "created", ""
        if found is None:
            request |= {"Tags": tags, "ClientRequestToken": secrets.token_hex(16)}
            found = aws.call("sagemaker", "CreatePipeline", **request)
        elif is_changed:
            action, answer = "updated", aws.call("sagemaker", "UpdatePipeline", **request)
            version = str(answer.get("PipelineVersionId") or "")
            if tags:  # UpdatePipeline takes none.
                aws.call("sagemaker", "AddTags", ResourceArn=found["PipelineArn"], Tags=tags)
        id = found["PipelineArn"]
        return {"action": action, "id": id, "version": version, "url": "", "inputs": missing}

    def start(self, workload: Workload, parameters: Sequence[str]) -> RunState:
        """Starts a run; `parameters` are NAME=VALUE."""
        _, values = self._checked(workload, parameters)
        answer = self._aws.call(
            "sagemaker",
            "StartPipelineExecution",
            PipelineName=workload.name,
            PipelineExecutionDisplayName=f"{workload.name}-{time.strftime('%Y%m%d-%H%M%S')}"[:82],
            PipelineParameters=values,
            ClientRequestToken=secrets.token_hex(16),
        )
        id = str(answer["PipelineExecutionArn"]).rpartition("/")[2]
        run = f"{workload.name}/{id}"
        return RunState(run=run, status="Starting", has_ended=False, exit_code=4)

    def schedule(
        self,
        workload: Workload,
        parameters: Sequence[str],
        *,
        expression: str,
        name: str | None,
        time_zone: str,
    ) -> str:
        """Makes or replaces a schedule of EventBridge Scheduler.

        Raises:
            UsageError: If the workload names no role for it, or the name is another schedule's.
        """
        settings, full_name = sagemaker_of(workload), schedule_name(workload, name)
        if not _EXPRESSION.fullmatch(expression):
            raise UsageError(
                f"--cron '{expression}' is not an expression of EventBridge Scheduler",
                fix="'cron(0 6 ? * MON-FRI *)' (minute hour day month weekday year), or "
                "'rate(12 hours)'",
            )
        if settings.schedule_role is None:
            raise UsageError(
                "no role with which the scheduler may start the pipeline",
                where=f"workload {workload.name}, key sagemaker.schedule_role",
                fix="name one; configs/sagemaker/stoker.yaml makes it",
            )
        arn, values = self._checked(workload, parameters)
        place = {"Name": full_name, "GroupName": SCHEDULE_GROUP}
        there: Mapping[str, Json] = {}
        try:
            there = mapping(self._aws.call("scheduler", "GetSchedule", **place), "Target")
        except ServiceError as err:
            if err.kind != "missing":
                raise
        if there.get("Arn", arn) != arn:
            raise UsageError(
                f"schedule {full_name} exists and starts something else",
                where=str(there["Arn"]),
                fix="choose another --name",
            )
        queue = settings.dead_letter_queue
        self._aws.call(
            "scheduler",
            "UpdateSchedule" if there else "CreateSchedule",
            **place,
            Description=f"Starts the pipeline {workload.name}; made by stoker",
            ScheduleExpression=expression,
            ScheduleExpressionTimezone=time_zone,
            State="ENABLED",
            FlexibleTimeWindow={"Mode": "OFF"},
            Target={
                "Arn": arn,
                "RoleArn": settings.schedule_role,
                "SageMakerPipelineParameters": {"PipelineParameterList": values},
                "RetryPolicy": {
                    "MaximumRetryAttempts": RETRIES,
                    "MaximumEventAgeInSeconds": MAX_AGE_SECONDS,
                },
                **({"DeadLetterConfig": {"Arn": queue}} if queue else {}),
            },
            ClientToken=secrets.token_hex(16),
        )
        return full_name

    def status(self, run: str) -> RunState:
        """Returns a run by its ARN or PIPELINE/ID, the newest of a pipeline, or a training job."""
        named = _RUN.fullmatch(run)
        name, id = named.groups() if named else (run, None)
        found = self._find(name) if ":training-job/" not in run else None
        if found is None:
            if (job := find_job(self._aws, name)) is not None and not id:
                status = str(job.get("TrainingJobStatus"))
                return RunState(
                    run=name,
                    status=status,
                    has_ended=status not in ACTIVE,
                    exit_code=0 if status == "Completed" else 4,
                    reason=str(job.get("FailureReason") or ""),
                )
            raise UsageError(
                f"there is no pipeline and no training job {name}",
                where=f"region {self._aws.region}",
                fix="RUN is PIPELINE/EXECUTION_ID, a pipeline, a training job, or an ARN of these",
            )
        if id is None:
            asked = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
            listed = self._aws.call(
                "sagemaker", "ListPipelineExecutions", PipelineName=name, **asked
            )
            newest = mappings(listed, "PipelineExecutionSummaries")
            if not newest:
                raise UsageError(f"pipeline {name} has not run", fix="stoker start sagemaker ...")
            id = str(newest[0].get("PipelineExecutionArn")).rpartition("/")[2]
        arn = f"{found['PipelineArn']}/execution/{id}"
        answer = self._aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=arn)
        state = str(answer.get("PipelineExecutionStatus"))
        steps = steps_of(self._aws, arn)
        # A Fail step is what a gate's condition leads to; 3 is stoker's exit code of a gate.
        failed = [step for step in steps if step.get("StepStatus") == "Failed"]
        has_gate = any(
            mapping(step, "Metadata").get("Fail")
            or re.search(r"(?i)exit code:? 3\b", str(step.get("FailureReason")))
            for step in failed
        )
        shown = [
            RunStep(
                name=str(step.get("StepName")),
                status=str(step.get("StepStatus")),
                reason=str(step.get("FailureReason") or ""),
            )
            for step in steps
        ]
        # The names of a run's jobs, of all attempts, contain its id.
        jobs = self._aws.pages(
            "sagemaker", "ListTrainingJobs", items="TrainingJobSummaries", NameContains=id
        )
        shown += [
            RunStep(name=f"{_JOB}{j['TrainingJobName']}", status=str(j.get("TrainingJobStatus")))
            for j in jobs
        ]
        return RunState(
            run=f"{name}/{id}",
            status=state,
            has_ended=state not in ACTIVE,
            exit_code=0 if state == "Succeeded" else 3 if has_gate else 4,
            reason=str(answer.get("FailureReason") or ""),
            steps=tuple(shown),
            note="page: SageMaker Studio, Pipelines",
        )

    def stop(self, run: str) -> RunState:
        """Stops a run and the jobs of its steps, or a job; waits until they have ended."""
        state = self.status(run)
        name, slash, id = state.run.partition("/")
        if not state.has_ended and not slash:
            stop_job(self._aws, name)
        elif not state.has_ended:
            arn = f"{(self._find(name) or {})['PipelineArn']}/execution/{id}"
            self._aws.call(
                "sagemaker",
                "StopPipelineExecution",
                PipelineExecutionArn=arn,
                ClientRequestToken=secrets.token_hex(16),
            )

        def look() -> tuple[RunState, str]:
            found = self.status(state.run)
            left = [s for s in found.steps if s.name.startswith(_JOB) and s.status in ACTIVE]
            # Only after the run: a step that is stopped stops its job, unless it is killed.
            for step in left if found.has_ended else ():
                if step.status != "Stopping":
                    stop_job(self._aws, step.name.removeprefix(_JOB))
            return found, ", ".join([*([] if found.has_ended else [name]), *(s.name for s in left)])

        return wait_until_stopped(
            state.run,
            look,
            target="sagemaker",
            seconds=STOP_SECONDS,
            clock=self._aws.clock,
            pause=lambda: self._aws.sleep(POLL_SECONDS),
        )

    def _checked(
        self, workload: Workload, texts: Sequence[str]
    ) -> tuple[str, list[dict[str, str]]]:
        """Returns the pipeline's ARN, and parameters as the service takes them."""
        found = self._find(workload.name)
        if found is None:
            raise UsageError(
                f"pipeline {workload.name} is not uploaded",
                where=f"region {self._aws.region}",
                fix="stoker upload sagemaker WORKLOAD",
            )
        definition: Json = json.loads(str(found.get("PipelineDefinition")))
        there = [str(item.get("Name")) for item in mappings(definition, "Parameters")]
        values = {}
        told = told_parameters(texts, workload=workload, there=there, is_camel=True)
        for name, value, own in told:
            # The steps read FOLDER/profile.json.
            values[name] = value.rstrip("/") if name == "ReuseProfile" else value
            if own and len(word := argument_of(own, value)) > MAX_ARGUMENT:
                at_most = MAX_ARGUMENT - len(word) + len(value)
                raise UsageError(
                    f"--param {name}: its value has {len(value)} characters, at most {at_most}",
                    fix="set a longer value in the workload and upload that",
                )
        return str(found["PipelineArn"]), [{"Name": n, "Value": v} for n, v in values.items()]

    def _find(self, name: str) -> dict[str, Json] | None:
        try:
            return self._aws.call("sagemaker", "DescribePipeline", PipelineName=name)
        except ServiceError as err:
            if err.kind == "missing":
                return None
            raise
