"""Guard of the user's files: while a profile repeats batches, the script must not overwrite them.

Its model is then trained on a few batches again and again: a checkpoint of it must not replace a
good one. Python's audit hook sees files before they are opened, but none that a C library opens:
torch.save and safetensors are wrapped; others (HDF5, OpenCV) and open files are not seen.
"""

import contextlib
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

import torch
import torch.serialization

from stoker.errors import StokerError
from stoker.profile.user_files import is_cache, short_path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND | os.O_CREAT
_MAX_NAMED = 5
_OF_SYSTEM = ("/dev/", "/proc/", "/sys/")
# They read, or compile what torch made: none writes a file that a user keeps.
_HARMLESS_PROGRAMS = frozenset(
    {"nvidia-smi", "rocm-smi", "lscpu", "uname", "ldconfig"}
    | {"cc", "c++", "gcc", "g++", "clang", "clang++", "ptxas"}
)


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
        # What the link leads to is what would be written.
        real = os.path.realpath(path) if path else ""
        self._takes(real, "overwrite")
        self._makes(real)

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
    parent, last = os.path.split(os.path.abspath(text) if "/proc/" not in text else text)
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
        before(given[at] if len(given) > at else named.get("f", named.get("filename")))
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
