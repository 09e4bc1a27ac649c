"""Batches sealed: AES-256-GCM on their way from a data host to a trainer, without CURVE's price.

Of an encrypted connection of libzmq, decrypting is three quarters of the receiver's work, as the
sender's: 0.35 to 0.5 CPU-seconds a GB for XSalsa20 and Poly1305, and three copies. Processors have
AES in hardware: 0.1 with the same strength, into the memory where the batch will live.

The data host draws a key for each session and each connection of it, and tells it over CURVE. No
nonce comes twice under a key. Sender and receiver count what they sealed and unsealed: what is cut,
changed, put in, left out, comes twice or out of order is refused, before memory is taken for it.
Neither keys nor plain bytes are ever in an error.
"""

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stoker.errors import ProtocolError
from stoker.feed.landing import Bytes, Landing
from stoker.feed.messages import BatchKey

KEY_BITS = 256
TAG_BYTES = 16
# A longer batch goes by CURVE: OpenSSL takes no 2 GiB.
MAX_BYTES = 1 << 30
# Number of the key, and of what it seals: the header, then, one higher, the payload.
_NONCE = struct.Struct(">IQ")
MAX_FRAME_BYTES = _NONCE.size + MAX_BYTES + TAG_BYTES
# Not sent, both know it: batches sent before under this key; bytes of the payload, or that there
# is none.
_KNOWN = struct.Struct(">QQ?")


class Sealer:
    """The sender's end, for one key; used by one thread.

    Args:
        number: Of the key, among those of this sender.

    Attributes:
        key: For the receiver, over CURVE.
    """

    def __init__(self, number: int) -> None:
        self.key = BatchKey(number=number, key=AESGCM.generate_key(KEY_BITS))
        self._cipher = AESGCM(self.key.key)
        self._sealed = self._sent = 0

    def header(self, packed: bytes, *, nbytes: int | None) -> bytes:
        """The first frame: nonce and sealed message.

        Args:
            nbytes: Of the payload, which is to follow; None: there is none.
        """
        nonce = _NONCE.pack(self.key.number, self._sealed)
        # Also of what is not sent in the end: no nonce is used again.
        self._sealed += 2
        return nonce + self._cipher.encrypt(nonce, packed, _known(self._sent, nbytes))

    def payload(self, payload: memoryview, landing: Landing) -> Bytes:
        """The second frame: the sealed payload of the last header, in memory of `landing`."""
        sealed = landing.take(payload.nbytes + TAG_BYTES)
        nonce = _NONCE.pack(self.key.number, self._sealed - 1)
        self._cipher.encrypt_into(nonce, payload, None, sealed.data)
        return sealed

    def sent(self) -> None:
        """The last header and its payload are on their way; the receiver will count them."""
        self._sent += 1


class Unsealer:
    """The receiver's end, for one key; used by one thread."""

    def __init__(self, key: BatchKey) -> None:
        self._number = key.number
        self._cipher = AESGCM(key.key)
        self._taken = 0
        self._nonce = b""

    def header(self, frame: memoryview, *, nbytes: int | None) -> bytes:
        """The packed message in the first frame.

        Args:
            nbytes: Of the payload that came with it, by `payload_bytes`; None: there was none.

        Raises:
            ProtocolError: If it is not what the sender sealed next.
        """
        nonce = bytes(frame[: _NONCE.size])
        try:
            packed = self._cipher.decrypt(nonce, frame[_NONCE.size :], _known(self._taken, nbytes))
        except InvalidTag:
            raise ProtocolError("a batch's header is not what was sealed next") from None
        self._taken += 1
        self._nonce = _NONCE.pack(self._number, _NONCE.unpack(nonce)[1] + 1)
        return packed

    def payload(self, frame: memoryview, into: Bytes) -> None:
        """Writes the payload of the last header into `into`, of `payload_bytes`.

        Raises:
            ProtocolError: If it is not what the sender sealed; what `into` holds then is nothing.
        """
        try:
            self._cipher.decrypt_into(self._nonce, frame, None, into.data)
        except InvalidTag:
            raise ProtocolError("a batch's payload is not what was sealed") from None


def key_number(frame: memoryview) -> int:
    """Which key a first frame says it is sealed with; not yet to be trusted.

    Raises:
        ProtocolError: If it is too short to say, or too long to be one.
    """
    if not _NONCE.size + TAG_BYTES <= len(frame) <= _NONCE.size + TAG_BYTES + MAX_BYTES:
        raise ProtocolError(f"a sealed batch has a header of {len(frame)} bytes")
    number: int
    number, _ = _NONCE.unpack_from(frame)
    return number


def payload_bytes(frame: memoryview) -> int:
    """Bytes of the payload in a second frame.

    Raises:
        ProtocolError: If it is shorter than its tag, or longer than any.
    """
    if not TAG_BYTES <= frame.nbytes <= TAG_BYTES + MAX_BYTES:
        raise ProtocolError(f"a sealed payload of {frame.nbytes} bytes")
    return frame.nbytes - TAG_BYTES


def _known(count: int, nbytes: int | None) -> bytes:
    return _KNOWN.pack(count, nbytes or 0, nbytes is not None)
