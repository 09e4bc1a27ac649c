"""Steps of a SageMaker pipeline as literal requests, and the definition made of them.

The SDK's step classes need a session, look up roles and upload code while a pipeline is built. A
`RequestStep` contains the literal API request instead, so that a definition is the same text at any
time and place. Values that differ from run to run are pipeline variables. A `RequestStep` is a step
of the SDK, too: a pipeline may have both kinds.
"""

import contextlib
import dataclasses
import gc
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, Protocol

from stoker.errors import MissingExtraError, UsageError
from stoker.parameters import Parameter, spelt_as
from stoker.pipelines.sagemaker.compile import (
    MAX_ARGUMENT,
    PipelineRequest,
    argument_of,
    pipeline_request,
)
from stoker.platforms.aws import Aws, tag_list
from stoker.platforms.sagemaker.submit import MAX_NAME_LENGTH
from stoker.records import SageMakerSettings, Workload, nearest
from stoker.records.platforms import NAME_END

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
# Folders of the inputs and outputs in a control step's container.
INPUT = "/opt/ml/processing/input"
OUTPUT = "/opt/ml/processing/output"
WORKLOAD = f"{INPUT}/workload/workload.json"
# Enough to pull an image, and to read and write a few files.
_SMALL_STEP_SECONDS = 3600
_MAX_ARGUMENTS = 100
# An execution's id has 12 characters; a further attempt's job has "-2" at its end.
_LONGEST_ENDS = len(f"{NAME_END}123456789012-2")
_BRANCH = re.compile(r"[a-zA-Z0-9](-?[a-zA-Z0-9])*")
_BODY = "pipelines/, the function that makes the steps"
# Small hosts are rarely unavailable. The job that waits for GPUs is another one.
_CONTROL_CAPACITY_MINUTES = 30
_SHAPES = {
    "Processing": "DescribeProcessingJobResponse",
    "Training": "DescribeTrainingJobResponse",
    "RegisterModel": "DescribeModelPackageOutput",
}


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Hides account and configuration from the SDK, which would look for them on the network."""
    names = (*_OFFLINE, *_NOT_OFFLINE)
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    session = getattr(sys.modules.get("boto3"), "DEFAULT_SESSION", None)
    handlers = list(logging.getLogger().handlers)
    is_collecting = gc.isenabled()
    # Thousands of classes, none of them garbage: 1.6 CPU-seconds, with collections 2.3.
    gc.disable()
    os.environ.update(_OFFLINE)
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
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
        # The SDK leaves a session with the keys above, and a log handler.
        if "boto3" in sys.modules:
            setattr(sys.modules["boto3"], "DEFAULT_SESSION", session)  # noqa: B010
        logging.getLogger().handlers[:] = handlers


with offline():
    from sagemaker.core.workflow.conditions import ConditionEquals, ConditionIn
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
        CacheConfig,
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


_PARAMETERS = {
    str: ParameterString,
    int: ParameterInteger,
    float: ParameterFloat,
    bool: ParameterBoolean,
}


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
        cache_days: Days for which the service reuses a run of the same request; 0: never.
        capacity_minutes: How long a job without capacity is retried.
        owned: Addresses that no other step of the run may write to.
    """

    def __init__(
        self,
        name: str,
        kind: Literal["Processing", "Training", "RegisterModel"],
        request: Mapping[str, object],
        *,
        display_name: str,
        description: str = "",
        outputs: Mapping[str, Text] | None = None,
        depends_on: Sequence[Step | StepDependency | str] = (),
        property_files: Sequence[PropertyFile] = (),
        cache_days: int = 0,
        capacity_minutes: int = 0,
        owned: Sequence[Text] = (),
    ) -> None:
        retries = _policies(capacity_minutes) if kind != "RegisterModel" else [_STEP_POLICY]
        waits = list(depends_on)
        enum = StepTypeEnum(kind)
        super().__init__(name, enum, display_name, description, waits, retries)
        self.outputs: dict[str, Text] = dict(outputs or {})
        self._request = _without_absent(request)
        self._cache_days = cache_days
        self.property_files = list(property_files)
        self.owned = tuple(owned)
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
        if self._cache_days:
            step.update(CacheConfig(True, f"P{self._cache_days}D").config)
        return step


