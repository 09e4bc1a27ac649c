"""Guard of the user's files: while a profile repeats batches, the script must not overwrite them.

Its model is then trained on a few batches again and again: a checkpoint of it must not replace a
good one. Python's audit hook sees files before they are opened, but none that a C library opens:
torch.save and safetensors are wrapped; others (HDF5, OpenCV) and open files are not seen.

Caches may be written. A file is a cache by what it is, not by who wrote it: a tag in its folder
(https://bford.info/cachedir), the name of a folder, a variable of the environment that names a
folder for caches, or compiled code. It is of no interest to the user.
"""

import contextlib
import functools
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.serialization

from stoker.environment import ProcessSettings
from stoker.errors import StokerError

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
_MAX_NAMED = 5
_OF_SYSTEM = ("/dev/", "/proc/", "/sys/")
# They read, or compile what torch made: none writes a file that a user keeps.
_HARMLESS_PROGRAMS = frozenset(
    {"nvidia-smi", "rocm-smi", "lscpu", "uname", "ldconfig"}
    | {"cc", "c++", "gcc", "g++", "clang", "clang++", "ptxas"}
)
TAG = "CACHEDIR.TAG"
# Hidden folders (.cache, .mypy_cache, .numba_cache), __pycache__, and macOS's Library/Caches.
_CACHE_FOLDER = re.compile(r"\.(.+[._-])?cache|__pycache__|Caches", re.IGNORECASE)
# Compilers of kernels keep theirs in a hidden folder of their name.
_COMPILERS = frozenset({".triton", ".nv", ".inductor", ".ccache"})
# Of libraries that have no folder of the user's to write in.
_IN_TEMPORARY = ("torchinductor_", "matplotlib-", "torch_extensions", "numba_cache")
_CACHE_VARIABLE = re.compile(r"(^|_)CACHE(_(DIR|HOME|PATH|PREFIX|ROOT|FOLDER))?$|PYCACHEPREFIX$")
# Without the word in their names.
_VARIABLES = frozenset({"HF_HOME", "TORCH_HOME", "TRITON_HOME", "MPLCONFIGDIR"})
_VARIABLES_OF_COMPILERS = frozenset({"TORCH_EXTENSIONS_DIR", "TORCHINDUCTOR_CACHE_DIR"})
# Python's and Numba's compiled code.
_COMPILED = (".pyc", ".pyo", ".nbi", ".nbc")


class GuardedError(StokerError):
    """A loader's worker was about to write a file while the profile repeats batches."""


_listening: "list[FileGuard]" = []


def guard_worker() -> None:
    """Makes it an error that this worker, which was not forked, changes an existing file."""
    for guard in _listening:
        guard.refuse()


