"""The workload's file: YAML or JSON, files of values, overrides, and what no type can check.

Keys and defaults are declared in `stoker.records.workload`. An error names file, line and key.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import yaml
from msgspec.structs import replace

from stoker.environment import cloud_region
from stoker.errors import UsageError
from stoker.records import FeedSettings, Json, Place, Workload, convert, read_text
from stoker.records.base import Document, path_below
from stoker.records.engine import check_engine
from stoker.records.hyperparameters import (
    check_hyperparameters,
    check_options,
    values_of,
)
from stoker.records.platforms import NAME_END
from stoker.records.secrets import check_variables

# Placeholders in the examples, and what goes there.
PLACEHOLDERS = {
    "ACCOUNT": "the 12 digits of your AWS account",
    "REGION": "your AWS region",
    "BUCKET": "the name of your S3 bucket",
    "REGISTRY": "the address of your image registry",
}
# In the path of a prices file.
_REGION = "{region}"
# Whether a scalar is written without quotes.
_IsPlain = Callable[[yaml.Node], bool]
_PLACEHOLDER = re.compile(rf"(?<![\w ])(?:{'|'.join(PLACEHOLDERS)})(?![\w ])")
# Keys with addresses, in which placeholders are refused; `*` is a user's name.
ADDRESS_KEYS = (
    "channels.*.uri",
    "constraints.regions",
    "image",
    "kubernetes.*.image",
    "kubernetes.kubeflow.host",
    "kubernetes.output",
    "notify.secret_arn",
    "sagemaker.checkpoint_uri",
    "sagemaker.control.image",
    "sagemaker.control.role",
    "sagemaker.dead_letter_queue",
    "sagemaker.model.image",
    "sagemaker.output_uri",
    "sagemaker.pipeline_role",
    "sagemaker.region",
    "sagemaker.request.OutputDataConfig.KmsKeyId",
    "sagemaker.request.ResourceConfig.VolumeKmsKeyId",
    "sagemaker.resume_from",
    "sagemaker.role",
    "sagemaker.schedule_role",
    "secrets.*",
    "tracking.mlflow",
)
# In overrides, before the name of a file of values (--values).
VALUES_MARK = "@"
# Keys and values of a workload with its aliases expanded; large ones have some hundreds.
MAX_NODES = 100_000
# Of YAML's own types.
_TAG = "tag:yaml.org,2002:"
FLOAT_TAG = f"{_TAG}float"
# Unquoted hyperparameters that are no texts: JSON's words and numbers, and YAML's spellings.
SCALARS = {
    "null": re.compile(r"~|null|Null|NULL|"),
    "bool": re.compile(r"true|True|TRUE|false|False|FALSE"),
    "int": re.compile(r"[-+]?(?:0|[1-9][0-9]*)"),
    "float": re.compile(
        r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
    ),
}
# Characters of all patterns of metrics together.
_MAX_PATTERNS = 500


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
    overrides = [*(f"{VALUES_MARK}{file}" for file in values), *overrides]
    is_inline = isinstance(path, str) and path.lstrip().startswith("{")
    text = path if isinstance(path, str) and is_inline else read_text(path)
    path = "the workload's document" if is_inline else path
    node, document = _parsed(text, str(path))
    lines: dict[str, int] = {}
    if node is not None:
        _lines_of(node, "", lines, str(path))
    if not isinstance(document, Mapping):
        raise UsageError(
            "a workload is a mapping with at least the keys name and command",
            where=str(path),
            fix="stoker init --script train.py     creates one",
        )
    return workload_from(document, overrides=overrides, source=str(path), lines=lines)


def workload_from(
    document: Document,
    *,
    overrides: Sequence[str] = (),
    source: str = "command line",
    lines: Mapping[str, int] | None = None,
) -> Workload:
    """Returns the workload of a parsed document, with overrides applied in order.

    Errors name the document's `source`, and the lines of its keys, if known.

    Args:
        document: Keys and values.
        overrides: `key.path=value`, or `@FILE` for a file that is merged.
        source: Its name in errors.
        lines: Line number by key path.
    """
    changed = dict(document)
    overlays = []
    for override in overrides:
        if override.startswith(VALUES_MARK):
            overlays.append(_merge_file(changed, override.removeprefix(VALUES_MARK)))
        else:
            _override(changed, override)
    # Errors in these name the option, not the file.
    keys = [override.partition("=")[0].strip() for override in overrides]
    place = Place(source, lines, overridden=keys, overlays=overlays)
    _refuse_placeholders(changed, place)
    workload = convert(changed, Workload, place)
    _check_workload(workload, place)
    return _with_prices_text(_with_pools_text(workload, place), place)


def _refuse_placeholders(document: Document, place: Place) -> None:
    # Before types are checked, whose errors would not say where the value comes from.
    places: dict[str, str] = {}
    for key, text in _texts(document, ""):
        if any(fnmatchcase(key.partition("[")[0], pattern) for pattern in ADDRESS_KEYS):
            for word in _PLACEHOLDER.findall(_place_in(text)):
                places.setdefault(word, key)
    if not places:
        return
    left = [(word, places[word]) for word in PLACEHOLDERS if word in places]

    def meant(*, is_overridden: bool) -> str:
        words = [word for word, key in left if place.is_overridden(key) == is_overridden]
        return ", ".join(f"{PLACEHOLDERS[word]} instead of {word}" for word in words)

    fixes = []
    if of_file := meant(is_overridden=False):
        fixes.append(f"in the whole file, write {of_file}, or use --set KEY=VALUE for each")
    if of_option := meant(is_overridden=True):
        fixes.append(f"in --set, write {of_option}")
    raise UsageError(
        f"replace the placeholder: {', '.join(f'{word} in {key}' for word, key in left)}",
        where=place.at(left[0][1]),
        fix="; ".join(fixes),
    )


def _place_in(address: str) -> str:
    """Returns the part of an address that can hold a placeholder; the rest are the user's names.

    `REGISTRY:5000/stoker` is refused, too: hosts are case-insensitive, and buckets are lower case.
    """
    if address.startswith("arn:"):
        # arn:PARTITION:SERVICE:REGION:ACCOUNT:NAME
        return ":".join(address.split(":")[:5])
    return address.rpartition("://")[2].partition("/")[0]


def _texts(value: Json, path: str) -> Iterator[tuple[str, str]]:
    """Yields (key path, text) of all texts in a value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from _texts(below, path_below(path, key))
    elif isinstance(value, list):
        for index, below in enumerate(value):
            yield from _texts(below, f"{path}[{index}]")


