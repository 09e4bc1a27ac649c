"""What the pump gets: batches, errors and grants, from agents and local workers, to sessions.

A batch becomes views of the memory that libzmq received it into, which is free again with the last
of them. Where it is to be pinned, it is copied, off the thread that trains and with the
interpreter's lock released.
"""

import time
import weakref
from collections.abc import Sequence

import numpy as np
import torch
import zmq

from stoker.errors import FeedError, FeedLostError, ProtocolError
from stoker.feed import messages as m
from stoker.feed import stream_answers
from stoker.feed.connection import MAX_PAUSE_SECONDS
from stoker.feed.jobs import Result
from stoker.feed.landing import SMALL_BYTES, Bytes, Landing
from stoker.feed.links import AgentLink
from stoker.feed.observe import Observer
from stoker.feed.plans import Plans
from stoker.feed.schedule import Schedule
from stoker.feed.security import MAC_BYTES, Keys, verify
from stoker.feed.session import LOCAL, Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.shipping import unpack_error
from stoker.feed.stream_answers import StreamAnswer
from stoker.feed.streams import Streams

_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class Answers:
    """The pump's ear; the lock is held for the books only, never while memory is copied."""

    def __init__(self, shared: Shared, keys: Keys, observer: Observer) -> None:
        self._shared = shared
        self._observer = observer
        self._keys = keys
        self._landing = Landing()
        self._plans = Plans()
        self._pins_on: int | None = None
        self._unpack_agent = m.Unpacker(m.FromAgent)

    def take(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """A message on the encrypted connection; one that is none costs the connection."""
        try:
            message = self._unpack_agent(frames[0].buffer)
            frame = frames[1] if len(frames) > 1 else None
            self._handle(link, message, frame, is_encrypted=True)
        except ProtocolError as err:
            self._shared.log.event("message_refused", agent=link.member.host, reason=err.what)
            link.lose(time.monotonic())
            forget_peer(self._shared, link)

    def take_plain(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """A batch that is not encrypted: a message behind its MAC, the payload if there is one."""
        signed = frames[0].bytes
        packed = signed[MAC_BYTES:]
        if len(frames) > 2 or not verify(self._keys.mac_key, packed, signed[:MAC_BYTES]):
            self._shared.log.event("plain_batch_refused", agent=link.member.host)
            return
        message = self._unpack_agent(packed)
        if isinstance(message, m.Made):
            self._handle(link, message, frames[1] if len(frames) == 2 else None, is_encrypted=False)

    def _handle(
        self, link: AgentLink, message: m.Message, frame: zmq.Frame | None, *, is_encrypted: bool
    ) -> None:
        if isinstance(message, m.Made) and not message.generation:
            self._take_batch(link, message, frame, is_encrypted=is_encrypted)
            return
        answer = stream_answers.in_message(message, 0 if frame is None else len(frame.buffer))
        if answer is not None:
            self._take_of_stream(link, message, answer, frame, is_encrypted=is_encrypted)
            return
        match message:
            case m.Raised():
                error = _error_in(None if frame is None else frame.buffer)
                self._take_error(link, message, error)
            case m.Dropped():
                self._take_dropped(link, message)
            case m.Need():
                self._ship(link, message.spec)
            case m.Ready():
                self._take_ready(link, message)
            case m.Credits():
                self._grant(link, message.session, message.credits)
            case m.Failed():
                error = _error_in(None if frame is None else frame.buffer)
                with self._shared.lock:
                    session = self._shared.sessions.get(message.session)
                    if session is not None and _has_spec(session, message.spec):
                        session.fail(error)
            case m.Leaving():
                link.is_leaving = True
                with self._shared.lock:
                    for session in self._shared.sessions.values():
                        session.schedule.leave(link.member.host)
            case m.WrongHost():
                # The name's answer is older than the host: whoever has the address now is another.
                self._shared.log.event(
                    "agent_is_another_host", agent=link.member.host, found=message.host
                )
                link.lose(time.monotonic(), pause_seconds=MAX_PAUSE_SECONDS)
                forget_peer(self._shared, link)

    def _take_batch(
        self, link: AgentLink, made: m.Made, frame: zmq.Frame | None, *, is_encrypted: bool
    ) -> None:
        source = _NOTHING if frame is None else np.frombuffer(frame.buffer, dtype=np.uint8)
        host = link.member.host
        # No lock: whether it is still wanted is looked at under it.
        session = self._shared.sessions.get(made.session)
        if session is None:
            return
        if session.pins_on is None and _may_stay(source):
            # Views cost less than to ask whether it is wanted before they are made.
            outcome = self._decoded(made.tree, source, allow_pickle=is_encrypted)
            is_wanted = self._arrived(session, host, made, source.nbytes, outcome)
        else:
            is_wanted = self._arrived(session, host, made, source.nbytes)
            if is_wanted:
                payload = self._landed(source, session.pins_on)
                outcome = self._decoded(made.tree, payload, allow_pickle=is_encrypted)
                self._deliver(session, made, outcome)
        if is_wanted is not None:
            self._observer.came(
                host,
                worker=made.worker,
                frame_bytes=source.nbytes,
                cpu_seconds=made.cpu_seconds,
                busy_seconds=made.wall_seconds,
                is_wanted=is_wanted,
            )

    def _take_of_stream(
        self,
        link: AgentLink,
        message: m.Message,
        answer: StreamAnswer,
        frame: zmq.Frame | None,
        *,
        is_encrypted: bool,
    ) -> None:
        assert isinstance(message, m.Made | m.Raised | m.Ended | m.Dropped)
        if answer.kind == "lost":
            self._shared.log.event(
                "stream_lost", agent=link.member.host, batch=answer.number, reason=answer.reason
            )

        def make(session: Session) -> Outcome:
            if not isinstance(message, m.Made):
                return Outcome(error=_error_in(None if frame is None else frame.buffer))
            source = _NOTHING if frame is None else np.frombuffer(frame.buffer, dtype=np.uint8)
            payload = self._kept(source, session.pins_on)
            return self._decoded(message.tree, payload, allow_pickle=is_encrypted)

        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
        if session is None:
            return
        is_wanted = stream_answers.settle(self._shared, session, link.member.host, answer, make)
        if is_wanted is not None and isinstance(message, m.Made):
            self._observer.came(
                link.member.host,
                worker=message.worker,
                frame_bytes=answer.frame_bytes,
                cpu_seconds=message.cpu_seconds,
                busy_seconds=message.wall_seconds,
                is_wanted=is_wanted,
            )

    def _kept(self, source: Bytes, pins_on: int | None) -> Bytes:
        """Where the batch will live: where it was received, if that may be."""
        may_stay = pins_on is None and _may_stay(source)
        return source if may_stay else self._landed(source, pins_on)

    def _landed(self, source: Bytes, pins_on: int | None) -> Bytes:
        """`source` copied, once, to where the batch will live."""
        if pins_on is not None and self._pins_on != pins_on:
            # The device is the thread's; without this, every rank would open device 0.
            torch.accelerator.set_device_index(pins_on)
            self._pins_on = pins_on
        payload = self._landing.take(source.nbytes, is_pinned=pins_on is not None)
        np.copyto(payload, source)
        return payload

    def _arrived(
        self,
        session: Session,
        host: str,
        message: m.Made | m.Raised | m.Dropped,
        frame_bytes: int,
        outcome: Outcome | None = None,
    ) -> bool | None:
        """Whether to make the batch and `_deliver` it: it is not late, and is wanted.

        Gives False for a duplicate, None for what is of another pass. With an `outcome`, that is
        delivered.
        """
        now = time.monotonic()
        with self._shared.lock:
            if session.epoch != message.epoch or not session.is_busy:
                return None
            if isinstance(session.schedule, Streams):
                raise ProtocolError("an answer without its stream")
            number = message.number
            is_wanted = session.schedule.arrived(host, number, frame_bytes=frame_bytes, now=now)
            if is_wanted and outcome is not None:
                session.deliver(number, outcome)
            return is_wanted

    def _deliver(
        self, session: Session, message: m.Made | m.Raised | m.Dropped, outcome: Outcome
    ) -> None:
        with self._shared.lock:
            if session.epoch == message.epoch and session.is_busy:
                session.deliver(message.number, outcome)

    def _take_error(
        self, link: AgentLink, message: m.Raised | m.Dropped, error: BaseException
    ) -> None:
        """In place of a batch."""
        # As above.
        session = self._shared.sessions.get(message.session)
        if session is not None and self._arrived(session, link.member.host, message, 0):
            self._deliver(session, message, Outcome(error=error))

    def _decoded(self, tree: bytes, payload: Bytes | None, *, allow_pickle: bool) -> Outcome:
        try:
            return Outcome(self._plans.decode(tree, payload, allow_pickle=allow_pickle))
        except FeedError as err:
            return Outcome(error=err)

    def _take_dropped(self, link: AgentLink, message: m.Dropped) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.epoch != message.epoch or not session.is_busy:
                return
            if isinstance(session.schedule, Schedule) and (message.is_lost or link.is_leaving):
                is_hopeless = session.schedule.dropped(link.member.host, message.number)
            else:
                # It has forgotten the session: this process was silent for too long.
                is_hopeless = False
                session.schedule.lost(link.member.host)
                link.opened.pop(session.name, None)
                link.ready.discard(session.name)
                session.has_news = True
        self._shared.log.event(
            "batch_dropped", agent=link.member.host, batch=message.number, reason=message.reason
        )
        if is_hopeless:
            error = FeedLostError(
                f"batch {message.number} cannot be made: {message.reason}",
                where=f"epoch {message.epoch}, last tried on host {link.member.host}",
                fix="see that host's log; give it more memory, or fewer workers",
            )
            self._take_error(link, message, error)

    def _take_ready(self, link: AgentLink, message: m.Ready) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.spec is None or session.spec.digest != message.spec:
                return
            spec = session.spec
        self._shared.values_there.take(message.spec, link.member.host, message.module_values)
        self._shared.values_there.compare(spec.digest, spec.living_code())
        link.ready.add(message.session)
        self._grant(link, message.session, message.credits)
        self._shared.log.event(
            "agent_ready", agent=link.member.host, workers=message.workers, credits=message.credits
        )

    def _grant(self, link: AgentLink, name: str, credits: int) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(name)
            if session is None or name not in link.ready or link.is_leaving:
                return
            session.schedule.grant(link.member.host, credits)
            session.had_peers = True
            session.stir()

    def _ship(self, link: AgentLink, digest: str) -> None:
        with self._shared.lock:
            specs = [s.spec for s in self._shared.sessions.values() if _has_spec(s, digest)]
        for spec in specs[:1]:
            if spec is not None:
                link.ship(spec)

    def take_local(self, session: Session, fileno: int) -> None:
        """What came from a local worker."""
        with self._shared.lock:
            local = session.local
            results = [] if local is None else local.handle(fileno)
        for result in results:
            if isinstance(session.schedule, Streams):
                self._settle_local_stream(session, result)
            else:
                self._settle_local(session, session.schedule, result)
        with self._shared.lock:
            if local is not None and local is session.local:
                if local.credits:
                    session.schedule.grant(LOCAL, local.credits)
                else:
                    session.schedule.lost(LOCAL)
                session.stir()

    def _settle_local_stream(self, session: Session, result: Result) -> None:
        payload, result.payload = result.payload, None
        if payload is not None:
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes

        def make(session: Session) -> Outcome:
            if result.error is not None:
                return Outcome(error=_error_in(result.error))
            landed = payload
            if landed is not None and session.pins_on is not None:
                landed = self._landed(landed, session.pins_on)
            return self._decoded(result.tree or b"", landed, allow_pickle=True)

        answer = stream_answers.in_result(result, size)
        is_wanted = stream_answers.settle(self._shared, session, LOCAL, answer, make)
        if is_wanted is not None and result.error is None:
            self._observer.came(
                None,
                worker=result.worker,
                frame_bytes=size,
                cpu_seconds=result.cpu_seconds,
                busy_seconds=result.wall_seconds,
                is_wanted=is_wanted,
            )

    def _settle_local(self, session: Session, schedule: Schedule, result: Result) -> None:
        epoch, number = result.job.key
        assert isinstance(epoch, int)
        assert isinstance(number, int)
        payload, result.payload = result.payload, None
        if payload is not None:
            weakref.finalize(payload, result.release).atexit = False
        size = 0 if payload is None else payload.nbytes
        with self._shared.lock:
            if session.epoch != epoch or not session.is_busy:
                return
            if result.is_lost and not schedule.dropped(LOCAL, number):
                return
            is_wanted = schedule.arrived(LOCAL, number, frame_bytes=size, now=time.monotonic())
        if result.error is None:
            self._observer.came(
                None,
                worker=result.worker,
                frame_bytes=size,
                cpu_seconds=result.cpu_seconds,
                busy_seconds=result.wall_seconds,
                is_wanted=is_wanted,
            )
        if not is_wanted:
            return
        if result.error is not None:
            outcome = Outcome(error=_error_in(result.error))
        else:
            if payload is not None and session.pins_on is not None:
                payload = self._landed(payload, session.pins_on)
            outcome = self._decoded(result.tree or b"", payload, allow_pickle=True)
        with self._shared.lock:
            if session.epoch == epoch and session.is_busy:
                session.deliver(number, outcome)


def forget_peer(shared: Shared, link: AgentLink) -> None:
    """The connection is lost: what was asked for over it goes elsewhere, sessions are closed."""
    link.opened.clear()
    link.ready.clear()
    link.is_leaving = False
    with shared.lock:
        for session in shared.sessions.values():
            session.schedule.lost(link.member.host)


def _may_stay(source: Bytes) -> bool:
    """Whether the batch may live where it was received: the largest numbers lie well there."""
    # A fifth of the time that its address takes.
    return (
        source.nbytes >= SMALL_BYTES
        and np.frombuffer(source, dtype=np.uint64, count=1).flags.aligned
    )


def _error_in(data: bytes | memoryview | None) -> Exception:
    if data is None:
        return ProtocolError("an error without its frame")
    try:
        return unpack_error(data)
    except FeedError as err:
        return err


def _has_spec(session: Session, digest: str) -> bool:
    return session.spec is not None and session.spec.digest == digest
