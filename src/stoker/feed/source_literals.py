"""What the source of a module gives its names, where these are literals."""

import ast
import importlib.util
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

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
class Source:
    """A module's top level.

    Attributes:
        literals: All that a name is given; names that are given anything else are not among them.
        imports: Names that are imported from a module, once: that module, and the name there.
    """

    literals: Mapping[str, list[object]] = field(default_factory=dict)
    imports: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def source_of(path: str, *, package: str) -> Source:
    """Reads and parses the file, 5 ms for 500 lines; empty if that cannot be done.

    Args:
        package: That imports of the module are relative to.
    """
    try:
        data = Path(path).read_bytes()
        tree = ast.parse(data[: MAX_SOURCE_BYTES + 1])
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return Source()
    if len(data) > MAX_SOURCE_BYTES:
        return Source()
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
    return Source(
        {name: values for name, values in literals.items() if bound[name] == len(values)},
        {name: origin for name, origin in imports.items() if bound[name] == 1},
    )


def _top_level(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes that are run when the module is imported."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        if not isinstance(node, _SCOPES):
            nodes.extend(ast.iter_child_nodes(node))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node itself gives something."""
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
    """Raises ValueError for what is none, or is a container to be filled."""
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
    """The module that is imported from; empty if there is none of that name."""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package)
    except ImportError:
        return ""