def _with_pools_text(workload: Workload, place: Place) -> Workload:
    """Inlines the pools file, which other machines cannot read."""
    kubernetes = workload.kubernetes
    # With a line break it is a text already, from a pipeline or an earlier call.
    if kubernetes is None or kubernetes.pools_file is None or "\n" in kubernetes.pools_file:
        return workload
    try:
        text = read_text(kubernetes.pools_file).rstrip("\n") + "\n"
    except UsageError as err:
        raise UsageError(
            err.what,
            where=f"{place.at('kubernetes.pools_file')}, folder {Path.cwd()}",
            fix="run stoker in the project's folder",
        ) from None
    return replace(workload, kubernetes=replace(kubernetes, pools_file=text))


def _with_prices_text(workload: Workload, place: Place) -> Workload:
    """Inlines the prices file, which other machines cannot read."""
    named = workload.constraints.prices_file
    if named is None or "\n" in named:
        return workload
    where = f"{place.at('constraints.prices_file')}, folder {Path.cwd()}"
    path = named
    if _REGION in named:
        path = named.replace(_REGION, workload.named_region or cloud_region() or "")
        if not Path(path).is_file():
            # Prices of the catalog, which decisions report as those of another region.
            return _with_prices(workload, None)
    try:
        text = read_text(path).rstrip("\n") + "\n"
    except UsageError as err:
        raise UsageError(err.what, where=where, fix="run stoker in the project's folder") from None
    return _with_prices(workload, text)


def _with_prices(workload: Workload, text: str | None) -> Workload:
    return replace(workload, constraints=replace(workload.constraints, prices_file=text))


def job_region(workload: Workload) -> str | None:
    """Returns the AWS region of a job of SageMaker, also by the environment; None: not known."""
    if not workload.platform_info.needs_training_enum:
        return None
    return workload.named_region or cloud_region()


