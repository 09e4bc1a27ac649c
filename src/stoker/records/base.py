"""Parts that all records share: constrained numbers, reading with exact errors, and writing."""

import difflib
import hashlib
import json
import math
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec

from stoker.errors import UsageError

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Names = tuple[Name, ...]
# Of a command.
Command = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
# A registry's folders and a digest, which alone has 72 characters; 255 is SageMaker's own bound.
ImageName = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]

# JSON and YAML documents, as their parsers give them.
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Document = Mapping[str, Json]

# Free-form values of a record: scalars, and lists and mappings of them.
Scalar = None | bool | int | float | str
Value = Scalar | list[Scalar] | dict[str, Scalar]

RecordT = TypeVar("RecordT", bound="Record")
# msgspec's words on a key that a record must not have, and on a wrong choice; steps of its paths,
# of which `[...]` stands for a key of a mapping.
_UNKNOWN = re.compile(r"(unknown field|Invalid enum value) [`'](.*)[`']")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


def item_at(document: Json, *keys: str) -> Json:
    """Returns what stands at the path `keys`; None if there is nothing."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document


def mapping(document: Json, *keys: str) -> Document:
    """Returns the mapping at the path `keys`; empty if there is none."""
    item = item_at(document, *keys)
    return item if isinstance(item, Mapping) else {}


def mappings(document: Json, *keys: str) -> list[Document]:
    """Returns the mappings in the list at the path `keys`; empty if there is no list."""
    return [item for item in _items(document, *keys) if isinstance(item, Mapping)]


def texts(document: Json, *keys: str) -> list[str]:
    """Returns the texts in the list at the path `keys`; empty if there is no list."""
    return [item for item in _items(document, *keys) if isinstance(item, str)]


def text(document: Json, *keys: str) -> str:
    """Returns the value at the path `keys` as text; empty if there is none."""
    return str(item_at(document, *keys) or "")


def _items(document: Json, *keys: str) -> Sequence[Json]:
    item = item_at(document, *keys)
    return item if isinstance(item, list | tuple) else []


# An unknown key is an error: ignored, it would silently leave a default in force.
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything read from or written to a file; None means *not known*."""


