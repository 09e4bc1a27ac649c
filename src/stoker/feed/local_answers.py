"""What the pump gets of local workers: batches and errors, to sessions."""

import time
import weakref

from stoker.feed import stream_answers
from stoker.feed.jobs import Result
from stoker.feed.landing import Bytes
from stoker.feed.observe import Observer
from stoker.feed.placing import Placing, error_in
from stoker.feed.schedule import Schedule
from stoker.feed.session import LOCAL, Outcome, Session
from stoker.feed.shared import Shared
from stoker.feed.streams import Streams


class LocalAnswers:
    """As `Answers`, for the workers of this process."""

    def __init__(self, shared: Shared, observer: Observer, placing: Placing) -> None:
        self._shared = shared
        self._observer = observer
        self._placing = placing

    def take(self, session: Session, fileno: int) -> None:
        """What came from a local worker."""
        with self._shared.lock:
            local = session.local
        # Without the lock: a worker that died is waited for, and another one forked in its place.
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
        payload, size = _payload_of(result)
        answer = stream_answers.in_result(result, size)
        is_wanted = stream_answers.settle(
            self._shared,
            session,
            LOCAL,
            answer,
            lambda session: self._outcome(session, result, payload),
        )
        if is_wanted is not None and result.error is None:
            with self._shared.lock:
                self._observer.came(None, result, frame_bytes=size, is_wanted=is_wanted)

    def _settle_local(self, session: Session, schedule: Schedule, result: Result) -> None:
        pass_number, number = result.job.key
        assert isinstance(pass_number, int)
        assert isinstance(number, int)
        payload, size = _payload_of(result)
        with self._shared.lock:
            if session.pass_number != pass_number or not session.is_busy:
                return
            if result.is_lost and not schedule.dropped(LOCAL, number):
                return
            is_wanted = schedule.arrived(LOCAL, number, frame_bytes=size, now=time.monotonic())
            if result.error is None:
                self._observer.came(None, result, frame_bytes=size, is_wanted=is_wanted)
        if not is_wanted:
            return
        outcome = self._outcome(session, result, payload)
        with self._shared.lock:
            if session.pass_number == pass_number and session.is_busy:
                session.deliver(number, outcome)

    def _outcome(self, session: Session, result: Result, payload: Bytes | None) -> Outcome:
        if result.error is not None:
            return Outcome(error=error_in(result.error))
        if payload is not None and session.pins_on is not None:
            payload = self._placing.landed(payload, session.pins_on)
        return self._placing.decoded(result.tree or b"", payload, allow_pickle=True)


def _payload_of(result: Result) -> tuple[Bytes | None, int]:
    """The payload, whose last view gives the worker its memory back, and its size."""
    payload, result.payload = result.payload, None
    if payload is None:
        return None, 0
    weakref.finalize(payload, result.release).atexit = False
    return payload, payload.nbytes