def _check_workload(workload: Workload, place: Place) -> None:
    if workload.sagemaker and NAME_END in workload.name:
        raise UsageError(
            f"the name {workload.name} has two dashes in a row, which in a job's name separate the "
            "workload from the run",
            where=place.at("name"),
            fix="write one dash",
        )
    for index, gate in enumerate(workload.gate):
        where = place.at(f"gate[{index}]")
        if gate.min is None and gate.max is None and not gate.needs_champion:
            raise UsageError(
                f"gate {gate.metric} has neither min nor max",
                where=where,
                fix="add min for a metric that should be high, max for one that should be low",
            )
        if gate.min is not None and gate.max is not None and gate.min > gate.max:
            raise UsageError(
                f"gate {gate.metric}: min {gate.min} is above max {gate.max}",
                where=where,
                fix="exchange the two, or leave one of them out",
            )
    _check_patterns(workload, place)
    check_hyperparameters(values_of(workload.hyperparameters), place)
    check_options(workload.options, values_of(workload.hyperparameters), place)
    check_variables(workload.environment, workload.secrets, place)
    check_engine(workload.engine_settings, taken=workload.feed.ports, place=place)
    _check_strategy(workload, place)
    _check_replicas(workload.feed, place)
    _check_splitting(workload.feed, place)
    _check_mlflow(workload.tracking.mlflow or "", place)
    if workload.constraints.deadline_hours and workload.training.total_steps() is None:
        raise UsageError(
            "deadline_hours needs the number of steps",
            where=place.at("constraints.deadline_hours"),
            fix="set training.steps, or epochs, samples_per_epoch and global_batch_size",
        )


def _check_patterns(workload: Workload, place: Place) -> None:
    example = "for example regex: 'accuracy ([0-9.]+)'"
    for index, gate in enumerate(workload.gate):
        where = place.at(f"gate[{index}].regex")
        if gate.regex is None:
            continue
        try:
            groups = re.compile(gate.regex).groups
        except (re.error, RecursionError, OverflowError) as err:
            raise UsageError(
                f"gate {gate.metric}: {gate.regex!r} is no pattern of Python: {err}",
                where=where,
                fix=example,
            ) from None
        if groups != 1:
            raise UsageError(
                f"gate {gate.metric}: {gate.regex!r} has {groups} groups, and one is the value",
                where=where,
                fix=f"put the number into ( ), others into (?: ); {example}",
            )
        if workload.metric_patterns[gate.metric] != gate.regex:
            raise UsageError(
                f"two gates have different patterns for {gate.metric}",
                where=where,
                fix="one metric has one pattern",
            )
    # A variable of a job on SageMaker.
    if len(json.dumps(workload.metric_patterns)) > _MAX_PATTERNS:
        raise UsageError(
            f"the gates' patterns have more than {_MAX_PATTERNS} characters together",
            where=place.at("gate"),
            fix="shorten them",
        )


def _check_mlflow(address: str, place: Place) -> None:
    # Errors never show the address, which may contain a password.
    try:
        has_secret = "@" in urlsplit(address).netloc
    except ValueError:
        raise UsageError(
            "invalid address of MLflow",
            where=place.at("tracking.mlflow"),
            fix="write https://HOST, or https://HOST:PORT",
        ) from None
    if has_secret:
        raise UsageError(
            "the address of MLflow contains a user, token or password, which records would show",
            where=place.at("tracking.mlflow"),
            fix="remove it; MLflow reads MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD",
        )


def _check_strategy(workload: Workload, place: Place) -> None:
    strategy = workload.strategy_settings
    if misfit := strategy.misfit():
        key, takers = misfit
        raise UsageError(
            f"strategy {strategy.name} does not use {key}",
            where=place.at(f"strategy.{key}"),
            fix=f"remove it, or use {takers}",
        )
    if workload.cluster is None:
        return
    dnn = workload.cluster.dnn
    refusal = strategy.refusal(
        instance_type=dnn.instance_type, processes_per_host=dnn.processes_per_host or 1
    )
    if refusal is not None:
        what, fix = refusal
        raise UsageError(what, where=place.at("strategy"), fix=fix)


def _check_splitting(feed: FeedSettings, place: Place) -> None:
    if feed.split_batches is not True or feed.seeding != "torch":
        return
    raise UsageError(
        "split_batches cannot be used with seeding: torch, where a sample's random numbers follow "
        "from the worker that makes it",
        where=place.at("feed.split_batches"),
        fix="leave one of them out",
    )


def _check_replicas(feed: FeedSettings, place: Place) -> None:
    if feed.replicas is None:
        return
    if feed.model_parallel_size != 1:
        raise UsageError(
            "use either replicas or model_parallel_size",
            where=place.at("feed.replicas"),
            fix="remove one of them",
        )
    ranks = list(chain.from_iterable(feed.replicas))
    if twice := sorted({rank for rank in ranks if ranks.count(rank) > 1}):
        raise UsageError(
            f"rank {twice[0]} is in two replicas",
            where=place.at("feed.replicas"),
            fix="name each rank once: a replica is the ranks that read the same batches",
        )


