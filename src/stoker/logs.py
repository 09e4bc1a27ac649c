"""A log has one line for each event, `event key=value ...`, with run id and host always.

A line looks like `stoker 2026-11-20T08:00:00.123Z run=mnist-1 host=algo-1 agent_listens port=7600`
and is read back by `parse_line`, so that whoever holds only the log of a job (CloudWatch, a pod's
log) can still follow it.
"""

import re
import shlex
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

LogValue = str | int | float | bool | None

_PREFIX = "stoker "
# The head of each event, wherever it begins: platforms put a time before it, and a progress bar, or
# another process whose output is the same stream, half a line. `parse_line` needs the whole line.
EVENT_HEAD = re.compile(r"stoker \d{4}-\d\d-\d\dT[\d:.]+Z run=")


@dataclass(frozen=True, slots=True)
class LogEvent:
    """An event is one line of a log, parsed.

    Attributes:
        when: UTC time, ISO 8601 with milliseconds.
        run: Run id.
        host: Host name as the platform gave it.
        event: Name of the event.
        values: Key to value, as text.
    """

    when: str
    run: str
    host: str
    event: str
    values: Mapping[str, str]


class Log:
    """Writes events of one host and run; safe to use from several threads."""

    def __init__(self, *, run: str, host: str, stream: TextIO | None = None) -> None:
        self._head = f"run={_quote(run)} host={_quote(host)}"
        self._stream = stream
        self._lock = threading.Lock()

    def event(self, name: str, **values: LogValue) -> None:
        """Writes one line; a closed or full stream is ignored, for a log must not end a job."""
        pairs = "".join(f" {key}={_quote(_text(value))}" for key, value in values.items())
        line = f"{_PREFIX}{now_utc()} {self._head} {name}{pairs}\n"
        with self._lock:
            try:
                # Asked for at each event: tests and notebooks replace it.
                stream = self._stream or sys.stderr
                stream.write(line)
                stream.flush()
            # A full disk or a closed pipe; ValueError: a stream that was closed here.
            except (OSError, ValueError):
                return


def parse_line(line: str) -> LogEvent | None:
    """Returns the event in `line`, or None if the line is not one of stoker's."""
    # Not at the start: platforms put a time or the name of a stream before it.
    start = line.find(_PREFIX)
    if start < 0:
        return None
    try:
        words = shlex.split(line[start + len(_PREFIX) :])
    except ValueError:
        return None
    if len(words) < 4 or not words[1].startswith("run=") or not words[2].startswith("host="):
        return None
    values = dict(word.split("=", 1) for word in words[4:] if "=" in word)
    return LogEvent(words[0], words[1][4:], words[2][5:], words[3], values)


def parted(line: str) -> tuple[str, LogEvent | None]:
    """Returns what a script wrote of a line, as a terminal shows it, and stoker's event behind it.

    A progress bar ends with a carriage return: only the last of its states in the line is kept.
    """
    head = EVENT_HEAD.search(line)
    event = parse_line(line[head.start() :]) if head else None
    written = (line[: head.start()] if head and event else line).rstrip("\r")
    return written.rpartition("\r")[2], event


def now_utc() -> str:
    """Returns the time now: UTC, ISO 8601 with milliseconds."""
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


def _text(value: LogValue) -> str:
    if isinstance(value, float):
        # Six digits: a microsecond of a second, and a line that people still read.
        return f"{value:.6g}"
    return "" if value is None else str(value)


def printable(text: str, *, keep: str = "") -> str:
    r"""Returns `text` with what is no letter, mark or space written as `\x1b`, `\u202e`.

    An error that a dataset raises must not paint on the terminal that shows it.

    Args:
        text: Whatever was raised, or read.
        keep: Characters that stay, such as the ends of lines.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def _quote(text: str) -> str:
    # One event is one line: line breaks become blanks.
    flat = printable(" ".join(text.split()))
    return flat if flat and not set(flat) & set(" '\"\\") else shlex.quote(flat)
