"""Steps of stoker for pipelines on SageMaker.

    from stoker.sagemaker import INPUT, OUTPUT, Pipeline, PipelineRun
    from stoker.workload_file import read_workload

    run = PipelineRun.of(read_workload("configs/mnist-sagemaker.yaml"))
    prepare = run.step(
        "Prepare",
        f"python /opt/prepare.py {INPUT}/raw {OUTPUT}/data",
        inputs={"raw": "s3://bucket/raw/"},
        outputs=["data"],
    )
    Pipeline(name="mine", parameters=[*run.parameters.values()], steps=[prepare])

Needs the extra `sagemaker`. A step is a step of the SDK, with `properties` and `depends_on`; its
`outputs` map names to addresses. The graph of stoker's own steps is pipelines/sagemaker.py.

The SDK's step classes need a session, look up roles and upload code while a pipeline is built. A
`RequestStep` contains the literal API request instead, so that a definition is the same text at any
time and place. Values that differ from run to run are pipeline variables.
"""

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Protocol, cast

import msgspec

from stoker.errors import MissingExtraError, UsageError
from stoker.evaluate import MODEL_METADATA
from stoker.parameters import Parameter, main_channel, parameters_of
from stoker.pipelines.base import (
    Compiled,
    Inputs,
    checked,
    pack_inputs,
    project_pipeline,
)
from stoker.platforms.aws import tag_list
from stoker.platforms.base import MAX_PLANS
from stoker.platforms.sagemaker.job import MARGIN_SECONDS
from stoker.platforms.sagemaker.request import file_system, sagemaker_of, without_none
from stoker.records import Json, SageMakerSettings, Workload, nearest
from stoker.records.platforms import NAME_END
from stoker.units import duration

