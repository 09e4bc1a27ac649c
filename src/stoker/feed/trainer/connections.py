"""A trainer has connections to the coordinator and to agents, and one to each agent for batches.

libzmq's own reconnect would keep a name's first address and hide that a peer came back with its
memory lost. So a lost connection is closed, and dialled again by name after a back-off; whoever
listens starts afresh with each one.

Batches have a thread for each agent (`BatchReceiver`). It blocks in the kernel until a batch comes,
decrypts it to where it will live, record by record, and hands it over. A slow network makes it
wait, and nobody else.
"""

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed.trainer.buffers import BatchBuffers
from stoker.feed.wire.crypto import Keys, secure_client
from stoker.feed.wire.dataset import PackedSpec
from stoker.feed.wire.pieces import PIECE_BYTES
from stoker.feed.wire.protocol import Attach, Member, Message, Piece, Ship, Ticket, pack
from stoker.feed.wire.sealing import Unsealer
from stoker.feed.wire.stream import SILENT_SECONDS, BatchReader, BufferPool, tune

ZmqSocket = zmq.Socket[bytes]
ZmqContext = zmq.Context[ZmqSocket]

# A first packet and its repetition after 1 s; an address that nobody has any more does not answer.
CONNECT_SECONDS = 2.0
# Pauses between attempts: doubled from the first to the second.
FIRST_PAUSE_SECONDS = 0.1
MAX_PAUSE_SECONDS = 2.0
# At the end of the process: what is still to be sent (a goodbye) may take so long.
GOODBYE_SECONDS = 0.2

# As plain numbers: zmq's own are enumerations, which are slow to combine.
_IN, _EVENTS = int(zmq.POLLIN), int(zmq.EVENTS)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.SNDMORE)
_UP = zmq.EVENT_HANDSHAKE_SUCCEEDED
_DOWN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def resolve(name: str, *, attempt: int = 0) -> str:
    """Returns the address of a host as zmq wants it, looked up now; blocks while the resolver does.

    Args:
        name: Of the host.
        attempt: Of several addresses each has its turn: one may be that of a pod that is gone.

    Raises:
        OSError: If the name is not known.
    """
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = found[attempt % len(found)]
    return f"[{address[0]}]" if family == socket.AF_INET6 else str(address[0])


def send_uncopied_ahead() -> None:
    """Starts the thread with which pyzmq frees what it sends without a copy: 2 to 7 ms, which the
    first spec or batch would wait for."""
    zmq.Frame(b"", copy=False)


