"""Links from a trainer to the coordinator and to the agent of each data host."""

import contextlib
import ipaddress
import threading
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from stoker.errors import FeedLostError
from stoker.feed.trainer.control_connection import (
    FIRST_PAUSE_SECONDS,
    MAX_PAUSE_SECONDS,
    Connection,
    ZmqContext,
    resolve,
)
from stoker.feed.trainer.receiver import BatchReceiver
from stoker.feed.wire.crypto import Keys
from stoker.feed.wire.dataset import PackedSpec
from stoker.feed.wire.protocol import MAX_CHANGES_BYTES, PIECE_BYTES, Attach, Member, Ship

# A host that cannot make a session's batches is asked again with the next epoch, twice.
_MAX_FAILURES = 3
# Connections for batches of one host that may be lost in a row without a batch.
MAX_FRUITLESS = 5
# Rosters are small, and so are messages of agents (errors are cut to 1 MiB), but for what a stream
# has changed.
MAX_MESSAGE_BYTES = MAX_CHANGES_BYTES + (16 << 20)

Post = Callable[[Callable[[], None]], None]


class Link(Connection):
    """Control connection to a host, dialled by name again whenever it is lost."""

    def __init__(
        self, context: ZmqContext, keys: Keys, *, name: str, port: int, now: float, post: Post
    ) -> None:
        super().__init__(context, keys, now=now, max_message_bytes=MAX_MESSAGE_BYTES)
        self.name = name
        self.port = port
        self.is_closed = False
        self._address = ""
        self._is_resolving = False
        # Counts the dials: each takes the next of a name's addresses.
        self._attempt = -1
        self._post = post

    def wait_seconds(self, now: float) -> float | None:
        return None if self.is_open or self._is_resolving else max(0.0, self.dial_at - now)

    def tick(self, now: float) -> None:
        if self.is_closed or self.is_open or self._is_resolving or now < self.dial_at:
            return
        self._attempt += 1
        try:
            ipaddress.ip_address(self.name)
        except ValueError:
            # In a thread: the resolver may take seconds, and would delay all other hosts.
            self._is_resolving = True
            threading.Thread(
                target=self._resolve, args=(now,), name="stoker-resolve", daemon=True
            ).start()
        else:
            self._dial(resolve(self.name))

    def close_for_good(self, *, linger_seconds: float = 0.0) -> None:
        self.is_closed = True
        self.close(linger_seconds=linger_seconds)

    def _resolve(self, now: float) -> None:
        address: str | None = None
        with contextlib.suppress(OSError):
            address = resolve(self.name, attempt=self._attempt)

        def use() -> None:
            self._is_resolving = False
            if self.is_closed:
                return
            if address is None:
                self.mark_lost(now)
            else:
                self._dial(address)

        # A link belongs to the I/O thread.
        self._post(use)

    def _dial(self, address: str) -> None:
        self._address = address
        self.dial(f"tcp://{address}:{self.port}")


@dataclass(frozen=True, slots=True)
class Failure:
    """A host's failure to serve one session: the last epoch, and how often on this connection."""

    epoch_id: int
    times: int
    reason: str
    error: BaseException

    def may_try_again(self, epoch_id: int) -> bool:
        # Memory may be free by then.
        return epoch_id > self.epoch_id and self.times < _MAX_FAILURES


class AgentLink(Link):
    """Link to the agent of one data host: its control connection and its batches."""

    def __init__(
        self, context: ZmqContext, keys: Keys, member: Member, *, now: float, post: Post
    ) -> None:
        super().__init__(context, keys, name=member.address, port=member.port, now=now, post=post)
        self.member = member
        # On this connection: the spec and seeding that a session was last opened with; sessions
        # that may ask; and those for which it could make nothing.
        self.opened: dict[str, tuple[str, str]] = {}
        self.ready: set[str] = set()
        self.failed: dict[str, Failure] = {}
        self.receiver: BatchReceiver | None = None
        self.has_asked = self.is_draining = self._is_attaching = False
        # By the roster.
        self.is_listed = True
        self._fruitless = 0

    @property
    def address(self) -> str:
        return self._address.strip("[]")

    def attach(self) -> None:
        """Asks for a ticket for the connection for batches, unless there is one or one comes."""
        if self.receiver is None and not self._is_attaching:
            self._is_attaching = True
            self.send(Attach(host=self.member.host))

    def receive_by(self, receiver: BatchReceiver) -> None:
        if self.receiver is not None:
            self.receiver.close()
        self.receiver = receiver
        self._is_attaching = False

    def mark_batches_lost(self, now: float) -> FeedLostError | None:
        """Has both connections dialled again after the one for batches was lost.

        If no batch came over several connections, returns the error to exclude the host with.
        """
        receiver = self.receiver
        assert receiver is not None
        self.receiver = None
        if receiver.num_taken:
            self._fruitless = 0
        # One that was up without a request proves nothing: a long validation, say.
        elif self.has_asked or not receiver.has_been_up:
            self._fruitless += 1
        if self._fruitless < MAX_FRUITLESS:
            # As control connections back off: doubled each time.
            pause = min(FIRST_PAUSE_SECONDS * 2**self._fruitless, MAX_PAUSE_SECONDS)
            self.mark_lost(now, pause_seconds=pause)
            return None
        return FeedLostError(
            f"data host {self.member.host} delivers no batches: its connection for them was lost "
            f"{self._fruitless} times in a row, at last {receiver.words()}",
            where=f"port {self.member.batch_port} of {self.name}",
            fix="open port feed.port + 1 of data hosts to the trainers; if it is open, large "
            "packets may be lost (the network's MTU); see the log of the host",
        )

    def close_session(self, session: str) -> None:
        self.opened.pop(session, None)
        self.ready.discard(session)

    def mark_failed(
        self, session: str, *, epoch_id: int, reason: str, error: BaseException
    ) -> None:
        """Notes that the host cannot serve a session; it may be asked again in a later epoch.

        Args:
            session: By name.
            epoch_id: In which it failed.
            reason: In words.
            error: For the script, if no other host serves it.
        """
        self.close_session(session)
        times = self.failed[session].times + 1 if session in self.failed else 1
        self.failed[session] = Failure(epoch_id, times, reason, error)

    def has_failed(self, session: str) -> bool:
        # And was not asked again.
        return session in self.failed and session not in self.opened

    def may_open(self, session: str, *, epoch_id: int) -> bool:
        return not self.has_failed(session) or self.failed[session].may_try_again(epoch_id)

    def discard(self, session: str) -> None:
        self.close_session(session)
        self.failed.pop(session, None)

    def discard_all(self) -> None:
        self.opened.clear()
        self.ready.clear()
        self.failed.clear()
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None
        self.has_asked = self._is_attaching = self.is_draining = False

    def close_for_good(self, *, linger_seconds: float = 0.0) -> None:
        if self.receiver is not None:
            self.receiver.close()
        super().close_for_good(linger_seconds=linger_seconds)

    def ship(self, spec: PackedSpec) -> None:
        # All at once: zmq holds the memory, and sends a piece while the next is encrypted.
        whole = memoryview(spec.data)
        for offset in range(0, len(whole), PIECE_BYTES):
            piece = Ship(spec=spec.digest, offset=offset, spec_bytes=len(whole))
            self.send(piece, whole[offset : offset + PIECE_BYTES])

    def is_same(self, member: Member) -> bool:
        # A restarted host has another incarnation at the same address, and no state.
        fields = attrgetter("incarnation", "address", "port", "batch_port")
        return bool(fields(self.member) == fields(member))
