"""Messages between a worker and its pool, with file descriptors.

A message is a head (a mark, length, number of descriptors) and its bytes. The event loop's side
never blocks; the worker's side does. The payload of a batch is in shared memory (`slots`). A sample
may write into its worker's channel: what came whole before that is read, and nothing behind it.
"""

import array
import mmap
import os
import resource
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from stoker.errors import ProtocolError
from stoker.feed.lost_samples import LostSample
from stoker.feed.wire.protocol import NO_NOTES, BadSample, Make, OwnState, SampleNotes
from stoker.records.workload import MAX_STRETCHES

# An index of a million samples has 10 MB; nothing else is that long.
MAX_MESSAGE_BYTES = 256 << 20
# Of the parts of a batch. Two more of them may be of a worker that began it alone, and of what that
# one did not make of its part. Else two are sent at most, memory of a spec and a channel.
MAX_DESCRIPTORS = MAX_STRETCHES + 2
# Its mark, length of the message, then the number of its descriptors. Without the mark most of what
# a sample writes would be the length of a message that never comes.
_MARK = b"\xf5stoker\xff"
_HEAD = struct.Struct(f"<{len(_MARK)}sIB")
# Nearly every message comes in one read.
_READ_BYTES = 1 << 16
# For one message: a read never returns the descriptors of two (unix(7)).
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)

# Exit codes of a worker that a sample has left unfit. Its channel is gone in its own process: the
# user's code has closed it.
DISCONNECTED = 207
# Its limits are lower than what a batch needs.
LIMITED = 208
# What all samples share is another one than before a bad sample.
CHANGED = 209
# A sample has failed behind a bad one: that one may have left something behind that made it fail.
DOUBTED = 210

# Free slots that a worker keeps, warm for its next batches, where there is memory for them.
SPARE_SLOTS = 3

Received = tuple[bytes, tuple[int, ...]]


class Reuse(msgspec.Struct, frozen=True, tag=True):
    """The slot may be written again."""

    slot: int


class KeepSlots(msgspec.Struct, frozen=True, tag=True):
    """So many free slots may wait for later batches; the memory of others is freed."""

    number: int


class TrustErrors(msgspec.Struct, frozen=True, tag=True):
    """An error of a sample is its own from now on, also behind those of others.

    So it has been: those that were doubted failed in other processes as well.
    """


class Up(msgspec.Struct, frozen=True, tag=True):
    """The worker runs; if `is_ready`, what it does from now on is its first batch.

    `stacks` is the number of its descriptor of the file that its stacks are written to (see
    stacks), as another process of this host may open it below /proc; -1: there is none. A worker
    of a map-style dataset sends the descriptor of its progress with it.
    """

    pid: int
    stacks: int = -1
    is_ready: bool = True


class Slot(msgspec.Struct, frozen=True, tag=True):
    """A new slot of the worker; its descriptor comes with the message."""

    slot: int
    nbytes: int


class SlotClosed(msgspec.Struct, frozen=True, tag=True):
    """The slot is no longer used."""

    slot: int


class Batch(msgspec.Struct, frozen=True, tag=True):
    """A batch, in that slot (-1: it has no payload); the last fields are those of `Made`."""

    slot: int
    tree: bytes
    nbytes: int
    cpu_seconds: float
    wall_seconds: float
    digest: int = 0
    state: bytes = b""
    own_state: OwnState | None = None
    samples: SampleNotes = NO_NOTES


class End(msgspec.Struct, frozen=True, tag=True):
    """The stream ends before that position; `state` is for the next epoch."""

    state: bytes = b""


class Error(msgspec.Struct, frozen=True, tag=True):
    """The job raised; `error` is for `unpack_error`. If `is_final`, the stream cannot continue."""

    error: bytes
    summary: str
    digest: int = 0
    is_final: bool = False
    state: bytes = b""


class MakePart(msgspec.Struct, frozen=True, tag=True):
    """Requests the samples of a batch from place `first` to before `last`."""

    order: Make
    first: int
    last: int


class MakeAgain(msgspec.Struct, frozen=True, tag=True):
    """Requests a batch without samples that no process survives.

    If `is_one_by_one`, samples that one call makes are made one by one.
    """

    order: Make
    lost: list[LostSample]
    is_one_by_one: bool = False


