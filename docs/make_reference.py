"""Writes docs/reference/ and configs/workload.schema.json out of the code: `make docs` runs it.

What a page says comes from where the code says it: keys and fields from the records' types and
docstrings, options from the parser, Python names from their signatures and docstrings, variables
from `stoker.environment`, exit codes and ports from the classes that have them. To change a page,
change that, and run this again; tests/contract/test_reference.py compares the schema.

    .venv/bin/python docs/make_reference.py

With names of pages it only folds their prose at 100 columns:

    .venv/bin/python docs/make_reference.py docs/feed.md
"""

import ast
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import typer.main

from stoker import errors
from stoker.cli.parser import app as parser
from stoker.environment import VARIABLES, ProcessSettings, RunSettings
from stoker.logs import EventName
from stoker.records import RECORDS, FeedSettings, field_texts, schema_of
from stoker.records.engine import PRESETS

ROOT = Path(__file__).parents[1]
HEAD = (
    "<!-- Made by docs/make_reference.py: change the words of the code, then run make docs. -->\n"
)


def pages() -> dict[Path, str]:
    """Returns the text of each generated file, by its path in the repository."""
    made = {
        "workload.md": workload_page(),
        "records.md": records_page(),
        "cli.md": cli_page(),
        "python.md": python_page(),
        "environment.md": environment_page(),
        "files.md": files_page(),
        "events.md": events_page(),
    }
    found = {Path("docs/reference", name): HEAD + folded(text) for name, text in made.items()}
    schema = json.dumps(schema_of(RECORDS["workload"]), indent=2) + "\n"
    return {**found, Path("configs/workload.schema.json"): schema}


def main(names: Sequence[str]) -> None:
    """Writes all generated files, or folds the pages that are named."""
    if not names:
        for path, text in pages().items():
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text)
    for name in names:
        Path(name).write_text(folded(Path(name).read_text()))


# Records.

Schema = Mapping[str, typing.Any]
_PATTERNS = {
    "^s3://[^/]+(/.*)?$": "an s3:// address",
    "^arn:aws[a-z-]*:iam::[0-9]{12}:role/?[^ ]+$": "the ARN of a role",
    "^pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?$": "pvc://CLAIM/FOLDER",
    "^(pvc://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(/.*)?|registry:[A-Za-z0-9](-*[A-Za-z0-9])*)$": "pvc://"
    "CLAIM/FOLDER or registry:GROUP",
    "^(https?://[^/]+|file:.|sqlite:.|arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:mlflow-"
    "[a-zA-Z-]*/.*$)": "an http://, https://, file: or sqlite: address, or the ARN of a server",
    "^[A-Za-z_][A-Za-z0-9_]*$": "the name of a variable",
    "^arn:aws[a-z-]*:secretsmanager:[^:]+:[0-9]{12}:": "the ARN of a secret",
    "^arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[^ ]+|ssm:[a-z0-9-]+:[0-9]{12}:"
    "parameter/[^ ]+)$": "the ARN of a secret or parameter",
    "^/[^:]*$": "an absolute path",
    "^[0-9]+\\.[0-9]+([.+].*)?$": "a version",
    "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$": "lowercase letters, digits, hyphens; at most 63",
    "^[a-z0-9]+(-[a-z0-9]+)*$": "lowercase letters and digits, single hyphens; at most 40",
    r"^[0-9]+(\.[0-9]+)?(m|k|Ki|[MGTP]i?)?$": "a quantity",
}
_QUANTITY = "text: a quantity or whole number, at least 1 or number above 0"
_SCALAR = [{"type": kind} for kind in ("boolean", "integer", "number", "string", "null")]
_SECTION_OF_PLATFORM = {
    "sagemaker": "Read on SageMaker only.",
    "kubernetes": "Read on Kubernetes only, by jobs and by Kubeflow's pipelines.",
    "kubernetes.kubeflow": "Read by `stoker upload`, `start`, `schedule`, `status` and `stop` "
    "with the target kubeflow.",
}


def workload_page() -> str:
    """Returns the page of all keys of a workload."""
    schema = schema_of(RECORDS["workload"])
    sections = _sections(schema)
    lines = [
        "# Keys of a workload",
        "",
        _sentence(schema["$defs"]["Workload"]["description"]),
        "A workload is a YAML file; [configs/mnist.yaml](../../configs/mnist.yaml) is one. Only "
        "`name` and `command` are required. An unknown key is an error that names the nearest "
        "known one. `--set KEY=VALUE` changes any key for one run, such as "
        "`--set feed.lease_seconds=60`.",
        "",
        "Editors that know YAML's language server show these words and complete keys, with this "
        "first line in the file:",
        "",
        "```yaml",
        "# yaml-language-server: $schema=workload.schema.json",
        "```",
        "",
        "`stoker schema workload > workload.schema.json` writes the schema of the version that is "
        "installed.",
        "",
        "Keys without another note are read on all platforms.",
        "",
        "Sections: "
        + ", ".join(
            f"[{part.paths[0] or 'top level'}](#{_slug(_title(part.paths[0], part.paths[1:]))})"
            for part in sections
        )
        + ".",
    ]
    for part in sections:
        lines += _section(schema, part)
    return "\n".join(lines) + "\n"


