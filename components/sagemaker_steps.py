"""Steps of a SageMaker pipeline that are built with no network: the one module that knows the SDK.

The SDK's own step classes want a session, look roles up and upload code while a pipeline is built.
A `RequestStep` carries the literal API request instead, so a definition is the same text whenever
and wherever it is made. What makes values different from run to run is a pipeline variable.
"""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Literal, Protocol

from stoker.parameters import Parameter, main_channel
from stoker.records import Workload
from stoker.targets.compiled import PipelineRequest

# The SDK makes AWS clients while it is imported: without a region that is an error, without keys a
# search for them over the network. These are for that moment only; no request is ever signed.
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
_NOT_OFFLINE = ("AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN")


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """While it lasts the SDK finds no account, no configuration and no need to ask for them.

    Afterwards the process is as before: whoever compiles and then uploads has the account back.
    """
    names = (*_OFFLINE, *_NOT_OFFLINE)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    session = getattr(sys.modules.get("boto3"), "DEFAULT_SESSION", None)
    handlers = list(logging.getLogger().handlers)
    os.environ.update(_OFFLINE)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        # The SDK leaves a session with the keys above behind, and a log handler of its own.
        if "boto3" in sys.modules:
            setattr(sys.modules["boto3"], "DEFAULT_SESSION", session)  # noqa: B010
        logging.getLogger().handlers[:] = handlers


with offline():
    from sagemaker.core.workflow.conditions import ConditionEquals
    from sagemaker.core.workflow.execution_variables import ExecutionVariables
    from sagemaker.core.workflow.functions import Join, JsonGet
    from sagemaker.core.workflow.parameters import ParameterInteger, ParameterString
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
        CacheConfig,
        ConfigurableRetryStep,
        Step,
        StepTypeEnum,
    )


class Variable(Protocol):
    """A value that is known when a run starts, or when an earlier step has ended."""

    @property
    def expr(self) -> Mapping[str, object]:
        """As the definition holds it."""
        ...


Text = str | Variable
Request = dict[str, object]

INPUT = "/opt/ml/processing/input"
OUTPUT = "/opt/ml/processing/output"
WORKLOAD = f"{INPUT}/workload/workload.json"

_SHAPES = {
    "Processing": "DescribeProcessingJobResponse",
    "Training": "DescribeTrainingJobResponse",
    "RegisterModel": "DescribeModelPackageOutput",
}
# Of a small step: its job has read and written a few files by then, image pull included.
_SMALL_STEP_SECONDS = 3600


class RequestStep(ConfigurableRetryStep):  # type: ignore[misc]
    """A step that is the literal request of a job, or of a model's registration.

    Args:
        name: Unique in the pipeline: letters, digits and dashes.
        kind: What the request is for; a job's request comes without the job's name.
        request: As in the API; any value may be a pipeline variable.
        depends_on: Steps, or `StepDependency` for another outcome than success.
        property_files: JSON outputs that conditions and other steps may read.
        cache_days: A run of the same request within so many days is re-used; 0: never.
    """

    def __init__(
        self,
        name: str,
        kind: Literal["Processing", "Training", "RegisterModel"],
        request: Mapping[str, object],
        *,
        display_name: str,
        description: str,
        depends_on: Sequence[Step | StepDependency] = (),
        property_files: Sequence[PropertyFile] = (),
        cache_days: int = 0,
    ) -> None:
        super().__init__(
            name,
            StepTypeEnum(kind),
            display_name,
            description,
            list(depends_on),
            _policies() if kind != "RegisterModel" else [_STEP_POLICY],
        )
        self._request = _without_absent(request)
        self._cache_days = cache_days
        self.property_files = list(property_files)
        self._properties = Properties(step_name=name, step=self, shape_name=_SHAPES[kind])

    @property
    def arguments(self) -> Request:
        """The request."""
        return self._request

    @property
    def properties(self) -> Properties:
        """What the job or model package will be, as its Describe call tells: for later steps."""
        return self._properties

    def to_request(self) -> Request:
        """The step as the definition holds it."""
        step: Request = super().to_request()
        if self.property_files:
            step["PropertyFiles"] = [file.expr for file in self.property_files]
        if self._cache_days:
            step.update(CacheConfig(True, f"P{self._cache_days}D").config)
        return step


