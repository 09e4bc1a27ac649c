"""The options of a training script, read from its source: nothing of it is run.

Read are argparse, click, typer, absl's flags and the dataclasses of transformers' HfArgumentParser.
What cannot be passed as a hyperparameter, or has a default that only a run of the script knows, is
named, and left to the script.
"""

import ast
import contextlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.records import Json
from stoker.records.hyperparameters import OptionType

_SIMPLE_TYPES: Mapping[str, OptionType] = {
    "str": "str",
    "Path": "str",
    "int": "int",
    "INT": "int",
    "float": "float",
    "FLOAT": "float",
    "STRING": "str",
}
# Modules beside the script whose options are read, too.
_MAX_MODULES = 20
# The parser's own, and one that launchers pass.
_NOT_OF_USERS = ("help", "version", "local_rank")
# A value that only a run of the script knows: no source has this text.
_UNKNOWN: Json = "\0 not known"
_ABSL = {
    "DEFINE_string": "str",
    "DEFINE_integer": "int",
    "DEFINE_float": "float",
    "DEFINE_bool": "flag",
    "DEFINE_boolean": "flag",
    "DEFINE_enum": "str",
}
# Libraries whose options are not in the source, or have another form.
_OTHERS = (
    "hydra",
    "fire",
    "jsonargparse",
    "tyro",
    "simple_parsing",
    "gin",
    "ml_collections",
    "configargparse",
    "docopt",
    "getopt",
    "optparse",
    "plac",
    "tap",
    "cyclopts",
)
_BY_HAND = "options of this library are not read: write them by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundOption:
    """An option of a script.

    Attributes:
        name: As the script spells it, without dashes in front.
        default: Value with the option's type; None: the script's own, which is not passed.
        why: Why a default is not passed; empty: it is, or the script has none.
    """

    name: str
    type: OptionType = "str"
    default: Json = None
    help: str = ""
    choices: tuple[Json, ...] = ()
    is_required: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions:
    """The options that were found.

    Attributes:
        left_out: What is not read, each with the reason.
    """

    options: tuple[FoundOption, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass
class _Reader:
    """A source that is read; constants by name."""

    tree: ast.Module
    constants: dict[str, Json] = field(default_factory=dict)
    found: dict[str, FoundOption] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def add(self, option: FoundOption) -> None:
        if option.name.replace("-", "_") in _NOT_OF_USERS:
            return
        if option.name in self.found:
            self.leave(f"--{option.name}", "it is declared twice; the first counts")
            return
        self.found[option.name] = option

    def add_flag(self, name: str, text: str) -> None:
        self.add(FoundOption(name=name, type="flag", default=False, help=text))

    def add_bool(
        self, name: str, default: Json, text: str, *, type: OptionType = "switch", why: str = ""
    ) -> None:
        """Adds an option that is true or false; a default that is neither is the script's own."""
        kept = default if isinstance(default, bool) else None
        self.add(FoundOption(name=name, type=type, default=kept, help=text, why=why))

    def leave(self, name: str, why: str) -> None:
        self.left_out.setdefault(name, why)


def options_of(sources: Sequence[str], *, given: Sequence[str] = ()) -> ScriptOptions:
    """Returns the options of a script's sources; of what is no Python, none.

    Args:
        sources: Text of the script, and of modules that it imports.
        given: Words of its command, whose options keep their values.
    """
    tree = ast.Module(body=[], type_ignores=[])
    for source in sources:
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):
            tree.body += ast.parse(source).body
    reader = _Reader(tree=tree)
    _read_constants(reader)
    _read_argparse(reader)
    _read_absl(reader)
    for function in _functions(tree):
        _read_click(reader, function)
        _read_typer(reader, function)
    _read_dataclasses(reader)
    for name in _imported(tree):
        if name in _OTHERS:
            reader.leave(name, _BY_HAND)
    if any(_name_of(call.func) == "LightningCLI" for call in _calls(tree)):
        reader.leave("LightningCLI", _BY_HAND)
    if not reader.found and not reader.left_out and _reads_argv(tree):
        reader.leave("sys.argv", "the script reads its words itself: write them into the command")
    typed: set[str] = set()
    for word in given:
        if word.startswith("-"):
            typed.update(_meant(reader, word.partition("=")[0]))
    for name in sorted(typed):
        reader.leave(f"--{name}", "the command sets it")
    kept = [option for name, option in reader.found.items() if name not in typed]
    return ScriptOptions(
        options=tuple(kept),
        left_out=tuple(f"{name}: {why}" for name, why in reader.left_out.items()),
    )