def _title(path: str, others: Sequence[str]) -> str:
    return ", ".join((path, *others)) if path else "Top level"


def _section(schema: Schema, part: "Section") -> Iterator[str]:
    others = part.paths[1:]
    yield from ("", f"## {_title(part.paths[0], others)}", "")
    # The key that holds the section is described here, and not once more among its neighbours.
    for path, described, _ in part.keys:
        if described["description"] != part.kind["description"]:
            name = f"`{path}`: " if len(part.keys) > 1 else ""
            yield from (name + _linked(described["description"]), "")
    yield from part.kind["description"].splitlines()
    if part.paths[0] in _SECTION_OF_PLATFORM:
        yield from ("", _SECTION_OF_PLATFORM[part.paths[0]])
    required = part.kind.get("required", ())
    for key, described in part.kind["properties"].items():
        if [*_references(described)]:
            continue
        whole = f"{part.paths[0]}.{key}" if part.paths[0] else key
        yield from ("", f"### {whole}", "")
        yield _facts(schema, described, is_required=key in required)
        yield from ("", _linked(described["description"]))
        if others:
            yield from ("", "Also " + ", ".join(f"`{other}.{key}`" for other in others) + ".")


def _facts(schema: Schema, described: Schema, *, is_required: bool) -> str:
    kind = f"*{_type_words(schema, described)}*"
    default = _default_words(described, is_required=is_required)
    return f"{kind} · {default}" if default else kind


@dataclasses.dataclass(kw_only=True)
class Section:
    """A mapping of a workload: where it is, and the keys that hold it."""

    kind: Schema
    paths: list[str]
    keys: list[tuple[str, Schema, bool]]


def _sections(schema: Schema) -> list[Section]:
    """Returns each mapping of a workload once."""
    found: dict[str, Section] = {}

    def visit(name: str, path: str, key: tuple[str, Schema, bool] | None) -> None:
        kind = schema["$defs"][name]
        part = found.setdefault(name, Section(kind=kind, paths=[], keys=[]))
        part.paths.append(path)
        part.keys += [key] if key else []
        if len(part.paths) > 1:
            return
        for name_of_key, described in kind["properties"].items():
            whole = f"{path}.{name_of_key}" if path else name_of_key
            is_required = name_of_key in kind.get("required", ())
            for reference, suffix in _references(described):
                visit(reference, f"{whole}{suffix}", (whole, described, is_required))

    visit("Workload", "", None)
    return [*found.values()]


def _references(described: Schema, suffix: str = "") -> Iterator[tuple[str, str]]:
    if "$ref" in described:
        yield described["$ref"].rpartition("/")[2], suffix
    for each in described.get("anyOf", ()):
        yield from _references(each, suffix)
    if isinstance(described.get("items"), Mapping):
        yield from _references(described["items"], suffix + "[]")
    if isinstance(described.get("additionalProperties"), Mapping):
        yield from _references(described["additionalProperties"], suffix + ".NAME")


def _type_words(schema: Schema, described: Schema) -> str:
    if described.get("anyOf") == _SCALAR:
        return "any single value"
    if "anyOf" in described:
        parts = [_type_words(schema, each) for each in described["anyOf"]]
        if len(parts) > len(_SCALAR):
            return "any value"
        words = " or ".join(dict.fromkeys(part for part in parts if part != "null"))
        return words.replace(_QUANTITY, "a number above 0, or a quantity such as 500m or 16Gi")
    if "enum" in described:
        names = [str(each) for each in described["enum"] if each is not None]
        return ("one of " if len(names) > 1 else "") + ", ".join(names)
    if "const" in described:
        return str(described["const"])
    if "$ref" in described:
        return "a mapping"
    kind = described.get("type", "any value")
    if isinstance(kind, list):
        kind = next(each for each in kind if each != "null")
    match kind:
        case "boolean":
            return "true or false"
        case "integer" | "number":
            return ("whole number" if kind == "integer" else "number") + _bounds(described)
        case "string":
            return "text" + _text_bounds(described)
        case "array":
            items = described.get("items")
            if not isinstance(items, Mapping):
                return "list"
            inner = _type_words(schema, items)
            return "list of " + {"a mapping": "mappings", "text": "texts"}.get(inner, inner)
        case "object":
            values = described.get("additionalProperties")
            inner = _type_words(schema, values) if isinstance(values, Mapping) else "any value"
            return f"mapping of names to {inner}".replace("to a mapping", "to mappings")
    return str(kind)


def _bounds(described: Schema) -> str:
    low, high = described.get("minimum"), described.get("maximum")
    above = described.get("exclusiveMinimum")
    words = f" above {above:g}" if above is not None else ""
    if low is not None and high is not None:
        return f"{words} from {low:,} to {high:,}"
    if low is not None:
        return f"{words}, at least {low:,}"
    return f"{words}, at most {high:,}" if high is not None else words


