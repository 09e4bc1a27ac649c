"""The workload's file: YAML 1.2 or JSON, files of values, overrides, and checks across keys.

Keys and defaults are declared in `stoker.records.workload`. An error names file, line and key.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from msgspec.structs import replace

from stoker.errors import UsageError
from stoker.records import Json, Place, Workload, convert, read_text
from stoker.records.base import Document, path_below, read_source
from stoker.records.engine import check_engine
from stoker.records.secrets import check_variables

# In overrides, before the name of a file of values (--values).
VALUES_MARK = "@"
# Of YAML's own types.
_TAG = "tag:yaml.org,2002:"
# Unquoted words that are no texts in YAML 1.2; 1.1 reads yes, 012, 1:30 and dates as others.
_SCALARS = {
    "null": re.compile(r"(?:~|null|Null|NULL|)$"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    "merge": re.compile(r"<<$"),
}


class _Loader(yaml.SafeLoader):
    """YAML's loader with the scalars of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {None: [(_TAG + kind, form) for kind, form in _SCALARS.items()]}


class _Dumper(yaml.SafeDumper):
    """A dumper whose texts, such as 1e-4 and yes, are read as texts again."""


_Dumper.add_implicit_resolver(f"{_TAG}float", _SCALARS["float"], list("-+.0123456789"))