# The SDK makes AWS clients while it is imported. Without a region that is an error, without keys it
# searches for them on the network. These are used during the import only, and sign no request.
_OFFLINE = {
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_ACCESS_KEY_ID": "offline",
    "AWS_SECRET_ACCESS_KEY": "offline",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    "AWS_EC2_METADATA_DISABLED": "true",
    "SAGEMAKER_VALIDATE_ROLE": "false",
    "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": os.devnull,
    "SAGEMAKER_USER_CONFIG_OVERRIDE": os.devnull,
}
_NOT_OFFLINE = ("AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN")
_SHAPES = {
    "Processing": "DescribeProcessingJobResponse",
    "RegisterModel": "DescribeModelPackageOutput",
}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Hides account and configuration from the SDK, which would look for them on the network."""
    before = dict(os.environ)
    session = getattr(sys.modules.get("boto3"), "DEFAULT_SESSION", None)
    handlers = list(logging.getLogger().handlers)
    is_collecting = gc.isenabled()
    # Thousands of classes, none of them garbage: 1.6 CPU-seconds, with collections 2.3.
    gc.disable()
    os.environ.update(_OFFLINE)
    for name in _NOT_OFFLINE:
        os.environ.pop(name, None)
    try:
        with warnings.catch_warnings():
            # The SDK imports modules that it calls deprecated.
            warnings.simplefilter("ignore")
            yield
    except ModuleNotFoundError as err:
        if (err.name or "").partition(".")[0] not in ("sagemaker", "boto3", "botocore"):
            raise
        raise MissingExtraError.of(err, extra="sagemaker") from None
    finally:
        if is_collecting:
            gc.enable()
        for name in _OFFLINE:
            os.environ.pop(name, None)
        os.environ.update(before)
        # The SDK leaves a session with the keys above, and a log handler.
        if "boto3" in sys.modules:
            setattr(sys.modules["boto3"], "DEFAULT_SESSION", session)  # noqa: B010
        logging.getLogger().handlers[:] = handlers


with offline():
    from sagemaker.core.workflow.conditions import ConditionEquals
    from sagemaker.core.workflow.execution_variables import ExecutionVariables
    from sagemaker.core.workflow.functions import Join, JsonGet
    from sagemaker.core.workflow.parameters import (
        ParameterBoolean,
        ParameterFloat,
        ParameterInteger,
        ParameterString,
    )
    from sagemaker.core.workflow.properties import Properties, PropertyFile
    from sagemaker.mlops.workflow.condition_step import ConditionStep
    from sagemaker.mlops.workflow.fail_step import FailStep
    from sagemaker.mlops.workflow.pipeline import Pipeline
    from sagemaker.mlops.workflow.retry import (
        SageMakerJobExceptionTypeEnum,
        SageMakerJobStepRetryPolicy,
        StepExceptionTypeEnum,
        StepRetryPolicy,
    )
    from sagemaker.mlops.workflow.step_dependency import StepDependency, TriggerCondition
    from sagemaker.mlops.workflow.steps import (
        ConfigurableRetryStep,
        Step,
        StepTypeEnum,
    )


class PipelineVariable(Protocol):
    """A pipeline variable. It gets its value when a run starts or an earlier step ends."""

    @property
    def expr(self) -> Mapping[str, object]:
        """The variable as it is written in the definition."""


Text = str | PipelineVariable
StepRequest = dict[str, object]

# The run's id, of letters and digits, and its ARN.
EXECUTION_ID: PipelineVariable = ExecutionVariables.PIPELINE_EXECUTION_ID
EXECUTION_ARN: PipelineVariable = ExecutionVariables.PIPELINE_EXECUTION_ARN


class RequestStep(ConfigurableRetryStep):  # type: ignore[misc]
    """A step of a pipeline: the literal request of a job, or of a model's registration.

    Args:
        name: Unique in the pipeline: letters, digits and dashes.
        kind: What the service makes of the request.
        request: As in the API, without a job's name; any value may be a pipeline variable.
        display_name: Name in the console.
        description: One sentence for the console.
        outputs: Names to addresses, for later steps.
        depends_on: Steps, or `StepDependency` for another outcome than success.
        property_files: JSON outputs that conditions and other steps may read.
    """

    def __init__(
        self,
        name: str,
        kind: Literal["Processing", "RegisterModel"],
        request: Mapping[str, object],
        *,
        display_name: str,
        description: str = "",
        outputs: Mapping[str, Text] | None = None,
        depends_on: Sequence[Step | StepDependency | str] = (),
        property_files: Sequence[PropertyFile] = (),
    ) -> None:
        retries = _JOB_POLICIES if kind == "Processing" else [_STEP_POLICY]
        waits = list(depends_on)
        enum = StepTypeEnum(kind)
        super().__init__(name, enum, display_name, description, waits, retries)
        self.outputs: dict[str, Text] = dict(outputs or {})
        self._request = cast(StepRequest, without_none(request))
        self.property_files = list(property_files)
        self._properties = Properties(step_name=name, step=self, shape_name=_SHAPES[kind])

    @property
    def arguments(self) -> StepRequest:
        return self._request

    @property
    def properties(self) -> Properties:
        """Variables for the answer of the Describe call of the job or model package."""
        return self._properties

    def to_request(self) -> StepRequest:
        """Returns the step as it is written in the definition."""
        step: StepRequest = super().to_request()
        if self.property_files:
            step["PropertyFiles"] = [file.expr for file in self.property_files]
        return step


# Retries. A kind of error may be in one policy only.
#   Throttling, or a fault of the service: soon, about as the service's default.
#   A quota that other runs use: for an hour and a half, as their jobs end.
#   A job that broke inside the service, or got no host: minutes apart.
_STEP_POLICY = StepRetryPolicy(
    [StepExceptionTypeEnum.SERVICE_FAULT, StepExceptionTypeEnum.THROTTLING],
    interval_seconds=5,
    backoff_rate=2.0,
    max_attempts=5,
)


_JOB_POLICIES = [
    _STEP_POLICY,
    SageMakerJobStepRetryPolicy(
        exception_types=[SageMakerJobExceptionTypeEnum.RESOURCE_LIMIT],
        interval_seconds=60,
        backoff_rate=1.5,
        expire_after_mins=90,
    ),
    SageMakerJobStepRetryPolicy(
        failure_reason_types=[
            SageMakerJobExceptionTypeEnum.INTERNAL_ERROR,
            SageMakerJobExceptionTypeEnum.CAPACITY_ERROR,
        ],
        interval_seconds=120,
        backoff_rate=2.0,
        max_attempts=3,
    ),
]


def text(*parts: Text | int | float) -> Text:
    """Joins texts and pipeline variables to one value."""
    merged: list[Text] = []
    for part in parts:
        # Flat: AWS does not document a join inside a join.
        for value in part.values if isinstance(part, Join) else [part]:
            word = json.dumps(value) if isinstance(value, int | float) else value
            before = merged[-1] if merged else None
            if isinstance(before, str) and isinstance(word, str):
                merged[-1] = before + word
            else:
                merged.append(word)
    joined: Text = merged[0] if len(merged) == 1 else Join(on="", values=merged)
    return joined


def value_in(step: RequestStep, path: str, *, file: str = "") -> PipelineVariable:
    """Returns a value of a property file, by JSON path; by default of the step's first file.

    Raises:
        ValueError: If the step has no such property file.
    """
    files = [each for each in step.property_files if file in ("", each.name)]
    if not files:
        raise ValueError(f"step {step.name} has no property file that {path} could be in")
    value: PipelineVariable = JsonGet(step_name=step.name, property_file=files[0], json_path=path)
    return value


# Folders of the inputs and outputs in a step's container, and the workload of all steps.
INPUT = "/opt/ml/processing/input"
OUTPUT = "/opt/ml/processing/output"
WORKLOAD = f"{INPUT}/workload/workload.json"
# Enough to pull an image, and to read and write a few files.
_SMALL_STEP_SECONDS = 3600
# The longest processing job; an account's default quota is 5 days.
_MAX_STEP_SECONDS = 9 * 86400
_KINDS = {"integer": (ParameterInteger, int), "number": (ParameterFloat, float)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerPipelineRun:
    """A run of a pipeline: its workload, and the pipeline's parameters.

    Attributes:
        inputs: What the steps read, with the workload as the first one reads it.
        declared: The parameters of a run.
        parameters: Parameters of the pipeline by name, with the workload's values.
        session: Session of the SDK. None: the SDK makes one.
    """

    inputs: Inputs
    declared: tuple[Parameter, ...]
    parameters: Mapping[str, PipelineVariable]
    session: object = None

    @classmethod
    def of(
        cls, workload: Workload, *, folder: Path | None = None, session: object = None
    ) -> "SageMakerPipelineRun":
        """Returns a run for a pipeline of your own.

        Args:
            workload: Needs settings for SageMaker, an image and a cluster.
            folder: Project folder with `sagemaker.source`; default: the current one.
            session: Session of the SDK; default: the SDK makes one.

        Raises:
            UsageError: If the workload lacks what the steps need.
        """
        # Another schedule does not make another pipeline.
        settings = msgspec.structs.replace(sagemaker_of(workload), schedule=None)
        placed = checked(workload, target="sagemaker")
        inputs = pack_inputs(msgspec.structs.replace(placed, sagemaker=settings), folder=folder)
        declared = parameters_of(inputs.workload)
        main = main_channel(workload)
        if main and file_system(workload.channels[main].uri):
            # It has an id and a folder, and no address that one value could replace.
            declared = tuple(each for each in declared if each.name != "input_data")
        variables = {each.name: _variable(each) for each in declared}
        return cls(inputs=inputs, declared=declared, parameters=variables, session=session)

    @property
    def name(self) -> str:
        return self.workload.name

    @property
    def workload(self) -> Workload:
        """The workload, with the address of its code instead of the folder."""
        return self.inputs.workload

    @property
    def workload_uri(self) -> str:
        """Address of the uploaded workload, without the values of a run's parameters."""
        return self.inputs.workload_uri

    @property
    def settings(self) -> SageMakerSettings:
        assert self.workload.sagemaker
        return self.workload.sagemaker

    @property
    def image(self) -> str:
        """Image of the steps: `sagemaker.control.image`, or the training's."""
        assert self.workload.image
        return self.settings.control.image or self.workload.image

    @property
    def job_name(self) -> Text:
        """Name of the training job that is started or adopted."""
        return text(f"{self.name}{NAME_END}", EXECUTION_ID)

    def uri(self, path: str = "") -> Text:
        """Returns an address in the folder of the run, which the execution id names."""
        head = f"{self.settings.output_uri.rstrip('/')}/pipelines/{self.name}/"
        return text(head, EXECUTION_ID, f"/{path}")

    def params(self, **values: Text | int | float) -> list[Text]:
        """Returns `--param=NAME=VALUE` for each parameter; `values` take the place of some.

        Raises:
            UsageError: If a run has no such parameter.
        """
        for name in values:
            if name not in self.parameters:
                raise UsageError(
                    f"a run of {self.name} has no parameter {name}",
                    fix=nearest(name, list(self.parameters)),
                )
        given = {**self.parameters, **values}
        return [text(f"--param={name}=", value) for name, value in given.items()]

    def step(
        self,
        name: str,
        command: str,
        *words: Text,
        inputs: Mapping[str, Text] | None = None,
        outputs: Sequence[str] | Mapping[str, Text] = (),
        values: Mapping[str, str] | None = None,
        depends_on: Sequence[Step | StepDependency | str] = (),
        image: Text | None = None,
        role: str | None = None,
        instance_type: str | None = None,
        follows_job: bool = False,
    ) -> RequestStep:
        """Makes a processing step on a small host, as `sagemaker.control` says.

        Args:
            name: Name of the step.
            command: Program and arguments, divided by blanks.
            words: Further arguments; the service takes 100 in all, of 256 characters each.
            inputs: Name to address; an input lies in `INPUT/NAME`.
            outputs: Names, or name to address; `OUTPUT/NAME` is uploaded while it is written, by
                default to `run.uri(NAME)`.
            values: Name to OUTPUT/PATH of a JSON file that `value_in` may read.
            depends_on: Steps, or `StepDependency` for another outcome than success.
            image: Default: `run.image`.
            role, instance_type: Default: as in `sagemaker.control`.
            follows_job: Whether it starts and follows a job, for as long as that may last.
        """
        settings = self.settings
        control = settings.control
        given = outputs if isinstance(outputs, Mapping) else {}
        addresses = {each: given.get(each) or self.uri(each) for each in outputs}
        request: StepRequest = {
            "AppSpecification": {
                "ImageUri": image or self.image,
                "ContainerEntrypoint": command.split()[:1],
                "ContainerArguments": [*command.split()[1:], *words] or None,
            },
            "Environment": {
                "STOKER_PIPELINE_RUN": self.job_name,
                "STOKER_PIPELINE_EXECUTION": EXECUTION_ARN,
                # A container gets its region, but not in the variable that boto3 reads.
                "AWS_DEFAULT_REGION": settings.region,
            },
            "NetworkConfig": {"EnableNetworkIsolation": False, "VpcConfig": settings.vpc}
            if settings.vpc
            else None,
            "ProcessingInputs": [_input(key, uri) for key, uri in (inputs or {}).items()],
            "ProcessingOutputConfig": {
                "KmsKeyId": settings.output_kms_key,
                "Outputs": [_output(key, uri) for key, uri in addresses.items()],
            },
            "ProcessingResources": {
                "ClusterConfig": {
                    "InstanceCount": 1,
                    "InstanceType": instance_type or control.instance_type,
                    # SageMaker's own default.
                    "VolumeSizeInGB": 30,
                    "VolumeKmsKeyId": settings.volume_kms_key,
                }
            },
            "RoleArn": role or control.role or settings.role,
            "StoppingCondition": {
                "MaxRuntimeInSeconds": _longest(self) if follows_job else _SMALL_STEP_SECONDS
            },
            "Tags": tag_list(settings.tags) or None,
        }
        return RequestStep(
            name,
            "Processing",
            request,
            display_name=name,
            outputs=addresses,
            depends_on=depends_on,
            property_files=[_property_file(*named) for named in (values or {}).items()],
        )

    def register(
        self,
        name: str,
        *,
        model: Text,
        evaluation: RequestStep,
        depends_on: Sequence[Step | StepDependency | str] = (),
    ) -> RequestStep:
        """Makes a step that registers a model in the group of `sagemaker.model`.

        Args:
            name: Name of the step.
            model: Address of an archive, such as `value_in(train, "model_uri")`.
            evaluation: stoker's step that evaluated, of which the model gets metrics and report.
            depends_on: Steps to wait for.
        """
        settings = self.settings.model
        folder = evaluation.outputs["evaluation"]
        judged = {
            "stoker-decision": self.uri("decision/decision.json"),
            "stoker-evaluation": text(folder, "/evaluation.json"),
            "stoker-report": text(folder, "/report.html"),
            **{
                f"stoker-{key.replace('_', '-')}": value_in(evaluation, key, file="Metadata")
                for key in MODEL_METADATA
            },
        }
        quality = text(folder, "/model-quality.json")
        about = f"Trained by the pipeline {self.name} of stoker."
        if not settings.image:
            about += " It names no image to serve it."
        return RequestStep(
            name,
            "RegisterModel",
            {
                "ModelPackageGroupName": settings.group or self.workload.name,
                "ModelPackageDescription": about,
                "ModelApprovalStatus": "PendingManualApproval",
                "InferenceSpecification": {
                    # The user's image, if any: the training's image cannot serve.
                    "Containers": [
                        {
                            "Image": settings.image,
                            "ModelDataUrl": model,
                            "Environment": {"SAGEMAKER_PROGRAM": settings.entry_point}
                            if settings.entry_point
                            else None,
                        }
                    ],
                    "SupportedContentTypes": ["application/json"],
                    "SupportedResponseMIMETypes": ["application/json"],
                },
                "ModelMetrics": {
                    "ModelQuality": {
                        "Statistics": {"ContentType": "application/json", "S3Uri": quality}
                    }
                },
                # The run that made the model.
                "MetadataProperties": {"GeneratedBy": EXECUTION_ARN},
                "CustomerMetadataProperties": judged,
            },
            display_name=name,
            description="Adds the model to its group in the model registry.",
            depends_on=depends_on,
        )


