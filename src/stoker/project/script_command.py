"""The command that runs a user's script: what `stoker init --script` writes into a workload."""

import ast
import itertools
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "fish")
_SHELL_OF_SUFFIX = {".sh": "bash", ".bash": "bash", ".zsh": "zsh", ".fish": "fish"}
# Programs with which a whole command line may begin in place of a script.
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "uv", "poetry", "conda", "env")
# Options of torchrun without a value; all others have one.
_TORCHRUN_FLAGS = ("--standalone", "--no-python", "--run-path", "-m", "--module", "--use-env")
_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """A command as a workload has it.

    Attributes:
        words: Program and arguments, relative to the workload's folder.
        name: Name of what runs, without its suffix.
        processes: Trainer processes per host, where the line says so.
        hosts: Number of hosts, where the line says so.
    """

    words: tuple[str, ...]
    name: str
    processes: int | None = None
    hosts: int = 1

    @property
    def is_outside(self) -> bool:
        """Whether a file of the command is outside of the workload's folder."""
        return any(word.split(os.sep)[0] == os.pardir for word in self.words)


def command_of(given: str, folder: Path) -> ScriptCommand:
    """Returns the command for a script, a program, a module or a whole command line.

    Args:
        given: As the user wrote it, relative to the working folder.
        folder: The folder in which the command will run.

    Raises:
        UsageError: If there is no such file, or nothing runs it.
    """
    path = Path(given)
    if path.is_file():
        return _of_file(path, folder)
    if path.is_dir():
        return _of_folder(path, folder)
    words = shlex.split(given)
    program = _program_of(words)
    if program == "torchrun":
        return _of_torchrun(words[1:], folder)
    if words[:1] == ["-m"]:
        return _of_line(["python", *words], folder)
    is_line = len(words) > 1 and program.startswith(("python", *_SHELLS, *_LAUNCHERS))
    if is_line:
        return _of_line(words, folder)
    if "." in given and given.replace(".", "").isidentifier():
        module = Path(*given.split("."))
        if module.with_suffix(".py").is_file() or (module / "__main__.py").is_file():
            return _of_line(["python", "-m", given], folder)
    raise UsageError(
        f"no such script: {given}", where=f"folder {Path.cwd()}", fix="correct the path"
    )


def _of_file(path: Path, folder: Path) -> ScriptCommand:
    place = _seen_from(folder, path)
    name = path.stem
    if path.suffix == ".ipynb":
        script = path.with_suffix(".py")
        raise UsageError(
            f"{path} is a notebook: stoker trains scripts",
            where="--script",
            fix=f"jupyter nbconvert --to script {shlex.quote(str(path))}, then: "
            f"stoker init --script {shlex.quote(str(script))}",
        )
    if path.suffix in (".py", ".pyz"):
        return ScriptCommand(words=_python_words(path, folder), name=_name_of(path))
    if path.suffix in _SHELL_OF_SUFFIX:
        shell = _shell_of(path) or _SHELL_OF_SUFFIX[path.suffix]
        return ScriptCommand(words=(shell, place), name=name)
    interpreter = _interpreter_of(path)
    program = _program_of(interpreter)
    if program.startswith("python"):
        return ScriptCommand(words=("python", *interpreter[1:], place), name=name)
    if program in _SHELLS:
        return ScriptCommand(words=(program, place), name=name)
    if os.access(path, os.X_OK):
        return ScriptCommand(words=(_with_folder(place),), name=name)
    if interpreter:
        return ScriptCommand(words=(*interpreter, place), name=name)
    if not path.suffix and _parsed(path) is not None:
        return ScriptCommand(words=("python", place), name=name)
    raise UsageError(
        f"{path} is neither a Python or shell script nor executable",
        where="--script",
        fix=f"name the program that runs it: stoker init --script {shlex.quote(f'PROGRAM {path}')}",
    )


def _of_folder(path: Path, folder: Path) -> ScriptCommand:
    main = path / "__main__.py"
    if not main.is_file():
        raise UsageError(
            f"{path} is a folder without a __main__.py", where="--script", fix="name the script"
        )
    return _of_file(main, folder)


