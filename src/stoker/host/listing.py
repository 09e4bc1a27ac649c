"""Version of a folder with data: a digest of its files' names, sizes and times."""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

# On a file server a look at 10 000 files takes some seconds.
MAX_FILES = 10_000
MAX_SECONDS = 3.0


def listing_version(
    folder: Path,
    *,
    max_files: int = MAX_FILES,
    max_seconds: float = MAX_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """Returns `sha256:DIGEST of N files`; None for a folder that is empty, too large or too slow.

    Blocks for about `max_seconds` at most. Contents are not read.

    Args:
        folder: Folder with the files.
        max_files: With more there is no version.
        max_seconds: After which there is none either.
        clock: Monotonic seconds.
    """
    digest = hashlib.sha256()
    count = 0
    until = clock() + max_seconds
    try:
        for root, folders, files in os.walk(folder):
            # The order of os.walk differs from machine to machine.
            folders.sort()
            for name in sorted(files):
                path = Path(root, name)
                state = path.stat()
                relative = path.relative_to(folder).as_posix()
                line = f"{relative}\n{state.st_size}\n{state.st_mtime_ns}\n"
                digest.update(line.encode(errors="surrogateescape"))
                count += 1
                if count > max_files or clock() > until:
                    return None
    except OSError:
        return None
    if count:
        return f"sha256:{digest.hexdigest()[:16]} of {count} files"
    return None
