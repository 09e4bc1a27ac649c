"""The files that a profiled script wrote, found by two scans.

A scan is bounded: a working directory may hold a data set of millions of files.
"""

import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from stoker.environment import ProcessSettings
from stoker.profile.cache_files import is_cache, is_cache_folder
from stoker.profile.rank_results import GrownFile, RankResult
from stoker.records import Profile
from stoker.units import size

MAX_FILES = 20_000
MAX_SECONDS = 1.0
MAX_NAMED = 5
_KEPT = 50
# Below the folder of a run: the user's folder, where the script runs in a copy of it.
COPY = "copy"
# The kernel's, and what runs the container keeps in it: Argo's folder is /var/run/argo.
_OF_SYSTEM = tuple(map(Path, ("/proc", "/sys", "/dev", "/run", "/var/run", "/kfp-launcher")))
_SKIPPED = frozenset({".git", ".venv", "venv", "node_modules"})


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
    return sorted(users, key=lambda file: (-file.num_bytes, file.path))[:_KEPT]


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
