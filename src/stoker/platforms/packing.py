"""Packs a folder of code: the same bytes from each clone, without outputs and secrets.

In a checkout it is what git tracks and what is new and not ignored; elsewhere all files. Left out
are caches, virtual environments and what stoker's commands write. A line of `.stokerignore` (in the
form of .gitignore) that matches decides before that: left out, or with `!` packed whatever it is.

A file that is named as secrets are is refused, not left out: the training may need it.
"""

import gzip
import io
import os
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
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePackage:
    """A packed folder.

    Attributes:
        content: A .tar.gz that depends only on the files' names, contents and executable bits.
        sizes: Bytes of each file, by its path in the folder.
    """

    content: bytes
    sizes: Mapping[str, int]


def package_of(folder: Path) -> SourcePackage:
    """Packs the files of `folder` that the module's docstring says.

    Raises:
        UsageError: If the folder is missing, or has more than MAX_CODE_BYTES (unpacked); if a file
            is named as secrets are, or a link leaves the folder; if git does not list a checkout.
    """
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}", fix="check sagemaker.source")
    names = sorted(set(_packed_names(folder)))
    sizes = {name: (folder / name).lstat().st_size for name in names}
    total = sum(sizes.values())
    # Before anything is read: a folder of data would fill the memory.
    if total > MAX_CODE_BYTES:
        largest = sorted(names, key=lambda name: -sizes[name])[:_MAX_NAMED]
        raise UsageError(
            f"the code is too large to pack: {size(total)}; at most {size(MAX_CODE_BYTES)}",
            where=f"{folder}, largest files: {printable(', '.join(largest))}",
            fix=f"keep data out of the code's folder ({IGNORE_FILE}), and pass it as a channel",
        )
    packed = io.BytesIO()
    with (
        # gzip's header has a name and a time, which would change the bytes each time.
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in names:
            path = folder / name
            # Time, owner and group are zero: only name and content count.
            entry = tarfile.TarInfo(name)
            content = b""
            if path.is_symlink():
                entry.type = tarfile.SYMTYPE
                entry.mode = 0o777
                entry.linkname = os.readlink(path)
            else:
                content = path.read_bytes()
                # Two modes only: other bits come from the umask of the checkout.
                entry.mode = 0o755 if os.access(path, os.X_OK) else 0o644
                entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return SourcePackage(content=packed.getvalue(), sizes=sizes)


def check_files(
    package: SourcePackage, *, command: Sequence[str], settings: SageMakerSettings
) -> None:
    """Refuses a command's script, by a path within the folder, or requirements not packed."""
    # `train.py` or `python train.py`: a later word may be an option's value.
    scripts = (word for word in command[:2] if word.endswith((".py", ".sh")))
    needed = {
        "key command": os.path.normpath(next(scripts, "/")),
        "key sagemaker.requirements": requirements_named(
            settings.requirements, files=package.sizes
        ),
    }
    for where, name in needed.items():
        if name and not name.startswith(("/", "..")) and name not in package.sizes:
            raise UsageError(
                f"the file {printable(name)} is not in the packed code",
                where=f"{where}, key sagemaker.source",
                fix=nearest(name, [each for each in package.sizes if each.endswith(name[-3:])]),
            )


def _packed_names(folder: Path) -> Iterator[str]:
    """Yields the paths of files and links to pack, relative to `folder`."""
    try:
        from pathspec import GitIgnoreSpec
    except ImportError as err:
        raise MissingExtraError.of(err, extra="sagemaker") from None

    file = folder / IGNORE_FILE
    lines = file.read_text(encoding="utf-8-sig").splitlines() if file.is_file() else []
    left_out = GitIgnoreSpec.from_lines([*_LEFT_OUT.split(), *lines])
    secret = GitIgnoreSpec.from_lines([*_SECRETS.split(), *lines])
    top = folder.resolve()
    is_checkout = any((above / ".git").exists() for above in (top, *top.parents))
    for name in _listed_by_git(folder) if is_checkout else _walked(folder):
        if left_out.match_file(name):
            continue
        path = folder / name
        what = ""
        if secret.match_file(name):
            what = "seems to be a secret, which would lie in S3 and on all hosts"
        elif path.is_symlink():
            target = os.readlink(path)
            if os.path.isabs(target) or not path.resolve().is_relative_to(top):
                what = f"is a link that leaves the folder: {target}"
        elif path.is_dir():
            what = "is no file: a submodule that is not checked out, or a repository"
        if what:
            raise UsageError(
                f"{printable(name)} {what}",
                where=str(folder),
                fix=f"leave it out: a line '{name}' in {IGNORE_FILE}; a file that is no secret: "
                f"'!{name}'; a submodule: git submodule update --init",
            )
        yield name


def _walked(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_symlink() or path.is_file():
            yield path.relative_to(folder).as_posix()


def _listed_by_git(folder: Path) -> Iterator[str]:
    """Yields what git tracks in a folder, and what is new and not ignored."""
    for which in (("--cached", "--recurse-submodules"), ("--others", "--exclude-standard")):
        # A monitor is a program that the repository's settings name.
        words = ["git", "-c", "core.fsmonitor=false", "ls-files", "-z", *which]
        try:
            # Its own words on what is wrong stand in the terminal.
            listed = subprocess.check_output(words, cwd=folder)
        except (OSError, subprocess.CalledProcessError) as err:
            raise UsageError(
                f"git does not list the files of this checkout: {err}",
                where=str(folder),
                fix="correct that, or pack a copy of the folder outside of the checkout",
            ) from err
        for name in os.fsdecode(listed).split("\0")[:-1]:
            # Others were deleted, and the commit that says so is still to come.
            if os.path.lexists(folder / name):
                yield name
