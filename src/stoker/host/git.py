"""State of a git checkout, for records of which code ran."""

import os
import subprocess
from pathlib import Path

_SECONDS = 5.0


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
    return done.stdout.strip() if done.returncode == 0 else ""