def _merge_file(document: dict[str, Json], file: str) -> tuple[str, Mapping[str, int]]:
    """Merges a file of values into the document; returns its name, and the lines of its keys.

    Mappings are merged; all else, lists too, replaces what was there.
    """
    node, values = _parsed(read_text(file), file)
    lines: dict[str, int] = {}
    if node is not None:
        _lines_of(node, "", lines, file)
    if not isinstance(values, Mapping | None):
        raise UsageError(
            "a file of values has some of a workload's keys",
            where=file,
            fix="write it as a workload: sagemaker: {role: ...}",
        )
    _merge(document, values or {}, node, is_verbatim=False)
    return file, lines


def _merge(
    document: dict[str, Json],
    values: Document,
    node: yaml.Node | None,
    *,
    is_verbatim: bool,
) -> None:
    """Merges values, of the YAML node, into a document.

    Args:
        document: Changed in place; what is below it is copied.
        values: What replaces or adds.
        node: As which they were read.
        is_verbatim: They are hyperparameters: a text stays a text, as for `--set`.
    """
    nodes = _nodes_of(node)
    for key, value in values.items():
        there = document.get(key)
        below = nodes.get(key)
        if isinstance(value, Mapping):
            copied = dict(there) if isinstance(there, Mapping) else {}
            _merge(copied, value, below, is_verbatim=is_verbatim or key == "hyperparameters")
            document[key] = copied
        elif is_verbatim and _is_number_for_text(value, there) and below is not None:
            document[key] = str(below.value)
        else:
            document[key] = value


def _nodes_of(node: yaml.Node | None) -> dict[str, yaml.Node]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    return {str(key.value): value for key, value in node.value}


def _is_number_for_text(value: Json, there: Json) -> bool:
    # 1.20 in place of "1.10" is no 1.2.
    return isinstance(value, bool | int | float) and isinstance(there, str)


def _override(document: dict[str, Json], override: str) -> None:
    key, equals, text = override.partition("=")
    steps = key.strip().split(".")
    # a..b would set a key without a name.
    if not equals or not all(steps):
        raise UsageError(
            f"--set {override} is not key.path=value", fix="write it like --set feed.credits=4"
        )
    below = "hyperparameters" if steps[0] == "hyperparameters" else ""
    node, value = _parsed(text, f"--set {key}=...", below=below)
    target = document
    for step in steps[:-1]:
        child = target.get(step)
        # Copied: the caller's document must not change.
        copied = dict(child) if isinstance(child, Mapping) else {}
        target[step] = copied
        target = copied
    if below and _is_number_for_text(value, target.get(steps[-1])) and node is not None:
        value = str(node.value)
    target[steps[-1]] = value