def _text_bounds(described: Schema) -> str:
    pattern = described.get("pattern")
    return "" if pattern is None else f": {_PATTERNS[pattern]}"


def _default_words(described: Schema, *, is_required: bool) -> str:
    if is_required:
        return "required"
    default = described.get("default")
    if default is None:
        return ""
    if default in ({}, [], ()):
        # A mapping of known keys has its own defaults, which are shown with these.
        return "default: as its keys say" if [*_references(described)] else "default: none"
    if isinstance(default, Mapping):
        return "default: as its keys say"
    shown = str(default).lower() if isinstance(default, bool) else default
    if isinstance(shown, list | tuple):
        return f"default: `{json.dumps(shown)}`"
    if isinstance(shown, float) and shown.is_integer():
        shown = int(shown)
    return f"default: `{shown}`"


def records_page() -> str:
    """Returns the page of all fields of the records that stoker writes."""
    lines = [
        "# Fields of the records",
        "",
        "What the steps pass to each other: JSON files, each with its version in `schema`. A field "
        "that is not known is left out. `stoker schema RECORD` prints the JSON Schema with the "
        "same words. A field is never given another meaning within a version; fields may be "
        "added, so readers ignore those that they do not know.",
        "",
        "The workload, which you write, is [on another page](workload.md).",
    ]
    seen: set[str] = set()
    for name, kind in RECORDS.items():
        if name == "workload":
            continue
        schema = schema_of(kind)
        lines += ["", f"## {name}.json"]
        names = [kind.__name__, *(each for each in _below(schema, kind.__name__))]
        for each in names:
            if each in seen or each not in schema["$defs"]:
                continue
            seen.add(each)
            lines += _record_table(schema, each, of=name)
    return "\n".join(lines) + "\n"


# Types of a record that a workload has as well: its page says what they hold.
_OF_WORKLOAD = ("Constraints",)


def _below(schema: Schema, name: str, seen: list[str] | None = None) -> list[str]:
    seen = [] if seen is None else seen
    for described in schema["$defs"][name]["properties"].values():
        for reference, _ in _references(described):
            if reference not in seen:
                seen.append(reference)
                _below(schema, reference, seen)
    return seen


def _record_table(schema: Schema, name: str, *, of: str) -> Iterator[str]:
    if name in _OF_WORKLOAD:
        return
    kind = schema["$defs"][name]
    if name.lower() != of:
        yield from ("", f"### {name}")
    yield from ("", *kind["description"].splitlines(), "")
    required = kind.get("required", ())
    for key, described in kind["properties"].items():
        shown = _type_words(schema, described)
        links = [
            f"[{each}](workload.md#{each.lower()})"
            if each in _OF_WORKLOAD
            else f"[{each}](#{each.lower()})"
            for each, _ in _references(described)
        ]
        if links:
            shown = shown.replace("a mapping", links[0]).replace("mappings", links[0])
        is_required = ", required" if key in required else ""
        yield f"- `{key}` ({shown}{is_required}): {described['description']}"


# The command line.


def cli_page() -> str:
    """Returns the page of all commands and their options."""
    app = typer.main.get_command(parser)
    commands: Mapping[str, typing.Any] = vars(app)["commands"]
    by_panel: dict[str, list[str]] = {}
    for name, command in commands.items():
        if not command.hidden:
            by_panel.setdefault(_panel(command), []).append(name)
    lines = [
        "# Commands and options",
        "",
        "`stoker --help` lists the commands, `stoker COMMAND --help` the options of one. Exit "
        "codes are in [files.md](files.md#exit-codes).",
        "",
    ]
    for panel, names in by_panel.items():
        links = ", ".join(f"[{name}](#stoker-{name})" for name in names)
        lines += [f"**{panel}**: {links}" if panel else links, ""]
    own = [param for param in app.params if not vars(param).get("hidden")]
    lines += ["## Without a command", "", *_options(own)]
    rows = Counter(
        row
        for names in by_panel.values()
        for name in names
        for row in _options(_visible_options(commands[name]))
    )
    common = [row for row, count in rows.items() if count >= 3]
    lines += ["", "## Options of several commands", "", *sorted(common)]
    for names in by_panel.values():
        for name in names:
            lines += _command(name, commands[name], common=common)
    return "\n".join(lines) + "\n"


def _panel(described: object) -> str:
    panel = vars(described).get("rich_help_panel")
    return panel if isinstance(panel, str) else ""