def is_address(name: str) -> bool:
    """Tells whether `name` is an IP address, which `resolve` needs not look up."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Connection:
    """A DEALER socket with its monitor; used by the pump thread only.

    Args:
        keys: Of the run.
        max_message_bytes: A longer frame cuts the connection before memory is taken for it.

    Attributes:
        filenos: What to poll for reading, where `has_input` says no: none, or of socket and
            monitor. libzmq's own poll asks every socket each time, by two system calls.
        is_open: There is a socket: up, or on its way.
        is_drained, is_quiet: Socket, and monitor, were found empty and not touched since: then
            their descriptors tell of what comes.
        is_up: The handshake is done, and the connection was not lost since.
        down_since: When it was last lost, or made; monotonic seconds.
        dial_at: When to dial, while there is no socket.
    """

    def __init__(
        self,
        context: ZmqContext,
        keys: Keys,
        *,
        now: float,
        max_message_bytes: int,
    ) -> None:
        self._context = context
        self._keys = keys
        self._max_message_bytes = max_message_bytes
        self._socket: ZmqSocket | None = None
        self._monitor: ZmqSocket | None = None
        self.filenos: tuple[int, ...] = ()
        self.is_open = self.is_drained = self.is_quiet = False
        self._pause = FIRST_PAUSE_SECONDS
        self.is_up = False
        self.down_since = now
        self.dial_at = now

    def has_input(self) -> bool:
        """Tells whether there is input that no descriptor tells of; ask before you wait."""
        return self._has_messages() or self.has_events(())

    def has_events(self, ready: Container[int]) -> bool:
        """Tells whether `watch` has something to read.

        Args:
            ready: Descriptors that can be read from.
        """
        if self._monitor is None:
            return False
        if self.is_quiet:
            return self.filenos[1] in ready
        self.is_quiet = not int(self._monitor.get(_EVENTS)) & _IN
        return not self.is_quiet

    def _has_messages(self) -> bool:
        if self._socket is None or self.is_drained:
            return False
        # An exception would cost more than the question.
        self.is_drained = not int(self._socket.get(_EVENTS)) & _IN
        return not self.is_drained

    def dial(self, endpoint: str) -> None:
        """Connects to `tcp://ADDRESS:PORT`; `watch` tells what becomes of it."""
        self.close()
        made: ZmqSocket = self._context.socket(zmq.DEALER)
        secure_client(made, self._keys, max_message_bytes=self._max_message_bytes)
        made.reconnect_ivl = -1
        made.connect_timeout = round(CONNECT_SECONDS * 1000)
        made.sndhwm = made.rcvhwm = 0
        self._monitor = made.get_monitor_socket(_UP | _DOWN)
        self._socket, self.is_open = made, True
        self.filenos = (int(made.get(zmq.FD)), int(self._monitor.get(zmq.FD)))
        self.is_drained = self.is_quiet = False
        made.connect(endpoint)

    def watch(self, now: float) -> bool:
        """Reads the monitor; True if `is_up` changed."""
        was_up = self.is_up
        while self._monitor is not None:
            self.is_quiet = True
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                break
            if event & _UP:
                self.is_up = True
                self._pause = FIRST_PAUSE_SECONDS
            elif event & _DOWN:
                self.lose(now)
        return self.is_up != was_up

    def lose(self, now: float) -> None:
        """Closes the lost connection, to be dialled again after a back-off."""
        if self.is_up:
            self.down_since = now
        self.close()
        self.dial_at = now + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)

    def send(self, message: Message, frame: bytes | memoryview | None = None) -> None:
        """Queues a message; silent without a connection, whose loss the monitor tells."""
        if self._socket is None:
            return
        self.is_drained = False
        packed = pack(message)
        # Not contextlib's `suppress`, which takes longer than the rest.
        try:
            if frame is not None:
                self._socket.send(packed, _NOBLOCK | _MORE)
                self._socket.send(frame, _NOBLOCK, copy=False)
            elif len(packed) <= PIECE_BYTES:
                self._socket.send(packed, _NOBLOCK)
            else:
                self._send_in_pieces(packed)
        except zmq.Again:
            return

    def _send_in_pieces(self, packed: bytes) -> None:
        """Sends what is too long for a frame: the indices of a batch of 100,000 samples, say."""
        for start in range(0, len(packed), PIECE_BYTES):
            end = start + PIECE_BYTES
            self.send(Piece(is_last=end >= len(packed)), packed[start:end])

    def receive(
        self,
        take: Callable[[Sequence[zmq.Frame]], None],
        *,
        at_most: int,
        ready: Container[int] = (),
    ) -> None:
        """Hands the frames of the messages that are there to `take`, one message at a time.

        What is left after so many is there at the next poll.

        Args:
            ready: Descriptors that can be read from.
        """
        if self.filenos and self.filenos[0] not in ready and not self._has_messages():
            return
        while self._socket is not None:
            self.is_drained = True
            try:
                frame = self._socket.recv(_NOBLOCK, copy=False)
                frames = [frame]
                while frame.more:
                    frame = self._socket.recv(_NOBLOCK, copy=False)
                    frames.append(frame)
            except zmq.Again:
                return
            self.is_drained = False
            at_most -= 1
            take(frames)
            if at_most <= 0 or not self._has_messages():
                return

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes the sockets; may be called twice."""
        self.is_up = False
        self.filenos = ()
        if self._socket is not None:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            self._socket.close(linger=round(linger_seconds * 1000))
            self._socket, self.is_open = None, False
        if self._monitor is not None:
            self._monitor.close(linger=0)
            self._monitor = None


