"""What the agent sends: answers and batches to sessions, and what of it is still under way.

A batch is sealed from the worker's shared memory as it is sent; its slot is free after that.
"""

import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from stoker.feed import messages
from stoker.feed.batch_port import OutgoingBatch
from stoker.feed.jobs import Result
from stoker.feed.requests import Request, Session


class Transport(Protocol):
    """Where answers go; the frames' memory is the transport's until it lets go of it."""

    def send(self, identity: bytes, frames: Sequence[bytes | memoryview]) -> bool:
        """Sends to a peer, without blocking; False if it is not connected."""
        ...

    def ticket_for(self, identity: bytes) -> messages.Ticket:
        """A ticket for a peer's connection for batches."""
        ...

    def send_batch(self, identity: bytes, batch: OutgoingBatch) -> bool:
        """Queues a batch for a peer; False if it has no connection for batches, nor a ticket."""
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
        self.sent_bytes = 0
        self.batch_bytes: int | None = None
        self.num_sent = 0
        # Appended to in threads of the transport's.
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

    def give_ticket(self, identity: bytes) -> None:
        """Lets a peer open its connection for batches."""
        self.answer(identity, self._transport.ticket_for(identity))

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
        payload, result.payload = result.payload, None
        nbytes = 0 if payload is None else payload.nbytes
        if payload is not None:
            self.batch_bytes = nbytes
        self.sent_bytes += nbytes

        def done() -> None:
            result.release()
            self._let_go.append(nbytes)
            self._transport.wake()

        batch = OutgoingBatch(messages.pack(made), payload, (made.session, made.pass_number), done)
        del payload
        if self._transport.send_batch(session.identity, batch):
            self._mark(session, is_sent=True)
            return
        batch.payload = None
        done()
        dropped = messages.Dropped(
            session=made.session,
            pass_number=made.pass_number,
            number=made.number,
            reason="there is no connection for batches",
            generation=made.generation,
        )
        self.send(session, dropped)

    def _mark(self, session: Session, *, is_sent: bool) -> None:
        if is_sent:
            session.unreachable_since = None
        elif session.unreachable_since is None:
            session.unreachable_since = time.monotonic()
