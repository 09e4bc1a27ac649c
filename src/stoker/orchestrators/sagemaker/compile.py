"""A workload's pipeline on SageMaker is compiled: parameters, literal requests, the definition."""

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

import msgspec

from stoker.errors import UsageError
from stoker.orchestrators.base import (
    check_complete,
    fixed,
    pack_inputs,
    project_pipeline,
    sagemaker_of,
)
from stoker.parameters import Parameter, main_channel, parameters_of
from stoker.platforms.base import JobSpec
from stoker.platforms.sagemaker import SageMakerPlatform
from stoker.platforms.sagemaker.checks import file_system
from stoker.records import Decision, Group, Json, ProfileSettings, Workload, nearest
from stoker.records.workload import refuse_foreign

TrainStep = Literal["launched", "native", "handover"]

# The project's file of each, in pipelines/.
_FILES = {
    "launched": "sagemaker",
    "native": "sagemaker_native",
    "handover": "sagemaker_handover",
}

# Limits of the service's model: a definition, a description, a parameter's value, and an argument
# of a processing job, which is how the steps get the parameters.
MAX_DEFINITION_BYTES = 1 << 20
MAX_DESCRIPTION = 3072
MAX_ARGUMENT = 256

# Display name of the step that fails a run next to another one.
ONLY_RUN = "Only run"

# Any type for data hosts: a hand-over names the one that was decided on.
_SOME_TYPE = "ml.c7i.4xlarge"

# The pipeline reads these itself; the others go to every step.
_OF_THE_PIPELINE = ("model_group", "approval", "reuse_profile")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """Holds all that a file in pipelines/ builds a definition from.

    Attributes:
        workload: Workload as the steps read it.
        inputs_uri: Folder with workload.json.
        parameters: Parameters of the pipeline.
        passed: Names of those that every step passes to stoker as `--param`.
        hyperparameters: Those that set a hyperparameter: of profile and training alone.
        profile: CreateTrainingJob of the profile on today's cluster, with the workload's defaults.
        train: The same of a native training step; None: a launched one.
        alone: The same without the data group, of a pipeline whose runs hand over to a second one.
        uploads: Address to content of what the steps read.
    """

    workload: Workload
    inputs_uri: str
    parameters: tuple[Parameter, ...]
    passed: tuple[str, ...]
    hyperparameters: tuple[Parameter, ...]
    profile: Mapping[str, Json]
    train: Mapping[str, Json] | None
    alone: Mapping[str, Json] | None = None
    uploads: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Holds a compiled pipeline: all that an upload needs.

    Attributes:
        name: Name of the workload.
        description: One line, with a sentence on each parameter: the service has no other place.
        definition: JSON.
        parameters: Parameters of the pipeline.
        uploads: Address to content of what the steps read.
    """

    name: str
    description: str
    definition: str
    parameters: tuple[Parameter, ...]
    uploads: Mapping[str, bytes]


def compile_pipeline(
    workload: Workload,
    *,
    train_step: str = "launched",
    decision: Decision | None = None,
    folder: Path | None = None,
) -> Compiled:
    """Compiles the workload's pipeline: the same text whenever and wherever, with no network.

    Args:
        workload: Workload with settings for SageMaker, an image, and today's cluster.
        train_step: `launched`: a small step starts, follows and adopts the job that was decided on.
            `native`: a training step of the service's own, its groups set by parameters.
            `handover`: the same in a second run, which the first starts with what it decided.
        decision: The one whose plan gives a native step its groups and their defaults.
        folder: Project folder, which also has `sagemaker.source`; absent: the current one.

    Raises:
        UsageError: If the workload lacks what the pipeline needs, the service would refuse a
            request of it, or the project's files cannot be used.
    """
    here = folder or Path.cwd()
    request = pipeline_request(workload, train_step=train_step, decision=decision, folder=here)
    file = _FILES[train_step]
    # The SDK is imported by the module that hides the account from it, before the project does it.
    with project_pipeline(file, folder=here, library="stoker.sagemaker") as module:
        definition = str(module.build(request))
    if len(definition.encode()) > MAX_DEFINITION_BYTES:
        raise UsageError(
            f"the definition has {len(definition.encode())} bytes, at most {MAX_DEFINITION_BYTES}",
            where=f"pipelines/{file}.py",
            fix="use fewer steps, or shorter texts in them",
        )
    return Compiled(
        name=request.workload.name,
        description=describe(request.workload, request.parameters),
        definition=definition,
        parameters=request.parameters,
        uploads=request.uploads,
    )


def pipeline_request(
    workload: Workload, *, train_step: str, decision: Decision | None, folder: Path | None
) -> PipelineRequest:
    """Returns all that a pipeline of `workload` is built from; arguments as of `compile_pipeline`.

    Raises:
        UsageError: If the workload lacks what the pipeline needs, or the service would refuse a
            request of it.
    """
    _check(workload, train_step=train_step, decision=decision)
    # Whatever platform the file names: the pipeline's steps submit to this one.
    inputs = pack_inputs(msgspec.structs.replace(workload, platform="sagemaker"), folder=folder)
    placed = inputs.workload
    cluster = placed.cluster
    assert cluster
    today = Group.of_today(cluster.dnn)
    groups = _native_groups(decision, placed) if decision else ()
    if train_step == "handover":
        groups = _any_groups(placed)
    known = [_of_service(p) for p in parameters_of(placed)]
    main = main_channel(placed)
    if main and file_system(placed.channels[main].uri):
        # It has an id and a folder, and no address that one value could replace.
        known = [p for p in known if p.name != "input_data"]
    parameters = _parameters(known, placed, groups)
    if train_step == "handover":
        parameters = (*parameters, *_HANDED_OVER)
    has = {p.name for p in parameters}
    request = PipelineRequest(
        workload=placed,
        inputs_uri=inputs.uri,
        parameters=parameters,
        # A native pipeline may lack one of the workload's own, such as epochs: see `_parameters`.
        passed=tuple(
            p.name
            for p in known
            if p.name in has and p.name not in _OF_THE_PIPELINE and not p.hyperparameter
        ),
        hyperparameters=tuple(p for p in known if p.hyperparameter),
        profile=_body(placed, [today], profile=placed.profile),
        train=_body(placed, groups) if groups else None,
        alone=_body(placed, groups[:1]) if train_step == "handover" else None,
        uploads={f"{inputs.uri}/{name}": content for name, content in inputs.files.items()},
    )
    _check_defaults(request)
    return request


def describe(workload: Workload, parameters: Sequence[Parameter]) -> str:
    """Returns the pipeline's description: one line, for the service refuses line breaks in it."""
    texts = " ".join(f"{p.camel_name}: {p.text}" for p in parameters)
    whole = f"stoker: profile, decide, train, evaluate {workload.name}. Parameters: {texts}"
    # Cut, and not refused: it only explains.
    return whole if len(whole) <= MAX_DESCRIPTION else whole[: MAX_DESCRIPTION - 3] + "..."


