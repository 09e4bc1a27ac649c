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
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Literal, Protocol

from stoker.parameters import Parameter

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
        with warnings.catch_warnings():
            # The SDK imports modules of its own that it calls deprecated.
            warnings.simplefilter("ignore")
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
    from sagemaker.core.workflow.conditions import ConditionEquals, ConditionIn
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

# Of the run: letters and digits.
EXECUTION_ID: Variable = ExecutionVariables.PIPELINE_EXECUTION_ID
EXECUTION_ARN: Variable = ExecutionVariables.PIPELINE_EXECUTION_ARN

_SHAPES = {
    "Processing": "DescribeProcessingJobResponse",
    "Training": "DescribeTrainingJobResponse",
    "RegisterModel": "DescribeModelPackageOutput",
}


class RequestStep(ConfigurableRetryStep):  # type: ignore[misc]
    """A step that is the literal request of a job, or of a model's registration.

    Args:
        name: Unique in the pipeline: letters, digits and dashes.
        kind: What the request is for; a job's request comes without the job's name.
        request: As in the API; any value may be a pipeline variable.
        depends_on: Steps, or `StepDependency` for another outcome than success.
        property_files: JSON outputs that conditions and other steps may read.
        cache_days: A run of the same request within so many days is re-used; 0: never.
        capacity_minutes: So long a job is tried again for which there are no hosts; 0: it is not.
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
        capacity_minutes: int = 0,
    ) -> None:
        super().__init__(
            name,
            StepTypeEnum(kind),
            display_name,
            description,
            list(depends_on),
            _policies(capacity_minutes) if kind != "RegisterModel" else [_STEP_POLICY],
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
#   The job broke inside the service: minutes apart; each attempt may be billed.
#   No capacity: for as long as the workload's on_no_capacity says.
_STEP_POLICY = StepRetryPolicy(
    [StepExceptionTypeEnum.SERVICE_FAULT, StepExceptionTypeEnum.THROTTLING],
    interval_seconds=5,
    backoff_rate=2.0,
    max_attempts=5,
)


def _policies(
    capacity_minutes: int,
) -> list[StepRetryPolicy | SageMakerJobStepRetryPolicy]:
    waiting = SageMakerJobStepRetryPolicy(
        failure_reason_types=[SageMakerJobExceptionTypeEnum.CAPACITY_ERROR],
        interval_seconds=300,
        backoff_rate=1.0,
        expire_after_mins=capacity_minutes,
    )
    return [
        _STEP_POLICY,
        SageMakerJobStepRetryPolicy(
            exception_types=[SageMakerJobExceptionTypeEnum.RESOURCE_LIMIT],
            interval_seconds=60,
            backoff_rate=1.5,
            expire_after_mins=90,
        ),
        SageMakerJobStepRetryPolicy(
            failure_reason_types=[SageMakerJobExceptionTypeEnum.INTERNAL_ERROR],
            interval_seconds=120,
            backoff_rate=2.0,
            max_attempts=3,
        ),
        *([waiting] if capacity_minutes else []),
    ]


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


def variable(parameter: Parameter, *, default: str | int) -> Variable:
    """The pipeline's parameter of that name and default."""
    name = parameter.camel_name
    made: Variable = (
        ParameterInteger(name=name, default_value=int(default))
        if parameter.kind == "integer"
        else ParameterString(
            name=name, default_value=str(default), enum_values=list(parameter.choices) or None
        )
    )
    return made


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
    "EXECUTION_ARN",
    "EXECUTION_ID",
    "ConditionEquals",
    "ConditionIn",
    "ConditionStep",
    "FailStep",
    "PropertyFile",
    "Request",
    "RequestStep",
    "Step",
    "StepDependency",
    "Text",
    "TriggerCondition",
    "Variable",
    "definition",
    "offline",
    "property_file",
    "text",
    "value_in",
    "variable",
]
