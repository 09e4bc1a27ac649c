"""A TCP proxy in front of an agent, which cuts its connections in the middle of messages."""

import select
import socket
import threading


class Proxy:
    """Passes bytes on, both ways, until it is told to do worse; with target 0, nothing answers."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.target = 0
        self.num_cut = self.num_forged = 0
        # What trainers have sent.
        self.sent = bytearray()
        self._forge_every = self._forgeries = self._unforged = 0
        self._left = 0
        self._is_armed = False
        self._is_closing = threading.Event()
        self.is_hole = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def arm(self, *, cut_after: int) -> None:
        """Counts bytes from here on; again, if there was a cut before."""
        self._left = cut_after
        self._is_armed = True

    def forge(self, *, every: int, times: int) -> None:
        """Changes from here on one byte in so many that go to the trainer, so many times."""
        self._forge_every = self._unforged = every
        self._forgeries = times

    def __enter__(self) -> "Proxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        self._thread.join(150)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        ends: dict[socket.socket, socket.socket] = {}
        to_trainer: set[socket.socket] = set()
        with self._listener:
            while not self._is_closing.is_set():
                if self.is_hole.is_set():
                    self._is_closing.wait(0.05)
                    continue
                for ready in select.select([self._listener, *ends], [], [], 0.05)[0]:
                    if ready is self._listener:
                        client = self._listener.accept()[0]
                        try:
                            agent = socket.create_connection(("127.0.0.1", self.target), 10)
                        except OSError:
                            client.close()
                            continue
                        ends |= {client: agent, agent: client}
                        to_trainer.add(agent)
                    elif ready in ends and not self._pass_on(ready, ends, ready in to_trainer):
                        for end in (ends.pop(ready), ready):
                            ends.pop(end, None)
                            to_trainer.discard(end)
                            end.close()
        for end in ends:
            end.close()

    def _pass_on(self, source, ends, is_counted):
        try:
            data = source.recv(4096)
            if is_counted and self._is_armed:
                self._left -= len(data)
                if self._left < 0:
                    self._is_armed = False
                    self.num_cut += 1
                    ends[source].sendall(data[: len(data) // 2])
                    return False
            if is_counted and self.num_forged < self._forgeries:
                self._unforged -= len(data)
                if self._unforged < 0:
                    self._unforged = self._forge_every
                    self.num_forged += 1
                    middle = len(data) // 2
                    data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
            if not is_counted:
                self.sent += data
            ends[source].sendall(data)
        except OSError:
            return False
        return bool(data)
