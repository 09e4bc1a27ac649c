"""Steps of a SageMaker pipeline as literal requests, and the SDK's names for what is around them.

The SDK's step classes need a session, look up roles and upload code while a pipeline is built. A
`RequestStep` contains the literal API request instead, so that a definition is the same text at any
time and place. Values that differ from run to run are pipeline variables. A `RequestStep` is a step
of the SDK, too: a pipeline may have both kinds.
"""

import contextlib
import gc
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal, Protocol, cast

from stoker.errors import MissingExtraError

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
    values: list[Text] = []
    for part in parts:
        # Flat: AWS does not document a join inside a join.
        values += part.values if isinstance(part, Join) else [_word(part)]
    merged: list[Text] = []
    for is_text, group in groupby(values, key=lambda value: isinstance(value, str)):
        pieces = list(group)
        merged += ["".join(map(str, pieces))] if is_text else pieces
    joined: Text = merged[0] if len(merged) == 1 else Join(on="", values=merged)
    return joined


def _word(part: Text | int | float) -> Text:
    return json.dumps(part) if isinstance(part, int | float) else part


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


def without_none(value: object) -> object:
    """Returns a document without the keys whose value is None, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_none(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [without_none(each) for each in value]
    return value


# With the SDK's names that stoker.sagemaker hands on.
__all__ = [
    "EXECUTION_ARN",
    "EXECUTION_ID",
    "ConditionEquals",
    "ConditionStep",
    "FailStep",
    "Join",
    "ParameterBoolean",
    "ParameterFloat",
    "ParameterInteger",
    "ParameterString",
    "Pipeline",
    "PipelineVariable",
    "PropertyFile",
    "RequestStep",
    "Step",
    "StepDependency",
    "StepRequest",
    "Text",
    "TriggerCondition",
    "offline",
    "text",
    "value_in",
    "without_none",
]
