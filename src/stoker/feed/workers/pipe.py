"""A worker and its pool exchange messages with file descriptors.

A message is a head (length, number of descriptors) and its bytes. The event loop's side never
blocks; the worker's side does. The payload of a batch is in shared memory (`slots`).
"""

import array
import os
import resource
import socket
import struct
import weakref
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from stoker.errors import ProtocolError
from stoker.feed.wire.protocol import Stream

# An index of a million samples is 10 MB; nothing else is near that.
MAX_MESSAGE_BYTES = 256 << 20
# Two are sent at most: the memory of a spec and a channel.
_MAX_DESCRIPTORS = 4
_HEAD = struct.Struct("<IB")
_READ_BYTES = 1 << 16
# Room for one message's: descriptors are a barrier in the byte stream (unix(7)), so one read never
# returns those of two messages.
_ANCILLARY_BYTES = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)

Received = tuple[bytes, tuple[int, ...]]


class JobOrder(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """The reader asks the worker to make this batch.

    Attributes:
        index: What the sampler gave; of a shard, what it gives for every batch.
        seed: Seed words; a shard has its base seed alone, with which its worker begins.
        epoch_id: Another one begins a shard again.
        number: In a shard, the position in it is number // num_shards.
        stream: The shard that the batch is of, and how a new process goes on with it.
    """

    index: bytes
    seed: tuple[int, ...] = ()
    epoch_id: int = 0
    number: int = 0
    stream: Stream | None = None


class Reuse(msgspec.Struct, frozen=True, tag=True):
    """The reader tells the worker that the slot may be written again."""

    slot: int


class Slot(msgspec.Struct, frozen=True, tag=True):
    """The worker tells the reader of a new slot; its descriptor comes with the message."""

    slot: int
    nbytes: int


class SlotClosed(msgspec.Struct, frozen=True, tag=True):
    """The worker tells the reader that the slot is no longer used."""

    slot: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """The worker tells the reader that the batch is in that slot (-1: it has no payload)."""

    slot: int
    tree: bytes
    nbytes: int
    has_pickle: bool
    cpu_seconds: float
    wall_seconds: float
    digest: int = 0
    state: bytes = b""


class End(msgspec.Struct, frozen=True, tag=True):
    """The worker tells the reader that the stream has no batch at that position, and none after it.

    Attributes:
        state: Random states with which the next epoch begins.
    """

    state: bytes = b""


class Error(msgspec.Struct, frozen=True, tag=True):
    """The worker tells the reader that the job raised; `error` is for `unpack_error`.

    Attributes:
        is_final: The stream cannot go on.
        state: As for a batch: random states at the beginning of the epoch.
    """

    error: bytes
    summary: str
    digest: int = 0
    is_final: bool = False
    state: bytes = b""


to_worker = msgspec.msgpack.Decoder(JobOrder | Reuse)
from_worker = msgspec.msgpack.Decoder(Slot | SlotClosed | Batch | Error | End)
pack = msgspec.msgpack.Encoder().encode


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a channel; neither is inherited by a program that is executed."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def keep_from_children(end: socket.socket) -> None:
    """Makes forked children close it: siblings would not see its owner's death."""
    _not_for_children.add(end)


_not_for_children: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_what_is_not_for_children() -> None:
    for end in list(_not_for_children):
        end.close()


# For every fork of this process, multiprocessing's and the script's own among them.
os.register_at_fork(after_in_child=_close_what_is_not_for_children)


def no_descriptor_left() -> str:
    """Says that this process has as many files open as it may, and names the limit."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"no file descriptor is left, the limit of this process (ulimit -n) is {most}"


class Pipe:
    """Sends and receives messages with descriptors at one end of a channel; owns the socket.

    Args:
        blocking: True: `send` and `receive` wait (the other end's death ends the wait).

    Attributes:
        is_closed: The other end is gone, or this one has given up.
        failure: Why this end has given up; empty: it has not.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self._socket = sock
        self._blocking = blocking
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.is_closed = False
        self.failure = ""

    def fileno(self) -> int:
        """Returns the socket's descriptor; -1 when closed."""
        return self._socket.fileno()

    @property
    def wants_write(self) -> bool:
        """Returns whether `flush` should be called when the socket is writable."""
        return bool(self._outgoing) and not self.is_closed

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends, or keeps what cannot be sent now; silent when the other end is gone.

        The caller keeps its descriptors; they are open at least until the message has left, which
        for a non-blocking channel is sure only while `wants_write` is False.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
        head = _HEAD.pack(len(data), len(descriptors))
        self._outgoing.append((memoryview(head + data), tuple(descriptors)))
        self.flush()

    def flush(self) -> None:
        """Sends what waits, as far as the kernel takes it."""
        while self._outgoing and not self.is_closed:
            view, descriptors = self._outgoing[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [view], list(descriptors))
                else:
                    sent = self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self.is_closed = True
                return
            if sent == len(view):
                self._outgoing.popleft()
            else:
                # The descriptors left with the first byte: sent again, the reader would get them
                # twice.
                self._outgoing[0] = (view[sent:], ())

    def receive(self) -> list[Received]:
        """Returns the messages that are there; the caller then owns the descriptors of each.

        A blocking channel waits for at least one; an empty list means that the channel is closed.

        Raises:
            ProtocolError: If a message is longer than the bound.
        """
        # What an earlier read brought may be complete already: a blocking read would wait for more.
        messages = list(self._parse())
        while not self.is_closed and not (self._blocking and messages):
            if not self._read():
                break
            messages.extend(self._parse())
        return messages

    def close(self) -> None:
        """Closes the socket and what came over it unclaimed; may be called twice."""
        self.is_closed = True
        self._outgoing.clear()
        while self._descriptors:
            socket.close(self._descriptors.popleft())
        self._socket.close()

    def _read(self) -> bool:
        """Reads once; False if there is nothing now."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data, ancillary, flags = b"", [], 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                # Descriptors that were cut off (EMFILE) may end in the middle of a number.
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            # The kernel has dropped descriptors that this process has no room for (unix(7)): they
            # never come, and neither would anything behind their message.
            self.failure = no_descriptor_left()
        if not data or self.failure:
            self.is_closed = True
        self._incoming += data
        return bool(data)

    def _parse(self) -> Iterator[Received]:
        while len(self._incoming) >= _HEAD.size:
            length, count = _HEAD.unpack_from(self._incoming)
            if length > MAX_MESSAGE_BYTES or count > _MAX_DESCRIPTORS:
                self.is_closed = True
                raise ProtocolError(f"a message of {length} bytes, more than {MAX_MESSAGE_BYTES}")
            end = _HEAD.size + length
            if len(self._incoming) < end or len(self._descriptors) < count:
                return
            data = bytes(self._incoming[_HEAD.size : end])
            del self._incoming[:end]
            yield data, tuple(self._descriptors.popleft() for _ in range(count))
