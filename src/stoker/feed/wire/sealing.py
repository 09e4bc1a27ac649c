"""A batch is sealed with AES-256-GCM, record by record; here its keys are made, used and changed.

A batch is a *head* and its payload, both in records of AES-256-GCM with at most 4 MiB of plain text
(processors have AES in hardware: 0.1 CPU-seconds per GB on each side; CURVE's cipher takes 0.4):

    prefix        key generation (u32), bytes of the packed message (u32), of the payload (u64)
    first record  the packed message, as much of it as fits; its additional data are the prefix
    padding       zeros, so that a head has 1024 bytes and is received in one call
    records       the rest of the packed message, if there is one; then the payload

The sizes of all records follow from the prefix, which the first record authenticates before memory
is taken. The nonce of a record is the key generation and the number of the record on its
connection, which both ends count and nobody sends: what is changed, cut, put in, left out, comes
twice or in another order fails to decrypt. The number runs on over the life of a connection, so no
nonce is ever used twice.

A key is for one connection and one direction. The first key is sent over CURVE with the ticket of
the connection. The next generation's key is HKDF of the one before (as TLS 1.3 updates its keys):
whoever gets hold of a key reads nothing that was sent under an earlier one. The sender goes on to
it with each epoch of a session, and after 64 GB; the receiver follows by one generation at a time,
once a head proves it. Neither keys nor plain bytes are ever in an error.
"""

import secrets
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stoker.errors import ProtocolError
from stoker.feed.wire.crypto import derive

KEY_BYTES = 32
TAG_BYTES = 16
# Plain text in a record. Each record is a call, after which the thread has to get the interpreter's
# lock again: larger records are fewer calls; beyond 1 MiB there is no gain otherwise, see
# benchmarks/README.md.
RECORD_BYTES = 4 << 20
# What a head has at least: nearly all packed messages fit.
HEAD_BYTES = 1024
# RFC 8446, 5.5: AES-GCM keys are good for 24 million full-size TLS records, 388 GB.
REKEY_BYTES = 64 * 10**9

_PREFIX = struct.Struct(">IIQ")
_NONCE = struct.Struct(">IQ")
# Bytes of the packed message that the head has room for.
FIRST_BYTES = HEAD_BYTES - _PREFIX.size - TAG_BYTES
_NEXT_KEY = b"stoker feed v1 next batch key"

SessionEpoch = tuple[str, int]


def new_key() -> bytes:
    """Returns a random first key of a connection, which is sent with its ticket."""
    return secrets.token_bytes(KEY_BYTES)


def records(nbytes: int) -> Iterator[tuple[int, int]]:
    """Returns the plain text of `nbytes` in records: start and end of each."""
    return ((at, min(at + RECORD_BYTES, nbytes)) for at in range(0, nbytes, RECORD_BYTES))


class _Key:
    """Holds the current key of a connection, and the number of the next record."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.generation = 0
        self.number = 0
        self.cipher = AESGCM(key)

    def next(self) -> "_Key":
        """Returns the key after this one."""
        made = _Key(derive(self._key, info=_NEXT_KEY))
        # The number is not begun again: the same pair of key and nonce never comes twice, even if a
        # generation were wrong.
        made.generation, made.number = self.generation + 1, self.number
        return made

    def nonce(self) -> bytes:
        """Returns the nonce of the next record."""
        return _NONCE.pack(self.generation, self.number)


class Sealer:
    """Encrypts what the sender writes to one connection; used by one thread.

    Args:
        key: The one that the receiver got with its ticket.
        rekey_bytes: Plain text under one key, about.
    """

    def __init__(self, key: bytes, *, rekey_bytes: int = REKEY_BYTES) -> None:
        self._now = _Key(key)
        self._rekey_bytes = rekey_bytes
        self._sealed_bytes = 0
        self._epochs: dict[str, int] = {}

    def head(self, packed: bytes, *, payload_bytes: int, of: SessionEpoch) -> bytes:
        """Returns the head of a batch: prefix, first record, padding. `record` seals what is left.

        Args:
            packed: The message that describes the batch.
            of: Session and epoch of the batch; another epoch than the session's batch before has
                another key.
        """
        session, epoch = of
        # Each epoch has its own key, so that one that leaks opens no earlier epoch. The session's
        # first batch needs no change: nothing of an earlier epoch was sent for it.
        if self._epochs.setdefault(session, epoch) != epoch or (
            self._sealed_bytes >= self._rekey_bytes
        ):
            self._now, self._sealed_bytes = self._now.next(), 0
            self._epochs[session] = epoch
        now = self._now
        prefix = _PREFIX.pack(now.generation, len(packed), payload_bytes)
        sealed = now.cipher.encrypt(now.nonce(), packed[:FIRST_BYTES], prefix)
        now.number += 1
        self._sealed_bytes += len(packed) + payload_bytes
        # Padding is not authenticated, and nobody reads it: the prefix says where the record ends.
        return (prefix + sealed).ljust(HEAD_BYTES, b"\0")

    def record(self, plain: memoryview, into: memoryview) -> None:
        """Seals the next record into `into`, which has TAG_BYTES more than `plain`."""
        now = self._now
        now.cipher.encrypt_into(now.nonce(), plain, None, into)
        now.number += 1


@dataclass(frozen=True, slots=True)
class Head:
    """A batch begins with a head, which says how much follows; it has been authenticated.

    Attributes:
        packed: The message, or its first part.
        missing_bytes: Bytes of the message, in records of their own.
        payload_bytes: Bytes of the payload, in the records that follow.
    """

    packed: bytes
    missing_bytes: int
    payload_bytes: int


class Unsealer:
    """Decrypts what the receiver reads from one connection; used by one thread."""

    def __init__(self, key: bytes) -> None:
        self._now = _Key(key)

    def head(self, head: memoryview) -> Head:
        """Decrypts HEAD_BYTES.

        Raises:
            ProtocolError: If it is not what the sender sealed next.
        """
        generation, packed_bytes, payload_bytes = _PREFIX.unpack_from(head)
        # One step at most: a forged generation costs one derivation, and then fails to decrypt.
        # With any other generation than these two the current key fails as well.
        now = self._now.next() if generation == self._now.generation + 1 else self._now
        first_bytes = min(packed_bytes, FIRST_BYTES)
        sealed = head[_PREFIX.size : _PREFIX.size + first_bytes + TAG_BYTES]
        try:
            packed = now.cipher.decrypt(now.nonce(), sealed, head[: _PREFIX.size])
        except InvalidTag:
            raise ProtocolError("a batch's head is not what was sealed next") from None
        # Only after the proof: until here nothing that the head says is believed.
        now.number += 1
        self._now = now
        return Head(packed, packed_bytes - first_bytes, payload_bytes)

    def record(self, sealed: memoryview, into: memoryview) -> None:
        """Decrypts the next record into `into`.

        Raises:
            ProtocolError: If it is not what the sender sealed next; what `into` holds then is
                nothing.
        """
        now = self._now
        try:
            now.cipher.decrypt_into(now.nonce(), sealed, None, into)
        except InvalidTag:
            raise ProtocolError("a batch's payload is not what was sealed next") from None
        now.number += 1
