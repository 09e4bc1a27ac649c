"""Checks requests and answers by the published API of Kubeflow Pipelines."""

import gzip
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

Document = dict[str, Any]

_DATA = Path(__file__).resolve().parents[1] / "data" / "kfp"
_FILES = ("kfp_api_single_file.swagger.json.gz", "pipeline.upload.swagger.json.gz")
# What the documents call objects are messages: a name that they have not is refused by the service.
_OPEN = ("protobufAny",)


@cache
def _document(file: str) -> dict[str, Document]:
    return json.loads(gzip.decompress((_DATA / file).read_bytes()))


@cache
def _definitions() -> Document:
    merged: Document = {}
    for file in _FILES:
        merged |= _document(file)["definitions"]
    # With no properties but their own.
    return {
        name: {**schema, "additionalProperties": False}
        if schema.get("properties") and name not in _OPEN
        else schema
        for name, schema in merged.items()
    }


@cache
def _validator(name: str) -> jsonschema.Draft4Validator:
    schema = {"$ref": f"#/definitions/{name}", "definitions": _definitions()}
    return jsonschema.Draft4Validator(schema)


def problems(name: str, document: Any) -> list[str]:
    """Lists what a message's definition does not allow; int64 may be numbers or texts."""
    told = _coerced(document)
    return [
        f"{'/'.join(map(str, e.path))}: {e.message}" for e in _validator(name).iter_errors(told)
    ]


def operation_at(method: str, path: str) -> Document | None:
    for file in _FILES:
        for template, operations in _document(file)["paths"].items():
            pattern = re.sub(r"\\\{[^}]*\\\}", "[^/:]+", re.escape(template))
            if re.fullmatch(pattern, path) and (found := operations.get(method.lower())):
                return dict(found)
    return None


# As validatePipelineJobInputs in v2_template.go has them: an integer may be 3.5 there.
_KINDS = {
    "STRING": ("string", (str,)),
    "NUMBER_INTEGER": ("double or integer", (int, float)),
    "NUMBER_DOUBLE": ("double or integer", (int, float)),
    "BOOLEAN": ("bool", (bool,)),
    "LIST": ("list", (list,)),
    "STRUCT": ("struct", (dict,)),
}


def input_problem(name: str, kind: str, value: Any) -> str:
    words, types = _KINDS.get(kind, ("unknown", ()))
    is_right = type(value) in types
    return "" if is_right else f"input parameter {name} requires type {words}, but is {value!r}"


def _coerced(value: Any, key: str = "") -> Any:
    """Writes int64 as text, as the definitions have them: the service takes both."""
    if isinstance(value, dict):
        # Parameters of a pipeline are free, and may be called so.
        return {
            k: v if k in ("parameters", "pipeline_spec") else _coerced(v, k)
            for k, v in value.items()
        }
    if isinstance(value, list):
        return [_coerced(item, key) for item in value]
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and key in ("max_concurrency", "interval_second") else value
