"""The floor is a loader over plain TCP sockets that does nothing but move batches.

One process a worker; two batches asked for ahead of each worker, oldest number first, within a
re-order window sized as stoker's; one thread in the trainer receives each batch with one call into
memory that is used again. It authenticates nobody, survives no lost worker, ships no dataset and
knows one dtype: what it costs, no honest loader over a network can undercut by much.

    python raw_socket_loader.py CASE       serves the workers of a case until their trainer hangs up
"""

import contextlib
import json
import math
import os
import queue
import selectors
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from cases import SAMPLE_SHAPE, Case, Images, SleptCollate

CREDITS = 2
# A peer that is silent for longer has failed; nothing here takes seconds.
READ_SECONDS = 60.0
_NUMBER = struct.Struct("<Q")
_MEMORY = 32
_MAX_WINDOW_PER_CREDIT = 32


class RawSocketLoader:
    """Yields the batches 0..num_batches-1 in order, each good until the next is asked for."""

    def __init__(self, ports: Sequence[int], case: Case) -> None:
        self._num_batches = case.num_batches
        self._batch_size, self._batch_bytes = case.batch_size, case.batch_bytes
        self._sockets = [_connect(port) for port in ports]
        self._asked: list[dict[int, float]] = [{} for _ in ports]
        self._latencies: list[deque[float]] = [deque(maxlen=_MEMORY) for _ in ports]
        self._reach = [0.0 for _ in ports]
        self._takes: deque[float] = deque(maxlen=_MEMORY)
        self._next = 0
        self._head = 0
        self._arrived: dict[int, torch.Tensor] = {}
        self._free: list[torch.Tensor] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._failure: OSError | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        with self._changed:
            self._hand_out()
        receiver = threading.Thread(target=self._receive, name="receiver")
        receiver.start()
        try:
            while self._head < self._num_batches:
                with self._changed:
                    while self._head not in self._arrived:
                        if self._failure is not None:
                            raise self._failure
                        if not self._changed.wait(READ_SECONDS):
                            raise TimeoutError(f"no batch {self._head} for {READ_SECONDS} s")
                    batch = self._arrived.pop(self._head)
                    self._head += 1
                    self._takes.append(time.monotonic())
                    self._hand_out()
                yield batch.view(self._batch_size, *SAMPLE_SHAPE)
                with self._changed:
                    self._free.append(batch)
        finally:
            self._is_closed = True
            for connection in self._sockets:
                connection.shutdown(socket.SHUT_RDWR)
            receiver.join()
            for connection in self._sockets:
                connection.close()

    def _receive(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for worker, connection in enumerate(self._sockets):
                    selector.register(connection, selectors.EVENT_READ, worker)
                while not self._is_closed:
                    for key, _ in selector.select(READ_SECONDS):
                        self._receive_one(key.data)
        except OSError as err:
            with self._changed:
                self._failure = err
                self._changed.notify()

    def _receive_one(self, worker: int) -> None:
        connection = self._sockets[worker]
        header = bytearray(_NUMBER.size)
        _fill(connection, memoryview(header))
        with self._changed:
            batch = self._free.pop() if self._free else self._new_batch()
        _fill(connection, batch.numpy().data)
        (number,) = _NUMBER.unpack(header)
        with self._changed:
            self._latencies[worker].append(time.monotonic() - self._asked[worker].pop(number))
            self._reach[worker] = _reach(self._latencies[worker])
            self._arrived[number] = batch
            self._hand_out()
            if number == self._head:
                self._changed.notify()

    def _new_batch(self) -> torch.Tensor:
        return torch.empty(self._batch_bytes, dtype=torch.uint8)

    def _hand_out(self) -> None:
        end = min(self._num_batches, self._head + self._window())
        while self._next < end:
            worker = min(range(len(self._asked)), key=lambda each: len(self._asked[each]))
            if len(self._asked[worker]) >= CREDITS:
                return
            self._asked[worker][self._next] = time.monotonic()
            self._sockets[worker].sendall(_NUMBER.pack(self._next))
            self._next += 1

    def _window(self) -> int:
        credits = CREDITS * len(self._sockets)
        slowest = max(self._reach)
        if len(self._takes) < 4:
            return credits + 2
        interval = (self._takes[-1] - self._takes[0]) / (len(self._takes) - 1)
        ahead = math.ceil(slowest / max(interval, 1e-6))
        return min(credits + 2 + ahead, _MAX_WINDOW_PER_CREDIT * credits)


def _reach(latencies: deque[float]) -> float:
    """Returns how early a batch is asked for; stoker's own loader does not keep the longest."""
    ordered = sorted(latencies)
    long = ordered[-2] if len(ordered) > 1 else ordered[-1]
    return ordered[-1] + 2.0 * max(0.0, long - ordered[len(ordered) // 2])


def serve(case: Case) -> None:
    """Forks the workers, prints their ports as a JSON list, and returns when all have ended."""
    torch.set_num_threads(1)
    dataset = Images(case)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(case.workers)]
    children = []
    for listener in listeners:
        pid = os.fork()
        if pid == 0:
            try:
                _work(listener, dataset, case)
            except ConnectionError:
                pass  # The trainer hung up while a batch was under way: the normal end.
            finally:
                os._exit(0)
        children.append(pid)
    print(json.dumps([listener.getsockname()[1] for listener in listeners]), flush=True)
    for pid in children:
        os.waitpid(pid, 0)


def _work(listener: socket.socket, dataset: Images, case: Case) -> None:
    collate, size = SleptCollate(case), case.batch_size
    listener.settimeout(READ_SECONDS)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Sent from a thread of its own, so that the next batch is made meanwhile; the trainer asks for
    # no more than it gave credits for, so the queue holds two at most.
    made: queue.SimpleQueue[tuple[bytes, torch.Tensor]] = queue.SimpleQueue()
    sender = threading.Thread(target=_send, args=(connection, made), daemon=True)
    sender.start()
    with connection:
        while request := connection.recv(_NUMBER.size, socket.MSG_WAITALL):
            (number,) = _NUMBER.unpack(request)
            first = number * size
            made.put((request, collate(dataset.__getitems__(range(first, first + size)))))


def _send(connection: socket.socket, made: queue.SimpleQueue[tuple[bytes, torch.Tensor]]) -> None:
    with contextlib.suppress(OSError):  # The trainer hung up: the normal end.
        while True:
            request, batch = made.get()
            connection.sendall(request)
            connection.sendall(batch.numpy().data.cast("B"))


def _connect(port: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=READ_SECONDS)
    # Blocking with the deadline in the kernel: Python's own timeouts would split each receive.
    connection.settimeout(None)
    seconds = struct.pack("ll", int(READ_SECONDS), 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _fill(connection: socket.socket, memory: memoryview) -> None:
    received = connection.recv_into(memory, 0, socket.MSG_WAITALL)
    if received != memory.nbytes:
        raise ConnectionResetError("a worker hung up")


if __name__ == "__main__":
    serve(Case.from_json(sys.argv[1]))