# Retries. A kind of error may be in one policy only.
#   Throttling, or a fault of the service: soon, about as the service's default.
#   A quota that other runs use: for an hour and a half, as their jobs end.
#   A job that broke inside the service: minutes apart, as each attempt may be billed.
#   No capacity: as long as the workload's on_no_capacity says.
_STEP_POLICY = StepRetryPolicy(
    [StepExceptionTypeEnum.SERVICE_FAULT, StepExceptionTypeEnum.THROTTLING],
    interval_seconds=5,
    backoff_rate=2.0,
    max_attempts=5,
)


def _policies(capacity_minutes: int) -> list[StepRetryPolicy | SageMakerJobStepRetryPolicy]:
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


def text(*parts: Text | int | float) -> Text:
    """Joins texts and pipeline variables to one value."""
    values: list[Text] = []
    for part in parts:
        # Flat: AWS does not document a join inside a join.
        for piece in part.values if isinstance(part, Join) else (_word(part),):
            before = values[-1] if values else None
            if isinstance(piece, str) and isinstance(before, str):
                values[-1] = before + piece
            else:
                values.append(piece)
    joined: Text = values[0] if len(values) == 1 else Join(on="", values=values)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SageMakerPipelineRun:
    """A run of a pipeline: its workload, and the values of its parameters.

    Attributes:
        request: What the pipeline is compiled from.
        parameters: Values by name; default: the workload's.
        execution_id: Id of the run, which names its folder.
        suffix: End of each step's name, for branches.
        variant: End of the job's name and of the run's folder, for branches that may all run.
    """

    request: PipelineRequest
    parameters: Mapping[str, Text | int | float] = field(default_factory=dict)
    execution_id: Text = field(default_factory=lambda: EXECUTION_ID)
    suffix: str = ""
    variant: str = ""

    @classmethod
    def of(
        cls,
        workload: Workload,
        *,
        folder: Path | None = None,
        **parameters: Text | int | float,
    ) -> "SageMakerPipelineRun":
        """Returns a run for a pipeline of your own.

        Args:
            workload: Needs settings for SageMaker, an image and a cluster.
            folder: Project folder with `sagemaker.source`; default: the current one.
            parameters: Parameters of your pipeline in place of the workload's values: image=image.

        Raises:
            UsageError: If the workload lacks what the steps need, or has no such parameter.
        """
        request = pipeline_request(workload, folder=folder)
        return cls(request=request).given(**parameters)

    def given(self, **parameters: Text | int | float) -> "SageMakerPipelineRun":
        """Returns the run with other values of parameters: input_data=prepared.outputs["data"].

        Raises:
            UsageError: If a run has no such parameter.
        """
        for name in parameters:
            self._known(name)
        return dataclasses.replace(self, parameters={**self.parameters, **parameters})

    def branch(self, suffix: str) -> "SageMakerPipelineRun":
        """Returns the run for the steps of another branch, which may run beside this one's.

        Its steps, its training job and its folder have names that end in `suffix`.

        Raises:
            UsageError: If a job's name cannot end in it.
        """
        variant = f"{self.variant}-{suffix}"
        room = MAX_NAME_LENGTH - _LONGEST_ENDS - len(self.workload.name)
        if not _BRANCH.fullmatch(suffix) or len(variant) > room:
            name = f"{self.workload.name}{NAME_END}EXECUTION{variant}"
            raise UsageError(
                f"a training job cannot be named {name}",
                where=f"branch({suffix!r})",
                fix=f"letters, digits and single dashes, with the dash {room} characters at most",
            )
        return dataclasses.replace(self, suffix=self.suffix + suffix, variant=variant)

    def alternative(self, suffix: str) -> "SageMakerPipelineRun":
        """Returns the run for the other side of a condition, of which one side runs.

        Only its steps have other names, which end in `suffix`; job and folder are the same.
        """
        return dataclasses.replace(self, suffix=self.suffix + suffix)

    @property
    def workload(self) -> Workload:
        """The workload, with the address of its code instead of the folder."""
        return self.request.workload

    @property
    def settings(self) -> SageMakerSettings:
        assert self.workload.sagemaker
        return self.workload.sagemaker

    @property
    def output_uri(self) -> str:
        """Prefix of all outputs, without a trailing slash."""
        return self.settings.output_uri.rstrip("/")

    @property
    def branch_id(self) -> Text:
        """Id of the run, and of its branch."""
        if self.variant:
            return text(self.execution_id, self.variant)
        return self.execution_id

    @property
    def job_name(self) -> Text:
        """Name of the training job that the train step starts or adopts."""
        return text(f"{self.workload.name}{NAME_END}", self.branch_id)

    @property
    def reused_profile(self) -> Text:
        return text(self.value("reuse_profile"))

    @property
    def image(self) -> Text:
        return text(self.value("image"))

    @property
    def control_image(self) -> Text:
        return self.settings.control.image or self.image

    def uri(self, path: str) -> Text:
        """Returns an address in the folder of the run's branch, which the execution id names."""
        head = f"{self.output_uri}/pipelines/{self.workload.name}/"
        return text(head, self.branch_id, f"/{path}")

    def value(self, name: str) -> Text | int | float:
        """Returns the value of a parameter: the run's, else the workload's."""
        if name in self.parameters:
            return self.parameters[name]
        return self._known(name).default(self.workload)

    def words(self, *more: str, has_hyperparameters: bool = False) -> list[Text]:
        """Returns `--param NAME=VALUE` for each parameter that a run can change, and for `more`."""
        words: list[Text] = []
        for name in (*self.request.passed, *more):
            words += ["--param", text(f"{name}=", self.value(name))]
        if has_hyperparameters:
            options = self.request.hyperparameters
            words += [text(argument_of(each, ""), self.value(each.name)) for each in options]
        return words

    @property
    def told_run(self) -> Mapping[str, Text]:
        """The variable that names this run to MLflow and the webhook; {} without both."""
        is_told = self.workload.notify or self.workload.tracking.mlflow
        if is_told:
            return {"STOKER_PIPELINE_RUN": self.job_name}
        return {}

    def _known(self, name: str) -> Parameter:
        parameters = {parameter.name: parameter for parameter in self.request.parameters}
        if name not in parameters:
            raise UsageError(
                f"a run of {self.workload.name} has no parameter {name}",
                fix=nearest(name, list(parameters)),
            )
        return parameters[name]


