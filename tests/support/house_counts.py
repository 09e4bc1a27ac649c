"""How a package reads, in figures: tests/unit/test_house.py holds them, benchmarks/house.py prints.

The rules of counting are those by which five other projects were counted, whose figures are in
benchmarks/results/house.json. A node is what `ast.walk` yields; a function's nodes and lines
include those of functions inside it; a line of text is neither empty nor a comment alone.
"""

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Of Google, NumPy and Sphinx.
ARGUMENTS = re.compile(r"Args:|Arguments:|Parameters|:param")
# Locals that do not say what they hold.
VAGUE = {"found", "told", "said", "own", "each", "known", "made", "asked"}
# Ruff's rules with its own limits: 10 paths, 12 branches, 50 statements.
RUFF_RULES = {
    "C901": "over 10 paths (C901)",
    "PLR0912": "over 12 branches (PLR0912)",
    "PLR0915": "over 50 statements (PLR0915)",
}
MAX_LINES = 60
MAX_NODES = 400
MAX_PARAMETERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCount:
    """What one function weighs.

    Attributes:
        name: With the classes and functions around it, without the module: a move changes nothing.
        path: The file.
        line: Of its `def`.
        lines: From its `def` to its end.
        nodes: Nodes of the syntax tree.
        parameters: Without `self` and `cls`; `*args` and `**kwargs` are one each.
        is_public: Its name has no underscore at its head.
        is_documented: It has a docstring.
        has_arguments: Its docstring explains its parameters.
    """

    name: str
    path: Path
    line: int
    lines: int
    nodes: int
    parameters: int
    is_public: bool
    is_documented: bool
    has_arguments: bool


@dataclass(slots=True)
class HouseCounts:
    """What all files of a package have together.

    Attributes:
        nested_comprehensions: By the function, class or file that holds them.
        vague_locals: Assignments by name.
    """

    files: int = 0
    lines: int = 0
    text_lines: int = 0
    comment_lines: int = 0
    docstring_lines: int = 0
    nodes: int = 0
    comprehensions: int = 0
    conditional_expressions: int = 0
    nested_comprehensions: Counter[str] = field(default_factory=Counter)
    vague_locals: Counter[str] = field(default_factory=Counter)
    functions: list[FunctionCount] = field(default_factory=list)


def files_of(package: Path, *, without: Iterable[str] = ()) -> list[Path]:
    """Returns a package's files of Python, but for its tests.

    Args:
        package: Folder of the package.
        without: Names of folders that are left out, too.
    """
    left_out = {"test", "tests", *without}
    return [
        path
        for path in sorted(package.rglob("*.py"))
        if not path.name.endswith("_test.py")
        and left_out.isdisjoint(path.relative_to(package).parts)
    ]


def count_house(files: Iterable[Path]) -> HouseCounts:
    counts = HouseCounts()
    for path in files:
        text = path.read_text()
        tree = ast.parse(text)
        _count_lines(text, tree, counts)
        counts.files += 1
        counts.nodes += _TreeCounter(path, counts).count(tree, scope="")
    return counts


def _count_lines(text: str, tree: ast.Module, counts: HouseCounts) -> None:
    documents = set(_docstring_lines(tree))
    comments = set(_comment_lines(text)) - documents
    lines = text.splitlines()
    counts.lines += len(lines)
    counts.docstring_lines += len(documents)
    counts.comment_lines += len(comments)
    for number, line in enumerate(lines, 1):
        if line.strip() and number not in comments:
            counts.text_lines += 1


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields a module and all its statements, without what is in their expressions.

    A twentieth of the nodes: enough to find classes, functions and imports.
    """
    unread: list[ast.AST] = [tree]
    while unread:
        node = unread.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            unread += getattr(node, name, ())


def _docstring_lines(tree: ast.Module) -> Iterator[int]:
    for node in statements(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            yield from range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1)


def _comment_lines(text: str) -> Iterator[int]:
    """Yields the numbers of lines that hold a comment alone."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            yield token.start[0]


