"""Objects against the schemas of their CRDs, in strict form: a field nobody knows is an error.

A server prunes unknown fields without a word, so that a misspelt one is only missed when the job
runs. The schemas are those of JobSet and Kubeflow Trainer, without their descriptions; see NOTICE.
"""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files

from stoker.records import Json, nearest

Schema = Mapping[str, Json]

_FILES: Mapping[tuple[str, str], str] = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset.x-k8s.io_jobsets",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer.kubeflow.org_trainjobs",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainer.kubeflow.org_trainingruntimes",
}
_TEXTS: Json = {"type": "object", "additionalProperties": {"type": "string"}}
# CRDs leave an object's own metadata to the server.
_METADATA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 253},
        "namespace": {"type": "string", "minLength": 1, "maxLength": 63},
        "labels": _TEXTS,
        "annotations": _TEXTS,
    },
}
_BITS = {"int32": 31, "int64": 63}
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": Mapping,
    "array": (list, tuple),
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def problems(document: Mapping[str, Json]) -> Iterator[str]:
    """What is wrong with an object, one `path: what` each.

    Raises:
        KeyError: If it is of a kind whose schema is not known.
    """
    key = (str(document.get("apiVersion")), str(document.get("kind")))
    schema = _crd(_FILES[key], version=key[0].partition("/")[2])
    properties = _mapping(schema.get("properties"))
    strict = {**schema, "properties": {**properties, "metadata": _METADATA}}
    yield from _problems(document, strict, "")


@cache
def _crd(name: str, *, version: str) -> Schema:
    packed = files("stoker.platforms.kubernetes").joinpath("crds", f"{name}.json.gz").read_bytes()
    document = json.loads(gzip.decompress(packed))
    found: Schema = next(
        described["schema"]["openAPIV3Schema"]
        for described in document["spec"]["versions"]
        if described["name"] == version
    )
    return found


def _problems(value: Json, schema: Schema, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: expected a number or a text, found {_shown(value)}"
        elif isinstance(value, str):
            yield from _text_problems(value, schema, path)
        return
    kind = str(schema.get("type", ""))
    if kind and not _is_a(value, kind):
        yield f"{path or 'the object'}: expected {kind}, found {_shown(value)}"
        return
    choices = schema.get("enum")
    if isinstance(choices, list) and value not in choices:
        yield f"{path}: {_shown(value)} is not one of {', '.join(map(str, choices))}"
    if isinstance(value, Mapping):
        yield from _object_problems(value, schema, path)
    elif isinstance(value, list | tuple):
        yield from _list_problems(value, schema, path)
    elif isinstance(value, str):
        yield from _text_problems(value, schema, path)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from _number_problems(value, schema, path)


def _object_problems(value: Mapping[str, Json], schema: Schema, path: str) -> Iterator[str]:
    known = _mapping(schema.get("properties"))
    others = schema.get("additionalProperties")
    for key in _texts(schema.get("required")):
        if key not in value:
            yield f"{_join(path, key)}: is missing"
    least = schema.get("minProperties")
    if isinstance(least, int) and len(value) < least:
        yield f"{path}: has fewer than {least} keys"
    for key, child in value.items():
        if key in known:
            yield from _problems(child, _mapping(known[key]), _join(path, key))
        elif isinstance(others, Mapping):
            yield from _problems(child, others, _join(path, key))
        elif not others and not schema.get("x-kubernetes-preserve-unknown-fields"):
            hint = f"; {nearest(key, list(known))}" if known else ""
            yield f"{_join(path, key)}: no such field{hint}"


def _list_problems(
    value: list[Json] | tuple[Json, ...], schema: Schema, path: str
) -> Iterator[str]:
    yield from _size_problems(len(value), schema, path, low="minItems", high="maxItems")
    items = _mapping(schema.get("items"))
    for index, child in enumerate(value):
        yield from _problems(child, items, f"{path}[{index}]")
    kind = schema.get("x-kubernetes-list-type")
    if kind not in ("set", "map"):
        return
    keys = _texts(schema.get("x-kubernetes-list-map-keys"))
    seen: list[Json] = []
    for index, child in enumerate(value):
        identity: Json = child
        if kind == "map" and isinstance(child, Mapping):
            defaults = {key: _default(items, key) for key in keys}
            identity = [child.get(key, defaults[key]) for key in keys]
        if identity in seen:
            yield f"{path}[{index}]: stands there twice: {_shown(identity)}"
        seen.append(identity)


def _default(items: Schema, key: str) -> Json:
    return _mapping(_mapping(items.get("properties")).get(key)).get("default")


def _text_problems(value: str, schema: Schema, path: str) -> Iterator[str]:
    yield from _size_problems(len(value), schema, path, low="minLength", high="maxLength")
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not re.search(pattern, value):
        yield f"{path}: {_shown(value)} does not match {pattern}"


def _number_problems(value: int | float, schema: Schema, path: str) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int | float) and value < low:
        yield f"{path}: {value} is below {low}"
    if isinstance(high, int | float) and value > high:
        yield f"{path}: {value} is above {high}"
    bits = _BITS.get(str(schema.get("format")))
    if bits and not -(1 << bits) <= value < 1 << bits:
        yield f"{path}: {value} does not fit into {schema.get('format')}"


def _size_problems(size: int, schema: Schema, path: str, *, low: str, high: str) -> Iterator[str]:
    least, most = schema.get(low), schema.get(high)
    if isinstance(least, int) and size < least:
        yield f"{path}: is shorter than {least}"
    if isinstance(most, int) and size > most:
        yield f"{path}: is longer than {most}"


def _is_a(value: Json, kind: str) -> bool:
    if isinstance(value, bool) and kind != "boolean":
        return False
    return isinstance(value, _TYPES[kind])


def _mapping(value: Json) -> Schema:
    return value if isinstance(value, Mapping) else {}


def _texts(value: Json) -> list[str]:
    return [str(item) for item in value] if isinstance(value, list) else []


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _shown(value: Json) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