def control_step(
    run: SageMakerPipelineRun,
    *,
    name: str,
    command: Sequence[Text],
    image: Text | None = None,
    inputs: Mapping[str, Text] | None = None,
    outputs: Mapping[str, Text] | None = None,
    property_files: Mapping[str, str] | None = None,
    environment: Mapping[str, Text] | None = None,
    instance_type: str | None = None,
    role: str | None = None,
    depends_on: Sequence[Step | StepDependency | str] = (),
    display_name: str = "",
    description: str = "",
    max_run_seconds: int = _SMALL_STEP_SECONDS,
    is_isolated: bool = False,
    owned: Sequence[Text] = (),
) -> RequestStep:
    """Makes a processing step on a small host, as `sagemaker.control` says.

    Args:
        command: Program and arguments, each of 256 characters at most.
        inputs: Name to address; an input lies in `INPUT/NAME`. The workload is always there.
        outputs: Name to address; `OUTPUT/NAME` is uploaded while it is written, so it survives a
            failed step. `run.uri` is for small records: evaluate fetches all of it.
        property_files: Name to OUTPUT/PATH of a JSON file that conditions may read (`value_in`).
        instance_type, role: Default: as in `sagemaker.control`.
        display_name: Name in the console; default: the name without the branch.
        is_isolated: Without network, if the workload's job has none.
        owned: Addresses that no other step of the run may write to.
    """
    _check_command(command, name=name)
    settings = run.settings
    control = settings.control
    files = {"workload": f"{run.request.inputs_uri}/workload.json", **(inputs or {})}
    request: StepRequest = {
        "AppSpecification": _program(command, image=image or run.control_image),
        "Environment": _environment(settings, environment or {}),
        "NetworkConfig": _network(settings, is_isolated=is_isolated),
        "ProcessingInputs": [_input(key, uri) for key, uri in files.items()],
        "ProcessingOutputConfig": _output_config(settings, outputs or {}),
        "ProcessingResources": _one_host(settings, instance_type or control.instance_type),
        "RoleArn": role or control.role or settings.role,
        "StoppingCondition": {"MaxRuntimeInSeconds": max_run_seconds},
        "Tags": tag_list(settings.tags) or None,
    }
    return RequestStep(
        f"{name}{run.suffix}",
        "Processing",
        request,
        display_name=display_name or name,
        description=description,
        outputs=outputs,
        depends_on=depends_on,
        property_files=[_property_file(*named) for named in (property_files or {}).items()],
        capacity_minutes=_CONTROL_CAPACITY_MINUTES,
        owned=owned,
    )


