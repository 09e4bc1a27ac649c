"""Metrics that a script only prints: the last match of each gate's pattern in its output."""

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from stoker.launch import match_patterns
from stoker.records import read_text

FILE = "log-metrics.json"
# What a pipe holds is searched in less, slow patterns included.
_CLOSE_SECONDS = 60.0


class LogMetrics:
    """The values of patterns in a command's output, line by line as it comes.

    Another process searches (`match_patterns`): the launcher continues whatever a pattern costs.
    `read` is called by the threads that copy standard output and errors, and never raises. It
    blocks while the search is behind by more than a pipe holds: slow patterns cost at most a
    quarter of a second of CPU for each of three lines.

    Attributes:
        values: The value of the last match, by pattern's name. Empty before `close`.
        slow: Names of patterns that took more than a quarter of a second of CPU on a line. Such
            lines do not count, and after three of them no line does.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self.values: dict[str, str] = {}
        self.slow: tuple[str, ...] = ()
        self._lock = threading.Lock()
        # Nothing of the training's environment, such as a sitecustomize.
        words = [sys.executable, "-I", "-S", match_patterns.__file__, json.dumps(patterns)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._is_open = True

    def read(self, lines: bytes) -> None:
        """Gives whole lines to the search."""
        # A line that came in two parts would be searched as two.
        end = b"" if lines.endswith(b"\n") else b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self._is_open and self._process.stdin:
                self._process.stdin.write(lines + end)
                self._process.stdin.flush()

    def close(self) -> None:
        """Ends the search, for which it waits a minute; a second call does nothing."""
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
        try:
            answer, _ = self._process.communicate(timeout=_CLOSE_SECONDS)
            results = json.loads(answer or b"{}")
        except (OSError, ValueError, subprocess.TimeoutExpired):
            results = {}
        # Where it took longer than a minute; else it has ended.
        self._process.kill()
        self._process.wait()
        self.values = results.get("values", {})
        self.slow = tuple(results.get("slow", ()))

    def write(self, output: Path) -> None:
        """Writes what was found for the record of the training."""
        (output / FILE).write_text(json.dumps(self.values), encoding="utf-8")


def metrics_in_log(output: Path) -> dict[str, str]:
    """Returns what a command's output said of metrics, as texts."""
    if not (output / FILE).is_file():
        return {}
    values = json.loads(read_text(output / FILE))
    return {str(name): str(value) for name, value in values.items()}
