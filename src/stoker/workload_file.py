"""The workload's file: YAML 1.2 or JSON, files of values, overrides, and checks across keys.

Keys and defaults are declared in `stoker.records.workload`. An error names file, line and key.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from msgspec.structs import replace

from stoker.environment import cloud_region
from stoker.errors import UsageError
from stoker.records import Json, Place, Workload, convert, read_text
from stoker.records.base import Document, path_below
from stoker.records.engine import check_engine
from stoker.records.hyperparameters import check_hyperparameters, values_of
from stoker.records.platforms import NAME_END
from stoker.records.secrets import check_variables

# In the path of a prices file.
_REGION = "{region}"
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


def read_workload(
    path: Path | str, *, values: Sequence[Path | str] = (), overrides: Sequence[str] = ()
) -> Workload:
    """Reads a workload file, or the JSON document itself: a text that begins with a brace.

    A UsageError names file, line and key path, and the nearest key for an unknown one.

    Args:
        path: The file, or the document.
        values: Files with some of a workload's keys, such as prod.yaml, merged into it in order.
        overrides: `key.path=value`, the value in YAML; `@FILE` is a file of values.
    """
    is_inline = isinstance(path, str) and path.lstrip().startswith("{")
    source = "the workload's document" if is_inline else str(path)
    document, places = _parsed(str(path) if is_inline else read_text(path), source)
    overrides = [*(f"{VALUES_MARK}{file}" for file in values), *overrides]
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
    changed = dict(document)
    where = dict(places or {})
    for override in overrides:
        if override.startswith(VALUES_MARK):
            file = override.removeprefix(VALUES_MARK)
            values, lines = _parsed(read_text(file), file)
            changed = _merged(changed, values)
            where |= lines
        else:
            key = _override(changed, override)
            where = {path: line for path, line in where.items() if not path.startswith(f"{key}.")}
            where[key] = f"--set {key}=..."
    place = Place(source, where)
    workload = convert(changed, Workload, place)
    _check_workload(workload, place)
    return _with_texts(workload, place)


def _parsed(text: str, source: str) -> tuple[dict[str, Json], dict[str, str]]:
    """Returns a mapping in YAML or JSON, and `source:line` of its keys."""
    if text.lstrip().startswith("{"):
        try:
            # Ten times as fast; and JSON's surrogate pairs are no YAML.
            return json.loads(text, parse_constant=str), {}
        except ValueError:
            pass
    places: dict[str, str] = {}
    value = _yaml(text, source, places)
    if not isinstance(value, dict):
        raise UsageError(
            "a workload is a mapping with at least the keys name and command",
            where=source,
            fix="stoker init -- python train.py     creates one",
        )
    return value, places


def _yaml(text: str, source: str, places: dict[str, str]) -> Json:
    """Returns a value in YAML; `places` get the lines of its keys."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        for path, line in _lines_of(node, ""):
            if path in places:
                raise UsageError(
                    f"duplicate key {path}", where=f"{source}:{line}", fix="remove one of them"
                )
            places[path] = f"{source}:{line}"
        value: Json = loader.construct_document(node)
        return value
    except (yaml.YAMLError, RecursionError) as err:
        mark = getattr(err, "problem_mark", None)
        raise UsageError(
            f"not YAML: {getattr(err, 'problem', None) or err}",
            where=f"{source}:{mark.line + 1}" if mark else source,
            fix="check indentation and quotes",
        ) from None
    finally:
        loader.dispose()