def _program(command: Sequence[Text], *, image: Text) -> StepRequest:
    return {
        "ImageUri": image,
        "ContainerEntrypoint": [command[0]],
        "ContainerArguments": list(command[1:]) or None,
    }


def _environment(settings: SageMakerSettings, variables: Mapping[str, Text]) -> StepRequest | None:
    """Returns the variables of a step's container; None: there are none."""
    if not settings.region:
        return dict(variables) or None
    # SageMaker gives a container its region, but not in the variable that boto3 reads.
    return {"AWS_DEFAULT_REGION": settings.region, **variables}


def _network(settings: SageMakerSettings, *, is_isolated: bool) -> StepRequest | None:
    """Returns the network of a step's container; None: no VPC, and the internet is there."""
    has_no_network = settings.network_isolation and is_isolated
    if not settings.vpc and not has_no_network:
        return None
    return {"EnableNetworkIsolation": has_no_network, "VpcConfig": settings.vpc or None}


def _one_host(settings: SageMakerSettings, instance_type: str) -> StepRequest:
    cluster = {
        "InstanceCount": 1,
        "InstanceType": instance_type,
        "VolumeSizeInGB": settings.control.volume_gb,
        "VolumeKmsKeyId": settings.volume_kms_key,
    }
    return {"ClusterConfig": cluster}


def _input(name: str, uri: Text) -> StepRequest:
    place = {"S3Uri": uri, "LocalPath": f"{INPUT}/{name}"}
    as_files = {"S3DataType": "S3Prefix", "S3InputMode": "File"}
    return {"InputName": name, "S3Input": {**place, **as_files}}


def _output(name: str, uri: Text) -> StepRequest:
    place = {"S3Uri": uri, "LocalPath": f"{OUTPUT}/{name}"}
    return {"OutputName": name, "S3Output": {**place, "S3UploadMode": "Continuous"}}


def _output_config(settings: SageMakerSettings, outputs: Mapping[str, Text]) -> StepRequest:
    return {
        "KmsKeyId": settings.output_kms_key,
        "Outputs": [_output(key, uri) for key, uri in outputs.items()],
    }


def _property_file(name: str, file: str) -> PropertyFile:
    output, _, path = file.partition("/")
    return PropertyFile(name=name, output_name=output, path=path)


def _check_command(command: Sequence[Text], *, name: str) -> None:
    """Refuses a command with too many or too long words, given the parameters' defaults."""
    where = f"step {name}"
    fix = "pass a file: an input of the step"
    if len(command) - 1 > _MAX_ARGUMENTS:
        raise UsageError(
            f"the command has {len(command)} words, at most {_MAX_ARGUMENTS + 1}",
            where=where,
            fix=fix,
        )
    for word in command:
        parts = word.values if isinstance(word, Join) else (word,)
        # When the pipeline is compiled, only a parameter's default is known.
        texts = [
            p if isinstance(p, str) else getattr(p, "default_value", None) or "" for p in parts
        ]
        length = sum(len(str(part)) for part in texts)
        if length > MAX_ARGUMENT:
            what = f"a word of the command has {length} characters, at most {MAX_ARGUMENT}"
            begin = "".join(map(str, texts))[:40]
            raise UsageError(f"{what}: {begin}...", where=where, fix=f"shorten it, or {fix}")