class FileGuard:
    """Sees what this process is about to write, from `listen` to the process's end.

    Processes that it forks inherit the guard: there, a refused write is an error. Everything may be
    written in stoker's own folders (`allowed`). `changes` counts changed files, also before `arm`.
    """

    def __init__(self, allowed: Sequence[Path]) -> None:
        self.changes = 0
        self._allowed = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in allowed)
        self._own: set[str] = set()
        # The part of them that is made while the guard is armed, in their order.
        self._made: dict[str, None] = {}
        self._end: Callable[[str], NoReturn] | None = None
        self._process = 0
        self._free_thread = 0

    def listen(self) -> None:
        """Begins to record which files are new: those may be written at any time."""
        heard: dict[str, Callable[[tuple[object, ...]], None]] = {
            "open": lambda own: self._heard_open(*own),
            "os.rename": lambda own: self._renames(*own),
            "os.remove": lambda own: self._takes(_path(*own), "remove"),
            "os.truncate": lambda own: self._takes(_path(own[0]), "cut"),
            "os.mkdir": lambda own: self._makes(_path(own[0], own[2])),
            "os.link": lambda own: self._links(*own),
            "os.symlink": lambda own: self._links(*own),
            **{
                event: functools.partial(self._starts, event)
                for event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")
            },
        }
        ask = heard.get

        # It stays until the process ends, and each call of id() is an event: 0.3 us.
        def hear(event: str, arguments: tuple[object, ...]) -> None:
            hears = ask(event)
            if hears is not None:
                hears(arguments)

        sys.addaudithook(hear)
        _listening[:] = [self]
        _wrap_torch(self._opens)

    def arm(self, end: Callable[[str], NoReturn]) -> None:
        """Calls `end` with the action from now on, before any thread changes a user's file."""
        self._process = os.getpid()
        self._end = end
        with contextlib.suppress(ImportError):
            _wrap_safetensors(self._opens)

    def refuse(self) -> None:
        """Raises an error from now on where `arm` would call back."""
        if self._end is None:
            self._end = _never
            # Of no process: this one is a worker, as all those that it starts.
            self._process = 0

    def free_this_thread(self) -> None:
        self._free_thread = threading.get_ident()

    def made(self) -> list[str]:
        """Returns the files of the user that are new since `arm`, the first few of them."""
        there = [path for path in list(self._made) if os.path.isfile(path)]
        users = [short_path(path) for path in there if not is_cache(path)]
        return users[:_MAX_NAMED]

    def _heard_open(self, name: object, mode: object, flags: object) -> None:
        if isinstance(flags, int) and flags & _WRITES:
            self._opens(name)

    def _links(self, source: object, target: object, *folders: object) -> None:
        # A symbolic link has the folder of its target's descriptor last, a hard link too.
        self._makes(_path(target, folders[-1]))

    def _starts(self, event: str, arguments: tuple[object, ...]) -> None:
        words = _words(event, arguments)
        program = os.path.basename(words[0])
        is_torchs = any("torch/_inductor" in word or "torch._inductor" in word for word in words)
        if self._end is not None and not is_torchs and program not in _HARMLESS_PROGRAMS:
            self._refuse(f"start the program {program}")

    def _opens(self, name: object) -> None:
        path = _path(name)
        if path:
            # What the link leads to is what would be written.
            path = os.path.realpath(path)
        self._takes(path, "overwrite")
        self._makes(path)

    def _renames(self, source: object, target: object, folder: object, other: object) -> None:
        self._takes(_path(source, folder), "rename")
        new = _path(target, other)
        self._takes(new, "overwrite")
        self._makes(new)

    def _makes(self, path: str) -> None:
        if path and not os.path.lexists(path):
            self._own.add(path)
            is_ours = threading.get_ident() == self._free_thread or path.startswith(self._allowed)
            if self._end is not None and not is_ours:
                self._made[path] = None

    def _takes(self, path: str, verb: str) -> None:
        if path and self._was_before(path):
            self.changes += 1
            if self._end is not None:
                self._refuse(f"{verb} {short_path(path)}")

    def _was_before(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return False
        # An empty file (a lock), a pipe or a terminal holds nothing that could be lost.
        if not (stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_size)):
            return False
        return not (
            path.startswith(self._allowed)
            or path.startswith(_OF_SYSTEM)
            # Its content can be made again.
            or is_cache(path)
            or any(str(above) in self._own for above in (Path(path), *Path(path).parents))
        )

    def _refuse(self, what: str) -> None:
        if os.getpid() != self._process:
            raise GuardedError(
                f"the script is about to {what} while the profile repeats batches",
                fix="stoker profile --copy runs the script in a copy of its folder",
            )
        if threading.get_ident() != self._free_thread and self._end is not None:
            self._end(what)


def _never(action: str) -> NoReturn:
    raise AssertionError(action)


def _path(name: object, folder: object = -1) -> str:
    """Returns the whole path of a name, its links up to the last part resolved; empty if none."""
    if not isinstance(name, str | bytes | os.PathLike):
        # A descriptor: that file is open.
        return ""
    text = os.fsdecode(name)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        text = os.path.join(f"/proc/self/fd/{folder}", text)
    if "/proc/" not in text:
        text = os.path.abspath(text)
    parent, last = os.path.split(text)
    return os.path.join(os.path.realpath(parent), last)


def _words(event: str, arguments: tuple[object, ...]) -> list[str]:
    given = arguments[0] if event == "os.system" else arguments[1] or arguments[0]
    if isinstance(given, str | bytes | os.PathLike):
        return os.fsdecode(given).split() or [""]
    return [os.fsdecode(word) for word in given] or [""]  # type: ignore[attr-defined]


