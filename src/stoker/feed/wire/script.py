"""A script may set values in its own modules: they do not travel, and the user is told.

Functions and classes of modules travel by name. So after `import cfg; cfg.SIZE = 5` a data host
makes batches with the size that `cfg` itself says. A data host says what the user's modules have
there, and the trainer compares, at each pass: values are no part of the spec, so that ranks which
set different ones share it, and one that changes does not ship it again.

A difference is told if code that came with the spec reads the name, in a module of the user (a file
outside of the standard library, site-packages and dist-packages) whose source gives it literals
and nothing else, of which the trainer has none. So left out is what differs by host: what a module
computes as it is imported (paths, the environment, the number of CPUs). Left out are also
containers that begin empty (caches, registries), and what the spec's own code sets (`global`,
worker_init_fn). Code and sources are looked at only where values differ.
"""

import ast
import dis
import functools
import hashlib
import importlib.util
import operator
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from types import CodeType, FunctionType, MappingProxyType, ModuleType

from stoker.feed.wire.pickling import CachedFunction, is_by_name
from stoker.logs import Log

# Functions and classes that are looked at; 500 lines have some 50.
MAX_CODE = 5000

# Of what is pickled, they have run in the trainer.
_IN_TRAINER = ("__init__", "__post_init__", "__getstate__", "__reduce__", "__reduce_ex__")
# Code that names one of them may set all of a module.
_SETTERS = frozenset({"setattr", "vars", "globals", "__dict__"})
_CODE = (FunctionType, type, CachedFunction)
_PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, set, frozenset, dict)
_NOTHING = object()

NamePath = tuple[str, ...]
IsUsers = Callable[[ModuleType], bool]


@dataclass(frozen=True, slots=True)
class _Named:
    """The names in the code of a function and of the functions inside it.

    Attributes:
        read: Globals with the attributes taken from them: `cfg.SIZE` in its parts.
        written: The same.
    """

    read: tuple[NamePath, ...]
    written: tuple[NamePath, ...]
    may_set_all: bool


@dataclass(frozen=True, slots=True)
class _Code:
    """A function or class to look at.

    Attributes:
        is_there: Data hosts have it from its module: its globals do not travel.
        is_made: Of a class: code that runs there may call it.
    """

    value: object
    is_there: bool
    is_made: bool = False


def names_read(code: Iterable[object], *, is_module_users: IsUsers) -> set[tuple[str, str]]:
    """Returns module and name of each global that the code reads there, and does not set itself.

    Args:
        code: Functions and classes that were pickled; what they name is looked at, too.
        is_module_users: Whether a module is the user's, and looked into.
    """
    known: dict[int, bool] = {}

    def is_users(module: ModuleType) -> bool:
        found = known.get(id(module))
        if found is None:
            found = known[id(module)] = is_module_users(module)
        return found

    read: set[tuple[str, str]] = set()
    written: set[tuple[str, str]] = set()
    waiting = deque(_Code(each, is_by_name(each)) for each in code if not _ran_in_trainer(each))
    seen: set[tuple[int, bool, bool]] = set()
    while waiting and len(seen) < MAX_CODE:
        each = waiting.popleft()
        key = (id(each.value), each.is_there, each.is_made)
        if key in seen:
            continue
        seen.add(key)
        waiting.extend(_parts(each, is_users))
        function = each.value
        if not isinstance(function, FunctionType) or not _is_theirs(function, is_users):
            continue
        named = _named(function.__code__)
        for path in named.written:
            module, name, _ = _resolved(function, path, is_users)
            written.add((module, name))
        for path in named.read:
            module, name, value = _resolved(function, path, is_users)
            kind = type(value)
            # A function that travels takes its own globals along, but not those of modules.
            is_there = each.is_there or module != function.__globals__.get("__name__")
            if issubclass(kind, _CODE):
                waiting.append(_Code(value, is_there or is_by_name(value), is_made=True))
            elif kind is ModuleType:
                if named.may_set_all:
                    written.add((str(vars(value).get("__name__")), "*"))
            elif name == "__dict__" or (value is _NOTHING and name == "globals"):
                written.add((module, "*"))
            elif value is not _NOTHING:
                if is_there:
                    read.add((module, name))
                if kind not in _PLAIN:
                    waiting.append(_Code(kind, is_by_name(kind)))
    return {(module, name) for module, name in read - written if (module, "*") not in written}


def globals_read(code: CodeType) -> tuple[NamePath, ...]:
    """Returns the globals that a function's code reads, each with the attributes taken from it."""
    return _named(code).read