def pipeline(
    request: PipelineRequest, body: Callable[[SageMakerPipelineRun], Sequence[Step]]
) -> str:
    """Returns the pipeline's definition: JSON with sorted keys, the same text for the same request.

    Args:
        body: Makes the steps from the run. Further arguments, with annotations (str, int, float,
            bool) and defaults, are parameters of the pipeline.

    Raises:
        UsageError: If a further argument has another type, or the name of another parameter; if two
            steps that may both run write to one address, or start one training job.
    """
    arguments = list(inspect.signature(body).parameters.values())[1:]
    taken = {parameter.name for parameter in request.parameters}
    for argument in arguments:
        if (name := spelt_as(argument.name, taken)) in taken:
            raise UsageError(
                f"argument {argument.name} of the steps has the name of the parameter {name}",
                where=_BODY,
                fix="rename the argument; run.value gives the workload's parameters",
            )
        taken.add(argument.name)
    variables = {argument.name: _variable_of(argument) for argument in arguments}
    named: dict[str, PipelineVariable] = {
        each.name: _variable(each, default=each.default(request.workload))
        for each in request.parameters
    }
    run = SageMakerPipelineRun(request=request, parameters=named)
    bound = inspect.signature(body).bind(run, **variables)
    steps = list(body(*bound.args, **bound.kwargs))
    _check_owners(steps)
    # Pipeline only takes clients from the session, for calls that are not made here.
    clients = SimpleNamespace(client=lambda service: None)
    session = SimpleNamespace(boto_session=clients, local_mode=False)
    compiled = Pipeline(
        name=request.workload.name,
        parameters=[*named.values(), *variables.values()],
        steps=steps,
        sagemaker_session=session,
        pipeline_experiment_config=None,
    )
    with offline():
        document = json.loads(compiled.definition())
    # The SDK writes nulls for unused parts: MLflow, experiments.
    return json.dumps(_without_absent(document), indent=1, sort_keys=True) + "\n"


def _check_owners(steps: Sequence[Step]) -> dict[str, str]:
    """Refuses two steps that own one address, unless a condition runs only one of the two.

    Returns:
        The steps' names by the addresses that they own.
    """
    owners: dict[str, str] = {}
    for step in steps:
        if isinstance(step, ConditionStep):
            owned = {**_check_owners(step.if_steps), **_check_owners(step.else_steps)}
        else:
            owned = dict.fromkeys(map(_key_of, getattr(step, "owned", ())), step.name)
        for address, name in owned.items():
            if address in owners:
                raise UsageError(
                    f"the steps {owners[address]} and {name} write to one address: the second "
                    "would take the place of the first",
                    where=_BODY,
                    fix="make one of them from run.branch('Second'): its job, folder and model "
                    "have other names",
                )
            owners[address] = name
    return owners


def _key_of(address: Text) -> str:
    expression = address if isinstance(address, str) else address.expr
    return json.dumps(expression, sort_keys=True)


def upload_inputs(run: SageMakerPipelineRun, *, aws: Aws | None = None) -> tuple[str, ...]:
    """Uploads the workload and its code for the steps; returns the addresses that were missing.

    `stoker upload` does this, too. Addresses contain a digest of the content.

    Raises:
        PlatformError: If S3 refuses.
    """
    account = aws or Aws(region=run.settings.region)
    uploads = run.request.uploads
    missing = tuple(uri for uri in sorted(uploads) if not account.has_object(uri))
    for uri in missing:
        account.write_object(uri, uploads[uri], kms_key=run.settings.output_kms_key)
    return missing


def _word(part: Text | int | float) -> Text:
    if isinstance(part, bool):
        return str(part).lower()
    if isinstance(part, int | float):
        return str(part)
    return part


def _variable(parameter: Parameter, *, default: str | int | float) -> PipelineVariable:
    kind = {"integer": int, "number": float}.get(parameter.kind, str)
    more = {"enum_values": list(parameter.choices) or None} if kind is str else {}
    # A boolean is a text with two choices: AWS does not document how it is spelt in a text.
    value = kind(_word(default) if kind is str else default)
    variable: PipelineVariable = _PARAMETERS[kind](name=parameter.name, default_value=value, **more)
    return variable


def _variable_of(argument: inspect.Parameter) -> PipelineVariable:
    if argument.annotation not in _PARAMETERS:
        raise UsageError(
            f"argument {argument.name} of the steps is no parameter of a pipeline",
            where=_BODY,
            fix=f"{argument.name}: str, int, float or bool",
        )
    kind = argument.annotation
    default = argument.default
    variable: PipelineVariable = _PARAMETERS[kind](
        name=argument.name,
        default_value=None if default is inspect.Parameter.empty else kind(default),
    )
    return variable


def _without_absent(request: Mapping[str, object]) -> StepRequest:
    """Returns the request without the keys whose value is None, at any depth."""
    return {key: _plain(value) for key, value in request.items() if value is not None}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return _without_absent(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


# The SDK's names that stoker.sagemaker hands on.
__all__ = [
    "ConditionEquals",
    "ConditionIn",
    "ConditionStep",
    "FailStep",
    "Step",
    "StepDependency",
    "TriggerCondition",
]
