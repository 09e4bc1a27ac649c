"""Starts runs of an uploaded pipeline, with parameters that it has."""

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from stoker.errors import UsageError
from stoker.parameters import Parameter, parameters_of, parse
from stoker.platforms.aws import Aws
from stoker.records import Json, Workload, nearest
from stoker.targets import diff
from stoker.targets.base import Started
from stoker.targets.compiled import MAX_ARGUMENT
from stoker.targets.inputs import pack_inputs
from stoker.targets.sagemaker.console import pipeline_url
from stoker.targets.sagemaker.definition import Deployed, uploaded_pipeline

# Of the API, for a run and for a schedule alike.
MAX_VALUE = 1024


def start_run(aws: Aws, workload: Workload, *, parameters: Sequence[str], folder: Path) -> Started:
    """Starts a run; `parameters` are NAME=VALUE.

    Args:
        aws: The account.
        workload: Whose pipeline it is.
        parameters: Of the run.
        folder: Project folder, in which the workload's code stands.

    Raises:
        UsageError: If the pipeline is not uploaded, or a parameter is unknown or cannot be.
        PlatformError: If the service refuses.
    """
    deployed = uploaded_pipeline(aws, workload.name)
    values = checked_parameters(deployed, workload, parameters)
    warnings = out_of_date(deployed, workload, folder=folder)
    answer = aws.call(
        "sagemaker",
        "StartPipelineExecution",
        PipelineName=deployed.name,
        PipelineExecutionDisplayName=f"{deployed.name}-{time.strftime('%Y%m%d-%H%M%S')}"[:82],
        PipelineParameters=[{"Name": name, "Value": value} for name, value in values.items()],
        ClientRequestToken=secrets.token_hex(16),
    )
    arn = str(answer["PipelineExecutionArn"])
    return Started(
        run=f"{deployed.name}/{arn.rpartition('/')[2]}",
        id=arn,
        url=pipeline_url(arn, domain=deployed.domain),
        parameters=values,
        warnings=warnings,
    )


def out_of_date(deployed: Deployed, workload: Workload, *, folder: Path) -> tuple[str, ...]:
    """A warning where the uploaded pipeline reads another workload or other code than these."""
    try:
        inputs = pack_inputs(msgspec.structs.replace(workload, platform="sagemaker"), folder=folder)
    except UsageError as err:
        return (f"whether the uploaded pipeline is up to date is not known: {err.what}",)
    if f'"{inputs.uri}/' in json.dumps(deployed.definition):
        return ()
    return (
        f"the uploaded pipeline {deployed.name} has another workload or code than this folder; "
        "it runs as it was uploaded (stoker upload sagemaker WORKLOAD changes that)",
    )


def checked_parameters(
    deployed: Deployed, workload: Workload, texts: Sequence[str]
) -> dict[str, str]:
    """NAME=VALUE texts as the uploaded pipeline names them, with checked values.

    Raises:
        UsageError: For a name that the uploaded pipeline has not (with the nearest one that it
            has), or a value that cannot be.
    """
    there = diff.parameters_of(deployed.definition)
    known = {p.camel_name: p for p in parameters_of(workload)}
    values: dict[str, str] = {}
    for text in texts:
        typed, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        name = _camel(typed.strip())
        if name not in there:
            raise _unknown(typed.strip(), deployed, there, known)
        if name in known:
            checked = parse([f"{known[name].name}={value}"], workload=workload)
            values[name] = checked[known[name].name]
        else:
            values[name] = _checked(name, value.strip(), there[name])
        # The steps get the workload's own parameters as arguments: NAME=VALUE.
        limit = MAX_ARGUMENT - len(known[name].name) - 1 if name in known else MAX_VALUE
        if len(values[name]) > limit:
            raise UsageError(
                f"--param {typed}: its value has {len(values[name])} characters, at most {limit}",
                fix="set a longer value in the workload and upload that",
            )
    return values


def _unknown(
    typed: str,
    deployed: Deployed,
    there: Mapping[str, Mapping[str, Json]],
    known: Mapping[str, Parameter],
) -> UsageError:
    if _camel(typed) in known:
        return UsageError(
            f"the uploaded pipeline {deployed.name} has no parameter {typed}, the workload has",
            fix="it was uploaded by an older stoker or workload: stoker upload sagemaker WORKLOAD",
        )
    names = {(known[name].name if name in known else name): name for name in there}
    hint = nearest(typed, sorted(names))
    if hint.startswith("known"):
        hint = nearest(_camel(typed), sorted(there))
    return UsageError(f"a run of {deployed.name} has no parameter {typed}", fix=hint)


def _checked(name: str, value: str, parameter: Mapping[str, Json]) -> str:
    """A value of a parameter that only the pipeline knows, such as a group of the native step."""
    if parameter.get("Type") == "Integer" and not (value.isascii() and value.isdigit()):
        raise UsageError(f"{name}={value}: expected a whole number")
    choices = parameter.get("EnumValues")
    if isinstance(choices, list) and value not in choices:
        words = ", ".join(str(choice) for choice in choices)
        raise UsageError(f"{name}={value} is not possible", fix=f"use {words}")
    return value


def _camel(name: str) -> str:
    """A parameter's name as the service has it, from either spelling."""
    if name[:1].isupper():
        return name
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))


__all__ = ["checked_parameters", "start_run"]
