"""Hyperparameters as texts: encoded as SageMaker's SDK does, decoded as its toolkit does.

SageMaker's API stores texts. The SDK (`EstimatorBase._json_encode_hyperparameters`) writes each
value as JSON, a text too. So the toolkit (`environment.read_hyperparameters`), which tries to
read JSON, gives a script the text "1.10" back as a text, and not as a number.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal, cast

import msgspec

from stoker.errors import UsageError
from stoker.records.base import Document, Json, Place, Record, Scalar, nearest

_Nested = Annotated[object, msgspec.Meta(extra_json_schema={"title": "JSON"})]
# As many characters as SageMaker allows.
HyperparameterName = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Hyperparameters = dict[HyperparameterName, Scalar | list[_Nested] | dict[str, _Nested]]

# What neither an argument of a command nor a variable can hold.
_NUL = "\0"
OptionType = Literal["str", "int", "float", "bool", "flag", "switch", "words"]
# How each is written into a command, in the variable that tells the launcher: one letter for each
# hyperparameter, as SageMaker allows 512 characters. `v` is what has no option.
_FORMS: Mapping[OptionType, str] = MappingProxyType(
    {"str": "o", "int": "o", "float": "o", "bool": "o", "flag": "f", "switch": "s", "words": "w"}
)


class ScriptOption(Record, frozen=True, kw_only=True):
    """What the script says about one of its options, a hyperparameter; null leaves it out.

    Attributes:
        type: Its value. float: 0 is 0.0, so that a run may set 0.01; flag: true is --name, false
            is nothing; switch: --name or --no-name; words: blanks part words, each of which is an
            argument, as in --name 30 60 90; all others: --name value.
        help: What it does, for consoles of pipelines.
        choices: Values that the script takes. None: any.
    """

    type: OptionType = "str"
    help: str = ""
    choices: tuple[Scalar, ...] | None = None


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
    if isinstance(text, str):
        return text[1:-1]
    return text


def arguments(values: Document, forms: str = "") -> list[str]:
    """Returns hyperparameters as the toolkit's `mapping.to_cmd_args` writes them, in their order.

    A name of one letter is a short option: `-k 3`.

    Args:
        values: Decoded hyperparameters.
        forms: As `forms_of` gives them; another length than the names': none is known.
    """
    form_of = dict(zip(sorted(values), forms, strict=True)) if len(forms) == len(values) else {}
    words: list[str] = []
    for name, value in values.items():
        words += _words_of(name, value, form_of.get(name, "v"))
    return words


def forms_of(values: Document, options: Mapping[str, ScriptOption]) -> str:
    """Returns a letter for each of the sorted names: how it is written; empty: as usual, all."""
    if not options:
        return ""
    return "".join(
        _FORMS[options[name].type] if name in options else "v" for name in sorted(values)
    )


def _words_of(name: str, value: Json, form: str) -> list[str]:
    option = f"--{name}" if len(name) > 1 else f"-{name}"
    if form == "v":
        return [option, argument(value)]
    if value is None or value == "":
        return []
    if form in ("f", "s"):
        # Services may spell a truth value as Python does.
        is_on = value is True or str(value).lower() in ("true", "1")
        negative = [f"--no-{name}"] if form == "s" else []
        if is_on:
            return [option]
        return negative
    if form == "w":
        parts = value if isinstance(value, list | tuple) else _split(argument(value))
        if parts:
            return [option, *(argument(part) for part in parts)]
        return []
    return [option, argument(value)]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        # An open quote.
        return text.split()


def argument(value: Json) -> str:
    """Returns a value as an argument: True, 0.1, [1, 2]; null is empty, a mapping is `a=1,b=2`."""
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in sorted(value.items()))
    if value is None:
        return ""
    return str(value)


def shown(value: Json) -> str:
    """Returns a value for people: a text as it is, others as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def order_of(values: Document) -> tuple[int, ...]:
    """Returns each name's place among the sorted names, in the order as written.

    Empty if they are sorted. Services keep no order, and a variable of SageMaker has 512
    characters: too few for 100 names.
    """
    names = sorted(values)
    places = {name: place for place, name in enumerate(names)}
    if [*values] == names:
        return ()
    return tuple(places[name] for name in values)


def in_order(values: Document, order: Sequence[int]) -> dict[str, Json]:
    """Returns hyperparameters in the order of `order_of`; sorted, as in the toolkit, without it."""
    names = sorted(values)
    if order and sorted(order) == [*range(len(names))]:
        return {names[place]: values[names[place]] for place in order}
    return {name: values[name] for name in names}


def values_of(hyperparameters: Hyperparameters) -> dict[str, Json]:
    """Returns a record's hyperparameters with the type of JSON."""
    return cast(dict[str, Json], hyperparameters)


def record_of(values: Document) -> Hyperparameters:
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


def check_options(options: Mapping[str, ScriptOption], values: Document, place: Place) -> None:
    """Raises UsageError for an option without a hyperparameter, or whose value it cannot have."""
    for name, option in options.items():
        where = place.at(f"options.{name}")
        if name not in values:
            what = f"there is no hyperparameter {name}"
            fix = f"{nearest(name, sorted(values))}; null leaves it out of the command"
            raise UsageError(what, where=where, fix=fix)
        value = values[name]
        if value is None:
            continue
        at = place.at(f"hyperparameters.{name}")
        if option.type in ("flag", "switch") and not isinstance(value, bool):
            what = f"{name} is a {option.type}, and {shown(value)} is neither true nor false"
            raise UsageError(what, where=at, fix="write true or false")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if option.type in ("int", "float") and not is_number:
            what = f"{name} is a number ({option.type}), and {shown(value)} is not a number"
            raise UsageError(what, where=at, fix="write a number")
        if option.choices is not None and option.type != "words" and value not in option.choices:
            choices = ", ".join(shown(choice) for choice in option.choices)
            raise UsageError(
                f"{name}: {shown(value)} is not possible", where=at, fix=f"use {choices}"
            )


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
