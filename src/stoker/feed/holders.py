"""The agent's side of the nursery: a clean process that forks *holders*, each with one spec.

A holder unpickles the spec once and forks that spec's workers, which share its memory. The agent
has a channel to the nursery and one to each holder; when the agent dies, so do all of them.
"""

import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from stoker.errors import FeedLostError
from stoker.feed.channel import Channel, channel_pair, pack

# import torch takes about 2 s on a slow core; a killed process is gone in milliseconds.
STOP_SECONDS = 5.0


class Hold(msgspec.Struct, frozen=True, tag=True):
    """Agent to nursery: fork a holder; its spec and its channel come as descriptors."""

    spec: str
    host: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Agent to holder: fork a worker; its channel comes as descriptor."""

    token: int
    worker_id: int
    num_workers: int
    base_seed: int
    seeding: str


class ForkStream(msgspec.Struct, frozen=True, tag=True):
    """Agent to holder: fork a process for a stream; its channel comes as descriptor."""

    token: int
    shard: int
    num_shards: int
    base_seed: int


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Agent to holder: kill that worker."""

    token: int


class Held(msgspec.Struct, frozen=True, tag=True):
    """Holder to agent: the spec is there; or the error, for shipping.unpack_error.

    Attributes:
        module_values: What modules of the user say there; see module_values.values_here.
    """

    error: bytes = b""
    summary: str = ""
    module_values: dict[str, str] = {}


class Exited(msgspec.Struct, frozen=True, tag=True):
    """Holder to agent: that worker ended; negative: by that signal."""

    token: int
    status: int


to_nursery = msgspec.msgpack.Decoder(Hold)
to_holder = msgspec.msgpack.Decoder(Fork | ForkStream | Kill)
from_holder = msgspec.msgpack.Decoder(Held | Exited)


class WorkerProcess:
    """A worker that a holder forked; see endings.Process."""

    def __init__(self, holder: "Holder", token: int) -> None:
        self._holder = holder
        self._token = token
        self.exitcode: int | None = None

    def kill(self) -> None:
        """Kills it, if it still runs."""
        if self.exitcode is None:
            self._holder.channel.send(pack(Kill(self._token)))

    def join(self, timeout: float | None = None) -> None:
        """Waits until its end is known, or the holder's."""
        deadline = time.monotonic() + (STOP_SECONDS if timeout is None else timeout)
        while self.exitcode is None and not self._holder.channel.is_closed:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            _wait(self._holder.channel, select.POLLIN, left)
            self._holder.handle()


class Holder:
    """A process that holds one spec.

    Attributes:
        channel: To poll for reading; then `handle`.
        held: What became of the spec; None: not known yet.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.held: Held | None = None
        self._workers: dict[int, tuple[WorkerProcess, int]] = {}
        self._next = 0

    def fork(
        self, sock: socket.socket, *, worker_id: int, num_workers: int, base_seed: int, seeding: str
    ) -> WorkerProcess:
        """Forks a worker.

        Raises:
            FeedLostError: If the holder is gone.
        """
        return self._order(
            sock, lambda token: Fork(token, worker_id, num_workers, base_seed, seeding)
        )

    def fork_stream(
        self, sock: socket.socket, *, shard: int, num_shards: int, base_seed: int
    ) -> WorkerProcess:
        """Forks a process for a stream.

        Raises:
            FeedLostError: If the holder is gone.
        """
        return self._order(sock, lambda token: ForkStream(token, shard, num_shards, base_seed))

    def _order(
        self, sock: socket.socket, order: Callable[[int], Fork | ForkStream]
    ) -> WorkerProcess:
        if self.channel.is_closed:
            raise FeedLostError("the process that holds the dataset is gone")
        token, self._next = self._next, self._next + 1
        # Ours until the worker's end: the message may not have left when the caller closes its own.
        descriptor = os.dup(sock.fileno())
        self.channel.send(pack(order(token)), [descriptor])
        if not self.channel.wants_write:
            os.close(descriptor)
            descriptor = -1
        process = WorkerProcess(self, token)
        self._workers[token] = (process, descriptor)
        return process

    def handle(self) -> None:
        """Takes what the holder says, without blocking."""
        self.channel.flush()
        for data, descriptors in self.channel.receive():
            for descriptor in descriptors:
                os.close(descriptor)
            match from_holder.decode(data):
                case Held() as held:
                    self.held = held
                case Exited(token, status):
                    process, descriptor = self._workers.pop(token)
                    process.exitcode = status
                    if descriptor >= 0:
                        os.close(descriptor)

    def close(self) -> None:
        """Ends the holder with all its workers; may be called twice."""
        self.channel.close()
        for _, descriptor in self._workers.values():
            if descriptor >= 0:
                os.close(descriptor)
        self._workers.clear()


class Nursery:
    """The nursery process; start it from a thread that lives as long as it shall.

    Args:
        host: Named in errors.
    """

    def __init__(self, *, host: str) -> None:
        self._host = host
        ours, theirs = channel_pair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stoker.feed.nursery", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Ctrl-C and SIGTERM to the agent's group are the agent's to judge.
                process_group=0,
            )
        self.channel = Channel(ours, blocking=False)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None and not self.channel.is_closed

    def hold(self, spec: str, memory: int) -> Holder:
        """Starts a holder with a pickled spec; its `held` says later what became of it.

        Args:
            memory: Descriptor of the memory that the spec is in; the caller's.

        Raises:
            FeedLostError: If the nursery is gone.
        """
        ours, theirs = channel_pair()
        try:
            self.channel.send(pack(Hold(spec, self._host)), [memory, theirs.fileno()])
            if not self._until(lambda: not self.channel.wants_write):
                raise FeedLostError("the nursery takes no orders", where=f"host {self._host}")
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Holder(Channel(ours, blocking=False))

    def close(self) -> None:
        """Ends it and all it forked; may be called twice, never raises; 5 s at most."""
        self.channel.close()
        self._process.kill()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            return

    def _until(self, is_done: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + STOP_SECONDS
        while not self.channel.is_closed and not is_done():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            _wait(self.channel, select.POLLOUT, left)
            self.channel.flush()
        return not self.channel.is_closed


def _wait(channel: Channel, events: int, seconds: float) -> None:
    # Not select: amid a flood of connections, descriptors have numbers above what it takes.
    poller = select.poll()
    poller.register(channel, events)
    poller.poll(seconds * 1000)
