"""A server of a run on loopback, with its list of whom it lets in: a thread answers messages."""

import io
import threading
import time
from collections.abc import Callable

import zmq

from stoker.feed.engine.crypto import ControlServer, Keys
from stoker.logs import Log


class Router:
    """`answer` gets each message, and returns what its sender gets for it."""

    def __init__(self, keys: Keys, answer: Callable[[bytes], list[bytes]]) -> None:
        log = Log(run="r", host="h", stream=io.StringIO())
        self._server = ControlServer(keys, log, endpoint="tcp://127.0.0.1:*")
        self.port = self._server.port
        self._answer = answer
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Router":
        self._thread.start()
        return self

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in self._server.sources:
            poller.register(source, zmq.POLLIN)
        while not self._end.is_set():
            self._server.handle(dict(poller.poll(50)), time.monotonic())
            for sender, message in self._server.receive():
                for text in self._answer(message):
                    self._server.send(sender, text)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._server.close()