# From the ticket to the data host's first record; its loop turns within milliseconds.
ANSWER_SECONDS = 10.0


class BatchReceiver:
    """Receives batches in a thread of its own, from `start` until the connection is lost or closed.

    Args:
        address: IP address of the data host.
        ticket: For this connection; used up by it.
        placing: For this thread alone.
        landing: For what is still sealed.
        take: Called in the thread with the packed message of a batch and the bytes of its payload,
            which it receives by `reader.read`.
        ended: Called in the thread, once, after all else.
        max_head_bytes: A longer message costs the connection.

    Attributes:
        has_been_up: The data host has taken the ticket.
        num_taken: Batches received.
        is_closed: Nobody wants what it receives; set under the feed's lock.
        failure: Why it ended; None: it was closed, or runs.
    """

    def __init__(
        self,
        *,
        address: str,
        port: int,
        ticket: Ticket,
        placing: BatchBuffers,
        landing: BufferPool,
        take: Callable[["BatchReceiver", bytes, int], None],
        ended: Callable[["BatchReceiver"], None],
        max_head_bytes: int,
        connect_seconds: float = CONNECT_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
    ) -> None:
        self.placing = placing
        self.has_been_up = False
        self.num_taken = 0
        self.is_closed = False
        self.failure: BaseException | None = None
        self.reader: BatchReader
        self._peer = (address, port)
        self._ticket = ticket
        self._landing = landing
        self._take = take
        self._ended = ended
        self._max_head_bytes = max_head_bytes
        self._connect_seconds = connect_seconds
        self._answer_seconds = answer_seconds
        self._silent_seconds = silent_seconds
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="stoker-batches", daemon=True)

    def start(self) -> None:
        """Dials; returns at once."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, which is not waited for; any thread may call it, twice too."""
        self.is_closed = True
        connection = self._socket
        if connection is not None:
            # Ends a call that waits; the thread closes.
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def join(self, seconds: float) -> None:
        """Waits for the end of the thread."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    def words(self) -> str:
        """Says why it ended, for people."""
        host, port = self._peer
        where = f"{host} port {port}"
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
        with socket.create_connection(self._peer, self._connect_seconds) as connection:
            self._socket = connection
            connection.sendall(self._ticket.ticket)
            tune(connection)
            unsealer = Unsealer(self._ticket.key)
            answer = BatchReader(
                connection,
                unsealer,
                self._landing,
                max_head_bytes=0,
                silent_seconds=self._answer_seconds,
            )
            answer.head(is_awaited=True)
            self.has_been_up = True
            self.reader = BatchReader(
                connection,
                unsealer,
                self._landing,
                max_head_bytes=self._max_head_bytes,
                silent_seconds=self._silent_seconds,
            )
            while not self.is_closed:
                packed, nbytes = self.reader.head()
                self._take(self, packed, nbytes)
                self.num_taken += 1

    def forget(self) -> None:
        """Closes its descriptor in a forked child, so that the connection ends with the parent."""
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()


# Messages taken from one socket before the others have their turn.
_AT_MOST = 16
# A host that cannot make a session's batches is asked again with the next pass, twice.
_MAX_FAILURES = 3
# Connections for batches of one host that are lost, one after the other, without a batch.
MAX_FRUITLESS = 5
# A roster is small, and so is all that agents say but batches: errors are cut to 1 MiB.
MAX_MESSAGE_BYTES = 16 << 20

Post = Callable[[Callable[[], None]], None]
Take = Callable[[Sequence[zmq.Frame]], None]


class Link:
    """A host that is dialled by name, and again whenever the connection is lost.

    Args:
        name: Host name or address.
        post: Runs a function in the pump's thread.
    """

    def __init__(
        self,
        context: ZmqContext,
        keys: Keys,
        *,
        name: str,
        port: int,
        now: float,
        post: Post,
    ) -> None:
        self.name = name
        self.port = port
        self.connection = Connection(context, keys, now=now, max_message_bytes=MAX_MESSAGE_BYTES)
        self.is_closed = False
        self._address = ""
        self._is_resolving = False
        self._attempt = -1
        self._post = post

    @property
    def is_up(self) -> bool:
        """Is true while the connection is up."""
        return self.connection.is_up

    @property
    def down_since(self) -> float:
        """Is the time when it was last lost, or made; monotonic seconds."""
        return self.connection.down_since

    def has_input(self) -> bool:
        """Tells whether there is input that no descriptor tells of; ask before you wait."""
        # At every turn of the pump.
        connection = self.connection
        return not (connection.is_drained and connection.is_quiet) and connection.has_input()

    def has_events(self, ready: Container[int]) -> bool:
        """Tells whether `watch` has something to read.

        Args:
            ready: Descriptors that can be read from.
        """
        return self.connection.has_events(ready)

    def wait_seconds(self, now: float) -> float | None:
        """Returns the seconds until `tick` has something to do; None: nothing before an event."""
        connection = self.connection
        if connection.is_open or self._is_resolving:
            return None
        return max(0.0, connection.dial_at - now)

    def tick(self, now: float) -> None:
        """Dials, if it is time to."""
        connection = self.connection
        if self.is_closed or connection.is_open or self._is_resolving or now < connection.dial_at:
            return
        self._attempt += 1
        if is_address(self.name):
            self._dial(resolve(self.name))
            return
        self._is_resolving = True
        threading.Thread(target=self._resolve, args=(now,), name="resolve", daemon=True).start()

    def watch(self, now: float) -> bool:
        """Reads the monitor; True if `is_up` changed."""
        return self.connection.watch(now)

    def lose(self, now: float, *, pause_seconds: float = 0.0) -> None:
        """Closes the lost connection, to be dialled again after `pause_seconds` at least."""
        self.connection.lose(now)
        self.connection.dial_at = max(self.connection.dial_at, now + pause_seconds)

    def send(self, message: Message, frame: bytes | memoryview | None = None) -> None:
        """Queues a message."""
        self.connection.send(message, frame)

    def receive(self, take: Take, *, ready: Container[int]) -> None:
        """Hands over what has come.

        Args:
            ready: Descriptors that can be read from.
        """
        self.connection.receive(take, at_most=_AT_MOST, ready=ready)

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes it for good; may be called twice."""
        self.is_closed = True
        self.connection.close(linger_seconds=linger_seconds)

    def _resolve(self, now: float) -> None:
        address: str | None
        try:
            address = resolve(self.name, attempt=self._attempt)
        except OSError:
            address = None

        def use() -> None:
            self._is_resolving = False
            if self.is_closed:
                return
            if address is None:
                self.connection.lose(now)
            else:
                self._dial(address)

        self._post(use)

    def _dial(self, address: str) -> None:
        self._address = address
        self.connection.dial(f"tcp://{address}:{self.port}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A host's failure: it could make nothing for a session; others perhaps can.

    Attributes:
        pass_number: Of the pass in which it failed.
        times: How often it has failed by now, on this connection.
    """

    pass_number: int
    times: int
    reason: str
    error: BaseException

    def may_try_again(self, pass_number: int) -> bool:
        """Tells whether it is asked again, in that pass: memory may be free by then."""
        return pass_number > self.pass_number and self.times < _MAX_FAILURES


class AgentLink(Link):
    """The link to the agent of one data host: what is said, and, next to it, batches.

    Attributes:
        member: The host, as the roster has it.
        opened: Session to the digest of the spec that it was last opened with, on this connection.
        ready: Sessions that may ask.
        failed: Sessions for which it could make nothing, on this connection.
        receiver: Of its batches; None: there is none yet.
        has_asked: For a batch, on this connection.
        is_leaving: The agent drains.
        is_listed: The roster has it.
    """

    def __init__(
        self,
        context: ZmqContext,
        keys: Keys,
        member: Member,
        *,
        now: float,
        post: Post,
    ) -> None:
        super().__init__(context, keys, name=member.address, port=member.port, now=now, post=post)
        self.member = member
        self.opened: dict[str, str] = {}
        self.ready: set[str] = set()
        self.failed: dict[str, Failure] = {}
        self.receiver: BatchReceiver | None = None
        self.has_asked = False
        self.is_leaving = False
        self.is_listed = True
        self._is_attaching = False
        self._fruitless = 0

    @property
    def address(self) -> str:
        """Is the address that it was last dialled at, for the connection for batches."""
        return self._address.strip("[]")

    def attach(self) -> None:
        """Asks for a ticket for the connection for batches, unless there is one, or one comes."""
        if self.receiver is None and not self._is_attaching:
            self._is_attaching = True
            self.send(Attach(host=self.member.host))

    def receive_by(self, receiver: BatchReceiver) -> None:
        """Takes the receiver that the ticket is for: batches come by it from now on."""
        if self.receiver is not None:
            self.receiver.close()
        self.receiver, self._is_attaching = receiver, False

    def lose_batches(self, now: float) -> FeedLostError | None:
        """Notes that the connection for batches has ended by itself: all is dialled again.

        Returns:
            The reason to give the host up instead, with the connection left as it is: no batch has
            come over several such connections.
        """
        receiver = self.receiver
        assert receiver is not None
        self.receiver = None
        if receiver.num_taken:
            self._fruitless = 0
        elif self.has_asked or not receiver.has_been_up:
            self._fruitless += 1
        if self._fruitless < MAX_FRUITLESS:
            pause = min(FIRST_PAUSE_SECONDS * 2**self._fruitless, MAX_PAUSE_SECONDS)
            self.lose(now, pause_seconds=pause)
            return None
        return FeedLostError(
            f"data host {self.member.host} delivers no batches: its connection for them was lost "
            f"{self._fruitless} times in a row, at last {receiver.words()}",
            where=f"port {self.member.batch_port} of {self.name}",
            fix="let trainers reach that port of the data hosts (feed.port + 1), too; "
            "see the log of the host",
        )

    def close_session(self, session: str) -> None:
        """Notes that the session has to be opened again before batches are asked for."""
        self.opened.pop(session, None)
        self.ready.discard(session)

    def fail(self, session: str, *, pass_number: int, reason: str, error: BaseException) -> None:
        """Notes that the host can make nothing for it."""
        self.close_session(session)
        times = self.failed[session].times + 1 if session in self.failed else 1
        self.failed[session] = Failure(pass_number, times, reason, error)

    def has_failed(self, session: str) -> bool:
        """Tells whether the host can make nothing for it, and was not asked again."""
        return session in self.failed and session not in self.opened

    def may_open(self, session: str, *, pass_number: int) -> bool:
        """Tells whether the host is to be asked, or told of a new pass."""
        return not self.has_failed(session) or self.failed[session].may_try_again(pass_number)

    def forget(self, session: str) -> None:
        """Forgets a session that has ended."""
        self.close_session(session)
        self.failed.pop(session, None)

    def forget_all(self) -> None:
        """Forgets all that was said over the connection, which is lost."""
        self.opened.clear()
        self.ready.clear()
        self.failed.clear()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.has_asked = self._is_attaching = False
        self.is_leaving = False

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes it for good; may be called twice."""
        if self.receiver is not None:
            self.receiver.close()
        super().close(linger_seconds=linger_seconds)

    def ship(self, spec: PackedSpec) -> None:
        """Queues a spec, piece by piece, without a copy."""
        whole = memoryview(spec.data)
        for offset in range(0, len(whole), PIECE_BYTES):
            self.send(Ship(spec=spec.digest, offset=offset), whole[offset : offset + PIECE_BYTES])

    def is_same(self, member: Member) -> bool:
        """Tells whether `member` is the very agent that this link goes to."""
        mine = self.member
        return (mine.incarnation, mine.address, mine.port, mine.batch_port) == (
            member.incarnation,
            member.address,
            member.port,
            member.batch_port,
        )