def _check(workload: Workload, *, train_step: str, decision: Decision | None) -> None:
    sagemaker_of(workload)
    kinds = get_args(TrainStep)
    if train_step not in kinds:
        raise UsageError(f"--train-step {train_step} is not known", fix=nearest(train_step, kinds))
    if train_step == "native" and decision is None:
        raise UsageError(
            "a native training step needs a decision: how many groups it has is fixed here",
            where="--train-step native",
            fix="add --decision decision.json (of stoker decide), or use --train-step launched",
        )
    if train_step != "native" and decision is not None:
        raise UsageError(
            f"with --train-step {train_step} each run trains on what it decides: no decision can "
            "be pinned",
            where="--decision",
            fix="leave it out, or use --train-step native",
        )
    check_complete(
        workload,
        image="ACCOUNT.dkr.ecr.REGION.amazonaws.com/stoker:TAG",
        instance_type="ml.g5.xlarge",
    )
    if decision:
        refuse_foreign(
            "decision",
            keys=decision.workload_keys,
            digest=decision.workload_sha256,
            workload=workload,
            where="--decision",
            fix="decide again: stoker decide PROFILE --workload WORKLOAD",
        )


def _native_groups(decision: Decision, workload: Workload) -> tuple[Group, ...]:
    """Returns the decision's groups; ranks a host follow the type, which is a parameter."""
    today = workload.cluster.dnn.processes_per_host if workload.cluster else None
    return tuple(
        msgspec.structs.replace(group, processes_per_host=today if group.role == "dnn" else None)
        for group in decision.plan.groups
    )


def _any_groups(workload: Workload) -> tuple[Group, ...]:
    """Returns groups whose types and counts are only the defaults of a hand-over's parameters."""
    cluster = workload.cluster
    assert cluster
    today = Group.of_today(cluster.dnn)
    data = Group(name="data", role="data", instance_type=_SOME_TYPE, count=1)
    return (today, data)


def _body(
    workload: Workload, groups: Sequence[Group], *, profile: ProfileSettings | None = None
) -> Mapping[str, Json]:
    # Nothing is written to the run's folder: only the request of the plan is taken.
    job = JobSpec.of(
        workload, groups=groups, run_dir=Path("runs"), name=workload.name, profile=profile
    )
    return SageMakerPlatform().plan(job).body


