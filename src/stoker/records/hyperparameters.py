"""Hyperparameters as texts: encoded as SageMaker's SDK does, and as arguments of a command.

SageMaker's API stores texts. The SDK writes each value as JSON, a text too, so that "1.10" comes
back as a text and not as a number. As arguments one rule holds: true is `--name`, false and null
leave it out, a list is `--name a b`, and all else is `--name value`; sorted by name.
"""

import json
from collections.abc import Mapping
from typing import Annotated, cast

import msgspec

from stoker.records.base import Document, Json, Scalar

_Nested = Annotated[object, msgspec.Meta(extra_json_schema={"title": "JSON"})]
# As many characters as SageMaker allows.
HyperparameterName = Annotated[str, msgspec.Meta(pattern="^[^=]+$", max_length=256)]
Hyperparameters = dict[HyperparameterName, Scalar | list[_Nested] | dict[str, _Nested]]


def encoded(values: Document) -> dict[str, str]:
    """Returns hyperparameters as SageMaker's SDK encodes them: each value as JSON."""
    return {name: json.dumps(value) for name, value in values.items()}


def decoded(text: Json) -> Json:
    """Returns a hyperparameter's value as SageMaker's toolkit reads it: JSON, else the text."""
    if not isinstance(text, str):
        return text
    try:
        # SageMaker's SDK writes JSON, users of boto3 plain words.
        value: Json = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value


def arguments(values: Document) -> list[str]:
    """Returns hyperparameters as arguments; a name of one letter is a short option: `-k 3`."""
    words: list[str] = []
    for name, value in sorted(values.items()):
        if value is None or value is False:
            continue
        words.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, list | tuple):
            words += [argument(part) for part in value]
        elif value is not True:
            words.append(argument(value))
    return words


def argument(value: Json) -> str:
    """Returns a value as an argument: a text as it is, 0.1, True; a list or mapping as JSON."""
    if isinstance(value, list | tuple | Mapping):
        return json.dumps(value)
    if value is None:
        return ""
    return str(value)


def shown(value: Json) -> str:
    """Returns a value for people: a text as it is, others as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def values_of(hyperparameters: Hyperparameters) -> dict[str, Json]:
    """Returns a record's hyperparameters with the type of JSON."""
    return cast(dict[str, Json], hyperparameters)


def record_of(values: Document) -> Hyperparameters:
    """Returns hyperparameters with the type of a record's field."""
    return cast(Hyperparameters, dict(values))
