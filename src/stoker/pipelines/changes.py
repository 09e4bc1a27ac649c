"""What an upload would change, by meaning: keys of the workload, files of the code, steps.

Pure: what is deployed comes from the service, what is wanted from the compiler.
"""

import contextlib
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker import archive
from stoker.errors import UsageError
from stoker.logs import printable
from stoker.platforms.packing import MAX_CODE_BYTES
from stoker.records import Json, Place, Workload, convert, to_document
from stoker.records.base import Document, mapping
from stoker.units import count

# A step's own name; deeper lists are compared as a whole.
_NAMED = ("Name", "name", "OutputName", "InputName", "ChannelName")
# The address of a package changes with its content, which is shown by files.
_TOLD_OTHERWISE = ("sagemaker.source",)
_MAX_LINES = 12
_MAX_NAMED = 3
_MAX_TEXT = 60
_INPUTS = re.compile(r's3://[^"\s]+?/stoker/inputs/[0-9a-f]{16}')
# Of the code, in the requests and commands of steps: its files are shown.
_CODE = re.compile(r'("STOKER_CODE_DIGEST": )"[0-9a-f]+"')


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineVersion:
    """A pipeline, deployed or compiled, with what its steps read.

    Attributes:
        document: The definition with the service's other settings of the pipeline.
        workload: The workload's document; empty: it could not be read.
        code: Digest of each file of the packed code; None: there is none, or it could not be read.
        derived: Names of the parameters whose defaults the workload gives.
    """

    document: Json
    workload: Document = field(default_factory=dict)
    code: Mapping[str, str] | None = None
    derived: Collection[str] = ()


def changed_lines(deployed: PipelineVersion, wanted: PipelineVersion) -> list[str]:
    """Returns a line for each difference that a person would name; empty: there is none."""
    if deployed.document == wanted.document:
        return []
    lines = [
        *_workload_lines(deployed.workload, wanted.workload),
        *_code_lines(deployed.code, wanted.code),
    ]
    was = _without_inputs(deployed.document)
    now = _without_inputs(wanted.document)
    lines += _document_lines(was, now, derived=wanted.derived, is_explained=bool(lines))
    # What stoker itself compiles otherwise, such as a newer version.
    return _cut(lines) or ["the definition, as another version of stoker or of a library writes it"]


def code_digests(package: bytes | None) -> Mapping[str, str] | None:
    """Returns a digest of each file of a packed folder; None without one, or if it is broken."""
    if package is None:
        return None
    digests = {}
    try:
        for opened, member in archive.members(
            io.BytesIO(package), max_bytes=2 * MAX_CODE_BYTES, max_members=archive.MAX_CODE_FILES
        ):
            text = member.linkname.encode(errors="surrogateescape")
            if member.isfile() and (content := opened.extractfile(member)):
                text = content.read()
            digest = hashlib.sha256(text + f"{member.mode}".encode())
            digests[member.name] = digest.hexdigest()
    except (tarfile.TarError, OSError):
        return None
    return digests


def inputs_of_definition(document: Json) -> str | None:
    """Returns the address of the inputs' folder that a definition names; None: none or several."""
    addresses: set[str] = set(_INPUTS.findall(json.dumps(document)))
    if len(addresses) == 1:
        return addresses.pop()
    return None


def workload_with_defaults(document: Json) -> Document:
    """Returns an uploaded workload with the keys that later versions of stoker have added."""
    with contextlib.suppress(UsageError):
        return mapping(to_document(convert(document, Workload, Place("the uploaded workload"))))
    return mapping(document)


def _without_inputs(document: Json) -> Json:
    text = _INPUTS.sub("INPUTS", json.dumps(document))
    text = _CODE.sub(r'\1"CODE"', text)
    changed: Json = json.loads(text)
    return changed


def _workload_lines(was: Document, now: Document) -> Iterator[str]:
    if not was or not now:
        return
    for key, old, new in _differences(was, now, ""):
        if key not in _TOLD_OTHERWISE:
            yield f"{key}: {_text(old)} -> {_text(new)}"