def _meant(reader: _Reader, word: str) -> list[str]:
    """Returns the options that a word of a command may mean: argparse takes beginnings, too."""
    name = word.lstrip("-")
    if name in reader.aliases:
        return [reader.aliases[name]]
    if name.removeprefix("no-") in reader.found and name not in reader.found:
        return [name.removeprefix("no-")]
    return [option for option in reader.found if word.startswith("--") and option.startswith(name)]


def sources_of(words: Sequence[str], folder: Path) -> list[str]:
    """Returns the text of a command's Python script, and of the modules beside it that it imports.

    Args:
        words: The command.
        folder: The folder in which it runs.
    """
    files = [word for word in words if word.endswith(".py")]
    if "-m" in words[:-1]:
        module = Path(*words[words.index("-m") + 1].split("."))
        files += [str(module.with_suffix(".py")), str(module / "__main__.py")]
    script = next((folder / name for name in files if (folder / name).is_file()), None)
    if script is None:
        return []
    texts = [_text_of(script)]
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        names = dict.fromkeys(_modules(ast.parse(texts[0])))
        beside = [script.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names]
        texts += [_text_of(file) for file in beside[:_MAX_MODULES] if file.is_file()]
    return texts


def _modules(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def _read_constants(reader: _Reader) -> None:
    """Reads module-level names that are set once, to a constant."""
    for node in reader.tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            value = _value(reader, node.value)
            if isinstance(target, ast.Name) and value is not _UNKNOWN:
                reader.constants[target.id] = value


def _value(reader: _Reader, node: ast.expr | None) -> Json:
    """Returns the value of an expression of constants; `_UNKNOWN`: only a run knows it."""
    if isinstance(node, ast.Name) and node.id in reader.constants:
        return reader.constants[node.id]
    if isinstance(node, ast.BinOp | ast.UnaryOp):
        return _calculated(node)
    try:
        value: Json = ast.literal_eval(node) if node is not None else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _UNKNOWN
    if isinstance(value, tuple):
        return list(value)
    return value


def _calculated(node: ast.expr) -> Json:
    """Returns the value of arithmetic with numbers, such as -1, 1 << 20, 64 * 4."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            operand_value = _calculated(operand)
            if isinstance(operand_value, int | float):
                return -operand_value
            return operand_value
        case ast.BinOp(left=left, op=sign, right=right):
            return _combined(_calculated(left), sign, _calculated(right))
    return _UNKNOWN


def _combined(left: Json, sign: ast.operator, right: Json) -> Json:
    if isinstance(left, int | float) and isinstance(right, int | float):
        match sign:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.Div() if right:
                return left / right
            case ast.Pow() if abs(left) <= 1e3 and abs(right) <= 64:
                if right < 0:
                    return float(left) ** right
                return left**right
            case ast.LShift() if isinstance(left, int) and isinstance(right, int):
                if 0 <= right < 64:
                    return left << right
                return _UNKNOWN
    return _UNKNOWN


def _name_of(node: ast.expr | None) -> str:
    """Returns the last part of a dotted name: Path of pathlib.Path; empty for others."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    return ""


def _keywords(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    yield from sorted(calls, key=lambda call: (call.lineno, call.col_offset))


def _functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _reads_argv(tree: ast.Module) -> bool:
    attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return any(
        attribute.attr == "argv" and _name_of(attribute.value) == "sys" for attribute in attributes
    )


def _imported(tree: ast.Module) -> Iterator[str]:
    yield from (name.partition(".")[0] for name in _modules(tree))


def _texts(reader: _Reader, nodes: Iterable[ast.expr]) -> list[str]:
    """Returns the texts among some expressions, such as an option's names."""
    values = [_value(reader, node) for node in nodes]
    return [value for value in values if isinstance(value, str) and value]


def _subcommands(tree: ast.Module) -> set[str]:
    """Returns the variables that hold the parser of a subcommand."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if _name_of(node.value.func) == "add_parser":
            names.update(_name_of(target) for target in node.targets)
    return names


def _read_argparse(reader: _Reader) -> None:
    subcommands = _subcommands(reader.tree)
    for call in _calls(reader.tree):
        if not isinstance(call.func, ast.Attribute) or call.func.attr != "add_argument":
            continue
        names = _texts(reader, call.args)
        if _UNKNOWN in names or len(names) != len(call.args) or not names:
            reader.leave(f"line {call.lineno}", "the option's name is computed")
        elif _name_of(call.func.value) in subcommands:
            reader.leave(names[-1], "it is an option of a subcommand")
        else:
            _add_argument(reader, names, _keywords(call))


def _add_argument(reader: _Reader, names: list[str], told: Mapping[str, ast.expr]) -> None:
    name = _option_name(names)
    if not name:
        why = "a positional argument belongs in the command"
        if names[0].startswith("-"):
            why = "a long option needs two dashes to be passed"
        elif not names[0][:1].isalpha():
            why = "an option needs dashes to be passed"
        reader.leave(names[0], why)
        return
    reader.aliases |= {alias.lstrip("-"): name for alias in names}
    action = _value(reader, told.get("action"))
    if action is _UNKNOWN:
        action = _name_of(told["action"]) or "of its own"
    text = _help(reader, told)
    if action in ("store_true", "store_false", "store_const"):
        reader.add_flag(name, text)
    elif action == "BooleanOptionalAction":
        default = _value(reader, told.get("default"))
        is_known = default is None or isinstance(default, bool)
        reader.add_bool(name, default, text, why="" if is_known else "its default is computed")
    elif action in (None, "store"):
        reader.add(_stored(reader, name, told))
    elif action not in ("help", "version"):
        shown = f"--{name}" if len(name) > 1 else f"-{name}"
        reader.leave(shown, f"the action {action} cannot be a hyperparameter")


def _stored(reader: _Reader, name: str, told: Mapping[str, ast.expr]) -> FoundOption:
    default = told.get("default")
    is_several = "nargs" in told and _value(reader, told["nargs"]) not in ("?", None)
    option = _typed(
        reader,
        name,
        kind=told.get("type"),
        default=default,
        choices=told.get("choices"),
        text=_help(reader, told),
        is_several=is_several,
        is_required=_value(reader, told.get("required")) is True,
    )
    if is_several and isinstance(default, ast.Tuple):
        why = f"its default, {ast.unparse(default)}, would arrive as a list"
        return replace(option, default=None, why=why)
    return option


def _option_name(names: Sequence[str]) -> str:
    """Returns an option's name as a hyperparameter has it; empty: it can be none."""
    long = [name[2:] for name in names if name.startswith("--") and len(name) > 3]
    short = [name[1:] for name in names if re.fullmatch(r"-[A-Za-z]", name)]
    return next(iter([*long, *short]), "")


def _help(reader: _Reader, told: Mapping[str, ast.expr]) -> str:
    text = _value(reader, told.get("help"))
    if not isinstance(text, str) or text is _UNKNOWN:
        return ""
    shown = re.sub(r"\s*[(\[]?(default[:=]?\s*)?%\(\w+\)[sdrgf][)\]]?", "", text)
    return " ".join(shown.replace("%%", "%").split())


def _typed(
    reader: _Reader,
    name: str,
    *,
    kind: ast.expr | None,
    default: ast.expr | None,
    choices: ast.expr | None,
    text: str,
    is_several: bool = False,
    is_required: bool = False,
) -> FoundOption:
    """Returns an option with a value; its default only where passing it changes nothing.

    Args:
        reader: The source.
        name: Name of the option.
        kind: Expression of its type; None: texts.
        default: Expression of its default.
        choices: Expression of its choices.
        text: Its help.
        is_several: Whether it takes several words.
        is_required: Whether the script ends without it.
    """
    simple_type: OptionType | None = "str" if kind is None else _SIMPLE_TYPES.get(_name_of(kind))
    value = _value(reader, default)
    listed_choices = _value(reader, choices)
    listed = tuple(listed_choices) if isinstance(listed_choices, list) else ()
    kept, why = _passed(value, simple_type, is_several=is_several)
    if kept is not None and listed and not is_several and kept not in listed:
        kept = None
        why = "its default is not among its choices"
    if _name_of(kind) == "bool":
        kept = None
        why = "type=bool takes every text for true"
    return FoundOption(
        name=name,
        type="words" if is_several else simple_type or "str",
        default=kept,
        help=text,
        choices=listed,
        is_required=is_required,
        why=why,
    )


def _passed(value: Json, kind: OptionType | None, *, is_several: bool) -> tuple[Json, str]:
    """Returns a default as a value that the script reads back as the same, or why there is none."""
    if value is None:
        return None, ""
    if value is _UNKNOWN:
        return None, "its default is computed"
    if is_several:
        parts = value if isinstance(value, list) else [value]
        if all(_is_of(part, kind) for part in parts):
            return shlex.join(str(part) for part in parts), ""
        return None, "its default has types that differ from its words"
    if isinstance(value, str):
        return _of_text(value, kind)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if kind == "float":
            return float(value), ""
        if kind == "int" and isinstance(value, int):
            return value, ""
    return None, f"its default, {value!r}, would arrive as a text"


def _is_of(part: Json, kind: OptionType | None) -> bool:
    """Whether a word of a default is read back as the same."""
    if isinstance(part, bool):
        return False
    kinds: dict[str, type | tuple[type, ...]] = {"int": int, "float": (int, float)}
    return isinstance(part, kinds.get(kind or "", str))


def _of_text(value: str, kind: OptionType | None) -> tuple[Json, str]:
    # argparse itself hands a text to the type.
    try:
        if kind == "int":
            return int(value), ""
        if kind == "float":
            return float(value), ""
    except ValueError:
        return None, f"its default, {value!r}, is no number"
    if value.startswith("-"):
        return None, f"its default, {value!r}, would be read as an option"
    return value, ""


def _read_absl(reader: _Reader) -> None:
    for call in _calls(reader.tree):
        kind = _name_of(call.func)
        if not kind.startswith("DEFINE_") or len(call.args) < 2:
            continue
        name = _value(reader, call.args[0])
        default = call.args[1]
        keywords = _keywords(call)
        if len(call.args) > 2:
            keywords.setdefault("help", call.args[-1])
        text = _help(reader, keywords)
        if kind not in _ABSL or not isinstance(name, str) or name is _UNKNOWN:
            reader.leave(f"line {call.lineno}", f"flags of {kind} are not read")
        elif _ABSL[kind] == "flag" and _value(reader, default) is not False:
            reader.leave(
                f"--{name}", f"absl turns it off by --no{name}, which belongs into command"
            )
        elif _ABSL[kind] == "flag":
            reader.add_flag(name, text)
        else:
            choices = call.args[2] if kind == "DEFINE_enum" and len(call.args) > 2 else None
            reader.add(
                _typed(
                    reader,
                    name,
                    kind=ast.Name(id=_ABSL[kind]),
                    default=default,
                    choices=choices,
                    text=text,
                )
            )


def _read_click(reader: _Reader, function: ast.FunctionDef) -> None:
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call):
            continue
        kind = _name_of(decorator.func)
        keywords = _keywords(decorator)
        names = _texts(reader, decorator.args)
        if kind == "argument" and names:
            reader.leave(names[0], "a positional argument belongs in the command")
        if kind != "option" or not names:
            continue
        if "multiple" in keywords or "count" in keywords:
            reader.leave(names[0], "it is given more than once")
        else:
            _add_click(reader, names, keywords)


def _add_click(reader: _Reader, names: list[str], told: Mapping[str, ast.expr]) -> None:
    text = _help(reader, told)
    default = _value(reader, told.get("default"))
    both = next((name for name in names if "/" in name), "")
    if both:
        name, _, off = both.partition("/")
        if off.strip() == f"--no-{name.strip()[2:]}":
            reader.add_bool(name.strip()[2:], default, text)
        else:
            reader.leave(name, f"it is turned off by {off}")
        return
    name = _option_name(names)
    if not name:
        reader.leave(names[0], "a long option needs two dashes to be passed")
        return
    reader.aliases |= {alias.lstrip("-"): name for alias in names}
    if _value(reader, told.get("is_flag")) is True or isinstance(default, bool):
        reader.add_flag(name, text)
    else:
        _add_click_value(reader, name, told)


def _add_click_value(reader: _Reader, name: str, told: Mapping[str, ast.expr]) -> None:
    kind = told.get("type")
    default = _value(reader, told.get("default"))
    choices: ast.expr | None = None
    if isinstance(kind, ast.Call) and _name_of(kind.func) == "Choice":
        choices = kind.args[0] if kind.args else None
        kind = None
    elif kind is None and isinstance(default, int | float):
        # click takes the type of the default.
        kind = ast.Name(id=type(default).__name__)
    reader.add(
        _typed(
            reader,
            name,
            kind=kind,
            default=told.get("default"),
            choices=choices,
            text=_help(reader, told),
            is_several="nargs" in told,
            is_required=_value(reader, told.get("required")) is True,
        )
    )


def _read_typer(reader: _Reader, function: ast.FunctionDef) -> None:
    run = {
        _name_of(call.args[0])
        for call in _calls(reader.tree)
        if _name_of(call.func) == "run" and call.args and isinstance(call.func, ast.Attribute)
        if _name_of(call.func.value) == "typer"
    }
    decorators = [
        decorator.func for decorator in function.decorator_list if isinstance(decorator, ast.Call)
    ]
    is_command = any(_name_of(decorator) == "command" for decorator in decorators)
    if "typer" not in set(_imported(reader.tree)) or not (function.name in run or is_command):
        return
    arguments = [*function.args.args, *function.args.kwonlyargs]
    positional = function.args.defaults
    defaults: list[ast.expr | None] = [None] * (len(function.args.args) - len(positional))
    defaults += [*positional, *function.args.kw_defaults]
    for argument, default in zip(arguments, defaults, strict=True):
        _add_typer(reader, argument, default)


def _add_typer(reader: _Reader, argument: ast.arg, default: ast.expr | None) -> None:
    kind = argument.annotation
    call = default
    if (
        isinstance(kind, ast.Subscript)
        and isinstance(kind.slice, ast.Tuple)
        and _name_of(kind.value) == "Annotated"
    ):
        kind, *parts = kind.slice.elts
        call = next((part for part in parts if isinstance(part, ast.Call)), default)
    elif isinstance(call, ast.Call):
        default = call.args[0] if call.args else _keywords(call).get("default")
    is_option = default is not None
    names = []
    keywords = {}
    if isinstance(call, ast.Call):
        is_option = _name_of(call.func) == "Option"
        names = _texts(reader, call.args)
        keywords = _keywords(call)
    if not is_option:
        reader.leave(argument.arg, "a positional argument belongs in the command")
        return
    name = _option_name(names) or argument.arg.replace("_", "-")
    text = _help(reader, keywords)
    if _name_of(kind) == "bool":
        reader.add_bool(name, _value(reader, default), text)
        return
    option = _typed(reader, name, kind=_inner(kind), default=default, choices=None, text=text)
    reader.add(option)


def _inner(kind: ast.expr | None) -> ast.expr | None:
    """Returns T of Optional[T] and T | None."""
    if isinstance(kind, ast.Subscript) and _name_of(kind.value) == "Optional":
        return kind.slice
    if isinstance(kind, ast.BinOp) and isinstance(kind.op, ast.BitOr):
        return kind.left
    return kind


def _read_dataclasses(reader: _Reader) -> None:
    """Reads the dataclasses that a script gives to HfArgumentParser."""
    classes = {n.name: n for n in ast.walk(reader.tree) if isinstance(n, ast.ClassDef)}
    for call in _calls(reader.tree):
        if _name_of(call.func) != "HfArgumentParser" or not call.args:
            continue
        given = call.args[0]
        parts = given.elts if isinstance(given, ast.Tuple | ast.List) else [given]
        for part in parts:
            if _name_of(part) not in classes:
                name = _name_of(part) or "a class"
                reader.leave(name, "its options are defined in another file")
                continue
            for node in classes[_name_of(part)].body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    _add_field(reader, node.target.id, node)


def _add_field(reader: _Reader, name: str, node: ast.AnnAssign) -> None:
    default = node.value
    text = ""
    is_made = False
    if isinstance(default, ast.Call) and _name_of(default.func) == "field":
        keywords = _keywords(default)
        metadata = _value(reader, keywords.get("metadata"))
        text = str(metadata.get("help", "")) if isinstance(metadata, Mapping) else ""
        is_made = "default_factory" in keywords
        default = keywords.get("default")
    kind = _inner(node.annotation)
    choices = None
    is_several = False
    if isinstance(kind, ast.Subscript):
        generic = _name_of(kind.value)
        is_several = generic in ("list", "List")
        choices = kind.slice if generic == "Literal" else None
        kind = kind.slice if is_several else None
    text = " ".join(text.split())
    if _name_of(kind) == "bool":
        reader.add_bool(name, _value(reader, default), text, type="bool")
        return
    option = _typed(
        reader,
        name,
        kind=kind,
        default=default,
        choices=choices,
        text=text,
        is_several=is_several,
        is_required=default is None and not is_made,
    )
    reader.add(option)