def _parameters(
    passed: Sequence[Parameter], workload: Workload, groups: Sequence[Group]
) -> tuple[Parameter, ...]:
    if not groups:
        return tuple(passed)
    epochs = workload.hyperparameters.get("epochs")
    kept = [p for p in passed if p.name != "epochs"]
    if isinstance(epochs, int):
        # A native step's only variable hyperparameter: 0 would really mean no epochs.
        named = next(p for p in passed if p.name == "epochs")
        kept.append(
            dataclasses.replace(
                named,
                text="Epochs of the training, handed to the command as --epochs.",
                default=lambda workload: int(str(workload.hyperparameters["epochs"])),
            )
        )
    of_groups = (parameter for group in groups for parameter in _of_group(group))
    return (*kept, *of_groups, *_workers(groups))


def _of_service(parameter: Parameter) -> Parameter:
    """Spells defaults as the service does: requests hold the parameters as they are."""
    if parameter.name == "reuse_profile":
        # Not empty: the service may check the addresses of the branch that is not taken, too.
        return dataclasses.replace(
            parameter,
            text="Folder with a profile.json, in place of a new profile; as it is: a new profile.",
            default=no_profile,
        )
    if parameter.name != "instance_type":
        return parameter
    return dataclasses.replace(
        parameter, default=lambda workload: _spelt(str(parameter.default(workload)))
    )


def no_profile(workload: Workload) -> str:
    """Returns the value of `reuse_profile` that means none: a folder that nobody makes."""
    assert workload.sagemaker
    return f"{workload.sagemaker.output_uri.rstrip('/')}/stoker/no-profile"


def _spelt(instance_type: str) -> str:
    return instance_type if instance_type.startswith("ml.") else f"ml.{instance_type}"


# Of a run that another one has decided for, besides the groups.
_HANDED_OVER = (
    fixed("workers", "string", "Data workers of a host by group, as JSON.", "{}"),
    fixed(
        "parent_run",
        "string",
        "Id of the run that has decided, and hands over; empty: this run decides.",
        "",
    ),
)


def decided_parameters(
    decision: Decision, *, parent_run: str, known: Collection[str]
) -> dict[str, str]:
    """Returns a hand-over's parameters: the groups of a decision, and who decided.

    Raises:
        UsageError: If the uploaded pipeline does not hand over, or the decision has other groups.
    """
    groups = {group.name: group for group in decision.plan.groups}
    if "ParentRun" not in known:
        raise UsageError(
            "the uploaded pipeline does not hand over",
            fix="stoker upload sagemaker WORKLOAD --train-step handover",
        )
    if not {"dnn"} <= set(groups) <= {"dnn", "data"}:
        raise UsageError(
            f"the decision has groups {', '.join(groups)}; a hand-over knows dnn and data",
            fix="use --train-step launched",
        )
    data, dnn = groups.get("data"), groups["dnn"]
    workers = {
        group.role: group.workers_per_host
        for group in decision.plan.groups
        if group.workers_per_host is not None
    }
    return {
        "DnnInstanceType": _spelt(dnn.instance_type),
        "DnnInstanceCount": str(dnn.count),
        "DataInstanceType": _spelt(data.instance_type if data else _SOME_TYPE),
        "DataInstanceCount": str(data.count if data else 0),
        "Workers": json.dumps(workers),
        "ParentRun": parent_run,
    }


def _of_group(group: Group) -> tuple[Parameter, Parameter]:
    name = group.name.replace("-", "_")
    return (
        fixed(
            f"{name}_instance_type",
            "string",
            f"Instance type of the group {group.name} that trains.",
            _spelt(group.instance_type),
        ),
        fixed(
            f"{name}_instance_count", "integer", f"Hosts of the group {group.name}.", group.count
        ),
    )


def _workers(groups: Sequence[Group]) -> Iterator[Parameter]:
    decided = {g.role: g.workers_per_host for g in groups if g.workers_per_host is not None}
    for role, workers in decided.items():
        yield fixed(f"{role}_workers", "integer", f"Data workers of a {role} host.", workers)


def argument_of(parameter: Parameter, value: str | int | float) -> str:
    """Returns the word in which a step hands a parameter's value on to stoker."""
    # There may be many hyperparameters, and a step takes 100 words: theirs is one word, not two.
    return f"{'--param=' if parameter.hyperparameter else ''}{parameter.name}={value}"


def _check_defaults(request: PipelineRequest) -> None:
    for parameter in request.parameters:
        argument = argument_of(parameter, parameter.default(request.workload))
        # Told here: the service would find it when a run starts its first step.
        is_passed = parameter.name in request.passed or parameter.hyperparameter
        if len(argument) > MAX_ARGUMENT and is_passed:
            raise UsageError(
                f"parameter {parameter.name} has {len(argument)} characters with its name, "
                f"at most {MAX_ARGUMENT}",
                where=f"workload {request.workload.name}",
                fix=f"shorten it: {parameter.text}",
            )


__all__ = [
    "Compiled",
    "PipelineRequest",
    "TrainStep",
    "compile_pipeline",
    "describe",
    "no_profile",
    "pipeline_request",
]
