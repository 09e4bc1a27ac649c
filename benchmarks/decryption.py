"""What CURVE's decryption alone costs: what a loader on libzmq's encrypted connections cannot leave
out, and stoker, whose batches are sealed, can."""

import ctypes
import ctypes.util
import threading
import time
from pathlib import Path

import zmq

_KEY_BYTES = 32
_NONCE_BYTES = 24
# As NaCl has it, in front of what is encrypted, and of what comes out.
_ZERO_BYTES = 32
_MESSAGES_BYTES = 100_000_000


def decryption_cpu_seconds(nbytes: int) -> float:
    """CPU-seconds for each GB of messages of `nbytes`: CURVE's XSalsa20-Poly1305, by the libsodium
    that libzmq brings, in one thread, the same message again and again.

    Another thread encrypts meanwhile, as a data host on this machine does: two cores that are
    threads of one are slower when both are busy.

    Raises:
        OSError: If there is no libsodium.
    """
    sodium = _libsodium()
    # Until then it is as slow as on any CPU.
    sodium.sodium_init()
    public, secret, shared = (ctypes.create_string_buffer(_KEY_BYTES) for _ in range(3))
    sodium.crypto_box_keypair(public, secret)
    sodium.crypto_box_beforenm(shared, public, secret)
    nonce = ctypes.create_string_buffer(_NONCE_BYTES)
    size = ctypes.c_ulonglong(_ZERO_BYTES + nbytes)
    plain, boxed, opened, beside = (ctypes.create_string_buffer(size.value) for _ in range(4))
    sodium.crypto_box_afternm(boxed, plain, size, nonce, shared)
    is_done = threading.Event()

    def encrypt() -> None:
        while not is_done.is_set():
            sodium.crypto_box_afternm(beside, plain, size, nonce, shared)

    other = threading.Thread(target=encrypt)
    other.start()
    try:
        count = max(1, _MESSAGES_BYTES // nbytes)
        begun = time.thread_time()
        for _ in range(count):
            if sodium.crypto_box_open_afternm(opened, boxed, size, nonce, shared) != 0:
                raise RuntimeError("libsodium refused its own message")
        return (time.thread_time() - begun) / (count * nbytes / 1e9)
    finally:
        is_done.set()
        other.join()


def _libsodium() -> ctypes.CDLL:
    bundled = Path(zmq.__file__).parent.parent / "pyzmq.libs"
    for path in bundled.glob("libsodium*.so*"):
        return ctypes.CDLL(str(path))
    found = ctypes.util.find_library("sodium")
    if found is None:
        raise OSError("no libsodium beside pyzmq, nor in the system")
    return ctypes.CDLL(found)
