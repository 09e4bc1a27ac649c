"""State of a git checkout: for records of which code ran, and for the files of a code package."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_SECONDS = 5.0
# Of a listing: a large repository on a slow disk.
_LISTING_SECONDS = 120.0
# A hook of git sets these, perhaps for a repository that is not the folder's.
_OF_HOOKS = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX")
# An empty folder .git, say. Of a checkout whose repository is gone, git says something else.
_NO_REPOSITORY = b"not a git repository (or any"
# Tracked, or new and not ignored; the names as they are, each with a NUL.
_LISTED = ("ls-files", "-z", "--cached", "--others", "--exclude-standard", "--")


@dataclass(frozen=True, slots=True, kw_only=True)
class GitListing:
    """The files of a folder that git tracks, or that are new and not ignored.

    Attributes:
        names: Relative to the folder. A repository inside of it, such as a submodule, is one name.
        problem: Why git did not list them; empty: it did.
    """

    names: tuple[str, ...] = ()
    problem: str = ""


def git_state(folder: Path) -> dict[str, str | bool]:
    """Returns the commit as `git`, and `git_dirty` if tracked files differ from it.

    Empty outside of a checkout, or without git. Blocks for 10 s at most.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    # New files are outputs as often as code.
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"git": commit, **({"git_dirty": True} if changed else {})}


def git_listing(folder: Path) -> GitListing | None:
    """Returns what a checkout has in `folder`; None outside of one, and if it ignores the folder.

    Blocks for four minutes at most.
    """
    top = folder.resolve()
    if not any((above / ".git").exists() for above in (top, *top.parents)):
        return None
    try:
        is_ignored = _run(folder, "check-ignore", "-q", ".", environ=os.environ).returncode == 0
        listed = _run(folder, *_LISTED, ".", environ=os.environ)
    except FileNotFoundError:
        return GitListing(problem="git is not installed")
    except (OSError, subprocess.TimeoutExpired) as err:
        return GitListing(problem=f"git does not answer: {err}")
    if _NO_REPOSITORY in listed.stderr:
        return None
    if listed.returncode != 0:
        words = os.fsdecode(listed.stderr).strip().splitlines() or ["git ls-files failed"]
        return GitListing(problem=words[0])
    names = {os.fsdecode(name) for name in listed.stdout.split(b"\0") if name}
    if is_ignored and not names:
        return None
    return GitListing(names=tuple(sorted(names)))


def _run(
    folder: Path, *arguments: str, environ: Mapping[str, str]
) -> "subprocess.CompletedProcess[bytes]":
    variables = {name: value for name, value in environ.items() if name not in _OF_HOOKS}
    return subprocess.run(
        # A monitor is a program that the repository's settings name.
        ["git", "-C", str(folder), "-c", "core.fsmonitor=false", *arguments],
        capture_output=True,
        timeout=_LISTING_SECONDS,
        env={**variables, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"},
        check=False,
    )


def _git(folder: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            # Do not lock the index against the user's own git.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    if done.returncode == 0:
        return done.stdout.strip()
    return ""
