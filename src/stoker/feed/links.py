"""A trainer's links: to the coordinator, and to the agent of each data host."""

import math
import secrets
import threading
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import zmq

from stoker.feed.arrival import PIECE_BYTES
from stoker.feed.connection import Connection, ZmqContext, is_address, resolve
from stoker.feed.messages import BatchKey, Member, Message, Ship
from stoker.feed.sealing import Unsealer
from stoker.feed.security import Keys
from stoker.feed.shipping import PackedSpec

# Messages taken from one socket before the others have their turn.
_AT_MOST = 16
# And bytes: who waits for the first batch is told when all that was taken together is there, and,
# where it is to be pinned, copied. Each turn of the pump costs as much as one or two batches.
_AT_MOST_BYTES = 4 << 20
# A host that cannot make a session's batches is asked again with the next pass, twice.
_MAX_FAILURES = 3
# A roster is small.
MAX_ROSTER_BYTES = 16 << 20

Post = Callable[[Callable[[], None]], None]
Take = Callable[[Sequence[zmq.Frame]], None]


class Link:
    """A host that is dialled by name, and again whenever the connection is lost.

    Args:
        name: Host name or address.
        ports: One connection each; the first is encrypted, a second one, for batches, is not. That
            is dialled when the first is up: whoever answers there has the run's token.
        post: Runs a function in the pump's thread.
        max_message_bytes: A longer message cuts the connection.
        max_batch_bytes: As that, of the connection for batches.
        io_thread: Number of the context's I/O thread that reads it.

    Attributes:
        batch_identity: Routing id of the connection for batches; empty: there is none.
        lacks_batches: Nobody answered at the port for batches: they come encrypted, with the rest.
    """

    def __init__(
        self,
        context: ZmqContext,
        keys: Keys,
        *,
        name: str,
        ports: Sequence[int],
        now: float,
        post: Post,
        max_message_bytes: int,
        max_batch_bytes: int = 0,
        io_thread: int = 0,
    ) -> None:
        self.name = name
        self.ports = tuple(ports)
        self.io_thread = io_thread
        self.connections = [
            Connection(
                context,
                keys if number == 0 else None,
                now=now,
                max_message_bytes=max_batch_bytes if number else max_message_bytes,
                io_thread=io_thread,
            )
            for number in range(len(ports))
        ]
        self.batch_identity = b""
        self.lacks_batches = False
        self.is_closed = False
        self._address = ""
        self._is_resolving = False
        self._attempt = -1
        self._post = post

    @property
    def is_up(self) -> bool:
        """Whether all its connections are; nobody answers at some ports for batches."""
        return self.connections[0].is_up and (
            len(self.connections) == 1 or self.connections[1].is_up or self.lacks_batches
        )

    @property
    def down_since(self) -> float:
        """When it was last lost, or made; monotonic seconds."""
        return self.connections[0].down_since

    def has_input(self) -> bool:
        """Whether there is something to read that no descriptor tells of; ask before you wait."""
        # At every turn of the pump: a generator would take longer than the rest.
        for connection in self.connections:
            if not (connection.is_drained and connection.is_quiet) and connection.has_input():
                return True
        return False

    def has_events(self, ready: Container[int]) -> bool:
        """Whether `watch` has something to read.

        Args:
            ready: Descriptors that can be read from.
        """
        # As above.
        for connection in self.connections:  # noqa: SIM110
            if connection.has_events(ready):
                return True
        return False

    def wait_seconds(self, now: float) -> float | None:
        """Seconds until `tick` has something to do; None: nothing before an event."""
        connection = self.connections[0]
        if connection.is_open or self._is_resolving:
            return None
        return max(0.0, connection.dial_at - now)

    def tick(self, now: float) -> None:
        """Dials, if it is time to."""
        connection = self.connections[0]
        if self.is_closed or connection.is_open or self._is_resolving or now < connection.dial_at:
            return
        self._attempt += 1
        if is_address(self.name):
            self._dial(resolve(self.name))
            return
        self._is_resolving = True
        threading.Thread(target=self._resolve, args=(now,), name="resolve", daemon=True).start()

    def watch(self, now: float) -> bool:
        """Reads the monitors; True if `is_up` changed. One lost connection takes the other."""
        was_up = self.is_up
        control, *batches = self.connections
        was_open = control.is_open
        control.watch(now)
        if was_open and not control.is_open:
            self.lose(now)
        elif control.is_up and batches and not self.lacks_batches:
            self._watch_batches(batches[0], now)
        return self.is_up != was_up

    def _watch_batches(self, batches: Connection, now: float) -> None:
        was_open, was_up = batches.is_open, batches.is_up
        if not was_open:
            # A new identity each time: the agent must not take it for the one that was lost.
            self.batch_identity = b"t" + secrets.token_bytes(15)
            batches.dial(f"tcp://{self._address}:{self.ports[1]}", identity=self.batch_identity)
            return
        batches.watch(now)
        if batches.is_open:
            return
        if was_up:
            self.lose(now)
        else:
            self.lacks_batches, self.batch_identity = True, b""

    def lose(self, now: float, *, pause_seconds: float = 0.0) -> None:
        """All connections are lost, and dialled again after a pause, at least that one."""
        for connection in self.connections:
            connection.lose(now)
            connection.dial_at = max(connection.dial_at, now + pause_seconds)
        self.lacks_batches, self.batch_identity = False, b""

    def send(self, message: Message, frame: bytes | memoryview | None = None) -> None:
        """Queues a message on the encrypted connection."""
        self.connections[0].send(message, frame)

    def receive(
        self, take: Take, take_batch: Take, *, ready: Container[int], is_last: bool
    ) -> None:
        """Hands over what has come.

        Args:
            ready: Descriptors that can be read from.
            is_last: There may be no next time.
        """
        for number, connection in enumerate(self.connections):
            connection.receive(
                take_batch if number else take,
                at_most=_AT_MOST,
                at_most_bytes=math.inf if is_last else _AT_MOST_BYTES,
                ready=ready,
            )

    def close(self, *, linger_seconds: float = 0.0) -> None:
        """Closes it for good; may be called twice."""
        self.is_closed = True
        for connection in self.connections:
            connection.close(linger_seconds=linger_seconds)

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
                self.connections[0].lose(now)
            else:
                self._dial(address)

        self._post(use)

    def _dial(self, address: str) -> None:
        self._address = address
        self.connections[0].dial(f"tcp://{address}:{self.ports[0]}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A host could make nothing for a session; others perhaps can.

    Attributes:
        pass_number: Of the pass in which it failed.
        times: How often it has failed by now, on this connection.
    """

    pass_number: int
    times: int
    reason: str
    error: BaseException

    def may_try_again(self, pass_number: int) -> bool:
        """Whether it is asked again, in that pass: memory may be free by then."""
        return pass_number > self.pass_number and self.times < _MAX_FAILURES


class AgentLink(Link):
    """The link to the agent of one data host.

    Attributes:
        member: The host, as the roster has it.
        opened: Session to the digest of the spec that it was last opened with, on this connection.
        ready: Sessions that may ask.
        failed: Sessions for which it could make nothing, on this connection.
        unsealers: For the keys that it seals batches with, by their numbers.
        is_sealed: It has told a key on this connection.
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
        max_message_bytes: int,
        max_batch_bytes: int,
        io_thread: int,
    ) -> None:
        super().__init__(
            context,
            keys,
            name=member.address,
            ports=[member.port, member.batch_port] if member.batch_port else [member.port],
            now=now,
            post=post,
            max_message_bytes=max_message_bytes,
            max_batch_bytes=max_batch_bytes,
            io_thread=io_thread,
        )
        self.member = member
        self.opened: dict[str, str] = {}
        self.ready: set[str] = set()
        self.failed: dict[str, Failure] = {}
        self.unsealers: dict[int, Unsealer] = {}
        self.is_sealed = False
        self._key_of: dict[str, int] = {}
        self.is_leaving = False
        self.is_listed = True

    def close_session(self, session: str) -> None:
        """It has to be opened again, to be asked."""
        self.opened.pop(session, None)
        self.ready.discard(session)

    def fail(self, session: str, *, pass_number: int, reason: str, error: BaseException) -> None:
        """The host can make nothing for it."""
        self.close_session(session)
        times = self.failed[session].times + 1 if session in self.failed else 1
        self.failed[session] = Failure(pass_number, times, reason, error)

    def has_failed(self, session: str) -> bool:
        """Whether the host can make nothing for it, and was not asked again."""
        return session in self.failed and session not in self.opened

    def may_open(self, session: str, *, pass_number: int) -> bool:
        """Whether the host is to be asked, or told of a new pass."""
        return not self.has_failed(session) or self.failed[session].may_try_again(pass_number)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self.close_session(session)
        self.failed.pop(session, None)
        self.forget_key(session)

    def forget_all(self) -> None:
        """The connection is lost, and with it all that was said over it."""
        self.opened.clear()
        self.ready.clear()
        self.failed.clear()
        self.forget_keys()
        self.is_leaving = False

    def unseal(self, session: str, key: BatchKey | None) -> None:
        """Batches of a session come sealed with `key`: another one than before, or the same."""
        if key is None or key.number in self.unsealers:
            return
        self.forget_key(session)
        self.is_sealed = True
        self.unsealers[key.number], self._key_of[session] = Unsealer(key), key.number

    def forget_key(self, session: str) -> None:
        """The session has ended, or has another key."""
        self.unsealers.pop(self._key_of.pop(session, -1), None)

    def forget_keys(self) -> None:
        """The connection is lost."""
        self.is_sealed = False
        self.unsealers.clear()
        self._key_of.clear()

    def ship(self, spec: PackedSpec) -> None:
        """Queues a spec, piece by piece, without a copy."""
        whole = memoryview(spec.data)
        for offset in range(0, len(whole), PIECE_BYTES):
            self.send(Ship(spec=spec.digest, offset=offset), whole[offset : offset + PIECE_BYTES])

    def is_same(self, member: Member) -> bool:
        """Whether `member` is the very agent that this link goes to."""
        mine = self.member
        return (mine.incarnation, mine.address, mine.port, mine.batch_port) == (
            member.incarnation,
            member.address,
            member.port,
            member.batch_port,
        )
