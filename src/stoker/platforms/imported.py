"""The code that a training run's script imports, found without running it.

A cached profile is used again while this code is the same. What is not Python counts as well, as a
script may read it, but for prose, pictures, notebooks, compiled outputs and workloads.
"""

import ast
import hashlib
import io
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PROSE = (
    ".md",
    ".rst",
    ".ipynb",
    ".html",
    ".svg",
    ".png",
    ".jpg",
    ".pdf",
    ".lock",
    ".gitignore",
    ".stokerignore",
    ".gitattributes",
    ".gitlab-ci.yml",
    "LICENSE",
    "Makefile",
)
_WORKLOAD = re.compile(rb"^name:.*^command:|^command:.*^name:", re.MULTILINE | re.DOTALL)
# Of the digest of code that steps and profiles have.
CODE_DIGITS = 16
# Of a profile's record, which has a line for each.
MAX_NAMED_FILES = 300
# Imports that no reader of the source can follow.
_DYNAMIC = re.compile(rb"\b(importlib|__import__|runpy|exec|eval|hydra|get_class)\b")


def files_of(package: bytes) -> dict[str, bytes]:
    """Returns the files of a .tar.gz by their path."""
    files = {}
    with tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as archive:
        for member in archive:
            if content := archive.extractfile(member):
                files[posixpath.normpath(member.name)] = content.read()
    return files


def code_digest(files: Mapping[str, bytes], command: Sequence[str]) -> str:
    """Returns a digest of the files that a step may depend on: 64 hexadecimal digits.

    All Python files count if the command names no script of the folder, or imports by a name that
    is made as it runs.
    """
    digest = hashlib.sha256()
    for name in sorted(counted_files(files, command)):
        digest.update(f"{name}\0{hashlib.sha256(files[name]).hexdigest()}\0".encode())
    return digest.hexdigest()


def named_code(package: bytes, command: Sequence[str]) -> dict[str, bytes]:
    """Returns the files of a package that a step may depend on, by path; {}: too many to name."""
    files = files_of(package)
    names = counted_files(files, command)
    if len(names) <= MAX_NAMED_FILES:
        return {name: files[name] for name in names}
    return {}


def imported_files(folder: Path, command: Sequence[str]) -> dict[str, bytes]:
    """Returns the script of a command and what it imports of `folder`, by path.

    Empty where the command names no script of the folder. Reads these files only.
    """
    files = _FolderFiles(folder)
    first = _script(files, command) or _module(files, command)
    if first is None:
        return {}
    return {name: files[name] for name in sorted(_imported_from(first, files))}


class _FolderFiles(Mapping[str, bytes]):
    """The Python files of a folder, each read once, when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, bytes | None] = {}

    def __getitem__(self, name: str) -> bytes:
        if name.startswith(("../", "/")):
            # Of another folder.
            raise KeyError(name)
        if name not in self._read:
            try:
                self._read[name] = (self._folder / name).read_bytes()
            except (OSError, ValueError):
                self._read[name] = None
        content = self._read[name]
        if content is None:
            raise KeyError(name)
        return content

    def __iter__(self) -> Iterator[str]:
        return (name for name, content in self._read.items() if content is not None)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _module(files: Mapping[str, bytes], command: Sequence[str]) -> str | None:
    """Returns the file of `python -m MODULE`."""
    words = list(command)
    if "-m" not in words[:-1]:
        return None
    path = words[words.index("-m") + 1].replace(".", "/")
    return next((name for name in (f"{path}.py", f"{path}/__main__.py") if name in files), None)


def counted_files(files: Mapping[str, bytes], command: Sequence[str]) -> set[str]:
    """Returns the paths of the files that a step may depend on."""
    python = {name for name in files if name.endswith(".py")}
    others = {name for name in files.keys() - python if _may_be_read(name, files[name])}
    first = _script(files, command)
    if first is None:
        return python | others
    imported = _imported_from(first, files)
    is_dynamic = any(_DYNAMIC.search(files[name]) for name in imported)
    return (python if is_dynamic else imported) | others


def _may_be_read(name: str, content: bytes) -> bool:
    is_prose = name.endswith(_PROSE) or name.startswith((".github/", "docs/", "tests/"))
    is_yaml = name.endswith((".yaml", ".yml"))
    return not is_prose and not (is_yaml and _WORKLOAD.search(content))


def _script(files: Mapping[str, bytes], command: Sequence[str]) -> str | None:
    """Returns the first word of the command that is a Python file of the folder."""
    words = [posixpath.normpath(word) for word in command]
    return next((word for word in words if word.endswith(".py") and word in files), None)


def _imported_from(first: str, files: Mapping[str, bytes]) -> set[str]:
    imported = {first}
    left = [first]
    roots = ("", posixpath.dirname(first))
    while left:
        name = left.pop()
        for path in _paths_named_in(name, files[name], roots):
            if path in files and path not in imported:
                imported.add(path)
                left.append(path)
    return imported


def _paths_named_in(name: str, source: bytes, roots: Sequence[str]) -> Iterator[str]:
    """Yields the paths that imports of a file could mean, with those of all packages above."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        for base, module in _modules_of(node, folder=posixpath.dirname(name), roots=roots):
            parts = module.split(".")
            for number in range(1, len(parts) + 1):
                path = posixpath.join(base, *parts[:number])
                yield posixpath.normpath(f"{path}.py")
                yield posixpath.normpath(f"{path}/__init__.py")


def _modules_of(node: ast.AST, *, folder: str, roots: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields folder and dotted name of each module that an import may mean."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from ((root, alias.name) for root in roots)
    elif isinstance(node, ast.ImportFrom):
        bases = roots
        above = ""
        if node.level:
            # `from .` is this folder, and each further dot the one above.
            above = posixpath.join(folder, *[".."] * (node.level - 1))
            bases = [above]
        for alias in node.names:
            # The name may be a module, or something in one.
            whole = f"{node.module}.{alias.name}" if node.module else alias.name
            yield from ((base, whole) for base in bases)
        if not node.module:
            yield above, "__init__"
