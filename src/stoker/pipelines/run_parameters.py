"""NAME=VALUE texts of a run or a schedule, checked before the service, on both services alike."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.parameters import (
    Kind,
    Parameter,
    is_number,
    parameter_named,
    parse,
    refuse_doubles,
    spelt_as,
    truth_value,
    whole_number,
)
from stoker.records import Workload, nearest

# An empty value of these is sent to the service as it is, and fails in a step.
_NEEDED = ("instance_type", "image", "control_image", "input_data", "model_group", "workload")
# A step would look for these.
_ADDRESSES = {
    ("sagemaker", "input_data"): (r"s3://[^/]+(/.*)?", "s3://BUCKET/FOLDER"),
    ("sagemaker", "reuse_profile"): (r"s3://[^/]+/.+", "s3://BUCKET/FOLDER, with profile.json"),
    ("kubeflow", "input_data"): (r"pvc://[^/]+(/.*)?", "pvc://CLAIM/FOLDER"),
    ("sagemaker", "instance_type"): (r"(ml\.)?[a-z0-9-]+\.[a-z0-9-]+", "ml.g5.xlarge"),
    ("sagemaker", "model_group"): (r"[a-zA-Z0-9](-*[a-zA-Z0-9])*", "letters, digits and dashes"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldParameter:
    """A parameter's value for a run.

    Attributes:
        name: Its name in the uploaded pipeline.
        own: The workload's parameter; None: one that the project's own pipeline added.
    """

    name: str
    value: str
    own: Parameter | None


def told_parameters(
    texts: Sequence[str], *, workload: Workload, declared: Mapping[str, Kind], target: str
) -> list[ToldParameter]:
    """Returns the parameters of NAME=VALUE texts, checked.

    Args:
        texts: In the workload's, the service's or the script's spelling.
        workload: The workload whose pipeline is uploaded.
        declared: Names and kinds of the pipeline's parameters.
        target: sagemaker or kubeflow.

    Raises:
        UsageError: For an unknown name, a name that is given twice, or a value that would fail in
            a step of the run.
    """
    found: list[ToldParameter] = []
    spelt: list[tuple[str, str]] = []
    for text in texts:
        typed, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--param {text} is not NAME=VALUE", fix="for example epochs=3")
        own = parameter_named(typed, workload=workload)
        if own:
            typed = own.name
        name = spelt_as(typed.strip(), declared)
        if name not in declared:
            raise UsageError(
                f"the uploaded pipeline has no parameter {name}",
                fix=nearest(name, sorted(declared))
                + f"; a new one: stoker upload {target} WORKLOAD",
            )
        value = value.strip()
        checked_name = name
        if own:
            value = parse([text], workload=workload)[own.name]
            checked_name = own.name
        value = _of_kind(name, value, declared[name], own=own)
        _check_value(checked_name, value, target=target, shown=name)
        found.append(ToldParameter(name=name, value=value, own=own))
        spelt.append((name, text))
    refuse_doubles(spelt)
    return found


def _of_kind(name: str, value: str, kind: Kind, *, own: Parameter | None) -> str:
    """Returns a value as the uploaded pipeline's kind has it."""
    uploaded = ""
    if own and own.kind != kind:
        uploaded = ", as the uploaded pipeline has it"
    if kind == "integer":
        whole = whole_number(value)
        if whole is None:
            raise UsageError(
                f"{name}={value}: expected a whole number{uploaded}",
                fix="a number without a point; if the workload has changed, upload it first",
            )
        return whole
    if kind == "number" and not is_number(value):
        raise UsageError(f"{name}={value}: expected a number{uploaded}", fix="such as 0.5 or 1e-3")
    if kind == "boolean":
        if truth_value(value) not in ("true", "false"):
            raise UsageError(f"{name}={value} is not possible{uploaded}", fix="use true, false")
        return truth_value(value)
    return value


def _check_value(name: str, value: str, *, target: str, shown: str) -> None:
    if not value and name in _NEEDED:
        raise UsageError(
            f"{shown} is empty",
            where=f"--param {shown}=",
            fix="name one, or leave the parameter out: the run then has the workload's",
        )
    pattern, example = _ADDRESSES.get((target, name), (".*", ""))
    if value and not re.fullmatch(pattern, value, re.DOTALL):
        raise UsageError(
            f"{shown}={value}: expected {example}",
            where=f"--param {shown}",
            fix="correct it, or leave the parameter out: the run then has the workload's",
        )
    if name == "instance_count" and value == "0":
        raise UsageError(
            f"{shown}=0: a run has at least one host", where=f"--param {shown}", fix="use 1 or more"
        )
    if (target, name) == ("kubeflow", "reuse_profile") and value:
        _check_profile(value, shown=shown)


def _check_profile(value: str, *, shown: str) -> None:
    """Refuses what is neither a profile's text nor a file with it."""
    where = f"--param {shown}"
    if not value.lstrip().startswith("{"):
        file = Path(value)
        if not file.is_file():
            raise UsageError(f"no such file: {value}", where=where, fix="name a profile.json")
        value = file.read_text(errors="replace")
    try:
        json.loads(value)
    except ValueError as err:
        raise UsageError(
            f"this is not a profile.json: {err}",
            where=where,
            fix="name the profile.json that stoker profile wrote, or give its text",
        ) from None