def _variable(parameter: Parameter) -> PipelineVariable:
    kind, of = _KINDS.get(parameter.kind, (ParameterString, str))
    more = {"enum_values": list(parameter.choices) or None} if of is str else {}
    default = parameter.default
    # A boolean is a text with two choices: AWS does not document how it is spelt in a text.
    value = str(default).lower() if isinstance(default, bool) else of(default)
    variable: PipelineVariable = kind(name=parameter.name, default_value=value, **more)
    return variable


def _input(name: str, uri: Text) -> StepRequest:
    place = {"S3Uri": uri, "LocalPath": f"{INPUT}/{name}"}
    as_files = {"S3DataType": "S3Prefix", "S3InputMode": "File"}
    return {"InputName": name, "S3Input": {**place, **as_files}}


def _output(name: str, uri: Text) -> StepRequest:
    place = {"S3Uri": uri, "LocalPath": f"{OUTPUT}/{name}"}
    return {"OutputName": name, "S3Output": {**place, "S3UploadMode": "Continuous"}}


def _property_file(name: str, file: str) -> PropertyFile:
    output, _, path = file.removeprefix(f"{OUTPUT}/").partition("/")
    return PropertyFile(name=name, output_name=output, path=path)


def _longest(run: SageMakerPipelineRun) -> int:
    """Returns how long a step that follows a job may last, and needs to."""
    settings = run.settings
    policy = run.workload.on_no_capacity
    longest = settings.may_last_seconds
    # Each plan is waited for as long.
    num_plans = MAX_PLANS if policy.then == "next_plan" else 1
    needed = longest + num_plans * 60 * policy.wait_minutes + int(MARGIN_SECONDS)
    allowed = settings.control.max_run_seconds or min(needed, _MAX_STEP_SECONDS)
    if allowed < longest:
        raise UsageError(
            f"a step of {duration(allowed)} cannot outlast a training run of up to "
            f"{duration(longest)}",
            where="key sagemaker.max_run_seconds",
            fix="lower it, and continue from checkpoints in the next run; or raise "
            "sagemaker.control.max_run_seconds, up to 9 days, with the account's quota for it",
        )
    return allowed


