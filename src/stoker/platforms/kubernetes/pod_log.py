"""The log of a pod: its lines, and the small files behind a run's records, which go through it.

A pod's disk is gone with the pod, but its follower has read its log. So the launcher writes these
files to the log, compressed, in short lines and bounded; the follower reassembles them.
"""

import base64
import binascii
import queue
import re
import threading
import time
import zlib
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import ServiceError
from stoker.logs import EventName, Log, parse_line
from stoker.platforms.base import LogLine
from stoker.platforms.kubernetes.api import ClusterApi
from stoker.platforms.kubernetes.state import PodStatus

if TYPE_CHECKING:
    from urllib3 import BaseHTTPResponse

# Host name of lines that no host wrote.
SERVICE = "kubernetes"
# Between two attempts to read a log.
DELAY_SECONDS = 1.0
# How long to retry the log of a pod that has ended.
LAST_WORDS_SECONDS = 60.0
# How much further back than its last line a log is asked for: the cluster's clock is another one.
OVERLAP_SECONDS = 60
# RFC 3339 with nanoseconds, and the text. A kubelet's error in place of the rest has no time.
_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+\S+) ?(.*)")
# Encoded characters per line; container runtimes cut lines at 16 KiB.
PART_CHARACTERS = 6000
# Of files that are logged, and of one that is compressed.
SUFFIXES = (".csv", ".jsonl", ".json")
MAX_BYTES = 1_500_000
# Limit of a decompressed file: a line of a log must not fill the memory.
MAX_READ_BYTES = 64 << 20
# Untrusted, as a script may print such lines: names become paths.
_NAME = re.compile(r"^\w[\w.-]*(/\w[\w.-]*){0,3}$", re.ASCII)


class PodLog(threading.Thread):
    """A thread that puts the lines of a started pod's container into a queue, each once.

    A log is complete when it was read after the pod's end. Lines that are not newer than the last
    one are skipped where it is read again.
    """

    def __init__(self, cluster: ClusterApi, pod: PodStatus, *, lines: queue.Queue[LogLine]) -> None:
        super().__init__(name=f"log {pod.name}", daemon=True)
        # Whether it was read after the pod's end, to its last line.
        self.is_whole = False
        self._cluster = cluster
        self._pod = pod
        self._lines = lines
        self._response: BaseHTTPResponse | None = None
        self._last = ""
        self._has_ended = False
        self._is_closed = False
        # Wakes up the thread between two attempts.
        self._changed = threading.Event()

    def end(self) -> None:
        """Tells the thread that the pod has ended, or is gone."""
        self._has_ended = True
        self._changed.set()

    def close(self) -> None:
        """Ends the reading; may be called twice, by any thread."""
        self._is_closed = True
        self._changed.set()
        # Wakes up a reader that waits for a line (urllib3 2.3 and newer).
        with suppress(Exception):
            assert self._response
            self._response.shutdown()

    def run(self) -> None:
        """Reads until the pod's end."""
        read_at = self._cluster.clock()
        while not self._is_closed:
            is_last = self._has_ended
            self._changed.clear()
            try:
                with self._cluster.explained("get pods/log"):
                    self._read()
                read_at = self._cluster.clock()
                if is_last:
                    self.is_whole = True
                    return
            except ServiceError as err:
                # A log is deleted with its pod.
                if is_last and err.kind == "missing":
                    return
                if is_last and self._cluster.clock() >= read_at + LAST_WORDS_SECONDS:
                    words = f"the log of {self._pod.host} cannot be read: {err.what}"
                    self._put(LogLine(group=SERVICE, host="status", text=words))
                    return
            if self._has_ended == is_last:
                self._changed.wait(DELAY_SECONDS)

    def _read(self) -> None:
        job = self._pod.group.job
        since = None
        if self._last:
            last = datetime.fromisoformat(self._last).astimezone(UTC)
            since = max(0, int(time.time() - last.timestamp())) + OVERLAP_SECONDS
        opened = self._cluster.open_log(self._pod.name, container=job, since_seconds=since)
        with closing(opened) as self._response:
            for line in self._response:
                found = _LINE.match(line.decode(errors="replace"))
                if self._is_closed:
                    return
                if not found:
                    raise ServiceError(line.decode(errors="replace").rstrip(), kind="away")
                if found[1] > self._last:
                    self._last = found[1]
                    group = self._pod.group.group.name
                    self._put(LogLine(group=group, host=self._pod.host, text=found[2].rstrip("\r")))

    def _put(self, line: LogLine) -> None:
        while not self._is_closed:
            with suppress(queue.Full):
                self._lines.put(line, timeout=0.5)
                return


def log_files(folder: Path, *, under: str, log: Log) -> None:
    """Logs records and tables of `folder`, named `under`/FILE."""
    for path in sorted(folder.glob("*")):
        if path.suffix in SUFFIXES and path.is_file():
            log_file(path, under=under, log=log)


def log_file(path: Path, *, under: str, log: Log) -> None:
    """Logs one of these files, named `under`/FILE, unless it is too large."""
    name = f"{under}/{path.name}"
    packed = zlib.compress(path.read_bytes(), 9)
    if len(packed) > MAX_BYTES:
        log.event(EventName.OUTPUT_FAILED, file=name, bytes=len(packed), most=MAX_BYTES)
        return
    text = base64.b64encode(packed).decode()
    starts = range(0, len(text), PART_CHARACTERS)
    for number, start in enumerate(starts, 1):
        part = text[start : start + PART_CHARACTERS]
        log.event(EventName.OUTPUT_PART, file=name, part=number, parts=len(starts), data=part)


@dataclass(slots=True)
class OutputParts:
    """Files from logs, by name; a later one replaces one of its name."""

    files: dict[str, bytes] = field(default_factory=dict)
    # Parts so far by the file's name; they come in order.
    _parts: dict[str, list[str]] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Takes a line of a log; returns whether it was part of a file."""
        event = parse_line(line) if f" {EventName.OUTPUT_PART} " in line else None
        if event is None or event.event != EventName.OUTPUT_PART:
            return False
        name, number, of, data = map(event.values.get, ("file", "part", "parts", "data"))
        if name and data and _NAME.match(name):
            if number == "1":
                self._parts[name] = []
            parts = self._parts.setdefault(name, [])
            parts.append(data)
            if number == of:
                self._unpack(name, "".join(parts))
        return True

    def write(self, folder: Path) -> None:
        """Writes the complete files to `folder`; may raise OSError."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _unpack(self, name: str, text: str) -> None:
        # What lacks a part does not have zlib's checksum.
        with suppress(binascii.Error, zlib.error):
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(base64.b64decode(text), MAX_READ_BYTES)
            # Not one that exceeds MAX_READ_BYTES.
            if unpacking.eof:
                self.files[name] = content