def _command(name: str, command: typing.Any, *, common: Collection[str]) -> Iterator[str]:
    arguments = [param for param in command.params if not _is_option(param)]
    options = [param for param in command.params if _is_option(param)]
    words = [_argument_words(param) for param in arguments if not vars(param).get("hidden")]
    usage = " ".join(["stoker", name, *(["[OPTIONS]"] if options else []), *words])
    yield from ("", f"## stoker {name}", "", "```text", usage, "```", "")
    yield from _help_lines(command.help or "")
    shown = [param for param in arguments if not vars(param).get("hidden") and param.help]
    if shown:
        yield ""
        for param in shown:
            yield f"- `{_argument_words(param)}`: {_flat(param.help)}"
    visible = _visible_options(command)
    shared = []
    for panel in dict.fromkeys(map(_panel, visible)):
        rows = _options([param for param in visible if _panel(param) == panel])
        shared += [row.split("`")[1].split()[0] for row in rows if row in common]
        if own := [row for row in rows if row not in common]:
            yield from ("", *([f"**{panel}**", ""] if panel else []), *own)
    if shared:
        flags = ", ".join(f"`{flag}`" for flag in shared)
        yield from (
            "",
            f"Also {flags}: [options of several commands](#options-of-several-commands).",
        )
    if getattr(command, "epilog", None):
        yield ""
        yield from _help_lines(command.epilog)


def _is_option(param: object) -> bool:
    return any(flag.startswith("-") for flag in vars(param)["opts"])


def _argument_words(param: typing.Any) -> str:
    words = param.metavar or param.name.upper()
    return words if param.required or words.startswith("[") or "|" in words else f"[{words}]"


def _visible_options(command: typing.Any) -> list[typing.Any]:
    return [p for p in command.params if _is_option(p) and not vars(p).get("hidden")]


def _options(params: Sequence[typing.Any]) -> list[str]:
    """Returns a line for each option."""
    lines = []
    for param in params:
        flags = ", ".join((*param.opts, *param.secondary_opts))
        value = "" if param.is_flag else f" {param.metavar or param.name.upper()}"
        text = _flat(param.help or "")
        if param.multiple and "repeat" not in text:
            text += " May be repeated."
        # Where the parser has no default, the text may say one in words.
        if "(default: " not in text and (default := _option_default(param)):
            text += f" ({default})"
        lines.append(f"- `{flags}{value}`: {text}")
    return lines


def _option_default(param: typing.Any) -> str:
    default = param.default
    if param.required:
        return "required"
    if default is None or default == () or callable(default) or param.is_flag:
        return ""
    return f"default: `{default}`"


def _help_lines(text: str) -> Iterator[str]:
    """Yields a help text: what is indented, or not to be wrapped (`\\b`), as a code block."""
    for index, paragraph in enumerate(re.split(r"\n[ ]*\n", textwrap.dedent(text).strip("\n"))):
        if index:
            yield ""
        is_code = "\b" in paragraph or paragraph.startswith("  ")
        kept = textwrap.dedent(paragraph.replace("\b\n", "").replace("\b", "")).splitlines()
        yield from (("```text", *kept, "```") if is_code else (" ".join(kept),))


# Python. Its source is parsed, not imported: a page needs neither torch nor kfp nor an SDK.

MODULES = ("stoker", "stoker.kubeflow", "stoker.sagemaker")
_SECTIONS = re.compile(r"(Args|Attributes|Returns|Raises|Yields|Example):")
# What stands for an output of a step, or what Kubeflow itself hands over: no input of a component.
_NO_INPUT = re.compile(r"Output\[|OutputText|PipelineTaskFinalStatus")
CONSTANTS = MappingProxyType(
    {
        "stoker.kubeflow.RUN_ID": "The run's own id, as the whole value of an input: Kubeflow "
        "puts it in its place when the run starts.",
        "stoker.sagemaker.EXECUTION_ID": "The run's own id, a pipeline variable: letters and "
        "digits, and the same in all steps of a run.",
        "stoker.sagemaker.EXECUTION_ARN": "The address that the service knows the run by, a "
        "pipeline variable.",
        "stoker.sagemaker.INPUT": "The folder in which a control step finds its inputs, each in a "
        "folder of its name: `/opt/ml/processing/input`.",
        "stoker.sagemaker.OUTPUT": "The folder in which a control step leaves its outputs, each "
        "in a folder of its name: `/opt/ml/processing/output`.",
        "stoker.sagemaker.WORKLOAD": "The workload's file in a control step.",
        "stoker.sagemaker.Text": "The type of a text, or of a pipeline variable that is known "
        "when a run starts or an earlier step has ended.",
    }
)
Definition = ast.FunctionDef | ast.ClassDef


def python_page() -> str:
    """Returns the page of the public names of each public module."""
    lines = [
        "# Python",
        "",
        "The public names: these, and no others, keep their meaning within a version of stoker. "
        "All are typed (`py.typed`). An argument of several names of a module is described once. "
        "The examples of a module belong together, and a test runs them.",
        "",
        "Modules: " + ", ".join(f"[{module}](#{_slug(module)})" for module in MODULES) + ".",
    ]
    for module in MODULES:
        lines += _module(module)
    return "\n".join(lines) + "\n"


def public(module: str) -> list[str]:
    """Returns a module's public names: functions before classes and constants, each by name."""
    names = _list_named("__all__", _parsed(module))
    return sorted(
        (name for name in names if name != "__version__"),
        key=lambda name: (not name[0].islower(), name.lower()),
    )


