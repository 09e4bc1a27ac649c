"""The training's code is a .tar.gz package that comes as a channel; hosts unpack and run it."""

import contextlib
import os
import posixpath
import shutil
import tarfile
from pathlib import Path

from stoker.errors import UsageError

# Code, not data: what is larger belongs into a channel of its own.
MAX_CODE_BYTES = 2 << 30
MAX_CODE_FILES = 100_000
_FIX = "pack the folder anew with `tar -C FOLDER -czf code.tar.gz .`, and data as a channel"


def unpack(package: Path, folder: Path) -> Path:
    """Unpacks a package into `folder`, over what is there, and returns `folder`.

    Nothing is written outside of it, and nothing at all if the package is refused.

    Args:
        package: A tar file with gzip.
        folder: Need not exist.

    Raises:
        UsageError: If there is no package, it is broken, empty or too large, or holds anything but
            files, folders and links that stay inside.
    """
    # Inside, for the folder may be all that this user may write to, and a disk of its own.
    fresh = folder / f".unpacked.{os.getpid()}"
    is_new = not folder.exists()
    try:
        fresh.mkdir(parents=True)
        with tarfile.open(package, "r:gz") as archive:
            _extract(archive, fresh, where=str(package))
        _check_links(fresh, where=str(package))
        entries = sorted(fresh.iterdir())
        if not entries:
            raise UsageError("the package of code is empty", where=str(package), fix=_FIX)
        for entry in entries:
            _replace(entry, folder / entry.name)
    except (tarfile.TarError, EOFError) as err:
        raise UsageError(f"not a package of code: {err}", where=str(package), fix=_FIX) from None
    except OSError as err:
        raise UsageError(
            f"the package of code cannot be unpacked: {err.strerror or err}",
            where=f"{package}, into {folder}",
            fix="check that the channel contains it, and that the folder is writable and has space",
        ) from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        if is_new:
            # It stays if anything is in it.
            with contextlib.suppress(OSError):
                folder.rmdir()
    return folder


def _extract(archive: tarfile.TarFile, folder: Path, *, where: str) -> None:
    if hasattr(tarfile, "data_filter"):
        # Python's own second look, from 3.11.4 on; Debian 12 brings 3.11.2.
        archive.extraction_filter = tarfile.data_filter
    links: set[str] = set()
    num_bytes = 0
    for count, member in enumerate(archive, start=1):
        name = posixpath.normpath(member.name)
        num_bytes += max(0, member.size)
        if num_bytes > MAX_CODE_BYTES or count > MAX_CODE_FILES:
            raise UsageError(
                f"the package of code is larger than {MAX_CODE_BYTES >> 30} GiB or has more than "
                f"{MAX_CODE_FILES} files",
                where=where,
                fix=_FIX,
            )
        if reason := _reason_to_refuse(member, name, links):
            raise UsageError(
                f"the package of code holds {member.name!r}: {reason}", where=where, fix=_FIX
            )
        if member.issym():
            links.add(name)
        if name != ".":
            archive.extract(_ours(member), folder)


def _ours(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Returns the member as this user's, whoever packed it: no foreign owner, no set-user-id."""
    member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
    member.mode = member.mode & 0o755 | (0o700 if member.isdir() else 0o600)
    return member


def _reason_to_refuse(member: tarfile.TarInfo, name: str, links: set[str]) -> str:
    """Says why `member` may not be unpacked; empty if it may."""
    if name.startswith("/") or "\0" in name:
        return "an absolute path"
    if name == ".." or name.startswith("../"):
        return "a path that leads out of the folder"
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return "neither a file, a folder nor a link"
    # Nothing is written through a link, so that where links lead is only looked at in the end.
    parents = {name, *_parents(name)}
    if parents & links:
        return "a path through a link"
    if member.islnk():
        target = posixpath.normpath(member.linkname)
        if target.startswith(("/", "../")) or target == "..":
            return "a hard link that leads out of the folder"
        if {target, *_parents(target)} & links:
            return "a hard link to a link"
    return ""


def _parents(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _check_links(folder: Path, *, where: str) -> None:
    """Refuses links that lead out of `folder`, whatever other links they pass."""
    root = folder.resolve()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(parent, name)
            if path.is_symlink() and not _stays_inside(path, root):
                raise UsageError(
                    f"the package of code holds {str(path.relative_to(folder))!r}: a link that "
                    "leads out of the folder",
                    where=where,
                    fix=_FIX,
                )


def _stays_inside(link: Path, root: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(root)
    except FileNotFoundError:
        # It leads nowhere yet.
        return link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):
        return False


def _replace(entry: Path, target: Path) -> None:
    if target.is_dir() and not target.is_symlink():
        shutil.rmtree(target)
    elif target.is_symlink() or target.exists():
        target.unlink()
    entry.rename(target)
