"""What the pump gets of agents: batches, errors and grants, to sessions.

A sealed batch is decrypted to where it will live: pinned, where the loader pins. One that is not
sealed becomes views of the memory that libzmq received it into, which is free again with the last
of them; where it is to be pinned, it is copied. All that is off the thread that trains, with the
interpreter's lock released.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import zmq

from stoker.errors import FeedLostError, ProtocolError
from stoker.feed import messages as m
from stoker.feed import stream_answers
from stoker.feed.connection import MAX_PAUSE_SECONDS
from stoker.feed.endings import advice_on
from stoker.feed.landing import Bytes
from stoker.feed.links import AgentLink
from stoker.feed.observe import Observer
from stoker.feed.placing import Placing, error_in, may_stay
from stoker.feed.schedule import Schedule
from stoker.feed.sealing import key_number, payload_bytes
from stoker.feed.security import MAC_BYTES, Keys, verify
from stoker.feed.session import Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.stream_answers import StreamAnswer
from stoker.feed.streams import Streams

_NOTHING: Bytes = np.empty(0, dtype=np.uint8)


class Answers:
    """The pump's ear; the lock is held for the books only, never while memory is copied.

    Args:
        takes_plain: Batches on connections of their own are signed, not sealed.
    """

    def __init__(
        self,
        shared: Shared,
        keys: Keys,
        observer: Observer,
        placing: Placing,
        *,
        takes_plain: bool,
    ) -> None:
        self._shared = shared
        self._observer = observer
        self._keys = keys
        self._takes_plain = takes_plain
        self._placing = placing
        self._unpack_agent = m.Unpacker(m.FromAgent)

    def take(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """A message on the encrypted connection; one that is none costs the connection."""
        try:
            message = self._unpack_agent(frames[0].buffer)
            frame = frames[1] if len(frames) > 1 else None
            self._handle(link, message, frame)
        except ProtocolError as err:
            self._refuse(link, err)

    def take_batch(self, link: AgentLink, frames: Sequence[zmq.Frame]) -> None:
        """A batch on the connection that encrypts nothing; as `take`, one that is none."""
        try:
            if len(frames) > 2:
                raise ProtocolError(f"a batch of {len(frames)} frames")
            payload = frames[1] if len(frames) == 2 else None
            if self._takes_plain and not link.is_sealed:
                self._take_signed(link, frames[0], payload)
            else:
                self._take_sealed(link, frames[0].buffer, payload)
        except ProtocolError as err:
            self._refuse(link, err)

    def _take_sealed(self, link: AgentLink, header: memoryview, frame: zmq.Frame | None) -> None:
        unsealer = link.unsealers.get(key_number(header))
        if unsealer is None:
            # Of a session that has ended, or was opened anew.
            return
        nbytes = None if frame is None else payload_bytes(frame.buffer)
        made = self._unpack_agent(unsealer.header(header, nbytes=nbytes))
        if not isinstance(made, m.Made):
            raise ProtocolError("a sealed message that is no batch")
        session = self._shared.sessions.get(made.session)
        if session is None:
            return
        payload = _NOTHING
        if frame is not None and nbytes is not None:
            payload = self._placing.room(nbytes, session.pins_on)
            unsealer.payload(frame.buffer, payload)
        self._take_made(link, made, payload, is_placed=True, allow_pickle=True)

    def _take_signed(self, link: AgentLink, header: zmq.Frame, frame: zmq.Frame | None) -> None:
        signed = header.bytes
        packed = signed[MAC_BYTES:]
        if not verify(self._keys.mac_key, packed, signed[:MAC_BYTES]):
            raise ProtocolError("a batch's header is not what was signed")
        made = self._unpack_agent(packed)
        if not isinstance(made, m.Made):
            raise ProtocolError("a signed message that is no batch")
        self._take_made(link, made, _bytes_in(frame), is_placed=False, allow_pickle=False)

    def _refuse(self, link: AgentLink, err: ProtocolError) -> None:
        self._shared.log.event("message_refused", agent=link.member.host, reason=err.what)
        link.lose(time.monotonic())
        forget_peer(self._shared, link)

    def _handle(self, link: AgentLink, message: m.Message, frame: zmq.Frame | None) -> None:
        if isinstance(message, m.Made):
            self._take_made(link, message, _bytes_in(frame), is_placed=False, allow_pickle=True)
            return
        answer = stream_answers.in_message(message, 0)
        if answer is not None:
            assert isinstance(message, m.Raised | m.Ended | m.Dropped)
            self._take_of_stream(link, message, answer, lambda _: Outcome(error=_error_of(frame)))
            return
        match message:
            case m.Raised():
                error = _error_of(frame)
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
                self._take_failed(link, message, _error_of(frame))
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

    def _take_made(
        self, link: AgentLink, made: m.Made, source: Bytes, *, is_placed: bool, allow_pickle: bool
    ) -> None:
        """A batch.

        Args:
            is_placed: `source` is where it will live.
        """
        if made.generation:
            answer = stream_answers.in_message(made, source.nbytes)
            assert answer is not None

            def make(session: Session) -> Outcome:
                payload = source if is_placed else self._placing.kept(source, session.pins_on)
                return self._placing.decoded(made.tree, payload, allow_pickle=allow_pickle)

            self._take_of_stream(link, made, answer, make)
            return
        host = link.member.host
        # No lock: whether it is still wanted is looked at under it.
        session = self._shared.sessions.get(made.session)
        if session is None:
            return
        if is_placed or (session.pins_on is None and may_stay(source)):
            # Views cost less than to ask whether it is wanted before they are made.
            outcome = self._placing.decoded(made.tree, source, allow_pickle=allow_pickle)
            is_wanted = self._arrived(session, host, made, source.nbytes, outcome)
        else:
            is_wanted = self._arrived(session, host, made, source.nbytes)
            if is_wanted:
                payload = self._placing.landed(source, session.pins_on)
                outcome = self._placing.decoded(made.tree, payload, allow_pickle=allow_pickle)
                self._deliver(session, made, outcome)
        if is_wanted is not None:
            self._observer.came(host, made, frame_bytes=source.nbytes, is_wanted=is_wanted)

    def _take_of_stream(
        self,
        link: AgentLink,
        message: m.Made | m.Raised | m.Ended | m.Dropped,
        answer: StreamAnswer,
        make: Callable[[Session], Outcome],
    ) -> None:
        if answer.kind == "lost":
            self._shared.log.event(
                "stream_lost", agent=link.member.host, batch=answer.number, reason=answer.reason
            )
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
        if session is None:
            return
        is_wanted = stream_answers.settle(self._shared, session, link.member.host, answer, make)
        if is_wanted is not None and isinstance(message, m.Made):
            self._observer.came(
                link.member.host, message, frame_bytes=answer.frame_bytes, is_wanted=is_wanted
            )

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
            if session.pass_number != message.pass_number or not session.is_busy:
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
            if session.pass_number == message.pass_number and session.is_busy:
                session.deliver(message.number, outcome)

    def _take_error(
        self, link: AgentLink, message: m.Raised | m.Dropped, error: BaseException
    ) -> None:
        """In place of a batch."""
        # As above.
        session = self._shared.sessions.get(message.session)
        if session is not None and self._arrived(session, link.member.host, message, 0):
            self._deliver(session, message, Outcome(error=error))

    def _take_dropped(self, link: AgentLink, message: m.Dropped) -> None:
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or session.pass_number != message.pass_number or not session.is_busy:
                return
            if link.has_failed(session.name):
                # No batch is to blame where there are no processes any more.
                return
            if isinstance(session.schedule, Schedule) and (message.is_lost or link.is_leaving):
                is_hopeless = session.schedule.dropped(link.member.host, message.number)
            else:
                # It has forgotten the session: this process was silent for too long.
                is_hopeless = False
                session.schedule.lost(link.member.host)
                link.close_session(session.name)
                session.has_news = True
        self._shared.log.event(
            "batch_dropped", agent=link.member.host, batch=message.number, reason=message.reason
        )
        if is_hopeless:
            error = FeedLostError(
                f"batch {message.number} cannot be made: {message.reason}",
                where=f"epoch {session.epoch}, last tried on host {link.member.host}",
                fix=advice_on(message.reason),
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
        link.unseal(message.session, message.batch_key)
        link.opened[message.session] = message.spec
        link.ready.add(message.session)
        self._grant(link, message.session, message.credits)
        self._shared.log.event(
            "agent_ready", agent=link.member.host, workers=message.workers, credits=message.credits
        )

    def _take_failed(self, link: AgentLink, message: m.Failed, error: BaseException) -> None:
        """A host cannot use the spec: nobody can, or it alone, and others go on."""
        host = link.member.host
        with self._shared.lock:
            session = self._shared.sessions.get(message.session)
            if session is None or not _has_spec(session, message.spec):
                return
            if not message.is_of_host:
                session.fail(error)
                return
            link.fail(
                session.name, pass_number=session.pass_number, reason=message.reason, error=error
            )
            session.schedule.lost(host)
        self._shared.log.event(
            "host_makes_nothing",
            agent=host,
            text=f"data host {host} makes no batches in this pass: {message.reason}",
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


def forget_peer(shared: Shared, link: AgentLink) -> None:
    """The connection is lost: what was asked for over it goes elsewhere, sessions are closed."""
    link.forget_all()
    with shared.lock:
        for session in shared.sessions.values():
            session.schedule.lost(link.member.host)


def _bytes_in(frame: zmq.Frame | None) -> Bytes:
    return _NOTHING if frame is None else np.frombuffer(frame.buffer, dtype=np.uint8)


def _error_of(frame: zmq.Frame | None) -> Exception:
    return ProtocolError("an error without its frame") if frame is None else error_in(frame.buffer)


def _has_spec(session: Session, digest: str) -> bool:
    return session.spec is not None and session.spec.digest == digest
