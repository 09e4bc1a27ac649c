"""Parts that all records share: constrained numbers, reading with exact errors, and writing."""

import copy
import difflib
import functools
import hashlib
import json
import math
import os
import re
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Annotated, ClassVar, TypeVar, cast, get_args

import msgspec

from stoker.errors import UsageError
from stoker.units import without_unit

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

# A document may come from a host of the job: its parser needs some times its size.
MAX_TEXT_LENGTH = 64 << 20

# Free-form values of a record: scalars, and lists and mappings of them.
Scalar = None | bool | int | float | str
Value = Scalar | list[Scalar] | dict[str, Scalar]
# A number that may be NaN or infinite: null in a document, with its word in `not_numbers`.
AnyFloat = Annotated[float, msgspec.Meta(extra_json_schema={"type": ["number", "null"]})]

RecordT = TypeVar("RecordT", bound="Record")
_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_NAMED_KEY = re.compile(r"(?P<problem>unknown|missing required) field `(?P<key>[^`]*)`")
# A record's own check says so which of its keys it is about.
_OWN_CHECK = re.compile(r"`(?P<key>\w+)`: (?P<what>.+)")
# At most two digits behind the "e": a larger one would take long to write.
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d\d?)?", re.IGNORECASE)
_GOT = re.compile(r", got `[^`]*`$")
_TYPES = re.compile(r"`([^`]*)`")
_PLAIN_WORDS = {
    "object": "a mapping",
    "array": "a list",
    "str": "a text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
}
# What YAML gives a meaning inside of a list.
_MARKS = re.compile(
    r"[][{},:#&*!|>'\"%@`]|^(?:[-+]?[.\d]|(?:-|true|false|null|yes|no|on|off)$)", re.IGNORECASE
)
_SCHEMA = re.compile(r"^stoker\.(\w+)/v\d+$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[([^\]]*)\]")
_MISSING = object()
# Key of a document: the word of each value that is null because JSON lacks it, by its path.
_NOT_NUMBERS = "not_numbers"
_SECRETS = "secrets"
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def mapping(document: Json, *keys: str) -> Document:
    """Returns the mapping at the path `keys`; empty if there is none."""
    for key in keys:
        document = document.get(key) if isinstance(document, Mapping) else None
    return document if isinstance(document, Mapping) else {}


def mappings(document: Json, *keys: str) -> list[Document]:
    """Returns the mappings in the list at the path `keys`; empty if there is no list."""
    items = item_at(document, *keys) if keys else document
    if isinstance(items, list | tuple):
        return [item for item in items if isinstance(item, Mapping)]
    return []


def texts(document: Json, *keys: str) -> list[str]:
    """Returns the texts in the list at the path `keys`; empty if there is no list."""
    items = item_at(document, *keys)
    if isinstance(items, list | tuple):
        return [item for item in items if isinstance(item, str)]
    return []


def text(document: Json, *keys: str) -> str:
    """Returns the value at the path `keys` as text; empty if there is none."""
    return str(item_at(document, *keys) or "")


def item_at(document: Json, *keys: str) -> Json:
    """Returns what stands at the path `keys`; None if there is nothing."""
    *parents, last = keys
    return mapping(document, *parents).get(last)


