"""The merged log of a job on this machine: one file a host, as the local platform keeps them."""

import contextlib
import threading
from pathlib import Path
from typing import IO

from stoker.platforms.base import LogLine


class LogFiles:
    """Writes GROUP-HOST.log files; those of an earlier attempt are replaced.

    A run may be stopped by another thread than the one that reads its lines.

    Args:
        folder: Made with the first line.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[str, IO[str]] = {}
        self._begun: set[str] = set()
        self._lock = threading.Lock()

    def write(self, line: LogLine) -> None:
        """Adds a line to its host's file."""
        # Both names come from a log: what is no plain name must not lead out of the folder.
        name = f"{line.group}-{line.host}.log".replace("/", "_")
        with self._lock:
            if name not in self._open:
                self._folder.mkdir(parents=True, exist_ok=True)
                mode = "a" if name in self._begun else "w"
                self._open[name] = (self._folder / name).open(mode, encoding="utf-8")
                self._begun.add(name)
            file = self._open[name]
            file.write(line.text + "\n")
            file.flush()

    def close(self) -> None:
        """Closes the files, which the next line opens again; may be called twice."""
        with self._lock:
            for file in self._open.values():
                with contextlib.suppress(OSError):
                    file.close()
            self._open.clear()