class MakeAlone(msgspec.Struct, frozen=True, tag=True):
    """Requests samples of a batch from place `first` to before `last`, which are thrown away.

    It shows whether a process survives them, and whether they leave it fit to make batches. `last`
    0: to the batch's end. `attempt` is LostSample's. Those before it in its stretch are made as
    well, but for the `lost` ones. The process is looked at for so many seconds more: threads and
    timers may end it later.
    """

    order: Make
    first: int
    last: int
    attempt: int = 0
    lost: list[LostSample] = []
    wait_seconds: float = 0.0


class AloneMade(msgspec.Struct, frozen=True, tag=True):
    """The process has survived these samples, though they may have raised."""


class PartMade(msgspec.Struct, frozen=True, tag=True):
    """Samples of a batch, in memory of its own, whose descriptor comes with the message.

    There is none if `nbytes` is 0. `wall_seconds` it took to make them, `send_seconds` to write
    them. It answers MakePart, or Make where the worker was stopped before the batch's end. The
    first `skipped` ones are of no use, as another part has them as well. In the place of a bad one
    is the sample that replaces it, or None.
    """

    num_samples: int
    tree: bytes
    nbytes: int
    cpu_seconds: float
    wall_seconds: float
    send_seconds: float
    skipped: int = 0
    bad: tuple[BadSample, ...] = ()


class Unsplittable(msgspec.Struct, frozen=True, tag=True):
    """The dataset makes all samples of a batch in one call, or they cannot go to another worker."""


class Collate(msgspec.Struct, frozen=True, tag=True):
    """Requests a batch of samples that were made in parts; their descriptors come with it."""

    order: Make
    parts: list[PartMade]


class LastWords(msgspec.Struct, frozen=True, tag=True):
    """The user's code ends the worker's process, by SystemExit or the like, in these words."""

    words: str


class SampleFailed(msgspec.Struct, frozen=True, tag=True):
    """A sample of the batch that is being made is bad, by its own error.

    If a later one ends or blocks the process, that may be its doing: a lock that it has not
    released.
    """

    sample: LostSample


class LeftChanged(msgspec.Struct, frozen=True, tag=True):
    """Bad samples have left this process changed, or perhaps: it ends next.

    In another one they count as lost ones, each with its own error.

    Attributes:
        samples: Of the batch that it makes.
        words: What they have changed; empty: it is not known that they have.
        doubted: The sample that failed behind them, or behind one of an earlier batch; it shows in
            another process whether it fails by itself. None: it was to show what a sample does
            alone, where others had failed.
    """

    samples: list[LostSample]
    words: str
    doubted: LostSample | None = None


to_worker = msgspec.msgpack.Decoder(
    Make | MakePart | MakeAgain | MakeAlone | Collate | Reuse | KeepSlots | TrustErrors
)
from_worker = msgspec.msgpack.Decoder(
    Up
    | Slot
    | SlotClosed
    | Batch
    | PartMade
    | Unsplittable
    | AloneMade
    | Error
    | End
    | LastWords
    | SampleFailed
    | LeftChanged
)
pack = msgspec.msgpack.Encoder().encode


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two ends of a channel; executed programs do not inherit them."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


_not_for_children: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def keep_from_children(end: socket.socket) -> None:
    """Makes forked children close it: they would hide its owner's death."""
    _not_for_children.add(end)


def _close_what_is_not_for_children() -> None:
    for end in list(_not_for_children):
        end.close()


# For every fork of this process, also by multiprocessing and the script.
os.register_at_fork(after_in_child=_close_what_is_not_for_children)


