"""The small files behind a run's records, transported in a pod's log.

A pod's disk is gone with the pod, but its follower has read its log. So the launcher writes these
files to the log, compressed, in short lines and bounded; the follower reassembles them.
"""

import base64
import binascii
import hashlib
import re
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stoker.logs import EventName, Log, parse_line

# Encoded characters per line; container runtimes cut lines at 16 KiB.
PART_CHARACTERS = 6000
# Of files that are logged, and of one that is compressed.
SUFFIXES = (".csv", ".jsonl", ".json")
MAX_BYTES = 1_500_000
# Limit of a decompressed file: a line of a log must not fill the memory.
MAX_READ_BYTES = 64 << 20
# Untrusted, as a script may print such lines: names become paths.
_NAME = re.compile(r"^\w[\w.-]*(/\w[\w.-]*){0,3}$", re.ASCII)


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
    digest = hashlib.sha256(packed).hexdigest()[:16]
    text = base64.b64encode(packed).decode()
    parts = [text[i : i + PART_CHARACTERS] for i in range(0, len(text), PART_CHARACTERS)]
    of = len(parts)
    for number, part in enumerate(parts, 1):
        log.event(EventName.OUTPUT_PART, file=name, part=number, parts=of, digest=digest, data=part)


@dataclass
class OutputParts:
    """Files reassembled from their parts in a log; a later file replaces one of its name."""

    files: dict[str, bytes] = field(default_factory=dict)
    # Parts so far by the file's name and digest; those of one file come in order.
    _parts: dict[tuple[str, str], list[str]] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Takes a line of a log; returns whether it was part of a file."""
        event = parse_line(line) if f" {EventName.OUTPUT_PART} " in line else None
        if event is None or event.event != EventName.OUTPUT_PART:
            return False
        name, digest, number, of, data = (
            event.values.get(key, "") for key in ("file", "digest", "part", "parts", "data")
        )
        if number == "1":
            self._parts[name, digest] = []
        self._parts.setdefault((name, digest), []).append(data)
        if number == of and _NAME.match(name):
            self._unpack(name, digest)
        return True

    def write(self, folder: Path) -> None:
        """Writes the complete files to `folder`; may raise OSError."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _unpack(self, name: str, digest: str) -> None:
        with suppress(binascii.Error, zlib.error):
            packed = base64.b64decode("".join(self._parts.pop((name, digest))), validate=True)
            unpacking = zlib.decompressobj()
            content = unpacking.decompress(packed, MAX_READ_BYTES)
            is_whole = hashlib.sha256(packed).hexdigest()[:16] == digest
            # Not one that exceeds MAX_READ_BYTES.
            if is_whole and unpacking.eof:
                self.files[name] = content
