"""What the agent sends: answers and batches to sessions, and what of it is still under way.

A batch is sealed into other memory, and its slot is free at once. Where it is not sealed, it goes
from the worker's shared memory without a copy; the slot is free again when the transport has let go
of it.
"""

import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from stoker.feed import messages
from stoker.feed.jobs import Result
from stoker.feed.landing import Bytes, Landing
from stoker.feed.requests import Request, Session
from stoker.feed.sealing import MAX_BYTES, Sealer


class Transport(Protocol):
    """Where answers go; the frames' memory is the transport's until it lets go of it."""

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends to a peer, without blocking; False if it is not connected."""
        ...

    def send_batch(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """The same on the connection for batches, which encrypts nothing."""
        ...

    def sign(self, packed: bytes) -> bytes:
        """A message that is not sealed, behind its MAC."""
        ...

    def wake(self) -> None:
        """Has the agent's loop turn once more; called from any thread."""
        ...


class Outbox:
    """Sends; used by the agent's thread.

    Attributes:
        sent_bytes: Bytes of batches that the transport still holds, as of the last `settle`.
        batch_bytes: Of the last batch; None: there was none.
        num_sent: Batches sent so far, over all sessions.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._landing = Landing()
        self.sent_bytes = 0
        self.batch_bytes: int | None = None
        self.num_sent = 0
        # Appended to in a thread of zmq's.
        self._let_go: deque[int] = deque()

    def settle(self) -> None:
        """Counts what the transport has let go of."""
        while self._let_go:
            self.sent_bytes -= self._let_go.popleft()

    def send(self, session: Session, message: messages.Message, frame: bytes = b"") -> None:
        """Sends to a session; notes it where that cannot be reached."""
        frames = [messages.pack(message), frame] if frame else [messages.pack(message)]
        self._mark(session, is_sent=self._transport.send(session.identity, frames))

    def answer(self, identity: bytes, message: messages.Message) -> None:
        """Sends to a peer that has no session."""
        self._transport.send(identity, [messages.pack(message)])

    def refuse(self, identity: bytes, message: messages.Make, reason: str) -> None:
        """A batch that cannot be made here now."""
        dropped = messages.Dropped(
            session=message.session,
            pass_number=message.pass_number,
            number=message.number,
            reason=reason,
            generation=message.stream.generation if message.stream else 0,
        )
        self.answer(identity, dropped)

    def result(self, request: Request, result: Result) -> None:
        """What became of a request."""
        session = request.session
        name, pass_number, number = session.name, request.pass_number, request.number
        if result.is_lost:
            dropped = messages.Dropped(
                session=name,
                pass_number=pass_number,
                number=number,
                reason=result.summary,
                is_lost=True,
                generation=request.generation,
            )
            self.send(session, dropped)
        elif result.is_end:
            ended = messages.Ended(
                session=name,
                pass_number=pass_number,
                number=number,
                generation=request.generation,
                state=result.state,
            )
            self.send(session, ended)
        elif result.tree is None:
            raised = messages.Raised(
                session=name,
                pass_number=pass_number,
                number=number,
                summary=result.summary,
                generation=request.generation,
                digest=result.digest,
                state=result.state,
                is_final=result.is_final,
            )
            self.send(session, raised, result.error or b"")
        else:
            made = messages.Made(
                session=name,
                pass_number=pass_number,
                number=number,
                tree=result.tree,
                cpu_seconds=result.cpu_seconds,
                wall_seconds=result.wall_seconds,
                worker=result.worker,
                generation=request.generation,
                digest=result.digest,
                state=result.state,
            )
            self._send_batch(session, made, result)

    def _send_batch(self, session: Session, made: messages.Made, result: Result) -> None:
        self.num_sent += 1
        packed = messages.pack(made)
        payload, result.payload = result.payload, None
        if payload is not None:
            self.batch_bytes = payload.nbytes
        # Where the connection for batches is not there (yet), the other one is.
        if session.sealer is not None and self._send_sealed(
            session, session.sealer, packed, payload
        ):
            del payload
            result.release()
            return
        frames: list[bytes | memoryview] = [packed]
        if payload is not None:
            self.sent_bytes += payload.nbytes
            # Runs where zmq lets go of the memory, in a thread of its own.
            done = weakref.finalize(payload, self._free, result, payload.nbytes)
            done.atexit = False
            frames.append(payload.data)
        if session.takes_plain and session.batch_identity and not result.has_pickle:
            signed = [self._transport.sign(packed), *frames[1:]]
            if self._transport.send_batch(session.batch_identity, signed):
                return
        self._mark(session, is_sent=self._transport.send(session.identity, frames))

    def _send_sealed(
        self, session: Session, sealer: Sealer, packed: bytes, payload: Bytes | None
    ) -> bool:
        """Whether it was sent: then the worker's memory is needed no more."""
        nbytes = None if payload is None else payload.nbytes
        if max(len(packed), nbytes or 0) > MAX_BYTES:
            return False
        frames: list[bytes | memoryview] = [sealer.header(packed, nbytes=nbytes)]
        if payload is not None:
            sealed = sealer.payload(payload.data, self._landing)
            frames.append(sealed.data)
        if not self._transport.send_batch(session.batch_identity, frames):
            return False
        sealer.sent()
        if payload is not None:
            self.sent_bytes += sealed.nbytes
            # As above.
            weakref.finalize(sealed, self._let_go_of, sealed.nbytes).atexit = False
        return True

    def _let_go_of(self, nbytes: int) -> None:
        self._let_go.append(nbytes)
        self._transport.wake()

    def _free(self, result: Result, nbytes: int) -> None:
        self._let_go.append(nbytes)
        result.release()

    def _mark(self, session: Session, *, is_sent: bool) -> None:
        if is_sent:
            session.unreachable_since = None
        elif session.unreachable_since is None:
            session.unreachable_since = time.monotonic()