def _parsed(text: str, source: str, *, below: str = "") -> tuple[yaml.Node | None, Json]:
    """Returns YAML as nodes, which know their lines, and as a document.

    Args:
        text: YAML, or JSON, which is YAML.
        source: Name of the text in errors.
        below: hyperparameters: the text is theirs, or one's. Empty: it is a workload's.
    """
    if text.lstrip().startswith("{"):
        # JSON may contain it in quotes; YAML must not.
        text = text.replace("\x7f", r"\x7f")
    loader, is_plain = _loader_of(text)
    try:
        node = loader.get_single_node()
        # On nodes: no alias is expanded in them yet.
        _check_size(node, source)
        if node is None:
            return None, None
        meant = _as_written(node, is_plain) if below else _with_hyperparameters(node, is_plain)
        document: Json = loader.construct_document(meant)
        return node, document
    except RecursionError:
        raise UsageError("nested too deeply", where=source, fix="check the brackets") from None
    except yaml.YAMLError as err:
        mark = getattr(err, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        problem = getattr(err, "problem", None) or str(err)
        raise UsageError(
            f"not YAML: {problem}", where=where, fix="check indentation and quotes"
        ) from None
    finally:
        loader.dispose()


def _loader_of(text: str) -> "tuple[yaml.CSafeLoader | _Loader, _IsPlain]":
    """Returns what parses a text, and what says of its scalars whether they are plain."""
    if _is_for_libyaml(text):
        return yaml.CSafeLoader(text), _is_without_quotes
    loader = _Loader(text)
    return loader, loader.is_plain


def _is_for_libyaml(text: str) -> bool:
    """Whether a text is JSON of which libyaml makes the same as PyYAML, ten times as fast.

    Of other YAML it may make something else, and its errors have other words.
    """
    # It knows no surrogate pairs.
    if not yaml.__with_libyaml__ or not text.isascii() or "\\ud" in text.lower():
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_without_quotes(node: yaml.Node) -> bool:
    """Whether a scalar of JSON that libyaml has read is no text."""
    return isinstance(node, yaml.ScalarNode) and node.style == ""


class _Loader(yaml.SafeLoader):
    """YAML's loader, also of JSON's surrogate pairs."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        # Identities of the scalars without quotes and tag.
        self._plain: set[int] = set()

    def is_plain(self, node: yaml.Node) -> bool:
        """Whether a scalar has neither quotes nor a tag."""
        return id(node) in self._plain

    def compose_scalar_node(self, anchor: dict[str, yaml.Node]) -> yaml.ScalarNode:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        node = super().compose_scalar_node(anchor)
        if event.implicit[0]:
            self._plain.add(id(node))
        if any("\ud800" <= character <= "\udbff" for character in node.value):
            node.value = _joined(node.value)
        return node


def _joined(text: str) -> str:
    """Returns the text with a character for each surrogate pair, as JSON writes emoji."""
    halves = text.encode("utf-16-le", "surrogatepass")
    return halves.decode("utf-16-le", "surrogatepass")


def _with_hyperparameters(node: yaml.Node, is_plain: _IsPlain) -> yaml.Node:
    """Returns a workload's node, with its hyperparameters as they are written."""
    if not isinstance(node, yaml.MappingNode):
        return node
    pairs = [
        (key, _as_written(value, is_plain) if key.value == "hyperparameters" else value)
        for key, value in node.value
    ]
    return yaml.MappingNode(node.tag, pairs, node.start_mark, node.end_mark)


def _as_written(node: yaml.Node, is_plain: _IsPlain) -> yaml.Node:
    """Returns a copy in which unquoted yes, 012, 1:30 and 2026-11-26 are texts, and 1e-4 is not.

    A script expects what was typed. PyYAML reads YAML 1.1: true, 10, 90, a date, and a text.
    """
    marks = node.start_mark, node.end_mark
    if isinstance(node, yaml.MappingNode):
        pairs = [(_as_name(key), _as_written(value, is_plain)) for key, value in node.value]
        return yaml.MappingNode(node.tag, pairs, *marks)
    if isinstance(node, yaml.SequenceNode):
        return yaml.SequenceNode(
            node.tag, [_as_written(item, is_plain) for item in node.value], *marks
        )
    tag = _scalar_tag(node.value) if is_plain(node) else node.tag
    return yaml.ScalarNode(tag, node.value, *marks)


def _as_name(key: yaml.Node) -> yaml.Node:
    # << takes over another mapping's keys.
    if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_TAG}merge":
        return key
    return yaml.ScalarNode(f"{_TAG}str", key.value, key.start_mark, key.end_mark)


def _scalar_tag(text: str) -> str:
    """Returns YAML's tag of a hyperparameter that is written without quotes."""
    kinds = (kind for kind, pattern in SCALARS.items() if pattern.fullmatch(text))
    return _TAG + next(kinds, "str")


def _check_size(node: yaml.Node | None, source: str) -> None:
    """Refuses circular aliases, and those that expand beyond any real workload."""
    sizes: dict[int, int] = {}
    # By identity: an alias is the same object as its node.
    open_nodes: set[int] = set()

    def size(each: yaml.Node) -> int:
        if id(each) in open_nodes:
            raise UsageError(
                f"an alias (*) refers to a value (&) that contains it, from line "
                f"{each.start_mark.line + 1} on",
                where=source,
                fix="write the value out",
            )
        if id(each) not in sizes:
            open_nodes.add(id(each))
            parts: list[yaml.Node] = []
            if isinstance(each, yaml.MappingNode):
                parts = list(chain.from_iterable(each.value))
            elif isinstance(each, yaml.SequenceNode):
                parts = each.value
            # Each node is counted once, although aliases of aliases grow exponentially.
            sizes[id(each)] = 1 + sum(size(part) for part in parts)
            open_nodes.discard(id(each))
        return sizes[id(each)]

    if node is not None and size(node) > MAX_NODES:
        raise UsageError(
            f"its aliases (*) expand to more than {MAX_NODES} keys and values",
            where=source,
            fix="write the values out, without aliases of aliases",
        )


def _lines_of(node: yaml.Node, path: str, lines: dict[str, int], source: str) -> None:
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            child = path_below(path, name)
            # YAML's parser silently keeps the last of two equal keys.
            if name in seen:
                raise UsageError(
                    f"duplicate key {name}",
                    where=f"{source}:{key.start_mark.line + 1}, key {child}",
                    fix="remove one of them",
                )
            seen.add(name)
            lines[child] = key.start_mark.line + 1
            _lines_of(value, child, lines, source)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            child = f"{path}[{index}]"
            lines[child] = item.start_mark.line + 1
            _lines_of(item, child, lines, source)