def _parts(each: _Code, is_users: IsUsers) -> Iterator[_Code]:
    """Returns the functions and classes that a function or class consists of."""
    value = each.value
    if isinstance(value, type):
        for kind in value.__mro__:
            if _is_theirs(kind, is_users):
                is_there = each.is_there or is_by_name(kind)
                for name, member in list(vars(kind).items()):
                    inner = _inner(member)
                    if issubclass(type(inner), _CODE) and (each.is_made or name not in _IN_TRAINER):
                        yield _Code(inner, is_there, each.is_made)
        return
    parts: list[object] = [vars(value).get("__wrapped__")]
    if isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            try:
                parts.append(cell.cell_contents)
            except ValueError:
                # Empty yet.
                continue
    for part in parts:
        if issubclass(type(part), _CODE):
            yield _Code(part, each.is_there or is_by_name(part), each.is_made)


def _inner(member: object) -> object:
    """Returns the function of a method, a property; else the member of the class itself."""
    # By its type: to ask an object of the user for its class may run code.
    if type(member) in (staticmethod, classmethod):
        return vars(member).get("__wrapped__")
    if type(member) is property:
        return member.fget
    if type(member) is functools.cached_property:
        return member.func
    return member


def _ran_in_trainer(value: object) -> bool:
    return isinstance(value, FunctionType) and value.__name__ in _IN_TRAINER


def _is_theirs(value: FunctionType | type, is_users: IsUsers) -> bool:
    """Tells whether it is of the script, or of a module of the user."""
    name = str(value.__module__)
    if isinstance(value, FunctionType):
        # A decorator may have given it another module's name.
        name = str(value.__globals__.get("__name__"))
    own = sys.modules.get(name)
    return name == "__main__" or (own is not None and is_users(own))


def _resolved(function: FunctionType, path: NamePath, is_users: IsUsers) -> tuple[str, str, object]:
    """Returns where a path leads: into modules of the user, to a name there, and its value."""
    names: dict[str, object] = function.__globals__
    module, name, value = str(names.get("__name__")), "", _NOTHING
    for number, name in enumerate(path):
        value = names.get(name, _NOTHING)
        is_last = number == len(path) - 1
        if is_last or not (type(value) is ModuleType and is_users(value)):
            break
        names = vars(value)
        module = str(names.get("__name__"))
    return module, name, value


@functools.lru_cache(maxsize=4096)
def _named(code: CodeType) -> _Named:
    """Returns the names in `code`; 2.5 us an instruction, once."""
    read: dict[NamePath, None] = {}
    written: dict[NamePath, None] = {}
    path: NamePath = ()
    for step in dis.get_instructions(code):
        name = str(step.argval)
        if path and step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path = (*path, name)
            continue
        if step.opname == "STORE_GLOBAL":
            written[(name,)] = None
        elif path and step.opname == "STORE_ATTR":
            written[(*path, name)] = None
            path = ()
        if path:
            read[path] = None
        path = (name,) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else ()
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            named = _named(inner)
            read |= dict.fromkeys(named.read)
            written |= dict.fromkeys(named.written)
    may_set_all = any(not _SETTERS.isdisjoint(each) for each in read)
    return _Named(tuple(read), tuple(written), may_set_all)


# A longer file is generated; it would take more than 10 ms.
MAX_SOURCE_BYTES = 1 << 20

_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], object]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: lambda left, right: operator.lshift(int(left), int(right)),
}
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, slots=True)
class ModuleSource:
    """A module's top level.

    Attributes:
        literals: All that a name is given; names that are given anything else are not among them.
        imports: Names that are imported from a module, once: that module, and the name there.
    """

    literals: Mapping[str, list[object]] = field(default_factory=dict)
    imports: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def source_of(path: str, *, package: str) -> ModuleSource:
    """Reads and parses the file, 5 ms for 500 lines; empty if that cannot be done.

    Args:
        package: That imports of the module are relative to.
    """
    try:
        data = Path(path).read_bytes()
        tree = ast.parse(data[: MAX_SOURCE_BYTES + 1])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ModuleSource()
    if len(data) > MAX_SOURCE_BYTES:
        return ModuleSource()
    bound: Counter[str] = Counter()
    literals: dict[str, list[object]] = {}
    imports: dict[str, tuple[str, str]] = {}
    for node in _top_level(tree):
        bound.update(_bound(node))
        for name, value in _assigned(node):
            try:
                literals.setdefault(name, []).append(_literal(value))
            except (ValueError, TypeError, SyntaxError, ArithmeticError, RecursionError):
                bound[name] += 1
        if isinstance(node, ast.ImportFrom):
            origin = _origin(node, package)
            imports.update({each.asname or each.name: (origin, each.name) for each in node.names})
    return ModuleSource(
        {name: values for name, values in literals.items() if bound[name] == len(values)},
        {name: origin for name, origin in imports.items() if bound[name] == 1},
    )


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes that are run when the module is imported."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, _SCOPES):
            nodes.extend(ast.iter_child_nodes(node))