# An unknown key is an error: ignored, it would silently leave a default in force.
class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything read from or written to a file; None means *not known*."""

    # Keys whose numbers may be NaN or infinite.
    takes_any_float: ClassVar[tuple[str, ...]] = ()


class Place:
    """Where keys are: the file's name, and line numbers if the parser keeps them.

    Args:
        source: Name of the file, or of another source of the document.
        lines: Line number by key path.
        overridden: Key paths that were set on the command line.
        overlays: Files that were merged into it, with line numbers by key path; the last one wins.
    """

    def __init__(
        self,
        source: str,
        lines: Mapping[str, int] | None = None,
        *,
        overridden: Sequence[str] = (),
        overlays: Sequence[tuple[str, Mapping[str, int]]] = (),
    ) -> None:
        self.source = source
        self._lines = lines or {}
        self._overridden = overridden
        self._overlays = overlays

    def at(self, path: str) -> str:
        """Returns `file:line, key path` with as much of it as is known."""
        option = self._option_of(path)
        if option is not None:
            return f"--set {option}=..., key {path}"
        for file, lines in reversed(self._overlays):
            if path in lines:
                return f"{file}:{lines[path]}, key {path}"
        probe = path
        # A missing key has no line, but the mapping that lacks it has.
        while probe and probe not in self._lines:
            probe = probe.rpartition(".")[0] if "." in probe else ""
        line = self._lines.get(probe)
        head = f"{self.source}:{line}" if line else self.source
        if path:
            return f"{head}, key {path}"
        return head

    def is_overridden(self, path: str) -> bool:
        return self._option_of(path) is not None

    def _option_of(self, path: str) -> str | None:
        keys = (k for k in self._overridden if path == k or path.startswith((f"{k}.", f"{k}[")))
        return next(keys, None)


def convert(document: Json, kind: type[RecordT], place: Place) -> RecordT:
    """Converts a parsed document into a record.

    Raises:
        UsageError: With the key, what was expected and found, and the nearest known key.
    """
    # Parsers of JSON and YAML accept NaN and Infinity, which spoil every later sum.
    _refuse_not_finite(document, place, "", allowed=kind.takes_any_float)
    _check_schema(document, kind, place)
    if kind.takes_any_float and isinstance(document, Mapping):
        document = _with_words(document, kind.takes_any_float)
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as err:
        raise _explain(str(err), document, kind, place) from None


def read_json(path: Path | str, kind: type[RecordT]) -> RecordT:
    """Reads a record from a JSON file, or the document itself: a text that begins with a brace.

    Raises:
        UsageError: If the file is missing, is not JSON, or is another record.
    """
    # Steps of a pipeline get records as text where they share no folder.
    is_inline = isinstance(path, str) and path.lstrip().startswith("{")
    text = str(path) if is_inline else read_text(path)
    path = "the record's document" if is_inline else path
    try:
        # Without the hook, the last of two equal keys would win silently.
        document = json.loads(text, object_pairs_hook=_unique_keys)
    except ValueError as err:
        if not is_inline and Path(path).suffix in (".yaml", ".yml"):
            wanted = kind.__name__.lower()
            raise UsageError(
                f"expected a {wanted} in JSON, found a workload",
                where=str(path),
                fix=f"give the {wanted}.json that stoker wrote; {path} goes to --workload",
            ) from None
        raise UsageError(
            f"not a JSON document: {err}",
            where=str(path),
            fix="let stoker write it again, or repair it",
        ) from None
    return convert(document, kind, Place(str(path)))


def read_text(path: Path | str) -> str:
    """Returns the text of a file. Raises UsageError if it cannot be read."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_LENGTH + 1)
    except FileNotFoundError:
        raise UsageError(
            f"no such file: {path}", where=f"folder {os.getcwd()}", fix="check the path"
        ) from None
    except (OSError, UnicodeDecodeError) as err:
        raise UsageError(
            f"cannot read {path}: {err}", fix="check the file and its permissions"
        ) from None
    if len(text) > MAX_TEXT_LENGTH:
        raise UsageError(
            f"{path} is too large: more than {MAX_TEXT_LENGTH} characters", fix="check the file"
        )
    return text


def to_json(record: Record) -> str:
    """Returns the record as JSON text with a final newline, without fields that are None."""
    return json.dumps(to_document(record), indent=2, allow_nan=False) + "\n"


def to_document(record: msgspec.Struct) -> dict[str, Json]:
    """Returns the record as plain dicts, lists and scalars, without fields that are None.

    JSON has no NaN and no infinities: each is null, with its word in `not_numbers`.
    """
    words: dict[str, str] = {}
    document = cast(dict[str, Json], finite(_document(record), words))
    is_named = _NOT_NUMBERS in record.__struct_fields__
    if words and is_named:
        return {**document, _NOT_NUMBERS: words}
    return document