def _heading(module: str, name: str) -> str:
    # An anchor has no capitals: `text` and `Text` would share one.
    is_shared = name != name.lower() and name.lower() in public(module)
    return f"{module}.{name}" + (" (type)" if is_shared else "")


@functools.cache
def _parsed(module: str) -> ast.Module:
    path = ROOT / "src" / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _list_named(name: str, tree: ast.Module) -> list[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return [str(each) for each in ast.literal_eval(node.value)]
    raise KeyError(name)


def _definition(module: str, name: str) -> tuple[Definition | None, str]:
    """Returns where a name is defined: in the source, or None with the name that a library has."""
    for node in ast.walk(_parsed(module)):
        if isinstance(node, Definition) and node.name == name:
            return node, name
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    if str(node.module).startswith("stoker."):
                        return _definition(str(node.module), alias.name)
                    return None, f"{node.module}.{alias.name}"
    return None, ""


def _module(module: str) -> Iterator[str]:
    yield from ("", f"## {module}", "")
    yield from _docstring(ast.get_docstring(_parsed(module)) or "")
    homes = {
        name: (names.partition(", ")[0], code)
        for names, code in examples(module).items()
        for name in names.split(", ")
    }
    told: set[str] = set()
    of_libraries = []
    for name in public(module):
        node, home = _definition(module, name)
        if node is None and f"{module}.{name}" not in CONSTANTS:
            of_libraries.append(f"`{name}` (`{home}`)")
            continue
        yield from ("", f"### {_heading(module, name)}", "")
        if f"{module}.{name}" in CONSTANTS:
            yield CONSTANTS[f"{module}.{name}"]
        elif node is not None:
            if not (isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases)):
                yield from ("```text", *_signature(name, node), "```", "")
            text = _docstring(ast.get_docstring(node) or "", outputs=_outputs(node))
            yield from _without_told(text, told)
            if isinstance(node, ast.ClassDef):
                yield from _members(node)
        first, code = homes.get(name, ("", ""))
        if first == name:
            yield from ("", "```python", *code.splitlines(), "```")
        elif first:
            yield from ("", f"Example: [{module}.{first}](#{_slug(f'{module}.{first}')}).")
    if of_libraries:
        yield from ("", f"Also there, for pipelines of your own: {', '.join(of_libraries)}.")


def _without_told(lines: Iterable[str], told: set[str]) -> Iterator[str]:
    """Leaves out the entries that an earlier name of the module has with the same words."""
    title: list[str] = []
    for line in lines:
        if line in ("Arguments:", "Outputs:"):
            title = [line, ""]
        elif not line.startswith("- `"):
            yield from [line] if line or not title else []
        elif line not in told:
            told.add(line)
            yield from title
            yield line
            title = []


def _signature(name: str, node: Definition) -> list[str]:
    """Returns the signature; in a long one each argument has a line."""
    if isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        init = next((each for each in made if each.name == "__init__"), None)
        if init is None:
            return [f"class {name}({', '.join(map(ast.unparse, node.bases))})".replace("()", "")]
        arguments, end = _arguments(init)[1:], ""
    else:
        arguments, end = (
            _arguments(node),
            f" -> {ast.unparse(node.returns).strip(chr(39))}" if node.returns else "",
        )
        if any(ast.unparse(each).endswith("_component") for each in node.decorator_list):
            # What kfp makes of it is called with its inputs, by name, and makes a step.
            kept = [each for each in arguments if not _NO_INPUT.search(each)]
            more = ["hyperparameters: Mapping[str, object] | None = None"]
            is_training = any("training" in ast.unparse(each) for each in node.decorator_list)
            arguments, end = ["*", *kept, *(more if is_training else [])], " -> Task"
    whole = f"{name}({', '.join(arguments)}){end}"
    if len(whole) <= 88:
        return [whole]
    return [f"{name}(", *(f"    {each}," for each in arguments), f"){end}"]


def _arguments(node: ast.FunctionDef) -> list[str]:
    """Returns the arguments as the source has them, the marks * and / among them."""
    every = node.args
    shown = [*every.posonlyargs, *every.args]
    defaults = [None] * (len(shown) - len(every.defaults)) + list(every.defaults)
    found = [_argument(each, value) for each, value in zip(shown, defaults, strict=True)]
    if every.posonlyargs:
        found.insert(len(every.posonlyargs), "/")
    if every.vararg:
        found.append(f"*{_argument(every.vararg, None)}")
    elif every.kwonlyargs:
        found.append("*")
    found += map(_argument, every.kwonlyargs, every.kw_defaults)
    if every.kwarg:
        found.append(f"**{_argument(every.kwarg, None)}")
    return found


def _outputs(node: Definition) -> set[str]:
    """Returns the arguments of a component of Kubeflow that are its outputs."""
    if isinstance(node, ast.ClassDef):
        return set()
    return {each.split(":")[0] for each in _arguments(node) if "Output" in each}


def _argument(each: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(each.annotation)}" if each.annotation else ""
    equals = " = " if kind else "="
    return f"{each.arg}{kind}" + (f"{equals}{ast.unparse(default)}" if default else "")