def _lines_of(node: yaml.Node, path: str) -> Iterator[tuple[str, int]]:
    """Yields the path and the line of each key."""
    children = []
    if isinstance(node, yaml.MappingNode):
        children = [(path_below(path, key.value), key, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(f"{path}[{index}]", item, item) for index, item in enumerate(node.value)]
    for child, at, value in children:
        yield child, at.start_mark.line + 1
        yield from _lines_of(value, child)


def _merged(document: Document, values: Document) -> dict[str, Json]:
    """Returns the document with values: mappings are merged, all else is replaced."""
    merged = dict(document)
    for key, value in values.items():
        there = merged.get(key)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            value = _merged(there, value)
        merged[key] = value
    return merged


def _override(document: dict[str, Json], override: str) -> str:
    """Sets a key by `key.path=value`; returns its path."""
    key, equals, text = override.partition("=")
    key = key.strip()
    steps = key.split(".")
    # a..b would set a key without a name.
    if not equals or not all(steps):
        raise UsageError(
            f"--set {override} is not key.path=value", fix="write it like --set feed.max_errors=10"
        )
    target = document
    for step in steps[:-1]:
        child = target.get(step)
        # Copied: the caller's document must not change.
        copied = dict(child) if isinstance(child, Mapping) else {}
        target[step] = copied
        target = copied
    if steps[:-1] == ["hyperparameters"]:
        _refuse_twin(steps[-1], text, beside=target)
    target[steps[-1]] = _yaml(text, f"--set {key}=...", {})
    return key


def _refuse_twin(name: str, text: str, *, beside: Document) -> None:
    """Refuses a hyperparameter that the workload has with dashes for underscores, or reversed.

    A script would be told both, and takes one.
    """
    twins = [each for each in beside if each.replace("-", "_") == name.replace("-", "_")]
    if twins and name not in twins:
        raise UsageError(
            f"--set hyperparameters.{name}: the workload has {twins[0]}",
            fix=f"--set hyperparameters.{twins[0]}={text}",
        )


def _with_texts(workload: Workload, place: Place) -> Workload:
    """Inlines the files of pools and prices, which other machines cannot read."""
    kubernetes = workload.kubernetes
    if kubernetes and kubernetes.pools_file:
        text = _text_of(kubernetes.pools_file, place.at("kubernetes.pools_file"))
        workload = replace(workload, kubernetes=replace(kubernetes, pools_file=text))
    prices: str | None = workload.constraints.prices_file
    if prices is None:
        return workload
    path = prices.replace(_REGION, job_region(workload) or "")
    if path != prices and not Path(path).is_file():
        # Prices of the catalog, which decisions report as those of another region.
        prices = None
    else:
        prices = _text_of(path, place.at("constraints.prices_file"))
    return replace(workload, constraints=replace(workload.constraints, prices_file=prices))


def _text_of(file: str, where: str) -> str:
    # With a line break it is a text already, from a pipeline or an earlier call.
    if "\n" in file:
        return file
    try:
        return read_text(file).rstrip("\n") + "\n"
    except UsageError as err:
        fix = "run stoker in the project's folder"
        raise UsageError(err.what, where=f"{where}, folder {Path.cwd()}", fix=fix) from None


def job_region(workload: Workload) -> str | None:
    """Returns the AWS region of a job of SageMaker, also by the environment; None: not known."""
    if not workload.platform_info.needs_training_enum:
        return None
    return workload.named_region or cloud_region()


def _check_workload(workload: Workload, place: Place) -> None:
    def refuse(what: str, key: str, fix: str) -> None:
        raise UsageError(what, where=place.at(key), fix=fix)

    if workload.sagemaker and NAME_END in workload.name:
        refuse(
            "a name has no two dashes in a row: they end a workload's name in a job's",
            "name",
            "write one dash",
        )
    for index, gate in enumerate(workload.gate):
        key = f"gate[{index}]"
        if gate.min is None and gate.max is None and not gate.needs_champion:
            refuse(f"gate {gate.metric} has neither min nor max", key, "add one of them")
        if gate.min is not None and gate.max is not None and gate.min > gate.max:
            refuse(f"gate {gate.metric}: min {gate.min} is above max {gate.max}", key, "swap them")
        if gate.regex is not None and workload.metric_patterns[gate.metric] != gate.regex:
            refuse(f"two gates have different patterns for {gate.metric}", key, "write one")
    if "@" in urlsplit(workload.tracking.mlflow or "").netloc:
        # Without the address, which may contain a password.
        refuse(
            "the address of MLflow contains a user, token or password, which records would show",
            "tracking.mlflow",
            "remove it; MLflow reads MLFLOW_TRACKING_TOKEN, or _USERNAME and _PASSWORD",
        )
    processes = (workload.cluster and workload.cluster.dnn.processes_per_host) or 1
    if workload.strategy == "none" and processes > 1:
        refuse(
            f"strategy none starts one process per host, not {processes}",
            "strategy",
            "use torchrun or mpi",
        )
    if workload.constraints.deadline_hours and workload.training.total_steps() is None:
        refuse(
            "deadline_hours needs the number of steps",
            "constraints.deadline_hours",
            "set training.steps, or epochs, samples_per_epoch and global_batch_size",
        )
    check_hyperparameters(values_of(workload.hyperparameters), place)
    check_variables(workload.environment, workload.secrets, place)
    check_engine(workload.engine_settings, taken=workload.feed.ports, place=place)
