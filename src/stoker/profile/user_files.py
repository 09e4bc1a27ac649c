"""The user's files: a copy of the folder to profile in, and which files are only caches.

A file is a cache by what it is, not by who wrote it: a tag in its folder
(https://bford.info/cachedir), the name of a folder, a variable of the environment that names a
folder for caches, or compiled code. It is of no interest to the user.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.units import size

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
# Below the folder of a run: the user's folder, where the script runs in a copy of it.
COPY = "copy"
# More takes longer to copy than to measure; data sets belong in another folder.
MAX_BYTES = 2 << 30
# Neither of them is read by a training.
_LEFT_OUT = frozenset({".git", "runs", "__pycache__", ".mypy_cache", ".ruff_cache"})
# They are large, and no script writes there.
_LINKED = frozenset({".venv", "venv", "node_modules"})


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
    return any(_is_above(folder, os.path.realpath(own)) for own in users)


def _is_above(folder: str, other: str) -> bool:
    """Whether `other` is the folder, or lies in it."""
    return f"{other}{os.sep}".startswith(f"{folder.rstrip(os.sep)}{os.sep}")


def own_folders(settings: ProcessSettings) -> list[Path]:
    """Returns stoker's own folders: for the results and, on this machine, for the run."""
    base = settings.base_dir
    # A host of the local platform lies in the run's own folder, with its logs.
    run = base.parent.parent if base.parent.name == "hosts" else None
    return [folder for folder in (settings.output, run) if folder]


def short_path(path: str, cwd: Path | None = None) -> str:
    relative = os.path.relpath(path, cwd)
    return path if relative.startswith("..") else relative


@contextlib.contextmanager
def scratch_copy(
    folder: Path, copy: Path, *, linked: Sequence[Path] = (), max_bytes: int = MAX_BYTES
) -> Iterator[int]:
    """Makes `copy`, runs the block in it, and deletes it then; yields the number of bytes copied.

    Not copied are .git and earlier runs. Links to folders stay links; environments and the `linked`
    folders, whose data is only read, are linked.

    Raises:
        UsageError: If the folder holds more than `max_bytes`, or cannot be copied.
    """
    folder, copy = folder.resolve(), copy.absolute()
    links = {os.path.realpath(path) for path in linked}
    sizes: dict[str, int] = {}
    try:
        for file, top in _files(folder, links):
            sizes[top] = sizes.get(top, 0) + os.stat(file).st_size
            if sum(sizes.values()) > max_bytes:
                largest = max(sizes, key=sizes.__getitem__)
                raise UsageError(
                    f"--copy copies {size(max_bytes)} at most, and {folder} holds more, "
                    f"{size(sizes[largest])} and more of it in {largest}",
                    fix=f"move {largest} out of the folder, with a link in its place, or profile "
                    "without --copy: the script then writes its files for real",
                )
        _copy(folder, copy, links)
    except OSError as err:
        shutil.rmtree(copy, ignore_errors=True)
        raise UsageError(
            f"the folder cannot be copied: {err}", where=str(folder), fix="profile without --copy"
        ) from None
    before = Path.cwd()
    os.chdir(copy)
    try:
        yield sum(sizes.values())
    finally:
        os.chdir(before)
        shutil.rmtree(copy, ignore_errors=True)


def _is_linked(entry: "os.DirEntry[str]", links: set[str]) -> bool:
    if not entry.is_dir():
        return False
    return entry.is_symlink() or entry.name in _LINKED or os.path.realpath(entry) in links


def _files(folder: Path, links: set[str]) -> Iterator[tuple[str, str]]:
    waiting = [(str(folder), "")]
    while waiting:
        path, top = waiting.pop()
        for entry in list(os.scandir(path)):
            if entry.name in _LEFT_OUT or _is_linked(entry, links):
                continue
            if entry.is_dir():
                waiting.append((entry.path, top or entry.name))
            elif entry.is_file():
                yield entry.path, top or entry.name


def _copy(folder: Path, copy: Path, links: set[str]) -> None:
    copy.mkdir(parents=True)
    for entry in list(os.scandir(folder)):
        target = copy / entry.name
        if entry.name in _LEFT_OUT:
            continue
        if _is_linked(entry, links):
            target.symlink_to(os.path.realpath(entry))
        elif entry.is_dir():
            _copy(Path(entry.path), target, links)
        elif entry.is_file():
            # A link to a file is copied as what it leads to: the script may write there.
            shutil.copy2(entry.path, target)
