"""Metrics that a script only prints: the last match of each gate's pattern in its output."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from stoker.records import read_text

FILE = "log-metrics.json"
# Longer ones are dumps, on which a pattern could take long.
_MAX_LINE = 1000


class LogMetrics:
    """The values of patterns in a command's output, line by line as it comes.

    `read` is called by the threads that copy standard output and errors.
    """

    def __init__(self, patterns: Mapping[str, str]) -> None:
        self._patterns = {name: re.compile(pattern) for name, pattern in patterns.items()}
        self.values: dict[str, str] = {}

    def read(self, lines: bytes) -> None:
        for line in lines.decode(errors="replace").splitlines():
            for name, pattern in self._patterns.items():
                for found in pattern.finditer(line[:_MAX_LINE]):
                    # A group may have no part in a match.
                    if found[1] is not None:
                        self.values[name] = found[1]

    def write(self, output: Path) -> None:
        """Writes what was found for the record of the training."""
        (output / FILE).write_text(json.dumps(self.values), encoding="utf-8")


def metrics_in_log(output: Path) -> dict[str, str]:
    """Returns what a command's output said of metrics, as texts."""
    if not (output / FILE).is_file():
        return {}
    found = json.loads(read_text(output / FILE))
    return {str(name): str(value) for name, value in found.items()}