def _of_line(words: Sequence[str], folder: Path) -> ScriptCommand:
    """Returns a whole command line; its words that are files are seen from the folder."""
    moved = [_seen_from(folder, Path(word)) if Path(word).is_file() else word for word in words]
    if os.sep in words[0]:
        moved[0] = _with_folder(moved[0])
    named = [word for word in words[1:] if word.endswith((".py", ".sh"))]
    if "-m" in words[:-1]:
        named.append(words[words.index("-m") + 1].rpartition(".")[2])
    # A line without a script has its program's name.
    named.append(words[0])
    return ScriptCommand(words=tuple(moved), name=Path(named[0]).stem)


def _of_torchrun(words: Sequence[str], folder: Path) -> ScriptCommand:
    """Returns what torchrun would start: stoker starts the ranks, as many as the line says."""
    options: dict[str, str] = {}
    at = 0
    while at < len(words) and words[at].startswith("-"):
        option, equals, value = words[at].partition("=")
        if not equals and option not in _TORCHRUN_FLAGS:
            at += 1
            value = words[at] if at < len(words) else ""
        options[option.replace("_", "-")] = value
        at += 1
    rest = list(words[at:])
    if not rest:
        raise UsageError(
            "the line does not name a script", where="--script", fix="torchrun [OPTIONS] train.py"
        )
    if "-m" in options or "--module" in options:
        rest = ["python", "-m", *rest]
    elif "--no-python" not in options:
        rest = ["python", *rest]
    line = _of_line(rest, folder)
    processes = options.get("--nproc-per-node", "")
    hosts = options.get("--nnodes", "").partition(":")[0]
    return ScriptCommand(
        words=line.words,
        name=line.name,
        # `gpu` and `auto` are what stoker does without being asked.
        processes=int(processes) if processes.isdigit() else None,
        hosts=int(hosts) if hosts.isdigit() else 1,
    )


def _python_words(path: Path, folder: Path) -> tuple[str, ...]:
    """Returns how Python runs a file: as a module where it imports relative to its package."""
    package = _package_root(path)
    if package is None or not _needs_package(path, package.name):
        place = _seen_from(folder, path.parent if path.name == "__main__.py" else path)
        return ("python", place)
    if Path(_real(package.parent)) != Path(_real(folder)):
        top = os.path.relpath(package.parent)
        raise UsageError(
            f"{path} imports from its package {package.name}, which Python finds in {top}",
            where="--script",
            fix=f"stoker init {shlex.quote(top)} --script {shlex.quote(str(path))}",
        )
    inside = path.absolute().relative_to(package.parent.absolute()).with_suffix("")
    parts = inside.parts[:-1] if path.name == "__main__.py" else inside.parts
    return ("python", "-m", ".".join(parts))


def _package_root(path: Path) -> Path | None:
    """Returns the outermost package that holds a file; None: it is in none."""
    root = None
    for parent in path.absolute().parents:
        if not (parent / "__init__.py").is_file():
            break
        root = parent
    return root


def _needs_package(path: Path, package: str) -> bool:
    tree = _parsed(path)
    if tree is None:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.level:
                return True
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        if any(name.partition(".")[0] == package for name in names):
            return True
    return False


def _parsed(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None


def _interpreter_of(path: Path) -> list[str]:
    """Returns the words of a file's first line `#!...`, without `env`; empty: it has none."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES).partition(b"\n")[0]
    if not head.startswith(b"#!"):
        return []
    words = head[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        # Its options and variables come before the program.
        words = list(itertools.dropwhile(_is_of_env, words[1:]))
    return words


def _is_of_env(word: str) -> bool:
    return word.startswith("-") or "=" in word


def _shell_of(path: Path) -> str:
    """Returns the shell that a script's first line names; empty: another program, or none."""
    program = _program_of(_interpreter_of(path))
    if program in _SHELLS:
        return program
    return ""


def _program_of(words: Sequence[str]) -> str:
    """Returns the name of a command's program, without its folder; empty: there is no command."""
    if not words:
        return ""
    return Path(words[0]).name


def _name_of(path: Path) -> str:
    if path.name == "__main__.py":
        return path.absolute().parent.name
    return path.stem


def _seen_from(folder: Path, path: Path) -> str:
    """Returns a file's path for a program that runs in the folder, which may be a link."""
    if path.is_absolute():
        return str(path)
    place = os.path.relpath(path.absolute(), _real(folder))
    # Not an option of the program that gets it.
    if place.startswith("-"):
        return f"./{place}"
    return place


def _with_folder(place: str) -> str:
    # A bare name would be looked for on the PATH.
    if os.sep in place:
        return place
    return f"./{place}"


def _real(folder: Path) -> str:
    return os.path.realpath(folder)