# Retries. A kind of error may stand in one policy only.
#   Throttled, or the service had a fault: soon again; the service's own default is about this.
#   A quota is in use by another run: jobs end, so it is asked for during an hour and a half.
#   No capacity, or the job broke inside the service: minutes apart; each attempt may be billed.
_STEP_POLICY = StepRetryPolicy(
    [StepExceptionTypeEnum.SERVICE_FAULT, StepExceptionTypeEnum.THROTTLING],
    interval_seconds=5,
    backoff_rate=2.0,
    max_attempts=5,
)


def _policies() -> list[StepRetryPolicy | SageMakerJobStepRetryPolicy]:
    return [
        _STEP_POLICY,
        SageMakerJobStepRetryPolicy(
            exception_types=[SageMakerJobExceptionTypeEnum.RESOURCE_LIMIT],
            interval_seconds=60,
            backoff_rate=1.5,
            expire_after_mins=90,
        ),
        SageMakerJobStepRetryPolicy(
            failure_reason_types=[
                SageMakerJobExceptionTypeEnum.CAPACITY_ERROR,
                SageMakerJobExceptionTypeEnum.INTERNAL_ERROR,
            ],
            interval_seconds=120,
            backoff_rate=2.0,
            max_attempts=3,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What all steps of a run share.

    Attributes:
        workload: With its code's address in place of its folder.
        inputs_uri: Folder with workload.json.
        parameters: The pipeline's, by name in snake case.
        passed: Names of those that the steps hand on to stoker as `--param`.
    """

    workload: Workload
    inputs_uri: str
    parameters: Mapping[str, Variable]
    passed: tuple[str, ...]

    def uri(self, path: str) -> Text:
        """An address in the run's own folder, which its execution id names."""
        head = f"{self.output_uri}/pipelines/{self.workload.name}/"
        return text(head, self.execution_id, f"/{path}")

    @property
    def execution_id(self) -> Variable:
        """Of the run: letters and digits."""
        found: Variable = ExecutionVariables.PIPELINE_EXECUTION_ID
        return found

    @property
    def output_uri(self) -> str:
        """The prefix of all outputs, with no slash at its end."""
        assert self.workload.sagemaker
        return self.workload.sagemaker.output_uri.rstrip("/")

    @property
    def main_channel(self) -> str | None:
        """The channel whose address is the parameter `input_data`."""
        return main_channel(self.workload)

    @property
    def job_name(self) -> Text:
        """Of the training job that a launched train step starts, and adopts if it is there."""
        return text(f"{self.workload.name}-", self.execution_id)

    def arguments(self) -> list[Text]:
        """`--param NAME=VALUE` of all that the run's owner may change."""
        words: list[Text] = []
        for name in self.passed:
            words += ["--param", text(f"{name}=", self.parameters[name])]
        return words


def run_of(request: PipelineRequest) -> Run:
    """The run that a pipeline's request describes, with a pipeline variable a parameter."""
    return Run(
        workload=request.workload,
        inputs_uri=request.inputs_uri,
        parameters={p.name: _variable(p, request.workload) for p in request.parameters},
        passed=request.passed,
    )


def control_step(
    run: Run,
    name: str,
    arguments: Sequence[Text],
    *,
    display_name: str,
    description: str,
    inputs: Mapping[str, Text],
    outputs: Mapping[str, Text],
    depends_on: Sequence[Step | StepDependency] = (),
    property_files: Sequence[PropertyFile] = (),
    max_run_seconds: int = _SMALL_STEP_SECONDS,
    is_isolated: bool = False,
) -> RequestStep:
    """A processing step in the control image that runs `stoker ARGUMENTS`.

    Args:
        run: Of the pipeline.
        name: Of the step.
        arguments: Of stoker; a value of 256 characters at most.
        display_name: In the console.
        description: In the console.
        inputs: Name to address; an input lies in `INPUT/NAME`. The workload is always there.
        outputs: Name to address; what is in `OUTPUT/NAME` goes there while it is written, so that
            it survives a step that fails.
        depends_on: Steps to wait for.
        property_files: JSON outputs that conditions may read.
        max_run_seconds: After it the service stops the step.
        is_isolated: It needs no network, and has none where the workload's job has none.
    """
    settings = run.workload.sagemaker
    assert settings
    control = settings.control
    files = {"workload": f"{run.inputs_uri}/workload.json", **inputs}
    request: Request = {
        "AppSpecification": {
            "ImageUri": control.image or run.parameters["image"],
            "ContainerEntrypoint": ["stoker"],
            "ContainerArguments": list(arguments),
        },
        # SageMaker tells a container its region, but not in the variable that boto3 reads.
        "Environment": {"AWS_DEFAULT_REGION": settings.region} if settings.region else None,
        "NetworkConfig": _network(settings.network_isolation and is_isolated, run.workload),
        "ProcessingInputs": [
            {
                "InputName": input_name,
                "S3Input": {
                    "S3Uri": uri,
                    "LocalPath": f"{INPUT}/{input_name}",
                    "S3DataType": "S3Prefix",
                    "S3InputMode": "File",
                },
            }
            for input_name, uri in files.items()
        ],
        "ProcessingOutputConfig": {
            "KmsKeyId": settings.output_kms_key,
            "Outputs": [
                {
                    "OutputName": output_name,
                    "S3Output": {
                        "S3Uri": uri,
                        "LocalPath": f"{OUTPUT}/{output_name}",
                        "S3UploadMode": "Continuous",
                    },
                }
                for output_name, uri in outputs.items()
            ],
        },
        "ProcessingResources": {
            "ClusterConfig": {
                "InstanceCount": 1,
                "InstanceType": control.instance_type,
                "VolumeSizeInGB": control.volume_gb,
                "VolumeKmsKeyId": settings.volume_kms_key,
            }
        },
        "RoleArn": control.role or settings.role,
        "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
        "Tags": [{"Key": key, "Value": value} for key, value in sorted(settings.tags.items())]
        or None,
    }
    return RequestStep(
        name,
        "Processing",
        request,
        display_name=display_name,
        description=description,
        depends_on=depends_on,
        property_files=property_files,
    )


def text(*parts: Text) -> Text:
    """Texts and pipeline variables in a row, as one value."""
    values: list[Text] = []
    for part in parts:
        # Flat: that the service takes a join inside a join is nowhere said.
        for piece in part.values if isinstance(part, Join) else (part,):
            before = values[-1] if values else None
            if isinstance(piece, str) and isinstance(before, str):
                values[-1] = before + piece
            else:
                values.append(piece)
    joined: Text = values[0] if len(values) == 1 else Join(on="", values=values)
    return joined


def property_file(name: str, *, output: str, path: str) -> PropertyFile:
    """A JSON file `path` in the output named `output`."""
    return PropertyFile(name=name, output_name=output, path=path)


def value_in(step: RequestStep, path: str) -> Variable:
    """A value of the step's first property file, by JSON path, known once the step has ended."""
    found: Variable = JsonGet(
        step_name=step.name, property_file=step.property_files[0], json_path=path
    )
    return found


def definition(name: str, *, parameters: Sequence[Variable], steps: Sequence[Step]) -> str:
    """The pipeline's definition: JSON with sorted keys, the same text for the same pipeline."""
    # All that Pipeline does with a session here is to keep clients for calls that we never make.
    clients = SimpleNamespace(client=lambda service: None)
    session = SimpleNamespace(boto_session=clients, local_mode=False)
    pipeline = Pipeline(
        name=name,
        parameters=list(parameters),
        steps=list(steps),
        sagemaker_session=session,
        pipeline_experiment_config=None,
    )
    with offline():
        document = json.loads(pipeline.definition())
    # The SDK writes nulls for what is not used: MLflow, experiments.
    return json.dumps(_without_absent(document), indent=1, sort_keys=True) + "\n"


def _variable(parameter: Parameter, workload: Workload) -> Variable:
    default, name = parameter.default(workload), parameter.camel_name
    made: Variable = (
        ParameterInteger(name=name, default_value=int(default))
        if parameter.kind == "integer"
        else ParameterString(
            name=name, default_value=str(default), enum_values=list(parameter.choices) or None
        )
    )
    return made


def _network(is_isolated: bool, workload: Workload) -> Request | None:
    assert workload.sagemaker
    vpc = workload.sagemaker.vpc
    if vpc is None and not is_isolated:
        return None
    return {
        "EnableNetworkIsolation": is_isolated,
        "VpcConfig": {"SecurityGroupIds": list(vpc.security_groups), "Subnets": list(vpc.subnets)}
        if vpc
        else None,
    }


def _without_absent(request: Mapping[str, object]) -> Request:
    """The request without the keys whose value is None, at any depth."""
    return {key: _plain(value) for key, value in request.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_absent(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


__all__ = [
    "INPUT",
    "OUTPUT",
    "WORKLOAD",
    "ConditionEquals",
    "ConditionStep",
    "FailStep",
    "Request",
    "RequestStep",
    "Run",
    "Step",
    "StepDependency",
    "Text",
    "TriggerCondition",
    "Variable",
    "control_step",
    "definition",
    "offline",
    "property_file",
    "run_of",
    "text",
    "value_in",
]
