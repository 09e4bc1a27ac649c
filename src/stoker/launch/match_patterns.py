"""The process that looks for patterns in what a script prints; run as a file, without stoker.

A pattern may take for ever on one line, such as (a+)+b on many letters a, and while `re` searches,
no other thread of its process runs. So the launcher has this process for it, in which a timer ends
a search that takes too long.

    python match_patterns.py '{"accuracy": "accuracy ([0-9.]+)"}' < lines > found.json
"""

import json
import re
import signal
import sys
from collections.abc import Mapping
from types import FrameType

# Longer ones are dumps.
MAX_LINE = 1000
# Of this process's CPU, which another load of the host does not use up.
_SECONDS = 0.25
# With this many such lines a pattern would hold up the script's output.
_MAX_SLOW = 3


class SlowPatternError(Exception):
    """A search took too long."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise SlowPatternError


def last_match(pattern: re.Pattern[str], line: str) -> str | None:
    """Returns the value of the last match in a line; None: no match, or a group without a part.

    Raises:
        SlowPatternError: If the search takes more than a quarter of a second of CPU.
    """
    last = None
    signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
    try:
        for match in pattern.finditer(line):
            last = match[1] if match[1] is not None else last
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return last


def main(texts: Mapping[str, str]) -> None:
    """Reads lines to the end of standard input, and writes the last values and slow patterns."""
    # The end of the input ends this process, so that no line is lost.
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGVTALRM, _stop)
    patterns = {name: re.compile(text) for name, text in texts.items()}
    values: dict[str, str] = {}
    slow = dict.fromkeys(patterns, 0)
    for raw in sys.stdin.buffer:
        for line in raw.decode(errors="replace").splitlines():
            for name, pattern in patterns.items():
                if slow[name] == _MAX_SLOW:
                    continue
                try:
                    value = last_match(pattern, line[:MAX_LINE])
                except SlowPatternError:
                    slow[name] += 1
                    continue
                if value is not None:
                    values[name] = value
    print(json.dumps({"values": values, "slow": [name for name in slow if slow[name]]}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