def _members(node: ast.ClassDef) -> Iterator[str]:
    found = [
        each
        for each in node.body
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_")
    ]
    if found:
        yield from ("", "Members:", "")
    for each in found:
        first = (ast.get_docstring(each) or "").split("\n\n")[0]
        names = [argument.split(":")[0].split("=")[0] for argument in _arguments(each)[1:]]
        is_property = any(ast.unparse(mark) == "property" for mark in each.decorator_list)
        call = "" if is_property else f"({', '.join(name for name in names if name != '*')})"
        yield f"- `{each.name}{call}`: {_flat(first)}"


def _docstring(text: str, *, outputs: Collection[str] = ()) -> Iterator[str]:
    """Yields a docstring of Google's style as Markdown."""
    section, block = "", list[str]()

    def ended() -> Iterator[str]:
        if block:
            text = textwrap.dedent("\n".join(block)).strip("\n")
            yield from _section_lines(section, text, outputs=outputs)
            block.clear()

    for line in text.splitlines():
        found = _SECTIONS.fullmatch(line)
        if found:
            yield from ended()
            section = found[1]
        elif section and line and not line.startswith(" "):
            yield from ended()
            section = ""
            block.append(line)
        else:
            block.append(line)
    yield from ended()


def _section_lines(section: str, text: str, *, outputs: Collection[str]) -> Iterator[str]:
    if section in ("Returns", "Yields"):
        yield from ("", f"{section}: {_flat(text)}")
    elif section:
        parts = [entry.partition(":") for entry in re.split(r"\n(?=\S)", text)]
        made = [part for part in parts if part[0] in outputs]
        yield from _entries("Arguments" if section == "Args" else section, parts, without=made)
        yield from _entries("Outputs", made)
    else:
        # An indented paragraph is code; those that follow on each other are one.
        paragraphs = re.findall(r"(?:    .*(?:\n|\Z)|\n(?=    ))+|(?:\S.*(?:\n|\Z))+", text)
        for index, paragraph in enumerate(each.strip("\n") for each in paragraphs):
            if index:
                yield ""
            if paragraph.startswith("    "):
                yield from ("```python", *textwrap.dedent(paragraph).splitlines(), "```")
            else:
                yield from _linked(paragraph).splitlines()


Entry = tuple[str, str, str]


def _entries(title: str, parts: Sequence[Entry], *, without: Sequence[Entry] = ()) -> Iterator[str]:
    kept = [part for part in parts if part not in without]
    if kept:
        yield from ("", f"{title}:", "")
    for name, colon, words in kept:
        yield f"- `{name}`: {_flat(words)}" if colon else f"- {_flat(name)}"


# Examples.

SNIPPETS = Path(__file__).parent / "snippets"


def examples(module: str) -> dict[str, str]:
    """Returns the examples by what they are of: what is below `# %% NAME, ...` in its file."""
    text = (SNIPPETS / f"{module.rpartition('.')[2]}.py").read_text()
    cells = re.split(r"(?m)^# %% ([\w, ]+)\n", text)[1:]
    return {names: code.strip("\n") for names, code in zip(cells[::2], cells[1::2], strict=True)}


# Variables.

# Which of stoker's own variables people set or read: what for.
PUBLIC = MappingProxyType(
    {
        "STOKER_COMMAND": "you set it for an image whose command line is fixed",
        "STOKER_INSTANCE_TYPE": "you set it",
        "STOKER_KUBEFLOW_NAMESPACE": "you set it",
        "STOKER_KUBEFLOW_TOKEN": "you set it",
        "STOKER_METRICS": "a script without stoker in its environment writes to it",
        "STOKER_OUTPUT": "your script may write to it",
        "STOKER_RUN": "you set it, for a script or a job that stoker does not start",
        "STOKER_RUN_ID": "your script may read it",
        "STOKER_WEBHOOK_URL": "you set it, with `notify`",
    }
)
# Public variables that no record of `stoker.environment` declares, with their meaning.
MEANINGS = MappingProxyType(
    {
        "STOKER_RUN": "File run.json with the settings of the run, its token beside it, or the "
        'document itself, such as {"feed": {"max_errors": 3}}.',
        "STOKER_RUN_ID": "Id of the run, in every log line.",
        "STOKER_INSTANCE_TYPE": "This host's instance type, as profiles and catalogs name it.",
        "STOKER_KUBEFLOW_NAMESPACE": "Your namespace in Kubeflow Pipelines.",
        "STOKER_KUBEFLOW_TOKEN": "Your token for Kubeflow Pipelines, a secret. "
        "`kubernetes.kubeflow.token_file` overrides it.",
        "STOKER_WEBHOOK_URL": "The webhook's address, a secret. `notify.variable` names another "
        "variable.",
    }
)


