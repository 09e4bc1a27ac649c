"""Pipelines, runs and schedules of SageMaker, through boto3."""

import dataclasses
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial

from stoker.errors import ServiceError, UsageError
from stoker.parameters import Kind
from stoker.pipelines.base import Compiled, PipelineClient, RunState, RunStep, log_words
from stoker.pipelines.changes import PipelineVersion
from stoker.pipelines.run_parameters import told_parameters
from stoker.pipelines.sagemaker.compile import MAX_ARGUMENT, argument_of
from stoker.pipelines.sagemaker.expiry import expiry_warnings
from stoker.pipelines.sagemaker.overlap import ACTIVE, steps_of
from stoker.pipelines.sagemaker.queued import is_service_job, queued_state
from stoker.pipelines.sagemaker.run_steps import exit_code_of, run_step, step_names, with_reason
from stoker.pipelines.sagemaker.schedule import (
    SCHEDULE_GROUP,
    as_sent,
    declared_in,
    facts_of_settings,
    listed_schedules,
    read_schedule,
    schedule_request,
)
from stoker.pipelines.sagemaker.versions import SageMakerVersions, compared_versions
from stoker.pipelines.schedules import ListedSchedule, Schedule
from stoker.pipelines.versions import UploadedVersion
from stoker.platforms.aws import Aws, tag_list
from stoker.platforms.sagemaker.batch_queue import terminate
from stoker.platforms.sagemaker.job import STOP_SECONDS
from stoker.platforms.sagemaker.places import check_caller
from stoker.platforms.sagemaker.registry import tag_group
from stoker.platforms.sagemaker.submit import find_job, stop_job
from stoker.records import Json, SageMakerSettings, Workload
from stoker.records.base import Document, mapping, mappings, text

# An ARN of a pipeline, of its run or of a job, or its end alone.
_RUN = re.compile(r"(?:arn:.+:(?:pipeline|training-job)/)?([^/:]+)(?:(?:/execution)?/([^/]+))?")
_JOB = "job "


