r"""Limits of AWS's APIs that botocore's models know and botocore does not check.

botocore checks types, required parts and minima. Its models also have maxima, patterns and choices,
which the service checks when it is asked: after an upload, or in the middle of a pipeline. So they
are checked before: of a training job's request by `sagemaker/checks.py` (`problems`), of each call
by `aws.py`, of a pipeline's steps by `pipelines/sagemaker/limits.py`.

A pattern is one of Java's, and the whole value must match it ("Member must satisfy regular
expression pattern"), whether it has `^` and `$` or not. `\w`, `\d` and `\s` are ASCII's there;
`\p{L}` and its like are categories of Unicode. A pattern that cannot be read here is not checked:
better asked of the service than refused wrongly.
"""

import functools
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from stoker.errors import MissingExtraError
from stoker.records import nearest

if TYPE_CHECKING:
    from botocore.model import ServiceModel

# Choices that grow with the months: a newer one than botocore's model is for the service to judge.
_GROWING = re.compile(r"InstanceType|Region")
# Variables of a pipeline, which get their values in a run.
_VARIABLES = ("Get", "Std:Join", "Std:JsonGet")
_SHOWN_CHARACTERS = 60
_SHOWN_CHOICES = 8
# A longer text is measured, not matched: a pattern may take time that grows faster than the text.
_MAX_MATCHED = 32768
_CATEGORY = re.compile(r"\\p\{(\w+)\}")
# Java's names of what is ASCII's.
_ASCII = {"Alnum": "A-Za-z0-9", "Alpha": "A-Za-z", "Digit": "0-9", "Upper": "A-Z", "Lower": "a-z"}
# Stand for the other characters of a category, one for each: they are in no text that is matched.
_FIRST_STAND_IN = 0xE000
_CATEGORIES = (
    "Lu",
    "Ll",
    "Lt",
    "Lm",
    "Lo",
    "Mn",
    "Mc",
    "Me",
    "Nd",
    "Nl",
    "No",
    "Zs",
    "Zl",
    "Zp",
    "Pc",
    "Pd",
    "Ps",
    "Pe",
    "Pi",
    "Pf",
    "Po",
    "Sm",
    "Sc",
    "Sk",
    "So",
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
)
_STAND_INS = {name: chr(_FIRST_STAND_IN + at) for at, name in enumerate(_CATEGORIES)}

# No model has these. Of a tag's key: "Tagging AWS resources"; of an object's key in S3, in bytes of
# UTF-8: "Naming Amazon S3 objects".
_OF_AWS = "aws:"
MAX_KEY_BYTES = 1024

RequestPath = tuple[str | int, ...]


class ModelShape(Protocol):
    """The part of botocore's shapes that is used: `members`, `member`, `key`, `value` by type."""

    name: str
    type_name: str
    metadata: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OverLimit:
    """A value that the service would refuse.

    Attributes:
        path: Keys and positions from the request's top.
        what: The limit and the value, shortened: "has 70 characters, at most 63: 'aaa...'".
        is_growing: The value is none of the choices of a list that AWS extends: perhaps a newer
            one than the installed botocore knows.
        nearest: The nearest choice in words, if it is none of them.
    """

    path: RequestPath
    what: str
    is_growing: bool = False
    nearest: str = ""

    @property
    def place(self) -> str:
        """The path in the API's words: InputDataConfig[0].ChannelName."""
        return path_text(self.path)


def path_text(path: RequestPath) -> str:
    words = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(words).removeprefix(".")


@functools.cache
def service_model(service: str) -> "ServiceModel":
    """Returns botocore's model of a service, without a client: that would need a region."""
    try:
        from botocore.loaders import Loader
        from botocore.model import ServiceModel
    except ImportError as err:
        raise MissingExtraError.of(err, extra="aws") from None
    return ServiceModel(Loader().load_service_model(service, "service-2"))


def is_training_type(name: str) -> bool:
    """Whether SageMaker trains on a type, by botocore's model; without botocore: no."""
    try:
        shape = service_model("sagemaker").shape_for("TrainingInstanceType")
    except MissingExtraError:
        return False
    return name in getattr(shape, "enum", ())


def input_shape(service: str, operation: str) -> ModelShape:
    return cast("ModelShape", service_model(service).operation_model(operation).input_shape)


def over_limits(value: object, shape: ModelShape, path: RequestPath = ()) -> Iterator[OverLimit]:
    """Yields where a value, or a part of it, is beyond the limits of its shape.

    Variables of a pipeline, values of a wrong type and unknown keys are passed over.

    Args:
        value: As it is given to botocore.
        shape: The value's shape in the service's model.
        path: Of the value, in the request.
    """
    if is_variable(value):
        return
    yield from _of_value(value, shape, path)
    members: Mapping[str, ModelShape] = getattr(shape, "members", {})
    if shape.type_name == "structure" and isinstance(value, Mapping):
        for name in (name for name in value if name in members):
            yield from over_limits(value[name], members[name], (*path, name))
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for name, item in value.items():
            for problem in _of_value(name, _part(shape, "key"), (*path, str(name))):
                yield OverLimit(problem.path, f"the name {problem.what}")
            yield from over_limits(item, _part(shape, "value"), (*path, str(name)))
    elif shape.type_name == "list" and isinstance(value, list | tuple):
        for position, item in enumerate(value):
            yield from over_limits(item, _part(shape, "member"), (*path, position))