class Place:
    """Where keys are.

    Args:
        source: Name of the file, or of another source of the document.
        places: `file:line`, or the option, that set a key, by key path.
    """

    def __init__(self, source: str, places: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._places = places or {}

    def at(self, path: str) -> str:
        """Returns `file:line, key path` with as much of it as is known."""
        probe = path
        # A missing key has no line, but the mapping that lacks it has.
        while probe and probe not in self._places:
            probe = probe[: max(probe.rfind("."), probe.rfind("["), 0)]
        head = self._places.get(probe, self.source)
        return f"{head}, key {path}" if path else head


def convert(document: Json, kind: type[RecordT], place: Place) -> RecordT:
    """Converts a parsed document into a record.

    Raises:
        UsageError: In msgspec's words, with the line, and the nearest known key or choice.
    """
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as err:
        what, _, path = str(err).partition(" - at `$")
    path = path.removesuffix("`").removeprefix(".")
    fix = f"stoker schema {kind.__name__.lower()}     shows the expected keys"
    if path == "schema":
        fix = f"give a {kind.__name__.lower()} of this version of stoker here"
    elif unknown := _UNKNOWN.search(what):
        schema = msgspec.json.schema(kind)
        names = _names_at(schema, _STEP.findall(path), schema["$defs"])
        fix = nearest(unknown[2], [*names])
        if unknown[1] == "unknown field":
            path = path_below(path, unknown[2])
    raise UsageError(what[0].lower() + what[1:], where=place.at(path), fix=fix)


def read_json(path: Path | str, kind: type[RecordT]) -> RecordT:
    """Reads a record from a JSON file, or the document itself: a text that begins with a brace.

    Raises:
        UsageError: If the file is missing, is not JSON, or is another record.
    """
    written, source = read_source(path)
    try:
        # NaN becomes a text, which is no number anywhere.
        document = json.loads(written, parse_constant=str)
    except ValueError as err:
        fix = f"give the {kind.__name__.lower()}.json that stoker wrote; a workload: --workload"
        raise UsageError(f"not a JSON document: {err}", where=source, fix=fix) from None
    return convert(document, kind, Place(source))


def read_source(path: Path | str) -> tuple[str, str]:
    """Returns a document's text and its name for errors: of a file, or the document itself.

    Steps of a pipeline get documents as text where they share no folder.
    """
    if str(path).lstrip().startswith("{"):
        return str(path), "the document that was given"
    return read_text(path), str(path)


def read_text(path: Path | str) -> str:
    """Returns the text of a file. Raises UsageError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        what = f"cannot read {path}: {getattr(err, 'strerror', None) or err}"
        raise UsageError(what, where=f"folder {os.getcwd()}", fix="check the path") from None


def to_json(record: Record) -> str:
    """Returns the record as JSON text with a final newline, without fields that are None."""
    return json.dumps(to_document(record), indent=2, allow_nan=False) + "\n"


def to_document(record: msgspec.Struct) -> dict[str, Json]:
    """Returns the record as plain dicts, lists and scalars, without fields that are None.

    JSON has no NaN and no infinities: their words stand for them, as texts.
    """
    values = msgspec.structs.asdict(record)
    return {name: _plain(value) for name, value in values.items() if value is not None}


def word_of(value: float) -> str:
    """Returns JavaScript's and Python's word for a value that is not finite: NaN, -Infinity."""
    return json.dumps(value)


def path_below(path: str, key: object) -> str:
    """Returns the key path of a part; `path` is empty for the whole document."""
    return f"{path}.{key}" if path else str(key)


def write_json(path: Path | str, record: Record) -> None:
    write_text(path, to_json(record))


def write_text(path: Path | str, text: str) -> None:
    """Writes a file atomically: temporary file, fsync, rename. Raises UsageError if it cannot."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A half of a surrogate pair, as names of files have, must not end a run.
        with temporary.open("x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            # Before the rename: a crash in between would leave an empty file.
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as err:
        with suppress(OSError):
            temporary.unlink()
        fix = "free some space, or name another file"
        raise UsageError(f"cannot write {path}: {err}", fix=fix) from None


def sha256_of(record: Record | Document) -> str:
    """Returns a digest of the content, whatever the order of keys: 64 hexadecimal digits."""
    text = json.dumps(_plain(record), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def nearest(word: str, names: Sequence[str]) -> str:
    """Suggests a fix for a misspelt word: the nearest known one, else all known ones."""
    close = close_match(word, names)
    if close:
        return f"did you mean {close}?"
    return "known are: " + ", ".join(sorted(names))


def close_match(word: str, names: Sequence[str]) -> str:
    """Returns the known word that a misspelt one most resembles; empty if none does."""
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.6)), "")


def _plain(value: object) -> Json:
    if isinstance(value, msgspec.Struct):
        return to_document(value)
    if isinstance(value, Mapping):
        # A null in a free-form mapping is a user's value: it stays.
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return word_of(value)
    return cast(Json, value)


def _names_at(schema: Document, path: Sequence[str], definitions: Document) -> Iterator[str]:
    """Yields the keys and the texts that a record may have at a path, by its JSON Schema."""
    reference = text(schema, "$ref").rpartition("/")[2]
    if reference:
        schema = mapping(definitions, reference)
    for option in mappings(schema, "anyOf"):
        yield from _names_at(option, path, definitions)
    if not path:
        yield from (*mapping(schema, "properties"), *texts(schema, "enum"))
        return
    inside = mapping(schema, "properties", path[0])
    if path[0].startswith("["):
        inside = mapping(schema, "items") or mapping(schema, "additionalProperties")
    yield from _names_at(inside, path[1:], definitions)