def environment_page() -> str:
    """Returns the page of the environment variables that users set or read."""
    meanings = {**dict(_declared()), **MEANINGS}
    lines = [
        "# Environment variables",
        "",
        "These keep their meaning within a version of stoker. All other `STOKER_...` variables "
        "are internal. Almost everything has a key of the workload or an option; variables are "
        "for secrets, and for jobs that stoker does not submit.",
        "",
        *(f"- `{name}` ({use}): {_flat(meanings[name])}" for name, use in PUBLIC.items()),
        "",
        "On every platform the training's command gets the variables of SageMaker's training "
        "toolkit: `SM_CHANNEL_NAME`, `SM_MODEL_DIR`, `SM_OUTPUT_DATA_DIR` and others. Libraries "
        "read their own: boto3 `AWS_PROFILE`, the Kubernetes client `KUBECONFIG`, rich `NO_COLOR`.",
    ]
    return "\n".join(lines) + "\n"


def _declared() -> Iterator[tuple[str, str]]:
    texts = {**field_texts(RunSettings.__doc__ or ""), **field_texts(ProcessSettings.__doc__ or "")}
    for name, variable in VARIABLES.items():
        yield variable, texts.get(name, "")


# Files, ports, exit codes.

RUN_FILES = MappingProxyType(
    {
        "workload.json": "The workload as it was run, `--set` and `--param` included. The records "
        "hold its digest; `--from` compares a workload with it, [key by key]"
        "(../method.md#what-makes-a-profile-void).",
        "profile.json": "The [profile](records.md#profilejson): what a step waits for.",
        "decision.json": "The [decision](records.md#decisionjson): plans, and the chosen one.",
        "training.json": "The [training](records.md#trainingjson): what ran, and its figures.",
        "evaluation.json": "The [evaluation](records.md#evaluationjson): gates, and the promise.",
        "report.html": "The report: one file, without scripts, that opens offline.",
        "timeline.csv": "A row for each step of the first rank: waiting, computing, samples.",
        "metrics.jsonl": "A line of JSON per interval: steps, waits, hosts, GPUs, memory "
        "([fields](../feed.md#see-inside)).",
        "bad_samples.csv": "With `feed.on_error`: a row for each sample that was left out or "
        "replaced ([how to](../how-to/bad-samples.md)).",
        "logs/": "The log of each host, with the output of the training's command.",
        "profile/": "The same of the profile's own run; `baseline-timeline.csv` has its steps as "
        "they were.",
        "hosts/": "On this machine: /opt/ml of each host, with `model` and `checkpoints`.",
        "output/": "On SageMaker and Kubernetes: what the job left, unpacked.",
        "token": "On this machine, during the run: its token, a secret.",
    }
)


def files_page() -> str:
    """Returns the page of the files of a run, the ports and the exit codes."""
    first = FeedSettings().port
    names = {
        0: "the coordinator on the first dnn host, and the agent on each data host",
        1: "each agent, to send batches; it parses nothing here",
        2: "torchrun's store, on the first dnn host",
    }
    peers = {
        0: "all launchers and ranks (to the coordinator) and from the ranks (to an agent)",
        1: "the ranks",
        2: "torchrun on each dnn host",
    }
    lines = [
        "# Files, ports, exit codes",
        "",
        "## Files of a run",
        "",
        "`stoker run` and `stoker train` write to `runs/ID/` in the folder that they are started "
        "in. The ID is `--name`, or NAME-DATE-TIME with the workload's name. Nothing else refers "
        "to a run's folder: move it, or delete it.",
        "",
        *(f"- `{name}`: {text}" for name, text in RUN_FILES.items()),
        "",
        "Options for files (`--out`, `--report`) name further places. The verbs of "
        "one step without `--out` write `profile.json`, `decision.json` or `evaluation.json` to "
        "the current folder. Files are written under another name and renamed: no reader sees a "
        "part of one.",
        "",
        "## Ports",
        "",
        "All are TCP, and the same on every host. On this machine all hosts share an address, and "
        "get free ports.",
        "",
        *(
            f"- **{first + index}** ([`feed.port`](workload.md#feedport)"
            f"{f' + {index}' if index else ''}): {name}. Connections come from {peers[index]}."
            for index, name in names.items()
        ),
        "- **A port that you choose** ([`feed.metrics_port`](workload.md#feedmetrics_port), off by "
        "default): Prometheus metrics, on the first dnn host. Whatever scrapes them connects.",
        *(
            f"- **{number}** ([`engine.ports.{name}`](workload.md#engineports)): {name} of engine "
            f"{engine}. Connections come from {_ENGINE_PEERS.get(name, 'all hosts')}."
            for engine, preset in PRESETS.items()
            for name, number in preset.ports.items()
        ),
        "",
        "dnn hosts also reach each other on ports that NCCL, gloo or MPI choose, and hosts of "
        "engine ray on ports that Ray chooses. What each port accepts: "
        "[threat-model.md](../threat-model.md). On Kubernetes "
        "configs/kubernetes/network-policy.yaml closes the others.",
        "",
        "## Exit codes",
        "",
        "- **0**: Done.",
        *_exit_codes(),
        f"- **{errors.EXIT_CHANGED}**: `stoker upload --check`: the pipeline would change.",
        f"- **{errors.EXIT_NEW}**: `stoker upload --check`: there is no pipeline of this name.",
        f"- **{errors.EXIT_INTERRUPTED}**: Ctrl-C.",
        f"- **{errors.EXIT_TERMINATED}**: SIGTERM.",
        "",
        "`stoker launch`, the entry point of the image, ends with the training command's own code. "
        "Otherwise that code is `exit_code` in `training.json`.",
    ]
    return "\n".join(lines) + "\n"