def is_variable(value: object) -> bool:
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value)) in _VARIABLES


def _part(shape: ModelShape, name: str) -> ModelShape:
    return cast("ModelShape", getattr(shape, name))


def _of_value(value: object, shape: ModelShape, path: RequestPath) -> Iterator[OverLimit]:
    if isinstance(value, bool):
        return
    number, unit = _measure(value, shape)
    least = shape.metadata.get("min")
    most = shape.metadata.get("max")
    if number is not None and isinstance(most, int | float) and number > most:
        yield OverLimit(path, f"{unit.format(number)}, at most {most}{_shown(value)}")
    elif number is not None and isinstance(least, int | float) and number < least:
        yield OverLimit(path, f"{unit.format(number)}, at least {least}{_shown(value)}")
    elif isinstance(value, str) and shape.type_name == "string":
        yield from _of_text(value, shape, path)


def _measure(value: object, shape: ModelShape) -> tuple[float | None, str]:
    kind = shape.type_name
    if kind == "string" and isinstance(value, str):
        return len(value), "has {} characters"
    if kind in ("list", "map") and isinstance(value, list | tuple | Mapping):
        return len(value), "has {} entries"
    if kind in ("integer", "long", "float", "double") and isinstance(value, int | float):
        return value, "is {}"
    return None, ""


def _of_text(value: str, shape: ModelShape, path: RequestPath) -> Iterator[OverLimit]:
    choices = tuple(cast("list[str]", shape.metadata.get("enum") or ()))
    if choices and value not in choices:
        shown = ", ".join(choices[:_SHOWN_CHOICES])
        more = f", and {len(choices) - _SHOWN_CHOICES} more" if choices[_SHOWN_CHOICES:] else ""
        is_growing = bool(_GROWING.search(shape.name))
        what = f"is none of {shown}{more}{_shown(value)}"
        yield OverLimit(path, what, is_growing, nearest(value, choices))
    pattern = str(shape.metadata.get("pattern") or "")
    if pattern and not can_match(pattern, value):
        yield OverLimit(path, f"does not match {pattern}{_shown(value)}")


def _shown(value: object) -> str:
    if not isinstance(value, str):
        return ""
    cut = value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."
    return f": {cut!r}"


def can_match(pattern: str, value: str) -> bool:
    """Returns whether the whole value matches; True where the pattern cannot be read here."""
    readable = _readable(pattern)
    if readable is None or len(value) > _MAX_MATCHED:
        return True
    has_categories = _CATEGORY.search(pattern) is not None
    text = _with_stand_ins(value) if has_categories else value
    return readable.fullmatch(text) is not None


@functools.cache
def _readable(pattern: str) -> re.Pattern[str] | None:
    """Returns Java's pattern as one of Python's; None if that cannot be said."""
    # The characters of XML: what lies beyond 16 bits is written there as pairs of surrogates.
    text = pattern.replace(r"\uD800\uDC00-\uDBFF\uDFFF", r"\U00010000-\U0010FFFF")
    # `$` is repeated in some, which means nothing.
    text = re.sub(r"\$\{\d+,\d+\}$", "", text)
    # A dash after a class of characters stands for itself.
    text = re.sub(r"(\\[wds])-", r"\1\\-", text)
    try:
        return re.compile(_CATEGORY.sub(_category, text), re.ASCII)
    except (re.error, KeyError):
        return None


def _category(named: re.Match[str]) -> str:
    r"""Returns what stands for a `\p{...}` in a set: ASCII's characters and the stand-ins."""
    name = named[1]
    if name in _ASCII:
        return _ASCII[name]
    names = [each for each in _CATEGORIES if each.startswith(name)]
    if not names:
        raise KeyError(name)
    plain = [chr(code) for code in range(128) if unicodedata.category(chr(code)) in names]
    return re.escape("".join(plain)) + "".join(_STAND_INS[each] for each in names)


def _with_stand_ins(value: str) -> str:
    return "".join(
        each if each.isascii() else _STAND_INS[unicodedata.category(each)] for each in value
    )


def tag_problems(tags: object, path: RequestPath = ("Tags",)) -> Iterator[OverLimit]:
    """Yields the keys of tags that AWS keeps for itself, and keys that occur twice."""
    seen: set[str] = set()
    for position, tag in enumerate(tags if isinstance(tags, list) else ()):
        key = tag.get("Key") if isinstance(tag, Mapping) else None
        if not isinstance(key, str):
            continue
        if key.lower().startswith(_OF_AWS):
            what = f"begins with {_OF_AWS}, which AWS keeps for itself{_shown(key)}"
            yield OverLimit((*path, position, "Key"), what)
        if key in seen:
            yield OverLimit((*path, position, "Key"), f"is another tag's key, too{_shown(key)}")
        seen.add(key)


def object_problem(key: str) -> str:
    """Returns why S3 would refuse an object's key; empty: it would not."""
    nbytes = len(key.encode(errors="surrogatepass"))
    if nbytes > MAX_KEY_BYTES:
        return f"its key has {nbytes} bytes, at most {MAX_KEY_BYTES}"
    return ""
