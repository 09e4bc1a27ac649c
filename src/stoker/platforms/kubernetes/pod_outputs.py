"""The small files behind a run's records, transported in a pod's log.

A pod's disk is gone with the pod, but its follower has read its log. So the launcher writes these
files to the log, compressed, in short lines and bounded; the follower reassembles them.
"""

import base64
import binascii
import hashlib
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.logs import EventName, Log, parse_line

# Encoded characters per line; container runtimes cut lines at 16 KiB.
PART_CHARACTERS = 6000
# Limit of a compressed file by suffix; timelines may be truncated, records may not.
MAX_BYTES = {".csv": 180_000, ".json": 1_500_000}
# Limit of a decompressed file: a line of a log must not fill the memory.
MAX_READ_BYTES = 64 << 20

# Incomplete files; a launcher writes fewer at once.
_MAX_OPEN = 64
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*){0,3}$")
# Parts of one file; base64 adds a third.
_MAX_PARTS = max(MAX_BYTES.values()) * 3 // 2 // PART_CHARACTERS


def log_files(folder: Path, *, under: str, log: Log) -> None:
    """Logs JSON and CSV files of `folder`, named `under`/FILE; truncates long CSV files."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix in MAX_BYTES)
    except OSError as err:
        log.event(EventName.OUTPUT_LOG_FAILED, folder=str(folder), reason=err.strerror)
        return
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as err:
            log.event(EventName.OUTPUT_LOG_FAILED, file=path.name, reason=err.strerror)
            continue
        _log_file(f"{under}/{path.name}", content, log)


def _log_file(name: str, content: bytes, log: Log) -> None:
    packed = zlib.compress(content, 9)
    most = MAX_BYTES[Path(name).suffix]
    if len(packed) > most and name.endswith(".csv"):
        lines = content.splitlines(keepends=True)
        packed, kept = _packed_head(lines, packed, most=most)
        log.event(EventName.OUTPUT_TRUNCATED, file=name, rows=kept - 1, left_out=len(lines) - kept)
    if len(packed) > most:
        log.event(EventName.OUTPUT_SKIPPED, file=name, bytes=len(content), most=most)
        return
    digest = hashlib.sha256(packed).hexdigest()[:16]
    text = base64.b64encode(packed).decode()
    parts = [text[i : i + PART_CHARACTERS] for i in range(0, len(text), PART_CHARACTERS)]
    of = len(parts)
    for number, part in enumerate(parts, 1):
        log.event(EventName.OUTPUT_PART, file=name, part=number, parts=of, digest=digest, data=part)


def _packed_head(lines: Sequence[bytes], packed: bytes, *, most: int) -> tuple[bytes, int]:
    """Returns the packed first lines that fit into `most` bytes, and their number, at least one.

    Args:
        packed: All of them.
    """
    kept = len(lines)
    while len(packed) > most and kept > 1:
        # A guess by the mean size of a line, a little lower: the first rows may pack worse.
        guess = int(kept * 0.95 * most / len(packed))
        kept = max(1, min(kept - 1, guess))
        packed = zlib.compress(b"".join(lines[:kept]), 9)
    return packed, kept


@dataclass
class OutputParts:
    """Files reassembled from their parts in a log; a later file replaces one of its name."""

    files: dict[str, bytes] = field(default_factory=dict)
    _parts: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)

    def take(self, line: str) -> bool:
        """Takes a line of a log; returns whether it was part of a file."""
        event = parse_line(line) if f" {EventName.OUTPUT_PART} " in line else None
        if event is None or event.event != EventName.OUTPUT_PART:
            return False
        self._add(event.values)
        return True

    def write(self, folder: Path) -> None:
        """Writes the complete files to `folder`; may raise OSError."""
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _add(self, values: Mapping[str, str]) -> None:
        name, digest, data = (values.get(key, "") for key in ("file", "digest", "data"))
        try:
            number = int(values.get("part", ""))
            count = int(values.get("parts", ""))
        except ValueError:
            return
        # Untrusted, as a script may print such lines: names become paths, and counts take memory.
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
    # Not one that exceeds MAX_READ_BYTES or is incomplete.
    return content if unpacking.eof else None
