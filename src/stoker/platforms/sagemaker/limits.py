"""What SageMaker's own model says of a request: its limits, patterns and choices.

They are read from the model that botocore brings, without a client, a region or a network, so that
they are those of the installed version. botocore itself checks only a part of them.
"""

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from stoker.errors import UsageError
from stoker.records import Json

# Classes of characters as Java writes them, for use inside brackets.
_JAVA_CLASSES = {
    r"\p{L}": r"\w",
    r"\p{N}": r"\d",
    r"\p{Z}": " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000",
    r"\p{Alnum}": "a-zA-Z0-9",
}


class Shape(Protocol):
    """A part of the model, as botocore describes it."""

    name: str
    type_name: str
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A value that the model does not allow.

    Attributes:
        path: As in `InputDataConfig[0].ChannelName`.
        what: What is wrong, with the value and the limit.
    """

    path: str
    what: str


def choices(shape_name: str) -> tuple[str, ...]:
    """All values of an enumeration of the model, such as `TrainingInstanceType`."""
    return tuple(getattr(_shape(shape_name), "enum"))  # noqa: B009


def maximum(shape_name: str) -> int:
    """The largest number, length or count that the model allows, such as of `InstanceGroups`."""
    return int(str(_shape(shape_name).metadata["max"]))


def refusals(body: Mapping[str, Json]) -> list[str]:
    """What botocore would refuse to send: missing, unknown and wrongly typed members."""
    from botocore.validate import ParamValidator

    validate = getattr(ParamValidator(), "validate")  # noqa: B009
    report: str = validate(body, _request_shape()).generate_report()
    return [line for line in report.split("\n") if line]


def violations(body: Mapping[str, Json]) -> Iterator[Violation]:
    """What botocore would send although the model does not allow it.

    Args:
        body: A CreateTrainingJob request without `refusals`.
    """
    yield from _walk(body, _request_shape(), "")


def _walk(value: Json, shape: Shape, path: str) -> Iterator[Violation]:
    if isinstance(value, str):
        yield from _check_text(value, shape, path)
    elif isinstance(value, bool):
        return
    elif isinstance(value, int | float):
        yield from _check_bounds(int(value), shape, path, "is", str(value))
    elif isinstance(value, Mapping):
        yield from _walk_mapping(value, shape, path)
    elif isinstance(value, list | tuple):
        yield from _check_bounds(len(value), shape, path, "has", f"{len(value)} entries")
        member: Shape = getattr(shape, "member")  # noqa: B009
        for index, item in enumerate(value):
            yield from _walk(item, member, f"{path}[{index}]")


def _walk_mapping(value: Mapping[str, Json], shape: Shape, path: str) -> Iterator[Violation]:
    if shape.type_name == "structure":
        members: Mapping[str, Shape] = getattr(shape, "members")  # noqa: B009
        for key, item in value.items():
            yield from _walk(item, members[key], f"{path}.{key}" if path else key)
        return
    yield from _check_bounds(len(value), shape, path, "has", f"{len(value)} entries")
    key_shape: Shape = getattr(shape, "key")  # noqa: B009
    value_shape: Shape = getattr(shape, "value")  # noqa: B009
    for key, item in value.items():
        yield from _walk(key, key_shape, f"{path} (a name)")
        yield from _walk(item, value_shape, f"{path}.{key}")


def _check_text(text: str, shape: Shape, path: str) -> Iterator[Violation]:
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    length = f"{len(text)} characters ({shown})"
    yield from _check_bounds(len(text), shape, path, "has", length)
    allowed = tuple(getattr(shape, "enum", ()))
    if allowed and text not in allowed:
        listed = ", ".join(allowed) if len(allowed) < 12 else f"one of {len(allowed)} values"
        yield Violation(path=path, what=f"is {shown}, the service knows {listed}")
    pattern = shape.metadata.get("pattern")
    if pattern and not _compiled(str(pattern)).fullmatch(text):
        problem = "has a line break" if pattern == ".*" else f"does not match {pattern}"
        yield Violation(path=path, what=f"{problem}: {shown}")


def _check_bounds(
    number: int, shape: Shape, path: str, verb: str, shown: str
) -> Iterator[Violation]:
    for limit, is_wrong in (("max", int.__gt__), ("min", int.__lt__)):
        bound = shape.metadata.get(limit)
        if isinstance(bound, int) and is_wrong(number, bound):
            word = "most" if limit == "max" else "least"
            yield Violation(path=path, what=f"{verb} {shown}, the service takes at {word} {bound}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    for java, python in _JAVA_CLASSES.items():
        pattern = pattern.replace(java, python)
    return re.compile(pattern)


def _request_shape() -> Shape:
    return _shape("CreateTrainingJobRequest")


@functools.cache
def _shape(name: str) -> Shape:
    shape: Shape = getattr(_model(), "shape_for")(name)  # noqa: B009
    return shape


@functools.cache
def _model() -> object:
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError:
        raise UsageError(
            "botocore, which brings SageMaker's model, is not installed",
            fix="pip install 'stoker[aws]'",
        ) from None
    model: object = ServiceModel(Loader().load_service_model("sagemaker", "service-2"))
    return model
