"""AES-256-GCM alone costs who receives this much: a feed that encrypts cannot leave it out."""

import multiprocessing
import os
import time

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from stoker.feed.wire.sealing import KEY_BYTES, TAG_BYTES, records

_NONCE = bytes(12)
_BATCHES_BYTES = 100_000_000


def decryption_cpu_seconds(nbytes: int) -> float:
    """Returns CPU-seconds per GB of batches of `nbytes`, decrypted in records of the feed's size.

    Another process encrypts meanwhile, as a data host on this machine does: two cores that are
    threads of one are slower when both are busy.
    """
    cipher = AESGCM(bytes(KEY_BYTES))
    sizes = [end - start for start, end in records(nbytes)]
    sealed = {size: cipher.encrypt(_NONCE, bytes(size), None) for size in sizes}
    plain = memoryview(bytearray(sizes[0]))
    beside = multiprocessing.get_context("fork").Process(target=_encrypt, args=(sizes[0],))
    beside.start()
    try:
        count = max(1, _BATCHES_BYTES // nbytes)
        begun = time.thread_time()
        for _ in range(count):
            for size in sizes:
                cipher.decrypt_into(_NONCE, sealed[size], None, plain[:size])
        return (time.thread_time() - begun) / (count * nbytes / 1e9)
    finally:
        beside.kill()
        beside.join()


def _encrypt(nbytes: int) -> None:
    cipher, parent = AESGCM(bytes(KEY_BYTES)), os.getppid()
    plain, sealed = bytes(nbytes), bytearray(nbytes + TAG_BYTES)
    while os.getppid() == parent:
        cipher.encrypt_into(_NONCE, plain, None, sealed)
