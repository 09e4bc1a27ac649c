"""Restarts of all hosts, bounded by progress.

A run that advances may restart as often as its nodes are taken away. One that does not is a crash
loop: it ends after a few restarts, whatever their cause.
"""

import contextlib
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import msgspec

from stoker.environment import ProcessSettings
from stoker.errors import PlatformError
from stoker.feed import timeline
from stoker.logs import EventName, Log

FILE = "restarts.json"
MAX_FILES = 100_000


class Restarts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known when the leader starts; `saved_at` is by the clock of the file system."""

    without_progress: int = 0
    saved_at: int = 0


def check_restarts(settings: ProcessSettings, *, output: Path, log: Log) -> None:
    """Refuses another restart of a run that does not advance.

    An attempt advanced if it made a step, where steps are measured, and saved something new
    below checkpoints; below model or output/data if there is nothing.

    Raises:
        PlatformError: After `settings.max_fresh_starts` restarts without progress.
    """
    most = settings.max_fresh_starts
    if most is None:
        return
    folders = [settings.base_dir / name for name in ("checkpoints", "model", "output/data")]
    # Logs of the script may be in the other folders, which are no progress.
    saved = _times_of_saved_files(folders[:1], output) or _times_of_saved_files(folders, output)
    saved_at = max(saved, default=0)
    # A first start in a folder that another run has used counts nothing of it.
    before = _read(output) if settings.restarts else Restarts()
    without = 0
    if settings.restarts:
        if not (saved_at > before.saved_at and _made_steps(output)):
            # Without a record nothing was kept of the earlier attempts.
            without = 1 + before.without_progress if (output / FILE).exists() else settings.restarts
        log.event(
            EventName.RUN_RESTARTED, restarts=settings.restarts, without_progress=without, most=most
        )
    if without > most:
        raise PlatformError(
            f"restarted {without} times without progress: no step and no new checkpoint",
            where=", ".join(str(folder) for folder in folders),
            fix="see the reason of the first failure; let the script save checkpoints there and "
            "resume from them, use nodes that are not preempted, or raise "
            "kubernetes.max_fresh_starts if it saves elsewhere",
        )
    _write(output, Restarts(without_progress=without, saved_at=saved_at))


def _times_of_saved_files(folders: list[Path], output: Path) -> list[int]:
    """Returns the times of at most MAX_FILES files, without probes, NFS's leftovers and ours."""
    times = []
    for _, path in zip(range(MAX_FILES), _saved_files(folders, output), strict=False):
        # It may be deleted by now, as old checkpoints are.
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime_ns)
    return times


def _saved_files(folders: list[Path], output: Path) -> Iterator[Path]:
    for root, _, names in chain.from_iterable(map(os.walk, folders)):
        folder = Path(root)
        if output in (folder, *folder.parents):
            continue
        for name in names:
            if not name.startswith((".stoker-", ".nfs")):
                yield folder / name


def _made_steps(output: Path) -> bool:
    """Whether the last attempt made a step; True if no steps are measured."""
    files = list(output.glob(timeline.FILE.format(rank="*")))
    return not files or any(map(_has_rows, files))


def _has_rows(file: Path) -> bool:
    # A comment and the names of the columns come first.
    try:
        with file.open("rb") as lines:
            return sum(1 for _ in zip(range(3), lines, strict=False)) == 3
    except OSError:
        return False


def _read(output: Path) -> Restarts:
    try:
        return msgspec.json.decode((output / FILE).read_bytes(), type=Restarts)
    except (OSError, msgspec.DecodeError):
        return Restarts()


def _write(output: Path, restarts: Restarts) -> None:
    # On a full disk the next restart counts as one without progress.
    with contextlib.suppress(OSError):
        output.mkdir(parents=True, exist_ok=True)
        (output / FILE).write_bytes(msgspec.json.encode(restarts))
