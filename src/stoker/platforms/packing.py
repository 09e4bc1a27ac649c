"""Packs a folder of code: the same bytes from each clone, without outputs and secrets.

In a checkout it is what git tracks and what is new and not ignored; elsewhere all files. Left out
are caches, virtual environments and what stoker's commands write. A line of `.stokerignore` (in the
form of .gitignore) that matches decides before that: left out, or with `!` packed whatever it is.

A file that is named as secrets are is refused, not left out: the training may need it.
"""

import gzip
import io
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import MissingExtraError, UsageError
from stoker.logs import printable
from stoker.records import SageMakerSettings, nearest
from stoker.records.platforms import requirements_named
from stoker.units import size

IGNORE_FILE = ".stokerignore"
# Code, not data: it is packed in memory, and each host downloads it before it starts.
MAX_CODE_BYTES = 256 << 20
# Lines before the user's own, in the same form. First, leftovers of tools; then what stoker's
# commands write at the top of a project: a compiled pipeline contains the digest of the code, and
# may not be part of the code.
_LEFT_OUT = """
.git
.hg
.svn
.venv
venv
.tox
.nox
.ipynb_checkpoints
.mypy_cache
.pytest_cache
.ruff_cache
.DS_Store
__pycache__
*.pyc
/runs
/report.html
/p.json
/p.yaml
/pipeline.json
/pipeline.yaml
/profile.json
/decision.json
/training.json
/evaluation.json
/training-timeline.csv
/training-metrics.jsonl
/training-bad_samples.csv
/baseline-timeline.csv
/baseline-metrics.jsonl
"""
# Files that hold secrets and nothing else; but .env.example and such are variables without values.
_SECRETS = """
.env
.env.*
*.env
id_rsa
id_dsa
id_ecdsa
id_ed25519
*.ppk
*.p12
*.pem
*.pfx
*.jks
*.keystore
*.kdbx
.netrc
_netrc
.git-credentials
.pgpass
.htpasswd
.dockercfg
kaggle.json
credentials.json
*.tfstate
client_secret*.json
service-account*.json
secrets.y*ml
secrets.json
secrets.toml
kubeconfig
!*.example
!*.sample
!*.template
!*.dist
!*.pub
"""
# Programs whose first argument is a script.
_INTERPRETER = re.compile(r"(?:.*/)?(?:python|pypy)[\d.]*|(?:.*/)?(?:ba|da)?sh")
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A packed folder.

    Attributes:
        content: A .tar.gz that depends only on the files' names, contents and executable bits.
        sizes: Bytes of each file, by its path in the folder; of a link 0.
    """

    content: bytes
    sizes: Mapping[str, int]


def package_of(folder: Path, *, max_bytes: int = MAX_CODE_BYTES) -> SourcePackage:
    """Packs the files of `folder` that the module's docstring says.

    Raises:
        UsageError: If the folder is missing, or has more than `max_bytes` (unpacked); if a file is
            named as secrets are, or a link leaves the folder; if git does not list a checkout.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}", fix="check sagemaker.source")
    names = sorted(set(_packed_names(folder)))
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    # Before anything is read: a folder of data would fill the memory.
    if total > max_bytes:
        largest = sorted(names, key=lambda name: -sizes[name])[:_MAX_NAMED]
        named = ", ".join(f"{printable(name)} ({size(sizes[name])})" for name in largest)
        raise UsageError(
            f"the code is too large to pack: {size(total)}; at most {size(max_bytes)}",
            where=f"{folder}, largest: {named}",
            fix=f"keep data out of the code's folder ({IGNORE_FILE}), and pass it as a channel",
        )
    packed = io.BytesIO()
    with (
        # gzip's header has a name and a time, which would change the bytes each time.
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            _add(archive, folder, name)
    return SourcePackage(content=packed.getvalue(), sizes=sizes)


def check_requirements(settings: SageMakerSettings, package: SourcePackage) -> None:
    """Refuses requirements that are not in the package."""
    name = requirements_named(settings.requirements, files=package.sizes)
    if name and name not in package.sizes:
        files = [each for each in package.sizes if each.endswith(".txt")]
        raise UsageError(
            f"the file {name} is not in the packed code",
            where="key sagemaker.requirements",
            fix=nearest(name, [*files, "auto", "none"]),
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


def _packed_names(folder: Path) -> Iterator[str]:
    """Yields the paths of files and links to pack, relative to `folder`; refuses secrets."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as err:
        raise MissingExtraError.of(err, extra="sagemaker") from None

    file = folder / IGNORE_FILE
    lines = file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else []
    left_out = GitIgnoreSpec.from_lines([*_LEFT_OUT.split(), *lines])
    secret = GitIgnoreSpec.from_lines([*_SECRETS.split(), *lines])
    names = _listed_by_git(folder)
    if names is None:
        found = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
        names = [path.relative_to(folder).as_posix() for path in found]
    secrets = []
    for name in names:
        # A submodule that is not checked out: it is refused, or left out by its line.
        is_folder = (folder / name).is_dir() and not (folder / name).is_symlink()
        if left_out.match_file(f"{name}/" if is_folder else name):
            continue
        if secret.match_file(name):
            secrets.append(printable(name))
        yield name
    if secrets:
        raise UsageError(
            "the code seems to contain secrets, which would lie in S3 and on all hosts: "
            + ", ".join(secrets[:_MAX_NAMED]),
            where=str(folder),
            fix=f"leave them out: a line '{secrets[0]}' in {IGNORE_FILE}; if it is no secret: "
            f"'!{secrets[0]}'",
        )


def _listed_by_git(folder: Path) -> list[str] | None:
    """Returns what git tracks in a folder, and what is new and not ignored; None: no checkout."""
    top = folder.resolve()
    if not any((above / ".git").exists() for above in (top, *top.parents)):
        return None
    names: list[str] = []
    for which in (("--cached", "--recurse-submodules"), ("--others", "--exclude-standard")):
        # A monitor is a program that the repository's settings name.
        words = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", *which]
        try:
            # Its own words on what is wrong stand in the terminal.
            done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, check=True)
        except (OSError, subprocess.CalledProcessError) as err:
            raise UsageError(
                f"git does not list the files of this checkout: {err}",
                where=str(folder),
                fix="correct that, or pack a copy of the folder outside of the checkout",
            ) from err
        names += os.fsdecode(done.stdout).split("\0")[:-1]
    # Others were deleted, and the commit that says so is still to come.
    return [name for name in names if os.path.lexists(folder / name)]


def _add(archive: tarfile.TarFile, folder: Path, name: str) -> None:
    path = folder / name
    # Time, owner and group are zero: only name and content count.
    entry = tarfile.TarInfo(name)
    if path.is_symlink():
        entry.type = tarfile.SYMTYPE
        entry.mode = 0o777
        entry.linkname = os.readlink(path)
        is_inside = path.resolve().is_relative_to(folder.resolve())
        if os.path.isabs(entry.linkname) or not is_inside:
            raise UsageError(
                f"the link {name} leaves the folder: {entry.linkname}",
                where=str(folder),
                fix=f"replace it with a copy of what it points to, or leave it out ({IGNORE_FILE})",
            )
        archive.addfile(entry)
        return
    if path.is_dir():
        raise UsageError(
            f"{printable(name)} is no file: a submodule that is not checked out, or a repository",
            where=str(folder),
            fix=f"git submodule update --init, or the line '{name}' in {IGNORE_FILE}",
        )
    content = path.read_bytes()
    # Two modes only: other bits come from the umask of the checkout.
    entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