def compile_pipeline(workload: Workload, *, folder: Path | None = None) -> Compiled:
    """Compiles the workload's pipeline: reproducible, without network.

    `sagemaker.source` also starts from the project's folder, by default the current one.

    Raises:
        UsageError: If the workload lacks something, or the project's files cannot be used.
    """
    here = folder or Path.cwd()
    # The SDK only takes clients from the session, for calls that are not made here.
    clients = SimpleNamespace(client=lambda service: None)
    session = SimpleNamespace(boto_session=clients, local_mode=False)
    run = SageMakerPipelineRun.of(workload, folder=here, session=session)
    return Compiled(
        name=run.name,
        definition=definition_of(project_pipeline("sagemaker", folder=here).build(run)),
        parameters=run.declared,
        uploads=run.inputs.uploads,
    )


def definition_of(pipeline: Pipeline) -> str:
    """Returns a pipeline of the SDK as JSON with sorted keys."""
    with offline():
        document: Json = json.loads(pipeline.definition())
    # The SDK writes null for unused parts, such as MLflow.
    return json.dumps(without_none(document), indent=1, sort_keys=True) + "\n"


# The name is stoker.kubeflow's, too; inside stoker each class name occurs once.
PipelineRun = SageMakerPipelineRun

__all__ = [
    "EXECUTION_ARN",
    "EXECUTION_ID",
    "INPUT",
    "OUTPUT",
    "WORKLOAD",
    "ConditionEquals",
    "ConditionStep",
    "FailStep",
    "ParameterBoolean",
    "ParameterFloat",
    "ParameterInteger",
    "ParameterString",
    "Pipeline",
    "PipelineRun",
    "PipelineVariable",
    "RequestStep",
    "Step",
    "StepDependency",
    "Text",
    "TriggerCondition",
    "text",
    "value_in",
]
