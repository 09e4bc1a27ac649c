"""Encryption of a worker's connection with AES-256-GCM, record by record.

A message is a *head* and its payload, both in records with at most 4 MiB of plain text:

    prefix        key generation (u32), size of the packed message (u32), of the payload (u64)
    first record  the packed message, as much as fits; its additional data is the prefix
    padding       zeros, up to 1024 bytes, so that one call receives a head
    records       the rest of the packed message, if any; then the payload

The prefix determines the sizes of all records, and the first record authenticates it before memory
is allocated. The nonce of a record is the key generation and the record's number on its connection,
which both ends count and never send: a record that is changed, truncated, inserted, omitted,
repeated or reordered fails to decrypt. The number is never reset on a connection, so no nonce is
used twice.

A key is for one connection and one direction. Both are derived from the key that the trainer got
over the control connection. After 64 GB the sender changes to the next generation, HKDF of the
previous one (as in TLS 1.3). Neither keys nor plain bytes ever occur in an error.
"""

import secrets
import struct
from collections.abc import Iterator

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stoker.errors import ProtocolError
from stoker.feed.engine.crypto import derive

KEY_BYTES = 32
TAG_BYTES = 16
# Plain text in a record. Each record is a call, after which the thread has to get the GIL again;
# beyond 1 MiB nothing else is gained, see benchmarks/README.md.
RECORD_BYTES = 4 << 20
# Nearly all packed messages fit.
HEAD_BYTES = 1024
# RFC 8446, 5.5: AES-GCM keys are good for 24 million full-size TLS records, 388 GB.
REKEY_BYTES = 64 * 10**9

_PREFIX = struct.Struct(">IIQ")
_NONCE = struct.Struct(">IQ")
# Bytes of the packed message that the head has room for.
FIRST_BYTES = HEAD_BYTES - _PREFIX.size - TAG_BYTES
_NEXT_KEY = b"stoker feed v2 next key"


def new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


def keys_of(key: bytes) -> tuple[bytes, bytes]:
    """Returns the keys of a connection's two directions: of orders, and of batches."""
    return derive(key, info=b"stoker feed v2 orders"), derive(key, info=b"stoker feed v2 batches")


def records(nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields start and end of each record."""
    return ((at, min(at + RECORD_BYTES, nbytes)) for at in range(0, nbytes, RECORD_BYTES))


class _Key:
    """Current key of one direction, and the number of the next record."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.generation = 0
        self.number = 0
        self.cipher = AESGCM(key)

    def next(self) -> "_Key":
        key = _Key(derive(self._key, info=_NEXT_KEY))
        # Not reset: no pair of key and nonce recurs, even if a generation were wrong.
        key.generation = self.generation + 1
        key.number = self.number
        return key

    def nonce(self) -> bytes:
        return _NONCE.pack(self.generation, self.number)


class Sealer:
    """Encryption of what is sent in one direction; used by one thread."""

    def __init__(self, key: bytes, *, rekey_bytes: int = REKEY_BYTES) -> None:
        self._now = _Key(key)
        self._rekey_bytes = rekey_bytes
        self._sealed_bytes = 0

    def head(self, packed: bytes, *, payload_bytes: int) -> bytes:
        """Returns the head of a message; `record` seals the rest."""
        if self._sealed_bytes >= self._rekey_bytes:
            self._now = self._now.next()
            self._sealed_bytes = 0
        now = self._now
        prefix = _PREFIX.pack(now.generation, len(packed), payload_bytes)
        sealed = now.cipher.encrypt(now.nonce(), packed[:FIRST_BYTES], prefix)
        now.number += 1
        self._sealed_bytes += len(packed) + payload_bytes
        # Padding is not authenticated, and never read: the prefix has the record's size.
        return (prefix + sealed).ljust(HEAD_BYTES, b"\0")

    def record(self, plain: memoryview, into: memoryview) -> None:
        """Seals the next record into `into`, which has TAG_BYTES more than `plain`."""
        now = self._now
        now.cipher.encrypt_into(now.nonce(), plain, None, into)
        now.number += 1


class Unsealer:
    """Decryption of one direction; raises ProtocolError if authentication fails."""

    def __init__(self, key: bytes) -> None:
        self._now = _Key(key)

    def head(self, head: memoryview) -> tuple[bytes, int, int]:
        """Returns the packed message, how many bytes its end lacks, and the payload's size."""
        generation, packed_bytes, payload_bytes = _PREFIX.unpack_from(head)
        # One step at most: a forged generation costs one derivation, then decryption fails.
        now = self._now.next() if generation == self._now.generation + 1 else self._now
        first_bytes = min(packed_bytes, FIRST_BYTES)
        sealed = head[_PREFIX.size : _PREFIX.size + first_bytes + TAG_BYTES]
        try:
            packed = now.cipher.decrypt(now.nonce(), sealed, head[: _PREFIX.size])
        except InvalidTag:
            raise ProtocolError("a message's head failed authentication") from None
        # Nothing of the head is used before this point.
        now.number += 1
        self._now = now
        return packed, packed_bytes - first_bytes, payload_bytes

    def record(self, sealed: memoryview, into: memoryview) -> None:
        """Decrypts the next record into `into`, which is invalid if authentication fails."""
        now = self._now
        try:
            now.cipher.decrypt_into(now.nonce(), sealed, None, into)
        except InvalidTag:
            raise ProtocolError("a message's payload failed authentication") from None
        now.number += 1