def finite(value: Json, words: dict[str, str], path: str = "") -> Json:
    """Returns the value with null for each number that is not finite.

    Args:
        value: A document, or a part of one.
        words: Gets NaN, Infinity or -Infinity by the key path of each.
        path: Key path of `value`; empty for a whole document.
    """
    if isinstance(value, float) and not math.isfinite(value):
        words[path] = word_of(value)
        return None
    if isinstance(value, Mapping):
        return {key: finite(item, words, path_below(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item, words, f"{path}[{index}]") for index, item in enumerate(value)]
    return value


def path_below(path: str, key: object) -> str:
    """Returns the key path of a part; `path` is empty for the whole document."""
    if path:
        return f"{path}.{key}"
    return str(key)


def word_of(value: float) -> str:
    """Returns JavaScript's and Python's word for a value that is not finite: NaN, -Infinity."""
    return json.dumps(value)


def float_of(word: str) -> float | None:
    """Returns the value that `word_of` gives this word, or None for another word."""
    return _WORDS.get(word)


def _document(record: msgspec.Struct) -> dict[str, Json]:
    return {
        name: _plain(value)
        for attribute, name in names_of(type(record))
        if (value := getattr(record, attribute)) is not None
    }


# msgspec inspects all annotations on each call.
@functools.cache
def names_of(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Returns each field's name in Python and in documents, in the documents' order."""
    # Inherited keys come last, so that a workload begins with its name.
    declared = kind.__annotations__
    fields = sorted(msgspec.structs.fields(kind), key=lambda field: field.name not in declared)
    return tuple((field.name, field.encode_name) for field in fields)


def write_json(path: Path | str, record: Record) -> None:
    write_text(path, to_json(record))


def write_text(path: Path | str, text: str) -> None:
    """Writes a file atomically: temporary file, fsync, rename. Raises UsageError if it cannot."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not mkstemp, whose mode ignores the umask; reading the umask sets it for all threads.
        temporary = target.parent / f".{target.name}.{secrets.token_hex(4)}"
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except OSError as err:
        raise UsageError(f"cannot write {path}: {err}", fix="name another file") from None
    try:
        # A half of a surrogate pair, as names of files have, must not end a run.
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            # Before the rename: a crash in between would leave an empty file.
            os.fsync(stream.fileno())
        os.replace(temporary, target)
    except OSError as err:
        temporary.unlink(missing_ok=True)
        raise UsageError(
            f"cannot write {path}: {err}", fix="free some space, or name another file"
        ) from None


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


def _unique_keys(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise ValueError(f"duplicate key {key!r}")
    return dict(pairs)


def _plain(value: object) -> Json:
    if isinstance(value, msgspec.Struct):
        return _document(value)
    if isinstance(value, Mapping):
        # A null in a free-form mapping is a user's value: it stays.
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    plain: Json = msgspec.to_builtins(value)
    return plain


def _refuse_not_finite(
    value: Json, place: Place, path: str, *, allowed: Sequence[str] = ()
) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(
            f"{value} is not a finite number", where=place.at(path), fix="write a finite number"
        )
    if isinstance(value, Mapping):
        for key, item in value.items():
            if key not in allowed:
                _refuse_not_finite(item, place, path_below(path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_not_finite(item, place, f"{path}[{index}]")


def _with_words(document: Document, allowed: Sequence[str]) -> Document:
    """Returns the document with the values whose words are in `not_numbers`, without that key."""
    words = document.get(_NOT_NUMBERS)
    if not isinstance(words, Mapping):
        return document
    changed = {key: value for key, value in document.items() if key != _NOT_NUMBERS}
    for key in allowed:
        if key in changed:
            changed[key] = _with_floats(changed[key], key, words)
    return changed


def _with_floats(value: Json, path: str, words: Document) -> Json:
    if value is None:
        return float_of(str(words.get(path)))
    if isinstance(value, Mapping):
        return {key: _with_floats(item, f"{path}.{key}", words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_floats(item, f"{path}[{index}]", words) for index, item in enumerate(value)]
    return value


def _check_schema(document: Json, kind: type[Record], place: Place) -> None:
    expected = next((f.default for f in msgspec.structs.fields(kind) if f.name == "schema"), None)
    if expected is None:
        return
    if not isinstance(document, Mapping):
        kind_found = "nothing" if document is None else type(document).__name__
        raise UsageError(f"expected a mapping ({expected}), found {kind_found}", where=place.at(""))
    # Optional in workloads only, which are written by hand.
    schema = document.get("schema", expected if kind.__name__ == "Workload" else None)
    if schema != expected:
        match = _SCHEMA.match(str(schema))
        wanted = kind.__name__.lower()
        fix = "write it again with this version of stoker"
        if match and match[1] != wanted:
            fix = f"this is a {match[1]}: give a {wanted} here"
        schema_words = "no schema" if schema is None else repr(schema)
        raise UsageError(
            f"wrong file: expected {expected}, found {schema_words}",
            where=place.at("schema"),
            fix=fix,
        )


def _explain(message: str, document: Json, kind: type[Record], place: Place) -> UsageError:
    match = _PATH.search(message)
    path = _filled((match.group("path") if match else "").lstrip("."), message, document, kind)
    what = message[: match.start()] if match else message
    if named := _NAMED_KEY.search(what):
        key = named["key"]
        where = place.at(path_below(path, key))
        if named["problem"] == "missing required":
            return UsageError(f"key {key} is missing", where=where, fix=_see(kind))
        fix = _moved_key(key, kind, path) or nearest(key, _known_keys(kind, path))
        return UsageError(f"unknown key {key}", where=where, fix=fix)
    if check := _OWN_CHECK.fullmatch(what):
        path, what = path_below(path, check["key"]), check["what"]
    value = _value_at(document, path)
    choices = _choices_at(kind, path)
    if choices and what.startswith("Invalid enum"):
        wrong = value if isinstance(value, str) else what.split("'")[1]
        return UsageError(
            f"{wrong!r} is not one of {', '.join(choices)}",
            where=place.at(path),
            fix=nearest(wrong, choices),
        )
    if choices and isinstance(value, bool | int | float):
        # A text in quotes would be no choice either.
        what = f"{json.dumps(value)} is not one of {', '.join(choices)}"
        return UsageError(what, where=place.at(path), fix=_see(kind))
    return _wrong_value(what, value, path=path, kind=kind, place=place)


def _choices_at(kind: type[Record], path: str) -> list[str]:
    # msgspec names only the wrong value; the valid ones are in the type.
    leaves = _types_at(kind, path)
    choices = [leaf for leaf in leaves if isinstance(leaf, str)]
    if bool in leaves:
        return [*choices, "true", "false"]
    return choices


def _wrong_value(
    what: str, value: object, *, path: str, kind: type[Record], place: Place
) -> UsageError:
    """Returns the error of a value of a wrong type or form.

    Args:
        what: msgspec's words, without the path.
        value: What stands there; `_MISSING` if it is not known.
        path: Of its key.
        kind: Type of the record.
        place: The file or command line.
    """
    expected = _TYPES.search(what)
    types = set(expected[1].split(" | ")) if expected else set()
    what = _TYPES.sub(_plain_words, _GOT.sub("", what[0].lower() + what[1:]))
    if "matching regex" in what and path == "name":
        what = "expected lower-case letters, digits and hyphens, at most 40"
    if path.partition(".")[0] == _SECRETS:
        # A secret's value may have been typed in place of its address.
        return UsageError(what, where=place.at(path), fix=_see(kind))
    shown = "" if value is _MISSING else f", found {value!r}"
    if len(shown) > 68:
        shown = f"{shown[:65]}..."
    fix = _corrected(path, value, types) or _see(kind)
    return UsageError(f"{what}{shown}", where=place.at(path), fix=fix)


def _corrected(path: str, found: object, types: set[str]) -> str:
    """Returns the corrected line if it is clear what was meant, else an empty text."""
    key = path.rpartition(".")[2].partition("[")[0]
    if isinstance(found, str) and "array" in types:
        # A command line written as one text.
        words = [json.dumps(word) if _MARKS.search(word) else word for word in found.split()]
        return f"{key}: [{', '.join(words)}]"
    if isinstance(found, Mapping) and "array" in types:
        return f"a list: {key}: [{{...}}], in place of {key}: {{...}}"
    if isinstance(found, bool | int | float) and "str" in types:
        return f'in quotes: "{json.dumps(found)}"'
    if isinstance(found, str) and types & {"int", "float"}:
        number = _number_in(found, types) or without_unit(found, name=key)
        return f"{key}: {number}" if number else ""
    if isinstance(found, str) and path == "name":
        name = re.sub(r"[^a-z0-9]+", "-", found.lower())[:40].strip("-")
        if name:
            return f"name: {name}"
        return ""
    return ""


def _number_in(found: str, types: set[str]) -> str:
    """Returns a number that is a text, for YAML as well (1e9), as it is to be written."""
    if not _NUMBER.fullmatch(found):
        return ""
    exact = Decimal(found)
    is_allowed = "float" in types or exact % 1 == 0
    return f"{exact:f}" if is_allowed else ""


def _plain_words(match: re.Match[str]) -> str:
    # null is not offered: leaving the key out has the same effect.
    words = [word for word in match.group(1).split(" | ") if word != "null"]
    return " or ".join(_PLAIN_WORDS.get(word, word) for word in words)


def _see(kind: type[Record]) -> str:
    return f"stoker schema {kind.__name__.lower()}     shows the expected keys"


def _filled(path: str, message: str, document: Json, kind: type[Record]) -> str:
    """Fills in the mapping key that msgspec's message leaves as `[...]`."""
    head, dots, tail = path.partition("[...]")
    document = copy.deepcopy(document)
    entries = _value_at(document, head)
    if not dots or not isinstance(entries, dict):
        return path
    # msgspec does not name the key: each entry is tried alone until one gives the same message.
    for key, item in list(entries.items()):
        entries.clear()
        entries[key] = item
        try:
            msgspec.convert(document, kind)
        except msgspec.ValidationError as err:
            if str(err) == message:
                return _filled(f"{head}.{key}{tail}", message, document, kind)
    return path


def _steps(path: str) -> list[str]:
    return [a or b for a, b in _STEP.findall("." + path if path[:1] not in ("", "[") else path)]


def _value_at(document: Json, path: str) -> object:
    value: object = document
    for step in _steps(path):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list | tuple) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return _MISSING
    return value


def _known_keys(kind: type[Record], path: str) -> list[str]:
    names: list[str] = []
    for leaf in _types_at(kind, path):
        if isinstance(leaf, type) and issubclass(leaf, msgspec.Struct):
            names += leaf.__struct_encode_fields__
    return names


def _moved_key(key: str, kind: type[Record], path: str) -> str:
    """Suggests the section that a key belongs to, where it is named without; empty: in none."""
    for section in _known_keys(kind, path):
        below = path_below(path, section)
        if key in _known_keys(kind, below):
            return f"did you mean {path_below(below, key)}?"
    return ""


def _types_at(kind: type[Record], path: str) -> list[object]:
    types: list[object] = [kind]
    for step in _steps(path):
        children: list[object] = []
        for parent in types:
            children += _children(parent, step)
        types = children
    return types


def _children(parent: object, step: str) -> list[object]:
    if isinstance(parent, type) and issubclass(parent, msgspec.Struct):
        hints = {f.encode_name: f.type for f in msgspec.structs.fields(parent)}
        return _leaves(hints.get(step))
    # Of a mapping the values, of a sequence the items: the last argument that is a type.
    return [*chain.from_iterable(map(_leaves, get_args(parent)[-2:]))]


def _leaves(hint: object) -> list[object]:
    arguments = get_args(hint)
    is_container = hasattr(hint, "__origin__") and hint.__origin__ in (dict, tuple, list)
    if not arguments or is_container:
        return [hint]
    return [*chain.from_iterable(map(_leaves, arguments))]
