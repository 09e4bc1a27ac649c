"""Hyperparameters as texts: encoded as SageMaker's SDK does, decoded as its toolkit does.

SageMaker's API stores texts. The SDK (`EstimatorBase._json_encode_hyperparameters`) writes each
value as JSON, a text too. So the toolkit (`environment.read_hyperparameters`), which tries to
read JSON, gives a script the text "1.10" back as a text, and not as a number.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, cast

import msgspec

from stoker.errors import UsageError
from stoker.records.base import Json, Place, Scalar

_Nested = Annotated[object, msgspec.Meta(extra_json_schema={"title": "JSON"})]
# As many characters as SageMaker allows.
_HyperparameterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Hyperparameters = dict[_HyperparameterName, Scalar | list[_Nested] | dict[str, _Nested]]

# What neither an argument of a command nor a variable can hold.
_NUL = "\0"


def encoded(values: Mapping[str, Json]) -> dict[str, str]:
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


def driver_decoded(text: str) -> Json:
    """Returns a value that becomes the argument which a ModelTrainer's start program writes.

    The program of SageMaker's SDK 3 (`container_drivers/common/utils.py`) decodes twice and writes
    JSON: `true`, where the toolkit writes `True`.
    """
    value = decoded(text)
    written = shown(decoded(value))
    return value if argument(value) == written else written


def literal(text: Json) -> Json:
    """Returns what is between the quotes of a text, as it is."""
    return text[1:-1] if isinstance(text, str) else text


def arguments(values: Mapping[str, Json]) -> list[str]:
    """Returns hyperparameters as the toolkit's `mapping.to_cmd_args` writes them, in their order.

    A name of one letter is a short option: `-k 3`.
    """
    words = []
    for name, value in values.items():
        words += [f"--{name}" if len(name) > 1 else f"-{name}", argument(value)]
    return words


def argument(value: Json) -> str:
    """Returns a value as an argument: True, 0.1, [1, 2]; null is empty, a mapping is `a=1,b=2`."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    return "" if value is None else str(value)


def shown(value: Json) -> str:
    """Returns a value for people: a text as it is, others as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def order_of(values: Mapping[str, Json]) -> tuple[int, ...]:
    """Returns each name's place among the sorted names, in the order as written.

    Empty if they are sorted. Services keep no order, and a variable of SageMaker has 512
    characters: too few for 100 names.
    """
    names = sorted(values)
    places = {name: place for place, name in enumerate(names)}
    return () if [*values] == names else tuple(places[name] for name in values)


def in_order(values: Mapping[str, Json], order: Sequence[int]) -> dict[str, Json]:
    """Returns hyperparameters in the order of `order_of`; sorted, as in the toolkit, without it."""
    names = sorted(values)
    if order and sorted(order) == [*range(len(names))]:
        return {names[place]: values[names[place]] for place in order}
    return {name: values[name] for name in names}


def values_of(hyperparameters: Hyperparameters) -> dict[str, Json]:
    """Returns a record's hyperparameters with the type of JSON."""
    return cast(dict[str, Json], hyperparameters)


def record_of(values: Mapping[str, Json]) -> Hyperparameters:
    """Returns hyperparameters with the type of a record's field."""
    return cast(Hyperparameters, dict(values))


def check_hyperparameters(values: Mapping[str, object], place: Place) -> None:
    """Raises UsageError for hyperparameters that a command cannot be given, with their key."""
    for name, value in values.items():
        path = f"hyperparameters.{name}"
        if "=" in name or not _can_be_told(name):
            what = f"the name {name!r} cannot be a variable: SM_HP_{name.upper()}"
            raise UsageError(what, where=place.at(path), fix="use letters, digits, - and _")
        _check_value(value, path, place)


def _check_value(value: object, path: str, place: Place) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_value(name, path, place)
            _check_value(item, f"{path}.{name}", place)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_value(item, f"{path}[{index}]", place)
    elif isinstance(value, str):
        if not _can_be_told(value):
            what = f"{value!r} cannot be an argument of a command"
            raise UsageError(what, where=place.at(path), fix="leave such characters out")
    elif value is not None and not isinstance(value, bool | int | float):
        what = f"a {type(value).__name__} has no place in JSON: {value!r}"
        raise UsageError(what, where=place.at(path), fix="write it in quotes, as a text")


def _can_be_told(text: str) -> bool:
    """Whether arguments and variables can hold the text: no NUL, no half of a surrogate pair."""
    return _NUL not in text and not any("\ud800" <= character <= "\udfff" for character in text)
