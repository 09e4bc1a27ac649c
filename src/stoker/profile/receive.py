"""What the feed would cost this trainer: sealed batches over a loopback connection.

Sender and receiver are threads of this process with contexts of their own; CPU is counted by
thread, so the sender's share stays out. The receiver does what the feed's does: takes the frames
off the connection, unseals them into reused memory, and hands it to the trainer's thread, which
decodes.
"""

import queue
import threading
import time

import zmq

from stoker.errors import StokerError
from stoker.feed.landing import Bytes, Landing
from stoker.feed.sealing import Sealer, Unsealer, payload_bytes
from stoker.feed.wire import Encoded, decode, encode
from stoker.profile.clocks import thread_ids, threads_cpu_seconds
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
    sealer = Sealer(0)
    stop = threading.Event()
    with zmq.Context() as sending, zmq.Context() as receiving:
        source = sending.socket(zmq.PUSH)
        source.setsockopt(zmq.SNDTIMEO, 200)
        source.setsockopt(zmq.SNDHWM, 2)
        source.setsockopt(zmq.LINGER, 0)
        port = source.bind_to_random_port("tcp://127.0.0.1")
        others = thread_ids()
        sink = receiving.socket(zmq.PULL)
        sink.setsockopt(zmq.RCVTIMEO, int(_WAIT_SECONDS * 1000))
        sink.setsockopt(zmq.RCVHWM, 2)
        sink.setsockopt(zmq.LINGER, 0)
        sink.connect(f"tcp://127.0.0.1:{port}")
        io_threads = thread_ids() - others
        landed: queue.Queue[Bytes | None] = queue.Queue(maxsize=2)
        threads = [
            threading.Thread(target=_send, args=(source, sealer, frame, stop), daemon=True),
            threading.Thread(
                target=_receive, args=(sink, Unsealer(sealer.key), landed, stop), daemon=True
            ),
        ]
        for thread in threads:
            thread.start()
        try:
            ids = io_threads | {threads[1].native_id or 0}
            return _take(landed, encoded, ids=ids, seconds=seconds) if io_threads else None
        finally:
            stop.set()
            _empty(landed)
            for thread in threads:
                thread.join(2 * _WAIT_SECONDS)


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


def _send(
    socket: "zmq.Socket[bytes]", sealer: Sealer, frame: bytearray, stop: threading.Event
) -> None:
    landing = Landing()
    while not stop.is_set():
        header = sealer.header(b"", nbytes=len(frame))
        sealed = sealer.payload(memoryview(frame), landing)
        while not stop.is_set():
            try:
                socket.send_multipart([header, sealed.data], copy=False)
                sealer.sent()
                break
            except zmq.Again:
                continue
        del sealed
    socket.close()


def _receive(
    socket: "zmq.Socket[bytes]",
    unsealer: Unsealer,
    landed: "queue.Queue[Bytes | None]",
    stop: threading.Event,
) -> None:
    landing = Landing()
    while not stop.is_set():
        try:
            header, frame = socket.recv_multipart(copy=False)
        except zmq.Again:
            landed.put(None)
            break
        nbytes = payload_bytes(frame.buffer)
        unsealer.header(header.buffer, nbytes=nbytes)
        array = landing.take(nbytes)
        unsealer.payload(frame.buffer, array)
        landed.put(array)
    socket.close()


def _empty(landed: "queue.Queue[Bytes | None]") -> None:
    """Frees a receiver that waits for room; it stands before `put` at most once more."""
    for _ in range(4):
        try:
            landed.get(timeout=0.1)
        except queue.Empty:
            return
