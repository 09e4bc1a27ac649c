"""A folder of code is packed as a .tar.gz with the same bytes whenever and wherever it is made."""

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from stoker.errors import UsageError

# Code, not data: it is made in memory, and every host of a job downloads it before it starts.
MAX_BYTES = 256 << 20

_NOWHERE = frozenset(
    (".git", "__pycache__", ".venv", ".mypy_cache", ".pytest_cache", ".ruff_cache")
)
# Further down a package of the user may have this name.
_NOT_AT_THE_TOP = frozenset(("runs",))
_NUM_LARGEST = 3


def pack(folder: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Returns the files of `folder` as a .tar.gz that depends on their names and contents only.

    Left out are .git, virtual environments, caches, *.pyc, runs/ at the top, and empty folders.

    Args:
        folder: With the code.
        max_bytes: Limit of all files together, before compression.

    Raises:
        UsageError: If the folder is not there or empty, holds a link that leaves it or something
            that is not a file, or is too large.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}", fix="check sagemaker.source")
    # os.walk gives the order of the file system, which differs from machine to machine.
    found = sorted(_members(folder), key=lambda path: path.as_posix())
    if not found:
        raise UsageError("there is nothing to pack", where=str(folder), fix="name another folder")
    _check_size(folder, found, max_bytes)
    packed = io.BytesIO()
    with (
        # gzip's head has a name and a time, which would make other bytes each time.
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in found:
            _add(archive, folder, name)
    return packed.getvalue()


def _members(folder: Path) -> Iterator[Path]:
    """Yields the paths of files and links, relative to `folder`."""
    # By default os.walk leaves out what it cannot read, without a word.
    for root, folders, files in os.walk(folder, onerror=_refuse):
        here = Path(root).relative_to(folder)
        is_top = here == Path()
        kept = [name for name in folders if not _is_left_out(name, is_top=is_top)]
        # A link to a folder is packed as a link: walked through, it might lead in a circle.
        links = [name for name in kept if (Path(root) / name).is_symlink()]
        folders[:] = [name for name in kept if name not in links]
        for name in (*files, *links):
            if not _is_left_out(name, is_top=is_top) and not name.endswith(".pyc"):
                yield here / name


def _is_left_out(name: str, *, is_top: bool) -> bool:
    return name in _NOWHERE or (is_top and name in _NOT_AT_THE_TOP)


def _refuse(err: OSError) -> None:
    raise UsageError(f"cannot read {err.filename}: {err.strerror}", fix="check its rights") from err


def _check_size(folder: Path, names: list[Path], max_bytes: int) -> None:
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total <= max_bytes:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NUM_LARGEST]
    shown = ", ".join(f"{name.as_posix()} ({_mib(sizes[name])})" for name in largest)
    raise UsageError(
        f"the code is too large to pack: {_mib(total)}, at most {_mib(max_bytes)}",
        where=f"{folder}, largest: {shown}",
        fix="keep data out of the code's folder, and hand it over as a channel",
    )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.1f} MiB"


def _add(archive: tarfile.TarFile, folder: Path, name: Path) -> None:
    path = folder / name
    entry = tarfile.TarInfo(name.as_posix())
    # Owner and group stay TarInfo's zeros for the same reason: only name and content count.
    entry.mtime = 0
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            entry.type, entry.mode = tarfile.SYMTYPE, 0o777
            entry.linkname = _link(folder, path)
            archive.addfile(entry)
            return
        if not stat.S_ISREG(mode):
            raise UsageError(
                f"{name.as_posix()} is not a file, folder or link", where=str(folder), fix="move it"
            )
        content = path.read_bytes()
    except OSError as err:
        raise UsageError(
            f"cannot read {name.as_posix()}: {err.strerror}", where=str(folder)
        ) from err
    # Two modes only: other bits come from the umask of whoever checked the code out.
    entry.mode = 0o755 if mode & stat.S_IXUSR else 0o644
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _link(folder: Path, path: Path) -> str:
    """Returns a link's target, relative to the link's folder; refuses one outside `folder`."""
    said, inside = Path(os.readlink(path)), folder.resolve()
    try:
        target = path.resolve()
    except RuntimeError:  # it leads to itself
        target = Path()
    if not target.is_relative_to(inside):
        raise UsageError(
            f"the link {path.relative_to(folder).as_posix()} leaves the folder: {said}",
            where=str(folder),
            fix="put a copy of what it points to in its place",
        )
    if not said.is_absolute():
        return said.as_posix()
    # An absolute link into the folder: on the hosts the folder has another path.
    return Path(os.path.relpath(target, path.parent.resolve())).as_posix()