@dataclass(slots=True)
class _TreeCounter:
    """Walks the tree of one file.

    Attributes:
        path: The file.
        counts: To which the file's counts are added.
    """

    path: Path
    counts: HouseCounts

    def count(self, node: ast.AST, *, scope: str) -> int:
        """Adds what stands below a node to the counts; returns its number of nodes.

        Args:
            node: The node; it counts, too.
            scope: Name of the function or class around it; "" at the top of a file.
        """
        if isinstance(node, COMPREHENSIONS):
            self._count_comprehension(node, scope)
        elif isinstance(node, ast.IfExp):
            self.counts.conditional_expressions += 1
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            self.counts.vague_locals[node.id] += 1
        if isinstance(node, FUNCTIONS | ast.ClassDef):
            scope = f"{scope}.{node.name}".removeprefix(".")
        nodes = 1
        for child in ast.iter_child_nodes(node):
            nodes += self.count(child, scope=scope)
        if isinstance(node, FUNCTIONS):
            self._count_function(node, name=scope, nodes=nodes)
        return nodes

    def _count_comprehension(
        self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp, scope: str
    ) -> None:
        self.counts.comprehensions += 1
        holds_another = any(
            isinstance(inner, COMPREHENSIONS) for inner in ast.walk(node) if inner is not node
        )
        if holds_another or len(node.generators) > 1:
            self.counts.nested_comprehensions[scope or self.path.name] += 1

    def _count_function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, *, name: str, nodes: int
    ) -> None:
        document = ast.get_docstring(node)
        self.counts.functions.append(
            FunctionCount(
                name=name,
                path=self.path,
                line=node.lineno,
                lines=(node.end_lineno or node.lineno) - node.lineno + 1,
                nodes=nodes,
                parameters=_num_parameters(node.args),
                is_public=not node.name.startswith("_"),
                is_documented=document is not None,
                has_arguments=bool(ARGUMENTS.search(document or "")),
            )
        )


def _num_parameters(arguments: ast.arguments) -> int:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    variable = [argument for argument in (arguments.vararg, arguments.kwarg) if argument]
    return len(variable) + sum(argument.arg not in {"self", "cls"} for argument in named)


def complex_functions(package: Path, functions: Iterable[FunctionCount]) -> dict[str, list[str]]:
    """Returns, for each rule of `RUFF_RULES`, the names of the functions that break it.

    Runs ruff, for about a second; a `noqa` allows nothing.

    Args:
        package: Folder of the package.
        functions: The package's; what ruff finds in others is left out.

    Raises:
        subprocess.CalledProcessError: Ruff cannot read the package.
    """
    names = {(str(function.path), function.line): function.name for function in functions}
    options = ["--isolated", "--no-cache", "--exit-zero", "--ignore-noqa", "--quiet"]
    rules = ["--select", ",".join(RUFF_RULES), "--output-format", "json"]
    command = [sys.executable, "-m", "ruff", "check", *options, *rules, str(package.resolve())]
    completed = subprocess.run(command, capture_output=True, text=True, check=True)
    breaking: dict[str, list[str]] = {rule: [] for rule in RUFF_RULES}
    for finding in json.loads(completed.stdout):
        place = finding["filename"], finding["location"]["row"]
        if place in names:
            breaking[finding["code"]].append(names[place])
    return {RUFF_RULES[rule]: sorted(rule_names) for rule, rule_names in breaking.items()}


def heavy_functions(counts: HouseCounts) -> dict[str, list[str]]:
    """Returns, for each rule that needs no ruff, the names that break it, as often as they do."""
    functions = sorted(counts.functions, key=lambda function: function.name)
    return {
        f"over {MAX_LINES} lines": [
            function.name for function in functions if function.lines > MAX_LINES
        ],
        f"over {MAX_NODES} nodes": [
            function.name for function in functions if function.nodes > MAX_NODES
        ],
        f"over {MAX_PARAMETERS} parameters": [
            function.name for function in functions if function.parameters > MAX_PARAMETERS
        ],
        "nested comprehensions": sorted(counts.nested_comprehensions.elements()),
    }


def figures_of(counts: HouseCounts) -> dict[str, float]:
    """Returns the figures of a package that are no lists of functions, rounded."""
    public = [function for function in counts.functions if function.is_public]
    documented = sum(function.is_documented for function in public)
    return {
        "files": counts.files,
        "lines": counts.lines,
        "nodes": counts.nodes,
        "nodes per line": round(counts.nodes / counts.lines, 2),
        "comprehensions per 1,000 lines": _per_1000(counts.comprehensions, counts),
        "conditional expressions per 1,000 lines": _per_1000(
            counts.conditional_expressions, counts
        ),
        "public functions": len(public),
        "public functions with a docstring, %": round(100 * documented / len(public)),
        "public functions with Args": sum(function.has_arguments for function in public),
        "lines of docstrings, %": round(100 * counts.docstring_lines / counts.lines, 1),
        "lines of comments, %": round(100 * counts.comment_lines / counts.lines, 1),
        "vague locals": counts.vague_locals.total(),
    }


def _per_1000(number: int, counts: HouseCounts) -> float:
    return round(1000 * number / counts.text_lines, 1)
