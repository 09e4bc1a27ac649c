"""Logs of a run are files: they are read while they are written, and merged.

A pod's disk is gone with the pod; its log is what whoever follows the run has read by then. So the
launcher puts the few small files that the run's records are made of into it: compressed, in lines
short enough for every log in between, bounded, and named where something was left out.
"""

import base64
import binascii
import contextlib
import hashlib
import re
import threading
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from stoker.logs import Log, parse_line
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


PART_EVENT = "output_part"
# Of the coded text in one line; container runtimes cut lines at 16 KiB.
PART_CHARACTERS = 6000
# Of a compressed file, by its suffix: some 40 lines of a timeline; records are needed whole.
MAX_BYTES = {".csv": 180_000, ".json": 1_500_000}
# Of a file as it is read back: what a line says must not fill a memory.
MAX_READ_BYTES = 64 << 20

# Files that are not whole yet: more are no launcher's.
_MAX_OPEN = 64
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}$")
# Parts of one file, base64 being a third longer.
_MAX_PARTS = max(MAX_BYTES.values()) * 3 // 2 // PART_CHARACTERS


def log_files(folder: Path, *, under: str, log: Log) -> None:
    """Logs the JSON and CSV files of `folder`; of a long CSV file the first lines.

    Args:
        folder: Not those within it.
        under: What their names begin with where they are read back.
        log: Of the host.
    """
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in MAX_BYTES)
    except OSError as err:
        log.event("output_not_logged", folder=str(folder), reason=err.strerror)
        return
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as err:
            log.event("output_not_logged", file=path.name, reason=err.strerror)
            continue
        _log_file(f"{under}/{path.name}", content, log)


def _log_file(name: str, content: bytes, log: Log) -> None:
    packed, most = zlib.compress(content, 9), MAX_BYTES[Path(name).suffix]
    if len(packed) > most and name.endswith(".csv"):
        lines = content.splitlines(keepends=True)
        kept = len(lines)
        while len(packed) > most and kept > 1:
            kept = max(1, min(kept - 1, int(kept * 0.95 * most / len(packed))))
            packed = zlib.compress(b"".join(lines[:kept]), 9)
        log.event("output_cut", file=name, rows=kept - 1, left_out=len(lines) - kept)
    if len(packed) > most:
        log.event("output_left_out", file=name, bytes=len(content), most=most)
        return
    digest = hashlib.sha256(packed).hexdigest()[:16]
    text = base64.b64encode(packed).decode()
    parts = [text[i : i + PART_CHARACTERS] for i in range(0, len(text), PART_CHARACTERS)]
    for number, part in enumerate(parts, 1):
        log.event(PART_EVENT, file=name, part=number, parts=len(parts), digest=digest, data=part)


@dataclass
class OutputParts:
    """Puts files together again.

    Attributes:
        files: Whole ones, by name; of several with one name the last.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    _parts: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Takes a line of a log; returns whether it was part of a file, no use to a reader."""
        event = parse_line(line) if f" {PART_EVENT} " in line else None
        if event is None or event.event != PART_EVENT:
            return False
        self._add(event.values)
        return True

    def write(self, folder: Path) -> None:
        """Writes the whole files to `folder`.

        Raises:
            OSError: If that is not possible.
        """
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _add(self, values: Mapping[str, str]) -> None:
        name, digest, data = (values.get(key, "") for key in ("file", "digest", "data"))
        try:
            number, count = int(values.get("part", "")), int(values.get("parts", ""))
        except ValueError:
            return
        if not _NAME.match(name) or not 1 <= number <= count <= _MAX_PARTS:
            return
        if len(self._parts) > _MAX_OPEN:
            self._parts.clear()
        parts = self._parts.setdefault((name, digest), {})
        parts[number] = data[: PART_CHARACTERS + 1]
        if len(parts) < count:
            return
        del self._parts[name, digest]
        content = _unpacked("".join(parts[i] for i in sorted(parts)), digest)
        if content is not None:
            self.files[name] = content


def _unpacked(text: str, digest: str) -> bytes | None:
    try:
        packed = base64.b64decode(text, validate=True)
        if hashlib.sha256(packed).hexdigest()[:16] != digest:
            return None
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, MAX_READ_BYTES)
    except (binascii.Error, zlib.error):
        return None
    return content if unpacking.eof else None


_CHUNK_BYTES = 1 << 16


class FileTail:
    """Gives the whole lines that were added to a file after the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self, *, is_last: bool = False) -> Iterator[str]:
        """Returns the new lines, without their ends; with `is_last` also one that has no end."""
        if self._file is None:
            try:
                self._file = self._path.open("rb")
            except FileNotFoundError:
                return
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode(errors="replace").rstrip("\r")
        if is_last and self._rest:
            yield self._rest.decode(errors="replace")
            self._rest = b""

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None