def _wrap_torch(before: Callable[[object], None]) -> None:
    """Calls `before` with the path of each file that torch.save and torch.jit.save write in C++."""
    writer = torch.serialization._open_zipfile_writer_file
    begin = writer.__init__

    def begin_after(self: object, name: str) -> None:
        before(name)
        begin(self, name)  # type: ignore[arg-type]

    writer.__init__ = begin_after  # type: ignore[method-assign]
    for name in ("RecursiveScriptModule", "ScriptFunction"):
        scripted: type = getattr(torch.jit, name)
        setattr(scripted, "save", _after(getattr(scripted, "save"), before, at=1))  # noqa: B009, B010


class _Write(Protocol):
    def __call__(self, *given: object, **named: object) -> object: ...


def _after(write: _Write, before: Callable[[object], None], *, at: int) -> _Write:
    def write_after(*given: object, **named: object) -> object:
        # Here torch and safetensors call it `f` and `filename`.
        name = named.get("f", named.get("filename"))
        if len(given) > at:
            name = given[at]
        before(name)
        return write(*given, **named)

    return write_after


def _wrap_safetensors(before: Callable[[object], None]) -> None:
    """Calls `before` with the path of each file that safetensors writes in Rust."""
    import safetensors

    # By name: it takes what it takes, and this only passes it on.
    write: _Write = getattr(safetensors, "serialize_file")  # noqa: B009
    write_after = _after(write, before, at=1)
    # Its parts for torch and numpy import it under their own names.
    for module in [m for name, m in sys.modules.items() if name.startswith("safetensors")]:
        if getattr(module, "serialize_file", None) is write:
            setattr(module, "serialize_file", write_after)  # noqa: B010


def is_cache_folder(name: str) -> bool:
    """Whether a folder holds a cache by its name alone."""
    return bool(_CACHE_FOLDER.fullmatch(name)) or name in _COMPILERS


def is_cache(path: str, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the file of a whole path is part of a cache; reads no file.

    An empty lock file counts: nothing is in it.
    """
    if path.endswith(_COMPILED) or _is_lock(path):
        return True
    # The script's own folder may lie in a cache: what it writes there is the user's all the same.
    here = os.path.realpath(os.getcwd())
    folders = [folder for folder in Path(path).parents if not _is_above(str(folder), here)]
    if any(is_cache_folder(folder.name) for folder in folders):
        return True
    if any(path.startswith(f"{folder}{os.sep}") for folder in _named_folders(environ)):
        return True
    # Not by tempfile: it asks, with its lock held, for the very file that it opens to find out.
    temporary = os.path.realpath(environ.get("TMPDIR") or "/tmp")
    inside = path.removeprefix(f"{temporary}{os.sep}")
    if inside != path and inside.startswith(_IN_TEMPORARY):
        return True
    return any(os.path.isfile(folder / TAG) for folder in folders)


def _is_lock(path: str) -> bool:
    if not path.endswith(".lock"):
        return False
    try:
        return os.path.getsize(path) == 0
    except OSError:
        return False


def _named_folders(environ: Mapping[str, str]) -> list[str]:
    """Returns the folders for caches that variables name, without any that holds the user's own."""
    names = _VARIABLES | _VARIABLES_OF_COMPILERS
    values = [
        value for name, value in environ.items() if name in names or _CACHE_VARIABLE.search(name)
    ]
    folders = [os.path.realpath(value) for value in values if os.path.isabs(value)]
    return [folder for folder in folders if not _holds_more(folder)]


def _holds_more(folder: str) -> bool:
    """Whether a folder is above the user's: a variable may name the root of a container."""
    users = (os.getcwd(), os.path.expanduser("~"))
    return any(_is_above(folder, os.path.realpath(users_folder)) for users_folder in users)


def _is_above(folder: str, other: str) -> bool:
    """Whether `other` is the folder, or lies in it."""
    return f"{other}{os.sep}".startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def own_folders(settings: ProcessSettings) -> list[Path]:
    """Returns stoker's own folders: for the results and, on this machine, for the run."""
    base = settings.base_dir
    folders = [settings.output]
    if base.parent.name == "hosts":
        # A host of the local platform lies in the run's own folder, with its logs.
        folders.append(base.parent.parent)
    return [folder for folder in folders if folder]


def short_path(path: str, cwd: Path | None = None) -> str:
    relative = os.path.relpath(path, cwd)
    if relative.startswith(".."):
        return path
    return relative