class SageMakerClient(PipelineClient):
    """The verbs of pipelines on one account and region; `run` may be an ARN, with its region."""

    target = "sagemaker"
    # A container has 120 s to end; then come the upload of its output and the steps after it.
    stop_seconds = 900.0

    def __init__(
        self, settings: SageMakerSettings | None, *, run: str = "", aws: Aws | None = None
    ) -> None:
        region = None
        if settings:
            region = settings.region
        # An ARN names its own region.
        if run.startswith("arn:") and run.count(":") > 4:
            region = run.split(":")[3] or region
        self._aws = aws or Aws(region=region)
        self._settings = settings
        self.clock = self._aws.clock
        self.sleep = self._aws.sleep

    def check_caller(self) -> None:
        """Raises UsageError if the login is not in the account of the workload's roles."""
        if self._settings:
            check_caller(self._aws.caller(), self._settings)

    def compared(self, compiled: Compiled) -> tuple[Json, Json]:
        """Returns the uploaded pipeline, None if there is none, and the compiled one."""
        described = self._find(compiled.name)
        wanted = self._request(compiled)
        wanted["PipelineDefinition"] = json.loads(compiled.definition)
        if not described:
            return None, wanted
        there = {key: described.get(key) for key in wanted}
        there["PipelineDefinition"] = json.loads(str(described["PipelineDefinition"]))
        arn = described["PipelineArn"]
        ours = mappings(wanted, "Tags")
        there["Tags"] = []
        if ours:
            listed = [*self._aws.pages("sagemaker", "ListTags", items="Tags", ResourceArn=arn)]
            # Other people's tags stay.
            there["Tags"] = [tag for tag in ours if tag in listed]
        return there, wanted

    def missing_inputs(self, compiled: Compiled) -> list[str]:
        """Returns the addresses of what the steps read and the bucket does not have."""
        return [uri for uri in sorted(compiled.uploads) if not self._aws.has_object(uri)]

    def versions(
        self, compiled: Compiled, *, deployed: Json, wanted: Json
    ) -> tuple[PipelineVersion, PipelineVersion]:
        """Returns both pipelines with what their steps read; the deployed one's is fetched."""
        return compared_versions(self._aws, compiled, deployed=deployed, wanted=wanted)

    def upload(self, compiled: Compiled, *, is_changed: bool) -> dict[str, Json]:
        """Writes the inputs that are missing, and creates or updates the pipeline."""
        settings = self._settings
        aws = self._aws
        request = self._request(compiled)
        assert settings
        missing = self.missing_inputs(compiled)
        # Before the definition: a run that a schedule starts in between finds them.
        for uri in missing:
            aws.write_object(uri, compiled.uploads[uri], kms_key=settings.output_kms_key)
        if settings.tags:
            tag_group(aws, settings.model.group or compiled.name, settings.tags)
        pipeline = self._find(compiled.name)
        action = "unchanged"
        version = ""
        if pipeline is None:
            action = "created"
            request["ClientRequestToken"] = secrets.token_hex(16)
            pipeline = aws.call("sagemaker", "CreatePipeline", **request)
        elif is_changed:
            # UpdatePipeline takes no tags.
            tags = request.pop("Tags")
            action = "updated"
            answer = aws.call("sagemaker", "UpdatePipeline", **request)
            version = text(answer, "PipelineVersionId")
            if tags:
                aws.call("sagemaker", "AddTags", ResourceArn=pipeline["PipelineArn"], Tags=tags)
        return {
            "action": action,
            "id": pipeline["PipelineArn"],
            "version": version,
            "url": "",
            "inputs": missing,
            "warnings": expiry_warnings(aws, settings.output_uri),
        }

    def _request(self, compiled: Compiled) -> dict[str, Json]:
        assert self._settings
        return {
            "PipelineName": compiled.name,
            "PipelineDescription": compiled.description,
            "RoleArn": self._settings.pipeline_role or self._settings.role,
            "PipelineDefinition": compiled.definition,
            "Tags": tag_list(self._settings.tags),
        }

    def history(self, workload: Workload) -> SageMakerVersions:
        return SageMakerVersions(
            self._aws, pipeline=workload.name, arn=str(self._uploaded(workload)["PipelineArn"])
        )

    def start(
        self,
        workload: Workload,
        parameters: Sequence[str],
        *,
        version: UploadedVersion | None = None,
    ) -> RunState:
        name = workload.name
        chosen = {}
        if version:
            chosen["PipelineVersionId"] = int(version.id)
        given = self.run_values(workload, parameters, declared=self.declared_of(workload, version))
        values = [{"Name": key, "Value": value} for key, value in given.items()]
        answer = self._aws.call(
            "sagemaker",
            "StartPipelineExecution",
            PipelineName=name,
            PipelineExecutionDisplayName=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"[:82],
            PipelineParameters=values,
            ClientRequestToken=secrets.token_hex(16),
            **chosen,
        )
        run = f"{name}/{str(answer['PipelineExecutionArn']).rpartition('/')[2]}"
        return RunState(run=run, status="Starting", has_ended=False, exit_code=None)

    def schedule_facts(self, workload: Workload) -> dict[str, str]:
        assert self._settings
        return facts_of_settings(self._settings, pipeline=workload.name)

    def find_schedule(self, workload: Workload, name: str) -> Schedule | None:
        return read_schedule(self._aws, name, pipeline=workload.name)

    def schedules(self, workload: Workload) -> list[ListedSchedule]:
        return listed_schedules(self._aws, workload.name)

    def put_schedule(self, workload: Workload, wanted: Schedule) -> None:
        place = {"Name": wanted.name, "GroupName": SCHEDULE_GROUP}
        is_new = self._aws.find("scheduler", "GetSchedule", **place) is None
        request = schedule_request(wanted, pipeline=workload.name)
        target = {"Arn": self._uploaded(workload)["PipelineArn"], **mapping(request, "Target")}
        request |= {**place, "Target": target, "ClientToken": secrets.token_hex(16)}
        if is_new:
            self._aws.call("scheduler", "CreateSchedule", **request)
        else:
            self._aws.call("scheduler", "UpdateSchedule", **request)

    def status(self, run: str) -> RunState:
        """Returns a run by its ARN or PIPELINE/ID, the newest of a pipeline, or a job."""
        if is_service_job(run):
            return queued_state(self._aws, run)
        name = run
        id = None
        if named := _RUN.fullmatch(run):
            name, id = named.groups()
        # A job may have the name of a pipeline: an ARN says which of the two is meant.
        pipeline = None
        if ":training-job/" not in run:
            pipeline = self._find(name)
        if pipeline is not None:
            return self._run_state(pipeline, name=name, id=id or self._newest_run(name))
        if id is None and (job := find_job(self._aws, name)):
            return _state(name, job["TrainingJobStatus"], job.get("FailureReason"))
        raise UsageError(
            f"no pipeline or training job {name} found",
            where=f"region {self._aws.region}",
            fix="RUN is PIPELINE/EXECUTION_ID, a pipeline, a training job, or an ARN of these",
        )

    def _newest_run(self, name: str) -> str:
        """Returns the id of a pipeline's newest run."""
        newest_first = {"SortBy": "CreationTime", "SortOrder": "Descending", "MaxResults": 1}
        listed = self._aws.call(
            "sagemaker", "ListPipelineExecutions", PipelineName=name, **newest_first
        )
        runs = mappings(listed, "PipelineExecutionSummaries")
        if not runs:
            raise UsageError(f"pipeline {name} has not run", fix="stoker start sagemaker ...")
        return str(runs[0].get("PipelineExecutionArn")).rpartition("/")[2]

    def _run_state(self, pipeline: Document, *, name: str, id: str) -> RunState:
        """Returns a run: its steps in the order of their start, those that never ran, its jobs.

        Args:
            pipeline: As DescribePipeline answers.
            name: Of the pipeline.
            id: Of the run.
        """
        arn = f"{pipeline['PipelineArn']}/execution/{id}"
        answer = self._aws.call("sagemaker", "DescribePipelineExecution", PipelineExecutionArn=arn)
        status = answer["PipelineExecutionStatus"]
        reason = answer.get("FailureReason")
        listed = steps_of(self._aws, arn)
        state = _state(f"{name}/{id}", status, reason, steps=listed)
        steps = [run_step(step, aws=self._aws, is_over=state.has_ended) for step in listed]
        if state.has_ended:
            begun = {step.name for step in steps}
            defined = step_names(str(pipeline.get("PipelineDefinition")))
            steps += [RunStep(name=each, status="not run") for each in defined if each not in begun]
        # The names of a run's jobs, of all attempts, contain its id.
        asked = {"items": "TrainingJobSummaries", "NameContains": id}
        for job in self._aws.pages("sagemaker", "ListTrainingJobs", **asked):
            job_name = job["TrainingJobName"]
            job_status = str(job["TrainingJobStatus"])
            steps.append(RunStep(name=f"{_JOB}{job_name}", status=job_status))
        failed = next((step for step in steps if step.status == "Failed"), None)
        state = with_reason(state, failed=failed, listed=listed, aws=self._aws)
        note = "page: SageMaker Studio, Pipelines"
        if logs := log_words(steps):
            note = f"{logs}\n{note}"
        return dataclasses.replace(state, steps=tuple(steps), note=note)

    def stop(self, run: str) -> RunState:
        """Stops a run and the jobs of its steps, or a job; waits until they have ended."""
        state = self.status(run)
        ask = partial(self._ask_to_stop, state.run)
        look = partial(self._look_at_stopped, state.run)
        try:
            if not state.has_ended:
                self._aws.repeated(ask, seconds=STOP_SECONDS)
            return self._wait_until_stopped(lambda: self._aws.repeated(look, seconds=STOP_SECONDS))
        except ServiceError as err:
            again = f"it may still run, and is billed: stoker stop sagemaker {state.run}"
            err.fix = "; ".join(filter(None, (err.fix, again)))
            raise

    def _ask_to_stop(self, run: str) -> None:
        """Asks for the end of a pipeline's run, or of a job."""
        name, slash, id = run.partition("/")
        if is_service_job(run):
            terminate(self._aws, run)
        elif not slash:
            stop_job(self._aws, name)
        elif pipeline := self._find(name):
            arn = f"{pipeline['PipelineArn']}/execution/{id}"
            token = secrets.token_hex(16)
            asked = {"PipelineExecutionArn": arn, "ClientRequestToken": token}
            self._aws.call("sagemaker", "StopPipelineExecution", **asked)

    def _look_at_stopped(self, run: str) -> RunState:
        """Returns a run that was asked to stop; it has ended when its jobs have, too."""
        state = self.status(run)
        jobs = [step for step in state.steps if step.name.startswith(_JOB)]
        active = [job for job in jobs if job.status in ACTIVE]
        names = [job.name for job in active]
        if not state.has_ended:
            names.insert(0, run.partition("/")[0])
            return dataclasses.replace(state, note=", ".join(names))
        if not active:
            return state
        # Only after the run: a step that is stopped stops its job, unless it is killed.
        for job in active:
            if job.status != "Stopping":
                stop_job(self._aws, job.name.removeprefix(_JOB))
        return dataclasses.replace(state, has_ended=False, note=", ".join(names))

    def declared(self, workload: Workload, compiled: Compiled | None) -> dict[str, Kind]:
        if compiled:
            return declared_in(compiled.definition)
        return declared_in(str(self._uploaded(workload)["PipelineDefinition"]))

    def run_values(
        self, workload: Workload, parameters: Sequence[str], *, declared: Mapping[str, Kind]
    ) -> dict[str, Json]:
        values: dict[str, Json] = {}
        told = told_parameters(parameters, workload=workload, declared=declared, target=self.target)
        for parameter in told:
            values[parameter.name] = as_sent(parameter)
            if parameter.own is None:
                continue
            # The steps hand it on as one argument of a job, whose length the service limits.
            excess = len(argument_of(parameter.own, parameter.value)) - MAX_ARGUMENT
            if excess > 0:
                length = len(parameter.value)
                raise UsageError(
                    f"--param {parameter.name}: its value has {length} characters, at most "
                    f"{length - excess}",
                    fix="set a longer value in the workload and upload that",
                )
        return values

    def _uploaded(self, workload: Workload) -> dict[str, Json]:
        described = self._find(workload.name)
        if described is None:
            raise self._not_uploaded(workload, where=f"region {self._aws.region}")
        return described

    def _find(self, name: str) -> dict[str, Json] | None:
        return self._aws.find("sagemaker", "DescribePipeline", PipelineName=name)


def _state(run: str, status: Json, reason: Json, *, steps: Sequence[Document] = ()) -> RunState:
    return RunState(
        run=run,
        status=str(status),
        has_ended=status not in ACTIVE,
        exit_code=_exit_code(status, steps),
        reason=str(reason or ""),
    )


def _exit_code(status: Json, steps: Sequence[Document]) -> int | None:
    """Returns the exit code of a run or job of this status; None: it has not ended."""
    if status in ACTIVE:
        return None
    if status in ("Succeeded", "Completed"):
        return 0
    return exit_code_of(steps)
