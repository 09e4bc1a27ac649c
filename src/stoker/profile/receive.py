"""What the feed would cost this trainer: sealed batches over a loopback connection.

Sender and receiver are threads of this process; CPU is counted by thread, so the sender's share
stays out. The receiver does what the feed's does: receives a batch into reused memory, decrypts it
there, and hands it to the trainer's thread, which decodes.
"""

import contextlib
import os
import queue
import socket
import threading
import time

from stoker.errors import StokerError
from stoker.feed.batch_stream import BatchReader, BatchWriter, tune
from stoker.feed.landing import Bytes, Landing
from stoker.feed.sealing import KEY_BYTES, Sealer, Unsealer
from stoker.feed.wire import Encoded, decode, encode
from stoker.profile.clocks import threads_cpu_seconds
from stoker.profile.raw import Receive, block_means, quartiles

_MAX_BATCHES = 200
_LEAST_BATCHES = 6
_WARM_UP = 3
# More than may lie between the threads.
_BLOCK = 8
# For one batch: of a large one on a busy machine, seconds.
_WAIT_SECONDS = 5.0


def try_receive(batch: object, *, seconds: float) -> tuple[Receive | None, list[str]]:
    """As `measure_receive`, with a note instead of an error."""
    try:
        receive = measure_receive(batch, seconds=seconds)
    except (StokerError, OSError) as err:
        return None, [f"the feed could not be tried: {' '.join(str(err).split())}"]
    return receive, [] if receive else ["the feed could not be tried: nothing came in time"]


def measure_receive(batch: object, *, seconds: float = 1.0) -> Receive | None:
    """Receives `batch` again and again for about `seconds`; None if that cannot be measured here.

    Raises:
        ShippingError: If such a batch cannot travel.
    """
    encoded = encode(batch, allow_pickle=True)
    frame = bytearray(encoded.nbytes)
    if frame:
        encoded.write_into(memoryview(frame))
    key = os.urandom(KEY_BYTES)
    landed: queue.Queue[Bytes | None] = queue.Queue(maxsize=2)
    source, sink = _connected()
    with source, sink:
        threads = [
            threading.Thread(target=_send, args=(source, key, frame), daemon=True),
            threading.Thread(target=_receive, args=(sink, key, landed), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            return _take(landed, encoded, ids={threads[1].native_id or 0}, seconds=seconds)
        finally:
            for connection in (source, sink):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            _empty(landed)
            for thread in threads:
                thread.join(2 * _WAIT_SECONDS)


def _connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sink = socket.create_connection(listener.getsockname())
        source, _ = listener.accept()
    for connection in (source, sink):
        tune(connection)
    return source, sink


def _take(
    landed: "queue.Queue[Bytes | None]", encoded: Encoded, *, ids: set[int], seconds: float
) -> Receive | None:
    until = time.monotonic() + seconds
    own: list[float] = []
    off: list[float] = []
    before = 0.0
    while len(own) < _MAX_BATCHES and (time.monotonic() < until or len(own) < _LEAST_BATCHES):
        started = time.thread_time()
        try:
            payload = landed.get(timeout=_WAIT_SECONDS)
        except queue.Empty:
            return None
        if payload is None:
            return None
        batch = decode(encoded.tree, payload, allow_pickle=True)
        taken = time.thread_time() - started
        own.append(taken + _cold_read_seconds(payload))
        del batch, payload
        now = threads_cpu_seconds(ids)
        off.append(now - before)
        before = now
    skipped = min(_WARM_UP, len(own) - 1)
    # The threads beside work ahead: of single batches most would be said to cost nothing.
    beside = block_means(off[skipped:], workers=_BLOCK)
    return Receive(
        thread_seconds=quartiles(own[skipped:]),
        cpu_seconds=quartiles(beside, samples=len(off) - skipped),
    )


def _cold_read_seconds(payload: Bytes) -> float:
    """What the first look at a batch costs more than the second: another core has written it."""
    if not payload.size:
        return 0.0
    started = time.thread_time()
    payload.max()
    first = time.thread_time()
    payload.max()
    return max(0.0, 2 * first - started - time.thread_time())


def _send(connection: socket.socket, key: bytes, frame: bytearray) -> None:
    writer = BatchWriter(connection, Sealer(key), Landing())
    payload = memoryview(frame) if frame else None
    with contextlib.suppress(OSError):
        while True:
            writer.write(b"", payload, of=("", 0))


def _receive(connection: socket.socket, key: bytes, landed: "queue.Queue[Bytes | None]") -> None:
    # Not above: the probe may be imported in the middle of the feed's own import of torch,
    # and what places batches needs all of the feed.
    from stoker.feed.placing import Placing

    landing = Landing()
    placing = Placing(landing)
    reader = BatchReader(
        connection, Unsealer(key), landing, max_head_bytes=0, silent_seconds=_WAIT_SECONDS
    )
    try:
        while True:
            _, nbytes = reader.head(is_awaited=True)
            payload = placing.room(nbytes, None)
            reader.read(payload.data)
            landed.put(payload)
    except (OSError, StokerError):
        landed.put(None)


def _empty(landed: "queue.Queue[Bytes | None]") -> None:
    """Frees a receiver that waits for room; it stands before `put` at most once more."""
    for _ in range(4):
        try:
            landed.get(timeout=0.1)
        except queue.Empty:
            return