def _bound(node: ast.AST) -> Iterator[str]:
    """Yields the names that a node itself gives something."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            yield name
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Import(names=names):
            yield from ((each.asname or each.name).partition(".")[0] for each in names)
        case ast.ImportFrom(names=names):
            yield from (each.asname or each.name for each in names)


def _assigned(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _paired(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _paired(target, value)


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name), _:
            yield name, value
        case ast.Tuple(elts=targets), ast.Tuple(elts=values) if len(targets) == len(values):
            for each, given in zip(targets, values, strict=True):
                yield from _paired(each, given)


def _literal(node: ast.expr) -> object:
    """Returns the value of a literal; ValueError: it is none, or a container to be filled."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _literal(node.left), _literal(node.right)
        # Not those of lists and strings: they may be large.
        if type(left) not in (int, float) or type(right) not in (int, float):
            raise ValueError("not of numbers")
        return _OPERATORS[type(node.op)](left, right)  # type: ignore[arg-type]
    value: object = ast.literal_eval(node)
    if isinstance(value, list | dict | set) and not value:
        raise ValueError("to be filled")
    return value


def _origin(node: ast.ImportFrom, package: str) -> str:
    """Returns the module that is imported from; empty if there is none of that name."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""


# That a data host tells of: 20 to 40 bytes each.
MAX_NAMES = 1024
# Of a value; what is longer is no setting.
MAX_CHARACTERS = 1000
# In a warning.
MAX_TOLD = 8
# Specs of which the values there are kept, and warnings.
MAX_KEPT = 100

_NUMBERS = (type(None), bool, int, float)
_MAX_DEPTH = 4
# Longer ones are no easier to read.
_MAX_DIGITS = 40
_UNKNOWN: frozenset[str] = frozenset()


def values_here(modules: Iterable[str]) -> dict[str, str]:
    """Returns the plain globals of these modules in this process, by `cfg.SIZE`: texts.

    Args:
        modules: Names; those that are not the user's are passed over.
    """
    found: dict[str, str] = {}
    for module in sorted(modules):
        there = sys.modules.get(module)
        if there is None or not is_users(there):
            continue
        for name, value in list(vars(there).items()):
            text = "" if name.startswith("__") else text_of(value)
            if text and len(found) < MAX_NAMES:
                found[f"{vars(there)['__name__']}.{name}"] = text
    return found


def values_of(names: Iterable[str]) -> dict[str, str]:
    """Returns the same of these names."""
    found: dict[str, str] = {}
    for path in names:
        module, _, name = path.rpartition(".")
        there = sys.modules.get(module)
        if there is not None and is_users(there):
            text = text_of(vars(there).get(name, there))
            if text:
                found[path] = text
    return found


def names_read_by(code: Iterable[object]) -> frozenset[str]:
    """Returns the globals of the user's modules that the code of a spec reads, as `cfg.SIZE`.

    Args:
        code: Functions and classes that were pickled.
    """
    try:
        read = names_read(code, is_module_users=is_users)
    except Exception:
        # Whatever modules and classes may be, it must not end the feed.
        return frozenset()
    return frozenset(f"{module}.{name}" for module, name in read)


def were_set(values: Mapping[str, str]) -> dict[str, str]:
    """Returns those that the source does not have, where it has literals only."""
    found: dict[str, str] = {}
    for path, text in values.items():
        literals = _literals_of(*path.rsplit(".", 1))
        if literals and text not in literals:
            found[path] = text
    return found


def difference(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """Says what the user should know; empty: nothing. Of strings, only that they differ.

    Args:
        here: What the trainer's script has set.
        there: A data host's `values_here`.
    """
    names = [name for name in sorted(here) if there.get(name, here[name]) != here[name]]
    if not names:
        return ""
    told = [f"{name}{_shown(here[name], there[name])}" for name in names[:MAX_TOLD]]
    if len(names) > MAX_TOLD:
        told.append(f"and {len(names) - MAX_TOLD} more")
    return (
        f"set in modules by the script, which does not travel: {', '.join(told)}; data hosts have "
        "what the modules say: set it in attributes of the dataset, in the module itself or in "
        "worker_init_fn"
    )


class ValuesThere:
    """The values that data hosts have, and what was told of them; for one thread."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._there: dict[str, tuple[str, Mapping[str, str]]] = {}
        self._read: dict[str, frozenset[str]] = {}
        self._told: set[str] = set()

    def take(self, digest: str, host: str, there: Mapping[str, str]) -> None:
        """Takes a data host's `values_here`, for the spec of that digest."""
        if len(self._there) >= MAX_KEPT:
            forgotten = next(iter(self._there))
            del self._there[forgotten]
            self._read.pop(forgotten, None)
        self._there[digest] = (host, there)

    def compare(self, digest: str, code: Iterable[object]) -> None:
        """Warns of a difference: once, not with every host, loader or pass.

        Args:
            code: Functions and classes that were pickled into that spec.
        """
        host, there = self._there.get(digest, ("", {}))
        here = values_of(there)
        differing = {name: text for name, text in here.items() if text != there[name]}
        if not differing:
            return
        if digest not in self._read:
            # 2.5 us an instruction, and then 10 us a line of a module.
            self._read[digest] = names_read_by(code)
        read = self._read[digest]
        values = were_set({name: text for name, text in differing.items() if name in read})
        warning = difference(values, there)
        if warning and warning not in self._told and len(self._told) < MAX_KEPT:
            self._told.add(warning)
            self._log.event("module_values_differ", agent=host, text=warning)


