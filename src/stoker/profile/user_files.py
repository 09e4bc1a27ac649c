"""The user's files: a copy of the folder to profile in, the files that a script wrote, and caches.

A file is a cache by what it is, not by who wrote it: a tag in its folder
(https://bford.info/cachedir), the name of a folder, a variable of the environment that names a
folder for caches, or compiled code. It is of no interest to the user.

What a profiled script wrote is found by two scans, which are bounded: a working directory may hold
a data set of millions of files.
"""

import contextlib
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.environment import ProcessSettings
from stoker.errors import UsageError
from stoker.profile.rank_results import GrownFile, RankResult
from stoker.records import Profile
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
MAX_FILES = 20_000
MAX_SECONDS = 1.0
MAX_NAMED = 5
_MAX_RECORDED = 50
# Below the folder of a run: the user's folder, where the script runs in a copy of it.
COPY = "copy"
# The kernel's, and what runs the container keeps in it: Argo's folder is /var/run/argo.
_OF_SYSTEM = tuple(map(Path, ("/proc", "/sys", "/dev", "/run", "/var/run", "/kfp-launcher")))
_SKIPPED = frozenset({".git", ".venv", "venv", "node_modules"})
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


@dataclass(frozen=True, slots=True)
class FolderSnapshot:
    """Files of some folders at one time: path to (bytes, nanoseconds of the last change).

    `is_whole` is False where there were more files, or they took too long to read.
    """

    files: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    is_whole: bool = True


def snapshot(
    folders: Sequence[Path],
    *,
    skipped: Sequence[Path] = (),
    max_files: int = MAX_FILES,
    max_seconds: float = MAX_SECONDS,
) -> FolderSnapshot:
    """Lists the files below those `folders` that exist, but for environments, caches, the system's.

    Blocks for about `max_seconds` at most.
    """
    until = time.monotonic() + max_seconds
    outside = {os.path.realpath(folder) for folder in (*_OF_SYSTEM, *skipped)}
    files: dict[str, tuple[int, int]] = {}
    for entry in _files(folders, outside):
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        files[entry.path] = (status.st_size, status.st_mtime_ns)
        if len(files) >= max_files or time.monotonic() >= until:
            return FolderSnapshot(files, is_whole=False)
    return FolderSnapshot(files)


def grown(before: FolderSnapshot, after: FolderSnapshot) -> list[GrownFile]:
    # What a partial `before` lacks is new only if it changed later than all that it has.
    latest = max((changed for _, changed in before.files.values()), default=0)
    found = []
    for path, (num_bytes, changed) in after.files.items():
        known = before.files.get(path)
        if known is None and (before.is_whole or changed > latest):
            found.append(GrownFile(path=path, num_bytes=num_bytes, is_new=True))
        elif known is not None and num_bytes > known[0]:
            found.append(GrownFile(path=path, num_bytes=num_bytes - known[0]))
        elif known is not None and changed != known[1]:
            found.append(GrownFile(path=path, num_bytes=num_bytes, is_rewritten=True))
    users = [file for file in found if not is_cache(file.path)]
    return sorted(users, key=lambda file: (-file.num_bytes, file.path))[:_MAX_RECORDED]


def folders_of(words: Sequence[str], *, cwd: Path, outputs: Sequence[Path]) -> list[Path]:
    """Returns the folders, none in another, that a command may write in, also by its words."""
    named = [cwd, *outputs]
    for word in words:
        text = word.partition("=")[2] if word.startswith("-") else word
        path = cwd / text
        # Not /tmp or /data as a whole: others write there, and a scan would never end.
        if text and os.sep in text and path.is_dir() and len(path.resolve().parts) > 2:
            named.append(path)
    whole: list[Path] = []
    resolved = {folder.resolve() for folder in named}
    for folder in sorted(resolved, key=lambda own: (len(own.parts), own)):
        if not any(folder.is_relative_to(other) for other in whole):
            whole.append(folder)
    return whole


def words_of(files: Sequence[GrownFile], *, cwd: Path) -> str:
    if not files:
        return ""
    named = []
    for file in files[:MAX_NAMED]:
        change = "new," if file.is_new else "rewritten," if file.is_rewritten else "by"
        named.append(f"{short_path(file.path, cwd)} ({change} {size(file.num_bytes)})")
    more = len(files) - MAX_NAMED
    rest = f" and {more} more" if more > 0 else ""
    return "the script ran for real; files that grew meanwhile: " + ", ".join(named) + rest


def files_of(ranks: Sequence[RankResult]) -> list[GrownFile]:
    """Returns the files that the ranks saw grow, without this process's own output files."""
    # `stoker profile ... > notes.txt`: the user's file, and not the script's.
    streams = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            streams.append(os.fstat(number))
    found = []
    for file in (file for rank in ranks for file in rank.grown_files):
        try:
            status = os.stat(file.path)
            is_own = any(os.path.samestat(status, stream) for stream in streams)
        except OSError:
            is_own = False
        if not is_own:
            found.append(file)
    return found


def with_grown_files(profile: Profile, ranks: Sequence[RankResult]) -> Profile:
    files = files_of(ranks)
    if not files:
        return profile
    notes = profile.what.get("notes")
    what = {
        **profile.what,
        "grown_files": {file.path: file.num_bytes for file in files},
        "notes": [*(notes if isinstance(notes, list) else ()), words_of(files, cwd=Path.cwd())],
    }
    return msgspec.structs.replace(profile, what=what)


def own_folders(settings: ProcessSettings) -> list[Path]:
    """Returns stoker's own folders: for the results and, on this machine, for the run."""
    base = settings.base_dir
    # A host of the local platform lies in the run's own folder, with its logs.
    run = base.parent.parent if base.parent.name == "hosts" else None
    return [folder for folder in (settings.output, run) if folder]


class Growth:
    """The files that grow from now on where this process may write, also by its arguments."""

    def __init__(self, settings: ProcessSettings) -> None:
        base = settings.base_dir
        outputs = [base / name for name in ("model", "checkpoints", "output/data")]
        self._skipped = own_folders(settings)
        # A copy of the user's folder is deleted in the end: what grows there is of no interest.
        copies = [(folder / COPY).resolve() for folder in self._skipped]
        self._folders = [
            folder
            for folder in folders_of(sys.argv[1:], cwd=Path.cwd(), outputs=outputs)
            if not any(folder.is_relative_to(copy) for copy in copies)
        ]
        self._before = snapshot(self._folders, skipped=self._skipped)

    def files(self) -> tuple[GrownFile, ...]:
        """Blocks for about MAX_SECONDS at most."""
        return tuple(grown(self._before, snapshot(self._folders, skipped=self._skipped)))


def _files(folders: Sequence[Path], outside: set[str]) -> Iterator["os.DirEntry[str]"]:
    """Yields all files below `folders`, those near the top first: a data set lies deep."""
    waiting = [str(folder) for folder in folders]
    # The list grows while it is walked: breadth first.
    for folder in waiting:
        if os.path.realpath(folder) in outside:
            continue
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            # Links are not followed: they may lead in a circle, or to the data set.
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED and not is_cache_folder(entry.name):
                    waiting.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry


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
        for file, top in _files_to_copy(folder, links):
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


def _files_to_copy(folder: Path, links: set[str]) -> Iterator[tuple[str, str]]:
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
