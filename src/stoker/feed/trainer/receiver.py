"""Receiver of batches from a data host, with one thread for each host.

The thread blocks in the kernel until a batch comes, decrypts it record by record to where it will
live, and hands it over. A slow network delays this thread only.
"""

import contextlib
import socket
import threading
from collections.abc import Callable

from stoker.errors import ProtocolError
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.trainer.control_connection import CONNECT_SECONDS
from stoker.feed.wire.protocol import Ticket
from stoker.feed.wire.sealing import Unsealer
from stoker.feed.wire.stream import BatchReader, BufferPool, tune

# From the ticket to the data host's first record; its loop turns within milliseconds.
ANSWER_SECONDS = 10.0


class BatchReceiver:
    """Thread that receives batches, from `start` until the connection is lost or closed.

    Args:
        buffers: For this thread alone; `pool` is for what is still sealed.
        take: Called in the thread with the packed message of a batch and the size of its payload,
            which it receives by `reader.read`.
        ended: Called in the thread, once, at its end.
        max_head_bytes: A longer message costs the connection.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        ticket: Ticket,
        buffers: BatchBuffers,
        pool: BufferPool,
        take: Callable[["BatchReceiver", bytes, int], None],
        ended: Callable[["BatchReceiver"], None],
        max_head_bytes: int,
    ) -> None:
        self.buffers = buffers
        # The data host has taken the ticket.
        self.has_been_up = False
        self.num_taken = 0
        self.is_closed = False
        # Why it ended; None: it was closed, or runs.
        self.failure: BaseException | None = None
        self.reader: BatchReader
        self._peer = (address, port)
        self._ticket = ticket
        self._pool = pool
        self._take = take
        self._ended = ended
        self._max_head_bytes = max_head_bytes
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-batches", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends the thread without waiting for it; safe in any thread, and twice."""
        self.is_closed = True
        connection = self._socket
        if connection is not None:
            # Ends a call that blocks; the thread closes the socket.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        if self._thread.is_alive():
            self._thread.join(seconds)

    def words(self) -> str:
        where = "{} port {}".format(*self._peer)
        match self.failure:
            case ProtocolError() as err:
                return f"{where}: {err.what}"
            case OSError() as err:
                return f"{where}: {err.strerror or err}"
        return where

    def _run(self) -> None:
        try:
            self._receive()
        except (OSError, ProtocolError) as err:
            self.failure = None if self.is_closed else err
        except BaseException as err:
            self.failure = err
        finally:
            self._ended(self)

    def _receive(self) -> None:
        with socket.create_connection(self._peer, CONNECT_SECONDS) as connection:
            self._socket = connection
            # Still with the connect timeout; from `tune` on the kernel's limits apply.
            connection.sendall(self._ticket.ticket)
            tune(connection)
            unsealer = Unsealer(self._ticket.key)
            # A head without a batch: the data host has taken the ticket, and has its key.
            answer = BatchReader(
                connection,
                unsealer,
                self._pool,
                max_head_bytes=0,
                receive_timeout_seconds=ANSWER_SECONDS,
            )
            answer.head(is_awaited=True)
            self.has_been_up = True
            self.reader = BatchReader(
                connection, unsealer, self._pool, max_head_bytes=self._max_head_bytes
            )
            # While this thread dials, `close` finds no socket to shut down: it ends here.
            while not self.is_closed:
                packed, nbytes = self.reader.head()
                self._take(self, packed, nbytes)
                self.num_taken += 1

    def close_descriptor(self) -> None:
        """Closes its descriptor in a forked child, so that the connection ends with the parent."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
