"""Packs a folder of code: the same bytes from each clone, without outputs and secrets.

What is packed, in this order:

1. A line of `.stokerignore` that matches decides: left out, or with `!` packed whatever it is.
2. Caches, virtual environments and what stoker itself has written are left out.
3. In a checkout, what git tracks and what is new and not ignored; elsewhere all the rest.

A file that holds a secret (`source_secrets`) is refused, not left out: the training may need it.
"""

import gzip
import io
import os
import re
import stat
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from stoker.archive import MAX_CODE_FILES
from stoker.errors import UsageError
from stoker.host.git import git_listing
from stoker.logs import printable
from stoker.platforms.ignore_patterns import IGNORE_FILE, IgnorePatterns, read_patterns
from stoker.platforms.source_secrets import secret_in
from stoker.records import SageMakerSettings, nearest
from stoker.records.platforms import requirements_named
from stoker.units import count, size

# Code, not data: it is packed in memory, and each host downloads it before it starts.
MAX_CODE_BYTES = 256 << 20
# Leftovers of tools, at any depth.
_CACHES = frozenset(
    (
        ".git",
        ".hg",
        ".svn",
        ".venv",
        "__pycache__",
        ".ipynb_checkpoints",
        ".mypy_cache",
        ".pytest_cache",
        ".ruff_cache",
        ".tox",
        ".nox",
        ".DS_Store",
    )
)
# What stoker's commands write at the top of a project. Below it, a package may have this name.
_OUTPUTS_AT_THE_TOP = frozenset(
    (
        "runs",
        "p.json",
        "p.yaml",
        "profile.json",
        "decision.json",
        "training.json",
        "evaluation.json",
        "report.html",
        "training-timeline.csv",
        "training-feed.csv",
        "training-gpu.csv",
        "training-bad_samples.csv",
        "baseline-timeline.csv",
    )
)
# Other names of them, by what is in the file.
_RECORD = re.compile(rb'"schema":\s*"stoker\.(?!workload/)\w+/v\d+"')
_REPORT = b'<meta name="generator" content="stoker">'
_INPUTS_OF_RUNS = b"/stoker/inputs/"
_COMPILED_BY_KFP = b"# PIPELINE DEFINITION"
# Programs whose first argument is a script.
_INTERPRETER = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*|(?:.*/)?(?:ba|da)?sh")
_NUM_LARGEST = 3
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A packed folder.

    Attributes:
        content: A .tar.gz that depends only on the files' names, contents and executable bits.
        sizes: Bytes of each file, by its path in the folder; of a link 0.
    """

    content: bytes
    sizes: dict[str, int]

    def words(self) -> str:
        """Returns the number of the files, their size and the largest: "12 files, 40 kB ..."."""
        total = sum(self.sizes.values())
        return f"{count(len(self.sizes), 'file')}, {size(total)}; {_largest(self.sizes)}"


def pack(folder: Path, *, max_bytes: int = MAX_CODE_BYTES) -> bytes:
    """Returns the content of `package_of`."""
    return package_of(folder, max_bytes=max_bytes).content


def package_of(folder: Path, *, max_bytes: int = MAX_CODE_BYTES) -> SourcePackage:
    """Packs the files of `folder` that the module's docstring says.

    Raises:
        UsageError: If the folder is missing or empty; if it has more than `max_bytes` (unpacked) or
            50,000 files; if a file seems to hold a secret, a link leaves the folder, or an entry is
            not a file or link; if git does not say what a checkout ignores.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}", fix="check sagemaker.source")
    patterns = read_patterns(folder)
    names = _names(folder, patterns)
    # Before anything is read: a folder of data would fill the memory.
    _check_number(folder, names)
    _check_size(folder, names, max_bytes)
    # Read once: what is checked is what is packed, though files may change meanwhile.
    contents = {name: _content(folder, name) for name in names}
    kept = {
        name: content
        for name, content in contents.items()
        if patterns.decided(name) is False or not _is_output(name, content)
    }
    if not kept:
        raise UsageError("nothing to pack", where=str(folder), fix="name another folder")
    _refuse_secrets(folder, kept, patterns)
    sizes = {name: len(content or b"") for name, content in kept.items()}
    return SourcePackage(content=_archive(folder, kept), sizes=sizes)


def check_requirements(settings: SageMakerSettings, package: SourcePackage) -> None:
    """Refuses requirements that are not in the package, or that hosts without network would need.

    A file that is named may do without an index, by --no-index and --find-links.
    """
    name = requirements_named(settings.requirements, files=package.sizes)
    where = "key sagemaker.requirements"
    if name and name not in package.sizes:
        kept = [each for each in package.sizes if each.endswith(".txt")]
        raise UsageError(
            f"the file {name} is not in the packed code",
            where=where,
            fix=nearest(name, [*kept, "auto", "none"]),
        )
    if name and settings.network_isolation and settings.requirements == "auto":
        raise UsageError(
            f"the hosts have no network (EnableNetworkIsolation) to install {name}",
            where=where,
            fix="put the packages into the image and write none; or name the file, if it needs no "
            "index (--no-index, --find-links)",
        )


