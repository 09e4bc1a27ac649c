"""The state of a git checkout: which code was run is a part of what a record says."""

import os
import subprocess
from pathlib import Path

_SECONDS = 5.0


def git_state(folder: Path) -> dict[str, str | bool]:
    """Returns the commit that is checked out as `git`, and `git_dirty` where files differ from it.

    Empty where the folder is in no checkout, or git is not there. Blocks for 10 s at most.
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
            # A look must not keep the user's own git from its index.
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