# Who connects to a port of an engine; to one that is not here, all hosts of the run do.
_ENGINE_PEERS = MappingProxyType(
    {"dispatcher": "the training, and the workers", "worker": "the training"}
)
_CODES = {
    1: "A bug of stoker; the traceback is printed.",
    2: "Wrong usage, settings or records.",
    3: "The model missed its gate, or the training did no step.",
    4: "The platform refused, or lost a host, or has none; the run lost its follower.",
    5: "The feed was lost: no data worker is left, or none came in time. Or a dataset cannot "
    "be sent to the data hosts ([what to do](../how-to/what-cannot-travel.md)).",
    6: "Your training failed, or took no batch from its data hosts.",
}


def events_page() -> str:
    """Returns the page of the log events; a line's comment in `EventName` is its meaning."""
    found = re.findall(r"^    [A-Z_]+ = auto\(\)  # (.+)$", inspect.getsource(EventName), re.M)
    rows = [f"- `{name}`: {text}" for name, text in zip(EventName, found, strict=True)]
    lines = [
        "# Log events",
        "",
        "Each line is `stoker TIME run=RUN host=HOST EVENT key=value ...`.",
        "",
        *rows,
    ]
    return "\n".join(lines) + "\n"


def _exit_codes() -> Iterator[str]:
    kinds: dict[int, list[str]] = {}

    def visit(kind: type[errors.StokerError]) -> None:
        kinds.setdefault(kind.exit_code, []).append(kind.__name__)
        for each in kind.__subclasses__():
            if each.__module__ == errors.__name__:
                visit(each)

    visit(errors.StokerError)
    for code, names in sorted(kinds.items()):
        yield f"- **{code}**: {_CODES[code]} Errors: {', '.join(f'`{name}`' for name in names)}."


# Words.


def _flat(text: str) -> str:
    return " ".join(text.split())


def _sentence(text: str) -> str:
    return _flat(text.split("\n\n")[0])


def _linked(text: str) -> str:
    """Returns the text with the pages that it names as links."""
    return re.sub(r"(?<!`)\bdocs/([\w-]+\.md)", r"[\1](../\1)", text)


def _slug(title: str) -> str:
    """Returns the anchor of a heading, as forges make it."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


# Lines.

MAX_COLUMNS = 120
_FOLDED_COLUMNS = 100
# What is left as it is: headings, tables, HTML, references; code is found by its fences and indent.
_AS_IT_IS = re.compile(r"\s*(#|\||<|>|\[[^]]*\]: |---)")
_LIST_ITEM = re.compile(r"\s*([-*+]|\d+[.)]) +")
# A word, with the code and the link that it is part of; either is kept on one line.
_WORD = re.compile(r"(?:!?\[[^]]{0,70}\]\([^)]*\)|`[^`]{1,110}`|\S)+")
# At the beginning of a line these would begin a list, a heading, a quotation or a table.
_NO_BEGINNING = re.compile(r"[-+*=]+|\d+[.)]|#+|[>|].*|---.*")


def folded(text: str) -> str:
    """Folds the paragraphs and list items of a page in which a line is too long."""
    lines: list[str] = []
    block: list[str] = []
    fence = ""

    def close_block() -> None:
        lines.extend(_filled(block) if any(len(line) > MAX_COLUMNS for line in block) else block)
        block.clear()

    for line in text.split("\n"):
        mark = re.match(r"\s*(`{3,})", line)
        is_code = not block and line.startswith("    ") and not _LIST_ITEM.match(line)
        if mark and not fence:
            close_block()
            fence = mark[1]
        elif mark and line.strip() == fence:
            lines.append(line)
            fence = ""
            continue
        if fence or not line or is_code or _AS_IT_IS.match(line):
            close_block()
            lines.append(line)
            continue
        if _LIST_ITEM.match(line):
            close_block()
        block.append(line)
    close_block()
    return "\n".join(lines)


def _filled(block: Sequence[str]) -> list[str]:
    """Returns a paragraph or list item in lines of at most 100 columns."""
    item = _LIST_ITEM.match(block[0])
    indent = len(item[0]) if item else len(block[0]) - len(block[0].lstrip())
    first = item[0] if item else " " * indent
    words = _WORD.findall(" ".join([block[0][indent:], *map(str.strip, block[1:])]))
    lines = [first + words[0]]
    for word in words[1:]:
        is_full = len(lines[-1]) + 1 + len(word) > _FOLDED_COLUMNS
        if is_full and not _NO_BEGINNING.fullmatch(word):
            lines.append(" " * indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