def check_program(command: Sequence[str], package: SourcePackage) -> None:
    """Refuses a command whose script, by a path within the code's folder, is not in the package."""
    script = command[0]
    if _INTERPRETER.fullmatch(script):
        script = next(iter(command[1:]), "")
    # An interpreter's option comes first: the word after it may be its value, and no script.
    if script.startswith(("-", "/", "..")) or not script.endswith((".py", ".sh")):
        return
    if os.path.normpath(script) in package.sizes:
        return
    raise UsageError(
        f"the command's script {printable(script)} is not in the packed code",
        where="key command, key sagemaker.source",
        fix=nearest(script, [name for name in package.sizes if name.endswith(script[-3:])]),
    )


def _archive(folder: Path, contents: dict[str, bytes | None]) -> bytes:
    packed = io.BytesIO()
    with (
        # gzip's header has a name and a time, which would change the bytes each time.
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, content in contents.items():
            _add(archive, folder, name, content)
    return packed.getvalue()


def _names(folder: Path, patterns: IgnorePatterns) -> list[str]:
    """Returns the paths of files and links, relative to `folder`, sorted."""
    listing = git_listing(folder)
    if listing is None:
        listed = _walked(folder, folder, patterns)
    elif not listing.problem:
        listed = _of_git(folder, listing.names, patterns)
    elif (folder / IGNORE_FILE).is_file():
        listed = _walked(folder, folder, patterns)
    else:
        raise UsageError(
            f"git does not say which files of this checkout are ignored: {listing.problem}",
            where=str(folder),
            fix=f"correct that, or write a file {IGNORE_FILE}: it decides alone then",
        )
    names = [name for name in listed if not _is_left_out(name, patterns)]
    return sorted(_without_environments(names, patterns))


def _of_git(folder: Path, names: Iterable[str], patterns: IgnorePatterns) -> Iterator[str]:
    for listed in names:
        name = listed.rstrip("/")
        path = folder / name
        if not path.is_symlink() and path.is_dir():
            # Another repository: git lists its folder as one entry.
            yield from _of_repository(folder, name, patterns)
        elif os.path.lexists(path):
            # Otherwise it was deleted, and the commit that says so is still to come.
            yield name


def _of_repository(folder: Path, name: str, patterns: IgnorePatterns) -> Iterator[str]:
    if patterns.decided(name, is_folder=True):
        return
    inner = folder / name
    problem = "it is not checked out"
    listing = None
    if (inner / ".git").exists() and (listing := git_listing(inner)):
        problem = listing.problem
    if listing is None or problem:
        raise UsageError(
            f"the submodule {printable(name)} cannot be packed: {problem}",
            where=str(folder),
            fix=f"git submodule update --init {name}, or, if the training does not need it, the "
            f"line '{name}/' in {IGNORE_FILE}",
        )
    for below in _of_git(inner, listing.names, IgnorePatterns(())):
        yield f"{name}/{below}"


def _walked(top: Path, folder: Path, patterns: IgnorePatterns) -> Iterator[str]:
    # By default os.walk silently skips what it cannot read.
    for root, folders, files in os.walk(folder, onerror=_refuse):
        here = Path(root).relative_to(top)
        # Joined as texts: a folder of data, which is refused, may have 50,000 files and more.
        prefix = "" if here == Path() else f"{here.as_posix()}/"
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        # os.walk lists a link to a folder as a folder, and does not enter it.
        entered = [name for name in folders if name not in links]
        folders[:] = [name for name in entered if not _is_pruned(here / name, patterns)]
        for name in (*files, *links):
            yield prefix + name


def _refuse(err: OSError) -> None:
    raise UsageError(
        f"cannot read {err.filename}: {err.strerror}", fix="check its permissions"
    ) from err


def _is_pruned(folder: Path, patterns: IgnorePatterns) -> bool:
    verdict = patterns.decided(folder.as_posix(), is_folder=True)
    if verdict is None:
        return folder.name in _CACHES
    return verdict


def _is_left_out(name: str, patterns: IgnorePatterns) -> bool:
    verdict = patterns.decided(name)
    if verdict is not None:
        return verdict
    parts = name.split("/")
    is_cache = any(part in _CACHES for part in parts) or name.endswith((".pyc", ".pyo"))
    return is_cache or parts[0] in _OUTPUTS_AT_THE_TOP


def _without_environments(names: Sequence[str], patterns: IgnorePatterns) -> Iterator[str]:
    """Leaves out virtual environments, which differ from machine to machine."""
    markers = [name for name in names if name.endswith("/pyvenv.cfg")]
    homes = {PurePosixPath(name).parent for name in markers}
    for name in names:
        is_inside = bool(homes) and any(above in homes for above in PurePosixPath(name).parents)
        if not is_inside or patterns.decided(name) is False:
            yield name


def _content(folder: Path, name: str) -> bytes | None:
    """Returns a file's content; None for a link."""
    path = folder / name
    try:
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            return None
        if not stat.S_ISREG(mode):
            raise UsageError(
                f"{printable(name)} is not a file, folder or link", where=str(folder), fix="move it"
            )
        return path.read_bytes()
    except OSError as err:
        raise UsageError(
            f"cannot read {printable(name)}: {err.strerror}",
            where=str(folder),
            fix=f"check its permissions, or leave it out with a line in {IGNORE_FILE}",
        ) from err


def _is_output(name: str, content: bytes | None) -> bool:
    """Whether stoker has written a file, whatever its name: records, reports, compiled pipelines.

    A compiled pipeline contains the digest of the code: it may not be part of the code.
    """
    kind = PurePosixPath(name).suffix.lower()
    if content is None:
        return False
    if kind == ".json":
        is_pipeline = _INPUTS_OF_RUNS in content and b'"Steps"' in content
        return is_pipeline or bool(_RECORD.search(content))
    if kind in (".yaml", ".yml"):
        return content.startswith(_COMPILED_BY_KFP) and b"stoker" in content
    return kind == ".html" and _REPORT in content


def _refuse_secrets(
    folder: Path, contents: dict[str, bytes | None], patterns: IgnorePatterns
) -> None:
    reasons = {
        name: secret_in(name, content or b"")
        for name, content in contents.items()
        if patterns.decided(name) is not False
    }
    secrets = [f"{printable(name)} ({why})" for name, why in reasons.items() if why]
    if not secrets:
        return
    named = ", ".join(secrets[:_MAX_NAMED])
    if len(secrets) > _MAX_NAMED:
        named += f" and {len(secrets) - _MAX_NAMED} more"
    first = next(name for name, why in reasons.items() if why)
    raise UsageError(
        f"the code seems to contain secrets, which would lie in S3 and on all hosts: {named}",
        where=str(folder),
        fix=f"leave them out: a line '{printable(first)}' in {IGNORE_FILE} (or in .gitignore, if "
        f"git does not track it); if it is no secret: '!{printable(first)}' in {IGNORE_FILE}",
    )


def _check_number(folder: Path, names: Sequence[str]) -> None:
    if len(names) <= MAX_CODE_FILES:
        return
    raise UsageError(
        f"the code has {len(names):,} files, at most {MAX_CODE_FILES:,}",
        where=str(folder),
        fix=f"keep data out of the code's folder ({IGNORE_FILE}), and pass it as a channel",
    )


def _check_size(folder: Path, names: Sequence[str], max_bytes: int) -> None:
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    if total > max_bytes:
        raise UsageError(
            f"the code is too large to pack: {size(total)}, at most {size(max_bytes)}",
            where=f"{folder}, {_largest(sizes)}",
            fix=f"keep data out of the code's folder ({IGNORE_FILE}), and pass it as a channel",
        )


def _largest(sizes: dict[str, int]) -> str:
    names = sorted(sizes, key=lambda name: (-sizes[name], name))[:_NUM_LARGEST]
    return "largest: " + ", ".join(f"{printable(name)} ({size(sizes[name])})" for name in names)


def _add(archive: tarfile.TarFile, folder: Path, name: str, content: bytes | None) -> None:
    path = folder / name
    entry = tarfile.TarInfo(name)
    # Zero, as owner and group are: only name and content count.
    entry.mtime = 0
    if content is None:
        entry.type = tarfile.SYMTYPE
        entry.mode = 0o777
        entry.linkname = _link(folder, path)
        archive.addfile(entry)
        return
    # Two modes only: other bits come from the umask of the checkout.
    entry.mode = 0o644
    if path.stat().st_mode & stat.S_IXUSR:
        entry.mode = 0o755
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def _link(folder: Path, path: Path) -> str:
    """Returns a link's target relative to the link; refuses one outside `folder`."""
    pointed = Path(os.readlink(path))
    inside = folder.resolve()
    try:
        target = path.resolve()
    except RuntimeError:
        target = path
    # Still a link: it leads to itself, for which Python 3.13 raises nothing.
    if target.is_symlink() or not target.is_relative_to(inside):
        raise UsageError(
            f"the link {path.relative_to(folder).as_posix()} leaves the folder: {pointed}",
            where=str(folder),
            fix=f"replace it with a copy of what it points to, or leave it out ({IGNORE_FILE})",
        )
    if not pointed.is_absolute():
        return pointed.as_posix()
    # An absolute link into the folder, which has another path on the hosts.
    return Path(os.path.relpath(target, path.parent.resolve())).as_posix()
