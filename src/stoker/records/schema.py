"""JSON Schema of a record, with descriptions from the docstrings of the records."""

import inspect
import re
from collections.abc import Iterator

import msgspec

from stoker.records.base import Json, Record

_ENTRY = re.compile(r"    (\w+): (.*)")


def schema_of(kind: type[Record]) -> dict[str, Json]:
    schema = msgspec.json.schema(kind)
    kinds = {each.__name__: each for each in _kinds_below(Record)}
    for name, definition in schema["$defs"].items():
        definition["description"] = purpose_of(kinds[name])
        texts = field_texts(kinds[name])
        # Inherited keys come last: a workload begins with its name.
        own = kinds[name].__annotations__
        definition["properties"] = {
            key: {**described, "description": texts.get(key, "")}
            for key, described in sorted(
                definition["properties"].items(), key=lambda each: each[0] not in own
            )
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def purpose_of(kind: type) -> str:
    """Returns the docstring of a class without the texts of its fields."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:\n")[0]


def field_texts(kind: type) -> dict[str, str]:
    """Returns the text of each field from the docstrings, inherited fields included."""
    texts: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        name = ""
        # Its own only: a class without a docstring shows its base class's.
        docstring = inspect.cleandoc(vars(each).get("__doc__") or "")
        for line in docstring.partition("\nAttributes:\n")[2].splitlines():
            entry = _ENTRY.fullmatch(line)
            if entry:
                name = entry[1]
                texts[name] = entry[2]
            elif name and line.startswith("     "):
                texts[name] += f" {line.strip()}"
            elif line:
                break
    return texts


def _kinds_below(kind: type[Record]) -> Iterator[type[Record]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds_below(each)
