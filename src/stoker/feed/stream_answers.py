"""What the pump does with an answer of a stream, from wherever it comes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stoker.errors import FeedLostError
from stoker.feed import messages as m
from stoker.feed.endings import advice_on
from stoker.feed.jobs import Result
from stoker.feed.schedule import Peer
from stoker.feed.session import Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.streams import MAX_LOSSES_IN_A_ROW, Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamAnswer:
    """An answer.

    Attributes:
        kind: A batch or its exception; the end of the stream; the death of its process; an error
            after which the stream cannot go on.
        reason: How the process died.
        state: Random states that the stream began the pass with; at its end, begins the next with.
    """

    kind: Literal["batch", "end", "lost", "final"]
    pass_number: int
    number: int
    generation: int
    digest: int = 0
    frame_bytes: int = 0
    reason: str = ""
    state: bytes = b""


def in_message(message: m.Message, frame_bytes: int) -> StreamAnswer | None:
    """The answer that an agent sent; None: it is not of a stream, or none of its process."""
    match message:
        case m.Made(generation=generation) if generation:
            return StreamAnswer(
                kind="batch",
                pass_number=message.pass_number,
                number=message.number,
                generation=generation,
                digest=message.digest,
                state=message.state,
                frame_bytes=frame_bytes,
            )
        case m.Raised(generation=generation) if generation:
            return StreamAnswer(
                kind="final" if message.is_final else "batch",
                pass_number=message.pass_number,
                number=message.number,
                generation=generation,
                digest=message.digest,
                state=message.state,
            )
        case m.Ended():
            return StreamAnswer(
                kind="end",
                state=message.state,
                pass_number=message.pass_number,
                number=message.number,
                generation=message.generation,
            )
        case m.Dropped(generation=generation, is_lost=True) if generation:
            return StreamAnswer(
                kind="lost",
                pass_number=message.pass_number,
                number=message.number,
                generation=generation,
                reason=message.reason,
            )
    return None


def in_result(result: Result, frame_bytes: int) -> StreamAnswer:
    """The answer of a local stream."""
    pass_number, number, generation = result.job.key
    assert isinstance(pass_number, int)
    assert isinstance(number, int)
    assert isinstance(generation, int)
    kind: Literal["batch", "end", "lost", "final"] = "batch"
    if result.is_lost:
        kind = "lost"
    elif result.is_end:
        kind = "end"
    elif result.is_final:
        kind = "final"
    return StreamAnswer(
        kind=kind,
        pass_number=pass_number,
        number=number,
        generation=generation,
        digest=result.digest,
        state=result.state,
        frame_bytes=frame_bytes,
        reason=result.summary,
    )


def settle(
    shared: Shared,
    session: Session,
    peer: Peer,
    answer: StreamAnswer,
    make: Callable[[Session], Outcome],
) -> bool | None:
    """Delivers what `make` gives, unless the answer is late, a duplicate, or not wanted any more.

    Gives False for a duplicate, None where there is no batch.
    """
    with shared.lock:
        streams = session.schedule
        is_ours = session.pass_number == answer.pass_number and session.is_busy
        if not is_ours or not isinstance(streams, Streams):
            return None
        if answer.kind == "lost":
            lose(session, streams, peer, answer)
            return None
        if answer.kind == "end":
            streams.ended(peer, answer.number, generation=answer.generation, state=answer.state)
            session.stir(is_head=True)
            return None
        is_wanted = streams.arrived(
            peer,
            answer.number,
            generation=answer.generation,
            digest=answer.digest,
            state=answer.state,
            frame_bytes=answer.frame_bytes,
        )
    if not is_wanted:
        return False
    outcome = make(session)
    with shared.lock:
        if session.pass_number != answer.pass_number or not session.is_busy:
            return None
        if answer.kind == "final" and outcome.error is not None:
            session.fail(outcome.error)
        else:
            session.deliver(answer.number, outcome)
    return True


def lose(session: Session, streams: Streams, peer: Peer, answer: StreamAnswer) -> None:
    """A stream's process is gone: its shard begins again; under the lock."""
    number = answer.number
    if streams.dropped(peer, number, generation=answer.generation):
        shard = streams.start_of(number).shard
        session.fail(
            FeedLostError(
                f"shard {shard} of the iterable dataset cannot be made: {answer.reason}, "
                f"{MAX_LOSSES_IN_A_ROW} times at the same place",
                where=f"epoch {session.epoch}, batch {number}",
                fix=advice_on(answer.reason),
            )
        )