def is_users(module: ModuleType) -> bool:
    """Tells whether it is a plain module of the user's own code, and travels by name."""
    # One of another type may do anything when it is looked at.
    if type(module) is not ModuleType:
        return False
    name, path = vars(module).get("__name__"), vars(module).get("__file__")
    return type(name) is str and type(path) is str and _is_users_file(name, path)


def text_of(value: object) -> str:
    """Returns a number as it is written, the digest of another plain value; empty: it is none."""
    try:
        text = _canonical(value, depth=_MAX_DEPTH)
    except (ValueError, RuntimeError):
        # RuntimeError: another thread changes it.
        return ""
    if type(value) in _NUMBERS and len(text) <= _MAX_DIGITS:
        return text
    data = text.encode("utf-8", "surrogatepass")
    return f"#{hashlib.blake2b(data, digest_size=8).hexdigest()}"


def _canonical(value: object, *, depth: int) -> str:
    """Returns a text of a plain value; ValueError: it is not plain, or is too large."""
    kind = type(value)
    if kind in _NUMBERS:
        text = repr(value)
    elif kind in (str, bytes) and isinstance(value, str | bytes):
        text = repr(value[: MAX_CHARACTERS + 1])
    elif kind in (list, tuple, set, frozenset, dict) and isinstance(
        value, list | tuple | set | frozenset | dict
    ):
        if not depth or len(value) > MAX_CHARACTERS:
            raise ValueError("too large")
        parts = value.items() if isinstance(value, dict) else value
        items = [_canonical(part, depth=depth - 1) for part in parts]
        if not isinstance(value, list | tuple):
            items.sort()
        text = f"{kind.__name__}({','.join(items)})"
    else:
        raise ValueError("not plain")
    if len(text) > MAX_CHARACTERS:
        raise ValueError("too large")
    return text


def _shown(here: str, there: str) -> str:
    is_hidden = here.startswith("#") or there.startswith("#")
    return "" if is_hidden else f" ({here} here, {there} there)"


def _literals_of(module: str, name: str) -> frozenset[str]:
    """Returns the texts of what the source gives a name, also by imports; empty: something else."""
    for _ in range(_MAX_DEPTH):
        found = sys.modules.get(module)
        if found is None or not is_users(found):
            return _UNKNOWN
        package = vars(found).get("__package__")
        literals, imports = _source(str(found.__file__), str(package or ""))
        if name in literals or name not in imports:
            return literals.get(name, _UNKNOWN)
        module, name = imports[name]
    return _UNKNOWN


@functools.lru_cache(maxsize=1024)
def _is_users_file(name: str, path: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names or top in ("__main__", "__mp_main__", "stoker"):
        return False
    return path.endswith(".py") and not {"site-packages", "dist-packages"} & {*PurePath(path).parts}


@functools.lru_cache(maxsize=1024)
def _source(
    path: str, package: str
) -> tuple[Mapping[str, frozenset[str]], Mapping[str, tuple[str, str]]]:
    """Returns the texts of a file's literals, and its imports; as it was when first asked for."""
    source = source_of(path, package=package)
    texts = {name: frozenset(map(text_of, each)) for name, each in source.literals.items()}
    return (
        MappingProxyType({name: each for name, each in texts.items() if "" not in each}),
        MappingProxyType(source.imports),
    )
