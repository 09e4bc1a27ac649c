"""A copy of the user's folder, where a profiled script runs and leaves the user's files alone."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from stoker.errors import UsageError
from stoker.units import size

# More takes longer to copy than to measure; data sets belong in another folder.
MAX_BYTES = 2 << 30
# Neither of them is read by a training.
_LEFT_OUT = frozenset({".git", "runs", "__pycache__", ".mypy_cache", ".ruff_cache"})
# They are large, and no script writes there.
_LINKED = frozenset({".venv", "venv", "node_modules"})


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
