"""The thread that receives the batches of a host's workers, and orders the next ones.

It blocks in the kernel until a batch begins, decrypts it record by record to where it will live,
decodes it as views, hands it to its session, and sends that session's next orders.

Pinned memory, from which an accelerator copies without the host's help, is torch's: its allocator
knows which copies are under way, and keeps what is free.
"""

import contextlib
import os
import selectors
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from stoker.errors import ProtocolError
from stoker.feed.engine.batch_socket import BufferPool, Bytes, Connection, layout
from stoker.feed.engine.codec import TensorMemory, decode, parts_of
from stoker.feed.engine.messages import Exhausted, Made, Raised, Ready, unpack_answer
from stoker.feed.engine.raised import unpack_error
from stoker.feed.engine.session import BatchOutcome, SharedState, Worker
from stoker.pending_error import PendingError

_NOTHING: Bytes = np.empty(0, dtype=np.uint8)
# Such a batch takes milliseconds to arrive, in which its worker may run out of orders.
_LONG_BYTES = 1 << 20


@dataclass(eq=False)
class Receiver:
    """Receives from the workers of one host, in a thread of its own.

    Attributes:
        pool: Memory where batches live.
        max_bytes: Of a batch: a larger one costs the connection.
        on_lost: Called in the thread with a worker whose connection has ended, and why.
    """

    shared: SharedState
    pool: BufferPool
    max_bytes: int
    accept_pickles: bool
    on_lost: Callable[[Worker, str], None]

    def __post_init__(self) -> None:
        self._is_closed = False
        self._device = -1
        self._selector = selectors.EpollSelector()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        _receivers.add(self)
        self._thread = threading.Thread(target=self._run, name="stoker-batches", daemon=True)
        self._thread.start()

    def add(self, worker: Worker, connection: Connection) -> None:
        """Has the thread receive from a worker; any thread may call it."""
        worker.connection = connection
        if worker.is_lost:
            worker.close()
        data = (worker, connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, data)

    def close(self, *, wait_seconds: float) -> None:
        """Ends the thread soon, and all connections with it."""
        self._is_closed = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join(wait_seconds)

    def close_descriptors(self) -> None:
        """Closes the connections in a forked child, so that they end with the parent."""
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        self._selector.close()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                for key, _ in self._selector.select():
                    # Else it is closed.
                    if key.data is not None:
                        self._serve(*key.data)
        except BaseException as err:
            self.shared.mark_crashed(err)
        finally:
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    worker, connection = key.data
                    self._end(worker, connection, "closed")

    def _serve(self, worker: Worker, connection: Connection) -> None:
        try:
            self._receive(worker, connection)
        except OSError as err:
            self._end(worker, connection, str(err.strerror or err))
        except ProtocolError as err:
            self._end(worker, connection, err.what)

    def _end(self, worker: Worker, connection: Connection, why: str) -> None:
        self._selector.unregister(connection.socket)
        connection.close()
        self.on_lost(worker, why)

    def _receive(self, worker: Worker, connection: Connection) -> None:
        packed, nbytes = connection.head()
        session = worker.session
        match unpack_answer(packed):
            case Ready():
                session.joined(worker)
            case Made() as made:
                self._take_made(worker, connection, made, nbytes)
            case Raised(number, epoch_id, error):
                raised = unpack_error(error, accept_pickles=self.accept_pickles)
                outcome = BatchOutcome(worker, error=PendingError(raised))
                session.arrived(worker, epoch_id, number, outcome, nbytes=0)
            case Exhausted(number, epoch_id):
                session.exhausted(worker, epoch_id, number)

    def _take_made(self, worker: Worker, connection: Connection, made: Made, nbytes: int) -> None:
        offsets, needed = layout(made.sizes)
        if needed != nbytes or nbytes > self.max_bytes:
            raise ProtocolError(
                f"a batch of {nbytes} bytes, of which {needed} are described, and this host takes "
                f"{self.max_bytes}"
            )
        session = worker.session
        request = session.request
        outcome = BatchOutcome(worker, bad=made.bad)
        block: Bytes = _NOTHING
        if nbytes >= _LONG_BYTES:
            session.comes(worker, made.epoch_id, made.number)
        if nbytes:
            block = self._memory(nbytes, None if request is None else request.pins_on)
            outcome.is_pinned = isinstance(block, TensorMemory)
            connection.read(block.data)
        try:
            leaves = parts_of(block, offsets, made.sizes)
            outcome.value = decode(made.pickled, leaves, accept_pickles=self.accept_pickles)
        # The script's classes may raise as they are rebuilt.
        except Exception as err:
            outcome.error = PendingError(err)
        worker.num_made += 1
        is_wanted = session.arrived(
            worker, made.epoch_id, made.number, outcome, nbytes=nbytes, own=made.own
        )
        if is_wanted is not None:
            with self.shared.lock:
                work = worker.work
                work.batches += is_wanted
                work.frame_bytes += nbytes
                work.cpu_seconds += made.cpu_seconds
                work.busy_seconds += made.wall_seconds

    def _memory(self, nbytes: int, device: int | None) -> Bytes:
        """Returns memory for a batch: pinned for a device, where it is for one."""
        if device is not None:
            # Torch pins this batch then, or raises in the script.
            with contextlib.suppress(RuntimeError):
                if device != self._device:
                    # Set for each thread; without this, every rank would open device 0.
                    set_device(device)
                    self._device = device
                return TensorMemory.of(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
        return self.pool.take(nbytes)


_receivers: weakref.WeakSet[Receiver] = weakref.WeakSet()


def _close_descriptors() -> None:
    for receiver in list(_receivers):
        receiver.close_descriptors()
    _receivers.clear()


os.register_at_fork(after_in_child=_close_descriptors)


# torch.accelerator has these names from 2.7 on; before, torch pins for CUDA.
def current_device() -> int:
    """Returns the number of this thread's accelerator, which batches are pinned for."""
    accelerator = getattr(torch, "accelerator", None)
    return int(getattr(accelerator, "current_device_index", torch.cuda.current_device)())


def set_device(number: int) -> None:
    accelerator = getattr(torch, "accelerator", None)
    getattr(accelerator, "set_device_index", torch.cuda.set_device)(number)