def part_memory(nbytes: int, fill: Callable[[memoryview], None]) -> int:
    """Returns a descriptor of new memory for a part of a batch, once `fill` has written it.

    Raises OSError if there is no memory, or no descriptor.
    """
    descriptor = os.memfd_create(f"stoker-part-{os.getpid()}", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        # The map ends here: from now on the descriptor alone keeps the memory.
        with mmap.mmap(descriptor, nbytes) as memory, memoryview(memory) as view:
            fill(view)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def no_descriptor_left() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"too many open files, the limit of this process (ulimit -n) is {most}"


class Pipe:
    """One end of a channel; owns the socket.

    Attributes:
        is_closed: The other end is gone, or this one has given up because of `failure`.
    """

    def __init__(self, sock: socket.socket, *, blocking: bool) -> None:
        sock.setblocking(blocking)
        self._socket = sock
        self._inode = os.fstat(sock.fileno()).st_ino
        self._blocking = blocking
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        self._outgoing: deque[tuple[memoryview, tuple[int, ...]]] = deque()
        self.is_closed = False
        self.failure = ""

    def fileno(self) -> int:
        return self._socket.fileno()

    def is_connected(self) -> bool:
        """Returns whether its descriptor is still its own: `os.closerange` closes any."""
        try:
            return os.fstat(self.fileno()).st_ino == self._inode
        except OSError:
            return False

    @property
    def wants_write(self) -> bool:
        return bool(self._outgoing) and not self.is_closed

    def send(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Sends or queues; ignores that the other end is gone.

        The caller keeps its descriptors open until `wants_write` is False.
        """
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"message of {len(data)} bytes, more than {MAX_MESSAGE_BYTES}")
        head = _HEAD.pack(_MARK, len(data), len(descriptors))
        self._outgoing.append((memoryview(head + data), tuple(descriptors)))
        self.flush()

    def flush(self) -> None:
        while self._outgoing and not self.is_closed:
            view, descriptors = self._outgoing[0]
            try:
                if descriptors:
                    sent = socket.send_fds(self._socket, [view], list(descriptors))
                else:
                    sent = self._socket.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except (BrokenPipeError, ConnectionResetError):
                # Why it ended may be there already: `receive` returns it.
                while self._read():
                    pass
                self.is_closed = True
                return
            except OSError:
                self.is_closed = True
                return
            if sent == len(view):
                self._outgoing.popleft()
            else:
                # The descriptors were sent with the first byte.
                self._outgoing[0] = (view[sent:], ())

    def receive(self) -> Iterator[Received]:
        """Yields the messages that are there; the caller then owns the descriptors of each.

        A blocking channel waits for at least one, and yields none when it is closed.

        Raises:
            ProtocolError: If other bytes come behind them: the channel is closed then.
        """
        is_empty = True
        while True:
            # First: an earlier read may have brought more than one message.
            for message in self._parse():
                is_empty = False
                yield message
            has_enough = self._blocking and not is_empty
            if self.is_closed or has_enough or not self._read():
                return

    def close(self) -> None:
        self.is_closed = True
        self._outgoing.clear()
        while self._descriptors:
            socket.close(self._descriptors.popleft())
        self._socket.close()

    def _read(self) -> bool:
        """Reads once; returns False if there is nothing now."""
        try:
            data, ancillary, flags, _ = self._socket.recvmsg(
                _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
            )
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            # Reset by the other end: as if it had closed.
            data = b""
            ancillary = []
            flags = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                # Truncated descriptors (EMFILE) may end in the middle of a number.
                numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
                self._descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            # Beyond this process's limit (unix(7)): their message would never be complete.
            self.failure = no_descriptor_left()
        if not data or self.failure:
            self.is_closed = True
        self._incoming += data
        return bool(data)

    def _parse(self) -> Iterator[Received]:
        while self._incoming:
            # Also of a part of it: the rest may never come.
            is_marked = self._incoming.startswith(_MARK[: len(self._incoming)])
            if not is_marked:
                raise self._out_of_step("bytes that are no message")
            if len(self._incoming) < _HEAD.size:
                return
            _, length, count = _HEAD.unpack_from(self._incoming)
            if length > MAX_MESSAGE_BYTES or count > MAX_DESCRIPTORS:
                raise self._out_of_step(f"{length} bytes, more than {MAX_MESSAGE_BYTES}")
            end = _HEAD.size + length
            if len(self._incoming) < end or len(self._descriptors) < count:
                return
            data = bytes(self._incoming[_HEAD.size : end])
            del self._incoming[:end]
            yield data, tuple(self._descriptors.popleft() for _ in range(count))

    def _out_of_step(self, what: str) -> ProtocolError:
        """Closes the channel, as no later head can be found, and returns the error."""
        self.is_closed = True
        self._incoming.clear()
        return ProtocolError(what)
