"""A router of a run on loopback, with its list of whom it lets in: a thread answers messages."""

import threading
from collections.abc import Callable

import zmq

from stoker.feed.engine.crypto import AllowList, Keys, secure_server


class Router:
    """`answer` gets each message, and returns what its sender gets for it."""

    def __init__(self, keys: Keys, answer: Callable[[bytes], list[bytes]], **limits: int) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.allow = AllowList(self.context, keys)
        self.socket = self.context.socket(zmq.ROUTER)
        secure_server(self.socket, keys, **limits)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._answer = answer
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Router":
        self._thread.start()
        return self

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.allow.socket, zmq.POLLIN)
        poller.register(self.socket, zmq.POLLIN)
        while not self._end.is_set():
            for socket, _ in poller.poll(50):
                if socket is self.allow.socket:
                    self.allow.handle()
                else:
                    identity, message = self.socket.recv_multipart()
                    for text in self._answer(message):
                        self.socket.send_multipart([identity, text], copy=False)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.allow.close()
        self.context.destroy(linger=0)