def workload_yaml(document: Document) -> str:
    """Returns the keys of a workload as YAML, in their order."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=96)


def read_workload(path: Path | str, *, overrides: Sequence[str] = ()) -> Workload:
    """Reads a workload file, or the JSON document itself: a text that begins with a brace.

    A UsageError names file, line and key path, and the nearest key for an unknown one.

    Args:
        path: The file, or the document.
        overrides: `key.path=value`, the value in YAML; `@FILE` is a file with some of the keys.
    """
    text, source = read_source(path)
    document, places = _mapping(text, source)
    return workload_from(document, overrides=overrides, source=source, places=places)


def workload_from(
    document: Document,
    *,
    overrides: Sequence[str] = (),
    source: str = "command line",
    places: Mapping[str, str] | None = None,
) -> Workload:
    """Returns the workload of a parsed document, with overrides applied in order.

    Args:
        document: Keys and values.
        overrides: `key.path=value`, or `@FILE` for a file that is merged.
        source: Name of the document in errors.
        places: `file:line` of its keys, by key path.
    """
    where = dict(places or {})
    for override in overrides:
        if override.startswith(VALUES_MARK):
            file = override.removeprefix(VALUES_MARK)
            values, lines = _mapping(read_text(file), file)
        else:
            values, lines = _set(override)
        document = _merged(document, values)
        where |= lines
    place = Place(source, where)
    workload = convert(document, Workload, place)
    _check_workload(workload, place)
    return _with_texts(workload, place)


def _merged(document: Document, values: Document) -> Document:
    """Returns the document with values: mappings are merged, all else and `{}` replaces."""
    merged = dict(document)
    for key, value in values.items():
        there = merged.get(key)
        merged[key] = value
        if value and isinstance(value, Mapping) and isinstance(there, Mapping):
            merged[key] = _merged(there, value)
    return merged


def _set(override: str) -> tuple[Document, dict[str, str]]:
    """Returns the mapping that `key.path=value` is short for, and the option for its keys."""
    key, equals, text = override.partition("=")
    path = key.strip()
    steps = path.split(".")
    # a..b would set a key without a name.
    if not equals or not all(steps):
        fix = "write it like --set feed.max_errors=10"
        raise UsageError(f"--set {override} is not key.path=value", fix=fix)
    option = f"--set {path}=..."
    value, lines = _parsed(text, option)
    document: Document = {steps[-1]: value}
    for step in reversed(steps[:-1]):
        document = {step: document}
    return document, {path: option} | {path_below(path, line): option for line in lines}


def _mapping(text: str, source: str) -> tuple[Document, dict[str, str]]:
    """Returns a mapping in YAML or JSON, and `source:line` of its keys."""
    value, places = _parsed(text, source)
    if isinstance(value, Mapping):
        return value, places
    what = "a workload is a mapping with at least the keys name and command"
    raise UsageError(what, where=source, fix="stoker init -- python train.py     creates one")


def _parsed(text: str, source: str) -> tuple[Json, dict[str, str]]:
    """Returns a value in YAML or JSON, and `source:line` of its keys."""
    if text.lstrip().startswith("{"):
        # Ten times as fast; and JSON's surrogate pairs are no YAML.
        with suppress(ValueError):
            return json.loads(text, parse_constant=str), {}
    places: dict[str, str] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        for path, line in _lines_of(node, ""):
            where = f"{source}:{line}"
            if path in places:
                raise UsageError(f"duplicate key {path}", where=where, fix="remove one of them")
            places[path] = where
        return loader.construct_document(node) if node else None, places
    except (yaml.YAMLError, RecursionError) as err:
        mark = getattr(err, "problem_mark", None)
        raise UsageError(
            f"not YAML: {getattr(err, 'problem', None) or err}",
            where=f"{source}:{mark.line + 1}" if mark else source,
            fix="check indentation and quotes",
        ) from None


def _lines_of(node: yaml.Node | None, path: str) -> Iterator[tuple[str, int]]:
    """Yields the path and the line of each key."""
    children = []
    if isinstance(node, yaml.MappingNode):
        children = [(path_below(path, key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(f"{path}[{index}]", item, item) for index, item in enumerate(node.value)]
    for child, at, value in children:
        yield child, at.start_mark.line + 1
        yield from _lines_of(value, child)


def _with_texts(workload: Workload, place: Place) -> Workload:
    """Inlines the files of pools and prices, which other machines cannot read."""
    for section, key in (("kubernetes", "pools_file"), ("constraints", "prices_file")):
        settings = getattr(workload, section)
        if file := getattr(settings, key, None):
            settings = replace(settings, **{key: _text_of(file, place.at(f"{section}.{key}"))})
            workload = replace(workload, **{section: settings})
    return workload


def _text_of(file: str, where: str) -> str:
    # With a line break it is a text already, from a pipeline or an earlier call.
    if "\n" in file:
        return file
    try:
        return read_text(file).rstrip("\n") + "\n"
    except UsageError as err:
        fix = "run stoker in the project's folder"
        raise UsageError(err.what, where=f"{where}, folder {Path.cwd()}", fix=fix) from None


def _check_workload(workload: Workload, place: Place) -> None:
    for is_wrong, key, what, fix in _checks(workload):
        if is_wrong:
            raise UsageError(what, where=place.at(key), fix=fix)
    check_variables(workload.environment, workload.secrets, place)
    check_engine(workload.engine_settings, place)


def _checks(workload: Workload) -> Iterator[tuple[bool, str, str, str]]:
    """Yields each check across keys: whether it fails, its key, what is wrong and what to do."""
    for index, gate in enumerate(workload.gate):
        key = f"gate[{index}]"
        has_bound = (gate.min, gate.max) != (None, None) or gate.needs_champion
        yield not has_bound, key, f"gate {gate.metric} has neither min nor max", "add one of them"
    names = dict[str, str]()
    for name in workload.hyperparameters:
        # A script would be told both, and takes one.
        other = names.setdefault(name.replace("-", "_"), name)
        what = f"{other} and {name} are one hyperparameter to most scripts"
        yield name != other, f"hyperparameters.{name}", what, f"set {other} alone"
    yield (
        "@" in urlsplit(workload.tracking.mlflow or "").netloc,
        "tracking.mlflow",
        # Without the address, which may contain a password.
        "the address of MLflow contains a user, token or password, which records would show",
        "remove it; MLflow reads MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD",
    )
    processes = (workload.cluster and workload.cluster.dnn.processes_per_host) or 1
    yield (
        workload.strategy == "none" and processes > 1,
        "strategy",
        f"strategy none starts one process per host, not {processes}",
        "use torchrun or mpi",
    )
    yield (
        workload.constraints.deadline_hours is not None and workload.training.total_steps() is None,
        "constraints.deadline_hours",
        "deadline_hours needs the number of steps",
        "set training.steps, or epochs, samples_per_epoch and global_batch_size",
    )