def _code_lines(was: Mapping[str, str] | None, now: Mapping[str, str] | None) -> Iterator[str]:
    if was is None or now is None:
        return
    changed = [name for name in now if name in was and now[name] != was[name]]
    added = [name for name in now if name not in was]
    removed = [name for name in was if name not in now]
    kinds = (("changed", changed), ("new", added), ("removed", removed))
    words = [
        f"{count(len(names), 'file')} {kind} ({_some(names)})" for kind, names in kinds if names
    ]
    if words:
        yield f"code: {', '.join(words)}"


def _document_lines(
    was: Json, now: Json, *, derived: Collection[str], is_explained: bool
) -> Iterator[str]:
    """Yields what differs in definitions and settings; names alone, if the workload explains it."""
    steps: list[str] = []
    for key, old, new in _differences(was, now, ""):
        parameter = _parameter_of(key)
        step = _step_of(key)
        if key == "PipelineDescription":
            continue
        if parameter and (is_explained and parameter in derived):
            continue
        if step and is_explained:
            steps.append(step)
        else:
            yield f"{_shown(key)}: {_text(old)} -> {_text(new)}"
    if steps:
        yield f"steps that change: {_some(list(dict.fromkeys(steps)), most=8)}"


def _parameter_of(key: str) -> str:
    """Returns the parameter that a key of a definition belongs to; empty: none."""
    match = re.search(r"(?:\.Parameters\[|inputDefinitions\.parameters\.)([\w-]+)", key)
    if match:
        return match[1]
    return ""


def _step_of(key: str) -> str:
    """Returns the step, the last one of nested ones, that a key belongs to; empty: none."""
    names: list[str] = re.findall(r"\.(?:Steps|IfSteps|ElseSteps)\[([^\]]+)\]", key)
    names += re.findall(r"\.(?:tasks|executors|components)\.([\w-]+)", key)
    if names:
        return names[-1].removeprefix("exec-").removeprefix("comp-")
    return ""


def _shown(key: str) -> str:
    """Returns a key of a definition without the parts that are the same in all of them."""
    return re.sub(r"^(PipelineDefinition|pipeline)\.", "", key)


def _differences(was: Json, now: Json, path: str) -> Iterator[tuple[str, Json, Json]]:
    """Yields (path, old, new) of what differs; None: it is not there."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in dict.fromkeys((*was, *now)):
            below = f"{path}.{key}".removeprefix(".")
            yield from _differences(was.get(key), now.get(key), below)
        return
    old = _by_name(was)
    new = _by_name(now)
    if old is not None and new is not None:
        for name in dict.fromkeys((*old, *new)):
            yield from _differences(old.get(name), new.get(name), f"{path}[{name}]")
    elif isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
        for index, (one, other) in enumerate(zip(was, now, strict=True)):
            yield from _differences(one, other, f"{path}[{index}]")
    elif was != now:
        yield path, was, now


def _by_name(items: Json) -> dict[str, Json] | None:
    """Returns a list of mappings that all have another name, by these; None for other values."""
    if not isinstance(items, list) or not items:
        return None
    by_name: dict[str, Json] = {}
    for item in items:
        name = _name_of(item)
        if not name or name in by_name:
            return None
        by_name[name] = item
    return by_name


def _name_of(item: Json) -> str:
    """Returns what an item of a list is called by; empty: it has no name, or is no mapping."""
    if not isinstance(item, Mapping):
        return ""
    return next((str(item[key]) for key in _NAMED if key in item), "")


def _text(value: Json) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        words = " ".join(printable(value).split()) or "(empty)"
    else:
        words = json.dumps(value, sort_keys=True)
    if len(words) <= _MAX_TEXT:
        return words
    return f"{words[: _MAX_TEXT - 3]}..."


def _some(names: Sequence[str], *, most: int = _MAX_NAMED) -> str:
    shown = ", ".join(printable(name) for name in names[:most])
    more = len(names) - most
    if more > 0:
        return f"{shown} and {more} more"
    return shown


def _cut(lines: Sequence[str]) -> list[str]:
    more = len(lines) - _MAX_LINES
    if more <= 0:
        return list(lines)
    return [*lines[:_MAX_LINES], f"and {more} more differences (--json has all of them)"]
