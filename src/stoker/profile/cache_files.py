"""Which files are caches: made again by a compiler or a library, and of no interest to the user.

By what a file is, not by who wrote it: a tag in its folder (https://bford.info/cachedir), the name
of a folder, a variable of the environment that names a folder for caches, or compiled code.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

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
